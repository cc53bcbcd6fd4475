"""Grids and rounding to them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.tools.quantize.grid import (
    CodeKind,
    Quantized,
    Scheme,
    Steps,
    bf16,
    fit,
    round_to_nearest,
)

# K-quants' groups share the scales of a block (test_k_quants.py).
KINDS = [kind for kind in CodeKind if not kind.name.endswith("_K")]
INTEGERS = [CodeKind.SYMMETRIC, CodeKind.ASYMMETRIC]


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    kind = draw(st.sampled_from(KINDS))
    bits = int(kind.value[1]) if kind.of_gguf else draw(st.sampled_from((4, 8)))
    steps = draw(st.sampled_from(Steps)) if kind in INTEGERS else Steps.F16
    group = draw(st.sampled_from((32, 64, None))) if kind in INTEGERS else 32
    return Scheme(bits, group, kind, steps)


def matrix(seed: int, size: float = 1.0) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(size=(12, 4))).repeat(32, axis=1)
    return (size * rng.normal(0.2, 1.0, (12, 128)) * spread).astype(np.float32)


@given(schemes(), st.integers(0, 1000), st.sampled_from((1e-3, 1.0, 100.0)))
def test_every_weight_goes_to_the_nearest_of_its_grid(
    scheme: Scheme, seed: int, size: float
) -> None:
    weights = matrix(seed, size)
    found = round_to_nearest(scheme, weights)
    error = np.abs(found.values() - weights)
    for code in range(scheme.least, scheme.levels + 1):
        codes = np.full_like(found.codes, code)
        other = Quantized(scheme, codes, found.step, found.zero, found.low, found.group_of).values()
        slack = 1e-6 * np.abs(weights) + 1e-6 * np.abs(found.step)[:, found.group_of]
        assert (error <= np.abs(other - weights) + slack).all()


@given(schemes(), st.integers(0, 1000))
def test_the_range_is_covered(scheme: Scheme, seed: int) -> None:
    """No weight is farther away than half a step, but for what the scale's own rounding costs, and
    in signed blocks without a middle, the one end."""
    weights = matrix(seed)
    found = round_to_nearest(scheme, weights)
    step = np.abs(found.step)[:, found.group_of]
    whole = 1.0 if scheme.kind in (CodeKind.Q4_0, CodeKind.Q5_0, CodeKind.SYMMETRIC) else 0.5
    lost = scheme.levels * 2.0**-8  # of the ends, by scales of eight bits
    assert (np.abs(found.values() - weights) <= (whole + lost) * step + 1e-6).all()


@given(schemes(), st.integers(0, 1000))
def test_scales_are_what_the_layout_stores(scheme: Scheme, seed: int) -> None:
    step = round_to_nearest(scheme, matrix(seed)).step
    if scheme.steps is not Steps.BF16:
        assert np.array_equal(step.astype(np.float16).astype(np.float32), step)
    if scheme.steps is not Steps.F16:
        assert np.array_equal(bf16(step), step)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: CodeKind) -> None:
    scheme = Scheme(int(kind.value[1]) if kind.of_gguf else 4, 32, kind)
    weights = np.zeros((2, 64), np.float32)
    weights[1, :32] = np.linspace(-1.0, 3.0, 32)
    values = round_to_nearest(scheme, weights).values()
    assert not values[0].any()
    assert not values[1, 32:].any()


def test_zeros_are_never_code_zero() -> None:
    """GPTQ's layout stores zeros less one."""
    weights = np.abs(matrix(1)) + np.float32(0.5)
    found = round_to_nearest(Scheme(4, 64, CodeKind.ASYMMETRIC), weights)
    assert found.zero.min() >= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_search_loses_no_more_by_its_own_measure(kind: CodeKind, whole: bool) -> None:
    scheme = Scheme(int(kind.value[1]) if kind.of_gguf else 4, 32, kind)
    rng = np.random.default_rng(3)
    weights = rng.standard_t(2, (20, 64)).astype(np.float32)
    inputs = rng.normal(size=(200, 64)) * np.exp(rng.normal(size=64))
    moments = np.stack([inputs[:, a : a + 32].T @ inputs[:, a : a + 32] for a in (0, 32)])
    importance = moments if whole else np.stack([np.diag(m) for m in moments])

    def loss(found: Quantized) -> npt.NDArray[Any]:
        error = (found.values() - weights).reshape(20, 2, 32).astype(np.float64)
        if whole:
            return np.einsum("ogi,gij,ogj->og", error, moments, error)
        return np.einsum("ogi,gi->og", error**2, importance)

    plain, searched = (round_to_nearest(scheme, weights, i) for i in (None, importance))
    assert (loss(searched) <= loss(plain) * (1 + 1e-4)).all()
    if scheme.bits == 4:
        assert loss(searched).sum() < 0.95 * loss(plain).sum()


def test_rows_are_searched_by_themselves() -> None:
    """However many there are at a time."""
    weights = np.random.default_rng(5).standard_t(2, (600, 64)).astype(np.float32)
    scheme = Scheme(4, 32, CodeKind.ASYMMETRIC)
    importance = np.random.default_rng(6).random((2, 32))
    whole = fit(scheme, weights.reshape(600, 2, 32), importance)
    for row in (0, 255, 256, 599):
        alone = fit(scheme, weights[row : row + 1].reshape(1, 2, 32), importance)
        assert np.array_equal(alone.step[0], whole.step[row])
        assert np.array_equal(alone.zero[0], whole.zero[row])


def test_weights_beyond_fp16_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        round_to_nearest(Scheme(4, 32, CodeKind.SYMMETRIC), np.full((1, 32), 1e7, np.float32))
