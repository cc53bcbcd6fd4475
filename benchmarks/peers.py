"""Octavo beside llama.cpp: same file, same machine, alternating rounds in one run.

    python benchmarks/peers.py --model smollm2=PATH --llama-cpp BUILD/bin [--json FILE]

What is measured, all in tokens per second, higher is better:

- ``prefill``: a prompt of ``--prompt`` tokens alone, logits of its last token only.
- ``decode-N``: N sequences in step, each with a context of ``--context`` tokens; output tokens of
  all sequences together. No sampling on either side.
- ``serve``: ``--clients`` clients, each sending its next completion (``--input`` tokens in,
  ``--output`` out, greedy, end of sequence ignored) when the last has finished; output tokens of
  all over the wall time. Prompts are random tokens and never shared, so no prefix is cached.

A round takes each metric once on each side, one right after the other, in an order that alternates
from round to round; a figure is the median of the rounds.
llama.cpp runs with flash attention on and off (``--flash both``), and the better median counts.
``llama-bench``, ``llama-batched-bench`` and ``llama-server`` come from a build for this machine
(``GGML_NATIVE``); without ``--llama-cpp`` only Octavo is measured. Octavo's kernels are driven
through its native executor in a process of their own, which is this file with ``--worker``.

Each measurement notes what share of the machine's processor time went to others meanwhile
(``foreign``, from /proc/stat). Spinning thread pools lose far more than that share, so one above
``--quiet`` (5 %) is repeated up to ``--retries`` times and the quietest kept; those still above are
marked, and left out of the medians while enough others remain.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from _models import models

SIDES = ("octavo", "llama.cpp")
STARTUP_SECONDS = 60.0


@dataclass
class Sample:
    """One figure of one round."""

    side: str
    metric: str
    variant: str  # settings of the peer: "fa=on"; "" for Octavo
    round: int
    tokens_per_second: float
    foreign: float  # share of the machine's processor time used by others meanwhile, 0 to 1
    extra: dict[str, float] = field(default_factory=dict)


@dataclass
class Settings:
    threads: int
    prompt: int
    context: int
    steps: int
    sequences: list[int]
    clients: int
    requests: int
    input: int
    output: int
    stream: bool


# --- how quiet the machine was ------------------------------------------------------------------


def machine_busy() -> float:
    """Processor seconds spent on anything since boot, all cores (steal included)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = [int(value) for value in fields[:8]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds(pid: int | None) -> float:
    """Processor seconds of this process, of its finished children, and of a running one."""
    total = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    if pid is not None:
        values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += sum(int(v) for v in values[11:15]) / os.sysconf("SC_CLK_TCK")
    return total


class Interference:
    """The share of the machine that others used between construction and `share`."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._wall, self._busy, self._own = time.monotonic(), machine_busy(), own_seconds(pid)

    def share(self) -> float:
        wall = time.monotonic() - self._wall
        others = machine_busy() - self._busy - (own_seconds(self._pid) - self._own)
        return max(0.0, others / (wall * (os.cpu_count() or 1)))


# --- kernels -------------------------------------------------------------------------------------


def llama_kernel(binaries: Path, model: Path, flash: str, s: Settings, count: int) -> float:
    """Tokens/s from llama-bench (prefill, ``count`` 0) or llama-batched-bench (decode)."""
    common = ["-m", str(model), "-t", str(s.threads), "-b", "512", "-ub", "512"]
    if count == 0:
        bench = [str(binaries / "llama-bench"), *common, "-fa", "1" if flash == "on" else "0"]
        rows = json.loads(run([*bench, "-p", str(s.prompt), "-n", "0", "-r", "2", "-o", "json"]))
        return float(rows[0]["avg_ts"])
    bench = [str(binaries / "llama-batched-bench"), *common, "-fa", flash, "-npl", str(count)]
    bench += ["-c", str(count * (s.context + s.steps) + 256), "--output-format", "jsonl"]
    for line in run([*bench, "-npp", str(s.context), "-ntg", str(s.steps)]).splitlines():
        if line.startswith("{"):
            return float(json.loads(line)["speed_tg"])
    raise RuntimeError("llama-batched-bench printed no result")


def octavo_kernel(python: str, model: Path, s: Settings, count: int) -> float:
    spec = json.dumps(asdict(s))
    worker = [python, str(Path(__file__).resolve()), "--worker", str(model), spec, str(count)]
    return float(run(worker).splitlines()[-1])


def worker(model: Path, s: Settings, count: int) -> float:
    """Octavo's side of `llama_kernel`, in this process: native executor, hand-made batches."""
    from octavo import checkpoint as checkpoints
    from octavo.execute.batch import Batch
    from octavo.execute.native import NativeExecutor
    from octavo.kv.layout import KvLayout
    from octavo.model import families

    checkpoint = checkpoints.load(model)
    layout = KvLayout.of(checkpoint.config)
    size = layout.block_size
    most = max(1, count)
    blocks = -(-max(s.prompt, s.context + s.steps) // size)
    groups = len(layout.groups)
    executor = NativeExecutor(
        checkpoint,
        families.program(checkpoint.config),
        layout,
        num_blocks=groups * most * blocks,
        max_tokens=max(s.prompt, s.context, most),
        max_logits_rows=most,
        max_seqs=most,
        max_blocks_per_seq=blocks,
        threads=s.threads,
    )
    tables = np.arange(groups * most * blocks, dtype=np.int32).reshape(groups, most, blocks)
    rng = np.random.default_rng(0)
    vocab = checkpoint.config.vocab_size

    def step(slots: list[int], start: int, length: int) -> float:
        """Runs tokens start … start + length - 1 of each slot; seconds taken."""
        total = length * len(slots)
        batch = Batch(
            token_ids=rng.integers(10, vocab, total).astype(np.int32),
            positions=np.tile(np.arange(start, start + length, dtype=np.int32), len(slots)),
            seq_offsets=np.arange(0, total + 1, length, dtype=np.int32),
            seq_slots=np.array(slots, np.int32),
            block_tables=tables,
            logits_rows=np.arange(length - 1, total, length, dtype=np.int32),
            copies=np.zeros((0, 2), np.int32),
        )
        began = time.perf_counter()
        executor.execute(batch)
        return time.perf_counter() - began

    if count == 0:
        step([0], 0, s.prompt)  # warm-up
        rate = s.prompt / statistics.mean(step([0], 0, s.prompt) for _ in range(2))
    else:
        slots = list(range(count))
        for slot in slots:
            step([slot], 0, s.context)
        rate = count * s.steps / sum(step(slots, s.context + i, 1) for i in range(s.steps))
    executor.close()
    return rate


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-800:]}"
        )
    return done.stdout


