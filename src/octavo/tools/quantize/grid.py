"""The numbers that a matrix may be rounded to: a scale and a zero for each row and group of inputs.

A *scheme* says what a layout can express; `fit` chooses each group's grid, from its smallest to its
largest weight or, searching, from the part of that range that loses least; `Quantized` is a matrix
on its grids. Scales are rounded to what the layout stores before anything is rounded to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.loader.base import WeightFormat

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# Parts of a group's range that a search tries, as of Frantar et al.'s code (down to 0.2 there; none
# below half has ever won at 4 bits) and of AWQ's clipping (down to half).
SHRINKS = tuple(1.0 - 0.025 * step for step in range(1, 21))
ROWS = 256  # of a matrix searched at a time, so that the search stays in the cache


class CodeKind(Enum):
    """How codes stand for weights."""

    SYMMETRIC = "symmetric"  # scale * (code - middle)
    ASYMMETRIC = "asymmetric"  # scale * (code - zero), the zero a code itself
    Q4_0 = "q4_0"  # GGUF: scale * (code - 8), the scale of either sign
    Q4_1 = "q4_1"  # GGUF: scale * code + least
    Q5_0 = "q5_0"  # the same with five bits, and 16
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"  # GGUF: scale * (code - 128), codes from 1 on
    Q2_K = "q2_k"  # GGUF: scales and minimums of groups are integers times one of a block
    Q3_K = "q3_k"  # GGUF: the same without minimums
    Q4_K = "q4_k"  # as Q2_K
    Q5_K = "q5_k"
    Q6_K = "q6_k"  # as Q3_K

    @property
    def has_low(self) -> bool:
        """Whether a group has its least weight instead of a zero."""
        return self in (CodeKind.Q4_1, CodeKind.Q5_1)

    @property
    def of_gguf(self) -> bool:
        return self not in (CodeKind.SYMMETRIC, CodeKind.ASYMMETRIC)

    @property
    def format(self) -> WeightFormat:
        """The format of GGUF's that has it."""
        return WeightFormat[self.name]


class Steps(Enum):
    """What a layout stores scales as."""

    F16 = "f16"
    BF16 = "bf16"
    BOTH = "both"  # fp16, of numbers that bf16 has too: some engines hold them so


@dataclass(frozen=True, slots=True)
class Scheme:
    bits: int
    group: int | None  # inputs that share a scale; None: a row's all
    kind: CodeKind
    steps: Steps = Steps.F16

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def least(self) -> int:
        return 1 if self.kind is CodeKind.Q8_0 else 0

    @property
    def middle(self) -> np.float32:
        """The code of zero where there are no zeros of their own."""
        return np.float32(1 << (self.bits - 1))

    def size(self, inputs: int) -> int:
        """Inputs of a group."""
        return self.group or inputs

    def groups(self, inputs: int) -> int:
        return inputs // self.size(inputs)


