"""Stored tensors by the roles of a Program: exactly those, in exactly its shapes."""

from __future__ import annotations

import ctypes

import numpy as np

from octavo.loader.base import CheckpointError, Weight, WeightFormat
from octavo.models.config import ModelConfig

_SHOWN = 8  # most names an error lists
ROUTER = "ffn_gate_inp"
_HALVES = (WeightFormat.F16, WeightFormat.BF16)
# Tensors that hold all experts of a layer, and what of an expert lies one after the other in them.
STACKS = {
    "ffn_gate_exps": ("ffn_gate_exps",),
    "ffn_up_exps": ("ffn_up_exps",),
    "ffn_down_exps": ("ffn_down_exps",),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}


def bind(
    path: str, stored: dict[str, Weight], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Weight]:
    """``stored`` by role, what has none by its own name. Vectors become F32 (exactly), and so do
    routers of 16 bits: which experts a token goes to is decided in full precision.

    Raises `CheckpointError` naming what is missing, left over, or of another shape.
    """
    if missing := sorted(shapes.keys() - stored.keys()):
        raise CheckpointError(f"{path}: has no tensor for {listed(missing)}")
    if unused := sorted(stored.keys() - shapes.keys()):
        raise CheckpointError(
            f"{path}: has tensors that this model family does not use: {listed(unused)}"
        )
    weights = {}
    for role, shape in shapes.items():
        weight = stored[role]
        if weight.shape != shape:
            raise CheckpointError(
                f"{path}: tensor {weight.name!r} has shape {list(weight.shape)}; "
                f"the model's metadata asks for {list(shape)}"
            )
        try:
            wide = len(shape) == 1 or (role.endswith(ROUTER) and weight.format in _HALVES)
            weights[role] = vector(weight) if wide else weight
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None
    return weights


def experts(prefix: str, part: str, weight: Weight, config: ModelConfig) -> dict[str, Weight]:
    """The experts' matrices by role, of a tensor of `STACKS` that holds them all.

    Raises `ValueError` for another number of experts than the model has.
    """
    count = config.experts.count if config.experts is not None else 0
    if weight.shape[:1] != (count,):
        raise ValueError(
            f"tensor {weight.name!r} has shape {list(weight.shape)}; "
            f"the model's metadata asks for {count} experts"
        )
    found = {}
    for index, matrices in enumerate(weight.stacked(len(STACKS[part]))):
        for each, matrix in zip(STACKS[part], matrices, strict=True):
            found[f"{prefix}.{each}.{index}"] = matrix
    return found


def vector(weight: Weight) -> Weight:
    """Norms, biases and routers, widened to F32 (exactly) so that executors read one format."""
    if weight.format is WeightFormat.F32:
        return weight
    if weight.format is WeightFormat.F16:
        wide = weight.data.view("<f2").astype("<f4")
    elif weight.format is WeightFormat.BF16:
        wide = (weight.data.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    else:
        raise ValueError(
            f"tensor {weight.name!r} is a vector of type {weight.format.name}, not a float's"
        )
    wide.flags.writeable = False
    return weight._replace(
        format=WeightFormat.F32, source=wide.view(np.uint8), stored_as=weight.stored
    )


def listed(names: list[str]) -> str:
    """Names for an error message, the first few of many."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def trim_heap() -> None:
    """Building a tokenizer leaves tens of megabytes that the C library keeps for later."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
