"""A live server from light load to twice the rate that saturates it: is the work worth doing done,
and is everyone else told so at once?

    python benchmarks/overload.py [MODEL] [--slo ttft=2000,tpot=50] [--json] [-- OPTIONS]

OPTIONS are of octavo serve. ``--llama-cpp PATH/llama-server`` puts llama.cpp's server beside it,
with MODEL a GGUF file: each at shares of its own saturating rate.

The saturating rate is the throughput with always enough to do and no promises. Then `octavo serve`
with ``--slo`` and ``--admit-within-slo`` gets Poisson arrivals at shares of it, at twice it for so
long that about ``--refusals`` requests are refused: how soon they were told is shown from there on
only, for the p99 of a few is their maximum. Goodput is of requests that were within both limits, as
their client saw it. Generator and server share the cores.

``--keys``: fairness instead. Ten keys ask a server with ``--scheduling-policy fair``; nine keep two
requests under way and the tenth fifty, each with ``--flood-prompts`` prompts. Shares are of the
tokens generated while all ask, in relation to a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from _script import as_script, stop
from octavo.tools.bench.load.benchmark import Settings, benchmark
from octavo.tools.bench.load.client import Client, Endpoint
from octavo.tools.bench.load.streamed_answer import StreamedAnswer
from octavo.tools.workload.metrics import parse_slo

SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # of the saturating rate
AT_ONCE = 24  # requests under way when the saturating rate is measured
POLITE, FLOODING = 2, 50  # requests that a key keeps under way
FEWEST = 60  # requests at twice the saturating rate
ENOUGH = 300  # refusals, for a p99 of them
PATIENCE = 120.0  # seconds for a server to start, and for a request
LAST_WORDS = 60.0  # seconds for a server to end


@contextmanager
def running(command: Sequence[str], port: int, ready: str) -> Iterator[str]:
    """A server in a process of its own; gives its URL. It is gone afterwards, whatever it does."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + PATIENCE
    try:
        while True:
            try:
                with urllib.request.urlopen(url + ready, timeout=5):
                    break
            except OSError:  # urllib's errors, refusals and timeouts
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start: {' '.join(command)}") from None
                time.sleep(0.1)
        yield url
    finally:
        stop(process, LAST_WORDS)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def octavo(model: str, *options: str) -> AbstractContextManager[str]:
    port = free_port()
    program = [sys.executable, "-c", "from octavo.cli import main; main()", "serve", model]
    command = [*program, "--port", str(port), "--disable-uvicorn-access-log", *options]
    return running(command, port, "/ready")


def llama_cpp(server: Path, model: str, shape: Shape) -> AbstractContextManager[str]:
    """With a seat for each request under way when the saturating rate is measured."""
    port, context = free_port(), AT_ONCE * (shape.prompt + shape.output + 64)
    command = [str(server), "-m", model, "--port", str(port), "-np", str(AT_ONCE)]
    return running([*command, "-c", str(context), "--cache-ram", "0"], port, "/health")


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


SHOWN = (
    *("request_goodput", "completed", "rejected", "failed", "duration"),
    *("p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms", "median_rejection_ms", "p99_rejection_ms"),
)


def saturating_rate(url: str, shape: Shape) -> float:
    load(url, shape, AT_ONCE, 1, max_concurrency=AT_ONCE)  # warm
    found = load(url, shape, 3 * AT_ONCE, 2, max_concurrency=AT_ONCE)["request_throughput"]
    return float(found)


def at_shares(
    url: str, shape: Shape, rate: float, slo: dict[str, float], counts: dict[float, int]
) -> dict[str, Any]:
    """``counts``: how many requests at each share of the rate."""
    rows = []
    for seed, (share, count) in enumerate(counts.items(), 3):
        request_rate = share * rate
        found = load(url, shape, count, seed, request_rate=request_rate, goodput=slo)
        rows.append({"load": share, "request_rate": request_rate, **{n: found[n] for n in SHOWN}})
    best = max(row["request_goodput"] for row in rows)
    return {
        "saturating_rate": rate,
        "rows": rows,
        "share_of_best_at_twice": rows[-1]["request_goodput"] / best if best else 0.0,
    }


def overload(given: argparse.Namespace, shape: Shape, options: Sequence[str]) -> dict[str, Any]:
    limits = parse_slo(given.slo)

    def counts(rate: float, refusals: int) -> dict[float, int]:
        found = {share: max(1, round(share * rate * given.seconds)) for share in SHARES}
        # Half of them are too many; and a queue must have time to grow where nothing is refused.
        found[SHARES[-1]] = max(found[SHARES[-1]], 2 * refusals, FEWEST)
        return found

    with octavo(given.model, *options) as url:
        rate = saturating_rate(url, shape)
    with octavo(given.model, "--slo", given.slo, "--admit-within-slo", *options) as url:
        load(url, shape, 8, 1, max_concurrency=4)  # it learns what steps take
        servers = {"octavo": at_shares(url, shape, rate, limits, counts(rate, given.refusals))}
    if given.llama_cpp is not None:
        with llama_cpp(given.llama_cpp, given.model, shape) as url:
            rate = saturating_rate(url, shape)
            servers["llama.cpp"] = at_shares(url, shape, rate, limits, counts(rate, 0))
    return {"slo": limits, "servers": servers}