# --- servers -------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


async def http(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes, float]:
    """(status, body, seconds to the first byte of the body) of one request, then closes."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status = int((await reader.readline()).split()[1])
    chunked = False
    while (line := await reader.readline()) not in (b"\r\n", b""):
        chunked |= line.lower().startswith(b"transfer-encoding: chunked")
    parts = []
    first = None
    if chunked:
        while (count := int((await reader.readline()).strip() or b"0", 16)) > 0:
            parts.append(await reader.readexactly(count))
            first = first or time.perf_counter()
            await reader.readline()
    else:
        parts.append(await reader.read())
        first = time.perf_counter()
    writer.close()
    return status, b"".join(parts), (first or time.perf_counter()) - began


def completion_tokens(body: bytes, stream: bool) -> int:
    if not stream:
        return int(json.loads(body)["usage"]["completion_tokens"])
    usage = 0
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                usage = int(chunk["usage"]["completion_tokens"])
    return usage


async def load(port: int, s: Settings, seed: int, name: str) -> tuple[float, dict[str, float]]:
    """(output tokens/s, details) of clients × requests completions in a closed loop."""
    rng = np.random.default_rng(seed)
    firsts: list[float] = []
    latencies: list[float] = []
    tokens = 0

    async def client(prompts: list[list[int]]) -> None:
        nonlocal tokens
        for prompt in prompts:
            body = {
                "model": name,
                "prompt": prompt,
                "max_tokens": s.output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": s.stream,
            }
            if s.stream:
                body["stream_options"] = {"include_usage": True}
            began = time.perf_counter()
            status, reply, first = await http(
                port, "POST", "/v1/completions", json.dumps(body).encode()
            )
            if status != 200:
                raise RuntimeError(f"status {status}: {reply[:300]!r}")
            got = completion_tokens(reply, s.stream)
            if got != s.output:
                raise RuntimeError(f"{got} tokens instead of {s.output}")
            tokens += got
            firsts.append(first)
            latencies.append(time.perf_counter() - began)

    prompts = rng.integers(1000, 40000, (s.clients, s.requests, s.input)).tolist()
    began = time.perf_counter()
    await asyncio.gather(*(client(p) for p in prompts))
    wall = time.perf_counter() - began
    details = {"wall_s": wall, "median_latency_s": statistics.median(latencies)}
    if s.stream:
        details["median_ttft_s"] = statistics.median(firsts)
    return tokens / wall, details


@contextmanager
def server(command: list[str], port: int) -> Iterator[tuple[int, float]]:
    """(process id, seconds until /health answered 200) of a running server."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
            try:
                status, _, _ = asyncio.run(http(port, "GET", "/health"))
                if status == 200:
                    break
            except (OSError, ValueError, IndexError):
                pass
            if time.monotonic() - began > STARTUP_SECONDS:
                raise RuntimeError(f"not ready after {STARTUP_SECONDS} s: {' '.join(command)}")
            time.sleep(0.05)
        yield process.pid, time.monotonic() - began
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve(command: Callable[[int], list[str]], s: Settings, seed: int, name: str) -> Sample:
    port = free_port()
    with server(command(port), port) as (pid, ready):
        warm = Settings(**{**asdict(s), "clients": 2, "requests": 1})
        asyncio.run(load(port, warm, seed + 1000, name))
        watch = Interference(pid)
        rate, details = asyncio.run(load(port, s, seed, name))
        return Sample("", "serve", "", 0, rate, watch.share(), {"ready_after_s": ready, **details})


