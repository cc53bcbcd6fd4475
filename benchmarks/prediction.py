"""The simulator's predictions beside the live engine, under the same loads.

    python benchmarks/prediction.py [NAME=MODEL …] [--trace azure.csv] [--seconds 3] [--rounds 3]

Calibrates the engine (40 s), then puts each load through it and through the simulator: the same
requests at the same times. A load's rate is a share of the saturation that the simulator finds for
it, so that it is settled before anything is measured. No load is used in calibrating; while the
cost model's form was sought, steps of the chat loads were looked at, and none of the last one's.

A shared machine becomes faster and slower within seconds and minutes. So each load comes in several
pieces, one a round, with other requests each time, and a load's figures are of the requests of all
its pieces. Between them the engine runs the few seconds of steps of `octavo calibrate --refresh`,
which tell how many times as long memory and processor take as when calibrated. Each piece is
predicted with:

- refreshed: with the refresh just before it. This is known before the load: the first figure.
- calibrated: with the calibration as it was at the start.
- slower and faster: the ends of the error band that `octavo simulate` gives with that refresh
  (tools/plan/band.py). Of nine figures in ten it is promised that they lie between.
- around: with the speed of before and after it together, which is not known before. Its errors are
  the cost model's own, and what the machine did within the piece.

The steps' ratio (measured ÷ predicted, over all steps of the live run, with the speed around it)
tells apart what single steps are off by from what queues make of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

import octavo.loader
from _models import models
from _script import as_script
from octavo.engine.calibration import Calibration, Moment
from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine, Step
from octavo.engine.load import LoadedEngine, load_engine
from octavo.executor.base import Batch
from octavo.executor.cost import Rates
from octavo.executor.native.executor import NativeExecutor
from octavo.scheduler.request import RequestRecord
from octavo.tools.plan.band import of_calibration
from octavo.tools.plan.calibrating import measure
from octavo.tools.plan.fitting import Observation, slowness
from octavo.tools.plan.hardware import Device
from octavo.tools.plan.load_replay import Replay, replay
from octavo.tools.plan.observing import probe
from octavo.tools.plan.simulation import Setup, simulate, weights_on
from octavo.tools.plan.subject import Subject
from octavo.tools.workload.datasets import Sample
from octavo.tools.workload.demand import Demand
from octavo.tools.workload.traces import Window

CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 30)
SATURATING = 60  # requests at once, to find the rate that saturates
STEADY = 1.06  # a machine on which steps before and after differ by less
FEWEST, MOST = 12, 400  # requests of a piece


@dataclass(frozen=True)
class Load:
    name: str
    demand: Demand
    share: float  # of the saturating rate

    def piece(self, turn: int) -> Load:
        """Other requests of the same kind."""
        demand = replace(self.demand, seed=self.demand.seed + 100 * turn)
        if demand.is_trace:
            start = demand.window.start + 60.0 * turn
            demand = replace(demand, window=replace(demand.window, start=start))
        return replace(self, demand=demand)


@dataclass(frozen=True)
class Figures:
    """Milliseconds, and tokens a second."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    throughput: float

    @classmethod
    def of(cls, pieces: list[Replay]) -> Figures:
        records = [record for done in pieces for record in done.records]
        if not all(record.success for record in records):
            sys.exit("a request failed")
        ttft = np.array([record.ttft for record in records]) * 1e3
        tpot = np.array([record.tpot for record in records if record.output_tokens > 1]) * 1e3
        (ttft_p50, ttft_p99), (tpot_p50, tpot_p99) = (
            np.percentile(each, (50, 99)).tolist() for each in (ttft, tpot)
        )
        tokens = sum(record.output_tokens for record in records)
        throughput = tokens / sum(done.duration for done in pieces)
        return cls(ttft_p50, ttft_p99, tpot_p50, tpot_p99, throughput)


PREDICTIONS = ("refreshed", "calibrated", "around")
ENDS = ("slower", "faster")


