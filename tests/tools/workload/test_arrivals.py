import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.tools.workload.arrivals import Ramp, arrival_times

MANY = 20_000


def gaps(burstiness: float, rate: float = 4.0) -> np.ndarray:
    return np.diff(arrival_times(MANY, rate, burstiness, None, seed=1))


def test_poisson_gaps_are_exponential() -> None:
    found = gaps(1.0)
    assert found.mean() == pytest.approx(1 / 4, rel=0.01)
    assert found.std() == pytest.approx(1 / 4, rel=0.03)  # an exponential's deviation is its mean
    assert (found > 1 / 4).mean() == pytest.approx(math.exp(-1), abs=0.01)


@pytest.mark.parametrize("burstiness", [0.25, 0.5, 2.0, 16.0])
def test_gamma_gaps_vary_as_their_shape_says(burstiness: float) -> None:
    found = gaps(burstiness)
    assert found.mean() == pytest.approx(1 / 4, rel=0.03)
    # Coefficient of variation of a gamma distribution of shape k: 1/sqrt(k).
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_infinite_burstiness_is_a_metronome() -> None:
    assert arrival_times(4, 2.0, math.inf, None, 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_infinite_rate_is_all_at_once() -> None:
    assert not arrival_times(5, math.inf, 1.0, None, 0).any()


@given(
    count=st.integers(1, 300),
    rate=st.floats(0.01, 1e4),
    burstiness=st.floats(0.1, 100),
    seed=st.integers(0, 2**32),
)
def test_the_last_of_n_arrives_at_n_over_rate(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times(count, rate, burstiness, None, seed)
    assert len(times) == count
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)
    assert (times == arrival_times(count, rate, burstiness, None, seed)).all()


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_rises_from_start_to_end(strategy: str) -> None:
    ramp = Ramp(strategy, 2.0, 32.0)  # type: ignore[arg-type]
    rates = 1 / np.diff(arrival_times(101, math.inf, math.inf, ramp, 0), prepend=0)
    assert rates[0] == pytest.approx(2.0)
    assert rates[-1] == pytest.approx(32.0)
    assert rates[50] == pytest.approx(17.0 if strategy == "linear" else 8.0)
    drawn = arrival_times(MANY, math.inf, 1.0, ramp, 3)
    early, late = np.diff(drawn)[: MANY // 10], np.diff(drawn)[-MANY // 10 :]
    assert early.mean() > 3 * late.mean()


def test_a_ramp_of_one_request() -> None:
    assert arrival_times(1, math.inf, math.inf, Ramp("linear", 2, 4), 0) == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("rate", "burstiness", "ramp", "about"),
    [
        (0.0, 1.0, None, "request-rate"),
        (-1.0, 1.0, None, "request-rate"),
        (math.nan, 1.0, None, "request-rate"),
        (1e-308, 1.0, None, "request-rate"),
        (1e10, 1.0, None, "request-rate"),
        (1.0, 0.0, None, "burstiness"),
        (5.0, 1e-300, None, "--burstiness 1e-300"),  # every interval would be 0
        (5.0, 1e308, None, "--burstiness"),
        (math.inf, 1.0, Ramp("linear", 1e-308, 1e-300), "ramp-up"),
        (1.0, math.nan, None, "burstiness"),
        (1.0, 1.0, Ramp("linear", 1, 2), "exclude"),
        (math.inf, 1.0, Ramp("linear", 0, 2), "from 1e-06"),
        (math.inf, 1.0, Ramp("linear", 3, 2), "at most"),
        (math.inf, 1.0, Ramp("exponential", 1, math.inf), "ramp-up"),
    ],
)
def test_what_is_no_process_is_refused(
    rate: float, burstiness: float, ramp: Ramp | None, about: str
) -> None:
    with pytest.raises(ValueError, match=about):
        arrival_times(3, rate, burstiness, ramp, 0)


def test_a_last_arrival_beyond_all_times_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--request-rate is too low for 100000 requests"):
        arrival_times(100_000, 1e-6, 1.0, None, 0)
