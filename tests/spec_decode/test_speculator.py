"""What the speculator makes of drafts that say what they were drawn from."""

from array import array
from collections.abc import Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from faults import patch
from octavo.executor.base import StepResult
from octavo.scheduler.request import SchedulingParams
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.drafter import NO_DRAFT, Draft, ModelDrafter
from octavo.spec_decode.ngram import NgramDrafter
from octavo.spec_decode.speculator import Speculator

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
    owner = SimpleNamespace(scheduling=SchedulingParams(), prompt_tokens=3)
    return Seq(cast(Any, owner), 0, (0, 0), array("i", [1, 2, 3]), 23)


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
    assert second is not None
    assert first[0].dtype == np.float32
    assert (np.stack(first) == UNIFORM).all()
    assert len(second) >= 2


class Counting(ModelDrafter):
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        self.asked += counts
        return [NO_DRAFT] * len(decoding)


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
    """The draft's gains before and after steps in which some of its tokens were tested."""
    speculator = Speculator(Fixed(draft), VOCAB, 3, rejection=rejection)
    seq = sequence()
    before: list[float] = []
    for _ in range(20):
        speculator.propose([seq], 1, 3)
        before = before or speculator._gains(seq, speculator.draft_of(seq))
        batch = SimpleNamespace(num_tokens=1 + len(tested))
        scheduled = SimpleNamespace(
            batch=batch, chunks=[], decodes=[seq], drafts=[tested], branches={}
        )
        speculator.learn(cast(Any, scheduled), StepResult(None, 0.0), [run], 0.01)
    speculator.propose([seq], 1, 3)
    return before, speculator._gains(seq, speculator.draft_of(seq))


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
        for _ in range(30):
            speculator._acceptance.learn(("model", 1), seq, [1, 2, 3], [1, 2, 3])
            speculator._acceptance.learn(("model", 2), seq, [1, 2, 3], [4])
        one, other = (speculator._gains(seq, draft) for draft in drafts)
        assert (one == other) == alike


def drafting(paid: float, steps: int = 600) -> tuple[int, list[bool]]:
    """How often a drafter is asked whose draft is checked each time, for steps that take 1 ms and,
    with a draft, 1.1: where one more token comes, in ``paid`` of them, that is time saved, else
    lost. Asking takes 20 µs. And which of the steps had a draft.
    """
    clock = [0.0]
    calls = []
    had = []

    class Busy(Fixed):
        def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
            clock[0] += 20e-6
            calls.append(clock[0])
            return super().propose(sequences, counts)

    speculator = Speculator(Busy(Draft([1])), VOCAB, now=lambda: clock[0])
    patch(speculator, _gains=lambda seq, draft: [0.9])  # a wrong estimate
    owner = SimpleNamespace(scheduling=SchedulingParams(), prompt_tokens=3)
    seq = Seq(cast(Any, owner), 0, (0, 0), array("i", [1, 2, 3]), 9999)
    for step in range(steps):
        before = clock[0]
        drafts = speculator.propose([seq], 1, 10)
        drafted = bool(drafts[0])
        had.append(drafted)
        clock[0] += 1.1e-3 if drafted else 1e-3
        run = [1, 2] if drafted and int((step + 1) * paid) > int(step * paid) else [2]
        batch = SimpleNamespace(num_tokens=1 + drafted)
        scheduled = SimpleNamespace(
            batch=batch, chunks=[], decodes=[seq], drafts=drafts if drafted else None, branches={}
        )
        result = StepResult(None, 0.0)
        speculator.learn(cast(Any, scheduled), result, [run], clock[0] - before)
        seq.token_ids.extend(run)
    return len(calls), had


def test_a_drafter_whose_drafts_do_not_pay_is_asked_seldom() -> None:
    """However promising they look; asking costs time too, as does looking at what came of it."""
    assert drafting(paid=1.0)[0] > 500
    assert drafting(paid=0.0)[0] < 100


def test_steps_without_drafts_are_run_now_and_then() -> None:
    """However well drafts do: two of some 150 at least."""
    _, had = drafting(1.0, 1200)
    apart = [len(list(steps)) for drafted, steps in groupby(had[200:-1]) if drafted]
    assert 30 <= max(apart) <= 75


