"""The screen, kept up to date: reads the server, listens to keys, follows the terminal's size."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console, Group
from rich.live import Live

from octavo.tools.top.figures import SORTS, History, ServerStats
from octavo.tools.top.keys import key_by_key
from octavo.tools.top.source import Source, SourceError
from octavo.tools.top.view import ViewState, screen, span


async def look(source: Source, seconds: float) -> ServerStats:
    """Two samples so many seconds apart, so that rates are of now. Raises `SourceError`."""
    history = History()
    history.add(await source.read())
    await asyncio.sleep(seconds)
    history.add(await source.read())
    return history.figures(since_start=True)


def print_once(figures: ServerStats, console: Console, url: str) -> None:
    state = ViewState(url, live=False, unicode="utf" in console.encoding)
    for line in screen(figures, state, console.width, None):
        console.print(line, soft_wrap=True)


async def tell(
    source: Source, seconds: float, show: Callable[[ServerStats], None], miss: Callable[[str], None]
) -> None:
    """``show`` the figures for ever, and each time that there are none ``miss`` them, saying why.
    Raises `SourceError` where it cannot even begin, or will not be answered any more.
    """
    history = History()
    while True:
        began = time.monotonic()
        try:
            history.add(await source.read())
        except SourceError as error:
            if error.final or history.empty:
                raise
            miss(str(error))
        else:
            show(history.figures())
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))


class Screen:
    """`octavo top` in a terminal, until q or Ctrl-C."""

    def __init__(self, source: Source, seconds: float, console: Console) -> None:
        self._source = source
        self._seconds = seconds
        self._console = console
        self._state = ViewState(source.url, unicode="utf" in console.encoding)
        self._history = History()
        self._figures: ServerStats | None = None
        self._heard = time.monotonic()  # from the server

    async def run(self) -> None:
        """Raises `SourceError` if the first answer says that the next will be no better."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        with (
            Live(console=self._console, screen=True, auto_refresh=False) as live,
            key_by_key() as keys,
        ):

            def draw() -> None:
                size = self._console.size
                lines = screen(self._figures, self._state, size.width, size.height)
                live.update(Group(*lines), refresh=True)

            def on_key() -> None:
                typed = os.read(keys, 64).decode(errors="replace")
                if not typed or "q" in typed.lower() or "\x03" in typed:
                    ended.set()
                for key in typed.lower():
                    self._press(key)
                draw()

            loop.add_reader(keys, on_key)
            loop.add_signal_handler(signal.SIGWINCH, draw)
            for which in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(which, ended.set)
            reading = loop.create_task(self._read(draw))
            waiting = loop.create_task(ended.wait())
            try:
                await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    reading.result()
            finally:
                loop.remove_reader(keys)
                for which in (signal.SIGWINCH, signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(which)
                for task in (reading, waiting):
                    task.cancel()
                    with suppress(asyncio.CancelledError, SourceError):
                        await task

    def _press(self, key: str) -> None:
        if key == "s":
            following = SORTS[(SORTS.index(self._state.sort) + 1) % len(SORTS)]
            self._state = self._state._replace(sort=following)
        elif key == "p":
            self._state = self._state._replace(paused=not self._state.paused)
            if not self._state.paused and not self._history.empty:
                self._figures = self._history.figures()

    async def _read(self, draw: Callable[[], None]) -> None:
        while True:
            began = time.monotonic()
            try:
                self._history.add(await self._source.read())
            except SourceError as error:
                if error.final and self._history.empty:
                    raise
                silent = span(time.monotonic() - self._heard)
                self._state = self._state._replace(trouble=f"no answer for {silent}: {error}")
            else:
                self._heard = time.monotonic()
                self._state = self._state._replace(trouble="")
                if not self._state.paused:
                    self._figures = self._history.figures()
            draw()
            await asyncio.sleep(max(0.0, began + self._seconds - time.monotonic()))
