"""How long steps take: the one predictor of an engine, learned from the steps that it runs.

It offers mean, best and late rates, each for those who need it:

- mean, for a number of sequences and tokens (`linear`): a + b × decoding sequences + c × prompt
  tokens, fitted to all steps, stalls included. A forecast of waiting times sums it over hundreds of
  steps (engine/wait_time.py). It needs no cost model and takes a few additions a step.
- mean and best of prompts (`PromptRates`, scheduler/prompt_rates.py): tokens ÷ seconds of the steps
  that compute prompts. The deadline policy plans with the mean. A request is shed by the best,
  because no request is to be shed that might have met its target. Both are kept beside the fit by
  outcome, on simulated overloads (Poisson and the Azure trace; with noise, drift and stalls): with
  the fit's prompt rate c alone the deadline policy kept up to 6 of 100 targets fewer, with whole
  steps up to 2 fewer, at up to twice the preemptions; and shedding by the least ratio of actual to
  fitted seconds dropped up to three times as many requests that could still have met theirs.
- one step, exactly (`begin`, `add`, `seconds`, `predict`): the cost model's seconds, corrected. The
  scheduler sizes steps by it so that they end in time (scheduler/token_budget.py), and connectors
  compare it with loading blocks (`seconds_alone`). Only the cost model knows what positions and
  rows of logits cost; its corrections take some 50 µs a step, so they are learned only in an engine
  that asks for this output.
- late (`margin`): which share of a time steps are to take by prediction so that most keep it.

Speculation has a learner of its own in spec_decode: it compares steps by their number of tokens,
which is finer than any of these. With the fit in its place, a simulated batch of 4 took 5 to 11 %
longer, because the fit sees no knee.

The corrections are four numbers: how many times as long as by the rates it takes to read weights,
to compute with them, to attend, and for whatever is no op at all. A machine that others use, or
that grows warm, is a fifth slower in one minute than in the next, and not in everything alike. They
are followed by an extended Kalman filter (Kalman, "A new approach to linear filtering and
prediction problems", 1960) over their logarithms, so that none becomes negative and a step that
misses by a factor moves them by a factor. Each step moves most what most of it was spent on. A step
that is far off moves them no farther than what is just plausible (Huber, "Robust estimation of a
location parameter", 1964): it was somebody else's doing, unless it goes on. The filter also knows
how far its next prediction may be off.
"""

from __future__ import annotations

from functools import lru_cache
from math import exp, inf, log, sqrt

import numpy as np

from octavo.executor.base import Batch, Int32
from octavo.executor.cost import CostModel, Rates, StepSize
from octavo.scheduler.prompt_rates import StepRates

# The linear fit:
_KEEP = 0.99  # what a step keeps of its weight at the next
_KEEP_AT_FIRST = 0.9  # the first ones touch memory and caches for the first time
_AT_FIRST = 50  # steps
_STALL = 4.0  # times as long as predicted; what takes longer counts as if it took so
_REFIT = 32  # steps, after which the fit is renewed by which a stall is known
_RIDGE = 1e-6  # in steps: keeps what the steps so far do not tell apart from running away

# The corrections, in this order. They are lists: arrays of four numbers, of which a step touches
# dozens, would take it longer.
_READING, _COMPUTING, _ATTENDING, _OVERHEAD = range(4)
Vector = list[float]
# Standard deviations to begin with, in logarithms: of all four together (a machine is slow or
# fast), of each beside, and of a step's own time.
_MEASURED = 0.1, 0.07, 0.05
_GUESSED = 2.0, 0.5, 0.1
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