class Model(ModelDrafter):
    """Has one draft, and notes for which it was asked."""

    def __init__(self, draft: Draft = NO_DRAFT) -> None:
        self.draft = draft
        self.asked: list[list[int]] = []
        self.ended = 0

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        self.asked.append(list(counts))
        return [self.draft if count else NO_DRAFT for count in counts]

    def end(self, seq: Seq) -> None:
        self.ended += 1


class Begins(Model):
    """… its next drafts before it is asked, and takes half a millisecond to cancel them."""

    begun = False  # type: ignore[assignment]

    def __init__(self, clock: list[float]) -> None:
        super().__init__(Draft([1, 2]))
        self.calls: list[str] = []
        self.clock = clock

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        self.calls.append("propose")
        self.begun = False
        return super().propose(decoding, counts)

    def observe(self, scheduled: Any, result: StepResult, runs: Sequence[list[int]]) -> None:
        self.calls.append("observe")

    def begin(self, scheduled: Any, result: StepResult, runs: Sequence[list[int]]) -> None:
        self.calls.append("begin")
        self.begun = True

    def cancel(self) -> None:
        self.calls.append("cancel")
        self.begun = False
        self.clock[0] += 0.0005


def test_drafts_that_were_begun_are_given_up_in_the_drafters_own_time() -> None:
    clock = [0.0]
    drafter = Begins(clock)
    speculator = Speculator(drafter, VOCAB, 2, now=lambda: clock[0])
    seqs = [sequence()]
    went_on(speculator, seqs, [1, 2, 3])
    assert drafter.calls == ["propose", "begin"]
    speculator._settle()
    speculator._rest = 2
    for spent in (0.0005, 0.0):
        assert speculator.propose(seqs, 1, 100) == [[]]
        assert speculator.spent == spent
    assert drafter.calls == ["propose", "begin", "cancel"]
    went_on(speculator, seqs, [1, 2, 3])
    assert drafter.calls[3:] == ["propose", "begin"]


def test_nothing_is_begun_before_a_step_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    drafter = Begins(clock)
    speculator = Speculator(drafter, VOCAB, now=lambda: clock[0])
    seqs = [sequence()]
    went_on(speculator, seqs, [1, 2, 3], 20, reading=0.0002)
    assert drafter.calls[-2:] == ["propose", "begin"]
    asked: list[bool] = [False, True, True]  # by the step to come, whose drafts would be begun
    monkeypatch.setattr(speculator, "_control_due", lambda _: asked.pop(0))
    went_on(speculator, seqs, [1, 2, 3], reading=0.0002)
    assert drafter.calls[-2:] == ["propose", "observe"]
    assert went_on(speculator, seqs, [1, 2, 3], reading=0.0002) == [[]]
    assert drafter.calls[-2:] == ["observe", "observe"]  # not asked, with nothing to give up


class Lookup(Fixed):
    """Has a draft for the sequences of some numbers."""

    def __init__(self, draft: Draft, only: Sequence[int] = (0, 1)) -> None:
        super().__init__(draft)
        self.only = only

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        return [
            self.draft if number in self.only and count else NO_DRAFT
            for number, count in zip(sequences, counts, strict=True)
        ]


def both(model: Model, lookup: Fixed, num_tokens: int | None = 3, **more: Any) -> Speculator:
    return Speculator(model, VOCAB, num_tokens, longest=2, lookup=lookup, **more)


def went_on(
    speculator: Speculator,
    seqs: list[Seq],
    run: list[int],
    steps: int = 1,
    reading: float = 0.0,
) -> Any:
    """The last drafts, after steps in which all sequences would have gone on with ``run``; each
    took so many seconds of ``reading``, and a millisecond a token.
    """
    drafts = []
    for _ in range(steps):
        drafts = speculator.propose(seqs, len(seqs), 100)
        size = len(seqs) + sum(map(len, drafts))
        scheduled = SimpleNamespace(
            batch=SimpleNamespace(num_tokens=size),
            chunks=[],
            decodes=seqs,
            samples=seqs,
            drafts=drafts if any(drafts) else None,
            branches={},
        )
        result, each = StepResult(None, 0.0), [run] * len(seqs)
        speculator.learn(cast(Any, scheduled), result, each, reading + 0.001 * size)
    return drafts


