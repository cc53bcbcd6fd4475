"""Streams that run while long prompts arrive, and short newcomers: who is stalled, how long.

    python benchmarks/long_prompts.py model.gguf [--itl-target 50] [--llama-cpp PATH] [--json]

Each server in turn, a subprocess with the same load over HTTP: octavo with and without a target,
and llama.cpp's server (``--llama-cpp``: its executable). Of the running streams it is the gap
between tokens that counts, of the newcomers the time to the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from octavo.bench.load.client import Client, Target

STREAMS, SECONDS = 4, 30.0
LONG, SHORT = 1600, 24  # words: a token or somewhat more each
LONG_EVERY, SHORT_EVERY = 4.0, 1.0  # seconds
PATIENCE = 120.0  # seconds for a server to start, and for a request
COMMON = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
]


@dataclass(frozen=True)
class Row:
    server: str
    p50_gap_ms: float
    p99_gap_ms: float
    worst_gap_ms: float
    p99_newcomer_ttft_ms: float
    long_ttft_ms: float  # median
    failed: int


class Arrivals:
    """When pieces of an answer came."""

    def __init__(self) -> None:
        self.status = 0
        self.times: list[float] = []
        self.failed = ""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data(self, chunk: bytes, now: float) -> bool:
        if b'"text"' in chunk:
            self.times.append(now)
        return True

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def fail(self, reason: str, detail: str) -> None:
        self.failed = f"{reason} {detail}"
        self.end()


async def ask(
    client: Client, rng: random.Random, words: int, answer: int
) -> tuple[float, Arrivals]:
    prompt = " ".join(rng.choice(COMMON) for _ in range(words))
    body = {"prompt": prompt, "max_tokens": answer, "stream": True, "ignore_eos": True,
            "temperature": 0.0, "model": "m"}  # fmt: skip
    sink = Arrivals()
    started = time.perf_counter()
    request = client.request("POST", "/v1/completions", json.dumps(body).encode())
    await client.exchange(request, sink, PATIENCE)
    return started, sink


async def load(name: str, url: str) -> Row:
    client, rng = Client(Target.of(url), {}), random.Random(1)
    deadline = time.perf_counter() + PATIENCE
    while (await client.get("GET", "/health")).status != 200:
        if time.perf_counter() > deadline:
            raise SystemExit(f"{name} does not start")
        await asyncio.sleep(0.3)
    await ask(client, rng, 200, 8)
    end = time.perf_counter() + SECONDS

    async def stream() -> list[Arrivals]:
        answers = []
        while time.perf_counter() < end:
            answers.append((await ask(client, rng, 16, 400))[1])
        return answers

    async def every(seconds: float, words: int) -> list[tuple[float, Arrivals]]:
        asked = []
        while time.perf_counter() < end:
            await asyncio.sleep(seconds)
            asked.append(asyncio.create_task(ask(client, rng, words, 8)))
        return list(await asyncio.gather(*asked))

    streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
    await asyncio.sleep(1)
    long, short = await asyncio.gather(every(LONG_EVERY, LONG), every(SHORT_EVERY, SHORT))
    answers = [answer for each in await asyncio.gather(*streams) for answer in each]
    await client.close()
    gaps = np.concatenate([np.diff(answer.times) for answer in answers]) * 1e3
    failed = [a for a in (*answers, *(a for _, a in (*long, *short))) if a.failed or not a.times]

    def ttft(asked: Sequence[tuple[float, Arrivals]]) -> list[float]:
        return [1e3 * (answer.times[0] - at) for at, answer in asked if answer.times]

    p50, p99, worst = np.percentile(gaps, (50, 99, 100)).tolist()
    return Row(
        name,
        p50,
        p99,
        worst,
        float(np.percentile(ttft(short), 99)),
        float(np.median(ttft(long))),
        len(failed),
    )


def serve(name: str, command: list[str], port: int) -> Row:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(load(name, f"http://127.0.0.1:{port}"))
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--itl-target", type=float, default=50.0, metavar="MS")
    parser.add_argument("--llama-cpp", type=Path, help="its llama-server, to compare with")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    target = f"{arguments.itl_target:g}"
    octavo = [sys.executable, "-c", "from octavo.cli import main; main()", "serve"]
    octavo += [str(arguments.model), "--port", str(port), "--served-model-name", "m"]
    servers = {f"octavo, --itl-target {target}": [*octavo, "--itl-target", target],
               "octavo": octavo}  # fmt: skip
    if arguments.llama_cpp is not None:
        servers["llama.cpp"] = [
            str(arguments.llama_cpp), "-m", str(arguments.model), "--port", str(port),
            "-np", "8", "-c", "32768",
        ]  # fmt: skip
    rows = [serve(name, command, port) for name, command in servers.items()]
    if arguments.json:
        print(json.dumps({"itl_target_ms": arguments.itl_target, "rows": list(map(asdict, rows))}))
        return
    print("| server | gap p50 ms | p99 | worst | newcomers' TTFT p99 ms | long TTFT ms | failed |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        figures = " | ".join(f"{value:.0f}" for value in list(asdict(row).values())[1:])
        print(f"| {row.server} | {figures} |")


if __name__ == "__main__":
    main()
