"""Matrices as ggml's blocks: K-quants, and the formats of 32 weights that stand in for them.

A K-quant's block has 256 weights, in 8 groups of 32 or 16 of 16, whose integer scales (and
minimums) are multiplied by one half (two) of the block; the layouts are ggml's (ggml repository,
ggml-common.h). loader/dequantize.py says what the bytes mean; here is the way back.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Weight, WeightFormat
from octavo.loader.dequantize import dequantize
from octavo.loader.gguf import BLOCKS
from octavo.machine.cpu import usable_cpus
from octavo.tools.quantize.block_search import (
    Groups,
    SharedFit,
    fit,
    fit_shared_ranges,
    fit_shared_scales,
    half,
    inverse,
)
from octavo.tools.quantize.grid import Float32

Bytes = npt.NDArray[np.uint8]

_PIECE = 1 << 16  # weights searched at a time, so that the search stays in the cache
_LEAST = 1e-4  # of the mean importance, that every input has


@dataclass(frozen=True, slots=True)
class GgmlBlocks:
    """A matrix [out, in] in a format of ggml's: rows of blocks."""

    format: WeightFormat
    data: Bytes  # [out, bytes of a row]

    @property
    def shape(self) -> tuple[int, int]:
        count, size = BLOCKS[self.format]
        rows, row_bytes = self.data.shape
        return rows, row_bytes // size * count

    def values(self) -> Float32:
        """The weights that it stands for, [out, in]."""
        return dequantize(Weight("", self.format, self.shape, self.data.reshape(-1)))

    def rows(self, index: npt.NDArray[np.intp] | slice) -> GgmlBlocks:
        """Some of the outputs, or all in another order."""
        return replace(self, data=self.data[index])


