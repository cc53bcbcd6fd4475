"""Runs a `Drafter` on the scheduler's sequences, and gives it their texts in pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count

from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode import tuning
from octavo.spec_decode.drafter import NO_DRAFT, Draft, Drafter


class Lookup:
    """Calls a `Drafter` with numbers and copies of tokens. Raises whatever the drafter raises."""

    def __init__(self, drafter: Drafter, now: Callable[[], float] = time.perf_counter) -> None:
        self.texts: dict[Seq, tuple[int, int]] = {}  # number, and tokens that the drafter has seen
        self.reading_seconds = 0.0  # of the last `propose`, for texts that were new
        self.behind = False  # a text has not been given completely
        self._drafter = drafter
        self._next_number = count()
        self._now = now

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        """Return drafts of at most ``counts`` tokens, empty for texts not given completely."""
        self.reading_seconds = 0.0
        left = tuning.LOOKUP_TOKENS_PER_STEP
        asked: dict[int, int] = {}  # the count by number
        for seq, most in zip(decoding, counts, strict=True):
            left -= self._give(seq, left)
            number, given = self.texts[seq]
            if given:
                asked[number] = most if given == len(seq.token_ids) else 0
        self.behind = left <= 0
        answers = self._drafter.propose([*asked], [*asked.values()])
        if len(answers) != len(asked):
            raise ValueError(f"{len(answers)} drafts for {len(asked)} sequences")
        drafts = dict(zip(asked, answers, strict=True))
        return [
            drafts[number] if asked.get(number := self.texts[seq][0]) else NO_DRAFT
            for seq in decoding
        ]

    def _give(self, seq: Seq, most: int) -> int:
        """Give the drafter copies of up to ``most`` tokens it has not seen; return how many."""
        if seq not in self.texts:
            self.texts[seq] = next(self._next_number), 0
        number, given = self.texts[seq]
        tokens = seq.token_ids[given : given + max(0, most)]
        if not tokens:
            return 0
        before = self._now()
        if given:
            self._drafter.extend(number, tokens)
        else:
            self._drafter.start(number, tokens, seq.owner.scheduling.cache_salt)
        if len(tokens) > tuning.NEW_TEXT_TOKENS:
            self.reading_seconds += self._now() - before
        self.texts[seq] = number, given + len(tokens)
        return len(tokens)

    def end(self, seq: Seq, num_cut: int) -> None:
        """End a sequence whose last ``num_cut`` tokens did not become output."""
        number, given = self.texts.pop(seq, (0, 0))
        if not given:
            return
        rest = seq.token_ids[given : len(seq.token_ids) - num_cut]
        if 0 < len(rest) <= tuning.NEW_TEXT_TOKENS:
            self._drafter.extend(number, rest)
        self._drafter.end(number)
