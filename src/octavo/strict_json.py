"""What JSON leaves open, decided: for readers of files and of flags alike."""

from __future__ import annotations

from typing import Any


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook``: an object in which no key appears twice. Raises `ValueError`."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} appears twice")
        found[key] = value
    return found
