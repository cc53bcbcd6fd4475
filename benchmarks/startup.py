"""From the command to the first answer: seconds until ready, memory, processor time at rest.

    python benchmarks/startup.py [--model NAME=PATH …] [--rounds 5] [--json]

Every round starts `octavo serve` afresh and asks /ready every 10 ms. Memory is of the server and
its children after a completion; the bound is the packed weights, the KV blocks in use and 200 MB.
Rest is five seconds without a request.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from _models import models
from _script import as_script

ALLOWED_S = {"smollm2": 1.5, "gemma3-270m": 3.0}
REST_S = 5.0


@dataclass(frozen=True)
class Row:
    model: str
    ready_s: float  # median over the rounds
    ready_worst_s: float
    allowed_s: float | None
    resident_mb: float  # largest over the rounds
    weights_mb: float
    rest_cpu_ms_per_s: float  # largest over the rounds


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def resident(pid: int) -> int:
    """Bytes."""
    pages = sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    total = 0
    for each in family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def answered(request: str | urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status == 200
    except OSError:
        return False


def wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        if process.poll() is not None:
            raise SystemExit(f"octavo serve ended with code {process.returncode}")
        time.sleep(0.01)


def start(path: Path) -> tuple[float, int, float]:
    """(seconds until ready, resident bytes, processor seconds a second at rest) of one start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    program = "from octavo.cli import main; main()"
    arguments = ["serve", str(path), "--port", str(port), "--served-model-name", "m"]
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait(lambda: answered(f"{url}/ready"), process)
        ready = time.perf_counter() - began
        body = json.dumps({"model": "m", "prompt": "Once upon a time", "max_tokens": 32}).encode()
        headers = {"Content-Type": "application/json"}
        if not answered(urllib.request.Request(f"{url}/v1/completions", body, headers)):
            raise SystemExit("the server was ready and did not answer")
        memory = resident(process.pid)
        time.sleep(1)
        before = cpu_seconds(process.pid)
        time.sleep(REST_S)
        return ready, memory, (cpu_seconds(process.pid) - before) / REST_S
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def measure(name: str, path: Path, rounds: int) -> Row:
    from octavo.engine.config import EngineConfig
    from octavo.engine.load import load_engine

    small = EngineConfig(kv_cache_memory_bytes=64 << 20)
    weights = load_engine(path, small).weight_bytes
    ready, memory, rest = zip(*(start(path) for _ in range(rounds)), strict=True)
    return Row(
        name,
        statistics.median(ready),
        max(ready),
        ALLOWED_S.get(name),
        max(memory) / 1e6,
        weights / 1e6,
        1e3 * max(rest),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", help="NAME=PATH of a GGUF file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(name, path, args.rounds) for name, path in models(args.model).items()]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print("| model | ready s (worst) | allowed s | resident MB | weights MB | at rest, CPU ms/s |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.model} | {row.ready_s:.2f} ({row.ready_worst_s:.2f}) | {row.allowed_s or ''} "
            f"| {row.resident_mb:.0f} | {row.weights_mb:.0f} | {row.rest_cpu_ms_per_s:.1f} |"
        )


if __name__ == "__main__":
    as_script(main)
