"""Clients that leave, that read slowly, or that say nothing: over real connections."""

import asyncio
import json
import threading
from urllib.parse import urlsplit

import httpx
import pytest
from serve_fakes import ByteTokenizer, FakeEngine, events
from serving import listening
from test_connection import heads_in

from octavo.server.connection import Connection
from patience import PATIENCE, until


async def post(url: str, path: str = "/v1/completions", **body: object) -> asyncio.StreamWriter:
    """A request on a connection of its own, which the test may then drop."""
    _, writer = await connect(url, path, **body)
    return writer


async def connect(
    url: str, path: str = "/v1/completions", **body: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 12)
    content = json.dumps({"prompt": "a", "max_tokens": 400} | body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n".encode()
        + content
    )
    await writer.drain()
    return reader, writer


async def counted_as_left(client: httpx.AsyncClient, requests: int) -> str:
    """The metrics, once they say so."""
    text = ""

    async def counted() -> bool:
        nonlocal text
        text = (await client.get("/metrics")).text
        return f'status="499"}} {requests}.0' in text

    await until(counted, f"the loss of {requests}")
    return text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 5])
async def test_killed_in_every_state(engine: FakeEngine, streamed: bool, steps: int) -> None:
    """Waiting (before the first byte of an answer) and generating."""
    engine.auto = False
    async with listening(engine) as url:
        for body in ({}, {"n": 2}, {"prompt": ["a", "b"]}):
            writer = await post(url, stream=streamed, **body)
            wanted = 2 if "prompt" in body else 1
            await until(lambda wanted=wanted: len(engine.streams) == wanted)
            for _ in range(steps):
                engine.step()
                await asyncio.sleep(0.001)
            writer.transport.abort()
            await until(lambda: not engine.streams)
            assert len(engine.aborted) == wanted
            engine.aborted.clear()


@pytest.mark.parametrize("cut", [0, 1, 60, -40, -1])
async def test_offer_of_another_protocol_is_passed_over(
    engine: FakeEngine, cut: int, received: bytearray
) -> None:
    """Java's HTTP client offers HTTP/2 with each request; the body must still be read, wherever
    the segments end, and so must the next request.
    """
    content = b'{"prompt": "a", "max_tokens": 1}'
    offer = (
        b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: x\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
    )
    async with listening(engine) as url:
        place = urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        end = cut % len(offer) if cut else len(offer)
        writer.write(offer[:end])
        await until(lambda: len(received) == end, "the first segment")
        writer.write(offer[end:])
        async with asyncio.timeout(PATIENCE):
            first = await reader.readuntil(b"}}")
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            second = await reader.read()
        writer.close()
    assert first.startswith(b"HTTP/1.1 200 OK")
    assert b'"completion_tokens":1' in first
    assert b"HTTP/1.1 200 OK" in second
    assert len(engine.submitted) == 1


async def test_killed_while_sending_the_body(engine: FakeEngine, received: bytearray) -> None:
    async with listening(engine) as url:
        place = urlsplit(url)
        _, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 1000\r\n\r\n{"prompt": "a"'
        )
        await until(lambda: received.endswith(b'"a"'), "what it has sent")
        writer.transport.abort()
        async with httpx.AsyncClient(base_url=url) as client:
            await counted_as_left(client, 1)
            assert (await client.get("/health")).status_code == 200
    assert engine.submitted == []


async def test_aborted_requests_are_counted_once(engine: FakeEngine) -> None:
    engine.auto = False
    async with listening(engine) as url, httpx.AsyncClient(base_url=url) as client:
        for _ in range(5):
            writer = await post(url, stream=True)
            await until(lambda: len(engine.streams) == 1)
            engine.step()
            engine.step()
            writer.transport.abort()
            await until(lambda: not engine.streams)
        text = await counted_as_left(client, 5)
        model = 'engine="0",model_name="tiny"'
        for line in (
            'request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 5.0',
            'http_requests_total{handler="/v1/completions",method="POST",status="499"} 5.0',
            f"request_generation_tokens_sum{{{model}}} 10.0",
            f"generation_tokens_total{{{model}}} 10.0",
            f"request_prompt_tokens_sum{{{model}}} 5.0",
            f"e2e_request_latency_seconds_count{{{model}}} 5.0",
            f"num_requests_running{{{model}}} 0.0",
        ):
            assert f"octavo:{line}" in text