def k_quantize(
    format: WeightFormat, weights: Float32, importance: Float32 | None = None
) -> GgmlBlocks:
    """A matrix [out, in] in a format, with the least squared error that is found.

    ``importance`` [in], positive: how much the squared error of an input's weights counts. With the
    mean squares of the inputs it is the error of the outputs, if inputs did not go together.

    Raises `ValueError` for weights too large for 16-bit scales.
    """
    count, _ = BLOCKS[format]
    out, inputs = weights.shape
    each = np.ones(inputs, np.float32) if importance is None else _relative(importance)
    step = max(1, _PIECE // inputs)

    def piece(first: int) -> Bytes:
        rows = weights[first : first + step]
        w = np.broadcast_to(each, rows.shape).reshape(-1, count)
        return _WRITTEN[format](rows.reshape(-1, count), w).reshape(len(rows), -1)

    with ThreadPoolExecutor(usable_cpus()[0]) as pool:
        return GgmlBlocks(format, np.concatenate(list(pool.map(piece, range(0, out, step)))))


def _relative(importance: Float32) -> Float32:
    """With a mean of 1; an input that has never been other than 0 still counts a little."""
    mean = max(float(importance.mean(dtype=np.float64)), 1e-30)
    return (importance / np.float32(mean) + np.float32(_LEAST)).astype(np.float32)


def _groups(x: Float32, w: Float32, size: int, least: int, most: int) -> Groups:
    """Of blocks [blocks, weights]."""
    x, w = (np.ascontiguousarray(a.reshape(len(a), -1, size).transpose(2, 1, 0)) for a in (x, w))
    return Groups(x, w, least, most)


def _bytes(numbers: Float32) -> Bytes:
    """[blocks, weights or groups] of an array of `Groups`."""
    return np.ascontiguousarray(numbers.T.reshape(numbers.shape[-1], -1)).astype(np.uint8)


def _halves(values: Float32) -> Bytes:
    return values.reshape(-1, 1).astype("<f2").view(np.uint8)


# ── Blocks of 32 ────────────────────────────────────────────────────────────────────────────────


def _of_32(bits: int, *, lows: bool) -> Callable[[Float32, Float32], Bytes]:
    """Q4_0 and Q5_0, or with ``lows`` Q4_1 and Q5_1."""
    middle = 0 if lows else 1 << (bits - 1)

    def written(x: Float32, w: Float32) -> Bytes:
        found = fit(_groups(x, w, 32, -middle, (1 << bits) - 1 - middle), lows=lows)
        codes = _bytes(found.codes + np.float32(middle))
        parts = [_halves(found.scale), *([] if found.low is None else [_halves(found.low)])]
        if bits == 5:
            parts.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
        parts.append(_nibbles(codes, 16))
        return np.concatenate(parts, axis=1)

    return written


def _q8_0(x: Float32, w: Float32) -> Bytes:
    """To the nearest: what could be gained by a search is below what anything else loses."""
    scale = half(np.abs(x).max(axis=1, keepdims=True) / np.float32(127))
    codes = np.clip(np.rint(x * inverse(scale)), -127, 127)
    return np.concatenate([_halves(scale), codes.astype(np.int8).view(np.uint8)], axis=1)


def _nibbles(codes: Bytes, run: int) -> Bytes:
    """The low four bits of codes: a run in the low halves of as many bytes, the next in the
    high."""
    runs = codes.reshape(len(codes), -1, 2, run) & np.uint8(15)
    return (runs[:, :, 0] | runs[:, :, 1] << np.uint8(4)).reshape(len(codes), -1)


# ── Blocks of 256 ───────────────────────────────────────────────────────────────────────────────


def _q4_k(x: Float32, w: Float32) -> Bytes:
    found = fit_shared_ranges(_groups(x, w, 32, 0, 15), 63)
    return np.concatenate([*_k4_head(found), _nibbles(_bytes(found.codes), 32)], axis=1)


def _q5_k(x: Float32, w: Float32) -> Bytes:
    found = fit_shared_ranges(_groups(x, w, 32, 0, 31), 63)
    codes = _bytes(found.codes)
    fifth = (codes >> np.uint8(4)).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    parts = [*_k4_head(found), np.bitwise_or.reduce(fifth, axis=1), _nibbles(codes, 32)]
    return np.concatenate(parts, axis=1)


def _k4_head(found: SharedFit) -> list[Bytes]:
    """Of Q4_K and Q5_K: two halves, and eight scales and minimums of 6 bits in 12 bytes."""
    assert found.lows is not None
    assert found.low is not None
    scales, lows = _bytes(found.scales), _bytes(found.lows)
    high = (scales[:, 4:] & 15) | (lows[:, 4:] & 15) << np.uint8(4)
    return [
        _halves(found.scale),
        _halves(found.low),
        scales[:, :4] | (scales[:, 4:] >> np.uint8(4)) << np.uint8(6),
        lows[:, :4] | (lows[:, 4:] >> np.uint8(4)) << np.uint8(6),
        high,
    ]


def _q6_k(x: Float32, w: Float32) -> Bytes:
    found = fit_shared_scales(_groups(x, w, 16, -32, 31), 128)
    codes = _bytes(found.codes + np.float32(32))
    high = _fields((codes >> np.uint8(4)).reshape(-1, 2, 4, 32))
    scales = np.ascontiguousarray(found.scales.T).astype(np.int8).view(np.uint8)
    return np.concatenate([_nibbles(codes, 64), high, scales, _halves(found.scale)], axis=1)


def _fields(numbers: Bytes) -> Bytes:
    """[blocks, halves, 4, n] of two bits: four a byte."""
    shifted = numbers << (2 * np.arange(4, dtype=np.uint8))[:, None]
    joined: Bytes = np.bitwise_or.reduce(shifted, axis=2)
    return joined.reshape(len(numbers), -1)


def _q2_k(x: Float32, w: Float32) -> Bytes:
    found = fit_shared_ranges(_groups(x, w, 16, 0, 3), 15)
    assert found.lows is not None
    assert found.low is not None
    scales = _bytes(found.scales) | _bytes(found.lows) << np.uint8(4)
    pairs = _fields(_bytes(found.codes).reshape(-1, 2, 4, 32))
    return np.concatenate([scales, pairs, _halves(found.scale), _halves(found.low)], axis=1)


def _q3_k(x: Float32, w: Float32) -> Bytes:
    found = fit_shared_scales(_groups(x, w, 16, -4, 3), 32)
    codes, scales = _bytes(found.codes + np.float32(4)), _bytes(found.scales + np.float32(32))
    third = (codes >> np.uint8(2)).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    pairs = _fields((codes & np.uint8(3)).reshape(-1, 2, 4, 32))
    high = _fields((scales >> np.uint8(4)).reshape(-1, 1, 4, 4))
    parts = [np.bitwise_or.reduce(third, axis=1), pairs, _nibbles(scales, 8), high]
    return np.concatenate([*parts, _halves(found.scale)], axis=1)


# Makes the bytes [blocks, bytes] of weights and their importances [blocks, weights].
_WRITTEN: dict[WeightFormat, Callable[[Float32, Float32], Bytes]] = {
    WeightFormat.Q4_0: _of_32(4, lows=False),
    WeightFormat.Q4_1: _of_32(4, lows=True),
    WeightFormat.Q5_0: _of_32(5, lows=False),
    WeightFormat.Q5_1: _of_32(5, lows=True),
    WeightFormat.Q8_0: _q8_0,
    WeightFormat.Q2_K: _q2_k,
    WeightFormat.Q3_K: _q3_k,
    WeightFormat.Q4_K: _q4_k,
    WeightFormat.Q5_K: _q5_k,
    WeightFormat.Q6_K: _q6_k,
}