def llama_server(
    binaries: Path, model: Path, flash: str, s: Settings
) -> Callable[[int], list[str]]:
    per_slot = s.input + s.output + 16

    def command(port: int) -> list[str]:
        out = [str(binaries / "llama-server"), "-m", str(model), "--port", str(port)]
        out += ["--host", "127.0.0.1", "-t", str(s.threads), "-np", str(s.clients)]
        out += ["-c", str(s.clients * per_slot), "-b", "512", "-ub", "512", "-fa", flash]
        return [*out, "--cache-ram", "0", "--no-cache-prompt", "--no-ui"]

    return command


def octavo_server(python: str, model: Path, name: str, s: Settings) -> Callable[[int], list[str]]:
    def command(port: int) -> list[str]:
        octavo = [python, "-c", "from octavo.cli import main; main()"]
        out = [*octavo, "serve", str(model), "--port", str(port), "--threads", str(s.threads)]
        return [*out, "--served-model-name", name]

    return command


# --- the run -------------------------------------------------------------------------------------


def measure(name: str, model: Path, args: argparse.Namespace, s: Settings) -> list[Sample]:
    binaries = Path(args.llama_cpp or ".").resolve()
    flashes = ["on", "off"] if args.flash == "both" else [args.flash]
    metrics = {"prefill": 0, **{f"decode-{count}": count for count in s.sequences}}
    if "kernels" not in args.what:
        metrics = {}
    if "serve" in args.what:
        metrics["serve"] = -1

    def take(side: str, flash: str, metric: str, index: int) -> Sample:
        if metric == "serve":
            command = (
                octavo_server(args.python, model, name, s)
                if side == "octavo"
                else llama_server(binaries, model, flash, s)
            )
            return serve(command, s, index, name)
        watch = Interference()
        rate = (
            octavo_kernel(args.python, model, s, metrics[metric])
            if side == "octavo"
            else llama_kernel(binaries, model, flash, s, metrics[metric])
        )
        return Sample("", metric, "", 0, rate, watch.share())

    samples: list[Sample] = []
    for index, metric in itertools.product(range(args.rounds), metrics):
        order = [side for side in SIDES if side in args.sides]
        for side in order if index % 2 == 0 else order[::-1]:
            for flash in flashes if side == "llama.cpp" else [""]:
                tries = [take(side, flash, metric, index)]
                while tries[-1].foreign > args.quiet and len(tries) <= args.retries:
                    tries.append(take(side, flash, metric, index))
                sample = min(tries, key=lambda x: x.foreign)
                sample.side, sample.round = side, index
                sample.variant = f"fa={flash}" if flash else ""
                samples.append(sample)
                print(
                    f"  round {index} {metric:10} {side:9} {sample.variant:7}"
                    f"{sample.tokens_per_second:9.1f} t/s   others {100 * sample.foreign:4.1f} %",
                    flush=True,
                )
    return samples


