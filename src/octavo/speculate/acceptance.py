"""How often drafts are right, by position and by what speaks for them; and whose are better."""

from __future__ import annotations

from collections.abc import Sequence

NUM_CLASSES = 16  # of evidence
_FIRST_GUESS = 0.5
_WEIGHT = 2.0  # trials that the guess at a position counts for: the rate at the position before
_MEMORY = 256.0  # trials of a position remembered
_OWN_WEIGHT = 3.0  # trials that a sequence's being like the others counts for
_OWN_MEMORY = 32.0
_CERTAIN = 0.98


class Trust:
    """How a sequence's drafts did beside what was expected of them (a standardised ratio)."""

    __slots__ = ("_expected", "_right")

    def __init__(self) -> None:
        self._right = _OWN_WEIGHT
        self._expected = _OWN_WEIGHT

    @property
    def ratio(self) -> float:
        return self._right / self._expected

    def add(self, right: int, expected: float) -> None:
        self._right += right
        self._expected += expected
        if self._expected > _OWN_MEMORY:
            self._right *= 0.5
            self._expected *= 0.5


class Acceptance:
    """Running estimates of P(the draft at a position is right | all before it were)."""

    def __init__(self, longest: int) -> None:
        self._right = [[0.0] * longest for _ in range(NUM_CLASSES)]
        self._tried = [[0.0] * longest for _ in range(NUM_CLASSES)]
        self._rates = [[_FIRST_GUESS] * longest for _ in range(NUM_CLASSES)]

    def gains(self, evidence: int, trust: Trust, length: int) -> list[float]:
        """Of each of a draft's tokens, the probability that it becomes output."""
        ratio = trust.ratio
        gains: list[float] = []
        so_far = 1.0
        for rate in self._rates[evidence][:length]:
            so_far *= min(_CERTAIN, rate * ratio)
            gains.append(so_far)
        return gains

    def learn(self, evidence: int, trust: Trust, draft: Sequence[int], run: Sequence[int]) -> None:
        """The sequence went on with ``run``. What the draft said there, checked or not, was right
        or wrong; beyond, nothing is known.
        """
        right, tried = self._right[evidence], self._tried[evidence]
        rates = self._rates[evidence]
        hits, expected = 0, 0.0
        for at, (guess, token) in enumerate(zip(draft, run, strict=False)):
            expected += rates[at]
            tried[at] += 1
            if tried[at] > _MEMORY:
                tried[at] *= 0.5
                right[at] *= 0.5
            if guess != token:
                break
            right[at] += 1
            hits += 1
        trust.add(hits, expected)
        rate = _FIRST_GUESS
        for at in range(len(rates)):
            rate = rates[at] = (right[at] + _WEIGHT * rate) / (tried[at] + _WEIGHT)
