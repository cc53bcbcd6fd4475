"""What the speculator makes of drafts that say what they were drawn from."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from octavo.execute.batch import StepResult
from octavo.schedule.sequence import Sequence as Seq
from octavo.speculate.drafter import NO_DRAFT, Draft
from octavo.speculate.ngram import NgramDrafter
from octavo.speculate.speculator import Speculator

VOCAB = 5
UNIFORM = np.full((3, VOCAB), 1 / VOCAB, np.float32)


def changed(row: int, token: int, value: float) -> Any:
    rows = UNIFORM.copy()
    rows[row, token] = value
    return rows


class Fixed(NgramDrafter):
    """Always the same draft."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(2, 4)
        self.draft = draft

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        return [self.draft for _ in sequences]


def sequence() -> Seq:
    request = SimpleNamespace(cache_salt=None)
    owner = SimpleNamespace(request=request, num_prompt_tokens=3, max_tokens=20)
    return Seq(cast(Any, owner), 0, (0, 0), array("i", [1, 2, 3]))


@pytest.mark.parametrize(
    "rows",
    [
        changed(0, 1, 0.3),
        changed(1, 1, -0.2),
        changed(2, 1, np.nan),
        changed(1, 1, np.inf),
        np.eye(VOCAB, dtype=np.float32)[[1, 2, 0]],  # no probability of the last token, 3
        UNIFORM[:2],
        UNIFORM[:, :4],
        UNIFORM[0],
    ],
)
def test_what_tokens_cannot_have_been_drawn_from_fails_the_drafter(
    rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    speculator = Speculator(Fixed(Draft([1, 2, 3], 0, (), rows)), VOCAB, 3, rejection=True)
    assert speculator.propose([sequence()], 1, 10) == [[]]
    assert speculator.failures == 1
    assert "ValueError" in caplog.text


def test_what_they_were_drawn_from_comes_with_drafts() -> None:
    draft = Draft([1, 2, 3], 0, (), UNIFORM.astype(np.float64))
    speculator = Speculator(Fixed(draft), VOCAB, 3, rejection=True)
    seqs = [sequence(), sequence()]
    assert speculator.propose(seqs, 2, 5) == [[1, 2, 3], [1, 2]]
    (first, second) = speculator.probabilities(seqs) or (None, None)
    assert first is not None
    assert second is not None
    assert first[0].dtype == np.float32
    assert (np.stack(first) == UNIFORM).all()
    assert len(second) >= 2


class Counting:
    """A `ModelDrafter` that says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        self.asked += counts
        return [NO_DRAFT] * len(decoding)

    def observe(self, scheduled: Any, result: StepResult, runs: Sequence[list[int]]) -> None: ...

    def end(self, seq: Seq) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("rejection", [True, False])
def test_no_more_is_drafted_than_distributions_have_room(rejection: bool) -> None:
    """64 MiB of a large vocabulary's: one for each token that is weighed."""
    drafter = Counting()
    speculator = Speculator(drafter, 1 << 18, 10, rejection=rejection)
    speculator.propose([sequence() for _ in range(9)], 9, 1000)
    assert sum(drafter.asked) == (64 if rejection else 90)


def learned(
    draft: Draft, tested: list[int], run: list[int], *, rejection: bool
) -> tuple[list[float], list[float]]:
    """The draft's gains before and after a step."""
    speculator = Speculator(Fixed(draft), VOCAB, rejection=rejection)
    seq = sequence()
    speculator._ask([seq], [3])
    before = speculator._gains(seq, draft)
    batch = SimpleNamespace(num_tokens=1 + len(tested))
    scheduled = SimpleNamespace(batch=batch, chunks=[], decodes=[seq], drafts=[tested], branches={})
    for _ in range(20):
        speculator._ask([seq], [3])
        speculator.learn(cast(Any, scheduled), StepResult(None, 0.0), [run], 0.01)
    return before, speculator._gains(seq, draft)


def test_only_what_was_tested_counts_where_q_is_weighed() -> None:
    """The target's own draw behind what was tested is no test: it meets the guess too rarely."""
    drawn, certain = Draft([1, 2, 3], 0, (), UNIFORM), Draft([1, 2, 3])
    before, after = learned(drawn, [1], [1, 4], rejection=True)
    assert after[0] > before[0]
    assert after[1] / after[0] >= before[1] / before[0]
    before, after = learned(certain, [1], [1, 4], rejection=True)
    assert after[0] > before[0]
    assert len(after) < 2 or after[1] / after[0] < before[1] / before[0]
    before, after = learned(drawn, [1, 2], [4], rejection=True)
    assert not after or after[0] < before[0]


def test_whether_a_drawn_token_is_tested_does_not_depend_on_it() -> None:
    """Evidence may tell what was drawn."""
    for rejection, drawn, alike in ((True, True, True), (True, False, False), (False, True, False)):
        speculator = Speculator(Fixed(Draft([1])), VOCAB, rejection=rejection)
        seq = sequence()
        drafts = [Draft([1, 2, 3], at, (), UNIFORM if drawn else None) for at in (1, 2)]
        own = speculator._own_of(seq)
        for _ in range(30):
            speculator._acceptance.learn(1, own, [1, 2, 3], [1, 2, 3])
            speculator._acceptance.learn(2, own, [1, 2, 3], [4])
        one, other = (speculator._gains(seq, draft) for draft in drafts)
        assert (one == other) == alike


def asked(paid: bool, steps: int = 600) -> int:
    """How often a drafter is asked whose draft is checked each time, for steps that take 1 ms and,
    with a draft, 1.1: where one more token comes that is time saved, else lost. Asking takes 20 µs.
    """
    clock = [0.0]
    calls = []

    class Busy(Fixed):
        def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
            clock[0] += 20e-6
            calls.append(clock[0])
            return super().propose(sequences, counts)

    speculator = Speculator(Busy(Draft([1])), VOCAB, now=lambda: clock[0])
    speculator._gains = lambda seq, draft: [0.9]  # type: ignore[method-assign]  # a wrong estimate
    speculator._budget.spend = lambda seconds, worth, steps=1: None  # type: ignore[method-assign]
    owner = SimpleNamespace(
        request=SimpleNamespace(cache_salt=None), num_prompt_tokens=3, max_tokens=9999
    )
    seq = Seq(cast(Any, owner), 0, (0, 0), array("i", [1, 2, 3]))
    for _ in range(steps):
        before = clock[0]
        drafts = speculator.propose([seq], 1, 10)
        drafted = bool(drafts[0])
        clock[0] += 1.1e-3 if drafted else 1e-3
        run = [1, 2] if drafted and paid else [2]
        batch = SimpleNamespace(num_tokens=1 + drafted)
        scheduled = SimpleNamespace(
            batch=batch, chunks=[], decodes=[seq], drafts=drafts if drafted else None, branches={}
        )
        result = StepResult(None, 0.0)
        speculator.learn(cast(Any, scheduled), result, [run], clock[0] - before)
        seq.token_ids.extend(run)
    return len(calls)


def test_a_drafter_whose_drafts_do_not_pay_is_asked_seldom() -> None:
    """However promising they look; asking costs time too, as does looking at what came of it."""
    assert asked(paid=True) > 500
    assert asked(paid=False) < 100