def medians(samples: list[Sample], quiet: float) -> dict[str, dict[str, Any]]:
    """Metric -> side -> median, its variant, rounds used; llama.cpp's best variant counts."""
    out: dict[str, dict[str, Any]] = {}
    for metric in dict.fromkeys(sample.metric for sample in samples):
        out[metric] = {}
        for side in SIDES:
            best: dict[str, Any] | None = None
            for variant in dict.fromkeys(x.variant for x in samples if x.side == side):
                rows = [
                    x for x in samples if (x.side, x.metric, x.variant) == (side, metric, variant)
                ]
                calm = [x for x in rows if x.foreign <= quiet]
                used = calm if len(calm) >= min(2, len(rows)) else rows
                if not used:
                    continue
                values = [x.tokens_per_second for x in used]
                entry = {
                    "tokens_per_second": statistics.median(values),
                    "low": min(values),
                    "high": max(values),
                    "variant": variant,
                    "rounds": len(values),
                    "quiet": len(calm) >= min(2, len(rows)),
                }
                if best is None or entry["tokens_per_second"] > best["tokens_per_second"]:
                    best = entry
            if best is not None:
                out[metric][side] = best
        if len(out[metric]) == len(SIDES):
            ours, theirs = (out[metric][side]["tokens_per_second"] for side in SIDES)
            out[metric]["ratio"] = ours / theirs
    return out


def table(name: str, results: dict[str, dict[str, Any]]) -> None:
    print(f"\n{name:14} {'octavo t/s':>22} {'llama.cpp t/s':>22} {'ratio':>7}")
    for metric, row in results.items():
        cells = []
        for side in SIDES:
            if side not in row:
                cells.append("-")
                continue
            entry = row[side]
            spread = (entry["high"] - entry["low"]) / 2
            busy = "" if entry["quiet"] else " busy"
            cells.append(f"{entry['tokens_per_second']:.1f} ± {spread:.1f}{busy}")
        ratio = f"{row['ratio']:7.2f}" if "ratio" in row else f"{'-':>7}"
        print(f"{metric:14} {cells[0]:>22} {cells[1]:>22} {ratio}")


def main() -> int:
    if len(sys.argv) == 5 and sys.argv[1] == "--worker":
        settings = Settings(**json.loads(sys.argv[3]))
        print(worker(Path(sys.argv[2]), settings, int(sys.argv[4])))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", action="append", help="NAME=PATH of a GGUF file")
    parser.add_argument("--llama-cpp", help="folder with llama.cpp's programs")
    parser.add_argument("--python", default=sys.executable, help="Python that has octavo")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument(
        "--what", nargs="+", choices=["kernels", "serve"], default=["kernels", "serve"]
    )
    parser.add_argument("--flash", choices=["on", "off", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=0.05)
    parser.add_argument("--retries", type=int, default=0, help="of a measurement not quiet")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=32, help="decode steps timed")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2, help="completions a client sends")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--stream", action="store_true", help="clients ask for streams")
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    s = Settings(
        threads=args.threads,
        prompt=args.prompt,
        context=args.context,
        steps=args.steps,
        sequences=args.sequences,
        clients=args.clients,
        requests=args.requests,
        input=args.input,
        output=args.output,
        stream=args.stream,
    )
    version = ""
    if args.llama_cpp is None:
        args.sides = ["octavo"]
        print("llama.cpp's programs were not given (--llama-cpp): Octavo alone")
    else:
        done = subprocess.run(
            [str(Path(args.llama_cpp) / "llama-server"), "--version"],
            capture_output=True,
            text=True,
            check=False,
        )
        version = (done.stdout + done.stderr).strip()
    report: dict[str, Any] = {
        "settings": asdict(s),
        "llama_cpp": version,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "models": {},
    }
    for name, path in models(args.model).items():
        print(name)
        samples = measure(name, path, args, s)
        results = medians(samples, args.quiet)
        table(name, results)
        report["models"][name] = {"results": results, "samples": [asdict(x) for x in samples]}
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
