"""One look at the engine for all who ask at the same time (``GET /requests``)."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.snapshot import EngineSnapshot, snapshot
from octavo.server.errors import unavailable

_PATIENCE_S = 10.0  # how long the engine's step may take before the answer is 503


class SharedSnapshot:
    """Looks at the engine at most once a step, however many ask: they take turns, and what was
    seen for another since they asked is theirs, too.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()
        self._seen: EngineSnapshot | None = None
        self._began, self._limit = 0.0, 0  # of what was seen

    async def take(self, limit: int) -> EngineSnapshot:
        """Return what the engine does now, with at most ``limit`` requests. Raises a 503."""
        asked = time.monotonic()
        try:
            async with asyncio.timeout(_PATIENCE_S), self._turn:
                if self._seen is None or self._began < asked or self._limit != limit:
                    self._began, self._limit = time.monotonic(), limit
                    self._seen = await self._engine.inspect(partial(snapshot, limit=limit))
                return self._seen
        except TimeoutError:
            raise unavailable(
                f"the engine's step has taken more than {_PATIENCE_S:g} s; /live tells if it hangs"
            ) from None
