"""Stored weights as the fp32 numbers they stand for: what a quantizer starts from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.checkpoint.base import Weight, WeightFormat

Float32 = npt.NDArray[np.float32]


def dequantize(weight: Weight) -> Float32:
    """The exact numbers of a weight of any format, in its shape.

    A matrix of a grouped format with an input order has it undone: column i is input i.
    """
    data = weight.data
    match weight.format:
        case WeightFormat.F32:
            return data.view("<f4").reshape(weight.shape)
        case WeightFormat.F16:
            return data.view("<f2").reshape(weight.shape).astype(np.float32)
        case WeightFormat.BF16:
            wide = data.view("<u2").astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).reshape(weight.shape)
    if weight.format.grouped:
        return _grouped(weight)
    rows, columns = weight.shape
    return _native.dequantize(np.ascontiguousarray(data), weight.format, rows, columns)


def _grouped(weight: Weight) -> Float32:
    """The rows of `Weight`: scales, zeros, then a stream of integers of b bits."""
    out, inputs = weight.shape
    bits = {WeightFormat.I3: 3, WeightFormat.I4: 4, WeightFormat.I8: 8}[weight.format]
    group = weight.group or inputs
    groups = -(-inputs // group)
    rows = weight.data.reshape(out, -1)
    scales = np.ascontiguousarray(rows[:, : 4 * groups]).view("<f4")
    zeros = rows[:, 4 * groups : 5 * groups].astype(np.float32)
    stream = np.unpackbits(rows[:, 5 * groups :], axis=1, bitorder="little")
    numbers = stream[:, : bits * inputs].reshape(out, inputs, bits) @ (1 << np.arange(bits))
    of = np.arange(inputs) // group
    values: Float32 = scales[:, of] * (numbers.astype(np.float32) - zeros[:, of])
    if weight.order is None:
        return values
    plain = np.empty_like(values)
    plain[:, weight.order] = values
    return plain
