"""The chi-square test against tables, closed forms and its own definition."""

import math

import numpy as np
import pytest

from octavo.tools.verify.chi_square import chi_square, upper_gamma


@pytest.mark.parametrize(
    ("degrees", "critical", "p"),
    [  # Abramowitz and Stegun, table 26.8
        (1, 3.84146, 0.05),
        (1, 10.828, 0.001),
        (4, 9.48773, 0.05),
        (9, 21.6660, 0.01),
        (10, 2.15585, 0.995),
        (30, 59.7031, 0.001),
        (100, 77.9295, 0.95),
        (100, 149.449, 0.001),
    ],
)
def test_gamma_agrees_with_tables(degrees: int, critical: float, p: float) -> None:
    assert upper_gamma(degrees / 2, critical / 2) == pytest.approx(p, rel=1e-3)


@pytest.mark.parametrize("x", [0.0, 1e-9, 0.3, 1.0, 1.9, 2.1, 30.0, 650.0])
def test_gamma_agrees_with_closed_forms(x: float) -> None:
    assert upper_gamma(1, x) == pytest.approx(math.exp(-x), rel=1e-11)
    assert upper_gamma(0.5, x) == pytest.approx(math.erfc(math.sqrt(x)), rel=1e-9)
    poisson = sum(math.exp(n * math.log(x) - x - math.lgamma(n + 1)) for n in range(20) if x)
    assert upper_gamma(20, x) == pytest.approx(poisson if x else 1.0, rel=1e-9)


def test_gamma_of_many_degrees_meets_the_normal_distribution() -> None:
    """Wilson and Hilferty, 1931."""
    for degrees in (5_000, 50_000):
        for z in (-3, -1, 0.5, 2, 4):
            x = degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3
            normal = math.erfc(z / math.sqrt(2)) / 2
            assert upper_gamma(degrees / 2, x / 2) == pytest.approx(normal, rel=0.02)


def test_p_is_uniform_where_the_distribution_is_right() -> None:
    rng = np.random.default_rng(5)
    exact = rng.dirichlet(np.full(60, 0.3))
    ps = [chi_square(rng.multinomial(5_000, exact), exact) for _ in range(2_000)]
    tenths = np.histogram(ps, 10, (0, 1))[0]
    assert chi_square(tenths, np.full(10, 0.1)) > 1e-4


def test_another_distribution_is_noticed() -> None:
    rng = np.random.default_rng(6)
    exact = rng.dirichlet(np.ones(40))
    other = 0.9 * exact + 0.1 * np.roll(exact, 1)
    assert chi_square(rng.multinomial(20_000, other), exact) < 1e-9


def test_rare_outcomes_are_pooled() -> None:
    """By hand: 0.3 expected twice and 9.4 are one cell of 10, beside 90."""
    p = chi_square([0, 1, 9, 90], [0.003, 0.003, 0.094, 0.9])
    assert p == 1.0
    p = chi_square([3, 3, 4, 90], [0.04, 0.02, 0.04, 0.9])
    assert p == pytest.approx(1.0)
    assert chi_square([20, 0, 0, 80], [0.04, 0.02, 0.04, 0.9]) == pytest.approx(
        math.erfc(math.sqrt((100 / 10 + 100 / 90) / 2))
    )


@pytest.mark.parametrize("share", [0.025, 0.1, 0.5])
def test_large_cells_keep_small_p_true(share: float) -> None:
    """How often p comes so small where the distribution is right, summed exactly over all counts:
    what a certificate rests on, and what cells of five would not give.
    """
    draws, small = 4000, 1e-10

    def often(share: float, least_expected: float) -> float:
        log, log_rest = math.log(share), math.log1p(-share)
        return math.fsum(
            math.exp(
                math.lgamma(draws + 1) - math.lgamma(k + 1) - math.lgamma(draws - k + 1)
                + k * log + (draws - k) * log_rest
            )
            for k in range(draws + 1)
            if chi_square([k, draws - k], [share, 1 - share], least_expected) < small
        )  # fmt: skip

    assert 0 < often(share, 100) < 50 * small
    assert often(5 / draws, 5) > 1000 * small
    assert often(5 / draws, 100) == 0, "taken together, nothing is left to compare"


def test_edges() -> None:
    assert chi_square([1, 0], [0.0, 1.0]) == 0.0, "what cannot come"
    assert chi_square([0, 7], [0.0, 1.0]) == 1.0
    assert chi_square([3], [1.0]) == 1.0
    for counts, probabilities in (
        ([1, 2], [1.0]),
        ([1, 2], [0.5, 0.6]),
        ([1, 2], [-0.5, 1.5]),
        ([1, 2], [math.nan, 1.0]),
        ([0, 0], [0.5, 0.5]),
        ([-1, 2], [0.5, 0.5]),
    ):
        with pytest.raises(ValueError, match=r"counts|distribution"):
            chi_square(counts, probabilities)
