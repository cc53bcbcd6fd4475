"""Tells a `Drafter` of the texts it guesses in, a limited piece of them a step."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from itertools import count

from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.drafter import NO_DRAFT, Draft, Drafter

_READ = 4096  # tokens of text that the drafter is given in a step: some milliseconds
_FEW = 64  # more at once are a text's beginning, which is not drafting in vain


class _Known:
    """A sequence as the drafter knows it."""

    __slots__ = ("num_tokens", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_tokens = 0


class Reader:
    """A `Drafter` by the sequences themselves. Raises whatever the drafter raises."""

    def __init__(self, drafter: Drafter, now: Callable[[], float] = time.perf_counter) -> None:
        self.known: dict[Seq, _Known] = {}
        self.seconds = 0.0  # that reading new texts took in the last `propose`
        self.behind = False  # whether a text was not yet read to its end
        self._drafter = drafter
        self._numbers = count()
        self._now = now

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        """Drafts of at most so many tokens, none for a text that has not all been read."""
        self.seconds = 0.0
        numbers: list[int] = []
        most: list[int] = []
        left = _READ
        for seq, longest in zip(decoding, counts, strict=True):
            known = self.known.get(seq)
            if known is None:
                known = self.known[seq] = _Known(next(self._numbers))
            left -= self._tell(seq, known, left)
            if known.num_tokens:
                numbers.append(known.number)
                most.append(longest if known.num_tokens == len(seq.token_ids) else 0)
        self.behind = left <= 0
        answers = self._drafter.propose(numbers, most)
        if len(answers) != len(numbers):
            raise ValueError(f"{len(answers)} drafts for {len(numbers)} sequences")
        given = iter(zip(answers, most, strict=True))
        drafts: list[Draft] = []
        for seq in decoding:
            answer, longest = next(given) if self.known[seq].num_tokens else (NO_DRAFT, 0)
            drafts.append(answer if longest else NO_DRAFT)
        return drafts

    def _tell(self, seq: Seq, known: _Known, most: int) -> int:
        """Up to ``most`` tokens that the drafter has not seen; how many it was. It gets copies."""
        tokens: array[int] = seq.token_ids[known.num_tokens : known.num_tokens + max(0, most)]
        if not tokens:
            return 0
        before = self._now()
        if known.num_tokens:
            self._drafter.extend(known.number, tokens)
        else:
            self._drafter.start(known.number, tokens, seq.owner.cache_salt)
        if len(tokens) > _FEW:
            self.seconds += self._now() - before
        known.num_tokens += len(tokens)
        return len(tokens)

    def end(self, seq: Seq, beyond: int) -> None:
        """A sequence is over; its last ``beyond`` tokens did not become output."""
        known = self.known.pop(seq, None)
        if known is None or not known.num_tokens:
            return
        rest = seq.token_ids[known.num_tokens : len(seq.token_ids) - beyond]
        if 0 < len(rest) <= _FEW:
            self._drafter.extend(known.number, rest)
        self._drafter.end(known.number)
