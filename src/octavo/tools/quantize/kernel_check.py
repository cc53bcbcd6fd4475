"""Whether the kernels hold and multiply the numbers that a checkpoint's bytes stand for.

Each matrix is packed as the engine packs it and read back, and compared with its definition in
numpy (loader/dequantize.py); then random activations are multiplied, and compared with the
product in
float64. The kernels round activations, to 8 bits a group of 32 or to bf16, so their product may be
off by as much as that rounding can do:

    |y − ŷ| ≤ Σ over groups of (max |x| of the group / 254) · Σ |w| in the group

and in fixed point (kernels/tier/linear_layout.h) by a little more. What is read back must be the
same to the last bit; scales of grouped formats may be rounded to 11 bits (linear_grouped.h).

In fixed point a column has one unit for all its groups. Where the largest scale is much above the
others, these have few bits left: at 128 × their products are off by 2.5 %, at 1024 × by 22 %. It
shows when what belongs to the large group is zero; such columns are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.executor.native.held_form import held_form
from octavo.loader.base import Checkpoint, CheckpointError, Weight, WeightFormat
from octavo.loader.dequantize import dequantize, group_scales

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

GROUP = 32  # inputs whose activations share a scale
ACTIVATIONS = 4  # rows multiplied
OUTLIER = 100.0  # a group's scale against the median of its column's: beyond, precision is lost
# Formats summed in fixed point, with one scale for all groups of a column.
FIXED_POINT = {
    WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q4_K, WeightFormat.I2, WeightFormat.I3,
    WeightFormat.I4,
}  # fmt: skip

# Of a group's error in fixed point, in units of the largest activation scale of the row by the
# largest weight scale of the column: 32 · 8 · 127 · 0.875 / 2^10 of the dot product's factor and
# (2^13 + 2^14) / 2 / 2^10 of the min's.
_FIXED_POINT_ERROR = 40.0
_ROWS_BYTES = 16 << 20  # of dequantized rows held at a time


@dataclass(slots=True)
class KernelCheck:
    """What was found over a model's matrices."""

    matrices: int = 0
    max_deviation: float = 0.0  # of a weight read back, relative to the largest of its row
    max_product_error: float = 0.0  # as a share of what rounding activations allows
    faults: list[str] = field(default_factory=list)  # each with its tensor's name
    columns: int = 0  # outputs summed in fixed point
    outlier_columns: dict[str, int] = field(default_factory=dict)  # by tensor
    max_outlier: float = 0.0  # a group's scale ÷ the median of its column's, the largest

    def raise_if_faulty(self, checkpoint: Checkpoint) -> None:
        if self.faults:
            more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
            raise CheckpointError(f"{checkpoint.path}: {self.faults[0]}{more}")


def check(
    checkpoint: Checkpoint,
    isa: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    native: Native | None = None,
) -> KernelCheck:
    """Every matrix of the model on one instruction-set tier. Faults are collected, not raised."""
    kernels = native or Native(isa or "")
    found = KernelCheck()
    matrices = [weight for weight in checkpoint.weights.values() if len(weight.shape) == 2]
    for weight in matrices:
        progress(f"checking kernels: {found.matrices} of {len(matrices)} matrices")
        for first, last in _spans(weight):
            _check_rows(weight, first, last, kernels, found)
        found.matrices += 1
    return found


class Native:
    """The kernels' own reading and products, by way of the packed form."""

    def __init__(self, isa: str) -> None:
        self.isa = isa

    def weights(self, weight: Weight, first: int, last: int) -> Float32:
        """[rows, inputs], in the matrix's own order of inputs."""
        weight = held_form(weight)
        data = np.ascontiguousarray(weight.rows(first, last)).reshape(-1)
        shape = last - first, weight.shape[1]
        return _native.dequantize(data, int(weight.format), *shape, self.isa, **_group(weight))

    def product(self, weight: Weight, first: int, last: int, x: Float32) -> Float32:
        """x [rows, inputs], in the matrix's own order, times the transpose."""
        weight = held_form(weight)
        data = np.ascontiguousarray(weight.rows(first, last)).reshape(-1)
        rows = last - first
        return _native.linear(data, int(weight.format), rows, x, self.isa, **_group(weight))


def _group(weight: Weight) -> dict[str, int]:
    return {"group": weight.group or (weight.shape[1] if weight.format.grouped else 0)}


