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
    Fit,
    Groups,
    fit,
    fit_shared_ranges,
    fit_shared_scales,
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
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large is refused
            found = searched(format, rows.reshape(-1, count), w)
        return pack(format, found).reshape(len(rows), -1)

    with ThreadPoolExecutor(usable_cpus()[0]) as pool:
        return GgmlBlocks(format, np.concatenate(list(pool.map(piece, range(0, out, step)))))


def _relative(importance: Float32) -> Float32:
    """With a mean of 1; an input that has never been other than 0 still counts a little."""
    mean = max(float(importance.mean(dtype=np.float64)), 1e-30)
    return (importance / np.float32(mean) + np.float32(_LEAST)).astype(np.float32)


def searched(format: WeightFormat, x: Float32, w: Float32) -> Fit:
    """The fit of blocks [blocks, weights] with importances ``w`` of all weights."""
    group, least, most, shared = _SHAPES[format]
    x, w = (np.ascontiguousarray(a.reshape(len(a), -1, group).transpose(2, 1, 0)) for a in (x, w))
    groups = Groups(x, w, least, most)
    lows = least == 0
    if shared == 0:
        return fit(groups, lows=lows)
    return fit_shared_ranges(groups, shared) if lows else fit_shared_scales(groups, shared)


# Of a format: weights of a group; the least and the largest code (those from 0 on have minimums);
# the largest integer scale, or 0 where a group is a block.
_SHAPES: dict[WeightFormat, tuple[int, int, int, int]] = {
    WeightFormat.Q4_0: (32, -8, 7, 0),
    WeightFormat.Q4_1: (32, 0, 15, 0),
    WeightFormat.Q5_0: (32, -16, 15, 0),
    WeightFormat.Q5_1: (32, 0, 31, 0),
    WeightFormat.Q8_0: (32, -127, 127, 0),
    WeightFormat.Q2_K: (16, 0, 3, 15),
    WeightFormat.Q3_K: (16, -4, 3, 32),
    WeightFormat.Q4_K: (32, 0, 15, 63),
    WeightFormat.Q5_K: (32, 0, 31, 63),
    WeightFormat.Q6_K: (16, -32, 31, 128),
}


# ── Layouts ─────────────────────────────────────────────────────────────────────────────────────


def pack(format: WeightFormat, found: Fit) -> Bytes:
    """The blocks [blocks, bytes] of a fit."""
    middle = -_SHAPES[format][1] if format is not WeightFormat.Q8_0 else 0
    return np.concatenate(_LAYOUTS[format](found, _bytes(found.codes + np.float32(middle))), axis=1)


def _bytes(numbers: Float32) -> Bytes:
    """[blocks, weights or groups] of an array of `Groups`; negative ones as in a signed byte."""
    rows = np.ascontiguousarray(numbers.T).reshape(numbers.shape[-1], -1)
    return rows.astype(np.int16).astype(np.uint8)


def _halves(values: Float32 | None) -> Bytes:
    assert values is not None
    return values.reshape(-1, 1).astype("<f2").view(np.uint8)


def _nibbles(codes: Bytes, run: int) -> Bytes:
    """The low four bits of codes: a run in the low halves of as many bytes, the next in the
    high."""
    runs = codes.reshape(len(codes), -1, 2, run) & np.uint8(15)
    return (runs[:, :, 0] | runs[:, :, 1] << np.uint8(4)).reshape(len(codes), -1)


def _pairs(codes: Bytes, run: int) -> Bytes:
    """The low two bits of codes: four runs in as many bytes, the first lowest."""
    runs = codes.reshape(len(codes), -1, 4, run) & np.uint8(3)
    shifted = runs << (2 * np.arange(4, dtype=np.uint8))[:, None]
    joined: Bytes = np.bitwise_or.reduce(shifted, axis=2)
    return joined.reshape(len(codes), -1)


def _singles(bits: Bytes) -> Bytes:
    """One bit of each of 256 codes: 8 runs of 32 in as many bytes, the first lowest."""
    shifted = bits.reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    joined: Bytes = np.bitwise_or.reduce(shifted, axis=1)
    return joined


def _q4(found: Fit, codes: Bytes) -> list[Bytes]:
    return [*_of_32(found), _nibbles(codes, 16)]


def _q5(found: Fit, codes: Bytes) -> list[Bytes]:
    fifth = np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")
    return [*_of_32(found), fifth, _nibbles(codes, 16)]


def _of_32(found: Fit) -> list[Bytes]:
    return [_halves(found.scale), *([] if found.low is None else [_halves(found.low)])]


def _q8_0(found: Fit, codes: Bytes) -> list[Bytes]:
    return [_halves(found.scale), codes]


def _q2_k(found: Fit, codes: Bytes) -> list[Bytes]:
    scales, lows = _integers(found.scales), _integers(found.lows)
    return [
        scales | lows << np.uint8(4),
        _pairs(codes, 32),
        _halves(found.scale),
        _halves(found.low),
    ]


def _q3_k(found: Fit, codes: Bytes) -> list[Bytes]:
    scales = _integers(found.scales) + np.uint8(32)
    return [
        _singles(codes >> np.uint8(2)),
        _pairs(codes, 32),
        _nibbles(scales, 8),
        _pairs(scales >> np.uint8(4), 4),
        _halves(found.scale),
    ]


def _q4_k(found: Fit, codes: Bytes) -> list[Bytes]:
    return [*_of_256(found), _nibbles(codes, 32)]


def _q5_k(found: Fit, codes: Bytes) -> list[Bytes]:
    return [*_of_256(found), _singles(codes >> np.uint8(4)), _nibbles(codes, 32)]


def _of_256(found: Fit) -> list[Bytes]:
    """Two halves, and eight scales and minimums of 6 bits in 12 bytes."""
    scales, lows = _integers(found.scales), _integers(found.lows)
    return [
        _halves(found.scale),
        _halves(found.low),
        scales[:, :4] | (scales[:, 4:] >> np.uint8(4)) << np.uint8(6),
        lows[:, :4] | (lows[:, 4:] >> np.uint8(4)) << np.uint8(6),
        (scales[:, 4:] & np.uint8(15)) | (lows[:, 4:] & np.uint8(15)) << np.uint8(4),
    ]


def _q6_k(found: Fit, codes: Bytes) -> list[Bytes]:
    high = _pairs(codes >> np.uint8(4), 32)
    return [_nibbles(codes, 64), high, _integers(found.scales), _halves(found.scale)]


def _integers(numbers: Float32 | None) -> Bytes:
    """Scales or minimums of the groups."""
    assert numbers is not None
    return _bytes(numbers)


# The parts of the blocks of a fit, whose codes are bytes from 0 on.
_LAYOUTS: dict[WeightFormat, Callable[[Fit, Bytes], list[Bytes]]] = {
    WeightFormat.Q4_0: _q4,
    WeightFormat.Q4_1: _q4,
    WeightFormat.Q5_0: _q5,
    WeightFormat.Q5_1: _q5,
    WeightFormat.Q8_0: _q8_0,
    WeightFormat.Q2_K: _q2_k,
    WeightFormat.Q3_K: _q3_k,
    WeightFormat.Q4_K: _q4_k,
    WeightFormat.Q5_K: _q5_k,
    WeightFormat.Q6_K: _q6_k,
}
