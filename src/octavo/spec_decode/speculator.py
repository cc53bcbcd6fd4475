"""Speculative decoding of a step: asks the drafters, chooses how much is verified, and learns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import exp

from octavo.executor.base import StepResult
from octavo.scheduler.batching import Distributions, Scheduled
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode import tuning
from octavo.spec_decode.acceptance import PLANNED, Acceptance, Class
from octavo.spec_decode.account import TimeAccount
from octavo.spec_decode.answers import checked_draft
from octavo.spec_decode.draft_length import choose_lengths, could_pay
from octavo.spec_decode.draft_planner import DraftPlanner, within
from octavo.spec_decode.drafter import NO_DRAFT, Draft, Drafter, ModelDrafter
from octavo.spec_decode.lookup import Lookup
from octavo.spec_decode.partial_draft import max_distributions
from octavo.spec_decode.times import SpeculationTimes

logger = logging.getLogger(__name__)

_MAX_ERROR_CHARS = 300  # of a drafter's exception, in the log


class Speculator:
    """Implements the scheduler's `Proposer`. Nothing that it does changes an output or, if drafts
    are verified by ``rejection`` instead of replay, an output's distribution.

    ``num_tokens`` pins the length of drafts. None chooses for each sequence and step the length
    that pays most: often none, and at most ``longest``. A `Drafter` is asked first, and as much of
    its drafts is verified as pays. A `ModelDrafter` takes time for each token; it is asked only for
    what will pay, its own time included, and for at most ``longest`` tokens. It may be combined
    with a ``lookup``, whose draft is taken where it is likelier to be accepted than the model's. If
    a drafter fails, both are given up with one line in the log. ``now`` is the clock, in seconds,
    that the drafters' time is read from.
    """

    def __init__(
        self,
        drafter: Drafter | ModelDrafter,
        vocab_size: int,
        num_tokens: int | None = None,
        *,
        rejection: bool = False,
        longest: int = tuning.LONGEST_DRAFT,
        lookup: Drafter | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.failures = 0
        self.rejection = rejection
        self.drafting_seconds = 0.0  # that steps waited for the drafters, since the start
        self.spent = 0.0  # seconds of drafting for the step that runs
        self.times = SpeculationTimes()
        self._model: ModelDrafter | None = None
        self._planner: DraftPlanner | None = None  # for the model, unless the length is pinned
        self._lookup: Lookup | None = None
        self._account = TimeAccount(tuning.CREDIT_STEPS)
        if isinstance(drafter, ModelDrafter):
            self._model = drafter
            if num_tokens is None:
                self._planner = DraftPlanner(drafter, self.times, self._account)
        else:
            lookup = drafter
        if lookup is not None:
            self._lookup = Lookup(lookup, now)
        self._vocab_size = vocab_size
        self._pinned = num_tokens
        self._longest = num_tokens or (
            longest if lookup is None else max(longest, tuning.LONGEST_DRAFT)
        )
        self._model_longest = longest
        self._acceptance = Acceptance()
        self._now = now
        # Of this step: each sequence's draft, what was looked up for it, taken or not, and the
        # alternatives that are verified, by index.
        self._drafts: dict[Seq, Draft] = {}
        self._found: dict[Seq, Draft] = {}
        self._branches: dict[int, list[list[int]]] = {}
        # A step that has run is entered in the account when its sequences' ends are known: its
        # seconds, and those that its tokens would have taken without speculation.
        self._last: tuple[float, float] | None = None
        self._token_worth = 0.0  # of these, each token's that speculation brought
        self._rest = 0  # steps to come in which no drafter is asked
        self._resting = False  # this step is one of them
        self._rested = 0  # such steps that are not in the account yet

    @property
    def num_known(self) -> int:
        """Return for how many sequences anything is held, each part counted; 0 when all ended."""
        return self._acceptance.num_known + (len(self._lookup.texts) if self._lookup else 0)

    @property
    def saved_seconds(self) -> float:
        """Return the time saved since the start; negative where drafts cost more than they
        brought.
        """
        seconds, worth = self._last or (0.0, 0.0)
        return self._account.saved + worth - seconds

    # Proposing

    def propose(self, decoding: list[Seq], num_tokens: int, room: int) -> list[list[int]]:
        """As `Proposer` says."""
        self._drafts, self._found, self._branches = {}, {}, {}
        self._settle()
        drafts: Sequence[Draft] = ()
        began = self._now()
        self._resting = self._rest > 0
        if self._resting:
            self._rest -= 1
        elif self._inviting(decoding, num_tokens, room):
            with self._guarded():
                drafts = self._draft(decoding, num_tokens, room)
        if self._model is not None and self._model.begun:  # and was not asked
            self._resting = False
            with self._guarded():
                self._model.cancel()
        self.spent = self._now() - began
        return [list(draft.token_ids) for draft in drafts] or [[]] * len(decoding)

    def _inviting(self, decoding: list[Seq], num_tokens: int, room: int) -> bool:
        """Return whether the drafters should be asked."""
        if self._pinned is not None or self._gone:
            return not self._gone
        if num_tokens == len(decoding) and self._control_due(num_tokens):
            return False
        most = min(room, sum(self._most(decoding)))
        if self._account.overdrawn or not could_pay(self.times, len(decoding), num_tokens, most):
            self._rest = tuning.REST_STEPS
        return not self._rest

    def _control_due(self, num_tokens: int) -> bool:
        """Return whether a step is to have no drafts, so that those with drafts are compared to it:
        whenever few such steps were seen lately.
        """
        return self.times.seen(num_tokens) < tuning.STEPS_COMPARED

    def _most(self, decoding: list[Seq]) -> list[int]:
        """Return the longest useful draft of each sequence."""
        return [min(self._longest, seq.num_to_come - 1) for seq in decoding]

    def _draft(self, decoding: list[Seq], num_tokens: int, room: int) -> list[Draft]:
        """Return the drafts to be verified, and set how long to rest."""
        most = self._most(decoding)
        if self._model is not None and self.rejection:
            room = min(room, max_distributions(self._vocab_size))
        if self._pinned is not None:
            most = within(most, room)
        looking, made = 0.0, dict[Seq, Draft]()
        if self._lookup is not None:
            began = self._now()
            self._found = self._ask(self._lookup, decoding, most)
            looking = self._now() - began - self._lookup.reading_seconds
        if self._model is not None:
            counts = self._model_counts(decoding, most, num_tokens, room)
            if any(counts):
                began = self._now()
                made = self._ask(self._model, decoding, counts)
                if self._planner is not None:
                    self._planner.observe(decoding, counts, self._now() - began)
        self._drafts = self._found | made
        drafts = [self.draft_of(seq) for seq in decoding]
        if self._pinned is not None:
            self._branches = {
                index: [list(path) for path in draft.alternatives]
                for index, draft in enumerate(drafts)
                if draft.alternatives
            }
            return drafts
        if self._drafts:
            drafts = self._best(decoding, drafts, num_tokens, room)
        if not any(draft.token_ids for draft in drafts):
            self._rest = self._next_rest(looking, num_tokens)
        return drafts

    def _next_rest(self, looking: float, num_tokens: int) -> int:
        """Return for how many steps the drafters need not be asked, after a look-up of so many
        seconds that brought nothing.
        """
        rest = tuning.REST_STEPS if self._planner is None else self._planner.rest
        if self._lookup is not None:
            if self._lookup.behind and not self._drafts:
                return 0
            rest = min(rest, int(looking / (tuning.IDLE_SHARE * self.times.predict(num_tokens))))
        return rest

    def _model_counts(
        self, decoding: list[Seq], most: list[int], num_tokens: int, room: int
    ) -> list[int]:
        """Return how many tokens to ask the model for: none where the text has a likelier draft.

        That choice must not depend on tokens that were drawn, so it is made before the model is
        asked. (To compare with the evidence of the model's draft would bring 0.2 % of the tokens.)
        """
        most = [min(count, self._model_longest) for count in most]
        gains = [
            self._acceptance.gains(PLANNED, seq, max(1, count))
            for seq, count in zip(decoding, most, strict=True)
        ]
        for index, seq in enumerate(decoding):
            found = self._found.get(seq)
            if found is not None and self._gains(seq, found)[:1] > gains[index][:1]:
                most[index] = 0
            gains[index] = gains[index][: most[index]]
        if self._planner is None:
            return most
        return self._planner.plan(decoding, most, gains, num_tokens, room)

    def _best(
        self, decoding: list[Seq], drafts: list[Draft], num_tokens: int, room: int
    ) -> list[Draft]:
        """Return as much of the drafts as pays, and set the branches that do."""
        gains = [
            self._gains(seq, draft) if draft.token_ids else []
            for seq, draft in zip(decoding, drafts, strict=True)
        ]
        offers = [
            offer
            for index, draft in enumerate(drafts)
            # Those of a draft that is weighed depend on its tokens, as its length must not.
            if draft.alternatives and gains[index] and not self._weighed(draft)
            for offer in self._acceptance.offers(index, draft, gains[index])
        ]
        counts, branches = choose_lengths(self.times, gains, num_tokens, room, offers)
        for offer, length in branches:
            path = list(drafts[offer.sequence].alternatives[offer.rank][:length])
            self._branches.setdefault(offer.sequence, []).append(path)
        return [
            draft._replace(token_ids=draft.token_ids[:count]) if count else NO_DRAFT
            for draft, count in zip(drafts, counts, strict=True)
        ]

    def _gains(self, seq: Seq, draft: Draft) -> list[float]:
        """Return the probabilities that a draft's tokens become output."""
        return self._acceptance.gains(self._class(seq, draft), seq, len(draft.token_ids))

    def _class(self, seq: Seq, draft: Draft) -> Class:
        """Return the class by which the draft's acceptance is estimated.

        The evidence of a draft that is weighed may depend on its tokens, and whether one of them is
        tested must not: tokens left out for what they are would come too rarely.
        """
        if self._weighed(draft):
            return PLANNED
        return "lookup" if draft is self._found.get(seq) else "model", draft.evidence

    def _weighed(self, draft: Draft) -> bool:
        """Return whether a token of the draft may be accepted more often than the target draws
        it.
        """
        return self.rejection and draft.probabilities is not None

    def _ask(
        self, drafter: Lookup | ModelDrafter, decoding: list[Seq], counts: list[int]
    ) -> dict[Seq, Draft]:
        """Return the drafter's checked drafts that have tokens. Raises whatever it raises."""
        drawn = self.rejection and self._model is None  # by code of the user's own
        drafts = {}
        answers = drafter.propose(decoding, counts)
        for seq, answer, most in zip(decoding, answers, counts, strict=True):
            draft = checked_draft(answer, most, self._vocab_size, drawn=drawn)
            if draft.token_ids:
                drafts[seq] = draft
        return drafts

    def draft_of(self, seq: Seq) -> Draft:
        """Return the sequence's whole draft of this step, however much of it is verified."""
        return self._drafts.get(seq, NO_DRAFT)

    def probabilities(self, decodes: Sequence[Seq]) -> list[Distributions | None] | None:
        """Return for each sequence of a step the distributions of its draft's tokens or more, or
        None where the draft is certain; None if all are.
        """
        each = [self.draft_of(seq).probabilities for seq in decodes]
        return each if any(one is not None for one in each) else None

    def alternatives(self) -> dict[int, list[list[int]]]:
        """As `Proposer` says."""
        return self._branches

    # Learning

    def learn(
        self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]], seconds: float
    ) -> None:
        """Learn from a step that took ``seconds``, drafting included, and whose samples drew
        ``runs``, before these are committed.
        """
        if self._model is not None:  # first: the next drafts may be made meanwhile
            began = self._now()
            with self._guarded():
                observe = self._model.begin if self._promising(scheduled) else self._model.observe
                observe(scheduled, result, runs)
            self.drafting_seconds += self._now() - began
        if self._gone:
            return
        if self._resting:  # next to nothing is done, between steps that run cold
            self._rested += 1
            return
        self._enter(scheduled, runs, seconds)
        tests = scheduled.drafts or [[]] * len(scheduled.decodes)
        for seq, tested, run in zip(scheduled.decodes, tests, runs, strict=False):
            draft, found = self._drafts.get(seq), self._found.get(seq)
            if found is not None and found is not draft:
                self._acceptance.learn(("lookup", found.evidence), seq, found.token_ids, run)
            if draft is None:
                continue
            # Behind what was tested the target draws a token more rarely than it would have
            # accepted it; where nothing was tested, that is all there is to learn from.
            token_ids = tested if tested and self._weighed(draft) else draft.token_ids
            kind = self._class(seq, draft)
            self._acceptance.learn(kind, seq, token_ids, run)
            if kind[0] == "model":
                self._acceptance.learn(PLANNED, seq, token_ids, run)
            if draft.alternatives:
                self._acceptance.learn_alternatives(draft, token_ids, run)
        self._drafts, self._found = {}, {}

    def _enter(self, scheduled: Scheduled, runs: Sequence[list[int]], seconds: float) -> None:
        """Learn how long the step took, and prepare its entry in the account."""
        self._settle()  # of the step before, if no drafts were asked for since
        times, size, count = self.times, scheduled.batch.num_tokens, len(scheduled.decodes)
        prompts, drafts = bool(scheduled.chunks), scheduled.drafts
        plain = seconds - self.spent
        times.observe(size, plain, prompts=prompts)
        self.drafting_seconds += self.spent
        self.spent = 0.0  # a step without decodes asks for no drafts
        if self._rested:
            self._account.add(plain, plain, self._rested)
        if self._planner is not None:
            self._planner.passed(1 + self._rested, seconds)
            seconds -= self._planner.take_read_seconds()
        self._rested = 0
        worth, self._token_worth = plain, 0.0
        if drafts is not None and times.known:
            each = self._token_worth = times.predict(count) / count
            drawn = sum(map(len, runs[:count]))
            if prompts:
                # The step is long for the prompts that it reads; the drafts cost their rows.
                added = sum(map(len, drafts))
                extra = times.predict(size) - times.predict(size - added)
                worth += (drawn - count) * each - extra
            else:
                seconds -= max(0.0, plain - exp(tuning.MAX_ERROR) * times.predict(size))
                worth = drawn * each
        self._last = seconds, worth

    def _settle(self) -> None:
        """Enter the last step in the account: it is known by now which sequences it ended."""
        if self._last is not None:
            self._account.add(*self._last)
        self._last = None

    def _promising(self, scheduled: Scheduled) -> bool:
        """Return whether the step had drafts and the next one will probably have some: no rest
        follows, and no step without drafts to compare with.
        """
        if scheduled.drafts is None or self._rest > 0:
            return False
        return self._pinned is not None or not (
            self._account.overdrawn or self._control_due(len(scheduled.samples))
        )

    # Ends and failures

    def end(self, seq: Seq, num_cut: int = 0) -> None:
        """End a sequence whose last ``num_cut`` tokens did not become output."""
        if self._last is not None:
            seconds, worth = self._last
            self._last = seconds, worth - num_cut * self._token_worth
        if self._planner is not None:
            self._planner.end(len(seq.token_ids) - num_cut - seq.owner.prompt_tokens)
        self.forget(seq, num_cut)

    def forget(self, seq: Seq, num_cut: int = 0) -> None:
        """Forget a sequence. One that will begin anew has not ended: the tokens of the step that
        failed were never drawn.
        """
        self._drafts.pop(seq, None)
        self._found.pop(seq, None)
        self._acceptance.end(seq)
        with self._guarded():
            if self._lookup is not None:
                self._lookup.end(seq, num_cut)
            if self._model is not None:
                self._model.end(seq)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless the drafter's accounts agree with what it holds."""
        if self._model is not None:
            self._model.check_integrity()

    def close(self) -> None:
        """Release the drafter's memory and threads."""
        model, self._model, self._lookup, self._planner = self._model, None, None, None
        self._drafts, self._found = {}, {}
        if model is not None:
            try:
                model.close()
            except KeyboardInterrupt:
                raise
            except BaseException:
                logger.exception("the drafter cannot be closed")

    @property
    def _gone(self) -> bool:
        return self._lookup is None and self._model is None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Give the drafters up if they raise anything: a cancelled task and a Rust panic are no
        `Exception`. Only the user's own Ctrl-C passes.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.failures += 1
            logger.error("the drafter failed and is not asked again: %s", _one_line(error))
            self.close()


def _one_line(error: BaseException) -> str:
    """Return what the error says in one line of reasonable length, or its type if it cannot say."""
    try:
        text = repr(error)
    except Exception:
        return type(error).__name__
    return " ".join(text.split())[:_MAX_ERROR_CHARS]
