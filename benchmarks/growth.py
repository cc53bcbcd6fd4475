"""How cost grows with length: prefill time a token, and decode step time against context.

    python benchmarks/growth.py [--model NAME=PATH …] [--context 128,256,…] [--json]

Prefill reads one prompt of each length: its time a token stays flat until attention, which grows
with the square of the length, weighs beside the rest. A decode step at a context reads the keys and
values of all of it, so its time should be a straight line over the bytes read, and the line's slope
one over the memory's rate. Beside both stands the machine's limit, measured before and after.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from _models import models
from _script import as_script
from octavo.engine.config import EngineConfig
from octavo.executor.base import Batch
from octavo.machine.limits import highest
from octavo.tools.bench.drive import BatchShape, Drive

CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
STEPS = 24


@dataclass(frozen=True)
class Length:
    """One length; medians over repetitions (prefill) and steps (decode), in seconds."""

    tokens: int
    prefill_seconds: float
    prefill_limit_seconds: float
    decode_seconds: float  # a step
    decode_limit_seconds: float
    decode_kv_bytes: int  # read and written in a step

    @property
    def prefill_us_a_token(self) -> float:
        return 1e6 * self.prefill_seconds / self.tokens


@dataclass(frozen=True)
class Line:
    """decode seconds = fixed + KV bytes / rate, by least squares over the contexts."""

    fixed_seconds: float
    bytes_per_second: float
    limit_bytes_per_second: float  # reading as much memory as a step does
    of_limit: float
    r_squared: float
    worst_residual: float  # of a step's time

    @classmethod
    def through(cls, lengths: list[Length], limit: float) -> Line:
        x = np.array([length.decode_kv_bytes for length in lengths], float)
        y = np.array([length.decode_seconds for length in lengths])
        slope, fixed = map(float, np.polyfit(x, y, 1))
        residual = y - (fixed + slope * x)
        r_squared = 1 - float((residual**2).sum() / ((y - y.mean()) ** 2).sum())
        worst = float(np.abs(residual / y).max())
        return cls(fixed, 1 / slope, limit, 1 / slope / limit, r_squared, worst)


def measure(
    path: Path, contexts: list[int], sequences: int, repetitions: int, threads: int | None
) -> tuple[list[Length], Line, list[dict[str, object]]]:
    loads = [BatchShape(sequences, context, STEPS) for context in contexts]
    drive = Drive.load(path, EngineConfig(threads=threads), loads)
    limits = [drive.limits()]
    drive.prefill(drive.prompts(loads[0]))  # a warm-up
    prefills: dict[BatchShape, list[float]] = {load: [] for load in loads}
    decodes: dict[BatchShape, list[float]] = {load: [] for load in loads}
    batches: dict[BatchShape, tuple[list[Batch], Batch]] = {}
    for repetition in range(repetitions):
        for load in loads:
            print(f"{path.name}: {repetition + 1}/{repetitions}, {load.name}", file=sys.stderr)
            prompts = drive.prompts(load)
            prefill = drive.prefill(prompts)
            prefills[load].append(prefill.seconds)
            decode = drive.decode(prompts, STEPS)
            decodes[load] += decode.times
            batches[load] = prefill.batches, decode.batches[STEPS // 2]
    limits.append(drive.limits())
    lengths = []
    costs = drive.executor.costs
    for load in loads:
        rates = highest(limits, drive.threads, drive.working_set(load))
        prefill_batches, step = batches[load]
        lengths.append(
            Length(
                load.prompt_len,
                statistics.median(prefills[load]) / sequences,
                sum(costs.seconds(batch, rates) for batch in prefill_batches) / sequences,
                statistics.median(decodes[load]),
                costs.seconds(step, rates),
                sum(cost.kv_bytes for cost in costs.by_op(step)),
            )
        )
    largest = drive.working_set(loads[-1])
    rate = highest(limits, drive.threads, largest).bytes_per_second
    summaries = [each.summary(drive.threads, largest) for each in limits]
    drive.close()
    return lengths, Line.through(lengths, rate), summaries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", metavar="NAME=PATH")
    parser.add_argument("--context", default=",".join(map(str, CONTEXTS)), metavar="TOKENS,…")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    contexts = sorted(int(text) for text in arguments.context.split(","))
    if len(contexts) < 3:
        parser.error("a line needs three contexts at least")
    result = {}
    for name, path in models(arguments.model).items():
        lengths, line, limits = measure(
            path, contexts, arguments.batch_size, arguments.repetitions, arguments.threads
        )
        result[name] = {
            "batch": arguments.batch_size,
            "lengths": [asdict(length) for length in lengths],
            "line": asdict(line),
            "limits": limits,
        }
        if arguments.json:
            continue
        print(f"\n{name}, batch {arguments.batch_size}\n")
        print("| tokens | prefill µs a token | of limit | decode step ms | of limit | KV MB |")
        print("|---:|---:|---:|---:|---:|---:|")
        for each in lengths:
            print(
                f"| {each.tokens} | {each.prefill_us_a_token:.1f} "
                f"| {each.prefill_limit_seconds / each.prefill_seconds:.1%} "
                f"| {1e3 * each.decode_seconds:.3f} "
                f"| {each.decode_limit_seconds / each.decode_seconds:.1%} "
                f"| {each.decode_kv_bytes / 1e6:.2f} |"
            )
        print(
            f"\ndecode step = {1e3 * line.fixed_seconds:.3f} ms + KV bytes at "
            f"{line.bytes_per_second / 1e9:.1f} GB/s, {line.of_limit:.1%} of the "
            f"{line.limit_bytes_per_second / 1e9:.1f} GB/s that memory gives; R² "
            f"{line.r_squared:.5f}, off the line by at most {line.worst_residual:.1%}"
        )
    if arguments.json:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    as_script(main)
