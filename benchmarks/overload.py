"""A live server from light load to twice the rate that saturates it: is the work worth doing done,
and is everyone else told so at once?

    python benchmarks/overload.py [MODEL] [--slo ttft=2000,tpot=50] [--json] [-- OPTIONS]

OPTIONS are of octavo serve.

The saturating rate is the throughput with always enough to do and no promises. Then `octavo serve`
with ``--slo`` and ``--admit-within-slo`` gets Poisson arrivals at shares of it. Goodput is of
requests that were within both limits, as their client saw it. Generator and server share the cores.

``--keys``: fairness instead. Ten keys ask a server with ``--scheduling-policy fair``; nine keep two
requests under way and the tenth fifty. Shares are of the tokens generated while all ask, in
relation to a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.load.benchmark import Settings, benchmark
from octavo.bench.load.client import Client, Target
from octavo.bench.load.stream import Answer
from octavo.workload.metrics import parse_slo

SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # of the saturating rate
AT_ONCE = 24  # requests under way when the saturating rate is measured
POLITE, FLOODING = 2, 50  # requests that a key keeps under way


@contextmanager
def server(model: str, *options: str) -> Iterator[str]:
    """`octavo serve` in a process of its own; gives its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "from octavo.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", model, "--port", str(port)]
    running = subprocess.Popen([*command, "--disable-uvicorn-access-log", *options])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{url}/ready"):
                    break
            except (urllib.error.URLError, ConnectionError):
                if running.poll() is not None:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.1)
        yield url
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(60)


@dataclass(frozen=True)
class Shape:
    """Tokens of each request."""

    prompt: int
    output: int


def load(url: str, shape: Shape, count: int, seed: int, **more: Any) -> dict[str, Any]:
    settings = Settings(
        base_url=url,
        num_prompts=count,
        seed=seed,
        random_input_len=shape.prompt,
        random_output_len=shape.output,
        progress=False,
        **more,
    )
    return asyncio.run(benchmark(settings))


def overload(model: str, shape: Shape, slo: str, seconds: float, options: Sequence[str]) -> Any:
    limits = parse_slo(slo)
    with server(model, *options) as url:
        load(url, shape, AT_ONCE, 1, max_concurrency=AT_ONCE)  # warm
        count = 3 * AT_ONCE
        rate = load(url, shape, count, 2, max_concurrency=AT_ONCE)["request_throughput"]
    rows = []
    with server(model, "--slo", slo, "--admit-within-slo", *options) as url:
        load(url, shape, 8, 1, max_concurrency=4)  # it learns what steps take
        for seed, share in enumerate(SHARES, 3):
            found = load(
                url,
                shape,
                max(1, round(share * rate * seconds)),
                seed,
                request_rate=share * rate,
                goodput=limits,
            )
            rows.append(
                {
                    "load": share,
                    "request_rate": share * rate,
                    **{
                        name: found[name]
                        for name in (
                            *("request_goodput", "completed", "rejected", "failed", "duration"),
                            *("p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms"),
                            *("median_rejection_ms", "p99_rejection_ms"),
                        )
                    },
                }
            )
    best = max(row["request_goodput"] for row in rows)
    return {
        "saturating_rate": rate,
        "slo": limits,
        "rows": rows,
        "share_of_best_at_twice": rows[-1]["request_goodput"] / best,
    }


def print_overload(found: dict[str, Any]) -> None:
    print(f"saturating rate: {found['saturating_rate']:.2f} requests a second")
    print(
        f"{'load':>5} {'req/s':>7} {'goodput':>8} {'served':>7} {'429':>5} {'failed':>6} "
        f"{'p99 TTFT':>9} {'p99 TPOT':>9} {'p99 ITL':>8} {'p50 told':>9} {'p99 told':>9}  (ms)"
    )
    for row in found["rows"]:
        told = [
            "-" if row[name] is None else f"{row[name]:.2f}"
            for name in ("median_rejection_ms", "p99_rejection_ms")
        ]
        print(
            f"{row['load']:>4.2f}x {row['request_rate']:>7.2f} {row['request_goodput']:>8.2f} "
            f"{row['completed']:>7} {row['rejected']:>5} {row['failed']:>6} "
            f"{row['p99_ttft_ms']:>9.0f} {row['p99_tpot_ms']:>9.1f} {row['p99_itl_ms']:>8.1f} "
            f"{told[0]:>9} {told[1]:>9}"
        )
    print(
        f"goodput at twice the saturating rate: {found['share_of_best_at_twice']:.0%} of the best"
    )


async def ask(url: str, names: Sequence[str], shape: Shape, seconds: float) -> list[float]:
    """Tokens a second that each key got, of the middle of the time in which all ask."""
    random = np.random.default_rng(0)
    end = time.perf_counter() + seconds
    begin = end - 0.75 * seconds
    got = [0] * len(names)

    class Counted(Answer):
        __slots__ = ("which",)

        def data(self, chunk: bytes, now: float) -> bool:
            before = self.events
            more = super().data(chunk, now)
            if begin <= now < end:
                got[self.which] += self.events - before
            return more

    async def one(which: int, client: Client) -> None:
        while time.perf_counter() < end:
            body = {
                "prompt": random.integers(1000, 20000, shape.prompt).tolist(),
                "max_tokens": shape.output,
                "ignore_eos": True,
                "stream": True,
            }
            answer = Counted()
            answer.which = which
            answer.start = time.perf_counter()
            data = client.request("POST", "/v1/completions", json.dumps(body).encode())
            await client.exchange(data, answer, 60)
            if answer.rejected:
                await asyncio.sleep(0.05)

    clients = [Client(Target.of(url), {"authorization": f"Bearer {name}"}) for name in names]
    await asyncio.gather(
        *(
            one(which, client)
            for which, client in enumerate(clients)
            for _ in range(POLITE if which else FLOODING)
        )
    )
    for client in clients:
        await client.close()
    return [tokens / (end - begin) for tokens in got]


def fairness(model: str, shape: Shape, seconds: float, options: Sequence[str]) -> dict[str, Any]:
    names = ["flood", *(f"polite-{index}" for index in range(1, 10))]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        file.write_text(json.dumps({"keys": [{"name": name, "key": name} for name in names]}))
        with server(
            model, "--scheduling-policy", "fair", "--api-key-file", str(file), *options
        ) as url:
            rates = asyncio.run(ask(url, names, shape, seconds))
    fair = sum(rates) / len(rates)
    return {
        "tokens_per_second": dict(zip(names, rates, strict=True)),
        "share_of_fair": {
            name: rate / fair for name, rate in zip(names, rates, strict=True)
        },
        "least_polite_share": min(rates[1:]) / fair,
    }  # fmt: skip


def print_fairness(found: dict[str, Any]) -> None:
    for name, rate in found["tokens_per_second"].items():
        print(f"{name:>10} {rate:>8.1f} tokens/s  {found['share_of_fair'][name]:>5.0%} of a tenth")
    print(f"the polite key that got least: {found['least_polite_share']:.0%} of its fair share")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--slo", default="ttft=2000,tpot=50")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each rate")
    parser.add_argument("--keys", action="store_true", help="fairness among ten keys instead")
    parser.add_argument("--json", action="store_true")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    shape = Shape(given.prompt, given.output)
    found: dict[str, Any]
    if given.keys:
        found = fairness(given.model, shape, given.seconds, options)
    else:
        found = overload(given.model, shape, given.slo, given.seconds, options)
    if given.json:
        print(json.dumps(found, indent=1))
    elif given.keys:
        print_fairness(found)
    else:
        print_overload(found)


if __name__ == "__main__":
    main()
