"""Drafts for the sequences of a step: asks the drafter, says how much is checked, learns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from octavo.executor.base import StepResult
from octavo.sampling.scripted import mix
from octavo.scheduler.batching import Distributions, Scheduled
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.acceptance import FIRST_GUESS, Acceptance, Own
from octavo.spec_decode.ahead import IDLE_SHARE, LONGEST_REST, Ahead, within
from octavo.spec_decode.branches import BranchRates
from octavo.spec_decode.budget import Budget
from octavo.spec_decode.checked import checked
from octavo.spec_decode.drafter import (
    NO_DRAFT,
    Draft,
    Drafter,
    Eager,
    Holding,
    ModelDrafter,
)
from octavo.spec_decode.guess import most_drawn
from octavo.spec_decode.length import choose_tree, worthwhile
from octavo.spec_decode.reader import Reader
from octavo.spec_decode.savings import Savings
from octavo.spec_decode.step_times import FARTHEST, StepTimes

logger = logging.getLogger(__name__)

LONGEST = 16  # drafts when the length is chosen here
_SELDOM = 0.3  # asking takes less as less than so much of it has paid of late …
_LEAST_SHARE = 0.0003  # … down to so much of the time
_UNWORTHY = 8  # steps to rest where even right guesses would not pay …
_OVERSPENT = 16  # … and where too much time has been lost
_GLANCE = 16  # of so many steps at rest one is looked at: between steps all code is cold
_CONTROL = 16  # steps with drafts, and as many more at random, from one without to the next …
_EARLY = 4  # … or so many, where such have not been compared as often as …
_SETTLED = 8  # … that
_CONTROL_SHARE = 0.005  # of the time, that they may cost where drafts gain much
_PATIENCE = 512  # steps, half a percent of which a drafter that computes may lose at first
_TRUSTED = 0.8  # first guess of how often a drafter that computes is right
_LONGEST_LINE = 300  # characters of what a drafter raised, in the log


class _Asked(NamedTuple):
    """A draft, and how many tokens its sequence had."""

    draft: Draft
    num_tokens: int


class _Checked(NamedTuple):
    """A step that drafts were checked in."""

    seconds: float
    num_drawn: int  # tokens
    each: float  # seconds that one of them would have taken without drafts


class Speculator:
    """Implements the scheduler's `Proposer`. Nothing that it does changes an output or, where
    drafts are checked by ``rejection`` and not by replay, an output's distribution.

    ``num_tokens`` pins the drafts' length; None: for each sequence and step the one that pays most,
    often none and at most ``longest``. A `Drafter` is asked first, and of what it says as much is
    checked as pays; a `ModelDrafter`, whose every token costs time, only for what will pay, its own
    time included. Beside a `ModelDrafter`, whose drafts are of ``longest`` tokens at most, may be a
    ``lookup``: where its draft is likelier right than the model's would be, that is the draft, and
    the model is not asked. A drafter that fails is given up, with one line in the log, and what was
    beside it. ``now`` is the clock, in seconds, that the drafter's own time is read from.
    """

    def __init__(
        self,
        drafter: Drafter | ModelDrafter,
        vocab_size: int,
        num_tokens: int | None = None,
        *,
        rejection: bool = False,
        longest: int = LONGEST,
        lookup: Drafter | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.failures = 0
        self.rejection = rejection
        self.times = StepTimes()
        self.savings = Savings()
        self._model: ModelDrafter | None = None
        self._planner: Ahead | None = None  # for a drafter that computes
        self._reader: Reader | None = None
        self._eager: Eager | None = None  # the model, if it is one
        if isinstance(drafter, Drafter):  # whatever else it can do
            self._reader = Reader(drafter, now)
        else:
            self._model = drafter
            self._planner = Ahead(drafter, self.times)
            self._eager = drafter if isinstance(drafter, Eager) else None
            if lookup is not None:
                self._reader = Reader(lookup, now)
        self._vocab_size = vocab_size
        self._pinned = num_tokens
        self._longest = num_tokens or (longest if lookup is None else max(longest, LONGEST))
        self._model_longest = longest
        self._budget = Budget() if self._model is None else Budget(_PATIENCE)
        first = FIRST_GUESS if self._model is None else _TRUSTED
        self._acceptance = Acceptance(self._longest, first)
        self._ahead = Acceptance(self._longest, first)  # before a draft is made: of one class
        self._lookup = Acceptance(self._longest)  # of drafts found beside those of a model
        self._branch_rates = BranchRates()
        self._branches: dict[int, list[list[int]]] = {}  # of this step
        self._own: dict[Seq, _Own] = {}
        self._asked: dict[Seq, _Asked] = {}
        self._found: dict[Seq, Draft] = {}  # of this step, beside a model, taken or not
        self._now = now
        self._spent = 0.0  # seconds that the drafter took since the last step
        self._read = 0.0  # of these, for texts that it had not seen
        self._checked: _Checked | None = None  # the last step, if it is not accounted yet
        self._rest = 0  # steps without asking
        self._model_rest = 0  # steps in which a model that has a lookup beside it is not asked
        self._controls = 0  # steps without drafts that followed some with
        self._unbroken = 0  # steps with drafts since the last of them …
        self._since = 0.0  # … their seconds …
        self._since_worth = 0.0  # … and what they would have taken without drafts
        self._unseen = 0  # steps at rest that have not been looked at
        self._useful = 1.0  # how often asking led to drafts that paid, of late

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
        self._found.clear()
        self._branches = {}
        self._spent = self._read = 0.0
        self._settle()
        if self._gone:
            return [[]] * len(decoding)
        if self._rest > 0:
            self._rest -= 1
            self._leave_begun()
            return [[]] * len(decoding)
        if self._model is not None and self.rejection:
            room = min(room, most_drawn(self._vocab_size))
        most = [min(self._longest, seq.num_to_come - 1) for seq in decoding]
        began = self._now()
        try:
            if self._pinned is not None:
                drafts = self._of_length(decoding, within(most, room))
                for at, draft in enumerate(drafts):
                    if draft.alternatives:
                        self._branches[at] = [list(each) for each in draft.alternatives]
            elif not self._inviting(decoding, num_tokens, min(room, sum(most))):
                return [[]] * len(decoding)
            elif self._planner is not None:
                drafts = self._plan_first(self._planner, decoding, most, num_tokens, room)
            else:
                assert self._reader is not None
                drafts = self._guess_first(self._reader, decoding, most, num_tokens, room)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._give_up(error)
            return [[]] * len(decoding)
        finally:
            self._spent += self._now() - began
            self._leave_begun()
        return [list(draft.token_ids) for draft in drafts]

    def _inviting(self, decoding: list[Seq], num_tokens: int, most: int) -> bool:
        """Whether the drafter should be asked at all."""
        if num_tokens == len(decoding) and (
            self.times.stale(num_tokens) or self._controls_due(num_tokens)
        ):
            return False  # what drafts are worth is what they bring beside none
        if self._budget.spent:
            self._rest = _OVERSPENT
        elif not worthwhile(self.times, len(decoding), num_tokens, most):
            self._rest = _UNWORTHY
        return not self._rest

    def _controls_due(self, num_tokens: int, more: int = 0) -> bool:
        """Whether a step is to have no drafts so that those that have are compared with it: after
        some of them at random (``more`` are not accounted yet), and later where they gain so much
        that it would cost more than may be.
        """
        control = _CONTROL if self.times.compared(num_tokens) >= _SETTLED else _EARLY
        if self._unbroken + more < control + mix(self._controls) % control:
            return False
        lost = (self._since_worth / max(self._since, 1e-9) - 1) * self.times.predict(num_tokens)
        since = self._since * (1 + more / max(1, self._unbroken))
        return lost <= _CONTROL_SHARE * since

    def _guess_first(
        self, reader: Reader, decoding: list[Seq], most: list[int], num_tokens: int, room: int
    ) -> list[Draft]:
        """Drafts cost little: as much of them is taken as pays."""
        began = self._now()
        drafts = self._ask(reader, decoding, most)
        if self._asked:
            drafts = self._best(decoding, drafts, num_tokens, room)
        self._rest = self._resting(reader, drafts, self._now() - began, num_tokens)
        return drafts

    def _resting(self, reader: Reader, drafts: list[Draft], seconds: float, num_tokens: int) -> int:
        """For how many steps the text need not be looked up, what came of it having taken so many
        ``seconds``.
        """
        if not any(draft.token_ids for draft in drafts):
            if not self._asked and reader.behind:
                return 0
            self._useful *= 0.9
        elif self._useful >= _SELDOM:
            return 0
        share = max(_LEAST_SHARE, IDLE_SHARE * min(1.0, self._useful / _SELDOM))
        steps = (seconds - reader.seconds) / (share * self.times.predict(num_tokens))
        return min(LONGEST_REST, int(steps))

    def _plan_first(
        self, planner: Ahead, decoding: list[Seq], most: list[int], num_tokens: int, room: int
    ) -> list[Draft]:
        """Each token drafted costs a pass: only what is expected to pay is drafted; and of that no
        more is checked than pays, the drafts known.
        """
        began = self._now()
        found, most = self._look_up(decoding, most)
        looking = self._now() - began
        counts = [0] * len(decoding)
        if self._model_rest:
            self._model_rest -= 1
        elif any(most):
            gains = [
                self._ahead.gains(0, self._own_of(seq).ahead, longest)
                for seq, longest in zip(decoding, most, strict=True)
            ]
            counts, self._model_rest = planner.plan(decoding, most, gains, num_tokens, room)
        drafts = found
        if any(counts):
            began = self._now()
            drafts = self._made(decoding, counts, found)
            planner.observe(decoding, counts, self._now() - began)
            self._read = planner.read
        if self._asked:
            drafts = self._best(decoding, drafts, num_tokens, room)
        if self._model_rest:
            self._rest = self._model_rest
            if self._reader is not None:
                resting = self._resting(self._reader, drafts, looking, num_tokens)
                self._rest = min(self._rest, resting)
            self._model_rest -= self._rest
        return drafts

    def _of_length(self, decoding: list[Seq], counts: list[int]) -> list[Draft]:
        """Drafts of a length that is given."""
        if self._model is None:
            assert self._reader is not None
            return self._ask(self._reader, decoding, counts)
        found, counts = self._look_up(decoding, counts)
        return self._made(decoding, counts, found) if any(counts) else found

    def _look_up(self, decoding: list[Seq], most: list[int]) -> tuple[list[Draft], list[int]]:
        """The drafts found beside a model's; and how many tokens it may be asked for: none where
        what was found is likelier right, as far as can be known before it has been asked.

        To compare with what the model's answer says of itself brings nothing more (0.2 % of the
        tokens a pass, in chat); and the choice must not depend on a token that was drawn.
        """
        if self._reader is None:
            return [NO_DRAFT] * len(decoding), most
        found = self._ask(self._reader, decoding, most)
        most = [min(longest, self._model_longest) for longest in most]
        for at, (seq, draft) in enumerate(zip(decoding, found, strict=True)):
            if draft.token_ids:
                self._found[seq] = draft
                ahead = self._ahead.gains(0, self._own_of(seq).ahead, 1)
                if self._gains(seq, draft)[:1] > ahead:
                    most[at] = 0
        return found, most

    def _made(self, decoding: list[Seq], counts: list[int], found: list[Draft]) -> list[Draft]:
        """The model's drafts; where there is none, what was ``found``."""
        assert self._model is not None
        made = self._ask(self._model, decoding, counts)
        return [
            draft if draft.token_ids else other for draft, other in zip(made, found, strict=True)
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
        if draft is self._found.get(seq):
            return self._lookup.gains(draft.evidence, own.lookup, len(draft.token_ids))
        if self._weighed(draft):
            # Its evidence may depend on the tokens drawn, and whether one of them is tested by
            # rejection must not: tokens that were left out for what they are would come too rarely.
            return self._ahead.gains(0, own.ahead, len(draft.token_ids))
        return self._acceptance.gains(draft.evidence, own, len(draft.token_ids))

    def _weighed(self, draft: Draft) -> bool:
        """Whether a token of the draft is accepted more often than the target draws it."""
        return self.rejection and draft.probabilities is not None

    def _ask(
        self, drafter: Reader | ModelDrafter, decoding: list[Seq], counts: list[int]
    ) -> list[Draft]:
        """The drafter's guesses, checked. Raises whatever it raises."""
        for seq in decoding:
            self._own_of(seq)
        answers = drafter.propose(decoding, counts)
        if len(answers) != len(decoding):
            raise ValueError(f"{len(answers)} drafts for {len(decoding)} sequences")
        drafts: list[Draft] = []
        drawn = self.rejection and self._model is None  # and anybody's code
        for seq, answer, most in zip(decoding, answers, counts, strict=True):
            draft = checked(answer, most, self._vocab_size, drawn=drawn)
            if draft.token_ids:
                self._asked[seq] = _Asked(draft, len(seq.token_ids))
            drafts.append(draft)
        return drafts

    def draft_of(self, seq: Seq) -> Draft:
        """The sequence's draft of this step, whole, however much of it is checked: for its
        alternatives and probabilities.
        """
        asked = self._asked.get(seq)
        return NO_DRAFT if asked is None else asked.draft

    def probabilities(self, decodes: Sequence[Seq]) -> list[Distributions | None] | None:
        """For each of a step's sequences those of at least its draft's tokens, or None where a
        guess was certain; None: all were.
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
        self._observe(scheduled, result, runs)  # first: the next drafts may be made meanwhile
        if self._gone:
            return
        if self._rest > 0 and not self._spent:
            self._unseen += 1
            if self._unseen < _GLANCE:
                return
        self._account(scheduled, runs, seconds)
        tests = scheduled.drafts or [[]] * len(scheduled.decodes)
        for seq, tested, run in (
            zip(scheduled.decodes, tests, runs, strict=False) if self._asked else ()
        ):
            asked = self._asked.get(seq)
            own = self._own.get(seq)
            if asked is None or own is None or asked.num_tokens != len(seq.token_ids):
                continue
            draft, found = asked.draft, self._found.get(seq)
            if found is not None:
                self._lookup.learn(found.evidence, own.lookup, found.token_ids, run)
                if draft is found:
                    continue
            # Beyond what was tested the target draws the token more rarely than it would have
            # been accepted; where nothing was, that is all there is to learn from.
            guess = tested if tested and self._weighed(draft) else draft.token_ids
            self._acceptance.learn(draft.evidence, own, guess, run)
            if draft.alternatives:
                self._branch_rates.learn(draft.evidence, guess, draft.alternatives, run)
            if self._planner is not None:
                self._planner.checked()
            if self._planner is not None or self._weighed(draft):
                self._ahead.learn(0, own.ahead, guess, run)
        self._asked.clear()
        self._found.clear()

    def _account(self, scheduled: Scheduled, runs: Sequence[list[int]], seconds: float) -> None:
        """What the step took, and what its tokens would have taken without drafts."""
        times, size, count = self.times, scheduled.batch.num_tokens, len(scheduled.decodes)
        prompts = bool(scheduled.chunks)
        plain = seconds - self._spent
        times.observe(size, plain, prompts=prompts)
        if scheduled.drafts is not None:
            self._unbroken += 1
        elif not prompts and self._unbroken:
            self._controls += 1
            self._unbroken, self._since, self._since_worth = 0, 0.0, 0.0
        self.savings.add(times, scheduled, runs, seconds, self._spent)
        spent = seconds - self._read
        if self._planner is not None:
            self._planner.passed(1 + self._unseen, seconds)
        if self._unseen:
            self._budget.spend(plain, plain, self._unseen)
            self._unseen = 0
        if scheduled.drafts is not None and not prompts and times.known:
            spent += min(plain, FARTHEST * times.predict(size)) - plain
            drawn = sum(map(len, runs[:count]))
            self._checked = _Checked(spent, drawn, times.predict(count) / count)
        else:
            self._charge(spent, plain)
        self._spent = self._read = 0.0

    def _settle(self) -> None:
        """Accounts the step before, whose ends are known by now."""
        step, self._checked = self._checked, None
        if step is not None:
            worth = step.num_drawn * step.each
            self._charge(step.seconds, worth)
            self._since += step.seconds
            self._since_worth += worth
            if worth > step.seconds:
                self._useful += 0.3 * (1 - self._useful)
                self._rest = 0  # one that pays is often followed by another
            else:
                self._useful *= 0.9

    def _charge(self, seconds: float, worth: float) -> None:
        if self._planner is not None:
            seconds += self._planner.charged(worth - seconds)
        self._budget.spend(seconds, worth)

    def _observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        if self._model is not None:
            try:
                if self._eager is not None and self._promising(scheduled):
                    self._eager.begin(scheduled, result, runs)
                else:
                    self._model.observe(scheduled, result, runs)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._give_up(error)

    def _promising(self, scheduled: Scheduled) -> bool:
        """Whether the step just run had drafts and the next will have some, as far as is known
        before it is accounted: no rest follows, and no step without to compare with.
        """
        if scheduled.drafts is None or self._rest > 0:
            return False
        count = len(scheduled.samples)
        return self._pinned is not None or not (
            self._budget.spent or self.times.stale(count) or self._controls_due(count, 1)
        )

    def _leave_begun(self) -> None:
        """What the drafter has begun is not asked for: that it is in the way of the step is its
        own time.
        """
        if self._eager is None or not self._eager.begun:
            return
        began = self._now()
        try:
            self._eager.give_up()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._give_up(error)
        finally:
            self._spent += self._now() - began

    def end(self, seq: Seq, beyond: int = 0) -> None:
        """A sequence is over; its last ``beyond`` tokens did not become output."""
        if beyond:
            self.savings.take_back(beyond)
            if self._checked is not None:
                kept = self._checked.num_drawn - beyond
                self._checked = self._checked._replace(num_drawn=kept)
        self._let_go(seq, len(seq.token_ids) - beyond - seq.owner.prompt_tokens, beyond)

    def forget(self, seq: Seq) -> None:
        """A sequence will begin anew. It is no answer, and its tokens in the step that failed were
        never drawn.
        """
        self._let_go(seq, 0, 0)

    def _let_go(self, seq: Seq, length: int, beyond: int) -> None:
        if self._planner is not None:
            self._planner.end(seq, length)
        self._own.pop(seq, None)
        self._asked.pop(seq, None)
        self._found.pop(seq, None)
        try:
            if self._reader is not None:
                self._reader.end(seq, beyond)
            if self._model is not None:
                self._model.end(seq)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._give_up(error)

    def check_integrity(self) -> None:
        """What the drafter holds agrees with its accounts; `RuntimeError` otherwise."""
        if isinstance(self._model, Holding):
            self._model.check_integrity()

    def close(self) -> None:
        """Gives the drafter's memory and threads back."""
        model, self._model, self._reader = self._model, None, None
        self._planner, self._eager = None, None
        self._own.clear()
        self._asked.clear()
        self._found.clear()
        if model is not None:
            try:
                model.close()
            except KeyboardInterrupt:
                raise
            except BaseException:
                logger.exception("the drafter cannot be closed")

    def _own_of(self, seq: Seq) -> _Own:
        own = self._own.get(seq)
        if own is None:
            own = self._own[seq] = _Own()
        return own

    def _give_up(self, error: BaseException) -> None:
        """Whatever anybody's code may raise: a cancelled task and a Rust panic are no `Exception`.
        The user's own Ctrl-C is not its fault.
        """
        self.failures += 1
        logger.error("the drafter failed and is not asked again: %s", _said(error))
        self.close()


def _said(error: BaseException) -> str:
    """One line, of reasonable length, even where the error cannot say what it is."""
    try:
        text = repr(error)
    except Exception:
        return type(error).__name__
    return " ".join(text.split())[:_LONGEST_LINE]


class _Own(Own):
    """How a sequence's drafts did by what spoke for them and, ``ahead``, all of them; and those
    found beside a model's, ``lookup``.
    """

    __slots__ = ("ahead", "lookup")

    def __init__(self) -> None:
        super().__init__()
        self.ahead = Own()
        self.lookup = Own()


def _cut(draft: Draft, count: int) -> Draft:
    """Its first tokens. What else it says stays: it may say more than is used."""
    return draft._replace(token_ids=draft.token_ids[:count]) if count else NO_DRAFT
