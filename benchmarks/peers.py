"""Octavo beside its peers: same file, same machine, alternating rounds in one run.

    python benchmarks/peers.py --model FILE [--model NAME=FILE …] \\
        --peers llama.cpp,ik_llama.cpp,openvino --llama-cpp BUILD/bin --ik-llama-cpp BUILD/bin \\
        --openvino PYTHON [--json FILE] [--settings EARLIER.json]

What is measured, all in tokens per second, higher is better:

- ``prefill``: a prompt of ``--prompt`` tokens alone, logits of its last token only.
- ``decode-N``: N sequences in step, each with a context of ``--context`` tokens; output tokens of
  all sequences together. No sampling on any side.
- ``serve-N``: N clients, each sending its next completion (``--input`` tokens in, ``--output``
  out, greedy, end of sequence ignored) when the last has finished; output tokens of all over the
  wall time. Prompts are random tokens and never shared, so no prefix is cached.

Lengths left open depend on the file's size: those of models above 400 MB are shorter (`LARGE`).

First each peer's settings are probed: every candidate once, those close to the best a second time,
and the fastest is kept for each workload. ``--settings`` takes them from an earlier run's JSON
instead. Then a round takes each workload once on each engine, one right after the other, in an
order that alternates from round to round; a figure is the median of the rounds. An engine that
cannot load a file or lacks a workload is left out by name and with the reason.

llama.cpp and ik_llama.cpp come from builds for this machine (``GGML_NATIVE``), OpenVINO GenAI from
a Python that has it; Octavo's kernels are driven through its native executor. Octavo and OpenVINO
stay loaded in processes that are idle between their turns.

Each measurement notes what share of the machine's processor time went to others meanwhile
(``foreign``, from /proc/stat). Spinning thread pools lose far more than that share, so one above
``--quiet`` (5 %) is repeated up to ``--retries`` times and the quietest kept; those still above are
left out of the medians while enough others remain, else marked with a star.

In the JSON, ``models.NAME.workloads.WORKLOAD`` has ``octavo``, each peer (null where left out) and
``ratio_to_best_peer``; ``left_out`` has the reasons, ``settings`` what the probe chose out of
``probed``, and ``samples`` everything that was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from _models import MADE, made, models
from _peers import llama_cpp, openvino
from _peers.base import Figure, Peer, Settings, Task, Unavailable, Workload, label
from _peers.octavo import Octavo
from _peers.results import OURS, Sample, summarize, table
from _peers.serving import serve
from _script import as_script
from octavo import loader

PEERS = ("llama.cpp", "ik_llama.cpp", "openvino")
CLOSE = 0.9  # of the best: candidates that are probed a second time
CONTENDER = 0.8  # of the best: those that are tried for the next number of sequences


class Lengths(NamedTuple):
    """Defaults of the options by the same names."""

    prompt: int
    context: int
    steps: int
    requests: int


SMALL = Lengths(prompt=512, context=128, steps=32, requests=2)
LARGE = Lengths(prompt=256, context=64, steps=16, requests=1)
LARGE_BYTES = 400e6


class Comparison:
    """One model on all engines."""

    def __init__(self, peers: list[Peer], task: Task, args: argparse.Namespace) -> None:
        self.task = task
        self.args = args
        self.peers = peers
        self.settings: dict[str, dict[str, Settings]] = {}  # engine -> workload -> chosen
        self.left_out: list[dict[str, str]] = []
        self.probed: list[dict[str, Any]] = []
        self.samples: list[Sample] = []

    def take(self, peer: Peer, workload: Workload, settings: Settings, seed: int) -> Figure:
        if workload.kind == "serve":
            command = peer.server(workload.parallel, settings)
            return serve(command, self.task, workload.parallel, peer.request, seed)
        return peer.kernel(workload, settings)

    def leave_out(self, peer: Peer, workload: Workload, reason: Unavailable) -> None:
        self.left_out.append(
            {"engine": peer.name, "workload": workload.name, "reason": str(reason)}
        )
        print(f"  {peer.name} is left out of {workload.name}: {reason}", flush=True)

    def probe(self, workloads: list[Workload], known: dict[str, dict[str, Settings]]) -> None:
        """Chooses each engine's settings, known ones first; leaves out who cannot do it at all."""
        contenders: dict[str, list[Settings]] = {}
        for workload in workloads:
            for peer in self.peers:
                chosen = self.settings.setdefault(peer.name, {})
                if workload.name in known.get(peer.name, {}):
                    chosen[workload.name] = known[peer.name][workload.name]
                    continue
                candidates = peer.candidates(workload)
                # These take long and are made of what went before, whose best are tried alone.
                if workload.kind == "serve" and chosen:
                    candidates = [s for s in candidates if s in chosen.values()]
                if workload.kind == "decode" and workload.parallel > 1:
                    candidates = contenders.get(peer.name, candidates)
                try:
                    ranking = self.rank(peer, workload, candidates)
                except Unavailable as reason:
                    self.leave_out(peer, workload, reason)
                    continue
                chosen[workload.name] = ranking[0]
                if workload.kind == "decode" and workload.parallel > 1:
                    contenders[peer.name] = ranking

    def rank(self, peer: Peer, workload: Workload, candidates: list[Settings]) -> list[Settings]:
        """The contenders for the fastest settings, best first. Raises `Unavailable`."""
        if workload.kind == "serve":
            peer.server(workload.parallel, candidates[0])  # raises if it has none
        if len(candidates) == 1:
            return candidates
        rates: dict[int, float] = {}
        failed: dict[int, Unavailable] = {}
        for again in (False, True):
            for index, settings in enumerate(candidates):
                if again and rates.get(index, 0.0) < CLOSE * max(rates.values()):
                    continue
                entry = {"engine": peer.name, "workload": workload.name, "settings": settings}
                try:
                    rate = self.take(peer, workload, settings, 100 + again).tokens_per_second
                except Unavailable as reason:
                    failed[index] = reason
                    self.probed.append({**entry, "reason": str(reason)})
                    outcome = f"  {reason}"
                else:
                    rates[index] = max(rates.get(index, 0.0), rate)
                    self.probed.append({**entry, "tokens_per_second": rate})
                    outcome = f"{rate:9.1f} t/s"
                print(
                    f"  probe {workload.name:10} {peer.name:12} {label(settings):32}{outcome}",
                    flush=True,
                )
            if not rates:
                raise failed[0]
        order = sorted(rates, key=lambda index: -rates[index])
        return [candidates[i] for i in order if rates[i] > CONTENDER * rates[order[0]]]

    def round(self, workload: Workload, index: int) -> None:
        for peer in self.peers if index % 2 == 0 else self.peers[::-1]:
            settings = self.settings.get(peer.name, {}).get(workload.name)
            if settings is None:
                continue  # left out by the probe
            try:
                rate, foreign, extra = self.quietest(peer, workload, settings, index)
            except Unavailable as reason:
                self.leave_out(peer, workload, reason)
                del self.settings[peer.name][workload.name]
                continue
            self.samples.append(
                Sample(peer.name, workload.name, index, rate, foreign, label(settings), extra)
            )
            print(
                f"  round {index} {workload.name:10} {peer.name:12} {label(settings):26}"
                f"{rate:9.1f} t/s   others {100 * foreign:4.1f} %",
                flush=True,
            )

    def quietest(self, peer: Peer, workload: Workload, settings: Settings, seed: int) -> Figure:
        tries = [self.take(peer, workload, settings, seed)]
        while tries[-1].foreign > self.args.quiet and len(tries) <= self.args.retries:
            tries.append(self.take(peer, workload, settings, seed))
        return min(tries, key=lambda figure: figure.foreign)


