"""HTTP/1.1 as a load generator needs it: many connections, kept alive, little work a byte.

Each connection is an `asyncio.Protocol` around httptools' parser; the time of a chunk is taken
when the loop hands it over, before anything is parsed. Nothing is retried but a request that a kept
connection took to its grave: the server had closed it before any byte of an answer.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools


class Sink(Protocol):
    """Takes one answer."""

    status: int
    ended: asyncio.Future[None]

    def data(self, chunk: bytes, now: float) -> bool:
        """A piece of the body that came at ``now``. False: the rest is not wanted."""
        ...

    def end(self) -> None: ...

    def fail(self, reason: str, detail: str) -> None: ...


class Body:
    """An answer that is collected whole."""

    def __init__(self) -> None:
        self.status = 0
        self.content = b""
        self.reason = ""
        self.detail = ""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data(self, chunk: bytes, now: float) -> bool:
        self.content += chunk
        return True

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def fail(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        self.end()


class Endpoint(NamedTuple):
    """Where requests go; ``path`` is put before each request's own."""

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """Raises `ValueError` for what is no http(s) URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:  # which does not say of what
            raise ValueError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:8000")
        if parts.query or parts.fragment or parts.username is not None:
            raise ValueError(f"{url!r}: a base URL is scheme, host, port and path only")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls)

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class Client:
    """Requests to one server. ``insecure``: certificates are not checked."""

    def __init__(
        self, target: Endpoint, headers: Mapping[str, str], *, insecure: bool = False
    ) -> None:
        self._target = target
        self._tls: ssl.SSLContext | None = None
        if target.tls:
            self._tls = ssl.create_default_context()
            if insecure:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE
        fields = {
            "host": target.netloc,
            "accept": "*/*",
            "accept-encoding": "identity",
            "content-type": "application/json",
        } | {name.lower(): value for name, value in headers.items()}
        for name, value in fields.items():
            if not name or any(c in name + value for c in "\r\n\0") or set(name) & set(" :"):
                raise ValueError(f"{name!r} with this value is no HTTP header")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._address: tuple[Any, ...] | None = None  # one that has answered

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request, so that they can be made ahead of its time."""
        line = f"{method} {self._target.path}{path} HTTP/1.1\r\n".encode()
        return b"".join((line, self._head, b"content-length: %d\r\n\r\n" % len(body), body))

    async def exchange(self, request: bytes, sink: Sink, timeout: float) -> None:
        """Send ``request``; when this returns, ``sink`` has ended one way or the other."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(timeout, sink.fail, "no answer in time", f"within {timeout:g} s")
        connection = None
        lost = False
        try:
            while True:
                kept = bool(self._idle) and not lost
                connection = self._idle.pop() if kept else await self._connect(timeout)
                connection.send(request, sink, kept)
                await sink.ended
                lost = connection.lost is sink
                if not lost:
                    return
                # The server closed a kept connection just as it was taken again.
                sink.ended = loop.create_future()
                if loop.time() >= timer.when():
                    sink.fail("no answer in time", f"within {timeout:g} s")
                    return
        except OSError as error:
            sink.fail(*_connect_error(error))
        finally:
            timer.cancel()
            # Once answered, the connection may already be another request's.
            if connection is not None and connection.sink is sink:
                connection.close()

    async def get(self, method: str, path: str, body: bytes = b"", timeout: float = 30) -> Body:
        answer = Body()
        await self.exchange(self.request(method, path, body), answer, timeout)
        return answer

    async def _connect(self, timeout: float) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout):
            if self._address is not None:
                return await self._connect_to(self._address)
            found = await loop.getaddrinfo(
                self._target.host, self._target.port, type=socket.SOCK_STREAM
            )
            for index, (*_, address) in enumerate(found):
                try:
                    connection = await self._connect_to(address)
                except OSError:
                    if index == len(found) - 1:
                        raise
                    continue
                self._address = address
                return connection
        raise OSError(f"{self._target.host} has no address")

    async def _connect_to(self, address: tuple[Any, ...]) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self),
            address[0],
            address[1],
            ssl=self._tls,
            server_hostname=self._target.host if self._tls else None,
        )
        return connection

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def closed(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def release(self, connection: _Connection) -> None:
        self._idle.append(connection)

    async def close(self) -> None:
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)


class _Connection(asyncio.Protocol):
    def __init__(self, client: Client) -> None:
        self._client = client
        self.sink: Sink | None = None
        self.lost: Sink | None = None  # whose request can be sent again
        self._kept = self._lost = False
        self._answered = self._framed = self._headers_read = False
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._client.opened(self)

    def send(self, request: bytes, sink: Sink, kept: bool) -> None:
        """``kept``: the connection has answered before, and may be closed already."""
        self._kept = kept
        self._parser = httptools.HttpResponseParser(self)
        self._answered = self._framed = self._headers_read = False
        self.sink = sink
        if self._lost:
            self._unanswered()
        else:
            self._transport.write(request)

    def close(self) -> None:
        self.sink = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self.sink is None:  # nothing was asked
            self.close()
            return
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self.sink is not None:
                self.sink.fail("malformed HTTP", str(error))
                self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._client.closed(self)
        self._lost = True
        if self.sink is None:
            return
        if not self._answered:
            self._unanswered(error)
            return
        sink, self.sink = self.sink, None
        if error is None and self._headers_read and not self._framed:
            sink.end()  # a body that ends with its connection
        else:
            sink.fail("connection closed in the middle of an answer", str(error or "by the server"))

    def _unanswered(self, error: Exception | None = None) -> None:
        sink, self.sink = self.sink, None
        assert sink is not None
        if not self._kept:
            sink.fail("connection closed before an answer", str(error or "by the server"))
        elif not sink.ended.done():
            self.lost = sink
            sink.ended.set_result(None)

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._headers_read = True
        if self.sink is not None:
            self.sink.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.sink is not None and not self.sink.data(body, self._now):
            self.close()

    def on_message_complete(self) -> None:
        if self.sink is None:
            return
        if 100 <= self.sink.status < 200:  # interim: the answer is yet to come
            self._framed = self._headers_read = False
            return
        sink, self.sink = self.sink, None
        if self._parser.should_keep_alive():
            self._client.release(self)
        else:
            self.close()
        sink.end()


def _connect_error(error: OSError) -> tuple[str, str]:
    if isinstance(error, TimeoutError):
        return "no connection in time", ""
    if isinstance(error, ssl.SSLError):
        return "TLS failed", str(error)
    if isinstance(error, ConnectionRefusedError):
        return "connection refused", str(error)
    return "no connection", str(error)
