"""How long a model takes from the call to an engine that is ready, and the most memory it takes.

    python benchmarks/load_time.py [--model NAME=PATH …] [--rounds 5] [--json]

Every round loads in a process of its own, after the imports. Peak memory is the largest resident
set of that process, Python and tokenizer included; beside it what loading added to the process as
it was before. The file is in the page cache from the second round on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from _models import models


class Load(NamedTuple):
    """One round, in seconds and bytes."""

    seconds: float
    before: int  # resident
    peak: int
    weights: int


@dataclass(frozen=True)
class Row:
    model: str
    file_mb: float
    seconds: float  # median over the rounds
    worst_seconds: float
    weights_mb: float
    peak_mb: float  # largest over the rounds
    peak_share: float  # of the weights held
    added_share: float  # what loading added at most, of the weights held


def status(field: str) -> int:
    """A size from this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def load_here(path: Path) -> Load:
    from octavo.engine import load
    from octavo.execute import native  # noqa: F401  (loaded by the first engine otherwise)

    before = status("VmRSS")
    began = time.perf_counter()
    loaded = load.load_engine(path, load.EngineConfig(kv_cache_memory_bytes=64 << 20))
    return Load(time.perf_counter() - began, before, status("VmHWM"), loaded.weight_bytes)


def load_apart(path: Path) -> Load:
    child = subprocess.run(
        [sys.executable, __file__, "--load", str(path)], check=True, stdout=subprocess.PIPE
    )
    return Load(*json.loads(child.stdout))


def measure(name: str, path: Path, rounds: int) -> Row:
    loads = [load_apart(path) for _ in range(rounds)]
    weights = loads[0].weights
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return Row(
        name,
        sum(file.stat().st_size for file in files) / 1e6,
        statistics.median(load.seconds for load in loads),
        max(load.seconds for load in loads),
        weights / 1e6,
        max(load.peak for load in loads) / 1e6,
        max(load.peak for load in loads) / weights,
        max(load.peak - load.before for load in loads) / weights,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", help="NAME=PATH of a GGUF file or a folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # the process of a round
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load_here(args.load)))
        return
    rows = [measure(name, path, args.rounds) for name, path in models(args.model).items()]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print("| model | file MB | load s (worst) | weights MB | peak MB | of weights | added |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.model} | {row.file_mb:.0f} | {row.seconds:.2f} ({row.worst_seconds:.2f}) "
            f"| {row.weights_mb:.0f} | {row.peak_mb:.0f} | {row.peak_share:.2f} "
            f"| {row.added_share:.2f} |"
        )


if __name__ == "__main__":
    main()
