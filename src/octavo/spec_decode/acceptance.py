"""How often drafts are right: by position, by what speaks for them, and by sequence."""

from __future__ import annotations

from collections.abc import Sequence

NUM_CLASSES = 16  # of evidence
FIRST_GUESS = 0.5
_WEIGHT = 2.0  # trials that the guess at a position counts for: the rate at the position before
_MEMORY = 256.0  # trials of a position remembered
_OWN_WEIGHT = 8.0  # trials that a sequence's being like the others counts for
_OWN_MEMORY = 32.0
_CERTAIN = 0.98
_NEGLIGIBLE = 0.05  # no row costs so little


class Own:
    """How one sequence's drafts did, by what spoke for them."""

    __slots__ = ("right", "tried")

    def __init__(self) -> None:
        self.right: dict[int, float] = {}
        self.tried: dict[int, float] = {}

    def add(self, evidence: int, right: int, tried: int) -> None:
        total = self.tried.get(evidence, 0.0) + tried
        hits = self.right.get(evidence, 0.0) + right
        if total > _OWN_MEMORY:
            total *= 0.5
            hits *= 0.5
        self.tried[evidence] = total
        self.right[evidence] = hits


class Acceptance:
    """Running estimates of P(the draft at a position is right | all before it were).

    ``first_guess`` is what they are before anything has been seen.
    """

    def __init__(self, longest: int, first_guess: float = FIRST_GUESS) -> None:
        self._first_guess = first_guess
        self._right = [[0.0] * longest for _ in range(NUM_CLASSES)]
        self._tried = [[0.0] * longest for _ in range(NUM_CLASSES)]
        self._rates = [[first_guess] * longest for _ in range(NUM_CLASSES)]
        self._outdated: set[int] = set()  # classes whose rates are to be made anew

    def gains(self, evidence: int, own: Own, length: int) -> list[float]:
        """Of each of a draft's tokens, the probability that it becomes output; the first ones, as
        long as there is one to speak of.
        """
        if evidence in self._outdated:
            self._update(evidence)
        right = own.right.get(evidence, 0.0)
        weight = _OWN_WEIGHT + own.tried.get(evidence, 0.0)
        gains: list[float] = []
        so_far = 1.0
        for rate in self._rates[evidence][:length]:
            so_far *= min(_CERTAIN, (_OWN_WEIGHT * rate + right) / weight)
            if so_far < _NEGLIGIBLE:
                break
            gains.append(so_far)
        return gains

    def learn(self, evidence: int, own: Own, draft: Sequence[int], run: Sequence[int]) -> None:
        """The sequence went on with ``run``. What the draft said there, checked or not, was right
        or wrong; beyond, nothing is known.
        """
        right, tried = self._right[evidence], self._tried[evidence]
        hits = trials = 0
        for at, (guess, token) in enumerate(zip(draft, run, strict=False)):
            trials += 1
            tried[at] += 1
            if tried[at] > _MEMORY:
                tried[at] *= 0.5
                right[at] *= 0.5
            if guess != token:
                break
            right[at] += 1
            hits += 1
        own.add(evidence, hits, trials)
        self._outdated.add(evidence)

    def _update(self, evidence: int) -> None:
        right, tried, rates = self._right[evidence], self._tried[evidence], self._rates[evidence]
        rate = self._first_guess
        for at in range(len(rates)):
            rate = rates[at] = (right[at] + _WEIGHT * rate) / (tried[at] + _WEIGHT)
        self._outdated.discard(evidence)
