"""Stored tensors by the roles of a Program: exactly those, in exactly its shapes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from octavo.loader.base import CheckpointError, Weight, WeightFormat
from octavo.models.config import ModelConfig
from octavo.models.families import FAMILIES
from octavo.models.family import IntArray

_SHOWN = 8  # most names an error lists
ROUTER = "ffn_gate_inp"
# Of the experts, the gate of the shared one, those of a delta net, and those of attention's heads:
# small, and never quantized.
ROUTERS = (ROUTER, "ffn_gate_inp_shexp", "ssm_beta", "ssm_alpha", "attn_head_gate")
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
    """``stored`` by role, what has none by its own name. Vectors and the weights of convolutions
    [channels, 1, taps] become F32 (exactly), and so do routers of 16 bits: which experts a token
    goes to is decided in full precision.

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
        if len(shape) == 3 and weight.shape == shape[::2]:  # GGUF's form of a convolution
            weight = weight._replace(shape=shape)
        if weight.shape != shape:
            raise CheckpointError(
                f"{path}: tensor {weight.name!r} has shape {list(weight.shape)}; "
                f"the model's metadata asks for {list(shape)}"
            )
        try:
            wide = len(shape) != 2 or (role.endswith(ROUTERS) and weight.format in _HALVES)
            weights[role] = vector(weight) if wide else weight
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None
    return weights


def unread(config: ModelConfig) -> set[str]:
    """The roles of what files may have for layers that read others' keys and values."""
    sharing = (index for index, layer in enumerate(config.layers) if layer.shares is not None)
    parts = ("attn_k", "attn_v", "attn_k_norm")
    return {f"layers.{index}.{part}" for index in sharing for part in parts}


def gathered(
    prefix: str,
    called: str,
    ending: str,
    known: Mapping[str, object],
    config: ModelConfig,
    *,
    gguf: bool,
) -> dict[str, IntArray]:
    """The roles whose rows are interleaved in a tensor of a layer, and where they are in it. None,
    if it is no such tensor, or of roles that are not known.
    """
    for gather in FAMILIES[config.family].gathers:
        roles = {part: prefix + part + ending for part in gather.parts}
        if called == (gather.gguf if gguf else gather.hf) and known.keys() >= set(roles.values()):
            return {roles[part]: rows for part, rows in gather.rows(config).items()}
    return {}


def taken(weight: Weight, places: dict[str, IntArray]) -> dict[str, Weight]:
    """The matrices whose rows are at those places of a tensor. Raises `ValueError`."""
    total = sum(map(len, places.values()))
    if weight.shape[:1] != (total,):
        raise ValueError(
            f"tensor {weight.name!r} has shape {list(weight.shape)}; "
            f"the model's metadata asks for {total} rows"
        )
    return {role: weight.take(rows) for role, rows in places.items()}


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


def expert_biases(role: str, weight: Weight, config: ModelConfig) -> dict[str, Weight]:
    """The experts' biases by role, of a tensor [experts, out] of the role ``role``.

    Raises `ValueError` for another number of experts than the model has.
    """
    count = config.experts.count if config.experts is not None else 0
    if len(weight.shape) != 2 or weight.shape[0] != count:
        raise ValueError(
            f"tensor {weight.name!r} has shape {list(weight.shape)}; "
            f"the model's metadata asks for {count} biases"
        )
    rows = weight.split([1] * count)
    return {f"{role}.{i}.bias": row._replace(shape=row.shape[1:]) for i, row in enumerate(rows)}


def vector(weight: Weight) -> Weight:
    """Norms, biases, convolutions and routers, widened to F32 (exactly) so that executors read one
    format.
    """
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