@contextmanager
def engines(task: Task, args: argparse.Namespace) -> Iterator[list[Peer]]:
    makers: dict[str, Callable[[], Peer]] = {
        "llama.cpp": lambda: llama_cpp.LlamaCpp(task, args.llama_cpp),
        "ik_llama.cpp": lambda: llama_cpp.IkLlamaCpp(task, args.ik_llama_cpp),
        "openvino": lambda: openvino.OpenVino(task, args.openvino),
    }
    peers = [Octavo(task), *(makers[name]() for name in args.peers)]
    try:
        yield peers
    finally:
        for peer in peers:
            peer.close()


def compare(name: str, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One model's part of the report."""
    defaults = LARGE if model.stat().st_size > LARGE_BYTES else SMALL
    given = {key: getattr(args, key) for key in Lengths._fields if getattr(args, key) is not None}
    task = Task(
        model=model.resolve(),
        vocab=loader.load(model).config.vocab_size,
        threads=args.threads,
        sequences=max(args.sequences),
        input=args.input,
        output=args.output,
        stream=args.stream,
        **{**defaults._asdict(), **given},
    )
    kernels = [Workload("prefill", 1), *(Workload("decode", n) for n in args.sequences)]
    workloads = (kernels if "kernels" in args.what else []) + (
        [Workload("serve", args.clients)] if "serve" in args.what else []
    )
    known = {}
    if args.settings:
        known = json.loads(Path(args.settings).read_text())["models"].get(name, {})
    with engines(task, args) as peers:
        comparison = Comparison(peers, task, args)
        comparison.probe(workloads, known.get("settings", {}))
        for index in range(args.rounds):
            for workload in workloads:
                if workload.kind != "serve" or index < args.serve_rounds:
                    comparison.round(workload, index)
    names = [OURS, *args.peers]
    rows = summarize(comparison.samples, names, args.quiet)
    print("\n" + table(name, rows, names) + "\n", flush=True)
    lengths = {key: value for key, value in asdict(task).items() if key != "model"}
    return {
        "file": model.name,
        "task": lengths,
        "workloads": rows,
        "settings": comparison.settings,
        "left_out": comparison.left_out,
        "probed": comparison.probed,
        "samples": [asdict(sample) for sample in comparison.samples],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", action="append", help="[NAME=]FILE, a GGUF file; default: those in the cache"
    )
    parser.add_argument(
        "--peers", help=f"of {','.join(PEERS)}, with commas between; default: those given below"
    )
    parser.add_argument("--llama-cpp", metavar="DIR", help="folder with llama.cpp's programs")
    parser.add_argument("--ik-llama-cpp", metavar="DIR", help="folder with ik_llama.cpp's programs")
    parser.add_argument("--openvino", metavar="PYTHON", help="Python that has openvino-genai")
    parser.add_argument(
        "--what", nargs="+", choices=["kernels", "serve"], default=["kernels", "serve"]
    )
    parser.add_argument("--settings", metavar="JSON", help="take settings from an earlier run")
    parser.add_argument("--rounds", type=int, default=3, help="0: probe the settings only")
    parser.add_argument("--serve-rounds", type=int, default=2, help="of those, with served load")
    parser.add_argument("--quiet", type=float, default=0.05)
    parser.add_argument("--retries", type=int, default=0, help="of a measurement not quiet")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompt", type=int, help="tokens of a prefill")
    parser.add_argument("--context", type=int, help="tokens before the first timed decode step")
    parser.add_argument("--steps", type=int, help="decode steps timed")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, help="completions a client sends")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--stream", action="store_true", help="clients ask for streams")
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()

    flags = {
        "llama.cpp": args.llama_cpp,
        "ik_llama.cpp": args.ik_llama_cpp,
        "openvino": args.openvino,
    }
    wanted = args.peers.split(",") if args.peers else [name for name in PEERS if flags[name]]
    for name in wanted:
        if name not in flags:
            parser.error(f"--peers: {name!r} is not one of {', '.join(PEERS)}")
        if flags[name] is None:
            option = "--" + name.replace("_", "-").replace(".", "-")
            print(f"{name} is left out: {option} does not say where it is")
    args.peers = [name for name in wanted if flags[name] is not None]
    if not args.peers:
        print("no peer to compare with: Octavo alone")

    ask = {"openvino": openvino.version}
    versions = {name: ask.get(name, llama_cpp.version)(flags[name]) for name in args.peers}
    report: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "versions": versions,
        "not_given": [name for name in wanted if flags[name] is None],
        "models": {},
    }
    chosen = models(args.model)
    if not args.model:
        chosen |= {name: made(name) for name in MADE if made(name).exists()}
    for name, path in chosen.items():
        print(name, flush=True)
        began = time.monotonic()
        report["models"][name] = compare(name, path, args)
        report["models"][name]["seconds"] = time.monotonic() - began
        if args.json:  # after each model, so that an interrupted run keeps what it has
            Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    as_script(main)
