"""Round to nearest as ggml does it, block by block, to the last bit.

From the reference in the gguf package (ggml-org, gguf-py, quants.py): codes come of the scale
before it is rounded to fp16, and each format rounds halves in a way of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.tools.quantize.grid import CodeKind, Float32, Grid, Quantized, Scheme, quantized

BLOCK = 32


def ggml_round(scheme: Scheme, weights: Float32) -> Quantized:
    """A matrix [out, in] in blocks of 32. Raises `ValueError` for what fp16 scales cannot hold."""
    out, inputs = weights.shape
    blocks = weights.reshape(out, -1, BLOCK)
    low: Float32 | None = None
    if scheme.kind.has_low:
        low = blocks.min(axis=2, keepdims=True)
        scale = (blocks.max(axis=2, keepdims=True) - low) / np.float32(scheme.levels)
        codes = np.trunc((blocks - low) * _inverse(scale) + np.float32(0.5))
    else:
        at = np.abs(blocks).argmax(axis=2)[..., None]
        top = np.take_along_axis(blocks, at, axis=2)
        if scheme.kind is not CodeKind.Q8_0:
            scale = top / -scheme.middle
            wide = blocks.astype(np.float64) * _inverse(scale).astype(np.float64)
            codes = np.trunc(wide + float(scheme.middle) + 0.5).astype(np.float32)
        else:
            scale = np.abs(top) / np.float32(127.0)
            codes = _away(blocks * _inverse(scale)) + np.float32(128.0)
    codes = np.clip(codes, scheme.least, scheme.levels).reshape(out, inputs)
    step = _half(scale)
    zero = np.full_like(step, scheme.middle)
    grid = Grid(step, zero, None if low is None else _half(low))
    return quantized(scheme, codes, grid, np.arange(inputs) // BLOCK)


def _inverse(scale: npt.NDArray[np.floating]) -> Float32:
    """0 of 0."""
    zeros = np.zeros(scale.shape, np.float32)
    np.divide(np.float32(1.0), scale, out=zeros, where=scale != 0.0)
    return zeros


def _away(values: Float32) -> Float32:
    """Rounded, halves away from zero."""
    magnitude = np.abs(values)
    floor = np.floor(magnitude)
    rounded: Float32 = np.copysign(floor + np.floor(2.0 * (magnitude - floor)), values)
    return rounded.astype(np.float32, copy=False)


def _half(values: Float32) -> Float32:
    """[out, blocks], as fp16 has them."""
    with np.errstate(over="ignore"):
        half = values[..., 0].astype(np.float16).astype(np.float32)
    if not np.isfinite(half).all():
        raise ValueError("has weights too large for 16-bit scales")
    return half
