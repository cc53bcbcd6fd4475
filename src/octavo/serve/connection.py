"""HTTP connections that cannot be held open or filled up by a request that never begins.

uvicorn bounds neither the length of a request's head nor the time it may take; what is no HTTP it
answers in plain text; and it loses the body of a request that offers another protocol, as Java's
HTTP client does with each (``Upgrade: h2c``).
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.serve.errors import ApiError
from octavo.serve.writer import DirectWrite

_LONGEST_HEAD = 64 << 10  # bytes of request line and headers; what one read brings may exceed it
_HEAD_TIMEOUT = 30.0  # seconds


class _Parser(httptools.HttpRequestParser):
    """Reads a request that offers another protocol as if it did not.

    A server may go on with HTTP/1.1 (RFC 9110, section 7.8), but the parser takes the end of such a
    head for the end of the request.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        while True:
            try:
                return super().feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                head = self._connection.head_without_offer()
                if head is None:
                    raise
                data = head + bytes(data)[upgrade.args[0] :]


class Connection(HttpToolsProtocol):
    _offer = False  # the head just read offers another protocol, and will be read again
    _in_head = False
    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self.parser = _Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _LONGEST_HEAD:
                self._refuse(431, f"the request's headers are longer than {_LONGEST_HEAD} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self._offer = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._offer:
            super().on_headers_complete()
            if self.cycle is not None and self.cycle.scope is self.scope:
                DirectWrite(self.cycle).attach(cast(Scope, self.scope))

    def on_message_complete(self) -> None:
        if not self._offer:
            super().on_message_complete()

    def head_without_offer(self) -> bytes | None:
        """The request's head without what offers another protocol; None if nothing does."""
        if not self._offer:
            return None
        lines = [
            b"%b %b HTTP/%b"
            % (self.parser.get_method(), self.url, self.parser.get_http_version().encode()),
            *(b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"),
        ]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not an HTTP request")

    def _refuse(self, status: int, message: str) -> None:
        self._in_head = False
        body = ApiError(status, message).body()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(_HEAD_TIMEOUT, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
