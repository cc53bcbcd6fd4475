"""GPTQ: each column's rounding error is made up for by the columns that are still to come.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
2022, algorithm 1. With X the inputs of a matrix, H = 2 X Xᵀ is the Hessian of the outputs' squared
error in any one row; U is the upper Cholesky factor of its inverse. Column i, rounded, leaves the
error e = (w - round(w)) / U[i, i] behind, and the columns j after it become w_j - e U[i, j]: at
once within a block of 128 columns, and a block at a time beyond it (lazily).
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from octavo.tools.quantize.grid import Float32, Float64, Grid, Quantized, Scheme, fit, quantized

BLOCK = 128  # columns between updates of all that follow
DAMPING = 0.01  # of the mean diagonal, added to it
MOST_DAMPING = 1.0


class Order(Enum):
    """In which order columns are rounded, and what that does to the groups."""

    NONE = "none"  # as they are
    STATIC = "static"  # largest inputs first, groups of neighbours as without it
    GROUP = "group"  # largest inputs first, groups in that order: engines must reorder inputs


def gptq(
    scheme: Scheme,
    weights: Float32,
    moments: Float64,
    *,
    order: Order = Order.STATIC,
    search: bool = True,
    damping: float = DAMPING,
) -> Quantized:
    """A matrix [out, in] rounded for inputs with the second moments X Xᵀ [in, in] (any multiple).

    ``search`` chooses grids by squared error, weighted by the inputs', instead of by range. An
    input that was always zero gets zero weights. The rows may be several matrices'.
    """
    out, inputs = weights.shape
    size = scheme.size(inputs)
    hessian = moments.copy()
    diagonal = np.einsum("ii->i", hessian)
    dead = diagonal == 0.0
    diagonal[dead] = 1.0
    weights = np.where(dead, np.float32(0.0), weights)
    permutation = np.arange(inputs)
    if order is not Order.NONE:
        permutation = np.argsort(-diagonal, kind="stable")
    importance = diagonal if search else None
    # Groups of which the grids are known before: those of the weights as they were.
    known: Grid | None = None
    if order is Order.STATIC:
        blocks = weights.reshape(out, -1, size)
        known = fit(scheme, blocks, None if importance is None else importance.reshape(-1, size))
    group_of = permutation // size if known is not None else np.arange(inputs) // size
    if importance is not None:
        importance = importance[permutation]
    upper = inverse_factor(hessian[permutation][:, permutation], damping)
    # Columns as rows from here on, so that each is contiguous.
    columns = np.ascontiguousarray(weights[:, permutation].T)
    codes = np.empty_like(columns)
    grids: list[Grid] = []  # of the groups begun, where they are not known
    step = _block(size)
    for start in range(0, inputs, step):
        block = columns[start : start + step]
        errors = np.empty_like(block)
        within = upper[start : start + step, start : start + step]
        for i, column in enumerate(block):
            at = start + i
            if known is None and at % size == 0:
                grids.append(_fit_columns(scheme, columns, importance, at, size))
            grid = grids[-1] if known is None else known.part((slice(None), int(group_of[at])))
            codes[at] = grid.codes(column, scheme)
            errors[i] = (column - grid.values(codes[at])) / within[i, i]
            block[i + 1 :] -= within[i, i + 1 :, None] * errors[i]
        columns[start + step :] -= upper[start : start + step, start + step :].T @ errors
    if known is None:
        steps, zeros, lows = zip(*grids, strict=True)
        low = None if lows[0] is None else np.stack(lows, axis=1)
        known = Grid(np.stack(steps, axis=1), np.stack(zeros, axis=1), low)
    plain, groups = np.empty((out, inputs), np.float32), np.empty(inputs, np.int32)
    plain[:, permutation] = codes.T
    groups[permutation] = group_of
    return quantized(scheme, plain, known, groups)


def _block(size: int) -> int:
    """Columns of a block: groups begin at its edge, or within one that holds them whole."""
    if size <= BLOCK:
        return BLOCK // size * size
    return next(block for block in range(BLOCK, 0, -1) if size % block == 0)


def _fit_columns(
    scheme: Scheme, columns: Float32, importance: Float64 | None, start: int, size: int
) -> Grid:
    """The grid [out] of a group of columns, as earlier ones have left them."""
    part = columns[start : start + size].T[:, None, :]
    weight = None if importance is None else importance[None, start : start + size]
    return fit(scheme, np.ascontiguousarray(part), weight).part((slice(None), 0))


def inverse_factor(hessian: Float64, damping: float) -> Float32:
    """The upper triangular U with Uᵀ U = (H + damping * mean(diag H))⁻¹.

    Back to front, H has the Cholesky factor of which U is the inverse: H = R Rᵀ with R upper
    triangular, U = R⁻¹. Where rounding makes H indefinite all the same, the damping grows tenfold.
    Raises `ValueError` when nothing helps.
    """
    mean = float(np.einsum("ii->i", hessian).mean())
    while damping <= MOST_DAMPING:
        damped = hessian.copy()
        damped.flat[:: len(damped) + 1] += damping * mean
        try:
            factor = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1].astype(np.float64)
        except np.linalg.LinAlgError:
            damping *= 10.0
            continue
        return _inverse_upper(factor).astype(np.float32)
    raise ValueError("the second moments of its inputs cannot be inverted")


def _inverse_upper(upper: Float64) -> Float64:
    """Invert a triangular matrix, by halves: products do the work."""
    size = len(upper)
    if size <= 64:
        return np.triu(np.linalg.inv(upper))
    half = size // 2
    inverse = np.zeros_like(upper)
    first = inverse[:half, :half] = _inverse_upper(upper[:half, :half])
    last = inverse[half:, half:] = _inverse_upper(upper[half:, half:])
    inverse[:half, half:] = -first @ (upper[:half, half:] @ last)
    return inverse


def relative_loss(weights: Float32, found: Float32, moments: Float64) -> float:
    """Squared error of the outputs on the calibration inputs, of their own square."""
    scale = np.float32(1.0 / max(float(np.trace(moments)), 1e-30))
    gram = moments.astype(np.float32) * scale
    error = found - weights
    own = float(((weights @ gram) * weights).sum(dtype=np.float64))
    return float(((error @ gram) * error).sum(dtype=np.float64)) / own if own > 0.0 else 0.0
