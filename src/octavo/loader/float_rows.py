"""Rows of E4M3 and NVFP4 (`Weight`), made of what folders store: fp8 numbers with scales of the
tensor, of outputs or of blocks, and fp4 numbers with fp8 scales of 16 inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Bytes, MadeRows, Stored, Weight, WeightFormat
from octavo.loader.quantized_layout import FLOATS, Layout, Module, wide

Float32 = npt.NDArray[np.float32]

FP4_GROUP = 16  # inputs that share an fp8 scale
_STEP = 16  # inputs: groups of E4M3 are of whole ones (kernels/linear.h)
_BLOCK = 32  # inputs: NVFP4's rows are of whole ones


def fp8_weight(
    layout: Layout, module: Module, shape: tuple[int, int], scale: str, block: tuple[int, int]
) -> Weight:
    """The module's ``weight`` of E4M3 numbers, times its tensor ``scale``: one number, one for each
    output, or one for each ``block`` of outputs and inputs (0, 0: there are none).
    """
    n, k = shape
    codes = layout.shaped(module, "weight", shape, "F8_E4M3")
    scales = layout.array(module, scale, *FLOATS)
    rows, columns = block
    blocks = (-(-n // rows), -(-k // columns)) if rows else None
    if blocks is not None and scales.shape == blocks:
        if columns % _STEP and columns < k:
            name = layout.name(module, scale)
            layout.stored.refuse(name, f"is of blocks of {columns} inputs, no multiple of {_STEP}")
        group = -(-min(columns, k) // _STEP) * _STEP
    elif scales.size in (1, n) and scales.shape in ((), (1,), (1, 1), (n,), (n, 1)):
        rows, group = (1 if scales.size == n else n), -(-k // _STEP) * _STEP
        scales = scales.reshape(-1, 1)
    else:
        of_blocks = [] if blocks is None else [list(blocks)]
        layout.refuse_shape(module, scale, " or ".join(map(str, [[1], [n, 1], *of_blocks])))
    count = scales.shape[1]

    def make(first: int, last: int) -> Bytes:
        made = np.empty((last - first, 4 * count + k), np.uint8)
        chosen = _finite(layout, module, scale, wide(scales[np.arange(first, last) // rows]))
        made[:, : 4 * count] = chosen.view(np.uint8)
        made[:, 4 * count :] = codes[first:last]
        return made.reshape(-1)

    return Weight(
        layout.name(module, "weight"),
        WeightFormat.E4M3,
        shape,
        MadeRows(n, 4 * count + k, make),
        group,
        stored_as=_stored(layout, module, "fp8"),
    )


def fp4_weight(
    layout: Layout,
    module: Module,
    shape: tuple[int, int],
    part: str,
    scale: str,
    of_tensor: Callable[[Float32], Float32],
) -> Weight:
    """The module's tensor ``part`` of E2M1 numbers, two in a byte, the first in the low half, times
    ``weight_scale`` of 16 inputs each (E4M3), times what ``of_tensor`` makes of the number in
    ``scale``.
    """
    n, k = shape
    if k % _BLOCK:
        layout.stored.refuse(
            layout.name(module, part), f"has rows of {k} numbers, no multiple of {_BLOCK}"
        )
    codes = layout.shaped(module, part, (n, k // 2), "U8")
    scales = layout.shaped(module, "weight_scale", (n, k // FP4_GROUP), "F8_E4M3")
    number = layout.array(module, scale, *FLOATS)
    if number.size != 1:
        layout.refuse_shape(module, scale, [1])
    with np.errstate(divide="ignore"):
        factor = of_tensor(wide(number).reshape(1))
    blocks = k // _BLOCK

    def make(first: int, last: int) -> Bytes:
        rows = last - first
        made = np.empty((rows, 4 + blocks * 18), np.uint8)
        made[:, :4] = _finite(layout, module, scale, factor).view(np.uint8)
        parts = made[:, 4:].reshape(rows, blocks, 18)
        parts[:, :, :2] = scales[first:last].reshape(rows, blocks, 2)
        parts[:, :, 2:] = codes[first:last].reshape(rows, blocks, 16)
        return made.reshape(-1)

    return Weight(
        layout.name(module, part),
        WeightFormat.NVFP4,
        shape,
        MadeRows(n, 4 + blocks * 18, make),
        stored_as=_stored(layout, module, "nvfp4"),
    )


def _finite(layout: Layout, module: Module, part: str, scales: Float32) -> Float32:
    if not np.isfinite(scales).all():
        layout.stored.refuse(layout.name(module, part), "has a scale that is not finite")
    return np.ascontiguousarray(scales, "<f4")


def _stored(layout: Layout, module: Module, kind: str) -> Stored:
    nbytes = sum(layout.stored.nbytes(name) for name in module.tensors.values())
    return Stored(f"{layout.quantization.method}-{kind}", nbytes)
