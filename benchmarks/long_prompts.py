"""Streams that run while long prompts arrive, and short newcomers: who is stalled, how long.

    python benchmarks/long_prompts.py [MODEL] [--itl-target 50] [--llama-cpp PATH] [--json]

Each server in turn, a subprocess with the same load over HTTP: octavo with and without a target,
and llama.cpp's server (``--llama-cpp``: its executable), as it comes and with batches made small
against stalls. Of the running streams those gaps between tokens count that lie, in part at least,
between a long prompt and its first token, of the newcomers the time to the first token. Prompts are
sent as token ids, the same ones to each server.
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
from itertools import pairwise
from pathlib import Path

import numpy as np

from _script import as_script, stop
from octavo import loader
from octavo.loader.base import Tokenizer
from octavo.loader.pull import resolve
from octavo.tools.bench.load.client import Client, Endpoint

STREAMS, ANSWER, SECONDS = 4, 400, 8.0
LONG, SHORT, STREAM = 2000, 24, 16  # tokens of a prompt
LONG_EVERY, SHORT_EVERY = 2.5, 0.5  # seconds
PATIENCE = 120.0  # seconds for a server to start, and for a request
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government"
)
# Of all slots together; nothing is gained from prompts kept, for no two are alike.
LLAMA_CPP = ("-np", "8", "-c", "32768", "-t", "2", "--cache-ram", "0")
SMALL = "64"


@dataclass(frozen=True)
class Row:
    server: str
    p50_gap_ms: float
    p99_gap_ms: float
    worst_gap_ms: float
    gaps: int
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


class Load:
    """What each server gets."""

    def __init__(self, name: str, url: str, tokenizer: Tokenizer, seconds: float) -> None:
        self._name = name
        self._seconds = seconds
        self._client = Client(Endpoint.of(url), {})
        rng, words = random.Random(1), WORDS.split()
        # Made before: whoever measures must not be busy meanwhile.
        self._prompts = {
            tokens: [
                tokenizer.encode(" ".join(rng.choice(words) for _ in range(tokens)))[:tokens]
                for _ in range(_most(tokens, seconds))
            ]
            for tokens in (LONG, SHORT, STREAM)
        }

    async def run(self) -> Row:
        await self._until_it_serves()
        await self._ask(SHORT, 8)
        end = time.perf_counter() + self._seconds

        async def stream() -> list[Arrivals]:
            answers = []
            while time.perf_counter() < end:
                answers.append((await self._ask(STREAM, ANSWER))[1])
            return answers

        async def every(seconds: float, tokens: int) -> list[tuple[float, Arrivals]]:
            asked = []
            while time.perf_counter() < end - seconds:
                await asyncio.sleep(seconds)
                asked.append(asyncio.create_task(self._ask(tokens, 8)))
            return list(await asyncio.gather(*asked))

        streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
        await asyncio.sleep(1)
        long, short = await asyncio.gather(every(LONG_EVERY, LONG), every(SHORT_EVERY, SHORT))
        answers = [answer for each in await asyncio.gather(*streams) for answer in each]
        await self._client.close()
        stalls = [(at, answer.times[0]) for at, answer in long if answer.times]
        gaps = 1e3 * np.array(
            [
                after - before
                for answer in answers
                for before, after in pairwise(answer.times)
                if any(before < first and after > at for at, first in stalls)
            ]
        )
        asked = [*answers, *(answer for _, answer in (*long, *short))]
        p50, p99, worst = np.percentile(gaps, (50, 99, 100)).tolist()
        return Row(
            self._name,
            p50,
            p99,
            worst,
            len(gaps),
            float(np.percentile(_ttft(short), 99)),
            float(np.median(_ttft(long))),
            sum(bool(each.failed) or each.status != 200 or not each.times for each in asked),
        )

    async def _until_it_serves(self) -> None:
        deadline = time.perf_counter() + PATIENCE
        while (await self._client.get("GET", "/health")).status != 200:
            if time.perf_counter() > deadline:
                raise SystemExit(f"{self._name} does not start")
            await asyncio.sleep(0.3)

    async def _ask(self, tokens: int, answer: int) -> tuple[float, Arrivals]:
        body = {"prompt": self._prompts[tokens].pop(), "max_tokens": answer, "ignore_eos": True,
                "stream": True, "temperature": 0.0, "model": "m"}  # fmt: skip
        sink = Arrivals()
        started = time.perf_counter()
        request = self._client.request("POST", "/v1/completions", json.dumps(body).encode())
        await self._client.exchange(request, sink, PATIENCE)
        return started, sink


def _most(tokens: int, seconds: float) -> int:
    """Prompts of a size that may be asked: of a stream no more than one in a quarter second."""
    return (
        int(seconds * {LONG: 1 / LONG_EVERY, SHORT: 1 / SHORT_EVERY, STREAM: 4 * STREAMS}[tokens])
        + 8
    )


def _ttft(asked: Sequence[tuple[float, Arrivals]]) -> list[float]:
    return [1e3 * (answer.times[0] - at) for at, answer in asked if answer.times]


def serve(
    name: str, command: list[str], port: int, tokenizer: Tokenizer, seconds: float = SECONDS
) -> Row:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(Load(name, f"http://127.0.0.1:{port}", tokenizer, seconds).run())
    finally:
        stop(process, 40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--itl-target", type=float, default=50.0, metavar="MS")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of load, for each server")
    parser.add_argument("--llama-cpp", type=Path, help="its llama-server, to compare with")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    model = resolve(arguments.model)  # llama.cpp wants a file
    tokenizer = loader.load(model).tokenizer
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    target = f"{arguments.itl_target:g}"
    octavo = [sys.executable, "-c", "from octavo.cli import main; main()", "serve"]
    octavo += [str(model), "--port", str(port), "--served-model-name", "m"]
    servers = {f"octavo, --itl-target {target}": [*octavo, "--itl-target", target],
               "octavo": octavo}  # fmt: skip
    if arguments.llama_cpp is not None:
        peer = [str(arguments.llama_cpp), "-m", str(model), "--port", str(port)]
        peer += LLAMA_CPP
        servers |= {"llama.cpp": peer, f"llama.cpp, -b {SMALL}": [*peer, "-b", SMALL]}
    rows = [
        serve(name, command, port, tokenizer, arguments.seconds)
        for name, command in servers.items()
    ]
    if arguments.json:
        print(json.dumps({"itl_target_ms": arguments.itl_target, "rows": list(map(asdict, rows))}))
        return
    print("| server | gap p50 ms | p99 | worst | gaps | newcomers' TTFT p99 ms | long TTFT ms "
          "| failed |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        figures = " | ".join(f"{value:.0f}" for value in list(asdict(row).values())[1:])
        print(f"| {row.server} | {figures} |")


if __name__ == "__main__":
    as_script(main)
