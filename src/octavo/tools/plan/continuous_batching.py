"""Continuous batching as a sum: throughput from step time, arrivals and lengths.

A request runs for so many steps: a few that read its prompt (the last of them gives its first
token), then one for each token more. So ``running`` sequences finish running / steps requests a
step, and a step's time gives the rate. Three things follow.

*Saturation.* The most requests a second are those of the largest batch that limits, step budget and
cache allow, N: N / (steps · time of a step of N).

*Below it*, by Little's law (1961), running = rate · steps · time of a step, whose time depends on
what runs: a fixed point. A request sees the others and itself, so its steps are those of one more.

*Its spread.* With Poisson arrivals, all that run served one token each step, this is a symmetric
queue in Kelly's sense (1979, section 3.3): the chance of n requests is proportional to the product
over k ≤ n of rate · steps · time(k) / k, whatever the distribution of lengths. It gives the mean,
the idle share, and the share of the time with all places taken, in which requests wait.

*Static batching* waits for the longest of a batch, whose expected length is a sum over the
distribution, and does nothing with the places of those that have ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import floor, inf
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from octavo.executor.cost import CostModel, Rates
from octavo.tools.plan.lengths import Lengths
from octavo.tools.plan.phase import mixed_batch

Limit = Literal["sequences", "tokens", "cache"]
_ROOM_BINS = 64  # that a step's room for prompts is divided into, at most
_MOST_BINS = 1 << 13  # of the longest prompt
_NODES = 25  # of functions of the batch or of a step's tokens, between which lines are drawn


@dataclass(frozen=True)
class Load:
    """What is asked: ``rate`` requests a second (0: nothing is said of the rate) of these lengths.
    ``product``: mean of prompt · output, where they are not independent.
    """

    prompts: Lengths
    outputs: Lengths
    rate: float
    product: float | None = None

    @cached_property
    def decodes(self) -> float:
        """Steps of a request after the one that gives its first token."""
        return self.outputs.mean - 1

    @cached_property
    def context(self) -> float:
        """Tokens in the cache of a sequence that decodes, mean over its steps: the prompt and
        k - 1 more at the k-th.
        """
        if not self.decodes:
            return self.prompts.mean
        outputs = self.outputs
        product = self.prompts.mean * outputs.mean if self.product is None else self.product
        prompt = product - self.prompts.mean
        own = (outputs.square - 3 * outputs.mean + 2) / 2  # (O - 1)(O - 2) / 2
        return (prompt + own) / self.decodes


@dataclass(frozen=True)
class EngineLimits:
    """An engine's: sequences that run together, tokens a step, sequences whose cache fits."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    cached_seqs: float = inf

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"--max-num-seqs must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs "
                f"{self.max_num_seqs}: every running sequence needs one token a step"
            )


class StepTime(Protocol):
    """Seconds of a step in which ``decoding`` sequences with ``context`` tokens in their caches get
    a token each, and ``tokens`` of prompts are read of which ``start`` more are in the cache.
    """

    def __call__(self, decoding: float, context: float, tokens: float, start: float) -> float: ...


@dataclass(frozen=True)
class LinearStep:
    """constant + per_sequence · sequences that decode + per_prompt_token · tokens of prompts."""

    constant: float
    per_sequence: float = 0.0
    per_prompt_token: float = 0.0

    def __call__(self, decoding: float, context: float, tokens: float, start: float) -> float:
        return self.constant + self.per_sequence * decoding + self.per_prompt_token * tokens