def test_the_likelier_of_a_model_and_a_lookup_is_the_draft() -> None:
    made, found = [1, 2], [3, 4, 0]
    for run, likelier in (([1, 2, 3], made), ([3, 4, 0, 1], found)):
        model = Model(Draft(made))
        speculator = both(model, Lookup(Draft(found)))
        assert went_on(speculator, [sequence()], run, steps=60) == [likelier]
        assert model.asked[0] == [2]  # of at most so many tokens that it gives
        assert (len(model.asked) == 60) == (likelier is made)


@pytest.mark.parametrize("found", [Draft([3, 4, 0]), NO_DRAFT])
def test_where_the_model_does_not_pay_drafts_are_still_found(found: Draft) -> None:
    """It is asked seldom and the text each time, unless nothing is ever found."""
    clock = [0.0]

    class Slow(Model):
        def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
            clock[0] += 5e-3
            return super().propose(decoding, counts)

    class Quick(Lookup):
        looked = 0

        def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
            clock[0] += 50e-6
            self.looked += 1
            return super().propose(sequences, counts)

    model, lookup = Slow(Draft([1, 2])), Quick(found)
    speculator = both(model, lookup, None, now=lambda: clock[0])
    owner = SimpleNamespace(scheduling=SchedulingParams(), prompt_tokens=3)
    seq = Seq(cast(Any, owner), 0, (0, 0), array("i", [1, 2, 3]), 9999)
    drafted = 0
    for _ in range(600):
        before = clock[0]
        drafts = speculator.propose([seq], 1, 10)
        clock[0] += 1e-3 + 1e-5 * len(drafts[0])
        run = [3, 4, 0, 1][: 1 + len(drafts[0])] if drafts[0][:1] == [3] else [3]
        drafted += len(run) > 1
        scheduled = SimpleNamespace(
            batch=SimpleNamespace(num_tokens=1 + len(drafts[0])),
            chunks=[],
            decodes=[seq],
            samples=[seq],
            drafts=drafts if drafts[0] else None,
            branches={},
        )
        result = StepResult(None, 0.0)
        speculator.learn(cast(Any, scheduled), result, [run], clock[0] - before)
        seq.token_ids.extend(run)
    assert len(model.asked) < 20
    if found.token_ids:
        assert drafted > 400
    else:
        assert lookup.looked < 200


def test_a_step_may_have_drafts_of_both() -> None:
    """The ones certain of their tokens, the others with what they were drawn from."""
    model = Model(Draft([1, 2], 0, (), UNIFORM[:2]))
    speculator = both(model, Lookup(Draft([3, 4, 0]), only=(1,)), rejection=True)
    seqs = [sequence(), sequence()]
    drafts = went_on(speculator, seqs, [3, 4, 0, 1], steps=30)
    assert drafts == [[1, 2], [3, 4, 0]]
    assert model.asked[-1] == [2, 0]
    speculator.propose(seqs, 2, 100)
    first, second = speculator.probabilities(seqs) or (None, None)
    assert first is not None
    assert second is None


def test_what_was_found_is_the_draft_where_the_model_has_none() -> None:
    speculator = both(Model(), Lookup(Draft([3, 4, 0])))
    assert speculator.propose([sequence()], 1, 100) == [[3, 4, 0]]


def test_what_is_found_is_learned_from_where_it_is_not_taken() -> None:
    speculator = both(Model(Draft([1, 2])), Lookup(Draft([3, 4, 0], 5)))
    seq = sequence()
    before = speculator._acceptance.gains(("lookup", 5), seq, 1)
    went_on(speculator, [seq], [1, 2, 3], steps=5)
    assert speculator._acceptance.gains(("lookup", 5), seq, 1) < before


def test_both_hear_of_the_end() -> None:
    model, lookup = Model(Draft([1, 2])), Lookup(Draft([3, 4, 0]))
    speculator = both(model, lookup)
    seq = sequence()
    went_on(speculator, [seq], [1])
    assert len(lookup._texts) == 1
    speculator.end(seq)
    assert not lookup._texts
    assert model.ended == 1
    assert speculator.num_known == 0


@pytest.mark.parametrize("which", ["model", "lookup"])
def test_a_fault_of_either_ends_drafting(which: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Draft([VOCAB]), Draft([1])
    model = Model(bad if which == "model" else good)
    speculator = both(model, Lookup(bad if which == "lookup" else NO_DRAFT))
    for _ in range(2):
        assert speculator.propose([sequence()], 1, 100) == [[]]
    assert speculator.failures == 1
    assert len(model.asked) == (which == "model")
    assert "outside 0 to 4" in caplog.text
