"""Learns what speculation's decisions rest on: how long steps and drafts take just now.

The engine's step-time predictor is right to some percent. A draft token pays or not by less than
that, so this learner compares steps only with those just before them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from math import exp, hypot, log

import numpy as np

from octavo.spec_decode import tuning

# Sizes that are told apart: each one where a token more may matter, then ever fewer.
KNOTS = [
    *range(1, 21), *range(22, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 257, 16),
    *range(288, 513, 32), *range(576, 1025, 64),
]  # fmt: skip
_SIZES = np.array(KNOTS, np.float64)
_LOG_SIZES = np.log(_SIZES)
_NEAR = abs(_LOG_SIZES[:, None] - _LOG_SIZES) <= log(tuning.NEARBY)  # which sizes are like which


class SpeculationTimes:
    """Predicts the seconds of a step by its number of tokens, and of drafting.

    A step takes speed · √(knee² + n²) · correction(n): a roofline with a soft knee, where the
    weights are read in the time of ``knee`` tokens' arithmetic. The speed follows the machine in
    some steps; it changes by more than a token costs, so a correction is learned from a step only
    as far as the steps just before it were of other sizes. (A run of steps of one size that get
    slower says nothing about the size.) Between the sizes seen lately corrections are interpolated.
    """

    def __init__(self) -> None:
        self._knee = tuning.KNEE
        self._speed = 0.0  # logarithm of the seconds of a token's arithmetic
        self._steps = self._refreshed = 0
        self._prompts = 0
        self._corrections = np.zeros(len(KNOTS))  # logarithms
        self._seen = np.zeros(len(KNOTS))  # observations, fading
        self._compared = np.zeros(len(KNOTS))  # of these, those just after steps of other sizes
        self._before = -1  # the knot of the last step …
        self._run = 0  # … and how many steps before it had the same
        self._curve: list[float] = []  # by knot, corrections as factors
        self._hoped: list[float] = []  # by knot, seconds at speed 1, less where little is known
        self._drafting: dict[tuple[int, bool], list[float]] = {}  # seconds of a pass, observations
        self._read_seconds = self._read_tokens = 0.0
        self._refresh()

    @property
    def known(self) -> bool:
        """Whether a step has been observed, so that `predict` may be called."""
        return self._steps + self._prompts > 0

    # Steps

    def observe(self, num_tokens: int, seconds: float, *, prompts: bool) -> None:
        """Learn from a step. ``prompts``: some tokens were of prompts and wanted no logits."""
        if seconds <= 0.0:
            return
        if prompts:
            if num_tokens >= 16:
                self._observe_prompts(num_tokens, seconds)
            return
        if not self.known:
            self._speed = log(seconds / hypot(self._knee, num_tokens))
        at = _nearest(num_tokens)
        error = log(seconds / self.predict(num_tokens))
        error = min(max(error, -tuning.MAX_ERROR), tuning.MAX_ERROR)
        back = 0.0
        known_by_others = (1 - tuning.SPEED_GAIN) ** (self._run if at == self._before else 0)
        # At the first step what prompts have shown of the speed stands, and the size is unlike it.
        prior = 2 if self._steps else 1
        gain = known_by_others * max(tuning.CORRECTION_GAIN, 1 / (self._compared[at] + prior))
        self._corrections[at] += gain * error
        self._compared[at] += known_by_others
        if at != self._before and self._steps:
            # The difference may as well be wrong of the size before.
            share = 1 - (1 - tuning.SPEED_GAIN) ** self._run
            back = share * max(tuning.CORRECTION_GAIN, 1 / (self._compared[self._before] + 2))
            back = min(back, 1 - gain)
            self._corrections[self._before] -= back * error
            self._compared[self._before] += share
        self._run = self._run + 1 if at == self._before else 1
        self._before = at
        self._seen[at] += 1
        pace = max(tuning.SPEED_GAIN, 1 / (self._steps + 1))
        self._speed += (back + (1 - gain - back) * pace) * error
        self._steps += 1
        if self._run == 1 or self._steps % tuning.REFRESH_STEPS == 0:
            kept = (1 - 1 / tuning.STEPS_REMEMBERED) ** (self._steps - self._refreshed)
            self._seen *= kept
            self._compared *= kept
            self._refreshed = self._steps
            self._refresh()

    def _observe_prompts(self, num_tokens: int, seconds: float) -> None:
        """Learn a token's arithmetic from a step that read prompts. Predictions for sizes that
        were seen stay what they are.
        """
        reading = self._knee * exp(self._speed) if self._steps else 0.0
        token = (seconds**2 - min(reading, 0.9 * seconds) ** 2) ** 0.5 / num_tokens
        self._prompts += 1
        if self._prompts > 1:
            # Less with each prompt: whatever else is known rests on it.
            known = exp(self._speed)
            token = known + (token - known) / self._prompts
        before = self._speed + np.log(np.hypot(self._knee, _SIZES))
        if self._steps:
            self._knee = reading / token
        self._speed = log(token)
        self._corrections += before - self._speed - np.log(np.hypot(self._knee, _SIZES))
        self._refresh()

    def _refresh(self) -> None:
        known = np.flatnonzero(self._seen >= tuning.FAINT)
        if len(known):
            self._corrections = np.interp(_LOG_SIZES, _LOG_SIZES[known], self._corrections[known])
        else:
            self._corrections[:] = 0.0
        self._compared[self._seen < tuning.FAINT] = 0.0
        curve = np.exp(self._corrections)
        # Sizes unlike all those seen lately seem a bit better than expected, so they are tried.
        hope = tuning.EXPLORATION / (1 + (_NEAR * self._seen).max(axis=1))
        hoped = np.hypot(self._knee, _SIZES) * curve * (1 - hope)
        self._curve, self._hoped = curve.tolist(), hoped.tolist()

    def predict(self, num_tokens: int) -> float:
        """Return the seconds of a step without prompts. Only if ``known``."""
        return exp(self._speed) * hypot(self._knee, num_tokens) * self._curve[_nearest(num_tokens)]

    def seen(self, num_tokens: int) -> float:
        """Return how many steps of about this size were observed lately."""
        return float(self._seen[_nearest(num_tokens)])

    def sizes(self, decodes: int, low: int, high: int) -> Iterator[tuple[int, float]]:
        """Yield the sizes in (low, high] worth comparing and their seconds, for a step of ``low``
        tokens without drafts: a bit less than expected for sizes hardly seen, so that they are
        tried.

        If the step reads prompts, which are all tokens beyond its ``decodes``, these are left out
        of the time: they are no reason for or against a draft. It is that of a step of ``decodes``
        tokens, and the arithmetic of what is beyond ``low``, which no reading hides.
        """
        token, plain = exp(self._speed), self.predict(decodes)
        for at in range(bisect_left(KNOTS, low + 1), bisect_left(KNOTS, high + 1)):
            size = KNOTS[at]
            yield size, token * self._hoped[at] if low == decodes else plain + token * (size - low)

    # Drafting

    def observe_drafting(
        self, num_sequences: int, passes: int, seconds: float, *, begun: bool
    ) -> None:
        """Learn from drafts for ``num_sequences``, the longest of ``passes`` tokens.

        If they had been ``begun`` before they were asked for, ``seconds`` is the wait for them.
        """
        known = self._drafting.setdefault((num_sequences.bit_length(), begun), [0.0, 0.0])
        each = seconds / passes
        if known[1] >= 4:
            each = min(each, 3 * known[0])  # something else had the machine
        known[1] += 1
        known[0] += max(tuning.DRAFTING_GAIN, 1 / known[1]) * (each - known[0])

    def drafting(self, num_sequences: int, passes: int, *, begun: bool) -> float:
        """Return the seconds of drafting; 0 before any was observed."""
        digits = num_sequences.bit_length()
        near = [
            (abs(other - digits), other, each)
            for (other, was_begun), (each, _) in self._drafting.items()
            if was_begun == begun
        ]
        return passes * min(near)[2] if near else 0.0

    def knows_begun(self) -> bool:
        """Whether drafts that had been begun were observed."""
        return any(begun for _, begun in self._drafting)

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """Learn from a drafter's reading of texts that were new to it."""
        self._read_seconds = (1 - tuning.DRAFTING_GAIN) * self._read_seconds + seconds
        self._read_tokens = (1 - tuning.DRAFTING_GAIN) * self._read_tokens + num_tokens

    def reading(self, num_tokens: int) -> float:
        """Return the seconds that a drafter takes to read so many tokens."""
        return num_tokens * self._read_seconds / max(1.0, self._read_tokens)


def _nearest(num_tokens: int) -> int:
    """Return the index of the knot nearest to a size."""
    at = bisect_left(KNOTS, num_tokens)
    if at == len(KNOTS):
        return at - 1
    return at - 1 if at and num_tokens - KNOTS[at - 1] < KNOTS[at] - num_tokens else at
