"""A look at the engine between two steps, for whoever awaits what it shows on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from octavo.engine.engine import Engine


class Inspection(NamedTuple):
    at: Callable[[Engine], Any]
    loop: asyncio.AbstractEventLoop
    seen: asyncio.Future[Any]  # on ``loop``: what ``at`` makes of the engine

    def take(self, engine: Engine) -> None:
        """On the engine's thread."""
        if self.seen.cancelled():
            return
        try:
            self.end(self.seen.set_result, self.at(engine))
        except Exception as error:
            self.end(self.seen.set_exception, error)

    def end(self, settle: Callable[[Any], None], value: object) -> None:
        """From any thread."""

        def told() -> None:
            if not self.seen.done():  # whoever asked may have gone
                settle(value)

        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(told)
