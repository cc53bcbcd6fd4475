"""Drafts for the sequences of a step: asks the drafter, says how much is checked, learns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from operator import index
from typing import NamedTuple

import numpy as np

from octavo.execute.batch import StepResult
from octavo.schedule.batching import Scheduled
from octavo.schedule.sequence import Sequence as Seq
from octavo.speculate.acceptance import FIRST_GUESS, NUM_CLASSES, Acceptance, Own
from octavo.speculate.branches import BranchRates
from octavo.speculate.budget import Budget
from octavo.speculate.draft_times import DraftTimes
from octavo.speculate.drafter import (
    NO_DRAFT,
    Draft,
    Drafter,
    Float32,
    Holding,
    ModelDrafter,
    Reading,
)
from octavo.speculate.length import choose, choose_tree, worthwhile
from octavo.speculate.reader import Reader
from octavo.speculate.savings import Savings
from octavo.speculate.step_times import FARTHEST, StepTimes

logger = logging.getLogger(__name__)

LONGEST = 16  # drafts when the length is chosen here
BRANCHES = 16  # most alternatives that a step checks
_IDLE_SHARE = 0.01  # of the time, for drafting that comes to nothing …
_SELDOM = 0.3  # … and less as less than so much of the asking has led to drafts of late …
_LEAST_SHARE = 0.0003  # … down to this
_LONGEST_REST = 32  # steps
_UNWORTHY = 8  # steps to rest where even right guesses would not pay …
_OVERSPENT = 16  # … and where too much time has been lost
_GLANCE = 8  # of so many steps at rest one is looked at: between steps all code is cold
_ROUNDING = 1e-3  # that probabilities may be off one in all
_TRIAL = 3  # tokens drafted now and then where drafting that computes does not seem to pay
_UNREAD = 64  # tokens that a drafter has not seen, above which it has to read
_CONVINCING = 8  # drafts that have been checked before much is read
_PATIENCE = 512  # steps, a percent of which a drafter that computes may lose at first
_TRUSTED = 0.8  # first guess of how often a drafter that computes is right


class _Asked(NamedTuple):
    """A draft, and how many tokens its sequence had."""

    draft: Draft
    num_tokens: int


class Speculator:
    """Implements the scheduler's `Proposer`. Nothing that it does changes an output or, where
    drafts are checked by ``rejection`` and not by replay, an output's distribution.

    ``num_tokens`` pins the drafts' length; None: for each sequence and step the one that pays most,
    often none and at most ``longest``. A `Drafter` is asked first, and of what it says as much is
    checked as pays; a `ModelDrafter`, whose every token costs time, only for what will pay, its own
    time included. A drafter that fails is given up, with one line in the log. ``now`` is the clock,
    in seconds, that the drafter's own time is read from.
    """

    def __init__(
        self,
        drafter: Drafter | ModelDrafter,
        vocab_size: int,
        num_tokens: int | None = None,
        *,
        rejection: bool = False,
        longest: int = LONGEST,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.failures = 0
        self.rejection = rejection
        self.times = StepTimes()
        self.savings = Savings()
        self.draft_times = DraftTimes()  # of a drafter that computes
        self._model: ModelDrafter | None = None
        self._reader: Reader | None = None
        if isinstance(drafter, ModelDrafter):
            self._model = drafter
        else:
            self._reader = Reader(drafter, now)
        self._vocab_size = vocab_size
        self._pinned = num_tokens
        self._longest = longest if num_tokens is None else num_tokens
        self._budget = Budget() if self._model is None else Budget(_PATIENCE)
        first = FIRST_GUESS if self._model is None else _TRUSTED
        self._acceptance = Acceptance(self._longest, first)
        self._ahead = Acceptance(self._longest, first)  # before a draft is made: of one class
        self._branch_rates = BranchRates()
        self._branches: dict[int, list[list[int]]] = {}  # of this step
        self._own: dict[Seq, _Own] = {}
        self._asked: dict[Seq, _Asked] = {}
        self._now = now
        self._spent = 0.0  # seconds that the drafter took since the last step
        self._read = 0.0  # of these, for texts that it had not seen
        self._tried = 0  # drafts that have been checked
        self._rest = 0  # steps without asking
        self._unseen = 0  # steps at rest that have not been looked at
        self._warm = False  # whether a drafter that computes has done so
        self._untried = 0.0  # seconds since a drafter that computes was asked
        self._useful = 1.0  # share of the asking that led to drafts, of late

    @property
    def num_known(self) -> int:
        """Sequences that have been asked about and have not ended."""
        return len(self._own)

    @property
    def spent(self) -> float:
        """Seconds that the drafter took for the step that runs."""
        return self._spent

    @property
    def _gone(self) -> bool:
        return self._reader is None and self._model is None

    def propose(self, decoding: list[Seq], num_tokens: int, room: int) -> list[list[int]]:
        """As `Proposer` says."""
        self._asked.clear()
        self._branches = {}
        self._spent = self._read = 0.0
        if self._gone:
            return [[]] * len(decoding)
        if self._rest > 0:
            self._rest -= 1
            return [[]] * len(decoding)
        most = [min(self._longest, seq.num_to_come - 1) for seq in decoding]
        began = self._now()
        try:
            if self._pinned is not None:
                drafts = self._ask(decoding, _within(most, room))
                for at, draft in enumerate(drafts):
                    if draft.alternatives:
                        self._branches[at] = [list(each) for each in draft.alternatives]
            elif not self._inviting(decoding, num_tokens, min(room, sum(most))):
                return [[]] * len(decoding)
            elif self._reader is not None:
                drafts = self._guess_first(self._reader, decoding, most, num_tokens, room)
            else:
                drafts = self._choose_first(decoding, most, num_tokens, room)
        except (Exception, SystemExit) as error:
            self._give_up(error)
            return [[]] * len(decoding)
        finally:
            self._spent += self._now() - began
        return [list(draft.token_ids) for draft in drafts]

    def _inviting(self, decoding: list[Seq], num_tokens: int, most: int) -> bool:
        """Whether the drafter should be asked at all."""
        if num_tokens == len(decoding) and self.times.stale(num_tokens):
            return False  # what drafts are worth is what they bring beside none
        if self._budget.spent:
            self._rest = _OVERSPENT
        elif not worthwhile(self.times, len(decoding), num_tokens, most):
            self._rest = _UNWORTHY
        return not self._rest

    def _guess_first(
        self, reader: Reader, decoding: list[Seq], most: list[int], num_tokens: int, room: int
    ) -> list[Draft]:
        """Drafts cost little: as much of them is taken as pays."""
        began = self._now()
        drafts = self._ask(decoding, most)
        if self._asked:
            drafts = self._best(decoding, drafts, num_tokens, room)
        if any(draft.token_ids for draft in drafts):
            self._useful += 0.1 * (1 - self._useful)
        elif self._asked or not reader.behind:
            self._useful *= 0.9
            share = max(_LEAST_SHARE, _IDLE_SHARE * min(1.0, self._useful / _SELDOM))
            spent = self._now() - began - reader.seconds
            steps = spent / (share * self.times.predict(num_tokens))
            self._rest = min(_LONGEST_REST, int(steps))
        return drafts

    def _choose_first(
        self, decoding: list[Seq], most: list[int], num_tokens: int, room: int
    ) -> list[Draft]:
        """Each token drafted costs a pass: only what is expected to pay is drafted; and of that no
        more is checked than pays, the drafts known.
        """
        gains = [
            self._ahead.gains(0, self._own_of(seq).ahead, longest)
            for seq, longest in zip(decoding, most, strict=True)
        ]
        counts = choose(self.times, gains, num_tokens, room, self.draft_times)
        if self._tried < _CONVINCING:
            counts = [min(count, _TRIAL if self._warm else 1) for count in counts]
        counts = self._worth_reading(decoding, counts, gains, num_tokens)
        if not any(counts):
            # Acceptance may have changed since: now and then it is looked at.
            counts = _within([min(longest, _TRIAL) for longest in most], room)
            counts = self._least_to_read(decoding, counts)
            unread = (self._unread(seq) for seq, n in zip(decoding, counts, strict=True) if n)
            cost = self.draft_times.predict(len(decoding), _TRIAL)
            cost += self.draft_times.reading(sum(unread))
            step = self.times.predict(num_tokens)
            missing = cost / _IDLE_SHARE - self._untried
            if missing > 0 and not (self._tried < _CONVINCING and self._hopeful(most, num_tokens)):
                self._rest = min(_LONGEST_REST, int(missing / step))
                return [NO_DRAFT] * len(decoding)
        self._untried = 0.0
        drafts = self._ask_timed(decoding, counts)
        return self._best(decoding, drafts, num_tokens, room) if self._asked else drafts

    def _hopeful(self, most: list[int], num_tokens: int) -> bool:
        """Whether drafting would pay if it were always right."""
        gains = [[1.0] * longest for longest in most]
        return any(choose(self.times, gains, num_tokens, sum(most), self.draft_times))

    def _ask_timed(self, decoding: list[Seq], counts: list[int]) -> list[Draft]:
        """Learns how long drafting takes, and apart from it the reading of texts."""
        asking = [seq for seq, count in zip(decoding, counts, strict=True) if count]
        unread = {seq: self._unread(seq) for seq in asking}
        began = self._now()
        drafts = self._ask(decoding, counts)
        spent = self._now() - began
        if not self._warm:
            # The first time, pages are touched that never were. It is no measure.
            self._warm = True
            self._read = spent
        elif any(unread.values()):
            reading = spent - self.draft_times.predict(len(asking), max(counts))
            self._read = min(spent, max(0.0, reading))
            done = sum(max(0, missing - self._unread(seq)) for seq, missing in unread.items())
            self.draft_times.observe_reading(self._read, done)
        elif asking:
            self.draft_times.observe(len(asking), max(counts), spent)
        return drafts

    def _unread(self, seq: Seq) -> int:
        """Tokens of a text that the drafter has to read before it drafts; 0 for a few."""
        missing = self._model.unread(seq) if isinstance(self._model, Reading) else 0
        return missing if missing > _UNREAD else 0

    def _least_to_read(self, decoding: list[Seq], counts: list[int]) -> list[int]:
        """Only those whose texts have been read; if there are none, the one with least to read."""
        unread = [self._unread(seq) for seq in decoding]
        least = min(
            (missing for missing, count in zip(unread, counts, strict=True) if count), default=0
        )
        kept = [
            count if missing <= least else 0 for missing, count in zip(unread, counts, strict=True)
        ]
        if least:
            first = next(at for at, count in enumerate(kept) if count)
            kept = [count if at == first else 0 for at, count in enumerate(kept)]
        return kept

    def _worth_reading(
        self, decoding: list[Seq], counts: list[int], gains: list[list[float]], num_tokens: int
    ) -> list[int]:
        """Without those whose texts would take longer to be read than their drafts will save."""
        asking = sum(count > 0 for count in counts)
        if not asking or not any(map(self._unread, decoding)):
            return counts
        if self._tried < _CONVINCING:
            return self._least_to_read(decoding, counts)
        number = len(decoding)
        expected = number + sum(
            sum(each[:count]) for each, count in zip(gains, counts, strict=True)
        )
        seconds = self.times.predict(num_tokens + sum(counts))
        seconds += self.draft_times.predict(asking, max(counts))
        saved = (expected * self.times.predict(num_tokens) / number - seconds) / asking  # a step
        return [
            count
            # It may end before it has to; half of what may come is expected.
            if saved * seq.num_to_come / (2 * expected / number)
            >= self.draft_times.reading(self._unread(seq))
            else 0
            for seq, count in zip(decoding, counts, strict=True)
        ]

    def _best(
        self, decoding: list[Seq], drafts: list[Draft], num_tokens: int, room: int
    ) -> list[Draft]:
        """As much of the drafts as pays."""
        gains = [
            self._gains(seq, draft) if draft.token_ids else ()
            for seq, draft in zip(decoding, drafts, strict=True)
        ]
        offers = [
            offer
            for at, draft in enumerate(drafts)
            # Those of a draft that is weighed depend on its tokens, as its length must not.
            if draft.alternatives and gains[at] and not self._weighed(draft)
            for offer in self._branch_rates.offers(
                at, draft.evidence, draft.token_ids, draft.alternatives, gains[at]
            )
        ]
        counts, branches = choose_tree(self.times, gains, offers, num_tokens, room)
        for offer, length in branches:
            guess = list(drafts[offer.sequence].alternatives[offer.rank][:length])
            self._branches.setdefault(offer.sequence, []).append(guess)
        return [
            draft if count == len(draft.token_ids) else _cut(draft, count)
            for draft, count in zip(drafts, counts, strict=True)
        ]

    def _gains(self, seq: Seq, draft: Draft) -> list[float]:
        """Of each of a draft's tokens, the probability that it becomes output."""
        own = self._own_of(seq)
        if self._weighed(draft):
            # Its evidence may depend on the tokens drawn, and whether one of them is tested by
            # rejection must not: tokens that were left out for what they are would come too rarely.
            return self._ahead.gains(0, own.ahead, len(draft.token_ids))
        return self._acceptance.gains(draft.evidence, own, len(draft.token_ids))

    def _weighed(self, draft: Draft) -> bool:
        """Whether a token of the draft is accepted more often than the target draws it."""
        return self.rejection and draft.probabilities is not None

    def _ask(self, decoding: list[Seq], counts: list[int]) -> list[Draft]:
        """The drafter's guesses, checked. Raises whatever it raises."""
        for seq in decoding:
            self._own_of(seq)
        drafter = self._reader or self._model
        assert drafter is not None
        answers = drafter.propose(decoding, counts)
        if len(answers) != len(decoding):
            raise ValueError(f"{len(answers)} drafts for {len(decoding)} sequences")
        drafts: list[Draft] = []
        for seq, answer, most in zip(decoding, answers, counts, strict=True):
            draft = self._checked(answer, most)
            if draft.token_ids:
                self._asked[seq] = _Asked(draft, len(seq.token_ids))
            drafts.append(draft)
        return drafts

    def _checked(self, answer: Draft, most: int) -> Draft:
        """A drafter's answer as plain integers, or `ValueError` or `TypeError`."""
        given, evidence, alternatives, probabilities = Draft(*answer)
        token_ids = self._tokens(given, most)
        evidence = index(evidence)
        if not 0 <= evidence < NUM_CLASSES:
            raise ValueError(f"evidence is {evidence}, outside 0 to {NUM_CLASSES - 1}")
        others = [self._tokens(each, most) for each in alternatives[:BRANCHES]]
        if not token_ids and others:
            token_ids, *others = others
        others = _distinct(token_ids, others)
        if probabilities is not None:
            if probabilities.ndim != 2 or probabilities.shape[1] != self._vocab_size:
                raise ValueError(f"probabilities have shape {probabilities.shape}")
            if len(probabilities) < len(token_ids):
                raise ValueError(
                    f"probabilities of {len(probabilities)} of {len(token_ids)} tokens"
                )
            probabilities = np.asarray(probabilities, np.float32)
            if self.rejection and self._reader is not None:  # anybody's code
                _check_drawn(token_ids, probabilities)
        return Draft(token_ids, evidence, tuple(others), probabilities)

    def _tokens(self, given: Sequence[int], most: int) -> list[int]:
        token_ids = [index(token) for token in given[:most]]
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise ValueError(f"a draft has a token outside 0 to {self._vocab_size - 1}")
        return token_ids

    def draft_of(self, seq: Seq) -> Draft:
        """The sequence's draft of this step, whole, however much of it is checked: for its
        alternatives and probabilities.
        """
        asked = self._asked.get(seq)
        return NO_DRAFT if asked is None else asked.draft

    def probabilities(self, decodes: Sequence[Seq]) -> list[Float32 | None] | None:
        """For each of a step's sequences [at least its draft's tokens, vocabulary], or None where
        a guess was certain; None: all were.
        """
        each = [self.draft_of(seq).probabilities for seq in decodes]
        return each if any(one is not None for one in each) else None

    def alternatives(self) -> dict[int, list[list[int]]]:
        """As `Proposer` says."""
        return self._branches

    def learn(
        self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]], seconds: float
    ) -> None:
        """A step has run, in so many seconds with its drafting, and its samples drew ``runs``;
        nothing is committed yet.
        """
        if self._gone:
            return
        if self._rest > 0 and not self._spent:
            self._unseen += 1
            if self._unseen < _GLANCE:
                self._observe(scheduled, result, runs)
                return
        self._account(scheduled, runs, seconds)
        checked = scheduled.drafts or [[]] * len(scheduled.decodes)
        for seq, tested, run in (
            zip(scheduled.decodes, checked, runs, strict=False) if self._asked else ()
        ):
            asked = self._asked.get(seq)
            own = self._own.get(seq)
            if asked is not None and own is not None and asked.num_tokens == len(seq.token_ids):
                draft = asked.draft
                self._tried += 1
                # Beyond what was tested the target draws the token more rarely than it would have
                # been accepted; where nothing was, that is all there is to learn from.
                guess = tested if tested and self._weighed(draft) else draft.token_ids
                self._acceptance.learn(draft.evidence, own, guess, run)
                if draft.alternatives:
                    self._branch_rates.learn(draft.evidence, guess, draft.alternatives, run)
                if self._model is not None or self._weighed(draft):
                    self._ahead.learn(0, own.ahead, guess, run)
        self._asked.clear()
        self._observe(scheduled, result, runs)

    def _account(self, scheduled: Scheduled, runs: Sequence[list[int]], seconds: float) -> None:
        """What the step took, and what its tokens would have taken without drafts."""
        times, size, count = self.times, scheduled.batch.num_tokens, len(scheduled.decodes)
        prompts = bool(scheduled.chunks)
        plain = seconds - self._spent
        times.observe(size, plain, prompts=prompts)
        self.savings.add(times, scheduled, runs, seconds, self._spent)
        self._untried += (1 + self._unseen) * seconds
        if self._unseen:
            self._budget.spend(plain, plain, self._unseen)
            self._unseen = 0
        worth = plain
        if scheduled.drafts is not None and not prompts and times.known:
            plain = min(plain, FARTHEST * times.predict(size))
            worth = times.predict(count) * sum(map(len, runs[:count])) / count
        # What is read is weighed before, and pays over a sequence's whole life.
        self._budget.spend(plain + self._spent - self._read, worth)
        self._spent = self._read = 0.0

    def _observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        if self._model is not None:
            try:
                self._model.observe(scheduled, result, runs)
            except (Exception, SystemExit) as error:
                self._give_up(error)

    def end(self, seq: Seq, beyond: int = 0) -> None:
        """A sequence is over; its last ``beyond`` tokens did not become output."""
        self._own.pop(seq, None)
        self._asked.pop(seq, None)
        try:
            if self._reader is not None:
                self._reader.end(seq, beyond)
            elif self._model is not None:
                self._model.end(seq)
        except (Exception, SystemExit) as error:
            self._give_up(error)

    def check_integrity(self) -> None:
        """What the drafter holds agrees with its accounts; `RuntimeError` otherwise."""
        if isinstance(self._model, Holding):
            self._model.check_integrity()

    def close(self) -> None:
        """Gives the drafter's memory and threads back."""
        model, self._model, self._reader = self._model, None, None
        self._own.clear()
        self._asked.clear()
        if model is not None:
            try:
                model.close()
            except (Exception, SystemExit):
                logger.exception("the drafter cannot be closed")

    def _own_of(self, seq: Seq) -> _Own:
        own = self._own.get(seq)
        if own is None:
            own = self._own[seq] = _Own()
        return own

    def _give_up(self, error: Exception | SystemExit) -> None:
        self.failures += 1
        logger.error("the drafter failed and is not asked again: %r", error)
        self.close()