def print_overload(found: dict[str, Any]) -> None:
    for name, server in found["servers"].items():
        print(f"{name}: saturating rate {server['saturating_rate']:.2f} requests a second")
        print(
            f"{'load':>5} {'req/s':>7} {'goodput':>8} {'served':>7} {'429':>5} {'failed':>6} "
            f"{'p99 TTFT':>9} {'p99 TPOT':>9} {'p99 ITL':>8} {'p50 told':>9} {'p99 told':>9}  (ms)"
        )
        for row in server["rows"]:
            told = [
                f"{row[kind]:.2f}" if row["rejected"] >= ENOUGH else "-"
                for kind in ("median_rejection_ms", "p99_rejection_ms")
            ]
            print(
                f"{row['load']:>4.2f}x {row['request_rate']:>7.2f} {row['request_goodput']:>8.2f} "
                f"{row['completed']:>7} {row['rejected']:>5} {row['failed']:>6} "
                f"{row['p99_ttft_ms']:>9.0f} {row['p99_tpot_ms']:>9.1f} {row['p99_itl_ms']:>8.1f} "
                f"{told[0]:>9} {told[1]:>9}"
            )
        print(
            "goodput at twice the saturating rate: "
            f"{server['share_of_best_at_twice']:.0%} of the best"
        )


class Counted(StreamedAnswer):
    """Tells ``got`` of each token, when it comes."""

    __slots__ = ("_got",)

    def __init__(self, got: Callable[[int, float], None]) -> None:
        super().__init__()
        self._got = got

    def data(self, chunk: bytes, now: float) -> bool:
        before = self.output_tokens or 0
        more = super().data(chunk, now)
        self._got((self.output_tokens or 0) - before, now)
        return more


async def ask(
    url: str, names: Sequence[str], shape: Shape, seconds: float, flood_prompts: int
) -> list[float]:
    """Tokens a second that each key got, of the last three quarters of the time in which all ask.
    The first key floods.
    """
    random = np.random.default_rng(0)
    end = time.perf_counter() + seconds
    begin = end - 0.75 * seconds
    tokens = [0] * len(names)

    async def one(which: int, client: Client) -> None:
        def got(count: int, now: float) -> None:
            if begin <= now < end:
                tokens[which] += count

        prompts = 1 if which else flood_prompts
        while time.perf_counter() < end:
            body = {
                "prompt": random.integers(1000, 20000, (prompts, shape.prompt)).tolist(),
                "max_tokens": shape.output,
                "ignore_eos": True,
                "stream": True,
                # An event may have several tokens: their number is in each.
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            answer = Counted(got)
            answer.start = time.perf_counter()
            data = client.request("POST", "/v1/completions", json.dumps(body).encode())
            await client.exchange(data, answer, PATIENCE)
            if answer.rejected:
                await asyncio.sleep(0.05)
            elif not answer.success:
                raise SystemExit(f"{names[which]}: {answer.reason} {answer.detail}")

    clients = [Client(Endpoint.of(url), {"authorization": f"Bearer {name}"}) for name in names]
    await asyncio.gather(
        *(
            one(which, client)
            for which, client in enumerate(clients)
            for _ in range(POLITE if which else FLOODING)
        )
    )
    for client in clients:
        await client.close()
    return [count / (end - begin) for count in tokens]


def fairness(given: argparse.Namespace, shape: Shape, options: Sequence[str]) -> dict[str, Any]:
    names = ["flood", *(f"polite-{index}" for index in range(1, 10))]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        file.write_text(json.dumps({"keys": [{"name": name, "key": name} for name in names]}))
        policy = ("--scheduling-policy", "fair", "--api-key-file", str(file))
        with octavo(given.model, *policy, *options) as url:
            rates = asyncio.run(ask(url, names, shape, given.seconds, given.flood_prompts))
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
    parser.add_argument("--refusals", type=int, default=400, help="at twice the saturating rate")
    parser.add_argument("--llama-cpp", type=Path, help="its llama-server, to compare with")
    parser.add_argument("--keys", action="store_true", help="fairness among ten keys instead")
    parser.add_argument("--flood-prompts", type=int, default=1, help="in a body of the tenth key")
    parser.add_argument("--json", action="store_true")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    shape = Shape(given.prompt, given.output)
    found = (fairness if given.keys else overload)(given, shape, options)
    if given.json:
        print(json.dumps(found, indent=1))
    elif given.keys:
        print_fairness(found)
    else:
        print_overload(found)


if __name__ == "__main__":
    as_script(main)
