"""Connections as clients misuse them, over raw sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import pytest
from serve_fakes import FakeEngine
from serving import listening, real_engine, started

from octavo.server.clients import Clients
from octavo.server.connection import Connection
from patience import PATIENCE, Leave, until


@pytest.fixture
def little_room(connections: list[Connection], monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The system keeps little of what the server sends and nobody reads. The server's ends of all
    connections.
    """
    made = Connection.connection_made

    def connection_made(self: Connection, transport: Any) -> None:
        made(self, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    return connections


@pytest.fixture(autouse=True)
def _peers_are_closed() -> Iterator[None]:
    yield
    while Peer.opened:
        Peer.opened.pop().close()


def heads_in(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is how long a head may take once the first has come, in whatever time."""
    complete = Connection.on_headers_complete

    def on_headers_complete(self: Connection) -> None:
        monkeypatch.setattr("octavo.server.connection._HEAD_TIMEOUT", seconds)
        complete(self)

    monkeypatch.setattr(Connection, "on_headers_complete", on_headers_complete)


class Peer:
    """The client's end of a connection, with small buffers; closed with the test."""

    opened: ClassVar[list[socket.socket]] = []

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.opened.append(connection)

    @staticmethod
    async def of(url: str, sent: bytes = b"") -> Peer:
        place = urlsplit(url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (place.hostname, place.port))
        peer = Peer(connection)
        await peer.send(sent)
        return peer

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def send_until_reset(self, data: bytes) -> None:
        """At most 99 MB."""
        with suppress(ConnectionError):
            for _ in range(99_000_000 // len(data)):
                await self.send(data)
            raise AssertionError("there is no end")

    async def read(self, most: int = 1 << 16) -> bytes:
        """b"" at the end of the connection."""
        async with asyncio.timeout(PATIENCE):
            return await asyncio.get_running_loop().sock_recv(self.socket, most)

    async def read_all(self) -> bytes:
        """To the end; raises ConnectionResetError where that is a reset."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    async def read_until(self, end: bytes) -> bytes:
        data = b""
        while not data.endswith(end):
            part = await self.read()
            assert part, data
            data += part
        return data

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    @property
    def was_reset(self) -> bool:
        """Whether the other side has reset the connection, whatever is still to be read."""
        return self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


def completion(content: bytes) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(content), content)
    )


LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_who_takes_nothing_is_gone(
    engine: FakeEngine, stream: bytes, little_room: list[Connection]
) -> None:
    """Not merely closed on: what its socket has still to be sent would keep it for ever."""
    engine.max_model_len = 1 << 20
    body = b'{"prompt": "a", "max_tokens": 2000, "logprobs": 20, "stream": %b}' % stream
    async with listening(engine, stream_write_timeout=0.2) as url:
        peer = await Peer.of(url, completion(body))
        await until(lambda: peer.was_reset)
        await until(lambda: not engine.streams)


async def test_who_takes_no_small_answer_is_gone(
    engine: FakeEngine, little_room: list[Connection]
) -> None:
    """Too little to count as a full buffer, on a connection that is closed once it is sent."""
    request = LIVE[:-2] + b"connection: close\r\n\r\n"
    async with listening(engine, stream_write_timeout=0.2) as url:
        peer = await Peer.of(url, request.replace(b"/live", b"/openapi.json"))
        await until(lambda: peer.was_reset)


async def test_who_takes_little_by_little_is_served(
    engine: FakeEngine, little_room: list[Connection]
) -> None:
    """However long it takes, if it took something whenever the server looks."""
    engine.max_model_len = 1 << 20
    body = b'{"prompt": "a", "max_tokens": 2000, "logprobs": 20}'
    async with listening(engine, stream_write_timeout=1000.0) as url:
        peer = await Peer.of(url, completion(body))
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await peer.read(1)
        size = rest = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        assert rest > 400_000
        (server,) = little_room
        looks = 0
        while rest:
            part = await peer.read(size // 40)
            assert part
            rest -= len(part)

            def took() -> bool:
                return server.transport.get_write_buffer_size() < server._unsent

            await until(lambda: server._write_timer is None or took())
            if (timer := server._write_timer) is not None:  # its time is over
                server._check_writing()
                assert server._write_timer is not timer
                looks += 1
        assert looks > 5
        await peer.send(LIVE)
        assert (await peer.read()).startswith(b"HTTP/1.1 200 ")


async def test_who_takes_something_and_then_nothing_is_gone(
    engine: FakeEngine, little_room: list[Connection]
) -> None:
    """Whenever the server looks, it will look again."""
    engine.max_model_len = 1 << 20
    body = b'{"prompt": "a", "max_tokens": 2000, "logprobs": 20}'
    async with listening(engine, stream_write_timeout=1000.0) as url:
        peer = await Peer.of(url, completion(body))
        await until(lambda: little_room and little_room[0]._write_timer)
        (server,) = little_room
        unsent = server._unsent
        while server.transport.get_write_buffer_size() == unsent:
            await peer.read()
        server._write_timeout = 0.01
        server._check_writing()  # its time is over
        assert server._unsent < unsent
        await until(lambda: peer.was_reset)


@pytest.mark.parametrize("streamed", [b"true", b"false"])
async def test_the_loss_is_noticed_behind_a_pipelined_request(
    engine: FakeEngine, streamed: bytes, received: bytearray
) -> None:
    engine.auto = False
    body = b'{"prompt": "a", "max_tokens": 400, "stream": %b}' % streamed
    async with listening(engine) as url:
        peer = await Peer.of(url, completion(body))
        await until(lambda: len(engine.streams) == 1)
        engine.step()
        await peer.send(LIVE)
        await until(lambda: received.endswith(LIVE))
        peer.reset()
        await until(lambda: len(engine.aborted) == 1)


@pytest.mark.parametrize("streamed", [b"true", b"false"])
@pytest.mark.parametrize("more", [LIVE, b"\0\1\2 no HTTP\r\n\r\n", b"GET /li", LIVE * 100])
async def test_no_answer_is_disturbed_by_what_comes_behind_its_request(
    engine: FakeEngine,
    streamed: bytes,
    more: bytes,
    connections: list[Connection],
    received: bytearray,
) -> None:
    """It comes whole, and then the connection ends."""
    engine.auto = False
    body = b'{"prompt": "a", "max_tokens": 3, "stream": %b}' % streamed
    async with listening(engine) as url:
        peer = await Peer.of(url, completion(body))
        await until(lambda: len(engine.streams) == 1)
        engine.step()
        await peer.send(more)
        await until(lambda: received.endswith(more))
        assert connections[0]._timer is None  # however long the answer takes
        engine.step()
        engine.step()
        answer = await peer.read_all()
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'"finish_reason":"length"' in answer
        assert answer.endswith(b"0\r\n\r\n" if streamed == b"true" else b"}")


async def test_endless_requests_behind_one_end_it(engine: FakeEngine) -> None:
    engine.auto = False
    async with listening(engine) as url:
        peer = await Peer.of(url, completion(b'{"prompt": "a", "max_tokens": 400}'))
        await until(lambda: len(engine.streams) == 1)
        await peer.send_until_reset(LIVE * 1000)
        await until(lambda: len(engine.aborted) == 1)


async def test_a_broken_body_gets_no_second_answer(engine: FakeEngine) -> None:
    """Chunks that are none: told in an answer where none has begun, else never."""
    head = (
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    async with listening(engine) as url:
        peer = await Peer.of(url, head % b"/v1/completions" + b"zz\r\n")
        assert (await peer.read_all()).startswith(b"HTTP/1.1 400 ")
        peer.socket.close()
        peer = await Peer.of(url, head % b"/nothing")
        assert (await peer.read()).startswith(b"HTTP/1.1 404 ")
        await peer.send(b"zz\r\n")
        with pytest.raises(ConnectionResetError):
            assert await peer.read() != b""


@pytest.mark.parametrize(
    ("request_", "status", "more"),
    [
        (LIVE, b"200", b"\r\n"),
        (
            b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n",
            b"404",
            b"x",
        ),
    ],
)
async def test_a_byte_now_and_then_holds_no_connection(
    engine: FakeEngine,
    request_: bytes,
    status: bytes,
    more: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads_in(0.1, monkeypatch)
    async with listening(engine, keep_alive_timeout=0.1) as url:
        peer = await Peer.of(url, request_)
        assert (await peer.read()).startswith(b"HTTP/1.1 " + status)
        ended = asyncio.create_task(peer.read())
        while not ended.done():
            try:
                await peer.send(more)
            except OSError:
                break
            await asyncio.sleep(0.01)
        await asyncio.wait([ended])
        assert ended.exception() is not None or ended.result() == b""


async def test_a_body_that_nobody_reads_has_an_end(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.server.connection._MOST_UNREAD", 1 << 20)
    async with listening(engine) as url:
        peer = await Peer.of(
            url, b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n"
        )
        assert (await peer.read()).startswith(b"HTTP/1.1 404 ")
        await peer.send_until_reset(bytes(1 << 20))


async def test_a_connection_stays_after_a_body_that_nobody_read(engine: FakeEngine) -> None:
    async with listening(engine, keep_alive_timeout=0.2) as url:
        peer = await Peer.of(url, b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
        assert (await peer.read()).startswith(b"HTTP/1.1 404 ")
        await peer.send(b"123456789" + LIVE)
        assert (await peer.read()).startswith(b"HTTP/1.1 200 ")
        assert await peer.read() == b""


async def test_refused_while_it_waits_for_leave_to_send(engine: FakeEngine) -> None:
    """Whether the body comes or the next request is not known: the connection ends."""
    content = b'{"prompt": "a", "max_tokens": 1}'
    head, _, _ = completion(content).partition(b"\r\n\r\n")
    asks = head + b"\r\nexpect: 100-continue\r\n\r\n"
    async with listening(engine) as url:
        peer = await Peer.of(url, asks)
        assert await peer.read() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await peer.send(content)
        answer = await peer.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" not in answer
        engine.queue_full = 0
        await peer.send(asks)
        answer = await peer.read_all()
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"connection: close" in answer


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1", b"400"),
        (b"HTTP/1.1\r\nhost: a\r\nhost: a", b"400"),
        (b"HTTP/1.0\r\nhost: a\r\nhost: b", b"400"),
        (b"HTTP/1.1\r\nhost: a, b", b"400"),
        (b"HTTP/1.1\r\nhost: http://a/", b"400"),
        (b"HTTP/1.1\r\nhost: a:port", b"400"),
        (b"HTTP/1.1\r\nhost: [::1", b"400"),
        (b"HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade", b"400"),
        (b"HTTP/1.0", b"200"),
        (b"HTTP/1.1\r\nhost:", b"200"),
        (b"HTTP/1.1\r\nhost: a \t", b"200"),
        (b"HTTP/1.1\r\nHOST: A_b.example:80", b"200"),
        (b"HTTP/1.1\r\nhost: [fe80::1]:8000", b"200"),
        (b"HTTP/1.1\r\nhost: 127.0.0.1:8000\r\nupgrade: h2c\r\nconnection: upgrade", b"200"),
    ],
)
async def test_a_request_is_for_one_host(
    engine: FakeEngine, head: bytes, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(engine) as url:
        peer = await Peer.of(url, b"GET /live " + head + b"\r\n\r\n")
        answer = await peer.read_until(b"}")
        assert answer.split()[1] == status
        if status == b"400":
            assert b"Host header" in answer
            assert any("refused: the request" in line for line in caplog.messages)
            assert await peer.read() == b""


async def test_white_space_behind_a_value_is_no_part_of_it(engine: FakeEngine) -> None:
    content = b'{"prompt": "a", "max_tokens": 1}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x \r\ncontent-type: application/json\t\r\n"
        b"authorization: Bearer key \t \r\nx-request-id: mine \t\r\n"
        b"content-length: %d \r\n\r\n" % len(content)
    )
    async with listening(engine, api_key=("key",)) as url:
        peer = await Peer.of(url, head + content)
        answer = await peer.read_until(b"}}")
        assert answer.split()[1] == b"200"
        assert b"x-request-id: mine\r\n" in answer


async def test_nothing_behind_a_refused_head_is_read(engine: FakeEngine) -> None:
    """Its body least of all, which would be another request to whoever takes it for one."""
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(LIVE)
    async with listening(engine) as url:
        peer = await Peer.of(url, LIVE)
        await peer.read_until(b"}")
        await peer.send(head + LIVE + LIVE)
        assert (await peer.read_all()).count(b"HTTP/1.1") == 1


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
CHUNKS = b'2;a="b"\r\n{"\r\n010;c\r\nprompt": [1, 2]}\r\n'


async def test_trailers_are_no_headers(engine: FakeEngine) -> None:
    """What a proxy has checked in the head cannot be said once more behind the body."""
    trailers = b"authorization: Bearer stolen\r\nx-request-id: mine\r\nhost: b\r\n"
    async with listening(engine, api_key=("stolen",)) as url:
        peer = await Peer.of(url, CHUNKED + CHUNKS + b"0\r\n" + trailers + b"\r\n")
        answer = await peer.read_until(b"}}")
        assert answer.split()[1] == b"401"
        assert b"mine" not in answer
        peer.socket.close()
    async with listening(engine) as url:
        peer = await Peer.of(url, CHUNKED + CHUNKS + b"000\r\n" + trailers + b"\r\n")
        assert (await peer.read_until(b"}")).split()[1] == b"200"


@pytest.mark.parametrize("beside", [b"0\r\nx-a: ", b"1;"])
async def test_what_lies_beside_a_body_has_an_end(engine: FakeEngine, beside: bytes) -> None:
    """Trailers are kept until they end, and neither they nor extensions count as the body."""
    async with listening(engine) as url:
        peer = await Peer.of(url, CHUNKED + CHUNKS + beside)
        sending = asyncio.create_task(peer.send_until_reset(b"a" * 10_000))
        assert (await peer.read()).split()[1] == b"431"
        await sending


async def test_a_body_in_single_bytes_is_read(engine: FakeEngine) -> None:
    """Whatever its chunks cost: what lies between two bytes is little."""
    body = b'{"prompt": "%b"}' % (b"a" * 100)
    chunks = b"".join(b"1;%b\r\n%c\r\n" % (b"x" * 5000, each) for each in body)
    async with listening(engine) as url:
        peer = await Peer.of(url, CHUNKED)
        for at in range(0, len(chunks), 10_000):
            await peer.send(chunks[at : at + 10_000])
        await peer.send(b"0\r\n\r\n")
        assert (await peer.read_until(b"}")).split()[1] == b"200"


@pytest.mark.parametrize(
    ("coding", "status"),
    [
        (b"transfer-encoding: gzip, chunked", b"501"),
        (b"transfer-encoding: gzip\r\ntransfer-encoding: chunked", b"501"),
        (b"transfer-encoding: gzip, Chunked \t", b"501"),
        (b"transfer-encoding: identity", b"400"),
        (b"transfer-encoding: gzip", b"400"),
        (b"transfer-encoding: chunked, gzip", b"400"),
        (b"transfer-encoding: chunked, chunked", b"400"),
        (b"transfer-encoding: chunked\r\ncontent-length: 3", b"400"),
        (b"Transfer-Encoding: Chunked", b"200"),
    ],
)
async def test_transfer_codings(engine: FakeEngine, coding: bytes, status: bytes) -> None:
    head = CHUNKED.replace(b"transfer-encoding: chunked", coding)
    async with listening(engine) as url:
        peer = await Peer.of(url, head + CHUNKS + b"0\r\n\r\n")
        assert (await peer.read_until(b"}")).split()[1] == status


async def test_whose_output_is_not_read_is_paused_and_gets_all_of_it(
    little_room: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many choices with many alternatives, and nobody who reads. What is held of it is bounded and
    told; the blocks are others'; and who begins to read gets what any other gets.
    """
    monkeypatch.setattr("octavo.engine.stream._MOST_UNSENT", 50_000)
    body = json.dumps(
        {"prompt": "a", "n": 8, "logprobs": 5, "max_tokens": 400, "ignore_eos": True, "seed": 1}
        | {"stream": True, "temperature": 1.0}
    ).encode()
    engine, executor = real_engine()
    clients = Clients()
    async with (
        started(engine),
        listening(engine, clients=clients) as url,
        Leave(executor).one_by_one(),
    ):
        reads = await Peer.of(url, completion(body))
        expected = texts_of(await reads.read_until(b"0\r\n\r\n"))
        reads.socket.close()
        assert {len(text) for text in expected.values()} == {400}
        peers = [await Peer.of(url, completion(body)) for _ in range(3)]
        await until(lambda: engine.stats().paused == 24)
        assert engine.stats().running == engine.stats().kv_blocks_used == 0
        assert 3 * 50_000 < engine.unsent < 3 * 150_000
        assert 0 < clients.unsent < 3 * 200_000
        async with httpx.AsyncClient(base_url=url) as client:
            metrics = (await client.get("/metrics")).text
            assert 'num_requests_paused{engine="0",model_name="tiny"} 24.0' in metrics
        for peer in peers:
            assert texts_of(await peer.read_until(b"0\r\n\r\n")) == expected
            peer.socket.close()
        await until(lambda: not engine.unsent and not clients.unsent)


def texts_of(answer: bytes) -> dict[int, list[str]]:
    """Tokens by choice, of a stream of completions with logprobs."""
    found: dict[int, list[str]] = {}
    for line in re.findall(rb"data: (\{.*?\})\n\n", answer):
        for choice in json.loads(line)["choices"]:
            if choice["logprobs"]:
                found.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
    return found
