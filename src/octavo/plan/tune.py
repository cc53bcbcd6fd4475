"""The settings of an engine that keep an SLO for the most requests a second, by simulation.

Every trial is the engine itself on a cost model, under the load (or a stretch of it). The settings
are discrete, so the search is, and it has no randomness: the same load and device give the same
answer.

1. *Successive halving* (Jamieson and Talwalkar, 2016) of a coarse grid: all its settings under a
   short stretch of the load, the busiest; the better quarter under a stretch four times as long;
   and so on to the whole load.
2. *Coordinate descent* on the whole load: from the best, one setting after the other is moved a
   step up or down as long as that is better, until no single step is.

A trial costs what it has simulated: one under a tenth of the load is a tenth of a trial.

Which is better: first a setting that keeps the SLO and keeps up with the load; of others the one
with more goodput (what differs by less than about 1 % is alike). Those that keep the SLO have all
the goodput that the load has to give, up to how soon the last answers end, and are not told apart
by it. Then the setting that rounds fewer numbers; then the lower latency (alike: about 5 %), which
is the 99th percentile nearest to its limit; then what is nearer to the engine's defaults. Where no
request is good latency comes before rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product

from octavo.checkpoint.base import WeightFormat
from octavo.checkpoint.rounding import BLOCK, FLOATS, QUANTIZATIONS
from octavo.engine.load import CachePlan, DoesNotFit, EngineConfig, SettingsError
from octavo.execute.cost import Rates
from octavo.plan.hardware import Device
from octavo.plan.quantization import Stored, as_stored, held, in_scheme
from octavo.plan.saturation import saturation
from octavo.plan.schemes import scheme
from octavo.plan.simulation import Setup, simulate, weights_on
from octavo.plan.slo import Figures, Slo
from octavo.plan.subject import Subject, part
from octavo.speculate.config import SpeculativeConfig
from octavo.workload.datasets import Sample

AS_IT_PAYS = "as it pays"
KEEP = 4  # of so many settings one goes on to a stretch so many times as long
SHORTEST = 48  # requests of a stretch
SLOW = 20.0  # seconds of a trial from which one is told what to expect
LASTING = 4  # median times of an answer that a load lasts at least
GOODPUT_GRAIN, LATENCY_GRAIN = math.log(1.01), math.log(1.05)
ROUNDS = ("kv_cache_dtype", "quantization")  # the settings that round numbers
LOSS = {"auto": 0, "bf16": 0, "fp16": 0, None: 0, "int8": 1, "int4": 2}  # of rounding


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """A point of the search."""

    max_num_seqs: int
    max_num_batched_tokens: int
    memory: float  # share of what weights and work space leave that is KV cache
    kv_cache_dtype: str
    quantization: str  # "none": as stored
    speculation: str = "off"  # "as it pays", or tokens of a draft

    @property
    def loss(self) -> int:
        """How many numbers are rounded how far."""
        return LOSS[self.kv_cache_dtype] + LOSS[self.config_quantization]

    @property
    def config_quantization(self) -> str | None:
        return None if self.quantization == "none" else self.quantization


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched: the values of each setting, ascending, and the engine's defaults."""

    axes: Mapping[str, tuple[int | float | str, ...]]  # by field of Choice
    default: Choice

    def __post_init__(self) -> None:
        for axis in fields(Choice):
            values = self.axes[axis.name]
            if getattr(self.default, axis.name) not in values:
                raise ValueError(f"the default {axis.name} is none of {values}")

    def coarse(self) -> Iterator[Choice]:
        """The ends of each axis, and the default; of memory, which seldom matters, the default; of
        speculation the first two.
        """
        some = []
        for name, values in self.axes.items():
            default = self._default(name)
            kept = {values[0], values[-1], default}
            if name == "memory":
                kept = {default}
            elif name == "speculation":
                kept = {*values[:2], default}
            some.append([value for value in values if value in kept])
        for values in product(*some):
            yield self._choice(values)

    def all(self) -> Iterator[Choice]:
        for values in product(*self.axes.values()):
            yield self._choice(values)

    def _choice(self, values: Sequence[int | float | str]) -> Choice:
        return Choice(**dict(zip(self.axes, values, strict=True)))  # type: ignore[arg-type]

    def _default(self, name: str) -> int | float | str:
        value: int | float | str = getattr(self.default, name)
        return value

    def step(self, choice: Choice, name: str, by: int) -> Choice | None:
        """The next value of one axis; None past its end."""
        values = self.axes[name]
        at = values.index(getattr(choice, name)) + by
        if not 0 <= at < len(values):
            return None
        return replace(choice, **{name: values[at]})  # type: ignore[arg-type]

    def distance(self, choice: Choice) -> int:
        """Steps from the default."""
        return sum(
            abs(values.index(getattr(choice, name)) - values.index(self._default(name)))
            for name, values in self.axes.items()
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """A choice under the whole load or a part of it."""

    choice: Choice
    config: EngineConfig  # that `octavo serve` would be given
    plan: CachePlan
    figures: Figures
    preemptions: int
    saturated: bool  # requests come faster than they are served
    refusal: str  # why the first request that was not served was not; "": all were


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the search found. Trials are of the whole load, in the order they were made."""

    best: Trial
    default: Trial | None  # None: the engine's defaults do not fit
    trials: list[Trial]
    exact: Trial | None  # the best of those that round no number further; None: none was tried
    impossible: dict[Choice, str]  # why a choice cannot be
    short_trials: int  # under a stretch of the load
    cost: float  # in trials of the whole load
    stopped: str | None  # why the search ended before it had nothing left to try
    frontier: list[Trial]


Report = Callable[[str], None]


class Search:
    """The one search: settings of ``base`` that are not searched stay as they are.

    ``trials``: how much to simulate, in runs of the whole load; ``seconds``: how long (then the
    answer depends on this machine's pace); ``acceptance``: how often a guess is right, where the
    space has speculation; ``report`` is told of every trial, ``watch`` of every request that has
    ended in one. Raises `DoesNotFit` if nothing fits.
    """

    def __init__(
        self,
        subject: Subject,
        device: Device,
        samples: Sequence[Sample],
        slo: Slo,
        space: Space,
        base: EngineConfig,
        *,
        trials: float = 40,
        seconds: float = math.inf,
        seed: int = 0,
        acceptance: float | None = None,
        report: Report = lambda _: None,
        watch: Report = lambda _: None,
    ) -> None:
        self.subject, self.device, self.samples, self.slo = subject, device, samples, slo
        self.space, self.base, self.seed, self.report = space, base, seed, report
        self.watch = watch
        self.acceptance = acceptance
        self._allowed, self._deadline = trials, time.monotonic() + seconds
        self._weights: dict[str, Stored] = {}
        self._setups: dict[Choice, tuple[Setup, CachePlan] | str] = {}
        self._whole: dict[Choice, Trial] = {}
        self.cost = 0.0
        self.short_trials = 0
        self._stopped: str | None = None

    @property
    def arrival_rate(self) -> float:
        """Requests a second, from the start to the last arrival; inf: all at once."""
        seconds = max(sample.arrival or 0.0 for sample in self.samples)
        return len(self.samples) / seconds if seconds else math.inf

    # What is better

    def merit(self, trial: Trial) -> tuple[float, ...]:
        """More is better. A total order, so that a search can be repeated."""
        figures, choice = trial.figures, trial.choice
        pressure = figures.pressure(self.slo)
        near = _grain(pressure, LATENCY_GRAIN)
        last = (-self.space.distance(choice), -pressure)
        if not figures.good:
            return (-math.inf, -near, -choice.loss, *last)
        if self.arrival_rate < math.inf and not trial.saturated and met(figures, self.slo):
            return (math.inf, -choice.loss, -near, *last)
        return (_grain(figures.goodput, GOODPUT_GRAIN), -choice.loss, -near, *last)

    # A trial

    def setup(self, choice: Choice) -> tuple[Setup, CachePlan] | str:
        """How a choice would be served, or why it cannot be."""
        if choice not in self._setups:
            try:
                self._setups[choice] = self._setup(choice)
            except ValueError as error:
                self._setups[choice] = str(error)
        return self._setups[choice]

    def _setup(self, choice: Choice) -> tuple[Setup, CachePlan]:
        if choice.max_num_batched_tokens < choice.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {choice.max_num_batched_tokens} is below max_num_seqs "
                f"{choice.max_num_seqs}"
            )
        quantization = choice.config_quantization
        if choice.quantization not in self._weights:
            self._weights[choice.quantization] = weights(self.subject, quantization, self.device)
        config = replace(
            self.base,
            max_num_seqs=choice.max_num_seqs,
            max_num_batched_tokens=choice.max_num_batched_tokens,
            memory_utilization=choice.memory,
            kv_cache_dtype=choice.kv_cache_dtype,
            quantization=quantization,
            speculative_config=self._speculation(choice),
        )
        setup = Setup(
            self.subject,
            self._weights[choice.quantization],
            self.device,
            config,
            acceptance=None if choice.speculation == "off" else self.acceptance,
            uncalibrated=self._carried,
        )
        plan, _ = setup.plan()
        # By its size the cache has as many blocks wherever it is started; a share would not.
        pinned = replace(
            config,
            kv_cache_memory_bytes=plan.kv_cache_bytes,
            memory_utilization=EngineConfig().memory_utilization,
        )
        setup = replace(setup, config=pinned)
        return setup, setup.plan()[0]

    def _speculation(self, choice: Choice) -> SpeculativeConfig | None:
        """With the method of ``base``, or n-grams."""
        if choice.speculation == "off":
            return None
        count = None if choice.speculation == AS_IT_PAYS else int(choice.speculation)
        method = self.base.speculation or SpeculativeConfig(method="ngram")
        return replace(method, num_speculative_tokens=count)

    @cached_property
    def _carried(self) -> Rates | None:
        """The rates that were calibrated for the default formats, for those that nobody has
        calibrated: on the machine's limits alone they would always win. None: there are none.
        """
        if not self.device.measured:
            return None
        config = replace(self.base, speculative_config=None)
        stored = weights(self.subject, self.space.default.config_quantization, self.device)
        found = Setup(self.subject, stored, self.device, config).calibration()
        return None if found is None else found.rates

    def basis(self, choice: Choice) -> str:
        """What the predictions for a choice that can be rest on."""
        found = self.setup(choice)
        assert not isinstance(found, str)
        return found[0].basis()

    def run(self, choice: Choice, samples: Sequence[Sample]) -> Trial | None:
        """The samples put through the engine of that choice; None where it cannot be."""
        found = self.setup(choice)
        if isinstance(found, str):
            return None
        setup, plan = found
        count = len(samples)
        done = simulate(
            setup,
            samples,
            seed=self.seed,
            progress=lambda ended: self.watch(
                f"{describe(choice)}: {ended} of {count} requests have ended"
            ),
        )
        self.cost += len(samples) / len(self.samples)
        records = done.replay.records
        return Trial(
            choice,
            setup.config,
            plan,
            Figures.of(records, done.replay.duration, self.slo),
            done.engine.stats().preemptions,
            saturation(records, done.series).saturated,
            next((record.detail for record in records if record.reason), ""),
        )

    def try_whole(self, choice: Choice) -> Trial | None:
        """Under the whole load, once; None where it cannot be or the budget is spent."""
        if choice not in self._whole and not self._over():
            trial = self.run(choice, self.samples)
            if trial is not None:
                self._whole[choice] = trial
                self._tell(choice)
        return self._whole.get(choice)

    def _in_time(self) -> bool:
        return time.monotonic() <= self._deadline

    def _over(self) -> bool:
        if self.cost + 1 > self._allowed:
            self._stopped = self._stopped or f"{self._allowed:g} trials were made"
        elif not self._in_time():
            self._stopped = self._stopped or "the time was up"
        return self._stopped is not None

    def _tell(self, choice: Choice) -> None:
        best = max(self._whole.values(), key=self.merit)
        self.report(
            f"{self.cost:.1f} of {self._allowed:g} trials: {describe(choice)}: "
            f"{self._whole[choice].figures.goodput:.4g} good requests/s; best so far "
            f"{best.figures.goodput:.4g} ({describe(best.choice)})"
        )

    # The search

    def search(self) -> Tuned:
        started = time.monotonic()
        default = self.try_whole(self.space.default)
        if (each := time.monotonic() - started) > SLOW:
            self.report(
                f"a trial of all {len(self.samples)} requests takes {each:.0f} s here, and there "
                f"may be {self._allowed:g}: fewer with --trials or --max-seconds, or a part of the "
                "load with --trace-duration"
            )
        candidates = [choice for choice in self.space.coarse() if self._possible(choice)]
        if not candidates:
            candidates = [choice for choice in self.space.all() if self._possible(choice)]
        if not candidates:
            reason = self.setup(self.space.default)
            assert isinstance(reason, str)
            raise DoesNotFit(f"no setting fits {self.device.name}; the default: {reason}")
        for choice in self._halved(candidates):
            self.try_whole(choice)
        if not self._whole:
            raise SettingsError(
                f"no trial could be made, {self._stopped}: allow more with --trials or "
                "--max-seconds"
            )
        self._descend(self.space.axes)
        best = max(self._whole.values(), key=self.merit)
        if best.choice.loss:  # then what can be had without is of interest, too
            self._descend([name for name in self.space.axes if name not in ROUNDS], exact=True)
        trials = list(self._whole.values())
        return Tuned(
            max(trials, key=self.merit),
            default,
            trials,
            max((trial for trial in trials if not trial.choice.loss), key=self.merit, default=None),
            {choice: why for choice, why in self._setups.items() if isinstance(why, str)},
            self.short_trials,
            self.cost,
            self._stopped,
            frontier(trials, self.slo),
        )

    def _possible(self, choice: Choice) -> bool:
        return not isinstance(self.setup(choice), str)

    def _halved(self, candidates: list[Choice]) -> list[Choice]:
        """The better ones, under longer and longer stretches, best first: to be tried in whole."""
        count = len(self.samples)
        # What even the shortest stretches of would cost too much: those nearest to the default.
        most = max(KEEP, int(self._allowed / 3 * count / min(SHORTEST, count)))
        candidates = sorted(candidates, key=self.space.distance)[:most]
        while len(candidates) > KEEP:
            # Each stretch may cost a sixth of what may be spent in all.
            share = self._allowed / 6 / len(candidates)
            length = max(min(SHORTEST, count), int(count * share))
            if length >= count:
                break
            stretch = busiest(self.samples, length)
            tried = []
            for index, choice in enumerate(candidates):
                if not self._in_time():
                    self._stopped = "the time was up"
                    break
                self.report(
                    f"{index + 1} of {len(candidates)} settings under the busiest {length} of "
                    f"{count} requests: {describe(choice)}"
                )
                trial = self.run(choice, stretch)
                if trial is not None:
                    tried.append(trial)
                    self.short_trials += 1
            if not tried:
                break
            tried.sort(key=self.merit, reverse=True)
            candidates = [trial.choice for trial in tried[: -(-len(tried) // KEEP)]]
        return candidates

    def _descend(self, names: Iterable[str], *, exact: bool = False) -> None:
        """From the best, along these axes; ``exact``: from the best that rounds no number."""
        start = [trial for trial in self._whole.values() if not (exact and trial.choice.loss)]
        if not start:
            return
        best = max(start, key=self.merit)
        improved = True
        while improved:
            improved = False
            for name in names:
                for by in (-1, 1):
                    while (near := self.space.step(best.choice, name, by)) is not None:
                        trial = self.try_whole(near)
                        if trial is None or self.merit(trial) <= self.merit(best):
                            break
                        best, improved = trial, True

    # Other loads

    def sustained(self, trial: Trial) -> list[tuple[float, Figures]]:
        """The same engine under the load at other speeds, ascending, to find where it no longer
        keeps the SLO: doubled or halved until that changes, then five bisections. Arrivals at
        speed 2 come in half the time; faster than that they last for `LASTING` answers it is a
        burst and no load. Empty where all come at once.
        """
        found = {1.0: trial.figures}
        if math.isinf(self.arrival_rate):
            return []
        if trial.figures.completed < self.slo.attainment * trial.figures.requests:
            return list(found.items())  # what is refused is refused at any speed
        answer = trial.figures.latencies["e2el"].p50 / 1e3
        most = min(64.0, len(self.samples) / self.arrival_rate / (LASTING * answer))

        def kept(speed: float) -> bool:
            if speed not in found:
                self.report(f"the best setting under {speed:.3g} times the load")
                faster = [
                    replace(sample, arrival=(sample.arrival or 0.0) / speed)
                    for sample in self.samples
                ]
                other = self.run(trial.choice, faster)
                assert other is not None
                found[speed] = other.figures
            return met(found[speed], self.slo)

        low = high = 1.0
        if kept(1.0):
            while 2 * high <= most and kept(high) and self._in_time():
                low, high = high, 2 * high
        else:
            while low > 1 / 64 and not kept(low) and self._in_time():
                low, high = low / 2, low
        if self._in_time() and kept(low) and not kept(high):
            for _ in range(5):
                if not self._in_time():
                    break
                middle = math.sqrt(low * high)
                low, high = (middle, high) if kept(middle) else (low, middle)
        return sorted(found.items())


def met(figures: Figures, slo: Slo) -> bool:
    return figures.attainment >= slo.attainment


def describe(choice: Choice) -> str:
    """For a line of progress."""
    parts = [
        f"{choice.max_num_seqs} seqs",
        f"{choice.max_num_batched_tokens} tokens",
        f"{100 * choice.memory:g} % kv {choice.kv_cache_dtype}",
    ]
    if choice.quantization != "none":
        parts.append(choice.quantization)
    if choice.speculation != "off":
        parts.append(f"drafts {choice.speculation}")
    return ", ".join(parts)


def _grain(value: float, width: float) -> float:
    if value <= 0 or math.isinf(value):
        return math.inf if value > 0 else -math.inf
    return float(round(math.log(value) / width))


def frontier(trials: Sequence[Trial], slo: Slo) -> list[Trial]:
    """The trials that no other beats: with as many output tokens a second, and no 99th percentile
    of the SLO's latencies higher, and better in one of them. By throughput, highest first; of
    trials that are alike the first.
    """

    def costs(trial: Trial) -> tuple[float, ...]:
        figures = trial.figures
        values = (figures.output_throughput, *(figures.latencies[name].p99 for name in slo.limits))
        rounded = [float(f"{value:.4g}") for value in values]  # no difference that means nothing
        return (-rounded[0], *rounded[1:])

    kept: list[Trial] = []
    for trial in sorted(trials, key=costs):
        mine = costs(trial)
        if not any(all(a <= b for a, b in zip(costs(k), mine, strict=True)) for k in kept):
            kept.append(trial)
    return kept


def busiest(samples: Sequence[Sample], length: int) -> list[Sample]:
    """The ``length`` samples in a row with the most tokens a second, from time 0 on."""

    def rate(first: int) -> float:
        tokens = total[first + length] - total[first]
        return tokens / max((arrivals[first + length - 1] - arrivals[first]), 1e-9)

    arrivals = [sample.arrival or 0.0 for sample in samples]
    total = [0]
    for sample in samples:
        total.append(total[-1] + sample.prompt_len + sample.output_len)
    first = max(range(len(samples) - length + 1), key=rate)
    return [
        replace(sample, arrival=(sample.arrival or 0.0) - arrivals[first])
        for sample in samples[first : first + length]
    ]


# --- what there is to choose ---------------------------------------------------------------------


def space(
    subject: Subject,
    device: Device,
    given: Mapping[str, object],
    *,
    memory: float,
    tokens: int,
    lossless: bool = False,
    acceptance: float | None = None,
) -> Space:
    """All settings that this model can be served with there. ``given``: those of `EngineConfig`
    that are not to be searched; ``memory`` and ``tokens``: the defaults of that device; speculation
    is searched where an ``acceptance`` is given, the method of ``given`` or n-grams.
    """
    measured = device.measured
    seqs = _powers(4, 256 if measured else 1024)
    budgets = _powers(64, 4096 if measured else 16384)
    axes: dict[str, tuple[int | float | str, ...]] = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budgets,
        "memory": (0.25, 0.5, 0.9),
        "kv_cache_dtype": ("auto", "int8", "int4"),
        "quantization": quantizations(subject),
        "speculation": ("off",),
    }
    if acceptance is not None:
        axes["speculation"] = ("off", AS_IT_PAYS, "1", "2", "4", "8")
    if lossless:
        axes |= {"kv_cache_dtype": ("auto",), "quantization": ("none",)}
    default: dict[str, int | float | str] = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": tokens,
        "memory": memory,
        "kv_cache_dtype": "auto",
        "quantization": "none",
        "speculation": "off",
    }
    renamed = {"memory_utilization": "memory"}
    for name, value in given.items():
        axis = renamed.get(name, name)
        if axis not in axes:
            continue
        assert isinstance(value, int | float | str)
        if axis == "quantization" and value not in quantizations(subject):
            raise ValueError(
                f"--quantization {value} is for float weights, and these are quantized already"
            )
        axes[axis], default[axis] = (value,), value
    if given.get("kv_cache_memory_bytes") is not None:
        axes["memory"] = (default["memory"],)  # which does not count then
    # What is given for one of the two bounds what the other's default may be.
    if "max_num_seqs" in given and "max_num_batched_tokens" not in given:
        least = int(default["max_num_seqs"])
        axes["max_num_batched_tokens"] = tuple(b for b in budgets if b >= least) or (least,)
        default["max_num_batched_tokens"] = max(tokens, int(axes["max_num_batched_tokens"][0]))
    if "max_num_batched_tokens" in given and "max_num_seqs" not in given:
        most = int(default["max_num_batched_tokens"])
        axes["max_num_seqs"] = tuple(s for s in seqs if s <= most) or (most,)
        default["max_num_seqs"] = min(256, int(axes["max_num_seqs"][-1]))
    return Space(axes, Choice(**default))  # type: ignore[arg-type]


def _powers(low: int, high: int) -> tuple[int, ...]:
    return tuple(1 << bit for bit in range(low.bit_length() - 1, high.bit_length()))


def quantizations(subject: Subject) -> tuple[str, ...]:
    """What `octavo serve --quantization` takes for it: a file of rounded numbers is served as it
    is.
    """
    stored = subject.stored
    matrices = subject.matrices()
    if stored is not None and any(stored[role].format not in FLOATS for role in matrices):
        return ("none",)
    return ("none", *QUANTIZATIONS)


def weights(subject: Subject, quantization: str | None, device: Device) -> Stored:
    """As `weights_on` has them, rounded as `octavo serve --quantization` does. Raises `ValueError`
    for what the engine cannot hold.
    """
    if quantization is None:
        return weights_on(device, subject)
    bf16 = scheme("bf16")
    stored = _rounded(subject, as_stored(subject) or in_scheme(subject, bf16, bf16), quantization)
    if not device.measured:
        return stored
    sizes = held(subject, stored)
    if sizes is None:
        raise ValueError(f"the engine cannot hold the weights in {quantization}")
    return stored._replace(sizes=sizes)


def _rounded(subject: Subject, stored: Stored, quantization: str) -> Stored:
    """As checkpoint/rounding.py does while loading."""
    layers, heads = QUANTIZATIONS[quantization]
    formats, sizes, groups = dict(stored.formats), dict(stored.sizes), dict(stored.groups)
    for role, shape in subject.program.weights.items():
        if len(shape) != 2 or shape[1] % BLOCK or role.endswith("ffn_gate_inp"):
            continue
        own = heads if part(role) in ("embedding", "head") else layers
        rows, columns = shape
        formats[role] = own.format
        groups[role] = min(own.group, columns)
        bits = 8 if own.format is WeightFormat.I8 else 4
        sizes[role] = rows * (5 * -(-columns // groups[role]) + columns * bits // 8)
    return Stored(quantization, formats, sizes, None, groups)
