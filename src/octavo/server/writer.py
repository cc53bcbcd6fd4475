"""How answers are sent: whole, or as the events of a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_KEEP_ALIVE = b": keep-alive\n\n"
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold tokens back
]


class Writer:
    """Sends events. The answer begins with the first of them: until then it can still be another
    answer.

    The start and the end of an answer go through the layers of ASGI. `write_now` goes past them:
    where each token is an event, the layers would cost more than the write itself.
    """

    def __init__(self, send: Send, cycle: RequestResponseCycle | None) -> None:
        """``cycle``: uvicorn's state of the answer; None under another server."""
        self._send = send
        self._cycle = cycle
        self._sending = asyncio.Lock()
        self.begun = False
        self.last_write = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether `write_now` may be called: an answer in chunks is under way, nothing else waits
        to be sent, and the client takes what it is sent.
        """
        cycle = self._cycle
        return (
            cycle is not None
            and self.begun
            and not self._sending.locked()
            and cycle.chunked_encoding is True
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
            and not cycle.transport.is_closing()
        )

    def write_now(self, data: bytes) -> None:
        assert self._cycle is not None
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
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

    async def keep_alive(self, interval_s: float) -> None:
        """Send a comment, which clients skip, after each ``interval_s`` of silence."""
        while True:
            rest = self.last_write + interval_s - time.monotonic()
            if rest <= 0 and not self._sending.locked():
                await self.write(_KEEP_ALIVE)
            else:
                await asyncio.sleep(rest if rest > 0 else interval_s)


async def send_whole(
    send: Send,
    body: bytes,
    content_type: str = "application/json",
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> None:
    fields = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
