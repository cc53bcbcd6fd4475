"""What a block is expected to take that a step begins by loading."""

import pytest

from octavo.kv_cache.transfer_cost import _HALF_LIFE, Measured, TransferCost

BLOCK = 1_000_000  # bytes


def made(clock: list[float]) -> TransferCost:
    return TransferCost(BLOCK, 16.0, lambda start, tokens: 0.0, 1, lambda: clock[0])


def test_the_first_step_loads_too_little_rather_than_too_much() -> None:
    cost = made([0.0])
    assert cost.seconds_to_load(overwriting=False) == pytest.approx(0.01)
    cost.copied(0, 0.0, 10, 0.005)
    assert cost.seconds_to_load(overwriting=False) == pytest.approx(0.0005)


def test_a_block_overwritten_for_it_counts_and_those_for_others_do_not() -> None:
    for spilled, each in ((0, 1e-4), (5, 3e-4), (10, 5e-4), (1000, 5e-4)):
        cost = made([0.0])
        for _ in range(50):
            cost.copied(spilled, spilled * 4e-4, 10, 10 * 1e-4)
        assert cost._last_step.seconds == pytest.approx(each)


def test_no_less_than_in_the_last_step_and_no_accident_counts_for_ever() -> None:
    clock = [0.0]
    cost = made(clock)
    for _ in range(50):
        cost.copied(0, 0.0, 10, 10 * 1e-3)
    cost.copied(0, 0.0, 1, 3e-3)
    assert cost.seconds_to_load(overwriting=False) == pytest.approx(3e-3)
    cost.copied(0, 0.0, 1, 1e-4)
    assert cost.seconds_to_load(overwriting=False) < 1.4e-3
    clock[0] = 3600.0  # as at first
    assert cost.seconds_to_load(overwriting=False) == pytest.approx(0.01)


def test_it_follows_what_is_measured() -> None:
    measured = Measured(1.0, lambda: 0.0)
    assert measured.seconds == 1.0
    for _ in range(100):
        measured.took(3.0)
    assert measured.seconds == pytest.approx(3.0)
    for _ in range(100):
        measured.took(0.01)
    assert measured.seconds == pytest.approx(0.01)


def test_one_that_takes_for_ever_counts_a_little() -> None:
    measured = Measured(1.0, lambda: 0.0)
    measured.took(1e9)
    assert 1.0 < measured.seconds < 2.0
    for _ in range(100):
        measured.took(1e9)
    assert measured.seconds > 1e8


def test_it_is_forgotten() -> None:
    clock = [0.0]
    measured = Measured(1.0, lambda: clock[0])
    for _ in range(100):
        measured.took(9.0)
    clock[0] = _HALF_LIFE
    assert measured.seconds == pytest.approx(5.0)
    clock[0] = 100 * _HALF_LIFE
    assert measured.seconds == pytest.approx(1.0)


def test_only_the_newest_may_count() -> None:
    measured = Measured(8.0, lambda: 0.0, recent=1.0)
    for seconds in (2.0, 3.0, 1.0):
        measured.took(seconds)
        assert measured.seconds == seconds
