"""An account of the time that drafts save or lose stops them in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.spec_decode.account import TimeAccount


@given(
    speeds=st.lists(st.tuples(st.integers(1, 400), st.floats(0.2, 3.0)), min_size=1, max_size=20),
    step=st.floats(1e-4, 1.0),
)
def test_a_account_loses_no_more_than_it_may(speeds: list[tuple[int, float]], step: float) -> None:
    """However drafts turn out, and they may gain at first and lose later."""
    account = TimeAccount(128)
    lost = seconds = first = 0.0
    for count, speed in speeds:
        for _ in range(count):
            took = step
            if not account.overdrawn:
                took = step / speed
                lost += took - step
                account.add(took, step)
            else:
                account.add(step, step)
            first = first or took
            seconds += took
    # A percent at once and one as the account fades, what had been saved up, what it begins with,
    # and the step that overdraws it.
    assert lost <= 0.03 * seconds + 0.01 * 128 * first + 4 * step


@pytest.mark.parametrize(("lost", "spent"), [(0.004, False), (0.006, True)])
def test_a_account_is_half_a_percent(lost: float, spent: bool) -> None:
    account = TimeAccount(128)
    for _ in range(3000):
        if account.overdrawn:
            break
        account.add(1.0 + lost, 1.0)
    assert account.overdrawn == spent


def test_a_account_recovers_with_time() -> None:
    account = TimeAccount(128)
    account.add(1.0, 1.0)
    while not account.overdrawn:
        account.add(1.5, 1.0)
    rest = 0
    while account.overdrawn:
        account.add(1.0, 1.0)
        rest += 1
    assert 10 <= rest <= 200
    account.add(3.0, 1.0)
    assert account.overdrawn
    account.add(1.0, 1.0, 1000)
    assert not account.overdrawn


def test_whatever_was_gained_only_some_steps_are_lost_in_a_row() -> None:
    account = TimeAccount(128)
    for _ in range(5000):
        account.add(1.0, 3.0)
    lost = 0
    while not account.overdrawn:
        account.add(2.0, 1.0)
        lost += 1
    assert 2 <= lost <= 6


def test_a_large_loss_at_once_is_paid_off_by_as_much_time() -> None:
    """A hundred steps lost are half a percent of 20,000, however much has been forgotten."""
    account = TimeAccount(128)
    for _ in range(2000):
        account.add(1.0, 1.0)
    account.add(101.0, 1.0)
    rested = 0
    while account.overdrawn:
        account.add(1.0, 1.0, 8)
        rested += 8
    assert 16_000 < rested < 20_000


def test_what_was_gained_long_ago_is_no_licence() -> None:
    account = TimeAccount(128)
    for _ in range(10_000):
        account.add(1.0, 3.0)
    losing = 0
    while not account.overdrawn:
        account.add(1.1, 1.0)
        losing += 1
    assert losing <= 300


def test_reading_is_charged_over_what_is_read_for() -> None:
    """A text read in 8 steps, for 32 tokens: paid where each step saves a quarter and more."""
    for saves, paid in ((0.3, True), (0.1, False)):
        account = TimeAccount(128)
        account.add(1.0, 1.0)
        account.owe(8.0, 32)
        overdrawn = False
        for _ in range(60):
            account.add(1.0, 1.0 + saves)
            overdrawn |= account.overdrawn
        assert overdrawn != paid


def test_reading_that_saved_nothing_is_charged_in_full() -> None:
    account = TimeAccount(128)
    account.add(1.0, 1.0)
    account.owe(0.0, 10)  # as a clock may say
    account.owe(100.0, 10)
    account.add(1.0, 1.0, 50)
    rested = 0
    while account.overdrawn:
        account.add(1.0, 1.0, 8)
        rested += 8
    assert rested > 16_000  # half a percent of the time is 100 steps
