"""An answer arrives, whatever its client has done to its half of the connection."""

import asyncio
import json
import socket
from itertools import product
from typing import Any
from urllib.parse import urlsplit

import pytest
from serve_fakes import FakeEngine
from serving import listening
from test_connection import CHUNKED, LIVE, Peer, completion

from octavo.server.clients import Clients
from octavo.server.connection import Connection
from octavo.server.metrics import Metrics
from patience import until

WHOLE = b'{"prompt": "a", "max_tokens": 3}'
STREAM = b'{"prompt": "a", "max_tokens": 3, "stream": true}'


def half_close(peer: Peer) -> None:
    peer.socket.shutdown(socket.SHUT_WR)


def chunks_of(answer: bytes) -> bytes:
    """The body of an answer in chunks (RFC 9112, section 7.1)."""
    body, rest = b"", answer.partition(b"\r\n\r\n")[2]
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            assert rest == b"\r\n"
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


@pytest.mark.parametrize("probes", [1, 4, 100])
async def test_a_half_closed_connection_gets_its_answer(
    engine: FakeEngine, probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as another's, however often the server has looked whether anybody is there."""
    monkeypatch.setattr("octavo.server.connection._BETWEEN", (0.0,) * (probes - 1))
    looked: list[int] = []
    find_out = Connection._find_out

    def counted(self: Connection, times: int = 0) -> None:
        looked.append(times)
        find_out(self, times)

    monkeypatch.setattr(Connection, "_find_out", counted)
    engine.auto = False
    async with listening(engine) as url:
        for body, steps in product((WHOLE, STREAM), (0, 1)):
            looked.clear()
            peer = await Peer.of(url, completion(body))
            await until(lambda: len(engine.streams) == 1)
            for _ in range(steps):
                engine.step()
            half_close(peer)
            await until(lambda: len(looked) == probes)
            for _ in range(3 - steps):
                engine.step()
            answer = await peer.read_all()
            peer.socket.close()
            assert not engine.aborted
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"connection: close\r\n" in answer or steps
            said = chunks_of(answer) if body is STREAM else answer.partition(b"\r\n\r\n")[2]
            assert b'"finish_reason":"length"' in said
            if body is WHOLE:
                assert json.loads(said)["usage"]["completion_tokens"] == 3


async def test_all_kinds_of_answers(engine: FakeEngine) -> None:
    async with listening(engine) as url:
        for sent, status in (
            (LIVE, b"200"),
            (LIVE.replace(b"/live", b"/nothing"), b"404"),
            (LIVE.replace(b"1.1", b"1.0"), b"200"),
            (completion(b"{"), b"400"),
            (completion(WHOLE)[:-1], b"400"),  # the body ends too early,
            (LIVE[:-1], b"400"),  # or the head
            (CHUNKED + b"5\r\n{", b"400"),
            (completion(WHOLE) + LIVE, b"200"),
            (b"\0\r\n\r\n", b"400"),
        ):
            peer = await Peer.of(url, sent)
            half_close(peer)
            answer = await peer.read_all()
            peer.socket.close()
            assert answer.split()[1] == status
            assert answer.count(b"HTTP/1.1 ") == 1
            if status != b"200":
                error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
                assert error["code"] == int(status)


async def test_who_sends_nothing_is_told_nothing(engine: FakeEngine) -> None:
    async with listening(engine) as url:
        peer = await Peer.of(url)
        half_close(peer)
        assert await peer.read_all() == b""
        peer.socket.close()


async def test_who_is_gone_is_noticed(engine: FakeEngine) -> None:
    """Who closes all of its connection, having read all: what comes of that is a FIN, too."""
    engine.auto = False
    async with listening(engine) as url:
        for body, steps in product((WHOLE, STREAM), (0, 1)):
            peer = await Peer.of(url, completion(body))
            await until(lambda: len(engine.streams) == 1)
            for _ in range(steps):
                engine.step()
            if steps and body is STREAM:
                assert b"data: " in await peer.read()
            peer.socket.close()
            await until(lambda: len(engine.aborted) == 1)
            engine.aborted.clear()


async def test_who_is_gone_after_a_while_is_noticed(engine: FakeEngine) -> None:
    engine.auto = False
    async with listening(engine) as url:
        peer = await Peer.of(url, completion(WHOLE))
        await until(lambda: len(engine.streams) == 1)
        half_close(peer)
        assert await peer.read(1) == b"H"
        peer.socket.close()
        await until(lambda: len(engine.aborted) == 1)


async def test_a_unix_socket(engine: FakeEngine, tmp_path: Any) -> None:
    path = str(tmp_path / "socket")
    async with listening(engine, uds=path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(completion(WHOLE))
        writer.write_eof()
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
        engine.auto = False
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(completion(WHOLE))
        await until(lambda: len(engine.streams) == 1)
        writer.close()
        await until(lambda: len(engine.aborted) == 1)


# An answer before the body has been read


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
async def test_the_answer_arrives_although_the_body_was_not_read(
    engine: FakeEngine, connection: bytes
) -> None:
    """The client sends all of it before it reads anything, as most do."""
    post = b"POST /v1/completions HTTP/1.1\r\n"
    known = post + b"authorization: Bearer key\r\n"
    json_body = b"content-type: application/json\r\n"
    async with listening(engine, api_key=("key",), max_request_bytes=1000) as url:
        place = urlsplit(url)
        for head, status in (
            (post + b"authorization: Bearer no\r\n", b"401"),
            (known.replace(b"v1/completions", b"nothing"), b"404"),
            (known, b"415"),
            (known + json_body, b"413"),
            (known + json_body + b"expect: 100-continue\r\n", b"413"),
            (known + b"host: b\r\n", b"400"),
            (post + b"a: b\r\n" * 200, b"431"),
        ):
            for size in (10_000, 8_000_000):
                reader, writer = await asyncio.open_connection(place.hostname, place.port)
                writer.write(head + b"host: x\r\nconnection: %b\r\n" % connection)
                writer.write(b"content-length: %d\r\n\r\n" % size)
                for _ in range(10):
                    writer.write(bytes(size // 10))
                    await writer.drain()
                answer = await reader.readuntil(b"}}")
                assert answer.split()[1] == status
                if connection == b"close":
                    assert await reader.read() == b""
                writer.close()


async def test_who_has_its_answer_and_still_sends_is_not_dropped(
    engine: FakeEngine, connections: list[Connection]
) -> None:
    """However soon a client would be that does not read."""
    clients = Clients()
    head = b"POST /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    async with listening(engine, clients=clients, stream_write_timeout=0.02) as url:
        peer = await Peer.of(url, head + b"content-length: 99999\r\n\r\n")
        assert (await peer.read_until(b"}}")).split()[1] == b"404"
        for _ in range(10):
            await peer.send(b"x")
            await asyncio.sleep(0.02)
        assert not peer.was_reset
        half_close(peer)
        assert await peer.read_all() == b""
        peer.socket.close()
        assert not any(clients.closed.values())


async def test_who_makes_room_is_told_so_and_counted(engine: FakeEngine) -> None:
    clients = Clients(most=1)
    metrics = Metrics("tiny", engine.stats, 512)
    async with listening(engine, metrics=metrics, clients=clients) as url:
        peer = await Peer.of(url, completion(WHOLE)[:-1])
        await until(lambda: connections_receiving(clients))
        other = await Peer.of(url, LIVE)
        assert (await peer.read_all()).split()[1] == b"503"
        assert (await other.read_until(b"}")).split()[1] == b"200"
        for each in (peer, other):
            each.socket.close()
        await until(lambda: not len(clients))
    text = metrics.exposition("")[0].decode()
    assert 'handler="/v1/completions",method="POST",status="503"} 1.0' in text
    assert 'status="499"' not in text


def connections_receiving(clients: Clients) -> bool:
    return any(isinstance(each, Connection) and each._reading == "body" for each in clients._open)


async def test_a_connection_that_is_being_closed_does_not_stay(
    engine: FakeEngine, connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client neither sends nor closes, or sends for ever."""
    monkeypatch.setattr("octavo.server.connection._LINGER", 0.02)
    monkeypatch.setattr("octavo.server.connection._MOST_UNREAD", 1 << 20)
    head = b"POST /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += b"content-length: 99999999\r\n\r\n"
    async with listening(engine) as url:
        silent = await Peer.of(url, head)
        assert (await silent.read_until(b"}}")).split()[1] == b"404"
        assert await silent.read() == b""
        await until(lambda: connections[0].transport.is_closing())
        silent.socket.close()
        monkeypatch.setattr("octavo.server.connection._LINGER", 1000.0)
        busy = await Peer.of(url, head)
        await busy.send_until_reset(bytes(1 << 18))
        busy.socket.close()


async def test_chunks_have_a_least_size(engine: FakeEngine) -> None:
    """On average, and beyond the first few: else a body costs a call a byte."""
    body = b'{"prompt": "%b", "max_tokens": 1}' % (b"a" * 400)
    few = b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
    async with listening(engine) as url:
        peer = await Peer.of(url, CHUNKED + few)
        assert (await peer.read_until(b"}}")).split()[1] == b"200"
        peer.socket.close()
        peer = await Peer.of(url, CHUNKED)
        sending = asyncio.create_task(peer.send(b"1\r\na\r\n" * 10_000))
        answer = await peer.read_until(b"}}")
        assert answer.split()[1] == b"400"
        assert b"chunks" in answer
        await sending
        peer.socket.close()
