"""What a drafter that computes is asked for: rare trials, and what pays in step after step."""

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.account import TimeAccount
from octavo.spec_decode.draft_planner import DraftPlanner
from octavo.spec_decode.drafter import ModelDrafter
from octavo.spec_decode.times import SpeculationTimes


class Background(ModelDrafter):
    """Has begun its next drafts, or not."""

    begun = False  # type: ignore[assignment]


def sequence() -> Seq:
    owner = SimpleNamespace(prompt_tokens=5)
    return Seq(cast(Any, owner), 0, (0, 0), array("i", [1] * 5), 9999)


def planning(row: float = 0.0) -> tuple[Background, DraftPlanner, SpeculationTimes]:
    """A planner that knows steps of 1 ms, and ``row`` more for each further token."""
    drafter, times = Background(), SpeculationTimes()
    for _ in range(20):
        for size in (1, 2, 4):
            times.observe(size, 1e-3 + row * (size - 1), prompts=False)
    planner = DraftPlanner(drafter, times, TimeAccount(128))
    assert planner.plan([sequence()], [3], [[]], 1, 100) == [1]  # the first time one token
    planner.observe([sequence()], [1], 1.0)  # which is no measure
    return drafter, planner, times


def test_waiting_for_what_was_begun_is_no_price_of_a_draft_made_then() -> None:
    """And it is of as long a draft as the last was, not as the next one is."""
    drafter, planner, times = planning()
    seq = sequence()
    wait = 0.0
    for length in [3, 3, 1, 1] * 8:
        planner.plan([seq], [length], [[0.9] * length], 1, 100)
        planner.observe([seq], [length], wait if drafter.begun else 1e-3 * length)
        wait = 1e-5 * length
        drafter.begun = not drafter.begun
    for passes in (1, 3):
        assert times.drafting(1, passes, begun=False) == pytest.approx(1e-3 * passes)
        assert times.drafting(1, passes, begun=True) == pytest.approx(1e-5 * passes)


def test_what_pays_only_where_it_was_begun_goes_on_once_it_has_been_tried() -> None:
    drafter, planner, times = planning()
    times.observe_drafting(1, 3, 3e-3, begun=False)

    def asked() -> bool:
        planner.rest = 0
        return any(planner.plan([sequence()], [3], [[0.8, 0.7, 0.6]], 1, 100))

    assert not asked()
    drafter.begun = True
    assert asked()
    planner.observe([sequence()], [3], 1e-5)
    drafter.begun = False
    assert asked()


def test_what_does_not_pay_is_tried_for_a_percent_of_the_time() -> None:
    """Steps take 1 ms and a draft of 3 tokens 0.1; a row more never pays."""
    _, planner, times = planning(row=1e-3)
    times.observe_drafting(1, 3, 1e-4, begun=False)
    seq, tried = sequence(), 0
    for _ in range(1000):
        if any(planner.plan([seq], [3], [[0.1]], 1, 100)):
            tried += 1
        planner.passed(1, 1e-3)
    assert 80 <= tried <= 105


class Slow(Background):
    """Has to read a text of 700 tokens."""

    def unread(self, seq: Seq) -> int:
        return 700


@pytest.mark.parametrize(("seconds", "read"), [(1e-3, True), (1.0, False)])
def test_a_text_is_read_where_its_answer_pays_for_it(seconds: float, read: bool) -> None:
    """Answers had 100 tokens of late, each of which drafts would save some half a millisecond."""
    _, _, times = planning()
    planner = DraftPlanner(Slow(), times, TimeAccount(128))
    planner.end(100)
    planner.plan([sequence()], [1], [[0.9]], 1, 100)
    planner.observe([sequence()], [1], 1.0)
    times.observe_drafting(1, 1, 1e-5, begun=False)
    times.observe_reading(700, seconds)
    assert any(planner.plan([sequence()], [1], [[0.9]], 1, 100)) == read
