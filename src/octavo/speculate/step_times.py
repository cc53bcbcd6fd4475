"""How long a step takes by its number of tokens, as the steps of late have shown."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from math import exp, hypot, log
from typing import NamedTuple

# Sizes that are told apart: each one where a token more may matter, then ever fewer.
KNOTS = [
    *range(1, 21), *range(22, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 257, 16),
    *range(288, 513, 32), *range(576, 1025, 64),
]  # fmt: skip
_LEAST_GAIN = 0.05  # how far an observation of a size moves what is known of it at least
_COMMON_GAIN = 0.1  # and of all sizes: the machine got slower or faster
_NOISE_GAIN = 0.03
_LARGEST_ERROR = 0.5  # in logarithms; what is farther off was somebody else's doing
FARTHEST = exp(_LARGEST_ERROR)  # times what was predicted
_WARMING = 8  # steps of few tokens of which the quickest says how long reading takes
_EVERY, _FADING = 32, 0.8  # after so many steps an observation counts for so much
_FAINT = 0.5  # observations below which a size is as good as never seen
_SETTLED = 4.0  # observations from which on one more is no news for other sizes
_ENOUGH = 2.0  # observations of a size for others to be compared with it
_HOPE = 0.1  # a size unlike all seen of late is taken to be better by this, so that it is tried
_NEAR = 1.25  # times as large, or as small


class _Knot(NamedTuple):
    """Of a size, as it was tabulated last."""

    around: float  # the correction that other sizes suggest
    hoped: float  # seconds


class StepTimes:
    """Predicts a step's seconds.

    The form is a roofline with a soft knee: √(a² + (c·n)²), where ``a`` is the time of reading the
    weights and ``c`` a token's arithmetic, as steps of few tokens and steps with prompts show them;
    times a correction by size that is learned from the decode steps. What was seen of a size itself
    stands beside what the nearest sizes seen say of it, which count as one observation.
    """

    def __init__(self) -> None:
        self._reading: float | None = None
        self._token: float | None = None
        self._corrections = [0.0] * len(KNOTS)  # logarithms
        self._seen = [0.0] * len(KNOTS)  # observations, fading
        self._common = 0.0
        self.noise = 0.0  # mean error of predictions, as a share of what was predicted
        self._steps = 0
        self._small_steps = 0
        self._table: dict[int, _Knot] = {}  # by knot, as they are asked for
        self._sizes_seen: list[int] = []  # knots, when the table was begun

    @property
    def known(self) -> bool:
        """Whether enough has been seen to predict anything."""
        return self._reading is not None or self._token is not None

    def observe(self, num_tokens: int, seconds: float, *, prompts: bool) -> None:
        """A step has run. ``prompts``: some tokens were of prompts and wanted no logits."""
        if seconds <= 0.0:
            return
        if prompts:
            if num_tokens >= 16:
                read = min(self._reading or 0.0, 0.9 * seconds)
                token = (seconds**2 - read**2) ** 0.5 / num_tokens
                self._token = token if self._token is None else 0.8 * self._token + 0.2 * token
            return
        if num_tokens <= 4 and self._small_steps < _WARMING:
            # The first steps find cold caches.
            self._small_steps += 1
            if self._reading is None or seconds < self._reading:
                self._reading = seconds
                self._seen = [0.0] * len(KNOTS)
                self._common = 0.0
                self._table.clear()
        if not self.known:
            self._token = seconds / num_tokens
        at = _nearest(num_tokens)
        expected = log(self.predict(num_tokens))
        error = min(max(log(seconds) - expected, -_LARGEST_ERROR), _LARGEST_ERROR)
        correction = expected + error - self._base(num_tokens)
        gain = max(_LEAST_GAIN, 1 / (self._seen[at] + 1))
        self._corrections[at] += gain * (correction - self._corrections[at])
        self._common += _COMMON_GAIN * error
        self.noise += _NOISE_GAIN * (abs(error) - self.noise)
        self._seen[at] += 1
        if self._seen[at] < _SETTLED:
            self._table.clear()
        elif at in self._table:
            hope = _HOPE / (1 + self._seen[at])
            self._table[at] = self._table[at]._replace(hoped=self.predict(KNOTS[at]) * (1 - hope))
        self._steps += 1
        if self._steps % _EVERY == 0:
            self._seen = [seen * _FADING for seen in self._seen]
            self._table.clear()

    def predict(self, num_tokens: int) -> float:
        """Seconds. Only where ``known``."""
        at = _nearest(num_tokens)
        seen = self._seen[at]
        around = self._look_up(at).around
        correction = (seen * self._corrections[at] + around) / (seen + 1)
        return exp(self._base(num_tokens) + correction)

    def stale(self, num_tokens: int) -> bool:
        """Whether a size has hardly been seen of late: it is no measure for others then."""
        return self._seen[_nearest(num_tokens)] < _ENOUGH

    def hoped(self, low: int, high: int) -> Iterator[tuple[int, float]]:
        """The sizes in (low, high] worth comparing, and their seconds: better than expected for a
        size unlike all that were tried of late. They may be some steps old.
        """
        for at in range(bisect_left(KNOTS, low + 1), len(KNOTS)):
            if KNOTS[at] > high:
                return
            yield KNOTS[at], self._look_up(at).hoped

    def _base(self, num_tokens: int) -> float:
        """The logarithm without the size's own correction."""
        # A machine reads its weights in about the time of eight tokens' arithmetic.
        token = self._token if self._token is not None else (self._reading or 0.0) / 8
        reading = self._reading if self._reading is not None else token * 8
        return log(hypot(reading, token * num_tokens)) + self._common

    def _look_up(self, at: int) -> _Knot:
        knot = self._table.get(at)
        if knot is None:
            if not self._table:
                self._sizes_seen = [at for at, seen in enumerate(self._seen) if seen >= _FAINT]
            knot = self._table[at] = self._tabulated(at)
        return knot

    def _tabulated(self, at: int) -> _Knot:
        """What other sizes say of one: linear between the nearest ones seen, level beyond them."""
        known, size = self._sizes_seen, KNOTS[at]
        after = bisect_right(known, at)
        before = bisect_left(known, at) - 1
        if not known or known == [at]:
            around = 0.0
        elif before < 0:
            around = self._corrections[known[after]]
        elif after == len(known):
            around = self._corrections[known[before]]
        else:
            low, high = known[before], known[after]
            share = log(size / KNOTS[low]) / log(KNOTS[high] / KNOTS[low])
            around = self._corrections[low] + share * (
                self._corrections[high] - self._corrections[low]
            )
        seen = self._seen[at]
        correction = (seen * self._corrections[at] + around) / (seen + 1)
        near = bisect_left(KNOTS, size / _NEAR), bisect_right(KNOTS, size * _NEAR)
        hope = _HOPE / (1 + max(self._seen[slice(*near)]))
        return _Knot(around, exp(self._base(size) + correction) * (1 - hope))


def _nearest(num_tokens: int) -> int:
    """The knot nearest to a size."""
    at = bisect_left(KNOTS, num_tokens)
    if at == len(KNOTS):
        return at - 1
    return at - 1 if at and num_tokens - KNOTS[at - 1] < KNOTS[at] - num_tokens else at