class ModelStep:
    """The step times of a `CostModel`, the simulator's own. A step reads each weight once, for
    those that decode and for prompts together; so a prompt may cost nothing, or all its operations.
    """

    def __init__(self, model: CostModel, rates: Rates) -> None:
        @lru_cache(maxsize=1 << 16)
        def whole(decoding: int, context: int, tokens: int, start: int) -> float:
            batch = mixed_batch(decoding, context, tokens, start)
            return model.seconds(batch, rates) if batch.num_tokens else 0.0

        self._whole = whole

    def __call__(self, decoding: float, context: float, tokens: float, start: float) -> float:
        """Between whole sequences a straight line."""
        low = floor(decoding)
        rest = (round(context), round(tokens), round(start))
        below = self._whole(low, *rest)
        if decoding == low:
            return below
        return below + (decoding - low) * (self._whole(low + 1, *rest) - below)


@dataclass(frozen=True)
class StepMix:
    """What the steps are made of when ``running`` sequences run, in the mean."""

    load: Load
    running: float
    budget: int  # tokens a step

    @cached_property
    def room(self) -> float:
        """Tokens of prompts that a step has room for beside those that decode."""
        share = self.load.decodes / (self.load.decodes + 1)
        return max(1.0, self.budget - self.running * share)

    @cached_property
    def reads(self) -> float:
        """Steps in which a request's prompt is read."""
        return self.load.prompts.steps_of(self.room)

    @property
    def steps(self) -> float:
        """In which a request takes part."""
        return self.load.decodes + self.reads

    @property
    def decoding(self) -> float:
        return self.running * self.load.decodes / self.steps

    @property
    def begun(self) -> float:
        """Requests that begin, and end, in a step."""
        return self.running / self.steps

    @cached_property
    def start(self) -> float:
        """Tokens of the prompt before a chunk, the mean over its tokens: chunks begin at 0, room,
        2 · room, …
        """
        prompts, room = self.load.prompts, self.room
        full = np.floor(prompts.tokens / room)
        last = prompts.tokens - full * room
        before = room * room * full * (full - 1) / 2 + last * full * room
        return float(prompts.shares @ before) / prompts.mean

    @cached_property
    def _queue(self) -> tuple[float, npt.NDArray[np.float64], float]:
        """Tokens a bin; by bins, the chances of so many tokens of prompts being read in a step;
        tokens left for later steps, mean. A Poisson number of prompts begins in each, and what it
        has no room for waits for the next (Lindley's recursion, 1952).
        """
        prompts, asked = self.load.prompts, self.begun * self.load.prompts.mean
        longest = len(prompts.shares)
        room = min(_ROOM_BINS, floor(self.room / max(1, longest >> 10))) or 1
        width = self.room / room
        if asked >= self.room * (1 - 1e-9):
            return asked / room, np.eye(room + 1)[room], inf
        if longest / width > _MOST_BINS:
            # Prompts of so many steps each fill theirs: a queue of the kind M/G/1, whose work that
            # waits is Pollaczek's and Khinchine's, but no more than half of those that are read.
            rest = prompts.square / (2 * prompts.mean)
            waits = min(asked / (self.room - asked), self.begun * self.reads) * rest
            full = asked / self.room
            return width, (1 - full) * np.eye(room + 1)[0] + full * np.eye(room + 1)[room], waits
        arrives = _compound(prompts, self.begun, width)
        size = max(16 * room, 2 * len(arrives))
        moments = np.fft.rfft(arrives, 2 * size)
        left = np.zeros(size)
        left[0] = 1
        for _ in range(100):
            total = np.clip(np.fft.irfft(np.fft.rfft(left, 2 * size) * moments), 0, None)
            after = np.zeros(size)
            after[: size - 1] = total[room + 1 : room + size]
            after = np.concatenate([[total[: room + 1].sum()], after[:-1]])
            change = np.abs(after - left).sum()
            left = after / after.sum()
            if change < 1e-5:
                break
        read = np.append(total[:room], total[room:].sum())
        read /= read.sum()
        # In the long run all that comes is read. Where the recursion stopped before that, the steps
        # that are missing are full ones.
        bins = asked / width
        mean = float(read @ np.arange(room + 1))
        at, end = (room, float(room)) if mean < bins else (0, 0.0)
        share = (bins - mean) / (end - mean) if end != mean else 0.0
        read *= 1 - share
        read[at] += share
        return width, read, float(left @ np.arange(size)) * width

    def times(self, step: StepTime) -> StepMoments:
        load = self.load
        width, chances, left = self._queue
        tokens = width * np.arange(len(chances))
        inner = np.geomspace(1, max(1, len(chances) - 1), _NODES)
        nodes = np.unique(np.round(np.concatenate([[0, 1], inner]))).astype(np.int64)
        nodes = nodes[nodes < len(chances)]
        # A step without prompts has somebody that decodes.
        rows = [max(self.decoding, min(1.0, load.decodes)) if not node else self.decoding
                for node in nodes]  # fmt: skip
        at = [
            step(row, load.context, float(tokens[node]), self.start)
            for row, node in zip(rows, nodes, strict=True)
        ]
        seconds = np.interp(tokens, tokens[nodes], at)
        return StepMoments(
            float(chances @ seconds), float(chances @ seconds**2), left / self.room * at[-1]
        )

    def reading(self, step: StepTime) -> float:
        """Seconds of the steps that read one request's prompt."""
        load, room = self.load, self.room
        full = np.floor(load.prompts.tokens / room)
        last = load.prompts.tokens - full * room
        nodes = np.unique(np.geomspace(1, room, _NODES))
        at = [step(self.decoding, load.context, node, self.start) for node in nodes]
        seconds = full * at[-1] + np.where(last > 0, np.interp(last, nodes, at), 0)
        return float(load.prompts.shares @ seconds)


