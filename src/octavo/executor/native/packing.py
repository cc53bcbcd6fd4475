"""Weights as the native executor holds them: packed for the kernels of an instruction-set tier."""

from __future__ import annotations

import os
from collections.abc import Mapping

from octavo import _native
from octavo.executor.cost import Arithmetic, CostModel
from octavo.executor.native.held_form import held_form
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader.base import CheckpointError, Weight, WeightFormat
from octavo.models.program import Program, RowOp

_INPUTS = 32  # of a grouped format's matrix: a multiple (kernels/linear.h)
_FLOATS = (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16, WeightFormat.E4M3)


def held_bytes(weight: Weight, isa: str | None = None) -> int:
    """Return the bytes of the executor's own copy of a weight, packed for a tier.

    Raises `CheckpointError`, naming the tensor, for a matrix that no kernel takes, and `ValueError`
    for an unknown tier.
    """
    if len(weight.shape) != 2:
        return weight.nbytes
    if weight.format.grouped and weight.shape[1] % _INPUTS:
        raise CheckpointError(
            f"tensor {weight.name!r} has {weight.shape[1]} inputs; "
            f"kernels take multiples of {_INPUTS} in {weight.format.name}"
        )
    held = held_form(weight)
    return _native.packed_bytes(int(held.format), *weight.shape, tier_name(isa), held.group)


def scaled_bytes(program: Program) -> dict[str, int]:
    """Return, by role, the bytes of vectors that are kept multiplied by a factor, too: a copy for
    each factor.
    """
    functions = [op.row_function() for op in program.ops if isinstance(op, RowOp)]
    sizes: dict[str, int] = {}
    for role, factor in {weight for function in functions for weight in function.weights}:
        if factor != 1.0:
            sizes[role] = sizes.get(role, 0) + 4 * program.weights[role][0]
    return sizes


def check_isa(isa: str) -> None:
    """Raise `ValueError` for an instruction set that this build or this CPU does not have."""
    _native.packed_bytes(int(WeightFormat.F32), 1, 32, isa)


def tier_name(isa: str | None) -> str:
    """Return ``isa``, else ``OCTAVO_ISA``. Raises `ValueError`, naming the variable, if that names
    no tier of this machine.
    """
    if isa is not None:
        return isa
    if name := os.environ.get("OCTAVO_ISA", ""):
        try:
            check_isa(name)
        except ValueError as error:
            raise ValueError(f"OCTAVO_ISA: {error}") from None
    return name


def arithmetic_of(format: WeightFormat, isa: str) -> Arithmetic:
    """Return what a tier multiplies a matrix of this format with."""
    if format not in _FLOATS:
        return Arithmetic.INT8
    bf16 = format is WeightFormat.BF16 and isa == "avx512_bf16"
    return Arithmetic.BF16 if bf16 else Arithmetic.FP32


def attention_arithmetic(dtype: KvDtype, isa: str) -> Arithmetic:
    """Return what a tier multiplies keys and values with."""
    if dtype is KvDtype.BF16 and isa == "avx512_bf16":
        return Arithmetic.BF16
    codes = dtype in (KvDtype.INT8, KvDtype.INT4)
    return Arithmetic.INT8 if codes and isa.startswith("avx512") else Arithmetic.FP32


def cost_model(
    program: Program, layout: KvLayout, held: Mapping[str, tuple[WeightFormat, int]], isa: str
) -> CostModel:
    """Return the costs of a program on a tier, from the format and the bytes of each weight."""
    return CostModel(
        program,
        layout,
        weight_bytes={role: held[role][1] for role in program.weights},
        arithmetic={role: arithmetic_of(held[role][0], isa) for role in program.weights},
        attention=attention_arithmetic(layout.dtype, isa),
    )
