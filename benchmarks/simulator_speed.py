"""How fast the simulator is: whole traces, and a slice with leaps and step by step.

    python benchmarks/simulator_speed.py azure-llm-2023-conv.csv mooncake-synthetic.jsonl [--json]

Llama 3.1 8B on an H100's published figures. Each run is a process of its own, so that its peak
memory (getrusage) is its own; the seconds are its processor time, traces read and prompts made
included. The two runs of the slice must agree to the last digit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _script import as_script
from octavo.engine.config import EngineConfig
from octavo.tools.plan.hardware import PUBLISHED
from octavo.tools.plan.simulation import Setup, simulate, weights_on
from octavo.tools.plan.subject import Subject
from octavo.tools.workload import traces

SLICE = 1000
COLUMNS = ("trace", "leaps", "requests", "steps", "seconds", "requests_per_s", "peak_mib")


def run(trace: Path, requests: int | None, leaps: bool) -> dict[str, Any]:
    started = time.process_time()
    samples, _ = traces.load(trace, None, traces.Window(most=requests))
    subject, device = Subject.find("llama-3.1-8b"), PUBLISHED["h100"]
    config = EngineConfig(memory_utilization=0.9, max_num_batched_tokens=2048)
    setup = Setup(subject, weights_on(device, subject), device, config)
    done = simulate(setup, samples, leaps=leaps)
    seconds = time.process_time() - started
    digest = hashlib.sha256()
    for record in done.replay.records:
        digest.update(repr((record.ttft, record.latency, record.preemptions)).encode())
        digest.update(record.itl.tobytes())
    return {
        "trace": trace.name,
        "leaps": leaps,
        "requests": len(samples),
        "steps": done.engine.stats().steps,
        "seconds": round(seconds, 2),
        "requests_per_s": round(len(samples) / seconds, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "result": digest.hexdigest(),
    }


def apart(trace: Path, requests: int | None, leaps: bool) -> dict[str, Any]:
    """`run` in a process of its own."""
    command = [sys.executable, __file__, str(trace), "--one", json.dumps([requests, leaps])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        requests, leaps = json.loads(arguments.one)
        print(json.dumps(run(arguments.traces[0], requests, leaps)))
        return
    rows = []
    for trace in arguments.traces:
        rows += [apart(trace, SLICE, False), apart(trace, SLICE, True), apart(trace, None, True)]
        if rows[-3]["result"] != rows[-2]["result"]:
            sys.exit(f"{trace}: leaping gives another result")
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for row in rows:
        print("| " + " | ".join(str(row[column]) for column in COLUMNS) + " |")


if __name__ == "__main__":
    as_script(main)
