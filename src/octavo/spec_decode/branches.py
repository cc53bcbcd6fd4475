"""What alternatives to a draft are worth: how often one is right where the draft is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.spec_decode.acceptance import NUM_CLASSES
from octavo.spec_decode.verify import agreement

RANKS = 4  # of alternatives that are told apart; those behind count as the last
_FIRST_GUESS = 0.25  # that the first alternative is right, and the next half as often …
_GOES_ON = 0.5  # … and that its next token is right too
_WEIGHT = 4.0  # trials that these count for
_MEMORY = 256.0  # trials remembered
_CERTAIN = 0.98
_NEGLIGIBLE = 0.02


class Offer(NamedTuple):
    """An alternative that might be checked beside its draft."""

    sequence: int  # by its place in the step
    rank: int  # of the alternative among the sequence's own
    start: int  # tokens that it has in common with the draft, which are put through again
    gains: list[float]  # the probabilities that its tokens behind those become output

    @property
    def best(self) -> tuple[float, int]:
        """The most gain for a row, and the number of tokens, common ones included, that give it."""
        best, length, total = 0.0, 0, 0.0
        for size, gain in enumerate(self.gains, self.start + 1):
            total += gain
            if total > best * (1 + size):
                best, length = total / (1 + size), size
        return best, length


class _Rate:
    __slots__ = ("right", "tried")

    def __init__(self, guess: float) -> None:
        self.right = guess * _WEIGHT
        self.tried = _WEIGHT

    def add(self, right: bool) -> None:
        self.tried += 1
        self.right += right
        if self.tried > _MEMORY:
            self.tried *= 0.5
            self.right *= 0.5

    @property
    def value(self) -> float:
        return min(_CERTAIN, self.right / self.tried)


class BranchRates:
    """Running estimates, by what speaks for the draft, of P(an alternative is right where it leaves
    the draft | the draft is wrong there) for each rank, and of P(its next token is right | all
    before were).
    """

    def __init__(self) -> None:
        self._turns = [
            [_Rate(_FIRST_GUESS * 0.5**rank) for rank in range(RANKS)] for _ in range(NUM_CLASSES)
        ]
        self._goes_on = [_Rate(_GOES_ON) for _ in range(NUM_CLASSES)]

    def offers(
        self,
        sequence: int,
        evidence: int,
        draft: Sequence[int],
        alternatives: Sequence[Sequence[int]],
        gains: Sequence[float],
    ) -> list[Offer]:
        """The alternatives worth speaking of to a draft whose tokens become output with the
        probabilities ``gains``.
        """
        offers = []
        for rank, each in enumerate(alternatives):
            start = agreement(draft, each)
            if start >= len(gains):  # the draft itself is not worth a row there
                continue
            before = gains[start - 1] if start else 1.0
            gain = (before - gains[start]) * self._turns[evidence][min(rank, RANKS - 1)].value
            own: list[float] = []
            for _ in each[start:]:
                if gain < _NEGLIGIBLE:
                    break
                own.append(gain)
                gain *= self._goes_on[evidence].value
            if own:
                offers.append(Offer(sequence, rank, start, own))
        return offers

    def learn(
        self,
        evidence: int,
        draft: Sequence[int],
        alternatives: Sequence[Sequence[int]],
        run: Sequence[int],
    ) -> None:
        """The sequence went on with ``run``; alternatives, checked or not, were right or wrong."""
        wrong = agreement(draft, run)
        if wrong >= min(len(draft), len(run)):
            return
        for rank, each in enumerate(alternatives):
            if agreement(draft, each) != wrong or len(each) == wrong:
                continue
            right = agreement(each, run)
            self._turns[evidence][min(rank, RANKS - 1)].add(right > wrong)
            for at in range(wrong + 1, min(len(each), len(run)) if right > wrong else 0):
                self._goes_on[evidence].add(at < right)
                if at >= right:
                    break
