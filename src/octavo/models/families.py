"""The model families: a file for each architecture, with a function from a shape to its
computation.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.models import gemma2, gemma3, granite, llama, olmo2, qwen3
from octavo.models.config import ModelConfig
from octavo.models.program import Program

FAMILIES: dict[str, Callable[[ModelConfig], Program]] = {
    "llama": llama.program,
    "qwen2": llama.program,
    "qwen3": qwen3.program,
    "gemma2": gemma2.program,
    "gemma3": gemma3.program,
    "phi3": llama.program,
    "granite": granite.program,
    "olmo2": olmo2.program,
    "mixtral": llama.program,
    "qwen3moe": qwen3.program,
}


def program(config: ModelConfig, max_model_len: int | None = None) -> Program:
    """Return the Program of a model, for sequences of up to ``max_model_len`` tokens (None: as many
    as it admits by default).

    The length matters only to rotary positions that depend on it (`Rope.for_length`). Raises
    `ValueError` when the family is not supported.
    """
    if config.family not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ValueError(
            f"model family {config.family!r} is not supported; supported are {supported}"
        )
    return FAMILIES[config.family](config.for_length(max_model_len or config.default_length))
