"""``GET /requests``: what the engine is at, for `octavo top` and for operators' scripts.

Who asks, how long and how far: never a prompt's or an answer's text or tokens. OpenAI's API has no
such path, for all of its own are under /v1.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo import __version__
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.snapshot import EngineSnapshot, snapshot
from octavo.server.errors import ApiError, unavailable
from octavo.server.model import ServedModel
from octavo.server.responses import json

_LISTED = 100  # unless asked otherwise
MOST_LISTED = 1000
_PATIENCE = 10.0  # seconds that the engine's step may take before the answer is 503


@dataclass(frozen=True, slots=True)
class RequestList:
    model: str
    version: str
    draining: bool
    engine: EngineSnapshot


class Inspection:
    """However many ask, the engine is looked at once a step at most: askers take turns, and what
    was seen for another since they asked is theirs, too.
    """

    def __init__(self, engine: AsyncEngine, model: ServedModel) -> None:
        self._engine = engine
        self._model = model
        self._turn = asyncio.Lock()
        self._seen: EngineSnapshot | None = None
        self._began, self._limit = 0.0, 0  # of what was seen

    async def answer(self, request: HttpRequest) -> Response:
        limit = _limit(request)
        try:
            async with asyncio.timeout(_PATIENCE):
                seen = await self._snapshot(limit)
        except TimeoutError:
            raise unavailable(
                f"the engine's step has taken more than {_PATIENCE:g} s; /live tells if it hangs"
            ) from None
        answer = RequestList(self._model.name, __version__, self._engine.draining, seen)
        return Response(json.encode(answer), media_type="application/json")

    async def _snapshot(self, limit: int) -> EngineSnapshot:
        asked = time.monotonic()
        async with self._turn:
            if self._seen is None or self._began < asked or self._limit != limit:
                self._began, self._limit = time.monotonic(), limit
                self._seen = await self._engine.inspect(partial(snapshot, limit=limit))
            return self._seen


def _limit(request: HttpRequest) -> int:
    for name in request.query_params:
        if name != "limit":
            raise ApiError(400, f"the query parameter {name[:100]!r} is not known", name[:100])
    given = request.query_params.getlist("limit")
    if not given:
        return _LISTED
    if len(given) > 1 or not re.fullmatch("[0-9]{1,4}", given[0], re.ASCII):
        raise ApiError(400, f"limit must be one number, 0 to {MOST_LISTED}", "limit")
    if int(given[0]) > MOST_LISTED:
        raise ApiError(400, f"limit is {given[0]}, above {MOST_LISTED}", "limit")
    return int(given[0])
