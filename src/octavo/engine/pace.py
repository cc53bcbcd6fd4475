"""How long a step will take: the one in the making, so that it can be made to end in time, and one
that would compute what a KV connector holds (engine/recompute.py).

The cost model says it, from rates that belong to this machine (a calibration's) or from guesses.
What steps really take corrects both: a machine that others use, or that grows warm, is a fifth
slower in one minute than in the next, and not in everything alike. Four numbers are followed: how
many times as long as by the rates it takes to read weights, to compute with them, to attend, and
for whatever is no op at all; by an extended Kalman filter (Kalman, "A new approach to linear
filtering and prediction problems", 1960) over their logarithms, so that none becomes negative and a
step that misses by a factor moves them by a factor. Each step moves most what most of it was spent
on. What lies far off moves them no farther than what is just plausible (Huber, "Robust estimation
of a location parameter", 1964): it was somebody else's doing, unless it goes on. The filter also
knows how far its next prediction may be off, which is the margin that is kept to a target.
"""

from __future__ import annotations

from math import exp, inf, log, sqrt
from typing import NamedTuple

from octavo.executor.base import Batch, Int32
from octavo.executor.cost import CostModel, Rates, StepSize

# Of these four, in this order. They are lists: arrays of four numbers, of which a step touches
# dozens, would take it longer.
_READING, _COMPUTING, _ATTENDING, _OVERHEAD = range(4)
Vector = list[float]
Matrix = list[Vector]


class _Prior(NamedTuple):
    """Standard deviations to begin with, in logarithms."""

    common: float  # of all four together: a machine is slow or fast
    own: float  # of each beside
    noise: float  # of a step's own time


_MEASURED = _Prior(0.1, 0.07, 0.05)
_GUESSED = _Prior(2.0, 0.5, 0.1)
_FADING = 0.1  # variance that is left of a step's own, in what steps show again and again
_DRIFT = 0.2**2 / 60  # variance that a second adds: a fifth in a minute
_LEAST_NOISE = 0.02
_NOISE_GAIN = 0.03
_FAR = 2.5  # standard deviations beyond which an observation counts as one at them
_CHANGED = 3  # such observations in a row
_FARTHEST = 10.0  # as wrong as any rates can be: a factor of 22,000
_GRID = 0.02  # what rates are rounded to, so that an op's seconds are counted once
_EVERY = 8  # steps without prompts, of which one is looked at: they are many and alike
_USUAL = [0.1, 0.8, 0.05, 0.05]  # what a step with prompts is spent on, until one has run


