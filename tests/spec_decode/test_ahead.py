"""What reading took is charged to what its drafts gain, and to the account if they do not; and
drafting that does not pay is tried ever more rarely.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
from octavo.spec_decode.ahead import Ahead
from octavo.spec_decode.step_times import StepTimes

from octavo.scheduler.sequence import Sequence as Seq


class Slow:
    """Has to read every text."""

    def __init__(self) -> None:
        self.read: set[Seq] = set()

    def unread(self, seq: Seq) -> int:
        return 0 if seq in self.read else 700


def reading(seconds: float) -> tuple[Ahead, Seq]:
    """A text has just been read in so many seconds; 40 tokens may come."""
    drafter = Slow()
    planner = Ahead(cast(Any, drafter), StepTimes())
    owner = SimpleNamespace(prompt_tokens=700)
    seq = Seq(cast(Any, owner), 0, (0, 0), array("i", [1] * 700), 740)
    planner._warm = True
    planner._unread = [700]
    drafter.read.add(seq)
    planner.observe([seq], [3], seconds)
    return planner, seq


def test_what_drafts_gain_pays_for_reading_first() -> None:
    planner, seq = reading(1.0)
    charged = [planner.charged(gained) for gained in (0.3, -0.5, 0.0, 0.5, 0.5, 0.5)]
    assert charged == pytest.approx([0.3, 0.0, 0.0, 0.5, 0.2, 0.0])
    planner.end(seq, 30)
    assert planner.charged(0.0) == 0.0


def test_what_was_not_gained_by_the_end_is_charged_at_once() -> None:
    planner, seq = reading(1.0)
    assert planner.charged(0.3) == pytest.approx(0.3)
    planner.end(seq, 10)
    assert planner.charged(0.0) == pytest.approx(0.7)
    assert planner.charged(0.0) == 0.0


def test_nor_does_a_text_that_goes_on_for_ever_owe_for_ever() -> None:
    planner, seq = reading(1.0)
    seq.token_ids.extend([1] * 39)
    assert planner.charged(0.0) == 0.0
    seq.token_ids.append(1)
    assert planner.charged(0.0) == pytest.approx(1.0)


def test_gains_beyond_stand_for_two_texts_and_no_more() -> None:
    planner, _ = reading(1.0)
    for _ in range(100):
        planner.charged(1.0)
    planner._overdue = 5.0
    assert planner.charged(0.0) == pytest.approx(3.0)
    assert planner.charged(0.0) == 0.0


class Background:
    """Has begun its next drafts, or not."""

    begun = False
    propose = observe = begin = give_up = end = close = len  # is not asked


def in_the_background() -> tuple[Background, Ahead, Seq]:
    """A drafter that may have begun, its planner, which knows it well, and who is asked about."""
    drafter = Background()
    planner = Ahead(cast(Any, drafter), steps := StepTimes())
    for size in (1, 2, 4):
        steps.observe(size, 1e-3, prompts=False)
    planner._warm = True
    planner._tried = 100
    owner = SimpleNamespace(prompt_tokens=5)
    return drafter, planner, Seq(cast(Any, owner), 0, (0, 0), array("i", [1] * 5), 9999)


def test_waiting_for_what_was_begun_is_no_price_of_a_draft_made_then() -> None:
    """And it is of as long a draft as the last was, not as the next one is."""
    drafter, planner, seq = in_the_background()
    wait = 0.0
    for length in [3, 3, 1, 1] * 8:
        planner.plan([seq], [length], [[0.9] * length], 1, 100)
        planner.observe([seq], [length], wait if drafter.begun else 1e-3 * length)
        wait = 1e-5 * length
        drafter.begun = not drafter.begun
    for passes in (1, 3):
        assert planner.times.predict(1, passes) == pytest.approx(1e-3 * passes)
        assert planner.waits.predict(1, passes) == pytest.approx(1e-5 * passes)
    assert planner._seconds([1]) == pytest.approx(3e-3)  # a trial begins after a pause


def test_what_pays_only_where_it_was_begun_goes_on_once_it_has_been_tried() -> None:
    drafter, planner, seq = in_the_background()

    def asked() -> bool:
        return any(planner.plan([seq], [3], [[0.8, 0.7, 0.6]], 1, 100)[0])

    planner.times.observe(1, 3, 3e-3)
    assert not asked()
    drafter.begun = True
    assert asked()
    planner.observe([seq], [3], 1e-5)
    drafter.begun = False
    assert asked()


def test_what_is_tried_in_vain_is_tried_ever_more_rarely() -> None:
    """… until it seems to pay again. Steps take 1 ms and a draft of 3 tokens 0.1."""
    steps = StepTimes()
    steps.observe(100, 0.1, prompts=True)
    for size in (1, 1, 2, 4):
        steps.observe(size, 1e-3 * size, prompts=False)  # a row more never pays
    planner = Ahead(cast(Any, object()), steps)
    planner._warm = True
    planner.times.observe(1, 3, 1e-4)
    owner = SimpleNamespace(prompt_tokens=5)
    seq = Seq(cast(Any, owner), 0, (0, 0), array("i", [1] * 5), 9999)

    def trials(of: int) -> int:
        tried = 0
        for _ in range(of):
            counts, _ = planner.plan([seq], [3], [[0.1]], 1, 100)
            if any(counts):
                tried += 1
                planner.checked()
            planner.passed(1, 1e-3)
        return tried

    often = trials(500)
    trials(3000)
    seldom = trials(500)
    assert 40 <= often <= 60  # at first a hundredth of the time
    assert 10 <= seldom <= 20
    planner._steps = cast(Any, cheap := StepTimes())
    for size in (1, 2, 4):
        cheap.observe(size, 1e-3, prompts=False)
    assert planner.plan([seq], [3], [[0.9]], 1, 100)[0] == [1]
    planner._steps = steps
    assert trials(500) >= 0.8 * often
