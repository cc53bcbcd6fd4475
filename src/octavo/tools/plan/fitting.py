"""The cost model's parameters, from steps that were timed.

Rates and overheads that make predicted steps agree with observed ones: the least sum of squares of
the logarithms of their ratios, by the Levenberg-Marquardt method over the logarithms of the
parameters, so that none becomes negative. Observations far off count for less (Huber, "Robust
estimation of a location parameter", 1964): on a machine that others use, some steps are held up.
Each parameter is held, weakly, to what is usual for a machine of the measured limits: one that the
observations do not tell stays there.

So fitted, a step is predicted as it runs when nobody holds it up. A latency is a sum of steps, some
of which are: what these add on average (`Fitted.held_up`) goes into the rates at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from octavo.engine.calibration import KindError
from octavo.executor.base import Batch
from octavo.executor.cost import SHARPEST, Arithmetic, CostModel, OpCost, Rates

Array = npt.NDArray[np.float64]
T_contra = TypeVar("T_contra", contravariant=True)

FEWEST = 20  # steps to fit to
LONG = 350  # tokens of context from which a decode step is one of long contexts
FARTHEST = 3.0  # times the predicted: what was held up for longer counts as so much in the mean
# Of what few steps say of a machine's speed, so much is believed: within seconds it wavers by some
# 5 % (measured on a virtual machine), and over minutes by twice that.
BELIEVED = 0.8


class Observation(NamedTuple):
    """A step as it ran."""

    batch: Batch  # sizes and positions only
    seconds: float  # scheduling to delivery


class FittedParameter(NamedTuple):
    """One of the parameters: where it is looked for, and how surely (in logarithms)."""

    name: str
    usual: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Fitted:
    rates: Rates  # of a mean step
    held_up: float  # a mean step ÷ one that nobody held up
    deviations: dict[str, float]  # of each parameter: its standard error as a share of it
    errors: tuple[KindError, ...]  # cross-validated, by kind of step
    error: float  # over all steps, each kind for its number of steps


def fit(
    costs: CostModel, observations: Sequence[Observation], limits: Rates, threads: int
) -> Fitted:
    """``limits``: the machine's, on ``threads`` that ran the steps. Raises `ValueError` for too few
    observations.
    """
    if len(observations) < FEWEST:
        raise ValueError(f"{len(observations)} steps are too few to fit anything to")
    arithmetic = costs.by_op(observations[0].batch)
    attention = next((cost.arithmetic for cost in arithmetic if cost.attention), Arithmetic.FP32)
    limits = replace(limits, threads=threads)
    parameters = _parameters(limits, attention)
    steps = _Steps.of(costs, observations)
    found, deviations = solve(steps, parameters, partial(_rates, limits=limits))
    names = [parameter.name for parameter in parameters]
    kinds, errors = _validated(observations, steps, parameters, limits)
    rates = _rates(found, limits)
    held_up = steps.held_up(rates)
    return Fitted(
        rates.slowed(held_up),
        held_up,
        dict(zip(names, deviations.tolist(), strict=True)),
        kinds,
        errors,
    )


def slowness(
    costs: CostModel,
    observations: Sequence[Observation],
    rates: Rates,
    held_up: float = 1.0,
    *,
    believed: float = BELIEVED,
) -> tuple[float, float]:
    """How many times as long memory and processor take as when a machine had ``rates`` and
    ``held_up`` of `Fitted`, from few steps: too few to say how often steps are held up, which is
    taken to be as it was. ``believed``: how much of the change, in logarithms, is taken to last.
    """
    swift = rates.slowed(1 / held_up)

    def slowed(found: Array) -> Rates:
        return swift.slowed(*np.exp(found).tolist())

    same = [FittedParameter(name, 1.0, 0.2) for name in ("memory", "processor")]
    found, _ = solve(_Steps.of(costs, observations), same, slowed)
    memory, processor = np.exp(believed * found).tolist()
    return memory, processor


def _parameters(limits: Rates, attention: Arithmetic) -> list[FittedParameter]:
    return [
        FittedParameter("bytes_per_second", 0.8 * limits.bytes_per_second, 0.7),
        FittedParameter("share_of_peak", 0.6, 0.7),
        FittedParameter("knee", 2.5, 0.5),
        FittedParameter("kv_bytes_per_second", limits.bytes_per_second, 1.0),
        FittedParameter("attention_ops_per_second", 0.5 * limits.peak(attention), 1.0),
        FittedParameter("step_overhead", 500e-6, 1.0),
        FittedParameter("unpacking", 2.0, 0.7),
        FittedParameter("batch_overhead", 200e-6, 1.0),
        FittedParameter("row_overhead", 30e-6, 1.0),
        FittedParameter("chunk_overhead", 150e-6, 1.0),
    ]


def _rates(found: Array, limits: Rates) -> Rates:
    """Return the rates of the parameters, in `_parameters`' order, as logarithms."""
    memory, share, knee, kv, attention, step, unpacking, more, row, chunk = np.exp(found).tolist()
    return Rates(
        memory,
        limits.ops_per_second * share,
        step,
        int8_ops_per_second=limits.peak(Arithmetic.INT8) * share,
        bf16_ops_per_second=limits.peak(Arithmetic.BF16) * share,
        knee=min(max(knee, 1.0), SHARPEST),
        kv_bytes_per_second=kv,
        attention_ops_per_second=attention,
        attention_knee=1.0,
        threads=limits.threads,
        unpacking=unpacking,
        batch_overhead=more,
        row_overhead=row,
        chunk_overhead=chunk,
    )


