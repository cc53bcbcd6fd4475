"""Scales and minimums of ggml's blocks, searched for the least weighted squared error.

A group of weights x with the importances w is fitted by x ≈ s q, or x ≈ s q + m. For codes q the
best s and m are a least-squares problem in closed form; for s and m the best codes are the nearest.
Both steps are taken in turn from several first scales, and the best end wins. In K-quants the
scales and minimums of a block's groups are themselves small integers times two numbers of the
block. They are found the same way: integers near the ideal ones for given numbers of the block,
these by least squares for given integers and codes.

Arrays are [weights of a group, groups of a block, blocks], so that a sum over a group is a sum of
rows, and [groups, blocks] or [blocks] of what these share. A block's result depends on nothing but
the block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

# Codes that the first scales reach over (the largest weights are cut off) or fall short by.
_REACH = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)
_TURNS = 2  # of codes and scales, from each first scale
_ROUNDS = 3  # of a block's integers and its numbers
_NEAR = (0, -1, 1)  # integers tried, from the ideal one
_TINY = np.float32(1e-30)


class Fit(NamedTuple):
    """Codes of all weights; scales [blocks], with minimums where the format has them (all halves).
    x ≈ scale * code + low; or, with integers [groups, blocks] for each group,
    x ≈ scale * scales * code - low * lows."""

    codes: Float32
    scale: Float32
    low: Float32 | None = None
    scales: Float32 | None = None
    lows: Float32 | None = None


class _Sums(NamedTuple):
    """Weighted sums over each group, of its codes q and weights x."""

    q: Float32
    qq: Float32
    xq: Float32


class Groups:
    """Weights and their importances, both [weights of a group, groups, blocks]; codes run from
    ``least`` to ``most``."""

    def __init__(self, x: Float32, w: Float32, least: int, most: int) -> None:
        self.x, self.w = x, w
        self.least, self.most = np.float32(least), np.float32(most)
        self.wx = w * x
        self.sum_w: Float32 = w.sum(axis=0)
        self.sum_x: Float32 = self.wx.sum(axis=0)

    def codes(self, scale: Float32, low: Float32 | None) -> Float32:
        """The nearest codes."""
        by = inverse(scale)
        q: Float32 = self.x * by
        if low is not None:
            q -= low * by
        np.rint(q, out=q)
        np.maximum(q, self.least, out=q)
        return np.minimum(q, self.most, out=q)

    def sums(self, q: Float32) -> _Sums:
        wq = self.w * q
        dot = "ngb,ngb->gb"
        return _Sums(wq.sum(axis=0), np.einsum(dot, wq, q), np.einsum(dot, self.wx, q))

    def loss(self, sums: _Sums, scale: Float32, low: Float32 | None) -> Float32:
        """The weighted squared error of scale * q + low, less that of nothing."""
        loss: Float32 = scale * (scale * sums.qq - 2 * sums.xq)
        if low is not None:
            loss = loss + low * (low * self.sum_w + 2 * (scale * sums.q - self.sum_x))
        return loss


# ── Groups by themselves ────────────────────────────────────────────────────────────────────────


def fit_scales(groups: Groups) -> tuple[Float32, None]:
    """Each group's best scale, of either sign."""
    x = groups.x
    top = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    best, least = np.zeros_like(top), np.zeros_like(top)
    for end in (groups.least, groups.most):  # the code of the largest weight
        for reach in _REACH:
            scale = top / (end + np.copysign(np.float32(reach), end * reach))
            for _ in range(_TURNS):
                sums = groups.sums(groups.codes(scale, None))
                scale = sums.xq * inverse(sums.qq)
            loss = -scale * sums.xq
            _keep(loss < least, (least, loss), (best, scale))
    return best, None


def fit_ranges(groups: Groups, *, above: bool) -> tuple[Float32, Float32]:
    """Each group's best scale and minimum, which may lie ``above`` 0 or not."""
    x = groups.x
    low = x.min(axis=0) if above else np.minimum(x.min(axis=0), 0.0)
    span = x.max(axis=0) - low
    best, best_low, least = np.zeros_like(low), low.copy(), np.full_like(low, np.inf)
    for reach in _REACH:
        scale, least_weight = span / (groups.most + np.float32(reach)), low
        for _ in range(_TURNS):
            sums = groups.sums(groups.codes(scale, least_weight))
            scale, least_weight = _line(groups, sums, above=above)
        loss = groups.loss(sums, scale, least_weight)
        _keep(loss < least, (least, loss), (best, scale), (best_low, least_weight))
    return best, best_low


def _line(groups: Groups, sums: _Sums, *, above: bool) -> tuple[Float32, Float32]:
    """Scale and minimum of least squares."""
    divisor = groups.sum_w * sums.qq - sums.q * sums.q
    scale = (groups.sum_w * sums.xq - groups.sum_x * sums.q) * inverse(divisor)
    low = (groups.sum_x - scale * sums.q) * inverse(groups.sum_w)
    if not above:
        through = low > 0.0
        np.copyto(scale, sums.xq * inverse(sums.qq), where=through)
        np.copyto(low, 0.0, where=through)
    return scale, low


def fit(groups: Groups, *, lows: bool) -> Fit:
    """Scales and minimums as halves."""
    scale, low = fit_ranges(groups, above=True) if lows else fit_scales(groups)
    scale = half(scale)
    low = None if low is None else half(low)
    return Fit(groups.codes(scale, low), scale, low)


