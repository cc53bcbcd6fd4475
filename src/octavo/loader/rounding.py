"""Float checkpoints rounded to integers while they are loaded (``--quantization``).

Every matrix becomes rows of a grouped format (`Weight`), each number rounded to the nearest
(kernels/quantize.h), when those rows are asked for: a few at a time, so that neither the float
weights nor the rounded ones are ever held whole beside what the kernels keep of them. The embedding
and the output head get 8 bits in either case: together they are read once a token, and their errors
go straight into what is predicted. Norms, biases and the routers of experts stay as they are, and
so does a matrix whose inputs are no multiple of 32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from octavo.loader.base import (
    Bytes,
    Checkpoint,
    CheckpointError,
    MadeRows,
    Weight,
    WeightFormat,
)

if TYPE_CHECKING:
    from octavo import _native

FLOATS = (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16)
BLOCK = 32  # inputs: groups are of whole ones


class RoundingScheme(NamedTuple):
    """How the numbers of a matrix are stored."""

    format: WeightFormat
    group: int  # inputs that share a scale
    symmetric: bool  # without zeros of their own

    def __str__(self) -> str:
        bits = 8 if self.format is WeightFormat.I8 else 4
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{bits} bits, {kind}, groups of {self.group}"


INT8 = RoundingScheme(WeightFormat.I8, 128, True)
INT4 = RoundingScheme(WeightFormat.I4, 64, False)

# By vLLM's names: of the layers, and of the embedding and the output head.
QUANTIZATIONS = {"int8": (INT8, INT8), "int4": (INT4, INT8)}
PLANNED = ("fp8",)  # what plans of GPUs know beside
_HEADS = ("token_embd", "output")


def is_known(quantization: object) -> bool:
    """Whether it is one of these, whatever a user has given."""
    return isinstance(quantization, str) and quantization in QUANTIZATIONS


def summary(checkpoint: Checkpoint, quantization: str) -> str:
    """For people: what `rounded` did."""
    layers, heads = QUANTIZATIONS[quantization]
    text = f"{quantization}, rounded to nearest while loading: {layers}"
    if layers != heads:
        text += f"; embedding and output head {heads}"
    matrices = [weight for weight in checkpoint.weights.values() if len(weight.shape) == 2]
    if kept := sum(weight.format in FLOATS for weight in matrices):
        text += f"; {kept} of {len(matrices)} matrices as stored"
    return text


def rounded(checkpoint: Checkpoint, quantization: str, threads: int = 1) -> Checkpoint:
    """The checkpoint with its matrices rounded whenever they are read, by so many threads.

    Raises `CheckpointError` if one is quantized already (here), or has a weight that is no number
    (where it is read).
    """
    from octavo import _native

    if quantization in PLANNED:
        raise CheckpointError(
            f"quantization {quantization} is for plans of GPUs: CPUs have no fp8 units, and "
            "nothing is rounded to fp8 here; int8 takes about as many bytes"
        )
    layers, heads = QUANTIZATIONS[quantization]
    pool = _native.ThreadPool(threads)
    weights = dict(checkpoint.weights)
    for role, weight in weights.items():
        if len(weight.shape) != 2:
            continue
        if weight.format not in FLOATS:
            raise CheckpointError(
                f"{checkpoint.path}: {quantization} is for float weights, and tensor "
                f"{weight.name!r} is quantized already ({weight.stored.format})"
            )
        if weight.shape[1] % BLOCK == 0 and not role.endswith("ffn_gate_inp"):
            scheme = heads if role in _HEADS else layers
            weights[role] = _rounded(checkpoint, weight, scheme, pool)
    return replace(checkpoint, weights=weights)


def _rounded(
    checkpoint: Checkpoint, weight: Weight, scheme: RoundingScheme, pool: _native.ThreadPool
) -> Weight:
    from octavo import _native

    rows, columns = weight.shape
    group = min(scheme.group, columns)

    def make(first: int, last: int) -> Bytes:
        data = weight.rows(first, last).reshape(-1)
        count, fixed = last - first, (scheme.format, group, scheme.symmetric, pool)
        try:
            return _native.quantize(data, weight.format, count, columns, *fixed)
        except ValueError as error:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {weight.name!r}, from row {first} on: {error}"
            ) from None

    bits = 8 if scheme.format is WeightFormat.I8 else 4
    row_bytes = 5 * -(-columns // group) + columns * bits // 8
    return weight._replace(
        format=scheme.format,
        source=MadeRows(rows, row_bytes, make),
        group=group,
        stored_as=weight.stored,
    )
