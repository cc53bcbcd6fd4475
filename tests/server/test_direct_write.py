"""Tokens written past the layers of ASGI: the same bytes as through them."""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from serve_fakes import events
from serving import listening, real_engine, started

from octavo.engine.outputs import Delta
from octavo.engine.stream import joined
from octavo.server import generation
from octavo.server.connection import Connection
from octavo.server.streaming import Writer
from patience import Leave, until


async def texts(url: str, body: dict[str, Any], path: str) -> dict[int, str]:
    """Each choice's text, of a stream."""
    async with httpx.AsyncClient(base_url=url) as client:
        response = await client.post(path, json=body | {"stream": True})
        assert response.status_code == 200, response.text
    found: dict[int, str] = {}
    for event in events(response.text):
        for choice in event["choices"]:
            said = choice.get("text") or choice.get("delta", {}).get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + said
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "one"}),
        ("/v1/completions", {"prompt": ["one", "two"], "n": 2}),
        ("/v1/completions", {"prompt": "one", "logprobs": 2}),
        ("/v1/completions", {"prompt": "one", "stop": ["zq"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}]}),
    ],
)
async def test_the_same_as_through_the_layers(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = body | {"max_tokens": 60, "seed": 3}
    written = 0
    write, ready = Writer.write_now, Writer.ready
    rng = random.Random(0)

    def counted(self: Writer, data: bytes) -> None:
        nonlocal written
        written += 1
        write(self, data)

    monkeypatch.setattr(Writer, "write_now", counted)
    engine, executor = real_engine()
    async with started(engine), listening(engine) as url, Leave(executor).one_by_one():
        direct = await texts(url, asked, path)
        assert written > 0
        mixed = property(lambda self: rng.random() < 0.5 and ready.__get__(self))
        monkeypatch.setattr(Writer, "ready", mixed)
        assert await texts(url, asked, path) == direct
        monkeypatch.setattr(Writer, "ready", property(lambda self: False))
        before = written
        assert await texts(url, asked, path) == direct
        assert written == before


async def test_a_whole_answer_is_the_stream_and_no_token_is_copied_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {"prompt": ["one", "two"], "n": 2, "logprobs": 1, "max_tokens": 60}
    asked |= {"seed": 3, "ignore_eos": True}
    copied = 0

    def counted(deltas: list[Delta]) -> list[Delta]:
        nonlocal copied
        copied += sum(len(delta.token_ids) for delta in deltas)
        return joined(deltas)

    monkeypatch.setattr(generation, "joined", counted)
    monkeypatch.setattr(generation, "_MOST_PARTS", 7)
    engine, executor = real_engine()
    async with started(engine), listening(engine) as url, Leave(executor).one_by_one():
        streamed = await texts(url, asked, "/v1/completions")
        async with httpx.AsyncClient(base_url=url) as client:
            answer = (await client.post("/v1/completions", json=asked)).json()
    assert {each["index"]: each["text"] for each in answer["choices"]} == streamed
    assert 4 * 40 < copied <= 4 * 60
    assert [len(each["logprobs"]["tokens"]) for each in answer["choices"]] == [60] * 4


async def test_a_slow_reader_gets_all_of_it(connections: list[Connection]) -> None:
    """More than the sockets hold, to a client that does not read until it has all been made."""
    engine, _ = real_engine(max_model_len=512)
    async with started(engine), listening(engine) as url:
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        content = json.dumps(
            {
                "prompt": ["a", "b", "c", "d"] * 4,
                "n": 2,
                "max_tokens": 400,
                "ignore_eos": True,
                "stream": True,
                "logprobs": 5,
                "return_token_ids": True,
            }
        ).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        )
        await until(lambda: engine.stats().steps and not engine.stats().running, "the end")
        await until(lambda: connections[0].flow.write_paused, "more than is taken")
        answer = await reader.read()
        writer.close()
    pieces = []
    at = answer.index(b"\r\n\r\n") + 4
    while True:  # chunks, as RFC 9112, section 7.1, has them
        end = answer.index(b"\r\n", at)
        size = int(answer[at:end], 16)
        if not size:
            break
        pieces.append(answer[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    counts: dict[int, int] = {}
    for event in events(b"".join(pieces).decode()):
        for choice in event["choices"]:
            counts[choice["index"]] = counts.get(choice["index"], 0) + len(choice["token_ids"])
    assert counts == dict.fromkeys(range(32), 400)


async def test_an_old_client_that_takes_no_chunks() -> None:
    engine, _ = real_engine()
    async with started(engine), listening(engine) as url:
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        content = b'{"prompt": "a", "max_tokens": 20, "ignore_eos": true, "stream": true}'
        writer.write(
            b"POST /v1/completions HTTP/1.0\r\nhost: x\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        )
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"data: [DONE]" in answer
    assert b'"finish_reason":"length"' in answer
