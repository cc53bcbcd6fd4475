"""Fits and matrices that blocks are made of, for the tests and for what others are recorded on."""

import numpy as np

from octavo.tools.quantize.block_search import Fit

BLOCKS = 3
# Of each format: groups of a block, weights of a group, the least and the largest code, and the
# least and the largest integer scale.
SHAPES = {
    "Q4_0": (1, 32, -8, 7, None),
    "Q4_1": (1, 32, 0, 15, None),
    "Q5_0": (1, 32, -16, 15, None),
    "Q5_1": (1, 32, 0, 31, None),
    "Q8_0": (1, 32, -127, 127, None),
    "Q2_K": (16, 16, 0, 3, (0, 15)),
    "Q3_K": (16, 16, -4, 3, (-32, 31)),
    "Q4_K": (8, 32, 0, 15, (0, 63)),
    "Q5_K": (8, 32, 0, 31, (0, 63)),
    "Q6_K": (16, 16, -32, 31, (-128, 127)),
}


def fits(name: str) -> Fit:
    """Random codes, integers and halves."""
    groups, size, least, most, scales = SHAPES[name]
    rng = np.random.default_rng(list(SHAPES).index(name))

    def integers(low: int, high: int, *shape: int) -> np.ndarray:
        return rng.integers(low, high + 1, shape).astype(np.float32)

    halves = rng.normal(size=(2, BLOCKS)).astype(np.float16).astype(np.float32)
    codes = integers(least, most, size, groups, BLOCKS)
    lows = halves[1] if least == 0 else None
    if scales is None:
        return Fit(codes, halves[0], lows)
    own = [integers(*scales, groups, BLOCKS) for _ in range(2)]
    return Fit(codes, halves[0], lows, own[0], own[1] if least == 0 else None)


def case() -> tuple[np.ndarray, np.ndarray]:
    """A matrix [out, in] with inputs of several sizes, and importances [in]."""
    rng = np.random.default_rng(8)
    weights = rng.normal(size=(32, 512)) * np.exp(rng.normal(size=512) / 2)
    importance = np.exp(2 * rng.normal(size=512))
    return weights.astype(np.float32), importance.astype(np.float32)


def error(weights: np.ndarray, values: np.ndarray, importance: np.ndarray | None) -> float:
    squares = np.square(values.astype(np.float64) - weights)
    return float((squares if importance is None else squares * importance).mean())