class Pace:
    """Is the scheduler's `Timing`; learns from each step. Not thread-safe."""

    def __init__(
        self,
        costs: CostModel,
        rates: Rates,
        *,
        measured: bool = True,
        noise: float | None = None,
        learns: bool = True,
    ) -> None:
        """``measured``: the rates are this machine's for this model; else they are a guess, whose
        corrections may be large. ``noise``: standard deviation of a step's own time ÷ predicted,
        if known. ``learns``: false where steps take what the rates say; then the margin is that of
        one that has learned the rates, with steps of such noise.
        """
        self._learns = learns
        self._costs = costs
        self._last: tuple[Batch, float] | None = None  # a step that is not learned yet
        self._alike = 0  # steps since the last that was
        self._size = StepSize(0, 0, 0, ())
        self._sized: tuple[Batch | None, StepSize] = None, self._size
        self.learned = 0  # steps, and calibrations: predictions are others
        self._begin_from(rates, _MEASURED if measured else _GUESSED, noise)

    def calibrate(self, rates: Rates, noise: float | None = None) -> None:
        """The rates are these, as measured; what was learned is for them to show again."""
        self._begin_from(rates, _MEASURED, noise)

    def _begin_from(self, rates: Rates, prior: _Prior, noise: float | None) -> None:
        self.learned += 1
        self._rates = rates
        self._noise = prior.noise if noise is None else max(_LEAST_NOISE, noise)
        common, own = (prior.common, prior.own) if self._learns else (0.0, 0.0)
        self._prior = common**2 + own**2  # variance of each
        self._surprises = 0  # in a row; below 0: steps were shorter
        self._logs: Vector = [0.0] * 4
        self._covariance: Matrix = [
            [common**2 + own**2 * (row == column) for column in range(4)] for row in range(4)
        ]
        self._shares = _USUAL  # of a step with prompts
        self._slowed: dict[tuple[int, int], Rates] = {(0, 0): rates}
        self._now = rates  # corrected, all but attention and overhead
        self._attending = self._overhead = 1.0

    # Making a step

    def begin(self, positions: Int32) -> None:
        """So far sequences at ``positions`` [sequences] decode a token each."""
        self._size = self._costs.decode_size(positions)

    def seconds(self, start: int, tokens: int, rows: int) -> float:
        """Of the step, if it also had so many tokens of a sequence, and rows that want logits."""
        size = self._size
        return self._total(self._costs.with_span(size, start, tokens, rows) if tokens else size)

    def add(self, start: int, tokens: int, rows: int) -> None:
        """Now it has."""
        self._size = self._costs.with_span(self._size, start, tokens, rows)

    @property
    def spread(self) -> float:
        """Standard deviation of actual ÷ predicted seconds of a step with prompts."""
        return sqrt(_dot(self._shares, self._moved(self._shares)) + self._noise**2)

    @property
    def margin(self) -> float:
        """What share of a target steps are to take by prediction, so that most of them keep it."""
        return exp(-self.spread)

    def _total(self, size: StepSize) -> float:
        costs = self._costs
        return (
            costs.dense_seconds(size, self._now)
            + self._attending * costs.attention_seconds(size, self._rates)
            + self._overhead * self._rates.overhead(size.tokens, size.rows, size.chunks)
        )

    # Learning

    def predict(self, batch: Batch) -> float:
        """Seconds of a step, without block copies."""
        return self._total(self._size_of(batch))

    def _size_of(self, batch: Batch) -> StepSize:
        if batch is not self._sized[0]:  # a step is predicted, then learned
            self._sized = batch, self._costs.size(batch)
        return self._sized[1]

    def ran(self, batch: Batch, started: float, ended: float | None) -> None:
        """A step has run that began at ``started`` (clock seconds). ``ended``: None if another
        follows at once. Then all until that begins belongs to the step: whoever waits for its next
        token waits for what is done between steps, too. Until then ``batch`` must stay as it is.
        """
        if not self._learns:
            return
        self._alike += 1
        if batch.num_tokens == len(batch.logits_rows) and self._alike < _EVERY:
            return
        if ended is None:
            self._last = batch, started
        else:
            self.learn(batch, ended - started)

    def settle(self, now: float) -> None:
        """The next step begins."""
        if self._last is not None:
            (batch, started), self._last = self._last, None
            self.learn(batch, now - started)

    def learn(self, batch: Batch, seconds: float) -> None:
        """A step has taken ``seconds``."""
        steps, self._alike = max(1, self._alike), 0
        if not seconds > 0:
            return
        size = self._size_of(batch)
        predicted = self._total(size)
        if not predicted > 0:
            return
        self._age(seconds * steps)
        shares, noise = self._spent(size, predicted), self._noise**2
        moved = self._moved(shares)
        uncertain = _dot(shares, moved)
        missed = log(seconds / predicted)
        most = _FAR * sqrt(uncertain + noise)
        if abs(missed) <= most:
            self._surprises = 0
        elif self._surprised(missed):
            most = inf
            self._covariance = [[each + missed**2 for each in row] for row in self._covariance]
            moved = self._moved(shares)
            uncertain = _dot(shares, moved)
        missed = min(max(missed, -most), most)
        gain = [each / (uncertain + noise) for each in moved]
        # What is seen again and again is no better known than by the last steps of it.
        learned = 1 - _FADING * noise / max(uncertain, 1e-12)
        self._covariance = [
            [old - learned * of_row * of_column for old, of_column in zip(row, moved, strict=True)]
            for row, of_row in zip(self._covariance, gain, strict=True)
        ]
        self._logs = [
            min(max(old + each * missed, -_FARTHEST), _FARTHEST)
            for old, each in zip(self._logs, gain, strict=True)
        ]
        own = min(max(missed**2 - uncertain, 0.0), _FAR**2 * noise)
        self._noise = max(_LEAST_NOISE, sqrt(noise + _NOISE_GAIN * (own - noise)))
        if size.tokens > size.rows:
            self._shares = shares
        reading, computing, attending, overhead = self._logs
        self._now = self._at(round(reading / _GRID), round(computing / _GRID))
        self._attending, self._overhead = exp(attending), exp(overhead)
        self.learned += 1

    def _surprised(self, missed: float) -> bool:
        """Whether so many steps in a row have been far off to the same side that it is the machine
        that has changed, or never was what was thought.
        """
        self._surprises = max(0, self._surprises) + 1 if missed > 0 else min(0, self._surprises) - 1
        if abs(self._surprises) < _CHANGED:
            return False
        self._surprises = 0
        return True

    def _age(self, seconds: float) -> None:
        """What was known is less certain by now, but never less than at first."""
        drift = _DRIFT * min(seconds, 60.0)
        for at, row in enumerate(self._covariance):
            row[at] += min(max(self._prior - row[at], 0.0), drift)

    def _moved(self, shares: Vector) -> Vector:
        """The covariance of each with the logarithm of a step of such shares."""
        return [_dot(row, shares) for row in self._covariance]

    def _spent(self, size: StepSize, predicted: float) -> Vector:
        """The shares of a step's seconds: the derivatives of its logarithm."""
        costs = self._costs
        at = round(self._logs[_READING] / _GRID), round(self._logs[_COMPUTING] / _GRID)
        dense = costs.dense_seconds(size, self._now)
        reading = costs.dense_seconds(size, self._at(at[0] + 1, at[1])) - dense
        computing = costs.dense_seconds(size, self._at(at[0], at[1] + 1)) - dense
        of_dense = dense / ((reading + computing) or 1.0)
        overhead = self._overhead * self._rates.overhead(size.tokens, size.rows, size.chunks)
        attending = predicted - dense - overhead
        spent = reading * of_dense, computing * of_dense, attending, overhead
        return [seconds / predicted for seconds in spent]

    def _at(self, reading: int, computing: int) -> Rates:
        """The rates corrected by so many steps of the grid."""
        rates = self._slowed.get((reading, computing))
        if rates is None:
            if len(self._slowed) > 1000:
                self._slowed.clear()
            rates = self._rates.slowed(exp(reading * _GRID), exp(computing * _GRID))
            self._slowed[reading, computing] = rates
        return rates


def _dot(left: Vector, right: Vector) -> float:
    (a, b, c, d), (e, f, g, h) = left, right
    return a * e + b * f + c * g + d * h


def guessed(threads: int) -> Rates:
    """Of a slow machine, to begin with: the first steps become too short and not too long."""
    return Rates(
        4e9 * threads,
        10e9 * threads,
        500e-6,
        int8_ops_per_second=40e9 * threads,
        bf16_ops_per_second=20e9 * threads,
        knee=2.5,
        attention_ops_per_second=15e9 * threads,
        attention_knee=1.0,
        threads=threads,
        unpacking=2.0,
        batch_overhead=200e-6,
        row_overhead=30e-6,
        chunk_overhead=150e-6,
    )
