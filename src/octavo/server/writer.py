"""How the events of a stream are sent."""

from __future__ import annotations

import asyncio
import time
import weakref

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_WRITE = "octavo.write"
_KEEP_ALIVE = b": keep-alive\n\n"
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold tokens back
]


class DirectWrite:
    """Writes pieces of an answer past the layers of ASGI, which cost more than the write itself
    where each token is one. The start and the end of an answer go through the layers.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # which holds the scope that holds this

    def attach(self, scope: Scope) -> None:
        scope[_WRITE] = self

    @staticmethod
    def of(scope: Scope) -> DirectWrite | None:
        """None under another server than this one."""
        found = scope.get(_WRITE)
        return found if isinstance(found, DirectWrite) else None

    @property
    def ready(self) -> bool:
        """Whether `write` may be called: an answer in chunks is under way, and its client takes
        what it is sent.
        """
        cycle = self._cycle()
        return (
            cycle is not None
            and cycle.chunked_encoding is True
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
            and not cycle.transport.is_closing()
        )

    def write(self, data: bytes) -> None:
        cycle = self._cycle()
        assert cycle is not None
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Writer:
    """Sends events. The answer begins with the first of them: until then it can still be another
    one.
    """

    def __init__(self, send: Send, direct: DirectWrite | None) -> None:
        self._send = send
        self._direct = direct
        self._sending = asyncio.Lock()
        self.begun = False
        self.last_write = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether `write_now` may be called."""
        return self._direct is not None and self.begun and not self.busy and self._direct.ready

    @property
    def busy(self) -> bool:
        """Whether something waits to be sent, before which nothing else may be."""
        return self._sending.locked()

    def write_now(self, data: bytes) -> None:
        assert self._direct is not None
        self._direct.write(data)
        self.last_write = time.monotonic()

    async def write(self, data: bytes, *, last: bool = False) -> None:
        async with self._sending:
            if not self.begun:
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS}
                )
                self.begun = True
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
            self.last_write = time.monotonic()


def keep_alive(writer: Writer, interval: float) -> asyncio.Task[None] | None:
    """Keeps a silent stream alive with comments, which clients skip."""
    if not interval:
        return None

    async def beat() -> None:
        while True:
            rest = writer.last_write + interval - time.monotonic()
            if rest <= 0 and not writer.busy:
                await writer.write(_KEEP_ALIVE)
            else:
                await asyncio.sleep(rest if rest > 0 else interval)

    return asyncio.create_task(beat())
