"""What serving adds to the engine's own time per token: the same streams in process and over HTTP.

    python benchmarks/server_cost.py MODEL [--streams 16] [--rounds 5] [--chat] [--json]

A process that steps an engine in a loop and `octavo serve` take turns, so that whatever else the
machine does falls on both. Times are of the stretch in which all streams decode; over HTTP, when
the client's process gets the tokens, each in an event of its own. Server and client share the
engine's cores: what they take is in the ratio.

For whoever shares a machine: raise the priority (``nice -n -15``) rather than make it real-time, in
which threads that wait for each other would not be preempted as they are in service.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from _script import as_script

PROMPT = "A short history of the printing press, and of the books that came out of it: part {}."


@dataclass(frozen=True)
class Round:
    """Microseconds a token."""

    engine: float
    http: float
    engine_cpu: float  # processor time, of all threads
    server_cpu: float
    client_cpu: float

    @property
    def ratio(self) -> float:
        return self.http / self.engine


def stretch(times: list[list[float]]) -> float:
    """Microseconds a token while all streams decode; ``times`` are when each had its tokens."""
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    tokens = sum(begin < at <= end for each in times for at in each)
    return (end - begin) / tokens * 1e6


# --- in process ----------------------------------------------------------------------------------


def engine_alone(pipe: Connection, model: str, streams: int, tokens: int) -> None:
    """For each message received: (wall, processor) microseconds a token."""
    from octavo.engine.config import EngineConfig
    from octavo.engine.load import load_engine
    from octavo.loader.pull import resolve
    from octavo.sampling.params import SamplingParams
    from octavo.scheduler.request import Request

    loaded = load_engine(resolve(model), EngineConfig())
    tokenizer, engine = loaded.checkpoint.tokenizer, loaded.engine
    pipe.send(None)
    number = 0
    while pipe.recv():
        number += 1
        for index in range(streams):
            engine.add_request(
                Request(
                    request_id=f"{number}-{index}",
                    prompt_token_ids=tokenizer.encode(PROMPT.format(index)),
                    params=SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True),
                )
            )
        times: dict[str, list[float]] = {}
        used = time.process_time()
        while engine.has_work():
            deltas = engine.step()
            now = time.perf_counter()
            for delta in deltas:
                times.setdefault(delta.request_id, []).extend([now] * len(delta.token_ids))
        used = time.process_time() - used
        pipe.send((stretch(list(times.values())), used / (streams * tokens) * 1e6))
    engine.close()


# --- over HTTP -----------------------------------------------------------------------------------


class Reader(asyncio.Protocol):
    """Sends one request; notes when each event came, and does nothing else with it."""

    def __init__(self, request: bytes) -> None:
        self.times: list[float] = []
        self.head = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.head:
            self.head = data[:200]
        events = data.count(b'"finish_reason":')
        self.times += [time.perf_counter()] * events

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


async def read_streams(port: int, path: str, bodies: list[dict[str, Any]]) -> list[list[float]]:
    loop = asyncio.get_running_loop()
    readers = []
    for body in bodies:
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        reader = Reader(head.encode() + content)
        await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)  # type: ignore[misc]
        readers.append(reader)
    await asyncio.gather(*(reader.ended for reader in readers))
    for reader in readers:
        if not reader.head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(reader.head.decode(errors="replace"))
    return [reader.times for reader in readers]


class Server:
    """`octavo serve` in a process of its own, on a free port."""

    def __init__(self, model: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        program = "from octavo.cli import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, "serve", model, "--port", str(self.port)],
            stderr=subprocess.DEVNULL,
        )
        while not self._answers():
            if self._process.poll() is not None:
                raise SystemExit(f"octavo serve {model} ended with {self._process.returncode}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=30):
                return True
        except OSError:
            return False

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def measure(self, streams: int, tokens: int, *, chat: bool) -> tuple[float, float, float]:
        """Microseconds a token: wall, the server's processor time, the client's."""
        bodies = [self._body(index, tokens, chat) for index in range(streams)]
        path = "/v1/chat/completions" if chat else "/v1/completions"
        server, client = self.cpu_seconds(), time.process_time()
        times = uvloop.run(read_streams(self.port, path, bodies))
        used = self.cpu_seconds() - server, time.process_time() - client
        return stretch(times), *(each / (streams * tokens) * 1e6 for each in used)

    @staticmethod
    def _body(index: int, tokens: int, chat: bool) -> dict[str, Any]:
        text = PROMPT.format(index)
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        return (asked if chat else {"prompt": text}) | {
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


def measure(model: str, streams: int, tokens: int, rounds: int, *, chat: bool) -> list[Round]:
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    child = context.Process(target=engine_alone, args=(there, model, streams, tokens))
    child.start()
    pipe.recv()
    server = Server(model)
    found = []
    try:
        for number in range(rounds + 1):
            pipe.send(True)
            engine, engine_cpu = pipe.recv()
            http, server_cpu, client_cpu = server.measure(streams, tokens, chat=chat)
            if number:  # the first is to warm up
                found.append(Round(engine, http, engine_cpu, server_cpu, client_cpu))
    finally:
        pipe.send(False)
        child.join()
        server.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=160, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chat", action="store_true", help="chat completions")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    rounds = measure(args.model, args.streams, args.tokens, args.rounds, chat=args.chat)
    names = ("engine", "http", "engine_cpu", "server_cpu", "client_cpu")
    medians = {name: statistics.median(getattr(each, name) for each in rounds) for name in names}
    ratio = statistics.median(each.ratio for each in rounds)
    if args.json:
        each = [asdict(each) | {"ratio": each.ratio} for each in rounds]
        print(json.dumps({"unit": "us a token", "ratio": ratio, "median": medians, "rounds": each}))
        return
    print(f"| µs a token, {args.streams} streams | engine | over HTTP | ratio | CPU: engine "
          "| server | client |\n|---|---|---|---|---|---|---|")  # fmt: skip
    rows = [(str(number), each) for number, each in enumerate(rounds, 1)]
    rows.append(("**median**", Round(**medians)))
    for name, each in rows:
        print(
            f"| {name} | {each.engine:.0f} | {each.http:.0f} "
            f"| {ratio if name.startswith('*') else each.ratio:.3f} "
            f"| {each.engine_cpu:.0f} | {each.server_cpu:.0f} | {each.client_cpu:.0f} |"
        )


if __name__ == "__main__":
    as_script(main)
