"""What commands of all kinds say: what a long one is at, on standard error, and JSON."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def on_stderr() -> Iterator[Callable[[str], None]]:
    """Shows one message over the other and clears the line at the end, and for an empty message;
    without a terminal, or on one that clears no lines, a line each. A message that ends its line
    stays.
    """
    terminal = sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb")

    def show(message: str) -> None:
        if terminal:
            # A longer line would go on in the next, where it cannot be written over.
            width = shutil.get_terminal_size().columns - 1
            if len(message) > width and not message.endswith("\n"):
                message = f"{message[: width - 1]}…"
            print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)
        elif message:
            print(message.rstrip("\n"), file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")


def now_and_then(show: Callable[[str], None], seconds: float = 1.0) -> Callable[[str], None]:
    """Passes on a message a second, or in so many."""
    last = -math.inf

    def progress(message: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= seconds:
            last = now
            show(message)

    return progress


@contextmanager
def writing(path: Path, *, append: bool = False) -> Iterator[Path]:
    """Where to write what ``path`` is to hold. It appears there whole or, after an error or Ctrl-C,
    not at all: an older file stays. Errors of writing, as of a full disk, have its name.
    ``append``: the file itself, of which none of this holds but the name.
    """
    final = path.resolve()
    part = final.with_name(f".part-{final.name}")  # the same suffix: a plot's says its format
    if append or (final.exists() and not final.is_file()) or not os.access(final.parent, os.W_OK):
        part = final  # a pipe or a device; or only the file itself may be written
    try:
        yield part
        if part != final:
            if final.exists():
                shutil.copymode(final, part)
            part.replace(final)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(part)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if part != final:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def json_text(facts: Any, **style: Any) -> str:
    """As `json.dumps` of this style, but strictly JSON, which knows neither infinity nor "not a
    number": they are null.
    """
    return json.dumps(_finite(facts), allow_nan=False, **style)


def _finite(facts: Any) -> Any:
    if isinstance(facts, float):
        return facts if math.isfinite(facts) else None
    if isinstance(facts, dict):
        return {name: _finite(value) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_finite(value) for value in facts]
    return facts


def tell(text: str) -> None:
    """Print on standard error, on a terminal wrapped at words."""
    lines = text.splitlines() or [""]
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = [
            part
            for line in lines
            for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]
        ]
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def columns(rows: Mapping[str, str]) -> str:
    """Names and what they mean, in two columns that fit the terminal."""
    width = shutil.get_terminal_size().columns
    left = 2 + max(map(len, rows))
    lines: list[str] = []
    for name, meaning in rows.items():
        lines += textwrap.wrap(
            meaning,
            max(width, left + 20),
            initial_indent=f"{name:<{left}}",
            subsequent_indent=" " * left,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def wrapped(text: str, indent: str = "", width: int = 98) -> list[str]:
    """Lines of at most so many columns, broken at words."""
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
