"""Other threads, at whatever pace they come: waits that end and say what did not come, and steps
that an engine takes only as they are let.
"""

import asyncio
import inspect
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from octavo.engine.async_engine import AsyncEngine

PATIENCE = 120.0  # seconds, after which what others are to do does not come any more


async def until(holds: Callable[[], object], what: str = "it") -> None:
    """Wait, while the loop goes on, for ``what``, which has come when it ``holds``: that may be an
    awaitable.
    """
    end = time.monotonic() + PATIENCE
    while True:
        found = holds()
        if await found if inspect.isawaitable(found) else found:
            return
        assert time.monotonic() < end, f"{what} did not come"
        await asyncio.sleep(0.001)


def held_up_until(holds: Callable[[], object], what: str) -> None:
    """As `until`, and nothing else happens in this thread meanwhile: its loop is late."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.001)


def lose_patience(engine: AsyncEngine) -> None:
    """A step that takes longer than a moment has hung, from now on: not before all is as the test
    needs it, however long that takes.
    """
    if engine._watchdog is not None:
        engine._watchdog.cancel()
        engine._watchdog = None
    engine.hang_timeout = 0.2
    engine._arm_watchdog()


class Leave:
    """An executor's steps, or what else ``name`` says, wait until they are let: so none has been
    taken, and nothing has come to its end, before the test has looked.
    """

    def __init__(self, executor: Any, name: str = "execute") -> None:
        self.asked = 0  # steps that have come here
        self._let = 0
        self._may = threading.Semaphore(0)
        self._all = False
        step = getattr(executor, name)

        def step_with_leave(*args: Any) -> Any:
            self.asked += 1
            if not self._all and not self._may.acquire(timeout=PATIENCE):
                raise TimeoutError("nobody let the step go on")
            return step(*args)

        setattr(executor, name, step_with_leave)

    def let(self, steps: int = 1) -> None:
        self._let += steps
        self._may.release(steps)

    def let_one_that_waits(self) -> None:
        """If one does."""
        if self._has_asked(self._let + 1):
            self.let()

    def let_all(self) -> None:
        """From now on."""
        self._all = True
        self._may.release()

    def _has_asked(self, step: int) -> bool:
        return self.asked >= step

    @asynccontextmanager
    async def one_by_one(self) -> AsyncIterator[None]:
        """Steps go on, each when the loop has seen what the one before has brought. When none comes
        any more, the body is ended, whatever it waits for.
        """

        async def go_on() -> None:
            for step in itertools.count(self._let + 1):
                await until(partial(self._has_asked, step), "the next step")
                for _ in range(3):  # it is delivered, and whoever waits for it has awoken
                    await asyncio.sleep(0)
                self.let()

        body = asyncio.current_task()
        going_on = asyncio.create_task(go_on())
        going_on.add_done_callback(lambda ended: ended.cancelled() or body.cancel())
        try:
            yield
        finally:
            going_on.cancel()
            self.let_all()
            if going_on.done() and not going_on.cancelled():
                going_on.result()