# ── Groups of a block ───────────────────────────────────────────────────────────────────────────


def fit_shared_scales(groups: Groups, most: int) -> Fit:
    """With integers from -most to most - 1 for scales."""
    ideal, _ = fit_scales(groups)
    top = np.take_along_axis(ideal, np.abs(ideal).argmax(axis=0)[None], axis=0)[0]
    shared = top / np.float32(-most)
    least, best = np.full_like(shared, np.inf), (shared.copy(), np.zeros_like(ideal))
    for _ in range(_ROUNDS):
        shared = half(shared)
        loss, (scales, qq, xq) = _near_scales(groups, ideal, shared, most)
        better = loss < least
        _keep(better, (least, loss), (best[0], shared), (best[1], scales))
        shared = (scales * xq).sum(axis=0) * inverse((scales * scales * qq).sum(axis=0))
    scale, scales = best
    return Fit(groups.codes(scale * scales, None), scale, None, scales)


def _near_scales(
    groups: Groups, ideal: Float32, shared: Float32, most: int
) -> tuple[Float32, tuple[Float32, Float32, Float32]]:
    """The best integers for a block's scale; the loss [blocks], and theirs and their sums."""
    whole = np.rint(ideal * inverse(shared))
    least = np.full_like(ideal, np.inf)
    best = (np.zeros_like(ideal), np.zeros_like(ideal), np.zeros_like(ideal))
    for near in _NEAR:
        scales = np.clip(whole + near, -most, most - 1)
        scale = shared * scales
        sums = groups.sums(groups.codes(scale, None))
        loss = groups.loss(sums, scale, None)
        _keep(loss < least, (least, loss), *zip(best, (scales, sums.qq, sums.xq), strict=True))
    return least.sum(axis=0), best


def fit_shared_ranges(groups: Groups, most: int) -> Fit:
    """With integers from 0 to ``most`` for scales and minimums."""
    ideal, ideal_low = fit_ranges(groups, above=False)
    scale, low = (each.max(axis=0) / np.float32(most) for each in (ideal, -ideal_low))
    least = np.full_like(scale, np.inf)
    best = (scale.copy(), low.copy(), np.zeros_like(ideal), np.zeros_like(ideal))
    for _ in range(_ROUNDS):
        scale, low = half(scale), half(low)
        loss, (scales, lows, *sums) = _near_ranges(groups, ideal, ideal_low, scale, low, most)
        better = loss < least
        _keep(better, (least, loss), *zip(best, (scale, low, scales, lows), strict=True))
        scale, low = _shared_line(groups, scales, lows, _Sums(*sums), low)
    scale, low, scales, lows = best
    return Fit(groups.codes(scale * scales, -low * lows), scale, low, scales, lows)


def _near_ranges(
    groups: Groups, ideal: Float32, ideal_low: Float32, shared: Float32, low: Float32, most: int
) -> tuple[Float32, tuple[Float32, ...]]:
    """The best integers for a block's scale and minimum; the loss [blocks], theirs and their
    sums."""
    whole, by = np.rint(ideal * inverse(shared)), inverse(low)
    least = np.full_like(ideal, np.inf)
    best = tuple(np.zeros_like(ideal) for _ in range(5))
    for near in _NEAR:
        scales = np.clip(whole + near, 0, most)
        scale, own_low = shared * scales, ideal_low
        for _ in range(2):  # the minimum for the codes that the last one gives
            lows = np.clip(np.rint(-own_low * by), 0, most)
            sums = groups.sums(groups.codes(scale, -low * lows))
            own_low = (groups.sum_x - scale * sums.q) * inverse(groups.sum_w)
            loss = groups.loss(sums, scale, -low * lows)
            _keep(loss < least, (least, loss), *zip(best, (scales, lows, *sums), strict=True))
    return least.sum(axis=0), best


def _shared_line(
    groups: Groups, scales: Float32, lows: Float32, sums: _Sums, low: Float32
) -> tuple[Float32, Float32]:
    """A block's scale and minimum of least squares; the minimum stays ``low`` where none of the
    groups has one, or where it would be below 0."""
    aa = (scales * scales * sums.qq).sum(axis=0)
    ab = (scales * lows * sums.q).sum(axis=0)
    bb = (lows * lows * groups.sum_w).sum(axis=0)
    xa = (scales * sums.xq).sum(axis=0)
    xb = (lows * groups.sum_x).sum(axis=0)
    new_low = (xa * ab - aa * xb) * inverse(aa * bb - ab * ab)
    usable = new_low > 0.0
    new_low = np.where(usable, new_low, low)
    return (xa + new_low * ab) * inverse(aa), new_low


# ── Numbers ─────────────────────────────────────────────────────────────────────────────────────


def half(values: Float32) -> Float32:
    """Rounded to fp16. Raises `ValueError` for what is too large."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16).astype(np.float32)
    if not np.isfinite(halves).all():
        raise ValueError("has weights too large for 16-bit scales")
    return halves


def inverse(values: Float32) -> Float32:
    """0 of 0."""
    return np.divide(1.0, values, out=np.zeros_like(values), where=np.abs(values) > _TINY)


def _keep(better: npt.NDArray[np.bool_], *pairs: tuple[Float32, Float32]) -> None:
    """Replaces what is kept by what is new where that is better."""
    for kept, new in pairs:
        np.copyto(kept, new, where=better)
