"""One step taken apart: every region of the model, and what is none of them.

The parts add up to the step. Several steps are run and the one of median duration is shown whole,
rather than medians of parts that would not add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from octavo.engine.config import EngineConfig, SettingsError
from octavo.executor.base import Batch, RegionTime, StepResult
from octavo.executor.cost import OpCost, Rates
from octavo.loader.base import Checkpoint
from octavo.machine.limits import Limits, Progress, highest
from octavo.models.program import Op, Program
from octavo.tools.bench.drive import BatchShape, Drive


class Span(NamedTuple):
    """A call during a step; seconds on `time.perf_counter`'s clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step as it ran."""

    start: float
    end: float
    calls: list[Span]  # in order, one after the other
    regions: list[RegionTime]  # within the execute call, in order, one after the other
    meetings: int  # of the threads
    last_meeting: float  # when the last region within the execute call was done
    batch: Batch

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def spent(self, name: str) -> float:
        return sum(call.end - call.start for call in self.calls if call.name == name)


@dataclass(frozen=True, slots=True)
class RegionRow:
    """A region of the step, without what its threads' meeting costs. Bytes and operations are the
    program's (`CostModel`), not what a kernel may move besides.
    """

    name: str
    layer: int | None
    ops: list[str]
    seconds: float
    bytes: int
    operations: int
    bytes_per_second: float
    operations_per_second: float
    limit_seconds: float
    of_limit: float | None  # None: nothing that a limit applies to
    bound: str | None  # "memory" or the arithmetic whose peak binds it


@dataclass(frozen=True, slots=True)
class Profile:
    """``regions`` and ``overheads`` (seconds by name) add up to ``step_seconds``."""

    model: str
    isa: str
    threads: int
    kind: str  # "decode" or "prefill"
    sequences: int
    context: int  # tokens in the cache when the step began, of each sequence
    tokens: int
    steps: int  # run; the one of median duration is shown
    step_seconds: float
    limit_seconds: float
    of_limit: float
    meetings: int
    regions: list[RegionRow]
    overheads: dict[str, float]
    limits: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def by_name(self) -> list[tuple[int, RegionRow]]:
        """Regions of one name over all layers as one row, and how many; longest first."""
        groups: dict[str, list[RegionRow]] = {}
        for region in self.regions:
            groups.setdefault(region.name, []).append(region)
        rows = [(len(group), _joined(group)) for group in groups.values()]
        return sorted(rows, key=lambda item: -item[1].seconds)


