"""The deltas of the streams that make one answer, in the order they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from octavo.engine.outputs import Delta
from octavo.engine.stream import Stream
from octavo.scheduler.request import RequestRecord


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
