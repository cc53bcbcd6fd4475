"""A stored calibration: how long this machine takes for a model's steps.

`octavo calibrate` measures it (tools/plan/calibrating.py). A calibration belongs to a model's shape
and formats (not to its numbers, which take no time), to the cache's number format, to a machine, a
number of threads, a tier and a build of the kernels; for anything else there is none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine, Step
from octavo.engine.load import LoadedEngine
from octavo.executor.cost import KNEES, Rates
from octavo.kv_cache.layout import KvLayout
from octavo.loader.base import Checkpoint, WeightFormat
from octavo.loader.rounding import rounded
from octavo.machine.cpu import usable_cpus
from octavo.machine.limits import cpu_model, kernel_build, store, stored_path
from octavo.machine.others import MUCH
from octavo.models.families import program
from octavo.models.program import Program
from octavo.scheduler.request import RequestRecord

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20  # of a stored file
_GAIN = 0.02  # of a step, in the running ratio
_MEDIAN = 0.6745  # of the distances from the mean, in standard deviations, of a normal distribution
# What a stored file may hold.
Text = Annotated[str, Meta(max_length=1000, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
Count = Annotated[int, Meta(ge=0, le=10**9)]
Figure = Annotated[float, Meta(ge=0, le=1e6)]  # seconds, or a share
Change = Annotated[float, Meta(ge=1e-2, le=1e2)]  # of a machine's speed
# What a machine can have: a byte a second, to a thousand times the fastest there are.
_RANGES = {
    "per_second": (1.0, 1e18),
    "overhead": (0.0, 60.0),
    "unpacking": (0.0, 1e3),
    "threads": (0, 1 << 16),
}
OTHER_FORM = "it is of another version's cost model; run octavo calibrate again"


@dataclass(frozen=True, slots=True)
class CalibrationKey:
    """What a calibration is valid for."""

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
        """Return the key of a model as `config` would load it here. ``groups``: of grouped formats,
        by role.
        """
        shape = [
            (role, tuple(shape), formats[role].name, groups.get(role, 0))
            for role, shape in sorted(program.weights.items())
        ]
        model = program.config
        of_heads = model.num_heads, model.num_kv_heads, model.head_dim
        of_experts = model.experts and (model.experts.count, model.experts.chosen)
        windows = [
            group.window
            if (group.kv_heads, group.head_dim) == of_heads[1:]
            else (group.window, group.kv_heads, group.head_dim)
            for group in layout.groups
        ]
        cache: tuple[object, ...] = windows, layout.dtype, layout.block_size
        if layout.state is not None:
            cache = *cache, [layer.recurrence for layer in model.layers]
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
        """Return the key of a model that is not loaded, from its header."""
        if config.quantization is not None:
            checkpoint = rounded(checkpoint, config.quantization)
        compute = program(checkpoint.config)
        weights = {role: checkpoint.weights[role] for role in compute.weights}
        formats = {role: weight.format for role, weight in weights.items()}
        groups = {role: weight.group for role, weight in weights.items()}
        return cls.of(compute, formats, groups, config.layout_of(checkpoint.config), config)

    @classmethod
    def loaded(cls, loaded: LoadedEngine) -> Self:
        # Its checkpoint is rounded already.
        return cls.of_checkpoint(loaded.checkpoint, replace(loaded.config, quantization=None))

    @property
    def path(self) -> Path:
        return stored_path("calibrations", *astuple(self))


@dataclass(frozen=True, slots=True)
class KindError:
    """How well steps of a kind are predicted by a fit that has not seen them."""

    kind: Text
    steps: Count
    seconds: Figure  # the median
    bias: Annotated[float, Meta(ge=-1, le=1e6)]  # median of predicted ÷ observed, less 1
    error: Figure  # median of its distance from 1


@dataclass(frozen=True, slots=True)
class Moment:
    """How fast the machine has been since, for a few seconds."""

    memory: Change  # how many times as long reading takes as when calibrated
    processor: Change  # the same of everything else
    date: str  # ISO 8601
    steps: Count
    others: Figure = 0.0  # share of the processor that others took meanwhile


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates fitted to a model's steps on this machine, and how well they predict."""

    name: Text  # the model's
    key: CalibrationKey
    tier: Text  # instruction set that ran
    date: str  # ISO 8601
    steps: Count
    seconds: Figure  # that measuring took
    rates: Rates  # of a mean step
    held_up: Change  # a mean step ÷ one that nothing held up
    deviations: dict[Text, Figure]  # standard error of each parameter, as a share of it
    limits: Rates  # the machine's, in the same minute
    errors: tuple[KindError, ...]  # of steps that a fit has not seen, by kind
    error: Figure  # their median over all steps
    moment: Moment | None = None  # the last refresh
    others: Figure = 0.0  # share of the processor that others took while it was measured

    @property
    def current(self) -> Rates:
        """The rates, at the speed that the machine had last."""
        moment = self.moment
        return self.rates if moment is None else self.rates.slowed(moment.memory, moment.processor)

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

    @classmethod
    def of_engine(cls, loaded: LoadedEngine) -> Self | None:
        """Return what is stored for an engine."""
        return cls.load(CalibrationKey.loaded(loaded))

    # Keeping it

    def as_dict(self) -> dict[str, Any]:
        """Return it for strict JSON."""
        return asdict(self) | {"rates": self.rates.as_dict(), "limits": self.limits.as_dict()}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Read what `as_dict` wrote. Raise `ValueError` for anything else."""
        try:
            names = {field.name for field in fields(cls)}
            if set(data) | {"others"} != names:
                raise ValueError(OTHER_FORM)
            rates = {name: _read_rates(data[name]) for name in ("rates", "limits")}
            found = msgspec.convert(data | rates, cls)
            for dated in (found, found.moment):
                if dated is not None:
                    datetime.fromisoformat(dated.date)
            return found
        except (TypeError, KeyError, AttributeError, ValueError, msgspec.MsgspecError) as error:
            raise ValueError(f"not a calibration: {error}") from error

    def save(self) -> Path:
        """Store it under its key; return the file."""
        path = self.key.path
        store(path, self.as_dict())
        return path

    @classmethod
    def load(cls, key: CalibrationKey) -> Self | None:
        """Return what is stored for a key; None, with a warning if that is unreadable."""
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


def _read_rates(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `Rates` in a stored file; raise `ValueError` for what no measurement can
    give. A knee may be infinite: null, or as Python writes it.
    """
    if list(values) != [field.name for field in fields(Rates)]:
        raise ValueError(OTHER_FORM)
    values = values | {name: inf for name in KNEES if values[name] is None}
    for name, value in values.items():
        for end, (least, most) in _RANGES.items():
            if value is not None and name.endswith(end) and not least <= value <= most:
                raise ValueError(f"{name} is {value!r:.60}, not from {least:g} to {most:g}")
    return values


class Prediction:
    """Observes an engine and compares its steps with a calibration. ``tell`` is called with each
    step's seconds, predicted and actual, but for the last, because a step's time is known when it
    has been delivered.
    """

    tell: Callable[[float, float], None] = staticmethod(lambda predicted, actual: None)

    def __init__(self, engine: Engine, rates: Rates) -> None:
        self.ratio = 1.0  # of actual to predicted, of late
        self._engine, self._rates = engine, rates
        self._steps = 0
        self._pending: float | None = None
        self._before = engine.step_seconds

    def on_step(self, step: Step) -> None:
        before = self._engine.step_seconds
        predicted, actual = self._pending, before - self._before
        self._before = before
        self._pending = self._engine.executor.costs.seconds(step.scheduled.batch, self._rates)
        if predicted is None or actual <= 0.0:  # none before, or it failed
            return
        self._steps += 1
        self.ratio += max(_GAIN, 1 / self._steps) * (actual / predicted - self.ratio)
        self.tell(predicted, actual)

    def on_end(self, record: RequestRecord) -> None:
        pass
