"""The simulator's predictions beside the live engine, under the same loads.

    python benchmarks/prediction.py [NAME=MODEL …] [--trace azure.csv] [--seconds 5] [--rounds 2]

Calibrates the engine (40 s), then puts each load through it and through the simulator: the same
requests at the same times. A load's rate is a share of the saturation that the simulator finds for
it, so that it is settled before anything is measured. No load is used in calibrating; while the
cost model's form was sought, steps of the chat loads were looked at, and none of the last one's.

A shared machine becomes faster and slower within seconds and minutes. So each load comes in several
pieces, one a round, with other requests each time, and a load's figures are of the requests of all
its pieces. Before and after each piece the engine runs a few seconds of calibration's own script,
and from these steps come two numbers: how many times as long the memory and the processor take as
when calibrated. Each piece is predicted with the calibration as it was and, the second prediction,
with what those two make of it: known without the load.

The steps' ratio (measured ÷ predicted, over all steps of the live run, at the speed of the moment)
tells the cost model's own error, and what the machine did meanwhile, from what queues make of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

import octavo.checkpoint
from _models import models
from octavo.engine.engine import Engine, Step
from octavo.engine.load import EngineConfig, LoadedEngine, load_engine
from octavo.execute.batch import Batch
from octavo.execute.cost import Rates
from octavo.execute.native import NativeExecutor
from octavo.plan.calibration import Calibration
from octavo.plan.fitting import Observation, Slowness, slowness
from octavo.plan.hardware import Device
from octavo.plan.observing import observe
from octavo.plan.replay import Replay, replay
from octavo.plan.simulation import Setup, simulate, weights_on
from octavo.plan.subject import Subject
from octavo.schedule.request import RequestRecord
from octavo.workload.datasets import Sample
from octavo.workload.demand import Demand
from octavo.workload.traces import Window

CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 30)
SATURATING = 60  # requests at once, to find the rate that saturates
PROBE = 2.0  # seconds of the script
STEADY = 1.06  # a machine on which the script before and after differs by less
CALIBRATED = Slowness(1.0, 1.0)
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


class Piece(NamedTuple):
    """Of a load, as it went and as it was predicted."""

    live: Replay
    calibrated: Replay  # predicted with the calibration as it was
    at_speed: Replay  # and with the slowness
    slowness: Slowness  # around it
    change: float  # of the script's steps from before to after
    measured_seconds: float  # of all steps
    predicted_seconds: float  # with the slowness


@dataclass(frozen=True)
class Row:
    model: str
    load: str
    share: float
    requests: int
    seconds: float
    measured: Figures
    predicted: Figures
    at_speed: Figures  # predicted with the slowness
    slowness: list[Slowness]  # around each piece
    change: list[float]
    steps: float  # measured ÷ predicted with the slowness, over all steps

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
            Figures.of([piece.calibrated for piece in pieces]),
            Figures.of([piece.at_speed for piece in pieces]),
            [piece.slowness for piece in pieces],
            [piece.change for piece in pieces],
            sum(piece.measured_seconds for piece in pieces)
            / sum(piece.predicted_seconds for piece in pieces),
        )

    @property
    def errors(self) -> dict[str, float]:
        """Of what is predicted, as a share of what is measured."""
        return _errors(self.predicted, self.measured)

    @property
    def errors_at_speed(self) -> dict[str, float]:
        return _errors(self.at_speed, self.measured)


def _errors(predicted: Figures, measured: Figures) -> dict[str, float]:
    of, true = asdict(predicted), asdict(measured)
    return {name: of[name] / true[name] - 1 for name in true}


@dataclass(frozen=True, slots=True)
class Slowed(Setup):
    """On a machine that has become slower."""

    slowness: Slowness = CALIBRATED

    def rates(self) -> Rates:
        return Setup.rates(self).slowed(*self.slowness)


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

    def __init__(self, name: str, loaded: LoadedEngine, setup: Setup, rates: Rates) -> None:
        executor = loaded.engine.executor
        assert isinstance(executor, NativeExecutor)
        self.name, self.engine, self.setup, self.rates = name, loaded.engine, setup, rates
        self.costs = executor.costs
        self._probes = 0
        self._before = self._probe()

    def _probe(self) -> list[Observation]:
        """Steps of the script, now."""
        self._probes += 1
        gc.collect()
        return observe(self.engine, seconds=PROBE, seed=1000 + self._probes)

    def _ratio(self, observed: list[Observation]) -> float:
        return statistics.median(
            each.seconds / self.costs.step(each.batch, self.rates).seconds for each in observed
        )

    def run(self, load: Load, turn: int, seconds: float) -> Piece:
        setup, load = self.setup, load.piece(turn)
        samples, seed = timed(load, setup, seconds), load.demand.seed
        steps = Steps(self.engine)
        self.engine.observers.append(steps)
        gc.collect()
        live = replay(self.engine, samples, seed=seed)
        taken = steps.end()
        before, after = self._before, self._probe()
        self._before = after
        change = self._ratio(after) / self._ratio(before)
        slow = slowness(self.costs, before + after, self.rates)
        slowed = Slowed(setup.subject, setup.stored, setup.device, setup.config, slowness=slow)
        rates = slowed.rates()
        return Piece(
            live,
            simulate(setup, samples, seed=seed).replay,
            simulate(slowed, samples, seed=seed).replay,
            slow,
            change,
            taken,
            sum(self.costs.step(batch, rates).seconds for batch in steps.seen),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL")
    parser.add_argument("--trace", type=Path, help="an Azure trace")
    parser.add_argument("--seconds", type=float, default=5.0, help="of arrivals, a piece")
    parser.add_argument("--rounds", type=int, default=2, help="pieces of each load")
    parser.add_argument("--no-calibrate", action="store_true", help="take the stored calibration")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name, path in models(arguments.models).items():
        checkpoint = octavo.checkpoint.load(path)
        loaded = load_engine(checkpoint, CONFIG)
        if not arguments.no_calibrate:
            Calibration.measure(loaded).save()
        stored = Calibration.of_engine(loaded)
        if stored is None:
            sys.exit(f"{name} is not calibrated")
        device = Device("this machine", lambda _, r=stored.limits: r, 1 << 40, measured=True)
        subject = Subject.of(checkpoint)
        setup = Setup(subject, weights_on(device, subject), device, CONFIG)
        assert setup.rates() == stored.rates
        bench = Bench(name, loaded, setup, stored.rates)
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
    if arguments.json:
        report = [
            asdict(row) | {"errors": row.errors, "errors_at_speed": row.errors_at_speed}
            for row in rows
        ]
        raw = medians([row.errors for row in rows])
        at_speed = medians([row.errors_at_speed for row in rows])
        both = {"median_errors": raw, "median_errors_at_speed": at_speed}
        print(json.dumps({"rows": report} | both))
    else:
        for what, errors in (
            ("median errors", [row.errors for row in rows]),
            ("at the machine's speed of the moment", [row.errors_at_speed for row in rows]),
        ):
            print(f"{what}: " + ", ".join(f"{k} {v:.1%}" for k, v in medians(errors).items()))


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
    slower = ", ".join(f"{each.memory:.3f} and {each.processor:.3f}" for each in row.slowness)
    unsteady = sum(max(change, 1 / change) > STEADY for change in row.change)
    print(
        f"  memory and processor {slower} times as slow as calibrated; changed meanwhile in "
        f"{unsteady} of {len(row.change)} pieces; steps took {row.steps:.3f} of what was predicted"
    )
    measured, predicted, at_speed = map(asdict, (row.measured, row.predicted, row.at_speed))
    for name, error in row.errors.items():
        print(
            f"  {name:<12}{measured[name]:>10.2f}{predicted[name]:>10.2f}{error:>+9.1%}"
            f"{at_speed[name]:>10.2f}{row.errors_at_speed[name]:>+9.1%}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
