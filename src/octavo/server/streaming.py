"""How answers are sent: whole, or as a stream of events made of the engine's deltas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo.engine.outputs import Delta
from octavo.engine.stream import Stream
from octavo.scheduler.request import RequestRecord

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


class MergedStream:
    """Yields (choice of the answer, its next delta), whichever comes first. One stream that fails
    ends all.

    ``observe`` is told the seconds between the tokens of each choice, by the engine's clock: the
    time that a slow client makes a delta wait here is no latency, and the time for which a request
    is paused is not counted.
    """

    def __init__(self, streams: list[Stream], n: int, observe: Callable[[float], None]) -> None:
        """``n``: choices of each stream."""
        self.behind = 0  # deltas that have left their streams and have not been dealt with
        self._streams = streams
        self._n = n
        self._observe = observe
        self._last: dict[int, float] = {}  # when each choice had its last token

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        async for place, delta in self._in_order():
            index = place * self._n + delta.choice
            self.count(index, self._streams[place].record, delta)
            yield index, delta

    def count(self, index: int, record: RequestRecord, delta: Delta) -> None:
        gaps = len(delta.token_ids)
        if not gaps or record.pauses:
            return
        now, before = delta.at, self._last.get(index)
        self._last[index] = now
        if before is None:
            before, gaps = record.first_token or now, gaps - 1
        for _ in range(gaps):
            self._observe((now - before) / gaps)

    async def _in_order(self) -> AsyncIterator[tuple[int, Delta]]:
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield 0, delta
            return
        # The queue has one place: what its reader has not taken waits, joined, in the engine's
        # stream.
        queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(1)

        async def pump(place: int, stream: Stream) -> None:
            try:
                async for delta in stream:
                    self.behind += 1
                    await queue.put((place, delta))
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        tasks = [asyncio.create_task(pump(*each)) for each in enumerate(self._streams)]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
                    self.behind -= 1
        finally:
            for task in tasks:
                task.cancel()
