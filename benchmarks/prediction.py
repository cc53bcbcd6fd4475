"""The simulator's predictions beside the live engine, under the same loads.

    python benchmarks/prediction.py [NAME=MODEL …] [--trace azure.csv] [--seconds 10] [--json]

Calibrates the engine (40 s), then puts each load through it and through the simulator: the same
requests at the same times. A load's rate is a share of the saturation that the simulator finds for
it, so that it is settled before anything is measured. No load is used in calibrating; while the
cost model's form was sought, steps of the chat loads were looked at, and none of the last one's. A
step's ratio (measured ÷ predicted, summed over all steps of the live run) tells the cost model's
own error from what queues make of it.

A shared machine becomes faster and slower within minutes. Before and after each load the engine
runs two seconds of calibration's own script: how its steps compare with what was predicted is the
machine's drift since it was calibrated, known without the load. A second prediction takes every
step so much longer.
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

import numpy as np

import octavo.checkpoint
from _models import models
from octavo.engine.load import EngineConfig, LoadedEngine, load_engine
from octavo.execute.cost import Rates
from octavo.execute.native import NativeExecutor
from octavo.plan.calibration import Calibration
from octavo.plan.hardware import Device
from octavo.plan.observing import observe
from octavo.plan.replay import Replay, replay
from octavo.plan.simulation import Setup, simulate, weights_on
from octavo.plan.subject import Subject
from octavo.workload.datasets import Sample
from octavo.workload.demand import Demand
from octavo.workload.traces import Window

CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 30)
SATURATING = 60  # requests at once, to find the rate that saturates
PROBE = 2.0  # seconds of the script
FEWEST, MOST = 16, 400  # requests of a load


@dataclass(frozen=True)
class Load:
    name: str
    demand: Demand
    share: float  # of the saturating rate


@dataclass(frozen=True)
class Figures:
    """Milliseconds, and tokens a second."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    throughput: float

    @classmethod
    def of(cls, done: Replay) -> Figures:
        good = [record for record in done.records if record.success]
        if len(good) < len(done.records):
            sys.exit("a request failed")
        ttft = np.array([record.ttft for record in good]) * 1e3
        tpot = np.array([record.tpot for record in good if record.output_tokens > 1]) * 1e3
        tokens = sum(record.output_tokens for record in good)
        return cls(
            *(float(np.percentile(each, share)) for each in (ttft, tpot) for share in (50, 99)),
            tokens / done.duration,
        )


@dataclass(frozen=True)
class Row:
    model: str
    load: str
    share: float
    requests: int
    seconds: float
    measured: Figures
    predicted: Figures
    steps: float  # measured ÷ predicted, over all steps of the live run
    drift: float  # the same, of the script's steps around it
    drifted: Figures  # predicted with every step so much longer

    @property
    def errors(self) -> dict[str, float]:
        """Of what is predicted, as a share of what is measured."""
        return _errors(self.predicted, self.measured)

    @property
    def errors_at_speed(self) -> dict[str, float]:
        return _errors(self.drifted, self.measured)


def _errors(predicted: Figures, measured: Figures) -> dict[str, float]:
    of, true = asdict(predicted), asdict(measured)
    return {name: of[name] / true[name] - 1 for name in true}


@dataclass(frozen=True, slots=True)
class Drifted(Setup):
    """On a machine where every step takes ``drift`` times as long."""

    drift: float = 1.0

    def rates(self) -> Rates:
        return Setup.rates(self).slowed(self.drift)


def script(loaded: LoadedEngine, calibration: Calibration, seed: int) -> float:
    """How much longer the script's steps take than predicted, the median."""
    executor = loaded.engine.executor
    assert isinstance(executor, NativeExecutor)
    observed = observe(loaded.engine, seconds=PROBE, seed=seed)
    return statistics.median(
        each.seconds / executor.costs.step(each.batch, calibration.rates).seconds
        for each in observed
    )


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


def measure(
    name: str,
    loaded: LoadedEngine,
    setup: Setup,
    calibration: Calibration,
    load: Load,
    seconds: float,
) -> Row:
    samples = timed(load, setup, seconds)
    predicted = Figures.of(simulate(setup, samples, seed=load.demand.seed).replay)
    engine, watch = loaded.engine, calibration.prediction(loaded)
    before = script(loaded, calibration, load.demand.seed)
    engine.observers.append(watch)
    gc.collect()
    done = replay(engine, samples, seed=load.demand.seed)
    engine.observers.remove(watch)
    drift = (before * script(loaded, calibration, load.demand.seed + 1000)) ** 0.5
    drifted = simulate(
        Drifted(setup.subject, setup.stored, setup.device, setup.config, drift=drift),
        samples,
        seed=load.demand.seed,
    )
    return Row(
        name,
        load.name,
        load.share,
        len(samples),
        done.duration,
        Figures.of(done),
        predicted,
        watch.actual_seconds / watch.predicted_seconds,
        drift,
        Figures.of(drifted.replay),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL")
    parser.add_argument("--trace", type=Path, help="an Azure trace")
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals, for each load")
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
        for load in loads(arguments.trace):
            row = measure(name, loaded, setup, stored, load, arguments.seconds)
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
        f"{row.seconds:.1f} s; steps took {row.steps:.3f} of what was predicted; drift "
        f"{row.drift:.3f}"
    )
    measured, predicted, drifted = map(asdict, (row.measured, row.predicted, row.drifted))
    for name, error in row.errors.items():
        print(
            f"  {name:<12}{measured[name]:>10.2f}{predicted[name]:>10.2f}{error:>+9.1%}"
            f"{drifted[name]:>10.2f}{row.errors_at_speed[name]:>+9.1%}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
