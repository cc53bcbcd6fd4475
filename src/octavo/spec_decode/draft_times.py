"""How long drafting takes that computes, by sequences and passes, as it did of late."""

from __future__ import annotations

_FADING = 0.97  # what an observation still counts for at the next one
_SETTLED = 4.0  # observations from which on a far one is taken for somebody else's doing
_FARTHEST = 3.0  # times what was predicted
_WARM = 0.7  # times what was predicted, below which the first observations are forgotten
_PRIOR = 1.0  # passes², for which there being no fixed cost counts


class _Line:
    """Seconds = a + b · passes, least squares over fading observations."""

    __slots__ = ("passes", "product", "seconds", "square", "weight")

    def __init__(self) -> None:
        self.weight = self.passes = self.seconds = self.square = self.product = 0.0

    def add(self, passes: int, seconds: float) -> None:
        if self.weight >= _SETTLED:
            seconds = min(seconds, _FARTHEST * self.at(passes))
        elif self.weight and seconds < _WARM * self.at(passes):
            # The first ones find cold caches.
            self.weight = self.passes = self.seconds = self.square = self.product = 0.0
        self.weight = _FADING * self.weight + 1
        self.passes = _FADING * self.passes + passes
        self.seconds = _FADING * self.seconds + seconds
        self.square = _FADING * self.square + passes * passes
        self.product = _FADING * self.product + passes * seconds

    def at(self, passes: int) -> float:
        """What observations of one length alone cannot tell is taken to be proportional."""
        mean, seconds = self.passes / self.weight, self.seconds / self.weight
        variance = self.square / self.weight - mean * mean
        covariance = self.product / self.weight - mean * seconds
        slope = (covariance + _PRIOR * seconds / mean) / (variance + _PRIOR)
        slope = min(max(slope, 0.0), seconds / mean)
        return seconds + slope * (passes - mean)


class DraftTimes:
    """Predicts the seconds of drafting; 0 before anything has been seen."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}  # by the sequences' number of binary digits
        self._read_seconds = 0.0
        self._read_tokens = 0.0

    @property
    def known(self) -> bool:
        """Whether drafting has been seen."""
        return bool(self._lines)

    def observe(self, num_sequences: int, passes: int, seconds: float) -> None:
        """``passes``: the longest draft's tokens."""
        line = self._lines.setdefault(num_sequences.bit_length(), _Line())
        line.add(passes, seconds)

    def observe_reading(self, seconds: float, num_tokens: int) -> None:
        """So many tokens of texts that the drafter had not seen took it so long."""
        self._read_seconds = _FADING * self._read_seconds + seconds
        self._read_tokens = _FADING * self._read_tokens + num_tokens

    def predict(self, num_sequences: int, passes: int) -> float:
        if not self._lines or not passes:
            return 0.0
        digits = num_sequences.bit_length()
        nearest = min(self._lines, key=lambda known: (abs(known - digits), known))
        return self._lines[nearest].at(passes)

    def reading(self, num_tokens: int) -> float:
        """Seconds to read so much of a text."""
        return num_tokens * self._read_seconds / max(1.0, self._read_tokens)
