"""HTTP connections: none is held open for nothing, and every answer arrives.

uvicorn bounds neither the length of a request's head nor the time it may take, nor the time for
which a client may take nothing of its answer. It answers in plain text what is not HTTP. It loses
the body of a request that offers another protocol, as Java's HTTP client does with each
(``Upgrade: h2c``). While a pipelined request waits it does not read, so that it does not notice a
client that leaves. Here requests are not pipelined: if a client sends one before the last is
answered, the connection is closed after that answer, as RFC 9112, section 9.3.2, lets clients
expect.

While its client may still be sending, a connection is closed in two steps (RFC 9112, section 9.6):
the answer and the end of the stream are sent, and what still comes is read and dropped. If a socket
is closed with unread input, the system resets the connection, and the client loses the answer.

The end of what a client sends (FIN) is the same whether it has closed its half of the connection or
all of it, and TCP's keep-alive probes are acknowledged in both cases for a minute. The two differ
in what they do with data: a closed socket answers it with a reset. So an answer that is still to
come begins at once, and slowly. Every answer starts with ``HTTP/1.1 ``, and these bytes are sent
one by one; in a stream that has begun they are zeros before the size of the next chunk. A client
that waits gets the rest later; one that is gone is noticed at the second byte.

This file and streaming.py use parts of uvicorn that it does not document. pyproject.toml bounds its
version, and tests/server/test_private_names.py lists them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.server.context import CONTEXT, CYCLE
from octavo.server.errors import ApiError, draining, unavailable

if TYPE_CHECKING:
    from octavo.server.app import App

log = logging.getLogger(__name__)

_LONGEST_HEAD = 64 << 10  # bytes of request line and headers; what one read brings may exceed it
_MOST_HEADERS = 128
_HEAD_TIMEOUT = 30.0  # seconds
# Chunks of a body are no smaller on average, beyond the first few: each costs as much as a header.
_LEAST_CHUNK, _FEW_CHUNKS = 16, 4096  # bytes; chunks
# What is read away of a body whose request is already answered, so that the answer gets through;
# it has the time of a head.
_MOST_UNREAD = 64 << 20  # bytes
_UNREAD_AT_ONCE = 1 << 20  # bytes of it, and so many in a second after them:
_UNREAD_PER_SECOND = 32 << 20
_LINGER = 2.0  # seconds without input, after which a connection that is being closed is closed
_LEAST_TAKEN = 4096  # bytes of an answer that a client takes in the time of a write
_MOST_PIPELINED = 1 << 20  # bytes of further requests, read away while one is being answered
# RFC 9110, section 7.2, of RFC 3986's host and port; it may be empty.
_HOST = re.compile(rb"([\w.~!$&'()*+,;=%-]*|\[[\w.:]+\])(:[0-9]*)?")
_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")  # a request's target, with a host
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is unsent is dropped
_BEGINNING = b"HTTP/1.1 "
_BETWEEN = (0.05, 0.5, 2.0, 8.0, 30.0, 60.0, 120.0)  # seconds between its bytes


class Connection(HttpToolsProtocol):
    """One client's connection. At most one timer runs for what the client has to send, and one for
    what it has to take.
    """

    begun = 0  # bytes of `_BEGINNING` that have been sent, of an answer that is still to come
    ending = False  # all is said; what comes is read away, and then the connection is closed
    _offer = False  # the head just read offers another protocol, and will be read again
    _reading: Literal["", "head", "body"] = ""  # the part of a request that is not complete
    _head_bytes = 0
    _beside = 0  # bytes received since the last of a body: chunk extensions, trailers
    _chunks = 0  # of the body, less those that are large enough
    _unread = 0  # bytes received that nobody wants
    _keep_alive = True  # whether the client lets the connection stay
    _pipelined = False  # nothing of what comes is read any more
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _unsent = 0  # bytes, when the write timer was set
    _half_closed = False  # the client sends no more
    _silent = False  # nothing has come since the timer was set

    def __init__(self, app: App, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn ≥ 0.33
        self._refused = app.refused
        self._clients = app.clients
        self._write_timeout = app.config.stream_write_timeout
        self._idle_timeout = app.config.keep_alive_timeout

    # What the client sends

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_within(_HEAD_TIMEOUT)
        self._clients.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.lost(self)
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.ending:
            self._silent = False
            self._throw_away(data, _MOST_UNREAD)
            return
        if self._pipelined:
            self._throw_away(data, _MOST_PIPELINED)
            return
        self._beside += len(data)
        self._feed(data)
        if self._reading == "head":
            self._head_bytes += len(data)
            if self._head_bytes > _LONGEST_HEAD:
                self.refuse(_too_large("the request's headers are", _LONGEST_HEAD))
        elif self._reading == "body":
            if self._beside > _LONGEST_HEAD:
                self.refuse(_too_large("what lies beside the request's body is", _LONGEST_HEAD))
            elif self._answered:
                self._throw_away(data, _MOST_UNREAD)

    def _feed(self, data: bytes) -> None:
        """Parse what has come.

        A head that offers another protocol is read again without its offer: a server may go on with
        HTTP/1.1 (RFC 9110, section 7.8), but the parser takes the end of such a head for the end of
        the request.
        """
        again = b""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offer:
                again = self._head_without_offer() + bytes(data)[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            refusal = error.__context__
            if self._pipelined:
                pass  # `on_message_begin` has stopped the parser: nothing of it is read
            elif isinstance(refusal, ApiError):
                log.warning("a request is refused: %.200s", refusal.message)
                self.refuse(refusal)
            else:
                log.warning("a request is refused: it is not HTTP")
                self.refuse(ApiError(400, "this is not an HTTP request"))
        if again:  # not within the handling of an exception, which would be the next one's context
            self._feed(again)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Note that the client sends no more. Returns whether the connection stays open."""
        if self._half_closed:
            return True
        self._half_closed = True
        if self.ending or (self._answered and self._reading != "head"):
            return False
        if self._reading:
            error = ApiError(400, f"the request ends before its {self._reading} does")
            self.refuse(error, has_left=True)  # most likely
            return False
        self.cycle.keep_alive = False
        self._find_out()
        return True

    def _find_out(self, times: int = 0) -> None:
        """Send a byte of the answer that is still to come, and another one later."""
        cycle = self.cycle
        if self._answered or self.is_closing():
            return
        if not cycle.response_started:
            byte = _BEGINNING[self.begun : self.begun + 1]
            self.transport.write(byte)
            self.begun += len(byte)
        elif cycle.chunked_encoding:
            self.transport.write(b"0")  # a chunk's size may begin so (RFC 9112, section 7.1)
        if times < len(_BETWEEN):
            self._call_later(_BETWEEN[times], self._find_out, times + 1)

    def on_message_begin(self) -> None:
        if not self._answered:
            self._pipelined = True
            self._unread = 0
            self.cycle.keep_alive = False
            raise RuntimeError("another request is being answered")
        super().on_message_begin()
        self._reading = "head"
        self._head_bytes = 0
        self._expect_within(_HEAD_TIMEOUT)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are no headers: nobody in front has looked at them (RFC 9110, section 6.5.1).
        # White space behind a value is no part of it (section 5.5); the parser leaves it there.
        if self._reading == "head":
            super().on_header(name, value.rstrip(b" \t"))
            if len(self.headers) > _MOST_HEADERS:
                raise ApiError(431, f"the request has more than {_MOST_HEADERS} headers")

    def on_headers_complete(self) -> None:
        self._offer = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._offer:
            return
        self._check_head()
        super().on_headers_complete()
        self._reading = "body"
        self._beside = self._unread = self._chunks = 0
        self._stop_timer()
        self.cycle.transport = cast(asyncio.Transport, self)
        # A client that is answered before it got leave to send its body may send it or not: what
        # comes next is unknown until the body's first bytes.
        self._keep_alive = self.cycle.keep_alive
        if self.expect_100_continue:
            self.cycle.keep_alive = False
        cast(Scope, self.scope)[CYCLE] = weakref.ref(self.cycle)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > _FEW_CHUNKS:
            raise ApiError(400, f"the body's chunks have less than {_LEAST_CHUNK} bytes each")

    def on_body(self, body: bytes) -> None:
        self._beside = 0
        self._chunks -= len(body) // _LEAST_CHUNK
        if self.expect_100_continue and not self.cycle.response_started:
            self.expect_100_continue = False
            self.cycle.keep_alive = self._keep_alive
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offer:
            return
        self._reading = ""
        super().on_message_complete()
        if self._answered:
            self._expect_within(self._idle_timeout)
        else:
            self._clients.busy(self)

    def on_response_complete(self) -> None:
        """Replace uvicorn's, whose timer for idle connections any byte would stop."""
        self.server_state.total_requests += 1
        if self.is_closing():
            return
        self._clients.idle(self)
        self.flow.resume_reading()
        self._expect_within(_HEAD_TIMEOUT if self._reading else self._idle_timeout)

    def shutdown(self) -> None:
        self._keep_alive = False
        if self.ending:
            return
        if self._reading == "head":
            self.refuse(draining())
        else:
            super().shutdown()

    def make_room(self) -> None:
        """Close without waiting for what the client still sends: its place is needed now."""
        if not self.ending and self._reading:
            self._half_closed = True  # what it still sends is not waited for
            self.refuse(unavailable("the server has no room for more connections"))
        self._hang_up()

    @property
    def _answered(self) -> bool:
        """True if no answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _throw_away(self, data: bytes, most: int) -> None:
        self._unread += len(data)
        if self._unread > most:
            self.drop()
        elif self._unread > _UNREAD_AT_ONCE:
            self.flow.pause_reading()
            self.loop.call_later(len(data) / _UNREAD_PER_SECOND, self._resume_reading)

    def _resume_reading(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _check_head(self) -> None:
        """Raise `ApiError` for a head that a proxy in front may have read in another way."""
        # RFC 9112, section 3.2.
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            raise ApiError(400, f"the request has {len(hosts) or 'no'} Host headers: it needs one")
        if (absolute := _ABSOLUTE.match(self.url)) is not None:
            # The target's host is the request's, whatever the header says (section 3.2.2).
            hosts = [absolute[1]]
            self.headers[:] = [
                (b"host", absolute[1]),
                *(header for header in self.headers if header[0] != b"host"),
            ]
        if hosts and not _HOST.fullmatch(hosts[0]):
            raise ApiError(400, "the request's Host header is not a host and a port")
        # RFC 9112, sections 6.1 and 6.3: where the last coding is another, nobody knows the end.
        coding = b", ".join(value for name, value in self.headers if name == b"transfer-encoding")
        if coding and coding.lower() != b"chunked":
            last = coding.rpartition(b",")[2].strip().lower()
            said = coding.decode("latin-1")
            status = 501 if last == b"chunked" else 400
            raise ApiError(status, f"Transfer-Encoding: {said} is not supported, but chunked")

    def _head_without_offer(self) -> bytes:
        lines = [
            b"%b %b HTTP/%b"
            % (self.parser.get_method(), self.url, self.parser.get_http_version().encode()),
            *(b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"),
        ]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def refuse(self, error: ApiError, *, has_left: bool = False) -> None:
        """Answer with ``error`` if no answer has begun, and close: no further request is read.

        ``has_left``: nobody is there to read the answer.
        """
        if self.is_closing():
            return
        if self._reading == "body":
            if self.cycle.response_started:
                self.drop()  # another answer would be taken for a part of that one
                return
            self.cycle.disconnected = True  # so that its own answer does not follow this one
            self.cycle.message_event.set()
            context = cast(Scope, self.scope).get(CONTEXT)
            if context is not None and not has_left:
                context.cut_off = error.status
        else:
            self._refused(error.status)
        body = error.body()
        headers = {
            "Content-Type": "application/json", "Content-Length": len(body), **error.headers,
            "Connection": "close",
        }  # fmt: skip
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name.lower()}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join((*lines, "", "")).encode() + body)
        self._reading = "head"  # whatever it is, it has no end
        self.close()

    def _expect_within(self, seconds: float) -> None:
        self._call_later(seconds, self._hang_up)

    def _call_later(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        """Set the timer, in place of what it was set to."""
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, call, *args)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # What the client takes

    @property
    def unsent(self) -> int:
        return int(self.transport.get_write_buffer_size())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()
        self._clients.stalled(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._clients.reads(self)
        if not self.transport.is_closing() and not self.ending:
            self._stop_write_timer()

    # The transport as an answer sees it

    def write(self, data: bytes) -> None:
        """Send more of the answer, but not again what has been sent of its beginning."""
        if self.begun:
            data, self.begun = data[self.begun :], 0
        self.transport.write(data)

    def is_closing(self) -> bool:
        return self.ending or self.transport.is_closing()

    def close(self) -> None:
        """Close the connection once what the client still sends has been read and dropped."""
        if self.is_closing():
            return
        if self._half_closed or not (self._reading or self._pipelined):
            self._hang_up()
            return
        self.ending = True
        self._unread = 0
        self._clients.idle(self)
        self.flow.resume_reading()
        self.transport.write_eof()
        self._watch_writing()
        self._linger(self.loop.time() + _HEAD_TIMEOUT)

    def _linger(self, until: float) -> None:
        """Check again whether the client still sends, or has not taken all yet."""
        if (self._silent and not self.unsent) or self.loop.time() > until:
            self._hang_up()
            return
        self._silent = True
        self._call_later(_LINGER, self._linger, until)

    def _hang_up(self) -> None:
        """Close as soon as what is unsent is sent, if the client takes it."""
        self.ending = True
        self._stop_timer()
        self.transport.close()
        self._watch_writing()

    def _watch_writing(self) -> None:
        self._stop_write_timer()
        self._unsent = self.unsent
        self._write_timer = self.loop.call_later(self._write_timeout, self._check_writing)

    def _check_writing(self) -> None:
        if not self.unsent:  # all is taken, and only what the client sends is still read away
            self._stop_write_timer()
            return
        taken = self._unsent - self.unsent
        if taken >= min(_LEAST_TAKEN, self._unsent):
            self._watch_writing()
            return
        log.warning(
            "a client took %d bytes in %g s and is dropped, with %d unsent",
            max(0, taken),
            self._write_timeout,
            self.unsent,
        )
        self._clients.drop(self, "not_read")

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def drop(self) -> None:
        """Close at once, and drop what the system has still to send."""
        with suppress(OSError):  # it is closed already
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET
            )
        self.transport.abort()


def _too_large(what: str, most: int) -> ApiError:
    return ApiError(431, f"{what} longer than {most} bytes")
