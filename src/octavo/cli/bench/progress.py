"""What a long measurement is at, in one line on a terminal's standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_stderr() -> Iterator[Callable[[str], None]]:
    """Shows one message over the other and clears the line at the end; a line each without a
    terminal.
    """
    terminal = sys.stderr.isatty()

    def show(message: str) -> None:
        print(f"\r\x1b[K{message}" if terminal else message, end="" if terminal else "\n",
              file=sys.stderr, flush=True)  # fmt: skip

    try:
        yield show
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
