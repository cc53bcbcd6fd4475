"""Drafts for the sequences of a step: asks the drafter, says how much is checked, learns."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import count
from operator import index
from typing import NamedTuple

from octavo.schedule.batching import Scheduled
from octavo.schedule.sequence import Sequence as Seq
from octavo.speculate.acceptance import NUM_CLASSES, Acceptance, Own
from octavo.speculate.drafter import NO_DRAFT, Draft, Drafter
from octavo.speculate.length import choose, worthwhile
from octavo.speculate.step_times import StepTimes

logger = logging.getLogger(__name__)

LONGEST = 16  # drafts when the length is chosen here
_IDLE_SHARE = 0.01  # of the time, for drafting that comes to nothing …
_SELDOM = 0.1  # … and a tenth of it where less than so much of the asking has led to drafts of late
_LONGEST_REST = 32  # steps
_UNWORTHY = 8  # steps to rest where even right guesses would not pay
_READ = 4096  # tokens of text that the drafter is given in a step: some milliseconds
_FEW = 64  # more at once are a text's beginning, which is not drafting in vain


class _Known:
    """A sequence as the drafter knows it."""

    __slots__ = ("num_tokens", "number", "own")

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_tokens = 0
        self.own = Own()


class _Asked(NamedTuple):
    """A draft, and how many tokens its sequence had."""

    draft: Draft
    num_tokens: int


class Speculator:
    """Implements the scheduler's `Proposer`. Nothing that it does changes an output.

    ``num_tokens`` pins the drafts' length; None: for each sequence and step the one that pays most,
    often none. A drafter that fails is given up, with one line in the log. ``now`` is the clock, in
    seconds, that the drafter's own time is read from.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        num_tokens: int | None = None,
        *,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.failures = 0
        self.times = StepTimes()
        self._drafter: Drafter | None = drafter
        self._vocab_size = vocab_size
        self._pinned = num_tokens
        self._longest = LONGEST if num_tokens is None else num_tokens
        self._acceptance = Acceptance(self._longest)
        self._known: dict[Seq, _Known] = {}
        self._numbers = count()
        self._asked: dict[Seq, _Asked] = {}
        self._now = now
        self._began = 0.0  # when drafting began, less the reading of new texts
        self._reading = False  # whether a text was not yet read to its end
        self._rest = 0  # steps without asking
        self._useful = 1.0  # share of the asking that led to drafts, of late

    @property
    def num_known(self) -> int:
        """Sequences the drafter was told of that have not ended."""
        return len(self._known)

    def propose(self, decoding: list[Seq], num_tokens: int, room: int) -> list[list[int]]:
        """As `Proposer` says."""
        self._asked.clear()
        drafter = self._drafter
        if drafter is None:
            return [[]] * len(decoding)
        self._began = self._now()
        most = min(room, len(decoding) * self._longest)
        if self._pinned is None:
            if self._rest > 0:
                self._rest -= 1
                return [[]] * len(decoding)
            if num_tokens == len(decoding) and self.times.stale(num_tokens):
                return [[]] * len(decoding)  # what drafts are worth is what they bring beside none
            if not worthwhile(self.times, len(decoding), num_tokens, most):
                self._rest = _UNWORTHY
                return [[]] * len(decoding)
        try:
            drafts = self._ask(drafter, decoding)
        except (Exception, SystemExit) as error:
            self._give_up(error)
            return [[]] * len(decoding)
        if self._pinned is not None:
            return [list(draft.token_ids) for draft in drafts]
        if not self._asked:
            if not self._reading:
                self._pause(num_tokens)
            return [[]] * len(decoding)
        gains = [
            self._acceptance.gains(draft.evidence, self._known[seq].own, len(draft.token_ids))
            if draft.token_ids
            else ()
            for seq, draft in zip(decoding, drafts, strict=True)
        ]
        counts = choose(self.times, gains, num_tokens, room)
        if not any(counts):
            self._pause(num_tokens)
        else:
            self._useful += 0.1 * (1 - self._useful)
        return [list(draft.token_ids[:n]) for draft, n in zip(drafts, counts, strict=True)]

    def _ask(self, drafter: Drafter, decoding: list[Seq]) -> list[Draft]:
        """The drafter's guesses, checked. Raises whatever it raises."""
        numbers: list[int] = []
        counts: list[int] = []
        left = _READ
        for seq in decoding:
            known = self._known.get(seq)
            if known is None:
                known = self._known[seq] = _Known(next(self._numbers))
            left -= self._tell(drafter, seq, known, left)
            if known.num_tokens:
                numbers.append(known.number)
                whole = known.num_tokens == len(seq.token_ids)
                counts.append(min(self._longest, seq.num_to_come - 1) if whole else 0)
        self._reading = left <= 0
        answers = drafter.propose(numbers, counts)
        if len(answers) != len(numbers):
            raise ValueError(f"{len(answers)} drafts for {len(numbers)} sequences")
        drafts: list[Draft] = []
        given = iter(zip(answers, counts, strict=True))
        for seq in decoding:
            if not self._known[seq].num_tokens:
                drafts.append(NO_DRAFT)
                continue
            answer, most = next(given)
            draft = self._checked(answer, most)
            if draft.token_ids:
                self._asked[seq] = _Asked(draft, len(seq.token_ids))
            drafts.append(draft)
        return drafts

    def _tell(self, drafter: Drafter, seq: Seq, known: _Known, most: int) -> int:
        """Up to ``most`` tokens that the drafter has not seen; how many it was. It gets copies."""
        tokens: array[int] = seq.token_ids[known.num_tokens : known.num_tokens + max(0, most)]
        if not tokens:
            return 0
        before = self._now()
        if known.num_tokens:
            drafter.extend(known.number, tokens)
        else:
            drafter.start(known.number, tokens, seq.owner.request.cache_salt)
        if len(tokens) > _FEW:
            self._began += self._now() - before
        known.num_tokens += len(tokens)
        return len(tokens)

    def _checked(self, answer: Draft, most: int) -> Draft:
        """A drafter's answer as plain integers, or `ValueError` or `TypeError`."""
        given, evidence, *_ = answer
        token_ids = [index(token) for token in given[:most]]
        evidence = index(evidence)
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise ValueError(f"a draft has a token outside 0 to {self._vocab_size - 1}")
        if not 0 <= evidence < NUM_CLASSES:
            raise ValueError(f"evidence is {evidence}, outside 0 to {NUM_CLASSES - 1}")
        return Draft(token_ids, evidence)

    def learn(self, scheduled: Scheduled, runs: Sequence[Sequence[int]], seconds: float) -> None:
        """A step has run, in so many seconds, and its samples drew ``runs``."""
        if self._drafter is None:
            return
        self.times.observe(scheduled.batch.num_tokens, seconds, prompts=bool(scheduled.chunks))
        if not self._asked:
            return
        for seq, run in zip(scheduled.decodes, runs, strict=False):
            asked = self._asked.get(seq)
            known = self._known.get(seq)
            if asked is not None and known is not None and asked.num_tokens == len(seq.token_ids):
                draft = asked.draft
                self._acceptance.learn(draft.evidence, known.own, draft.token_ids, run)
        self._asked.clear()

    def end(self, seq: Seq, beyond: int = 0) -> None:
        """A sequence is over; its last ``beyond`` tokens did not become output."""
        known = self._known.pop(seq, None)
        self._asked.pop(seq, None)
        if known is None or not known.num_tokens or self._drafter is None:
            return
        try:
            rest = seq.token_ids[known.num_tokens : len(seq.token_ids) - beyond]
            if 0 < len(rest) <= _FEW:
                self._drafter.extend(known.number, rest)
            self._drafter.end(known.number)
        except (Exception, SystemExit) as error:
            self._give_up(error)

    def _pause(self, num_tokens: int) -> None:
        """Rest after drafting in vain, so that it costs next to nothing."""
        self._useful *= 0.9
        share = _IDLE_SHARE * min(1.0, 0.1 + 0.9 * self._useful / _SELDOM)
        spent = self._now() - self._began
        self._rest = min(_LONGEST_REST, int(spent / (share * self.times.predict(num_tokens))))

    def _give_up(self, error: Exception | SystemExit) -> None:
        self.failures += 1
        self._drafter = None
        self._known.clear()
        self._asked.clear()
        logger.error("the drafter failed and is not asked again: %r", error)
