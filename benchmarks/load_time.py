"""How long a model takes from the call to an engine that is ready, and the most memory it takes.

    python benchmarks/load_time.py [--model NAME=PATH …] [--rounds 5] [--json]

Every round loads in a process of its own, after the imports. Peak memory is the largest resident
set of that process while it loads. Beside it what is in it besides the weights: the interpreter as
it is after the imports, and the tokenizer, made once more by itself in another process; the peak
against the three together; and what of it is gone when the engine is ready. The file is in the page
cache from the second round on.
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
from typing import Any, NamedTuple

from _models import models
from _script import as_script


class Load(NamedTuple):
    """One round, in seconds and bytes."""

    seconds: float
    before: int  # resident: the interpreter
    peak: int
    after: int
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
    interpreter_mb: float
    tokenizer_mb: float
    explained_share: float  # the peak, of interpreter, tokenizer and weights
    transient_mb: float  # of the peak, gone when the engine is ready


def status(field: str) -> int:
    """A size from this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def load_here(path: Path) -> Load:
    from octavo.engine import load

    before = status("VmRSS")
    began = time.perf_counter()
    loaded = load.load_engine(path, load.EngineConfig(kv_cache_memory_bytes=64 << 20))
    seconds, after = time.perf_counter() - began, status("VmRSS")
    return Load(seconds, before, status("VmHWM"), after, loaded.weight_bytes)


def tokenizer_here(path: Path) -> int:
    """Bytes that a checkpoint's tokenizer, metadata and chat template take, its weights unread."""
    from octavo.engine import load as engine  # noqa: F401  (the same imports)
    from octavo.loader import load

    before = status("VmRSS")
    checkpoint = load(path)
    checkpoint.release()
    return status("VmRSS") - before


def apart(what: str, path: Path) -> Any:
    child = subprocess.run(
        [sys.executable, __file__, what, str(path)], check=True, stdout=subprocess.PIPE
    )
    return json.loads(child.stdout)


def measure(name: str, path: Path, rounds: int) -> Row:
    loads = [Load(*apart("--load", path)) for _ in range(rounds)]
    tokenizer = min(apart("--tokenizer", path) for _ in range(rounds))
    weights, most = loads[0].weights, max(loads, key=lambda load: load.peak)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return Row(
        name,
        sum(file.stat().st_size for file in files) / 1e6,
        statistics.median(load.seconds for load in loads),
        max(load.seconds for load in loads),
        weights / 1e6,
        most.peak / 1e6,
        most.peak / weights,
        most.before / 1e6,
        tokenizer / 1e6,
        most.peak / (most.before + tokenizer + weights),
        (most.peak - most.after) / 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", help="NAME=PATH of a GGUF file or a folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # the process of a round
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tokenizer:
        print(json.dumps(tokenizer_here(args.tokenizer)))
        return
    if args.load:
        print(json.dumps(load_here(args.load)))
        return
    rows = [measure(name, path, args.rounds) for name, path in models(args.model).items()]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(
        "| model | file MB | load s (worst) | weights MB | peak MB | of weights | interpreter "
        "| tokenizer | of all three | gone after |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.model} | {row.file_mb:.0f} | {row.seconds:.2f} ({row.worst_seconds:.2f}) "
            f"| {row.weights_mb:.0f} | {row.peak_mb:.0f} | {row.peak_share:.2f} "
            f"| {row.interpreter_mb:.0f} | {row.tokenizer_mb:.0f} | {row.explained_share:.2f} "
            f"| {row.transient_mb:.0f} |"
        )


if __name__ == "__main__":
    as_script(main)
