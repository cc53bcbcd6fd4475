"""Fits what predictions assume of GPUs (octavo/tools/plan/gpu.py) to published runs
(gpu_runs.json).

Six parameters for all GPUs and engines: shares of the bandwidth and of the peaks in 16 and in 8
bits, how far reading and arithmetic overlap, and seconds of a step and of an operation. The fit is
least squares of logarithms with each source weighing the same (octavo/tools/plan/fitting.py).
Printed
are each run beside its prediction, and the errors on each source by a fit that has not seen it.

gpu_runs.json has the sources with their addresses and of each run the words it was taken from:
spaces in tables are shortened, and a section's title stands before a colon. ``format`` is what
`octavo plan quantization --format` takes, with bits and group; ``embedding_format`` "same" is the
layers' own. A run's ``unit`` says what was published:

- TTFT ms, prompt tokens/s: a prompt alone, in one step;
- TPOT ms, output tokens/s of decode: steps in which ``batch`` sequences decode, half of the answer
  behind them;
- output tokens/s, latency ms: prompts and answers of a static batch.

    .venv/bin/python benchmarks/gpu_fit.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from octavo.executor.base import Batch
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.tools.plan.fitting import Array, FittedParameter, solve
from octavo.tools.plan.gpu import FITTED, Shares
from octavo.tools.plan.hardware import Device, published
from octavo.tools.plan.phase import decode_batch, prefill_batch
from octavo.tools.plan.quantization import cost_model, in_scheme
from octavo.tools.plan.schemes import StorageScheme, scheme
from octavo.tools.plan.subject import Subject

RUNS = Path(__file__).with_name("gpu_runs.json")
# No memory is read as fast as its data sheet says, and what the runs leave open between bandwidth
# and overheads is settled so. They also tell little of how a step's time divides into its own and
# that of its operations: nearly all models have some 14 operations a layer and 24 layers or more.
PARAMETERS = [
    FittedParameter("bandwidth", 0.9, 0.05),
    FittedParameter("compute", 0.6, 1.0),
    FittedParameter("narrow", 0.5, 1.0),
    FittedParameter("knee", 1.5, 0.5),
    FittedParameter("step_seconds", 300e-6, 0.4),
    FittedParameter("launch_seconds", 4e-6, 1.0),
]


class Column(NamedTuple):
    """Operations of a step, and how often they are in it."""

    moved: Array  # bytes
    computed: Array  # operations
    peaks: Array  # of what computes them, operations a second
    narrow: Array  # whether that is a peak in 8 bits
    attention: Array  # whether it is attention, of which the longer of the two times passes
    count: Array


@dataclass(frozen=True)
class Run:
    """What somebody has published, and the steps it is made of."""

    source: str
    device: Device
    label: str
    seconds: float  # of all steps together
    launches: int  # of a step
    steps: tuple[tuple[float, Column], ...]  # how many there are of each
    batches: tuple[tuple[float, Batch], ...]
    model: Any  # CostModel

    @classmethod
    def of(cls, facts: dict[str, Any], models: dict[str, Any]) -> Run:
        """``models``: a config.json of each that is no preset."""
        subject, device = _subject(facts["model"], models), published(facts["device"])
        layers = _scheme(facts["format"])
        edges = layers if facts.get("embedding_format") == "same" else scheme("bf16")
        stored = in_scheme(subject, layers, edges)
        layout = KvLayout.of(subject.program.config, dtype=KvDtype.of(facts["kv"]))
        model = cost_model(subject, stored, layout, device)
        batches = _batches(facts)
        label = (
            f"{facts['model']} {layers.name}, {facts['batch']} × "
            f"{facts['input_len']}→{facts['output_len']}"
        )
        return cls(
            facts["source"],
            device,
            f"{label}, {facts['unit']}",
            _seconds(facts),
            len(subject.program.ops),
            tuple((times, _column(model, batch, device)) for times, batch in batches),
            batches,
            model,
        )

    def predicted(self, shares: Shares) -> float:
        bandwidth = self.device.rates(0).bytes_per_second * shares.bandwidth
        total = 0.0
        for times, column in self.steps:
            share = np.where(column.narrow, shares.narrow, shares.compute)
            reading = column.moved / bandwidth
            computing = column.computed / (column.peaks * share)
            each = np.where(
                column.attention,
                np.maximum(reading, computing),
                (reading**shares.knee + computing**shares.knee) ** (1 / shares.knee),
            )
            own = shares.step_seconds + self.launches * shares.launch_seconds
            total += times * (float(column.count @ each) + own)
        return total

    def planned(self, shares: Shares) -> float:
        """The same by the planner."""
        rates = replace(self.device, shares=shares).predicted(0, self.launches)
        return sum(times * self.model.seconds(batch, rates) for times, batch in self.batches)


class Runs:
    """Implements `Observed` (octavo/tools/plan/fitting.py): each source weighs the same."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.seconds = np.array([run.seconds for run in runs])
        sources = [run.source for run in runs]
        weights = np.array([1 / sources.count(source) for source in sources])
        self.weights = weights / weights.mean()

    def predicted(self, rates: Shares) -> Array:
        return np.array([run.predicted(rates) for run in self.runs])