class Piece(NamedTuple):
    """A piece of a load, as it went and as it was predicted."""

    live: Replay
    predicted: dict[str, Replay]  # by PREDICTIONS and ENDS
    before: tuple[float, float]  # how many times as long memory and processor took: of the refresh
    around: tuple[float, float]
    change: float  # of the refreshes' steps from before to after
    measured_seconds: float  # of all steps
    predicted_seconds: float  # with the speed around


@dataclass(frozen=True)
class Row:
    model: str
    load: str
    share: float
    requests: int
    seconds: float
    measured: Figures
    predicted: dict[str, Figures]
    before: list[tuple[float, float]]  # of each piece
    around: list[tuple[float, float]]
    change: list[float]
    steps: float  # measured ÷ predicted with the speed around, over all steps

    @classmethod
    def of(cls, model: str, load: Load, pieces: list[Piece]) -> Row:
        live = [piece.live for piece in pieces]
        return cls(
            model,
            load.name,
            load.share,
            sum(len(done.records) for done in live),
            sum(done.duration for done in live),
            Figures.of(live),
            {
                name: Figures.of([piece.predicted[name] for piece in pieces])
                for name in PREDICTIONS + ENDS
            },
            [piece.before for piece in pieces],
            [piece.around for piece in pieces],
            [piece.change for piece in pieces],
            sum(piece.measured_seconds for piece in pieces)
            / sum(piece.predicted_seconds for piece in pieces),
        )

    def errors(self, prediction: str) -> dict[str, float]:
        """Return the errors of predictions, as shares of what is measured."""
        of, true = asdict(self.predicted[prediction]), asdict(self.measured)
        return {name: of[name] / true[name] - 1 for name in true}

    def within(self) -> list[bool]:
        """Return whether each figure lies in the error band."""
        true = asdict(self.measured)
        ends = [asdict(self.predicted[name]) for name in ("refreshed", *ENDS)]
        return [
            min(end[name] for end in ends) <= true[name] <= max(end[name] for end in ends)
            for name in true
        ]


@dataclass(frozen=True, slots=True)
class At(Setup):
    """On a machine with these rates, whatever is stored."""

    speed: Rates | None = None

    def rates(self) -> Rates:
        return self.speed or Setup.rates(self)


class Steps:
    """Notes an engine's steps, with so little work that they are no longer for it."""

    def __init__(self, engine: Engine) -> None:
        self.seen: list[Batch] = []
        self._engine = engine
        self._before = engine.step_seconds

    def on_step(self, step: Step) -> None:
        self.seen.append(step.scheduled.batch.kept())

    def on_end(self, record: RequestRecord) -> None:
        pass

    def end(self) -> float:
        """Seconds of all steps."""
        self._engine.observers.remove(self)
        return self._engine.step_seconds - self._before


def loads(trace: Path | None) -> Iterator[Load]:
    def chat(**other: object) -> Demand:
        values = {
            "random_input_len": 128, "random_output_len": 48, "random_range_ratio": 0.5, "seed": 11,
        }  # fmt: skip
        return Demand(**(values | other))  # type: ignore[arg-type]

    yield Load("chat, light", chat(), 0.3)
    yield Load("chat, medium", chat(seed=12), 0.6)
    yield Load("chat, heavy", chat(seed=13), 0.85)
    yield Load("chat, past saturation", chat(seed=14), 1.3)
    yield Load("long prompts", chat(random_input_len=700, random_output_len=32, seed=15), 0.6)
    yield Load("long answers", chat(random_input_len=24, random_output_len=128, seed=16), 0.6)
    shared = Demand(
        dataset_name="prefix_repetition",
        prefix_repetition_prefix_len=256,
        prefix_repetition_suffix_len=64,
        prefix_repetition_num_prefixes=4,
        prefix_repetition_output_len=32,
        seed=17,
    )
    yield Load("shared prefixes", shared, 0.6)
    if trace is not None:
        window = Window(start=120.0, max_input_len=512, max_output_len=64)
        azure = Demand(dataset_name="trace", dataset_path=trace, window=window, seed=18)
        yield Load("Azure conversations", azure, 0.7)
    held_out = chat(
        random_input_len=300, random_output_len=64, random_range_ratio=0.9, burstiness=0.3, seed=19
    )
    yield Load("held out: bursts", held_out, 0.7)


