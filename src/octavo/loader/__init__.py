"""Where weights, tokenizer and chat template come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.loader.base import Checkpoint


def load(path: Path) -> Checkpoint:
    """Reads a model file. Raises `CheckpointError` naming the file and what is wrong with it."""
    from octavo.loader import loader

    return loader.load(path)
