"""What reading took is charged to what its drafts gain, and to the account if they do not."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.schedule.sequence import Sequence as Seq
from octavo.speculate.ahead import Ahead
from octavo.speculate.step_times import StepTimes


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
    owner = SimpleNamespace(num_prompt_tokens=700, max_tokens=40)
    seq = Seq(cast(Any, owner), 0, (0, 0), array("i", [1] * 700))
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