class Grid(NamedTuple):
    """The grid of every row and group (arrays of one shape, fp32). A weight is
    step * (code - zero), in a scheme with ``low`` step * code + low (``zero`` is then -low / step).
    """

    step: Float32
    zero: Float32
    low: Float32 | None

    def codes(self, weights: Float32, scheme: Scheme) -> Float32:
        """The nearest codes, of weights that broadcast against the grid."""
        nearest = np.rint(weights / self.step + self.zero)
        codes: Float32 = np.clip(nearest, scheme.least, scheme.levels)
        return codes

    def values(self, codes: Float32) -> Float32:
        values: Float32
        if self.low is not None:
            values = self.step * codes + self.low
        else:
            values = self.step * (codes - self.zero)
        return values

    def part(self, index: Any) -> Grid:
        """Return the grid of some rows and groups, or with another dimension."""
        low = None if self.low is None else self.low[index]
        return Grid(self.step[index], self.zero[index], low)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [out, in] as codes; input i belongs to group ``group_of[i]``."""

    scheme: Scheme
    codes: npt.NDArray[np.uint8]  # [out, in]
    step: Float32  # [out, groups]
    zero: npt.NDArray[np.uint8] | None  # [out, groups], of kinds with integer zeros
    low: Float32 | None  # [out, groups], of Q4_1 and Q5_1
    group_of: npt.NDArray[np.int32]  # [in]

    @property
    def shape(self) -> tuple[int, int]:
        out, inputs = self.codes.shape
        return out, inputs

    @property
    def ordered(self) -> bool:
        """Whether groups are of neighbouring inputs, one after another."""
        size = self.scheme.size(self.shape[1])
        return bool(np.array_equal(self.group_of, np.arange(self.shape[1]) // size))

    def values(self) -> Float32:
        """The weights that it stands for, [out, in]."""
        codes, of = self.codes.astype(np.float32), self.group_of
        if self.low is not None:
            return self.step[:, of] * codes + self.low[:, of]
        assert self.zero is not None
        return self.step[:, of] * (codes - self.zero.astype(np.float32)[:, of])

    def rows(self, index: npt.NDArray[np.intp] | slice) -> Quantized:
        """Some of the outputs, or all in another order."""
        zero = None if self.zero is None else self.zero[index]
        low = None if self.low is None else self.low[index]
        return Quantized(self.scheme, self.codes[index], self.step[index], zero, low, self.group_of)


def quantized(
    scheme: Scheme, codes: Float32, grid: Grid, group_of: npt.NDArray[np.integer]
) -> Quantized:
    """Codes [out, in] on a grid [out, groups]."""
    return Quantized(
        scheme,
        np.ascontiguousarray(codes, dtype=np.uint8),
        grid.step,
        grid.zero.astype(np.uint8) if grid.low is None else None,
        grid.low,
        np.asarray(group_of, np.int32),
    )


def fit_range(scheme: Scheme, low: Float32, high: Float32) -> Grid:
    """The grids that reach from ``low`` to ``high``. Raises `ValueError` for what fp16 cannot."""
    levels = np.float32(scheme.levels)
    top = np.maximum(-low, high)
    match scheme.kind:
        case CodeKind.SYMMETRIC:
            step = _step(np.float32(2.0) * top / levels, scheme.steps)
            return Grid(step, np.full_like(step, 1 << (scheme.bits - 1)), None)
        case CodeKind.Q8_0:
            step = _step(top / np.float32(127.0), scheme.steps)
            return Grid(step, np.full_like(step, 128.0), None)
        case CodeKind.Q4_0 | CodeKind.Q5_0:
            step = _step(np.where(high > -low, high, low) / -scheme.middle, scheme.steps)
            return Grid(step, np.full_like(step, scheme.middle), None)
        case CodeKind.Q4_1 | CodeKind.Q5_1:
            step, least = _step((high - low) / levels, scheme.steps), _stored(low, scheme.steps)
            return Grid(step, -least / step, least)
        case CodeKind.ASYMMETRIC:
            low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)  # zero is on the grid
            step = _step((high - low) / levels, scheme.steps)
            # Not zero 0: GPTQ's layout stores zeros less one, and readers differ on what is below.
            return Grid(step, np.clip(np.rint(-low / step), 1.0, levels), None)
    raise ValueError(f"{scheme.kind.name} has no grids of single groups")


def _stored(step: npt.NDArray[np.floating], steps: Steps) -> Float32:
    step = np.asarray(step, np.float32)
    if steps is not Steps.F16:
        step = bf16(step)
    if steps is not Steps.BF16:
        with np.errstate(over="ignore"):
            step = step.astype(np.float16).astype(np.float32)
    if not np.isfinite(step).all():
        raise ValueError("has weights too large for 16-bit scales")
    return step


def _step(step: npt.NDArray[np.floating], steps: Steps) -> Float32:
    stored = _stored(step, steps)
    stored[stored == 0.0] = 1.0  # a group of zeros is on every grid
    return stored


def bf16(values: Float32) -> Float32:
    """Rounded to bfloat16, halves to even."""
    return (bf16_bits(values).astype("<u4") << np.uint32(16)).view(np.float32)


def bf16_bits(values: Float32) -> npt.NDArray[np.uint16]:
    """The same as bfloat16 numbers' bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2")


def fit(scheme: Scheme, blocks: Float32, importance: Float32 | Float64 | None = None) -> Grid:
    """Each group's grid, for ``blocks`` [out, groups, inputs of a group].

    With an ``importance``, the part of each group's range (`SHRINKS`) with the least loss:
    [groups, inputs], the weights of squared errors; or [groups, inputs, inputs], the second moments
    of the inputs, which make the loss the mean squared error of the group's outputs.
    """
    low, high = blocks.min(axis=2), blocks.max(axis=2)
    best = fit_range(scheme, low, high)
    if importance is None:
        return best
    weights = importance.astype(np.float32)
    for rows in _parts(len(blocks)):
        part, found = blocks[rows], best.part((rows,))
        loss = _loss(scheme, part, found, weights)
        for shrink in SHRINKS:
            tried = fit_range(scheme, low[rows] * shrink, high[rows] * shrink)
            its = _loss(scheme, part, tried, weights)
            better = its < loss
            loss = np.where(better, its, loss)
            for kept, new in zip(found, tried, strict=True):
                if kept is not None and new is not None:
                    np.copyto(kept, new, where=better)
    return best


def _parts(rows: int) -> Iterator[slice]:
    for start in range(0, rows, ROWS):
        yield slice(start, start + ROWS)


def _loss(scheme: Scheme, blocks: Float32, grid: Grid, importance: Float32) -> Float32:
    """[out, groups]"""
    each = grid.part((slice(None), slice(None), np.newaxis))
    error = each.values(each.codes(blocks, scheme)) - blocks
    if importance.ndim == 2:
        found: Float32 = np.einsum("ogi,ogi,gi->og", error, error, importance)
        return found
    moved = error.transpose(1, 0, 2)  # groups first: one matrix product for each
    each_group: Float32 = ((moved @ importance) * moved).sum(axis=2)
    return each_group.T


def round_to_nearest(
    scheme: Scheme, weights: Float32, importance: Float32 | Float64 | None = None
) -> Quantized:
    """A matrix [out, in] with every weight rounded by itself; ``importance`` as in `fit`."""
    out, inputs = weights.shape
    size = scheme.size(inputs)
    blocks = weights.reshape(out, -1, size)
    grid = fit(scheme, blocks, importance)
    each = grid.part((slice(None), slice(None), np.newaxis))
    codes = each.codes(blocks, scheme).reshape(out, inputs)
    return quantized(scheme, codes, grid, np.arange(inputs) // size)