class StepMoments(NamedTuple):
    mean: float  # seconds
    square: float  # the mean of their square
    behind: float  # seconds of the steps that read what is left of earlier prompts


def _compound(lengths: Lengths, mean: float, width: float) -> npt.NDArray[np.float64]:
    """[i] the chance that a Poisson number (of this mean) of lengths add up to i · width tokens.
    A length between two bins is now one, now the other, so that the mean stays as it is.
    """
    below = np.floor(lengths.tokens / width)
    above = lengths.tokens / width - below
    bins = below.astype(np.int64)
    shares = np.bincount(bins, lengths.shares * (1 - above), int(bins[-1]) + 2)
    shares += np.bincount(bins + 1, lengths.shares * above, len(shares))
    reach = mean * lengths.mean + 10 * (mean * lengths.square) ** 0.5  # far into the tail
    size = 1 << int(np.ceil(np.log2(len(shares) + reach / width)))
    found = np.fft.irfft(np.exp(mean * (np.fft.rfft(shares, size) - 1)), size)
    return np.asarray(np.clip(found, 0, None), np.float64)


# --- the sums ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaturatedEngine:
    """The engine with all places taken, always."""

    mix: StepMix
    limit: Limit  # what the places are limited by
    step_seconds: float

    @property
    def running(self) -> float:
        return self.mix.running

    @property
    def requests_per_second(self) -> float:
        return self.running / (self.mix.steps * self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.requests_per_second * self.mix.load.outputs.mean


@dataclass(frozen=True)
class Static:
    """Batches that wait for their longest."""

    size: int
    longest: float  # output tokens, expected
    seconds: float  # of a batch
    tokens: float  # of a batch

    @property
    def requests_per_second(self) -> float:
        return self.size / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Occupancy(NamedTuple):
    """How many requests there are, over time."""

    running: float  # mean
    waiting: float  # mean; inf when saturated
    idle: float  # share of the time with none
    full: float  # share of the time with all places taken


@dataclass(frozen=True)
class Batching:
    """What an engine makes of a load."""

    load: Load
    limits: EngineLimits
    saturation: SaturatedEngine
    static: Static
    fixed_point: StepMix | None  # by Little's law alone; None: there is none, or nothing arrives
    step_seconds: float  # mean, when as many run as do in the mean
    spread: Occupancy
    ttft_seconds: float  # mean, with the wait; inf when saturated
    tpot_seconds: float  # mean

    @property
    def utilisation(self) -> float:
        """The utilisation of the resource that saturates."""
        return self.load.rate / self.saturation.requests_per_second

    @property
    def headroom(self) -> float | None:
        """Capacity ÷ offered load, as of `octavo simulate`; None without a rate."""
        return 1 / self.utilisation if self.load.rate else None

    @property
    def saturated(self) -> bool:
        return self.utilisation >= 1

    @property
    def requests_per_second(self) -> float:
        return min(self.load.rate, self.saturation.requests_per_second)

    @property
    def tokens_per_second(self) -> float:
        return self.requests_per_second * self.load.outputs.mean

    @property
    def tokens_in_flight(self) -> float:
        """In the caches of those that run."""
        return self.spread.running * held_tokens(self.load)

    @property
    def ratio(self) -> float:
        """Continuous ÷ static, both saturated."""
        return self.saturation.requests_per_second / self.static.requests_per_second


def slowed(step: StepTime, times: float) -> StepTime:
    """Steps that take so many times as long."""

    def seconds(decoding: float, context: float, tokens: float, start: float) -> float:
        return times * step(decoding, context, tokens, start)

    return seconds


def held_tokens(load: Load) -> float:
    """In the cache of a request, mean over the steps in which it takes part."""
    steps = load.decodes + 1
    return (load.decodes * (load.context + 1) + load.prompts.mean) / steps


def batching(
    step: StepTime,
    load: Load,
    limits: EngineLimits = EngineLimits(),
    static_batch: int | None = None,
) -> Batching:
    """``static_batch``: sequences of a static batch; None: as many as may run together.

    Raises `ValueError` when not one sequence fits the cache, or not such a static batch.
    """
    saturation = _saturation(step, load, limits)
    if static_batch is not None and static_batch > limits.cached_seqs:
        raise ValueError(
            f"--static-batch {static_batch}: the cache holds {limits.cached_seqs:,.4g} sequences "
            f"of {held_tokens(load):,.0f} tokens"
        )
    static = _static(step, load, limits, static_batch or max(1, floor(saturation.running)))
    budget = limits.max_num_batched_tokens
    fixed = None
    if load.rate >= saturation.requests_per_second:
        spread = Occupancy(saturation.running, inf, 0.0, 1.0)
        mix = saturation.mix
        stays = mix.steps * saturation.step_seconds
        times = mix.times(step)
    else:
        through = _stays(step, saturation)
        fixed = _fixed_point(through, saturation)
        spread = _spread(through, saturation)
        mix = StepMix(load, max(1.0, spread.running), budget)
        times = mix.times(step)
        # Never less than a request alone, also where less than two fit the cache.
        stays = max(spread.running / load.rate, through[0]) if load.rate else through[0]
    reading = mix.reading(step)
    tpot = (stays - reading) / load.decodes if load.decodes else 0.0
    # The step under way ends first, then what earlier prompts have left over is read.
    busy = 1 - spread.idle
    joins = busy * times.square / times.mean / 2
    wait = spread.waiting / load.rate if load.rate else 0.0
    ttft = wait + joins + reading + busy * times.behind
    return Batching(load, limits, saturation, static, fixed, times.mean, spread, ttft, tpot)


def _saturation(step: StepTime, load: Load, limits: EngineLimits) -> SaturatedEngine:
    if limits.cached_seqs < 1:
        raise ValueError(
            f"the cache holds {limits.cached_seqs:.3g} sequences of {held_tokens(load):,.0f} tokens"
        )
    budget = limits.max_num_batched_tokens
    places: dict[Limit, float] = {"sequences": limits.max_num_seqs, "cache": limits.cached_seqs}
    limit: Limit = "sequences" if places["sequences"] <= places["cache"] else "cache"
    running = places[limit]
    mix = StepMix(load, running, budget)
    # Every output token but the first, and every prompt token, is one of a step's.
    if mix.begun * (load.decodes + load.prompts.mean) > budget:
        limit = "tokens"
        low, high = 0.0, running
        for _ in range(60):
            running = (low + high) / 2
            mix = StepMix(load, running, budget)
            if mix.begun * (load.decodes + load.prompts.mean) > budget:
                high = running
            else:
                low = running
    return SaturatedEngine(mix, limit, mix.times(step).mean)


def _stays(step: StepTime, saturation: SaturatedEngine) -> npt.NDArray[np.float64]:
    """[k - 1] seconds in which a request is through when k run, up to as many as may; a straight
    line between those that are computed.
    """
    mix = saturation.mix
    places = max(1, floor(saturation.running))
    nodes = np.unique(np.round(np.concatenate([[1, places], np.geomspace(1, places, _NODES)])))
    at = [StepMix(mix.load, float(node), mix.budget) for node in nodes]
    k = np.arange(1, places + 1)
    return np.interp(k, nodes, [each.steps * each.times(step).mean for each in at])


def _fixed_point(stays: npt.NDArray[np.float64], saturation: SaturatedEngine) -> StepMix | None:
    """running = rate · stay of one of running + 1, by bisection."""
    load, k = saturation.mix.load, np.arange(1, len(stays) + 1)

    def excess(running: float) -> float:
        return load.rate * float(np.interp(running + 1, k, stays)) - running

    low, high = 0.0, saturation.running - 1
    if not load.rate or high <= 0 or excess(high) > 0:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return StepMix(load, high, saturation.mix.budget)


def _spread(stays: npt.NDArray[np.float64], saturation: SaturatedEngine) -> Occupancy:
    """By the product over k of rate · stay of one of k / k."""
    load, places = saturation.mix.load, len(stays)
    k = np.arange(1, places + 1)
    factors = load.rate * stays / k
    # Where places are no whole number, what saturates is the same.
    factors[-1] = load.rate / saturation.requests_per_second
    with np.errstate(divide="ignore"):
        logs = np.concatenate([[0], np.cumsum(np.log(factors))])
    weights = np.exp(logs - logs.max())
    ratio = factors[-1]  # beyond the places, each requests more is as much less likely
    queue = weights[-1] * ratio / (1 - ratio)
    total = weights.sum() + queue
    running = (weights @ np.arange(places + 1) + places * queue) / total
    waiting = weights[-1] * ratio / (1 - ratio) ** 2 / total
    full = (weights[-1] + queue) / total
    return Occupancy(float(running), float(waiting), float(weights[0] / total), float(full))


def _static(step: StepTime, load: Load, limits: EngineLimits, size: int) -> Static:
    """All prompts are read, then all decode. Those that have ended leave nothing to compute, but
    their places stay empty.
    """
    outputs = load.outputs
    any_left = outputs.any_beyond(size)[1:]  # the first token is the prefill's
    left = size * outputs.beyond[1:]
    budget = limits.max_num_batched_tokens
    whole, rest = divmod(size * load.prompts.mean, budget)
    seconds = whole * step(0, 0, budget, StepMix(load, 0, budget).start)
    if rest:  # less than a token: one token, so often
        seconds += min(rest, 1.0) * step(0, 0, max(rest, 1.0), 0)
    steps = len(any_left)
    if steps:
        # Blocks of steps, in which all is nearly the same; the first ones are the shortest.
        edges = np.unique(np.concatenate([
            np.arange(min(steps, 64) + 1), np.geomspace(1, steps, 256).astype(np.int64), [steps]
        ]))  # fmt: skip
        for first, last in pairwise(edges):
            chance = float(any_left[first:last].sum())
            if chance <= 1e-12:
                break
            rows = float(left[first:last].sum()) / chance  # where there is one
            context = load.prompts.mean + (first + last - 1) / 2
            seconds += chance * step(rows, context, 0, 0)
    return Static(size, outputs.longest_of(size), seconds, size * outputs.mean)