class StepTimePredictor(StepRates):
    """Learns on the engine's thread: `on_step`, `on_prompts`, `on_batch`. `linear` may be read
    from any thread.
    """

    def __init__(
        self,
        costs: CostModel | None = None,
        rates: Rates | None = None,
        *,
        measured: bool = True,
        noise: float | None = None,
        learns: bool = True,
    ) -> None:
        """``costs`` and ``rates``: the cost model, if single steps are to be predicted.
        ``measured``: the rates are this machine's for this model; else they are a guess, whose
        corrections may be large. ``noise``: standard deviation of a step's own time ÷ predicted,
        if known. ``learns``: false where steps take what the rates say; then the margin is that of
        one that has learned the rates, with steps of such noise.
        """
        super().__init__()
        # Sums over steps of products of 1, decoding and prompt tokens with each other, and with
        # seconds. No arrays: these are nine numbers, and it is done for every step.
        self._sums = [0.0] * 9
        self._linear: tuple[float, float, float] | None = None
        self._usual = 0.0, 0.0, 0.0
        self._steps = 0
        # The corrected cost model:
        self.predicts_steps = costs is not None
        self._learns = learns and costs is not None
        self._last: tuple[Batch, float] | None = None  # a step that is not learned yet
        self._alike = 0  # steps since the last that was
        # The last question to `seconds_alone`, which is asked for every block that is overwritten
        self._alone: tuple[tuple[int, int, int], float] | None = None
        if costs is not None and rates is not None:
            self._costs = costs
            self._size = StepSize(0, 0, 0, ())
            self._sized: tuple[Batch | None, StepSize] = None, self._size
            self.calibrate(rates, noise, _MEASURED if measured else _GUESSED)

    # The mean of all steps

    def on_step(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step in which ``decoding`` sequences decoded beside so many tokens of
        prompts.
        """
        keep = _KEEP_AT_FIRST
        if self._steps >= _AT_FIRST:
            keep = _KEEP
            if self._steps % _REFIT == _AT_FIRST % _REFIT:
                self._usual = self.linear
            each, sequence, token = self._usual
            predicted = each + sequence * decoding + token * prompt_tokens
            if predicted > 0:
                seconds = min(seconds, _STALL * predicted)
        d, p = decoding, prompt_tokens
        products = (1, d, p, d * d, d * p, p * p, seconds, d * seconds, p * seconds)
        self._sums = [keep * old + new for old, new in zip(self._sums, products, strict=True)]
        self._steps += 1
        self._linear = None

    @property
    def linear(self) -> tuple[float, float, float]:
        """(a, b, c): seconds of a step, of a decoding sequence and of a prompt token; 0 where
        nothing is known yet.
        """
        found = self._linear
        if found is None:
            found = self._linear = _least_squares(self._sums)
        return found

    # One step, as the scheduler asks for it

    def begin(self, positions: Int32) -> None:
        """Begin a step in which sequences at ``positions`` [sequences] decode a token each."""
        self._size = self._costs.decode_size(positions)

    def seconds(self, start: int, tokens: int, rows: int) -> float:
        """Return the seconds of the step if it also had so many tokens of a sequence from position
        ``start`` on, and rows that want logits.
        """
        size = self._size
        return self._total(self._costs.with_span(size, start, tokens, rows) if tokens else size)

    def add(self, start: int, tokens: int, rows: int) -> None:
        """Add them to the step."""
        self._size = self._costs.with_span(self._size, start, tokens, rows)

    def predict(self, batch: Batch) -> float:
        """Return the seconds of a step, without block copies."""
        return self._total(self._size_of(batch))

    def seconds_alone(self, start: int, tokens: int, most: int) -> float:
        """Return the seconds for ``tokens`` of a prompt from position ``start`` on, in steps of
        their own of up to ``most`` tokens, times the margin of error: nothing is to be loaded that
        would be computed in less time.
        """
        asked = start, tokens, most
        if self._alone is None or self._alone[0] != asked:
            nothing = self._costs.decode_size(np.empty(0, np.int32))
            end = start + tokens
            total = sum(
                self._total(self._costs.with_span(nothing, first, min(most, end - first), 0))
                for first in range(start, end, most)
            )
            self._alone = asked, total * self.margin
        return self._alone[1]

    @property
    def spread(self) -> float:
        """Standard deviation of actual ÷ predicted seconds of a step with prompts."""
        return sqrt(_dot(self._shares, self._moved(self._shares)) + self._noise**2)

    @property
    def margin(self) -> float:
        """Which share of a target steps are to take by prediction, so that most of them keep it."""
        return exp(-self.spread)

    def _total(self, size: StepSize) -> float:
        costs = self._costs
        return (
            costs.dense_seconds(size, self._now)
            + self._attending * costs.attention_seconds(size.attention, self._rates)
            + self._overhead * self._rates.overhead(size.tokens, size.rows, size.chunks)
        )

    def _size_of(self, batch: Batch) -> StepSize:
        if batch is not self._sized[0]:  # a step is predicted, then learned
            self._sized = batch, self._costs.size(batch)
        return self._sized[1]

    # Learning the corrections

    def calibrate(
        self,
        rates: Rates,
        noise: float | None = None,
        prior: tuple[float, float, float] = _MEASURED,
    ) -> None:
        """Begin anew from rates, which are measured unless ``prior`` says otherwise."""
        if not self.predicts_steps:
            return
        common, own, own_noise = prior
        self._rates = rates
        self._noise = own_noise if noise is None else max(_LEAST_NOISE, noise)
        if not self._learns:
            common = own = 0.0
        self._prior = common**2 + own**2  # variance of each
        self._surprises = 0  # in a row; below 0: steps were shorter
        self._logs: Vector = [0.0] * 4
        self._covariance = [
            [common**2 + own**2 * (row == column) for column in range(4)] for row in range(4)
        ]
        self._shares = _USUAL  # of a step with prompts
        # The rates corrected by so many steps of the grid, for reading and for computing
        self._at = lru_cache(maxsize=1000)(
            lambda reading, computing: rates.slowed(exp(reading * _GRID), exp(computing * _GRID))
        )
        self._now = rates  # corrected, all but attention and overhead
        self._attending = self._overhead = 1.0
        self._alone = None

    def on_batch(self, batch: Batch, started: float, ended: float | None) -> None:
        """Learn from a step that began at ``started`` (clock seconds). ``ended``: None if another
        follows at once. Then all until that begins (`on_begin`) belongs to the step: a request that
        waits for its next token waits for what is done between steps, too. Until then ``batch``
        must stay as it is.
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

    def on_begin(self, now: float) -> None:
        """Note that the next step begins."""
        if self._last is not None:
            (batch, started), self._last = self._last, None
            self.learn(batch, now - started)

    def learn(self, batch: Batch, seconds: float) -> None:
        """Learn that a step has taken ``seconds``."""
        steps, self._alike = max(1, self._alike), 0
        if not seconds > 0:
            return
        size = self._size_of(batch)
        predicted = self._total(size)
        if not predicted > 0:
            return
        # What was known is less certain by now, but never less than at first.
        drift = _DRIFT * min(seconds * steps, 60.0)
        for at, row in enumerate(self._covariance):
            row[at] += min(max(self._prior - row[at], 0.0), drift)
        shares, noise = self._spent(size, predicted), self._noise**2
        moved = self._moved(shares)
        uncertain = _dot(shares, moved)
        missed = log(seconds / predicted)
        most = _FAR * sqrt(uncertain + noise)
        if abs(missed) <= most:
            self._surprises = 0
        elif self._has_changed(missed):
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
        self._alone = None

    def _has_changed(self, missed: float) -> bool:
        """Return whether so many steps in a row have been far off to the same side that it is the
        machine that has changed, or never was what was thought.
        """
        self._surprises = max(0, self._surprises) + 1 if missed > 0 else min(0, self._surprises) - 1
        if abs(self._surprises) < _CHANGED:
            return False
        self._surprises = 0
        return True

    def _moved(self, shares: Vector) -> Vector:
        """Return the covariance of each correction with the logarithm of a step of such shares."""
        return [_dot(row, shares) for row in self._covariance]

    def _spent(self, size: StepSize, predicted: float) -> Vector:
        """Return the shares of a step's seconds: the derivatives of its logarithm."""
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


def _dot(left: Vector, right: Vector) -> float:
    (a, b, c, d), (e, f, g, h) = left, right
    return a * e + b * f + c * g + d * h


def _least_squares(sums: list[float]) -> tuple[float, float, float]:
    """Return the fit's coefficients: one that comes out below 0 is 0, and the others are fitted
    without it.
    """
    one, d, p, dd, dp, pp, *seconds = sums
    products = np.array([[one, d, p], [d, dd, dp], [p, dp, pp]])
    targets = np.array(seconds)
    kept = [index for index in range(3) if products[index, index] > 0]
    found = [0.0, 0.0, 0.0]
    while kept:
        scale = np.sqrt(products.diagonal()[kept])
        matrix = products[np.ix_(kept, kept)] / np.outer(scale, scale) + _RIDGE * np.eye(len(kept))
        values = np.linalg.solve(matrix, targets[kept] / scale) / scale
        worst = int(values.argmin())
        if values[worst] >= 0:
            for index, value in zip(kept, values.tolist(), strict=True):
                found[index] = value
            break
        del kept[worst]
    return found[0], found[1], found[2]


def guessed(threads: int) -> Rates:
    """Return rates of a slow machine, to begin with: the first steps become too short and not too
    long.
    """
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