class _Own(Own):
    """How a sequence's drafts did by what spoke for them and, ``ahead``, all of them."""

    __slots__ = ("ahead",)

    def __init__(self) -> None:
        super().__init__()
        self.ahead = Own()


def _check_drawn(token_ids: list[int], probabilities: Float32) -> None:
    """`ValueError` where these cannot be the distributions that the tokens were drawn from."""
    rows = probabilities[: len(token_ids)]
    if not ((rows >= 0).all() and (abs(rows.sum(axis=1, dtype=np.float64) - 1) < _ROUNDING).all()):
        raise ValueError("the probabilities of a draft are no distributions")
    if not rows[range(len(token_ids)), token_ids].all():
        raise ValueError("a draft has a token whose probability it says is 0")


def _distinct(draft: list[int], alternatives: list[list[int]]) -> list[list[int]]:
    """The alternatives that are not the beginning of the draft or of another before."""
    paths = [draft]
    for each in alternatives:
        if not any(path[: len(each)] == each for path in paths):
            paths.append(each)
    return paths[1:]


def _within(counts: list[int], room: int) -> list[int]:
    """The counts, cut to ``room`` in all."""
    fitting = []
    for count in counts:
        fitting.append(min(count, room))
        room -= fitting[-1]
    return fitting


def _cut(draft: Draft, count: int) -> Draft:
    """Its first tokens. What else it says stays: it may say more than is used."""
    return draft._replace(token_ids=draft.token_ids[:count]) if count else NO_DRAFT
