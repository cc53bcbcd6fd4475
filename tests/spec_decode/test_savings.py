"""Time saved is what steps without drafts would have taken, less what these took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from octavo.spec_decode.savings import Savings
from octavo.spec_decode.step_times import StepTimes


def step(decodes: int, drafts: list[list[int]] | None, chunk: int = 0) -> Any:
    size = decodes + sum(map(len, drafts or ())) + chunk
    return SimpleNamespace(
        decodes=[None] * decodes,
        drafts=drafts,
        branches={},
        chunks=[None] if chunk else [],
        batch=SimpleNamespace(num_tokens=size),
    )


@pytest.fixture
def times() -> StepTimes:
    """A token alone takes 10 ms, five 15."""
    known = StepTimes()
    for _ in range(200):
        known.observe(1, 0.010, prompts=False)
        known.observe(5, 0.015, prompts=False)
    return known


def test_accepted_tokens_save_their_steps(times: StepTimes) -> None:
    savings = Savings()
    savings.add(times, step(1, [[1, 2, 3, 4]]), [[1, 2, 3, 9]], 0.0152, 0.0002)
    # Four tokens for 40 ms without; 15 ms and 0.2 of drafting here.
    assert savings.saved == pytest.approx(0.040 - 0.0152, rel=0.05)
    assert savings.drafting == pytest.approx(0.0002)


def test_drafts_in_vain_cost_their_rows(times: StepTimes) -> None:
    savings = Savings()
    savings.add(times, step(1, [[1, 2, 3, 4]]), [[9]], 0.0152, 0.0002)
    assert savings.saved == pytest.approx(-0.0052, rel=0.1)


def test_drafting_that_came_to_nothing_is_a_loss(times: StepTimes) -> None:
    savings = Savings()
    savings.add(times, step(1, None), [[9]], 0.010, 0.0003)
    assert savings.saved == -savings.drafting == -0.0003


def test_prompts_beside_drafts_are_nobodys_loss(times: StepTimes) -> None:
    """The step is long for the prompt it reads, not for the drafts."""
    savings = Savings()
    savings.add(times, step(1, [[1, 2]], chunk=2), [[1, 2, 3], [4]], 0.5, 0.0)
    assert 0.010 < savings.saved < 0.020


def test_nothing_is_known_before_the_first_steps() -> None:
    savings = Savings()
    savings.add(StepTimes(), step(1, [[1]]), [[1, 2]], 0.01, 0.0)
    assert savings.saved == 0


def test_what_an_end_cut_off_saved_nothing(times: StepTimes) -> None:
    savings = Savings()
    savings.add(times, step(1, [[1, 2, 3, 4]]), [[1, 2, 3, 4, 5]], 0.0152, 0.0002)
    savings.take_back(4)
    assert savings.saved == pytest.approx(-0.0052, rel=0.1)
    savings.add(times, step(1, None), [[9]], 0.010, 0.0)
    savings.take_back(0)
    assert savings.saved == pytest.approx(-0.0052, rel=0.1)
