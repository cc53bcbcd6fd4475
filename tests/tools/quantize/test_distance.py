"""Distances against their definition in plain numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.tools.quantize.distance import Distances, Fidelity, distances


def softmax(logits: np.ndarray) -> np.ndarray:
    power = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return power / power.sum(axis=1, keepdims=True)


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(2, 300), st.floats(0.01, 8))
def test_the_definition(seed: int, rows: int, vocab: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    p_logits, q_logits = (
        (spread * rng.standard_normal((rows, vocab)) + rng.normal(0, 50, (rows, 1))).astype(
            np.float32
        )
        for _ in range(2)
    )
    following = rng.integers(0, vocab, rows - seed % 2).astype(np.int32)
    found = distances(p_logits, q_logits, following)
    p, q = softmax(p_logits), softmax(q_logits)
    np.testing.assert_allclose(found.kl, (p * np.log(p / q)).sum(axis=1), rtol=1e-9, atol=1e-13)
    np.testing.assert_array_equal(found.agree, p_logits.argmax(axis=1) == q_logits.argmax(axis=1))
    at = np.arange(len(following)), following
    np.testing.assert_allclose(found.nll, -np.log(q[at]), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.reference_nll, -np.log(p[at]), rtol=1e-9, atol=1e-12)


def test_of_itself_exactly_nothing() -> None:
    logits = np.random.default_rng(0).normal(0, 4, (50, 1000)).astype(np.float32)
    found = distances(logits, logits.copy(), np.zeros(49, np.int32))
    assert not found.kl.any()
    assert found.agree.all()
    np.testing.assert_array_equal(found.nll, found.reference_nll)


def test_the_direction_is_from_the_reference() -> None:
    """By hand: p = (1/2, 1/2), q = (3/4, 1/4): KL(p ‖ q) = ½ ln ⅔ + ½ ln 2 = 0.14384."""
    p, q = np.zeros((1, 2), np.float32), np.log(np.array([[3, 1]], np.float32))
    none = np.zeros(0, np.int32)
    assert distances(p, q, none).kl[0] == pytest.approx(0.143841036)
    assert distances(q, p, none).kl[0] == pytest.approx(0.130812036)


def test_a_distribution_that_rules_a_token_out() -> None:
    """0 · ln 0 is nothing; but what the model rules out must not be what the reference expects."""
    p = np.array([[0.0, -400.0, 1.0]], np.float32)
    assert np.isfinite(distances(p, np.zeros((1, 3), np.float32), np.zeros(0, np.int32)).kl[0])
    for bad in (np.nan, np.inf):
        q = np.array([[0.0, bad, 1.0]], np.float32)
        with np.errstate(invalid="ignore"):
            assert not np.isfinite(distances(p, q, np.zeros(0, np.int32)).kl[0])


def test_summary() -> None:
    kl = np.linspace(0, 1, 101)
    found = Fidelity.of(
        Distances(kl, np.arange(101) % 4 > 0, np.full(99, np.log(8)), np.full(99, np.log(4)))
    )
    assert found.positions == 101
    assert (found.kl_mean, found.kl_median, found.kl_p99, found.kl_max) == (
        pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.99), 1.0
    )  # fmt: skip
    assert found.kl_standard_error == pytest.approx(kl.std(ddof=1) / 101**0.5)
    assert found.perplexity == pytest.approx(8)
    assert found.reference_perplexity == pytest.approx(4)
    assert found.top1_agreement == pytest.approx(75 / 101)
