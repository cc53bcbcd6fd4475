"""The models that a benchmark runs on: named on the command line, else those in Octavo's cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

NAMES = ("smollm2", "gemma3-270m")
CACHE = Path(__file__).resolve().parent.parent / "build" / "peers"


def models(arguments: Sequence[str] | None) -> dict[str, Path]:
    """NAME=PATH arguments as a dict; without any, the known models that have been pulled."""
    if arguments:
        return {name: Path(path) for name, _, path in (a.partition("=") for a in arguments)}
    from octavo.checkpoint import pull  # only here: a reference half runs without octavo

    return {name: path for name in NAMES if (path := pull.cached(name))}
