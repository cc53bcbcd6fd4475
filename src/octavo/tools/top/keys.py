"""Keys as they are pressed."""

from __future__ import annotations

import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def key_by_key() -> Iterator[int]:
    """The descriptor of standard input, a terminal, which gives each key at once, without echo."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