class _Steps(NamedTuple):
    """Observations as columns."""

    parts: list[tuple[OpCost, int]]  # as `CostModel.parts`, but of arrays [steps]
    tokens: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    chunks: npt.NDArray[np.int64]
    seconds: Array
    weights: Array  # of each step in the sum

    @classmethod
    def of(cls, costs: CostModel, observations: Sequence[Observation]) -> _Steps:
        each = [costs.parts(observation.batch) for observation in observations]
        sizes = [costs.size(observation.batch) for observation in observations]
        parts = []
        for column in zip(*each, strict=True):
            (first, count), *_ = column
            numbers = np.array([(*cost[:3], cost.rows) for cost, _ in column], float).T
            parts.append((_cost(numbers, first), count))
        kinds = [kind_of(observation.batch) for observation in observations]
        among = Counter(kinds)
        # Many steps of a kind say what it takes, and not that others matter less.
        weights = np.array([among[kind] ** -0.5 for kind in kinds])
        return cls(
            parts,
            np.array([size.tokens for size in sizes]),
            np.array([size.rows for size in sizes]),
            np.array([size.chunks for size in sizes]),
            np.array([each.seconds for each in observations]),
            weights / weights.mean(),
        )

    def only(self, chosen: npt.NDArray[np.bool_]) -> _Steps:
        def cut(cost: OpCost) -> OpCost:
            return _cost(np.array((*cost[:3], cost.rows))[:, chosen], cost)

        return _Steps(
            [(cut(cost), count) for cost, count in self.parts],
            self.tokens[chosen],
            self.rows[chosen],
            self.chunks[chosen],
            self.seconds[chosen],
            self.weights[chosen],
        )

    def predicted(self, rates: Rates) -> Array:
        """Seconds of each."""
        counts: Any = self.tokens, self.rows, self.chunks
        total: Array = np.asarray(rates.overhead(*counts), float)
        for cost, count in self.parts:
            total = total + count * cost.seconds(rates)
        return total

    def held_up(self, rates: Rates) -> float:
        """The mean of seconds ÷ predicted."""
        ratios = np.minimum(self.seconds / self.predicted(rates), FARTHEST)
        return float(np.average(ratios, weights=self.weights))


def _cost(numbers: Array, like: OpCost) -> OpCost:
    """An op's of many steps: bytes of weights, of the cache, operations and rows, [4, steps]."""
    weight_bytes, kv_bytes, ops, rows = cast(Any, numbers)
    return OpCost(weight_bytes, kv_bytes, ops, like.arithmetic, rows, like.attention)


class Observed(Protocol[T_contra]):
    """What is fitted to: seconds, and what rates of some kind predict of them."""

    @property
    def seconds(self) -> Array: ...

    @property
    def weights(self) -> Array:
        """The weight of each in the sum."""

    def predicted(self, rates: T_contra) -> Array: ...


