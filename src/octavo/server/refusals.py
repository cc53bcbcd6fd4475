"""What reading bodies takes that are refused then: a small share of the time, whoever sends them.

A body that costs much to read and is no request is answered late, so that its sender cannot send
the next one at once: all that a key's refused bodies take is about a tenth of one core's time. Who
sends such a body now and then is answered at once, and so is whoever is not at fault. No answer is
later than half a minute: all that have no key are one sender here, and so are all who share one.
Used on the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Receive

from octavo.server.body import unless_gone

T = TypeVar("T")

_SHARE = 0.1  # of the time
_PER_BYTE = 4e-9  # seconds to receive one
_AHEAD = 2.0  # seconds that an answer may come before it is paid for
_LATEST = 30.0  # seconds that an answer waits at most


@dataclass(slots=True)
class Cost:
    """The cost of reading a body: its size in bytes, and the seconds that a thread worked on it."""

    size: int = 0
    seconds: float = 0.0

    def work(self, function: Callable[[bytes], T], body: bytes) -> T:
        """``function`` of ``body``, in whatever thread, and how long that took."""
        began = time.perf_counter()
        try:
            return function(body)
        finally:
            self.seconds += time.perf_counter() - began


class Refusals:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._paid: dict[str, float] = {}  # by client: when all that it cost is paid for
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Nobody waits any more, for the server stops."""
        self._draining.set()

    def delay(self, client: str, cost: Cost) -> float:
        """Seconds until ``client``, the name of a key, is to be told of its refusal."""
        now = self._now()
        paid = max(now, self._paid.get(client, now))
        paid += (cost.seconds + cost.size * _PER_BYTE) / _SHARE
        self._paid[client] = min(paid, now + _AHEAD + _LATEST)
        return max(0.0, self._paid[client] - now - _AHEAD)

    async def pay(self, client: str, cost: Cost, receive: Receive) -> None:
        """Wait for so long. Raises `ClientGone`."""
        if not cost.size:  # nothing was read
            return
        wait = self.delay(client, cost)
        if wait > 0:
            stopped = asyncio.wait_for(self._draining.wait(), wait)
            with suppress(TimeoutError):
                await unless_gone(receive, asyncio.ensure_future(stopped))
