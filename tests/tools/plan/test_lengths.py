"""Distributions of lengths: what they are said to be, and what comes of many of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.tools.plan.lengths import LONGEST, Lengths, parse


def test_what_is_said_is_what_comes() -> None:
    for text, mean, cv in (
        ("128", 128, 0),
        ("fixed:1", 1, 0),
        ("uniform:64-192", 128, ((129**2 - 1) / 12) ** 0.5 / 128),
        ("geometric:128", 128, (1 - 1 / 128) ** 0.5),
        ("exponential:1", 1, 0),
        ("lognormal:500,0.7", 500, 0.7),
        ("lognormal:2000,1.5", 2000, 1.5),
    ):
        lengths = parse(text)
        assert lengths.shares.sum() == pytest.approx(1, abs=1e-12)
        assert lengths.shares[0] == 0
        assert lengths.mean == pytest.approx(mean, rel=1e-3), text
        assert lengths.cv == pytest.approx(cv, rel=5e-3, abs=1e-6), text


def test_the_longest_of_some() -> None:
    """By hand: of two that are 1 or 3, three quarters have a 3; uniform 1 … m: the sum over k."""
    assert Lengths.observed([1, 3], "").longest_of(2) == pytest.approx(0.25 * 1 + 0.75 * 3)
    assert parse("fixed:7").longest_of(100) == 7
    m, n = 50, 8
    exact = sum(1 - (k / m) ** n for k in range(m))
    assert parse(f"uniform:1-{m}").longest_of(n) == pytest.approx(exact)
    # Of exponentials it is the mean by the harmonic number; whole tokens round up by a half.
    harmonic = sum(1 / k for k in range(1, 33))
    assert parse("exponential:1000").longest_of(32) == pytest.approx(1000 * harmonic, rel=1e-3)


def test_the_longest_as_drawn() -> None:
    lengths = parse("lognormal:100,1")
    rng = np.random.default_rng(1)
    drawn = rng.choice(len(lengths.shares), size=(4000, 16), p=lengths.shares)
    assert lengths.longest_of(16) == pytest.approx(drawn.max(axis=1).mean(), rel=0.03)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 200))
def test_of_any_lengths(values: list[int], count: int) -> None:
    lengths = Lengths.observed(values, "")
    assert lengths.mean == pytest.approx(np.mean(values))
    assert lengths.square == pytest.approx(np.mean(np.square(values)))
    assert lengths.longest_of(1) == pytest.approx(lengths.mean)
    assert lengths.longest_of(count) <= lengths.longest_of(count + 1) + 1e-9
    assert lengths.longest_of(count) <= max(values) + 1e-9
    assert lengths.longest_of(10**6) == pytest.approx(max(values), rel=1e-3)
    size = 16.5
    assert lengths.steps_of(size) == pytest.approx(np.mean(np.ceil(np.array(values) / size)))


def test_tails_end_where_a_server_ends_them() -> None:
    wide = parse("lognormal:50000,10")
    assert len(wide.shares) == LONGEST + 1
    assert wide.shares[-1] > 1e-3
    assert wide.shares.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "0", "-5", "1.5", "fixed:", "fixed:3-4", "uniform:5", "uniform:9-3", "uniform:0-3",
        "uniform:1-", "uniform:1-99999999999999", "geometric:0.5", "geometric:nan", "geometric:",
        "geometric:1e9", "lognormal:100", "lognormal:100,0", "lognormal:100,-1", "lognormal:nan,1",
        "lognormal:100,11", "lognormal:100,inf", "zipf:2", "٣", "geometric:5,6",
    ],
)  # fmt: skip
def test_not_lengths(text: str) -> None:
    with pytest.raises(ValueError, match=r"length|mean|coefficient"):
        parse(text)
