"""What a long measurement is at, in one line on a terminal's standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_stderr() -> Iterator[Callable[[str], None]]:
    """Shows one message over the other and clears the line at the end, and for an empty message;
    without a terminal, a line each.
    """
    terminal = sys.stderr.isatty()

    def show(message: str) -> None:
        if terminal:
            print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)
        elif message:
            print(message, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")