def _subject(name: str, models: dict[str, Any]) -> Subject:
    if name not in models:
        return Subject.find(name)
    with TemporaryDirectory() as folder:
        (path := Path(folder) / "config.json").write_text(json.dumps(models[name]))
        return Subject.of_config(path)


def _scheme(text: str) -> StorageScheme:
    name, *more = text.split()
    if not more:
        return scheme(name)
    return scheme(name, int(more[0]), int(more[1]), symmetric=more[2:] != ["asymmetric"])


def _batches(facts: dict[str, Any]) -> tuple[tuple[float, Batch], ...]:
    batch, prompt, output = facts["batch"], facts["input_len"], facts["output_len"]
    reading = (1.0, prefill_batch(prompt, batch))
    # Attention grows by as much with each token: the step in the middle is their mean.
    decoding = decode_batch(batch, prompt + output // 2)
    match facts["unit"]:
        case "TTFT ms" | "prompt tokens/s":
            return (reading,)
        case "TPOT ms" | "output tokens/s of decode":
            return ((1.0, decoding),)
    return reading, (output - 1.0, decoding)


def _seconds(facts: dict[str, Any]) -> float:
    """What was published, as seconds of the steps."""
    value, batch = facts["value"], facts["batch"]
    match facts["unit"]:
        case "TTFT ms" | "TPOT ms" | "latency ms":
            return float(value / 1e3)
        case "prompt tokens/s":
            return float(batch * facts["input_len"] / value)
        case "output tokens/s":
            return float(batch * facts["output_len"] / value)
        case "output tokens/s of decode":
            return float(batch / value)
    raise ValueError(f"unknown unit {facts['unit']!r}")


def _column(model: Any, batch: Batch, device: Device) -> Column:
    parts, rates = model.parts(batch), device.rates(0)
    peaks = np.array([rates.peak(cost.arithmetic) for cost, _ in parts])
    narrow = np.array([cost.arithmetic in ("int8", "fp8") for cost, _ in parts])
    return Column(
        np.array([float(cost.bytes) for cost, _ in parts]),
        np.array([float(cost.ops) for cost, _ in parts]),
        peaks,
        narrow,
        np.array([cost.attention for cost, _ in parts]),
        np.array([float(count) for _, count in parts]),
    )


def load() -> tuple[dict[str, Any], list[Run]]:
    """The sources by name, and the runs."""
    facts = json.loads(RUNS.read_text())
    return facts["sources"], [Run.of(each, facts["models"]) for each in facts["runs"]]


def shares(found: Array) -> Shares:
    """Return the shares by the parameters' logarithms."""
    values = Shares(*np.exp(found).tolist())
    return values._replace(
        bandwidth=min(values.bandwidth, 1.0),
        compute=min(values.compute, 1.0),
        narrow=min(values.narrow, 1.0),
        knee=min(max(values.knee, 1.0), 16.0),
    )


def fit(runs: Sequence[Run]) -> Shares:
    """Rounded to three digits, as octavo/tools/plan/gpu.py has them."""
    found, _ = solve(Runs(runs), PARAMETERS, shares)
    return Shares(*(float(f"{value:.3g}") for value in shares(found)))


def errors(runs: Sequence[Run], by: Shares) -> Array:
    """Predicted ÷ published, less 1."""
    return np.array([run.predicted(by) / run.seconds - 1 for run in runs])


def left_out(runs: Sequence[Run]) -> dict[str, Array]:
    """The errors on each source by a fit to the others."""
    found = {}
    for name in dict.fromkeys(run.source for run in runs):
        own = [run for run in runs if run.source == name]
        found[name] = errors(own, fit([run for run in runs if run.source != name]))
    return found


def main() -> None:
    sources, runs = load()
    found = fit(runs)
    print("predicted seconds ÷ published, by the fit to all\n")
    missed = errors(runs, found)
    for name, source in sources.items():
        print(f"{source['name']} ({source['software']})\n  {source['url']}")
        for run, error in zip(runs, missed, strict=True):
            if run.source == name:
                print(
                    f"  {run.device.name:<16}{run.label:<66}{1e3 * run.seconds:>12,.4g} ms"
                    f"{100 * error:>+8.0f} %"
                )
    print(f"\n{'left out of the fit':<22}{'runs':>6}{'bias':>9}{'median error':>15}{'largest':>10}")
    apart = left_out(runs)
    for name, off in apart.items():
        print(
            f"{name:<22}{len(off):>6}{100 * np.median(off):>+8.0f} %"
            f"{100 * np.median(np.abs(off)):>13.0f} %{100 * off[np.abs(off).argmax()]:>+8.0f} %"
        )
    all_apart = np.abs(np.concatenate(list(apart.values())))
    print(
        f"\n{len(runs)} runs of {len(sources)} sources on "
        f"{len({run.device.name for run in runs})} GPUs: a median error of "
        f"{100 * np.median(np.abs(missed)):.0f} %; on sources left out "
        f"{100 * np.median(all_apart):.0f} %, nine tenths within "
        f"{100 * np.quantile(all_apart, 0.9):.0f} %"
    )
    print(f"\nfitted:    {found}\nplan/gpu.py: {FITTED}" + ("" if found == FITTED else "  DIFFERS"))


if __name__ == "__main__":
    main()
