"""How long a step takes by its number of tokens, at the speed that the machine has just now."""

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
_PACE = 0.2  # how far a step moves what is known of the machine's speed
_LEAST_GAIN = 0.05  # and of its size beside others, at least
_NOISE_GAIN = 0.03
_LARGEST_ERROR = 0.5  # in logarithms; what is farther off was somebody else's doing
FARTHEST = exp(_LARGEST_ERROR)  # times what was predicted
_WARMING = 8  # steps of few tokens of which the quickest says how long reading takes
_EVERY, _FADING = 32, 0.8  # after so many steps an observation counts for so much
_FAINT = 0.5  # observations below which a size is as good as never seen
_SETTLED = 4.0  # observations from which on one more is no news for other sizes
_ENOUGH = 2.0  # observations of a size for others to be compared with it
_HOPE = 0.1  # a size unlike all seen of late is taken to be better by this, so that it is tried
_TABULATED = 0.01  # how far a token's arithmetic may be from where sizes were tabulated for it
_NEAR = 1.25  # times as large, or as small


class _Knot(NamedTuple):
    """Of a size, as it was tabulated last."""

    around: float  # the correction that other sizes suggest
    hoped: float  # seconds at speed 1


class StepTimes:
    """Predicts a step's seconds: those of its size beside others', times the speed of now.

    The speed changes within a second, by much more than a token more may cost. A size is therefore
    only compared with the steps just before it, and learned from as far as these were of other
    sizes: a run of steps of one size that got slower says nothing of the size.

    Of sizes the form is a roofline with a soft knee: √(a² + (c·n)²), where ``a`` is the time of
    reading the weights and ``c`` a token's arithmetic, as the first steps of few tokens and steps
    with prompts show them; times a correction by size that is learned from the decode steps. What
    was seen of a size itself stands beside what the nearest sizes seen say of it, which count as
    one observation.
    """

    def __init__(self) -> None:
        # Seconds at speed 1, which is that of the step that ``_reading`` was seen in.
        self._reading: float | None = None
        self._token: float | None = None
        self._prompts = 0
        self._level = 0.0  # logarithm of the speed …
        self._speed = 1.0  # … and itself: times the seconds that the sizes' form gives
        self._shares = [0.0] * len(KNOTS)  # of each size in what the speed is known by …
        self._last = [0] * len(KNOTS)  # … when it was seen last, in steps
        self._before = 0  # the knot of the last step
        self._corrections = [0.0] * len(KNOTS)  # logarithms
        self._seen = [0.0] * len(KNOTS)  # observations, fading …
        self._compared = [0.0] * len(KNOTS)  # … and how many beside other sizes
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
                self._learn_arithmetic(num_tokens, seconds / self._speed)
            return
        if num_tokens <= 4 and self._small_steps < _WARMING:
            # The first steps find cold caches.
            self._small_steps += 1
            if self._reading is None or seconds < self._reading:
                if self._token is not None:
                    self._token *= self._speed
                self._reading = seconds
                self._seen = [0.0] * len(KNOTS)
                self._compared = [0.0] * len(KNOTS)
                self._shares = [0.0] * len(KNOTS)
                self._level, self._speed = 0.0, 1.0
                self._table.clear()
        if not self.known:
            self._token = seconds / num_tokens
        self._learn(_nearest(num_tokens), num_tokens, seconds)
        self._steps += 1
        if self._steps % _EVERY == 0:
            self._seen = [seen * _FADING for seen in self._seen]
            self._compared = [compared * _FADING for compared in self._compared]
            self._table.clear()

    def _learn_arithmetic(self, num_tokens: int, seconds: float) -> None:
        """From a step that read prompts; seconds at speed 1. Sizes seen stay what they are: what
        the form now says otherwise of them is no news.
        """
        forms = {
            at: self._form(KNOTS[at])
            for at, (seen, compared) in enumerate(zip(self._seen, self._compared, strict=True))
            if seen or compared
        }
        self._prompts += 1
        read = min(self._reading or 0.0, 0.9 * seconds)
        token, known = (seconds**2 - read**2) ** 0.5 / num_tokens, self._token
        # Ever less: all that is known of sizes is beside this.
        self._token = token if known is None else known + (token - known) / self._prompts
        for at, form in forms.items():
            self._corrections[at] += log(form / self._form(KNOTS[at]))
        if known is None or abs(self._token - known) > _TABULATED * known:
            self._table.clear()

    def _learn(self, at: int, num_tokens: int, seconds: float) -> None:
        error = log(seconds / self.predict(num_tokens))
        error = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
        own, before = self._share(at), self._before
        apart = 1 - own
        gain = max(_LEAST_GAIN, 1 / (self._compared[at] + 1)) * apart
        known = self._correction(at)
        self._corrections[at] += gain * (known + error - self._corrections[at])
        self._compared[at] += apart
        back = 0.0
        if before != at:
            # What they differ by may as well be wrong of the other.
            share = self._share(before)
            back = max(_LEAST_GAIN, 1 / (self._compared[before] + 1)) * apart * share
            back = min(back, 1 - gain)
            known = self._correction(before)
            self._corrections[before] += back * (known - error - self._corrections[before])
            self._compared[before] += apart * share
            back *= share
        self._shares[at] = own + _PACE * (1 - own)
        self._last[at] = self._steps + 1
        self._before = at
        self._level += (back + _PACE * (1 - gain - back)) * error
        self._speed = exp(self._level)
        self.noise += _NOISE_GAIN * (abs(error) - self.noise)
        self._seen[at] += 1
        if apart > 0.5 and self._compared[at] < _SETTLED:
            self._table.clear()
        for changed in {at, before} & self._table.keys():
            hope = _HOPE / (1 + self._seen[changed])
            hoped = self._form(KNOTS[changed]) * exp(self._correction(changed)) * (1 - hope)
            self._table[changed] = self._table[changed]._replace(hoped=hoped)

    def _share(self, at: int) -> float:
        return self._shares[at] * (1 - _PACE) ** (self._steps - self._last[at])

    def predict(self, num_tokens: int) -> float:
        """Seconds. Only where ``known``."""
        at = _nearest(num_tokens)
        return self._speed * self._form(num_tokens) * exp(self._correction(at))

    def _correction(self, at: int) -> float:
        compared = self._compared[at]
        around = self._look_up(at).around
        return (compared * self._corrections[at] + around) / (compared + 1)

    def compared(self, num_tokens: int) -> float:
        """How often, of late, a size was seen beside others."""
        return self._compared[_nearest(num_tokens)]

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
            yield KNOTS[at], self._speed * self._look_up(at).hoped

    def beside(self, decodes: int, low: int, high: int) -> Iterator[tuple[int, float]]:
        """As `hoped`, for steps that read prompts too: the seconds of a step of ``decodes`` tokens
        and of the arithmetic of what is more than ``low``, which hides behind no reading.
        """
        plain = self.predict(decodes)
        for at in range(bisect_left(KNOTS, low + 1), len(KNOTS)):
            if KNOTS[at] > high:
                return
            yield KNOTS[at], plain + self._speed * self._each * (KNOTS[at] - low)

    @property
    def _each(self) -> float:
        """Seconds of a token's arithmetic, at speed 1."""
        # A machine reads its weights in about the time of eight tokens' arithmetic.
        return self._token if self._token is not None else (self._reading or 0.0) / 8

    def _form(self, num_tokens: int) -> float:
        """Seconds without the size's own correction, at speed 1."""
        token = self._each
        reading = self._reading if self._reading is not None else token * 8
        return hypot(reading, token * num_tokens)

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
        if not known:
            around = 0.0
        elif known == [at]:
            around = self._corrections[at]
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
        compared = self._compared[at]
        correction = (compared * self._corrections[at] + around) / (compared + 1)
        near = bisect_left(KNOTS, size / _NEAR), bisect_right(KNOTS, size * _NEAR)
        hope = _HOPE / (1 + max(self._seen[slice(*near)]))
        return _Knot(around, self._form(size) * exp(correction) * (1 - hope))


def _nearest(num_tokens: int) -> int:
    """The knot nearest to a size."""
    at = bisect_left(KNOTS, num_tokens)
    if at == len(KNOTS):
        return at - 1
    return at - 1 if at and num_tokens - KNOTS[at - 1] < KNOTS[at] - num_tokens else at
