"""What was measured lately counts, the more the later, and never for ever."""

from __future__ import annotations

import pytest

from octavo.kv_cache.measured import _HALF_LIFE, Measured


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
