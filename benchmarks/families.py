"""Hybrid and sparse families beside llama.cpp: same file, same machine, in turns.

    python benchmarks/families.py --llama-cpp BUILD/bin [--model NAME …] [--rounds 2] [--json FILE]

The models are `family_models.py`'s, made where they are missing: true widths, random weights. A
prompt of 512 tokens, and steps of 1, 8 and 32 sequences at a context of 64, as `peers.py` measures
them. Every round takes each workload on both engines in both depths of a model, one right after the
other. llama.cpp runs with flash attention, its best setting or within noise of it. A layer's time
is the difference of the two depths over that of their layers, so the embedding, the head and what a
step costs at all are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _peers import llama_cpp
from _peers.base import Task, Workload
from _peers.results import OURS, summarize
from _script import as_script
from family_models import MODELS, FamilyModel, made, make
from octavo.loader import pull
from peers import Comparison, engines

PEER = "llama.cpp"
PROMPT, CONTEXT, STEPS = 512, 64, 16  # tokens
SEQUENCES = (1, 8, 32)
WORKLOADS = [Workload("prefill", 1), *(Workload("decode", count) for count in SEQUENCES)]
BARS = {"prefill": 1.5, "decode-1": 1.25, "decode-8": 1.8, "decode-32": 1.8}
Rows = dict[str, dict[str, Any]]


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One model's part of the report."""
    model = MODELS[name]
    with ExitStack() as stack:
        comparisons = {}
        for layers in model.depths:
            path = made(name, layers)
            task = Task(
                model=path if path.exists() else make(name, layers, pull.resolve("smollm2")),
                vocab=model.vocab,
                threads=args.threads,
                prompt=PROMPT,
                context=CONTEXT,
                steps=STEPS,
                sequences=max(SEQUENCES),
                input=0,  # nothing is served
                output=0,
                requests=0,
                stream=False,
            )
            peers = stack.enter_context(engines(task, args))
            comparisons[layers] = Comparison(peers, task, args)
            for peer in peers:
                first = {work.name: peer.candidates(work)[0] for work in WORKLOADS}
                comparisons[layers].settings[peer.name] = first
        for index in range(args.rounds):
            for workload in WORKLOADS:
                for comparison in comparisons.values():
                    comparison.round(workload, index)
    rows = {
        layers: summarize(comparison.samples, [OURS, PEER], args.quiet)
        for layers, comparison in comparisons.items()
    }
    print("\n" + table(model, rows) + "\n", flush=True)
    return {
        "title": model.title,
        "depths": model.depths,
        "workloads": rows[model.depths[0]],
        "per_layer": {work.name: of_layer(model, rows, work) for work in WORKLOADS},
        "left_out": [reason for each in comparisons.values() for reason in each.left_out],
        "samples": {layers: [asdict(s) for s in c.samples] for layers, c in comparisons.items()},
    }


def of_layer(model: FamilyModel, rows: dict[int, Rows], workload: Workload) -> dict[str, float]:
    """The seconds that a layer takes of a prompt or a step, by engine."""
    tokens = PROMPT if workload.kind == "prefill" else workload.parallel
    first, second = model.depths
    found = {}
    for engine in (OURS, PEER):
        rates = [rows[layers].get(workload.name, {}).get(engine) for layers in (first, second)]
        if None not in rates:
            found[engine] = tokens * (1 / rates[0] - 1 / rates[1]) / (first - second)
    return found


def table(model: FamilyModel, rows: dict[int, Rows]) -> str:
    lines = [
        f"{model.title}, {model.depths[0]} layers",
        f"{'':10}{'octavo':>10}{PEER:>11}{'ratio':>20}{'bar':>6}{'a layer, ms':>22}{'ratio':>7}",
    ]
    for workload in WORKLOADS:
        row = rows[model.depths[0]].get(workload.name)
        if row is None or row["ratio_to_best_peer"] is None:
            lines.append(f"{workload.name:10}  left out")
            continue
        ratio = f"{row['ratio_to_best_peer']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"
        line = f"{workload.name:10}{row[OURS]:>10.1f}{row[PEER]:>11.1f}{ratio:>20}"
        line += f"{BARS[workload.name]:>6}"
        layer = of_layer(model, rows, workload)
        if len(layer) == 2:
            both = f"{1e3 * layer[OURS]:.2f}, {1e3 * layer[PEER]:.2f}"
            line += f"{both:>22}{layer[PEER] / layer[OURS]:>7.2f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--llama-cpp", metavar="DIR", required=True, help="llama.cpp's programs")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quiet", type=float, default=0.05)
    parser.add_argument("--retries", type=int, default=0, help="of a measurement not quiet")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    args.peers = [PEER]
    args.ik_llama_cpp = args.openvino = None
    report: dict[str, Any] = {"version": llama_cpp.version(args.llama_cpp), "models": {}}
    for name in args.model or MODELS:
        print(name, flush=True)
        report["models"][name] = compare(name, args)
        if args.json:  # after each model, so that an interrupted run keeps what it has
            Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    as_script(main)
