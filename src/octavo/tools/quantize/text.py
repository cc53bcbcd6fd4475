"""Texts that users name, to calibrate with or to measure on."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path, error: type[ValueError]) -> str:
    """Raises ``error`` for what is not UTF-8, and `OSError`."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as fault:
        raise error(f"{path}: is not UTF-8 text: byte {fault.start}") from None