def profile(
    model: str | Path | Checkpoint,
    config: EngineConfig,
    load: BatchShape,
    *,
    prefill: bool,
    steps: int,
    limits: Limits | None = None,
    progress: Progress = lambda _: None,
) -> tuple[Profile, Recorded]:
    """A decode step of ``load.sequences`` at a context of ``load.prompt_len`` tokens, or with
    ``prefill`` the step that reads them; and the step as it ran, for a timeline.

    ``limits`` None: measured quickly before and after. Raises what `Drive.load` does.
    """
    if config.speculation is not None:
        raise SettingsError("speculation changes what a step is: a profile is taken without it")
    progress("loading the model")
    drive = Drive.load(model, config, [load])
    try:
        around = [limits or drive.limits(progress)]
        progress(f"running {steps} steps")
        with _watched(drive) as record:
            run = _prefill if prefill else _decode
            recorded = run(drive, load, steps, record)
        if limits is None:
            around.append(drive.limits(progress))
        chosen = sorted(recorded, key=lambda step: step.seconds)[len(recorded) // 2]
        return _taken_apart(drive, load, chosen, len(recorded), around, prefill), chosen
    finally:
        drive.close()


# --- running -------------------------------------------------------------------------------------

_Record = Callable[[], Recorded]
_WARM_UP = 3  # steps that are run first and not looked at


def _decode(drive: Drive, load: BatchShape, steps: int, record: _Record) -> list[Recorded]:
    prompts = drive.prompts(load)
    drive.prefill(prompts)
    with drive.decoding(prompts, steps + _WARM_UP):
        return [record() for _ in range(steps + _WARM_UP)][_WARM_UP:]


def _prefill(drive: Drive, load: BatchShape, steps: int, record: _Record) -> list[Recorded]:
    recorded: list[Recorded] = []
    for _ in range(steps + _WARM_UP):
        drive.prefill_begun(drive.prompts(load))
        recorded.append(record())
        if drive.engine.has_work():
            raise RuntimeError("the prompts took more than one step")
    return recorded[_WARM_UP:]


class _Timed:
    """A part of the engine; calls of some of its methods are noted."""

    def __init__(self, part: Any, names: dict[str, str], calls: list[Span]) -> None:
        self._part = part
        for method, name in names.items():
            setattr(self, method, _noting(getattr(part, method), name, calls))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def _noting(call: Callable[..., Any], name: str, calls: list[Span]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments)
        calls.append(Span(name, start, time.perf_counter()))
        if isinstance(result, StepResult) and result.logits_from is not None:
            # More rows of logits are computed while the first are sampled.
            return result._replace(logits_from=_noting(result.logits_from, "logits", calls))
        return result

    return noted


@contextmanager
def _watched(drive: Drive) -> Iterator[_Record]:
    """Within, the function given runs a step and takes it down."""
    engine, executor = drive.engine, drive.executor
    parts = engine.scheduler, engine.executor, engine.sampler
    calls: list[Span] = []
    names: list[dict[str, str]] = [
        {"schedule": "schedule", "commit": "commit"},
        {"execute": "execute"},
        {"sample": "sample"},
    ]
    timed = [_Timed(part, each, calls) for part, each in zip(parts, names, strict=True)]

    def record() -> Recorded:
        executor.start_profile()
        calls.clear()
        drive.batches.clear()
        start = time.perf_counter()
        drive.step()
        end = time.perf_counter()
        (batch,) = drive.batches
        return Recorded(
            start,
            end,
            calls[:],
            *executor.profile(),
            batch,
        )

    engine.scheduler, engine.executor, engine.sampler = cast(Any, timed)
    try:
        yield record
    finally:
        engine.scheduler, engine.executor, engine.sampler = parts


# --- taking apart --------------------------------------------------------------------------------


def _taken_apart(
    drive: Drive, load: BatchShape, step: Recorded, steps: int, limits: list[Limits], prefill: bool
) -> Profile:
    executor = drive.executor
    working_set = drive.working_set(load)
    rates = highest(limits, drive.threads, working_set)
    barrier = min(each.barrier_seconds(drive.threads) for each in limits)
    program, costs = executor.costs.program, executor.costs.by_op(step.batch)
    ran = [region for region in step.regions if region.seconds > 0]
    # Shared out evenly: where threads go through several regions without meeting, fewer than one.
    meeting = barrier * step.meetings / len(ran)
    layers = region_layers(program, step.regions)
    rows = [
        _row(region, layer, program, costs, rates, max(0.0, region.seconds - meeting))
        for region, layer in zip(step.regions, layers, strict=True)
        if region.seconds > 0
    ]
    in_regions = sum(region.seconds for region in ran)
    (execute,) = (call for call in step.calls if call.name == "execute")
    adding_up = execute.end - step.last_meeting
    calls = step.spent("execute") + step.spent("logits")
    overheads = {
        "meetings of the threads": in_regions - sum(row.seconds for row in rows),
        "calling the runtime": calls - in_regions - adding_up,
        "adding up these times": adding_up,
        "scheduling": step.spent("schedule") + step.spent("commit"),
        "sampling": step.spent("sample"),
    }
    overheads["text and delivery"] = (
        step.seconds - sum(row.seconds for row in rows) - sum(overheads.values())
    )
    limit = executor.costs.seconds(step.batch, rates)
    return Profile(
        model=drive.loaded.checkpoint.path.name,
        isa=executor.capabilities.tier,
        threads=drive.threads,
        kind="prefill" if prefill else "decode",
        sequences=load.sequences,
        context=0 if prefill else int(step.batch.positions.min()),
        tokens=step.batch.num_tokens,
        steps=steps,
        step_seconds=step.seconds,
        limit_seconds=limit,
        of_limit=limit / step.seconds,
        meetings=step.meetings,
        regions=rows,
        overheads=overheads,
        limits=[each.summary(drive.threads, working_set) for each in limits],
    )


def _row(
    region: RegionTime,
    layer: int | None,
    program: Program,
    costs: list[OpCost],
    rates: Rates,
    seconds: float,
) -> RegionRow:
    own = [costs[op] for op in region.ops]
    return _rated(
        region.name,
        layer,
        [_op_name(program.ops[op]) for op in region.ops],
        seconds,
        sum(cost.bytes for cost in own),
        sum(cost.ops for cost in own),
        sum(cost.seconds(rates) for cost in own),
        _bound(own, rates),
    )


def _joined(rows: list[RegionRow]) -> RegionRow:
    longest = max(rows, key=lambda row: row.limit_seconds)
    return _rated(
        rows[0].name,
        rows[0].layer if len(rows) == 1 else None,
        longest.ops,
        sum(row.seconds for row in rows),
        sum(row.bytes for row in rows),
        sum(row.operations for row in rows),
        sum(row.limit_seconds for row in rows),
        longest.bound,
    )


def _rated(
    name: str,
    layer: int | None,
    ops: list[str],
    seconds: float,
    moved: int,
    computed: int,
    limit: float,
    bound: str | None,
) -> RegionRow:
    """A row with what follows from its amounts and its time."""
    return RegionRow(
        name,
        layer,
        ops,
        seconds,
        moved,
        computed,
        moved / seconds if seconds else 0.0,
        computed / seconds if seconds else 0.0,
        limit,
        limit / seconds if limit and seconds else None,
        bound,
    )


def _bound(costs: list[OpCost], rates: Rates) -> str | None:
    """What holds back the op that takes longest of them."""
    longest = max(costs, key=lambda cost: cost.seconds(rates), default=None)
    if longest is None or not longest.seconds(rates):
        return None
    of_memory = longest.bytes / rates.bytes_per_second
    return "memory" if of_memory >= longest.seconds(rates) else str(longest.arithmetic)


def _op_name(op: Op) -> str:
    """The weight's role where there is one, or the kind of op."""
    return getattr(op, "weight", None) or type(op).__name__


def op_layers(program: Program) -> list[int | None]:
    """The layer of each op: as its weight or itself says, else that of the op before."""
    layers: list[int | None] = []
    for op in program.ops:
        layer = getattr(op, "layer", None)
        if (weight := getattr(op, "weight", None)) is not None:
            parts = weight.split(".")
            layer = int(parts[1]) if parts[0] == "layers" else None
        elif layer is None and layers:
            layer = layers[-1]
        layers.append(layer)
    return layers


def region_layers(program: Program, regions: list[RegionTime]) -> list[int | None]:
    """The layer of each region: that of its first op, else that of the region before."""
    of_ops = op_layers(program)
    layers: list[int | None] = []
    for region in regions:
        before = layers[-1] if layers else None
        layers.append(of_ops[region.ops[0]] if region.ops else before)
    return layers
