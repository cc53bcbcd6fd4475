"""What this machine takes for a model's steps, measured once and kept beside its limits.

A calibration belongs to a model's shape and formats (not to its numbers, which take no time), to
the cache's number format, to a machine, a number of threads, a tier and a build of the kernels; for
anything else there is none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple, Self

from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import LoadedEngine
from octavo.executor.cost import KNEES, Rates
from octavo.kv_cache.layout import KvLayout
from octavo.loader.base import Checkpoint, WeightFormat
from octavo.loader.pull import cache_dir
from octavo.loader.rounding import rounded
from octavo.machine.cpu import usable_cpus
from octavo.machine.limits import cpu_model, kernel_build, store
from octavo.machine.others import MUCH, Others
from octavo.models.families import program
from octavo.models.program import Program
from octavo.tools.plan.fitting import KindError, Observation, Slowness, fit, slowness
from octavo.tools.plan.observing import PROBE_SECONDS, SECONDS, Unobservable, observe, probe
from octavo.tools.plan.prediction import Prediction

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20  # of a stored file
_MEDIAN = 0.6745  # of the distances from the mean, in standard deviations, of a normal distribution
NOISY = 0.08  # median error of a step, above which others have been at work
OTHER = 1.4  # times as fast, or as slow: another machine than that of a calibration
OTHER_FORM = "it is of another version's cost model; run octavo calibrate again"


class CalibrationKey(NamedTuple):
    """What a calibration is of."""

    model: str  # digest of shape, formats, operations and routing
    cpu: str
    cores: int
    kernels: str  # build of the native module
    threads: int
    isa: str  # as asked for; empty: the best there is

    @classmethod
    def of(
        cls,
        program: Program,
        formats: Mapping[str, WeightFormat],
        groups: Mapping[str, int],
        layout: KvLayout,
        config: EngineConfig,
    ) -> Self:
        """Of a model as `config` would load it here. ``groups``: of grouped formats, by role."""
        shape = [
            (role, tuple(shape), formats[role].name, groups.get(role, 0))
            for role, shape in sorted(program.weights.items())
        ]
        model = program.config
        of_heads = model.num_heads, model.num_kv_heads, model.head_dim
        of_experts = model.experts and (model.experts.count, model.experts.chosen)
        windows = [group.window for group in layout.groups]
        cache = windows, layout.dtype, layout.block_size
        ops = [type(op).__name__ for op in program.ops]
        text = repr((shape, of_heads, of_experts, len(model.layers), ops, model.activation, cache))
        return cls(
            hashlib.sha256(text.encode()).hexdigest(),
            cpu_model(),
            usable_cpus()[0],
            kernel_build(),
            config.threads or usable_cpus()[0],
            os.environ.get("OCTAVO_ISA", "") if config.isa is None else config.isa,
        )

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, config: EngineConfig) -> Self:
        """Of a model before it is loaded: of its header."""
        if config.quantization is not None:
            checkpoint = rounded(checkpoint, config.quantization)
        layout = config.layout_of(checkpoint.config)
        return cls._of_weights(program(checkpoint.config), checkpoint, layout, config)

    @classmethod
    def loaded(cls, loaded: LoadedEngine) -> Self:
        executor = loaded.engine.executor
        compute = executor.costs.program
        return cls._of_weights(compute, loaded.checkpoint, executor.layout, loaded.config)

    @classmethod
    def _of_weights(
        cls, compute: Program, checkpoint: Checkpoint, layout: KvLayout, config: EngineConfig
    ) -> Self:
        weights = {role: checkpoint.weights[role] for role in compute.weights}
        formats = {role: weight.format for role, weight in weights.items()}
        groups = {role: weight.group for role, weight in weights.items()}
        return cls.of(compute, formats, groups, layout, config)

    @property
    def path(self) -> Path:
        digest = hashlib.sha256("\n".join(map(str, self)).encode()).hexdigest()[:16]
        return cache_dir() / "calibrations" / f"{digest}.json"


@dataclass(frozen=True, slots=True)
class Moment:
    """How fast the machine has been since, for a few seconds."""

    memory: float  # how many times as long reading takes as when calibrated
    processor: float  # the same of everything else
    date: str  # ISO 8601
    steps: int
    others: float = 0.0  # share of the processor that others took meanwhile

    @property
    def slowness(self) -> Slowness:
        return Slowness(self.memory, self.processor)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates fitted to a model's steps on this machine, and how well they predict."""

    name: str  # the model's
    key: CalibrationKey
    tier: str  # instruction set that ran
    date: str  # ISO 8601
    steps: int
    seconds: float  # that measuring took
    rates: Rates  # of a mean step
    held_up: float  # a mean step ÷ one that nobody held up
    deviations: dict[str, float]  # standard error of each parameter, as a share of it
    limits: Rates  # the machine's, in the same minute
    errors: tuple[KindError, ...]  # of steps that a fit has not seen, by kind
    error: float  # their median over all steps
    moment: Moment | None = None  # the last refresh
    others: float = 0.0  # share of the processor that others took while it was measured

    @property
    def current(self) -> Rates:
        """The rates, at the speed that the machine had last."""
        return self.rates if self.moment is None else self.rates.slowed(*self.moment.slowness)

    @property
    def noise(self) -> float:
        """Standard deviation of steps ÷ their prediction, as the median of the errors tells it."""
        return self.error / _MEDIAN

    @property
    def standing(self) -> str:
        """When and how well it was measured, and the speed of the machine that `current` is for."""
        measured = f"calibrated at {self.date}, when a step's median error was {self.error:.1%}"
        if self.others > MUCH:
            measured += f" and others took {self.others:.0%} of the processor"
        if self.moment is None:
            return f"{measured}; at the speed that the machine had then"
        return (
            f"{measured}; at the machine's speed of {self.moment.date}: memory took "
            f"{self.moment.memory:.2f} and the processor {self.moment.processor:.2f} times as long"
        )

    @property
    def disturbed(self) -> str:
        """What speaks against it: that others used the machine meanwhile; "": nothing."""
        found = []
        if self.others > MUCH:
            found.append(f"others took {self.others:.0%} of the processor meanwhile")
        if self.error > NOISY:
            found.append(f"a step's median error is {self.error:.0%}, on a quiet machine 1 to 3 %")
        return ", and ".join(found)

    def misfit(self, limits: Rates) -> str:
        """Why it no longer fits a machine of these limits; "": it does."""
        changes = {
            "reading memory": limits.bytes_per_second / self.limits.bytes_per_second,
            "arithmetic": limits.ops_per_second / self.limits.ops_per_second,
        }
        for what, change in changes.items():
            if not 1 / OTHER < change < OTHER:
                return (
                    f"{what} is {change:.2f} times as fast here as when it was calibrated: run "
                    "octavo calibrate again"
                )
        return ""

    @classmethod
    def measure(
        cls,
        loaded: LoadedEngine,
        *,
        seconds: float = SECONDS,
        seed: int = 0,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Run a scripted load on an idle engine and fit to its steps; under a minute.

        Raises `SettingsError` for an engine that speculates or has no prefix cache, and for one
        that cannot run the load or shows too little of itself.
        """
        check_settings(loaded.config)
        executor = loaded.engine.executor
        start, others = time.perf_counter(), Others()
        progress("measuring the machine's limits")
        limits = executor.measure_limits()
        roof = limits.rates(executor.threads, loaded.weight_bytes)
        observations = _observed(
            lambda: observe(loaded.engine, seconds=seconds, seed=seed, progress=progress)
        )
        progress("fitting")
        try:
            fitted = fit(executor.costs, observations, roof, executor.threads)
        except ValueError as error:
            raise SettingsError(f"cannot be calibrated: {error}") from None
        return cls(
            loaded.checkpoint.config.name or loaded.checkpoint.path.name,
            CalibrationKey.loaded(loaded),
            executor.capabilities.tier,
            datetime.now(UTC).isoformat(timespec="seconds"),
            len(observations),
            time.perf_counter() - start,
            fitted.rates,
            fitted.held_up,
            fitted.deviations,
            roof,
            fitted.errors,
            fitted.error,
            others=_share(others),
        )

    def refreshed(
        self, loaded: LoadedEngine, *, seconds: float = PROBE_SECONDS, seed: int = 0
    ) -> Self:
        """The same with how fast the machine is now, from some seconds of a light load on the idle
        engine that it is of. Raises as `measure`.
        """
        check_settings(loaded.config)
        executor = loaded.engine.executor
        others = Others()
        steps = _observed(lambda: probe(loaded.engine, seconds=seconds, seed=seed))
        slow = slowness(executor.costs, steps, self.rates, self.held_up)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return replace(self, moment=Moment(*slow, date, len(steps), _share(others)))

    @classmethod
    def of_engine(cls, loaded: LoadedEngine) -> Self | None:
        """What is stored for it."""
        return cls.load(CalibrationKey.loaded(loaded))

    def prediction(self, loaded: LoadedEngine) -> Prediction:
        """An observer that compares the engine's steps with this."""
        executor = loaded.engine.executor
        return Prediction(loaded.engine, executor.costs, self.current)

    # Keeping it

    def as_dict(self) -> dict[str, Any]:
        """For JSON, strictly."""
        rates = {"rates": self.rates.as_dict(), "limits": self.limits.as_dict()}
        return asdict(self) | rates | {"key": self.key._asdict()}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Raises `ValueError` for what is not `as_dict`'s."""
        try:
            values = dict(data)
            needed = {field.name for field in fields(cls)} - {"others"}
            if set(values) - {"others"} != needed:
                raise ValueError(OTHER_FORM)
            values["key"] = CalibrationKey(**values["key"])
            values["errors"] = tuple(KindError(**error) for error in values["errors"])
            if values["moment"] is not None:
                values["moment"] = Moment(**values["moment"])
            values["deviations"] = {str(k): float(v) for k, v in values["deviations"].items()}
            for name in ("rates", "limits"):
                values[name] = _rates(values[name])
            found = cls(**values)
            _check(found)
            return found
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a calibration: {error}") from error

    def save(self) -> Path:
        """Store it under its key; returns the file."""
        path = self.key.path
        store(path, self.as_dict())
        return path

    @classmethod
    def load(cls, key: CalibrationKey) -> Self | None:
        """What is stored for it; None, with a warning if that is unreadable."""
        path = key.path
        try:
            with path.open("rb") as file:
                text = file.read(_MOST_BYTES)
            calibration = cls.from_dict(json.loads(text))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the stored calibration is unreadable: %s: %s", path, error)
            return None
        return calibration if calibration.key == key else None


def _share(others: Others) -> float:
    taken = others.taken()
    return 0.0 if taken is None else taken.share


def check_settings(config: EngineConfig) -> None:
    """Raises `SettingsError` for an engine that cannot be calibrated."""
    if config.speculation is not None:
        raise SettingsError("speculation changes what a step is: calibrate without it")
    if not config.enable_prefix_caching:
        raise SettingsError("steps are timed from cached prompts: prefix caching must be on")


def _observed(observing: Callable[[], list[Observation]]) -> list[Observation]:
    try:
        return observing()
    except Unobservable as error:
        raise SettingsError(f"the engine cannot run the load: {error}") from None


_MOST = 1e6  # seconds, steps' shares of each other


def _check(found: Calibration) -> None:
    """Raises `ValueError` for a field of another kind, or that no measurement can give."""
    for name in ("name", "tier", "date"):
        _check_text(name, getattr(found, name))
    datetime.fromisoformat(found.date)
    _check_count("steps", found.steps)
    for name in ("seconds", "error"):
        _check_figure(name, getattr(found, name))
    _check_figure("held_up", found.held_up, *_CHANGE)
    _check_figure("others", found.others)
    if found.moment is not None:
        datetime.fromisoformat(found.moment.date)
        _check_count("steps", found.moment.steps)
        _check_figure("others", found.moment.others)
        for name in Slowness._fields:
            _check_figure(name, getattr(found.moment, name), *_CHANGE)
    for name, value in found.deviations.items():
        _check_text("a deviation's name", name)
        _check_figure(f"the deviation of {name}", value)
    for each in found.errors:
        _check_text("kind", each.kind)
        _check_count("steps", each.steps)
        _check_figure("seconds", each.seconds)
        _check_figure("bias", each.bias, -1.0)
        _check_figure("error", each.error)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
        raise ValueError(f"{name} is {value!r:.60}, not a line of text")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= 10**9:
        raise ValueError(f"{name} is {value!r:.60}, not a number of steps")


def _check_figure(name: str, value: object, least: float = 0.0, most: float = _MOST) -> None:
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r:.60}, not from {least:g} to {most:g}")


_CHANGE = 1e-2, 1e2  # of a machine's speed, at most
# What a machine can have: a byte a second, to a thousand times the fastest there are.
_RANGES = {
    "per_second": (1.0, 1e18),
    "overhead": (0.0, 60.0),
    "unpacking": (0.0, 1e3),
    "threads": (0, 1 << 16),
}


def _rates(values: Any) -> Rates:
    """Raises `ValueError` for what no measurement can give. A knee may be infinite: null, or as
    Python writes it.
    """
    names = [field.name for field in fields(Rates)]
    if list(values) != names:
        raise ValueError(OTHER_FORM)
    values = values | {name: inf for name in KNEES if values[name] is None}
    for name, value in values.items():
        known = type(value) in (int, float) and (isfinite(value) or name in KNEES)
        if not known and value is not None:
            raise ValueError(f"{name} is {value!r:.60}, not a number")
        for end, (least, most) in _RANGES.items():
            if value is not None and name.endswith(end):
                _check_figure(name, value, least, most)
    return Rates(**values)
