"""The models that a benchmark runs on: named on the command line, else those in Octavo's cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

NAMES = ("smollm2", "gemma3-270m")
MADE = ("smollm2-q4_0", "llama-1b-q4_0", "qwen3moe-1b-q4_0")  # by make_models.py
CACHE = Path(__file__).resolve().parent.parent / "build" / "peers"


def models(arguments: Sequence[str] | None) -> dict[str, Path]:
    """NAME=PATH arguments as a dict; without any, the known models that have been pulled.

    An argument that is a path alone is named after its file; a path may be whatever
    `octavo serve` takes.
    """
    if arguments:
        pairs = (a.rpartition("=") for a in arguments)
        return {name or Path(path).stem: _file(path) for name, _, path in pairs}
    from octavo.loader import pull

    return {name: path for name in NAMES if (path := pull.cached(name))}


def _file(path: str) -> Path:
    if Path(path).exists():
        return Path(path)
    from octavo.loader import pull

    return pull.resolve(path)


def made(name: str) -> Path:
    """Where `make_models.py` puts a model of `MADE`."""
    return CACHE / f"{name}.gguf"