def outlier_columns(weight: Weight, first: int = 0, last: int | None = None) -> Float32 | None:
    """[rows]: of each output, its largest group scale ÷ the median of those that are not zero.

    None for a format that is not summed in fixed point, where it does not matter.
    """
    if held_form(weight).format not in FIXED_POINT:
        return None
    scales = group_scales(weight, first, last)
    if scales is None or scales.shape[1] < 2:
        return None
    scales = np.abs(scales)
    median = np.median(scales, axis=1)
    for row in np.flatnonzero((scales == 0).any(axis=1)).tolist():
        used = scales[row][scales[row] > 0]
        median[row] = np.median(used) if len(used) else 1.0
    ratios: Float32 = scales.max(axis=1) / median
    return ratios


def _spans(weight: Weight) -> Iterator[tuple[int, int]]:
    """Rows of which some megabytes are held."""
    rows, inputs = weight.shape
    step = max(1, _ROWS_BYTES // (4 * inputs))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def _check_rows(weight: Weight, first: int, last: int, kernels: Native, found: KernelCheck) -> None:
    expected = dequantize(weight._replace(order=None), first, last)
    where = f"tensor {weight.name!r} ({weight.format.name})"
    held = kernels.weights(weight, first, last)
    largest = np.abs(expected).max(axis=1, keepdims=True)
    deviation = np.abs(held - expected).max(axis=1) / np.maximum(largest[:, 0], 1e-30)
    worst = int(deviation.argmax())
    found.max_deviation = max(found.max_deviation, float(deviation[worst]))
    if not deviation[worst] <= (2.0**-11 if weight.format.grouped else 0.0):
        found.faults.append(
            f"{where}: the kernels hold other numbers than it has: off by {deviation[worst]:.3g} "
            f"of the largest in row {first + worst}"
        )
    inputs = weight.shape[1]
    x = np.random.default_rng(inputs).standard_normal((ACTIVATIONS, inputs)).astype(np.float32)
    got = kernels.product(weight, first, last, x)
    scales = group_scales(weight, first, last)
    largest_scale = None if scales is None else np.abs(scales).max(axis=1)
    share = product_error(held_form(weight).format, expected, x, got, largest_scale)
    row, column = np.unravel_index(int(share.argmax()), share.shape)
    found.max_product_error = max(found.max_product_error, float(share[row, column]))
    if not share[row, column] <= 1.0:
        found.faults.append(
            f"{where}: a product of output {first + int(column)} is off by "
            f"{share[row, column]:.3g} times what rounding its activations allows"
        )
    ratios = outlier_columns(weight, first, last)
    if ratios is not None:
        found.columns += last - first
        found.max_outlier = max(found.max_outlier, float(ratios.max()))
        if (count := int((ratios > OUTLIER).sum())) > 0:
            before = found.outlier_columns.get(weight.name, 0)
            found.outlier_columns[weight.name] = before + count


def product_error(
    format: WeightFormat, w: Float32, x: Float32, got: Float32, scales: Float32 | None
) -> Float64:
    """[activations, outputs]: how far ``got`` is from x · wᵀ, as a share of what is allowed.

    ``scales`` [outputs]: the largest of each output's groups.
    """
    inputs = x.shape[1]
    true = x.astype(np.float64) @ w.astype(np.float64).T
    # Sums of fp32 numbers, whose rounding every format has.
    size = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    allowed = size * (2.0**-24 * (inputs + 8))
    if format in (WeightFormat.F32, WeightFormat.F16, WeightFormat.E4M3):
        pass
    elif format is WeightFormat.BF16:
        allowed += size * 2.0**-8  # where the tier rounds activations to bf16
    else:
        pad = -inputs % GROUP
        groups = np.pad(np.abs(x), ((0, 0), (0, pad))).reshape(len(x), -1, GROUP).max(axis=2)
        columns = np.pad(np.abs(w), ((0, 0), (0, pad))).reshape(len(w), -1, GROUP)
        allowed += (groups / 254.0).astype(np.float64) @ columns.sum(axis=2).astype(np.float64).T
        if format in FIXED_POINT and scales is not None:
            # min + 8 · scale is a number of the group and at most 8 scales.
            step = scales + columns.max(axis=(1, 2)) / 8.0
            largest = groups.max(axis=1) / 127.0
            allowed += _FIXED_POINT_ERROR * groups.shape[1] * np.outer(largest, step)
    error: Float64 = np.abs(got - true) / np.maximum(allowed, 1e-30)
    return error
