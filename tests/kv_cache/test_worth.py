"""What a block is expected to take that a step begins by loading."""

from __future__ import annotations

import pytest

from octavo.kv_cache.worth import Worth

BLOCK = 1_000_000  # bytes


class Nothing:
    per_token = 0.0

    def seconds(self, start: int, tokens: int) -> float:
        return 0.0


def made(clock: list[float]) -> Worth:
    return Worth(BLOCK, 16.0, Nothing(), lambda: clock[0])


def test_the_first_step_loads_too_little_rather_than_too_much() -> None:
    worth = made([0.0])
    assert worth.seconds_to_load(overwriting=False) == pytest.approx(0.01)
    worth.copied(0, 0.0, 10, 0.005)
    assert worth.seconds_to_load(overwriting=False) == pytest.approx(0.0005)


def test_a_block_overwritten_for_it_counts_and_those_for_others_do_not() -> None:
    for spilled, each in ((0, 1e-4), (5, 3e-4), (10, 5e-4), (1000, 5e-4)):
        worth = made([0.0])
        for _ in range(50):
            worth.copied(spilled, spilled * 4e-4, 10, 10 * 1e-4)
        assert worth._copying.seconds == pytest.approx(each)


def test_no_less_than_in_the_last_step_and_no_accident_counts_for_ever() -> None:
    clock = [0.0]
    worth = made(clock)
    for _ in range(50):
        worth.copied(0, 0.0, 10, 10 * 1e-3)
    worth.copied(0, 0.0, 1, 3e-3)
    assert worth.seconds_to_load(overwriting=False) == pytest.approx(3e-3)
    worth.copied(0, 0.0, 1, 1e-4)
    assert worth.seconds_to_load(overwriting=False) < 1.4e-3
    clock[0] = 3600.0  # as at first
    assert worth.seconds_to_load(overwriting=False) == pytest.approx(0.01)
