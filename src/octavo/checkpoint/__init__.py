"""Where weights, tokenizer and chat template come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.checkpoint.base import Checkpoint


def load(path: Path) -> Checkpoint:
    """Reads a model file. Raises `CheckpointError` naming the file and what is wrong with it."""
    from octavo.checkpoint import loader  # tokenizers and jinja2: only those who load wait for them

    return loader.load(path)