def solve(
    steps: Observed[T_contra], parameters: list[FittedParameter], rates: Callable[[Array], T_contra]
) -> tuple[Array, Array]:
    """The parameters' logarithms, and their standard errors."""
    usual = np.log([parameter.usual for parameter in parameters])
    precision = np.array([parameter.deviation for parameter in parameters]) ** -2.0

    def missed(at: Array) -> Array:
        misses: Array = np.log(steps.seconds / steps.predicted(rates(at)))
        return misses

    def loss(misses: Array, at: Array, scale: float) -> float:
        far = np.abs(misses) / scale
        huber = np.where(far < 1.5, 0.5 * far**2, 1.5 * far - 1.125)
        return float((steps.weights * huber).sum() + 0.5 * (precision * (at - usual) ** 2).sum())

    at, damping = usual.copy(), 1e-2
    misses = missed(at)
    for _ in range(60):
        scale = max(1.4826 * float(np.median(np.abs(misses))), 0.01)
        # The derivative of what is predicted, by each parameter.
        slopes = np.stack(
            [(misses - missed(at + shift)) / 1e-4 for shift in 1e-4 * np.eye(len(at))], axis=1
        )
        trust = steps.weights / np.maximum(1.0, np.abs(misses) / (1.5 * scale)) / scale**2
        normal = (slopes * trust[:, None]).T @ slopes + np.diag(precision)
        pull = (slopes * trust[:, None]).T @ misses - precision * (at - usual)
        before = loss(misses, at, scale)
        while damping < 1e8:
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull)
            tried = at + np.clip(move, -0.7, 0.7)
            missed_there = missed(tried)
            if loss(missed_there, tried, scale) <= before:
                break
            damping *= 4
        else:
            break
        at, misses, damping = tried, missed_there, max(damping / 4, 1e-6)
        if np.abs(move).max() < 1e-4:
            break
    return at, np.sqrt(np.diag(np.linalg.inv(normal)))


def _validated(
    observations: Sequence[Observation],
    steps: _Steps,
    parameters: list[FittedParameter],
    limits: Rates,
    folds: int = 4,
) -> tuple[tuple[KindError, ...], float]:
    """Errors of steps by a fit to the others: every fourth stretch of steps is left out in turn."""
    count = len(observations)
    stretch = max(1, count // (folds * 8))
    fold = np.arange(count) // stretch % folds
    ratios = np.empty(count)
    for left_out in range(folds):
        chosen = fold == left_out
        found, _ = solve(steps.only(~chosen), parameters, partial(_rates, limits=limits))
        held_out = steps.only(chosen)
        ratios[chosen] = held_out.predicted(_rates(found, limits)) / held_out.seconds
    kinds = [kind_of(observation.batch) for observation in observations]
    rows = []
    for kind in sorted(set(kinds), key=_order):
        own = ratios[[each == kind for each in kinds]]
        seconds = [o.seconds for o, each in zip(observations, kinds, strict=True) if each == kind]
        rows.append(
            KindError(
                kind,
                len(own),
                float(np.median(seconds)),
                float(np.median(own) - 1),
                float(np.median(np.abs(own - 1))),
            )
        )
    return tuple(rows), float(np.median(np.abs(ratios - 1)))


# 511: steps that use up the default budget of 512 tokens are told apart from smaller ones.
_SIZES = {
    "decode": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "decode, long context": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "prompt": (32, 128, 256, 511, 1024, 2048),
    "decode and prompt": (32, 128, 256, 511, 1024, 2048),
}


def kind_of(batch: Batch) -> str:
    """What a step does, and for how many tokens."""
    tokens, rows = batch.num_tokens, len(batch.logits_rows)
    if tokens == rows:
        what = "decode, long context" if batch.positions.mean() > LONG else "decode"
    else:
        what = "prompt" if len(batch.seq_offsets) == 2 else "decode and prompt"
    sizes = _SIZES[what]
    above = next((size for size in sizes if tokens <= size), None)
    if above is None:
        return f"{what}, more than {sizes[-1]} tokens"
    return f"{what}, up to {above} token{'s'[: above - 1]}"


def _order(kind: str) -> tuple[int, int]:
    what, _, size = kind.rpartition(", ")
    return list(_SIZES).index(what), int(size.split()[2])