def timed(load: Load, setup: Setup, seconds: float) -> list[Sample]:
    """The load's requests, so many that they arrive within about so many seconds."""
    demand = load.demand
    if demand.is_trace:
        window = replace(demand.window, most=SATURATING)
        samples, _ = replace(demand, window=window).timed(len, strict=True)
    else:
        samples, _ = replace(demand, num_prompts=SATURATING).timed(len, strict=True)
    at_once = [replace(sample, arrival=0.0) for sample in samples]
    saturation = SATURATING / simulate(setup, at_once, seed=demand.seed).replay.duration
    rate = load.share * saturation
    count = min(max(round(rate * seconds), FEWEST), MOST)
    if demand.is_trace:
        window = replace(demand.window, most=count)
        samples, _ = replace(demand, window=window).timed(len, strict=True)
        span = samples[-1].arrival or 1.0
        speedup = rate / ((len(samples) - 1) / span)
        return [replace(s, arrival=(s.arrival or 0.0) / speedup) for s in samples]
    return replace(demand, num_prompts=count, request_rate=rate).timed(len, strict=True)[0]


class Bench:
    """One model's engine and what is known of the machine's speed."""

    def __init__(self, loaded: LoadedEngine, setup: Setup, stored: Calibration) -> None:
        executor = loaded.engine.executor
        assert isinstance(executor, NativeExecutor)
        self.engine, self.setup, self.stored = loaded.engine, setup, stored
        self.costs = executor.costs
        self._probes = 0
        self._before = self._probe()

    def _probe(self) -> list[Observation]:
        """Steps of a refresh, now."""
        self._probes += 1
        gc.collect()
        return probe(self.engine, seed=1000 + self._probes)

    def _ratio(self, observed: list[Observation]) -> float:
        rates = self.stored.rates
        return statistics.median(
            each.seconds / self.costs.seconds(each.batch, rates) for each in observed
        )

    def _at(self, rates: Rates) -> Setup:
        setup = self.setup
        return At(setup.subject, setup.stored, setup.device, setup.config, speed=rates)

    def run(self, load: Load, turn: int, seconds: float) -> Piece:
        stored, load = self.stored, load.piece(turn)
        samples, seed = timed(load, self._at(stored.rates), seconds), load.demand.seed
        steps = Steps(self.engine)
        self.engine.observers.append(steps)
        gc.collect()
        live = replay(self.engine, samples, seed=seed)
        taken = steps.end()
        before, after = self._before, self._probe()
        self._before = after
        change = self._ratio(after) / self._ratio(before)
        refreshed = slowness(self.costs, before, stored.rates, stored.held_up)
        # Of both sides, nothing is put down to the moment.
        around = slowness(self.costs, before + after, stored.rates, stored.held_up, believed=1.0)
        now = datetime.now(UTC)
        moment = Moment(*refreshed, now.isoformat(), len(before))
        unsure = of_calibration(replace(stored, moment=moment), now)
        rates = {
            "refreshed": stored.rates.slowed(*refreshed),
            "slower": stored.rates.slowed(*refreshed).slowed(unsure.slower),
            "faster": stored.rates.slowed(*refreshed).slowed(1 / unsure.faster),
            "calibrated": stored.rates,
            "around": stored.rates.slowed(*around),
        }
        return Piece(
            live,
            {name: simulate(self._at(of), samples, seed=seed).replay for name, of in rates.items()},
            refreshed,
            around,
            change,
            taken,
            sum(self.costs.seconds(batch, rates["around"]) for batch in steps.seen),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL")
    parser.add_argument("--trace", type=Path, help="an Azure trace")
    parser.add_argument("--seconds", type=float, default=3.0, help="of arrivals, a piece")
    parser.add_argument("--rounds", type=int, default=3, help="pieces of each load")
    parser.add_argument("--no-calibrate", action="store_true", help="take the stored calibration")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name, path in models(arguments.models).items():
        checkpoint = octavo.loader.load(path)
        loaded = load_engine(checkpoint, CONFIG)
        if not arguments.no_calibrate:
            measure(loaded).save()
        stored = Calibration.of_engine(loaded)
        if stored is None:
            sys.exit(f"{name} is not calibrated")
        device = Device("this machine", lambda _, r=stored.limits: r, 1 << 40, measured=True)
        subject = Subject.of(checkpoint)
        setup = Setup(subject, weights_on(device, subject), device, CONFIG)
        assert setup.rates() == stored.current
        bench = Bench(loaded, setup, stored)
        all_loads = list(loads(arguments.trace))
        pieces: list[list[Piece]] = [[] for _ in all_loads]
        for turn in range(arguments.rounds):
            for load, done in zip(all_loads, pieces, strict=True):
                done.append(bench.run(load, turn, arguments.seconds))
        for load, done in zip(all_loads, pieces, strict=True):
            row = Row.of(name, load, done)
            rows.append(row)
            if not arguments.json:
                show(row)
        loaded.engine.close()
    median_errors = {each: medians([row.errors(each) for row in rows]) for each in PREDICTIONS}
    if arguments.json:
        report = [
            asdict(row) | {"errors": {each: row.errors(each) for each in PREDICTIONS}}
            for row in rows
        ]
        within = [row.within() for row in rows]
        print(json.dumps({"rows": report, "median_errors": median_errors, "within": within}))
    else:
        for what, errors in median_errors.items():
            figures = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
            print(f"median errors, {what}: {figures}")
        found = [each for row in rows for each in row.within()]
        print(f"within the error band: {sum(found)} of {len(found)} figures")


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Over all loads' errors, of their sizes; TTFT and TPOT together."""
    by = {
        "medians": ("ttft_p50", "tpot_p50"),
        "p99": ("ttft_p99", "tpot_p99"),
        "throughput": ("throughput",),
        "ttft_p50": ("ttft_p50",),
        "ttft_p99": ("ttft_p99",),
        "tpot_p50": ("tpot_p50",),
        "tpot_p99": ("tpot_p99",),
    }
    return {
        what: statistics.median(abs(row[name]) for row in rows for name in names)
        for what, names in by.items()
    }


def show(row: Row) -> None:
    print(
        f"{row.model}, {row.load} ({row.share:.0%} of saturation), {row.requests} requests in "
        f"{row.seconds:.1f} s"
    )
    for when, speeds in (("before", row.before), ("around", row.around)):
        slower = ", ".join(f"{memory:.3f} and {processor:.3f}" for memory, processor in speeds)
        print(f"  memory and processor {when}: {slower} times as long as calibrated")
    unsteady = sum(max(change, 1 / change) > STEADY for change in row.change)
    print(
        f"  changed meanwhile in {unsteady} of {len(row.change)} pieces; steps took {row.steps:.3f}"
        " of what was predicted around"
    )
    print(f"  {'':<12}{'measured':>10}" + "".join(f"{each:>19}" for each in PREDICTIONS))
    for name, value in asdict(row.measured).items():
        guesses = (
            f"{getattr(row.predicted[each], name):>10.2f}{row.errors(each)[name]:>+9.1%}"
            for each in PREDICTIONS
        )
        print(f"  {name:<12}{value:>10.2f}" + "".join(guesses))
    sys.stdout.flush()


if __name__ == "__main__":
    as_script(main)