async def test_a_slow_reader_stalls_nobody_and_is_dropped(engine: FakeEngine) -> None:
    """Its answer, far larger than the socket's buffers, is not read; a neighbour's is."""
    engine.max_model_len = 1 << 20
    engine.text = "x" * 1000
    async with (
        listening(engine, stream_write_timeout=0.5) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        reader, writer = await connect(url, stream=True, max_tokens=1 << 19, logprobs=20)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: len(engine.streams) == 1)
        response = await client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 50, "stream": True}
        )
        assert len(events(response.text)) == 50
        await until(lambda: len(engine.aborted) == 1)
        writer.transport.abort()


async def test_keep_alive_comments(engine: FakeEngine) -> None:
    engine.auto = False
    async with (
        listening(engine, sse_keep_alive_interval=0.01) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream(
            "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 1}
        ) as response,
    ):
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        engine.step()
        rest = [line async for line in lines]
        assert sum(line.startswith("data: ") for line in rest) == 2
        assert rest[-2:] == ["data: [DONE]", ""]


async def test_a_long_prompt_does_not_stall_the_loop(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one request's text is being tokenized, others come and go."""
    going, slow_ones = threading.Event(), []
    encode = ByteTokenizer.encode

    def slow(self: ByteTokenizer, text: str, **kwargs: bool) -> list[int]:
        if text == "slow":
            slow_ones.append(text)
            going.wait(PATIENCE)
        return encode(self, text, **kwargs)

    monkeypatch.setattr(ByteTokenizer, "encode", slow)
    async with listening(engine) as url, httpx.AsyncClient(base_url=url) as client:
        first = asyncio.create_task(client.post("/v1/completions", json={"prompt": "slow"}))
        killed = await post(url, prompt="slow")
        await until(lambda: len(slow_ones) == 2)
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        killed.transport.abort()
        await counted_as_left(client, 1)
        going.set()
        assert (await first).status_code == 200
    assert len(engine.submitted) == 2  # not the one whose client had left


async def test_answers_that_come_through_a_closing_connection(engine: FakeEngine) -> None:
    """A body far too long is refused although the client is still sending it."""
    async with listening(engine) as url, httpx.AsyncClient(base_url=url) as client:
        for _ in range(3):
            response = await client.post("/v1/completions", json={"prompt": "x" * 10_000_000})
            assert response.status_code == 413


async def raw(url: str, sent: bytes) -> bytes:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(sent)
    answer = await reader.read()
    writer.close()
    return answer


async def test_what_is_no_http(engine: FakeEngine) -> None:
    async with listening(engine) as url:
        for sent in (b"\0\1\2\3\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01 tls"):
            head, _, body = (await raw(url, sent)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert json.loads(body)["error"]["code"] == 400


@pytest.mark.parametrize("end", [b"", b"\r\nx: y"])
async def test_a_head_without_end(engine: FakeEngine, end: bytes) -> None:
    async with listening(engine) as url:
        sent = b"GET /health HTTP/1.1\r\nhost: x" + (b"\r\na: " + b"x" * 1000) * 100 + end
        head, _, body = (await raw(url, sent)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["error"]["code"] == 431


async def test_a_head_that_takes_too_long(
    engine: FakeEngine, connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is waited for no longer; but the first byte of the next request may take its time."""
    async with listening(engine) as url, httpx.AsyncClient(base_url=url) as client:
        heads_in(0.05, monkeypatch)
        assert (await client.get("/health")).status_code == 200
        for sent in (b"", b"GET /health HT"):
            assert await raw(url, sent) == b""
        assert (await client.get("/health")).status_code == 200
    assert len(connections) == 3  # the first has been kept


async def test_below_a_root_path(engine: FakeEngine) -> None:
    """A proxy has stripped /llm; or it has not."""
    settings = {"root_path": "/llm", "api_key": ("key",)}
    async with listening(engine, **settings) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        headers = {"authorization": "Bearer key"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        metrics = await client.get("/metrics", headers=headers)
        assert 'handler="/v1/models",method="GET",status="401"' in metrics.text
