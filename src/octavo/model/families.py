"""The model families: one file each, a function from a shape to its computation."""

from __future__ import annotations

from collections.abc import Callable

from octavo.model import gemma3, llama
from octavo.model.config import ModelConfig
from octavo.model.program import Program

FAMILIES: dict[str, Callable[[ModelConfig], Program]] = {
    "llama": llama.program,
    "gemma3": gemma3.program,
}


def program(config: ModelConfig) -> Program:
    """The Program of a model. Raises `ValueError` when its family is not supported."""
    if config.family not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ValueError(
            f"model family {config.family!r} is not supported; supported are {supported}"
        )
    return FAMILIES[config.family](config)
