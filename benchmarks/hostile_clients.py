"""What clients can do that mean no good: does the server's memory stay flat, and do others notice?

    python benchmarks/hostile_clients.py [MODEL] [--seconds 60] [--requests 200] [-- OPTIONS]

OPTIONS are of octavo serve. First a victim asks for short answers, one after the other, alone and
beside four senders of hostile bodies of each kind, each of which sends again as soon as it is
refused: its time to the first token, and the ratio of the p99s. Then 64 clients ask for streams of
many choices with logprobs and read a byte a second: the server's resident memory is shown before,
at its highest, and at the end (the KV cache, 256 MiB, is touched as it fills).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from _script import as_script, stop
from overload import free_port

READERS, SENDERS = 64, 4
CHOICES, TOKENS = 16, 512
SLOW = {"prompt": "Once", "n": CHOICES, "logprobs": 20, "max_tokens": TOKENS, "ignore_eos": True}
VICTIM = {"prompt": "Say a word.", "max_tokens": 4, "stream": True}


def many(count: int) -> dict[str, int]:
    return {str(key): 0 for key in range(count)}


HOSTILE: dict[str, tuple[str, Callable[[], object]]] = {
    "390,000 keys": ("/v1/completions", lambda: many(390_000)),
    "logit_bias of 300,000": (
        "/v1/completions",
        lambda: {"prompt": "a", "logit_bias": many(300_000)},
    ),
    "a million ids": ("/v1/completions", lambda: {"prompt": [1] * 1_000_000}),
    "100,000 messages": (
        "/v1/chat/completions",
        lambda: {"messages": [{"role": "user", "content": "a"}] * 100_000},
    ),
    "a prompt of 3.8 MB": ("/v1/completions", lambda: {"prompt": "a b " * 950_000}),
}


class Server:
    def __init__(self, model: str, options: list[str]) -> None:
        port = free_port()
        command = [str(Path(sys.executable).parent / "octavo"), "serve", model]
        quiet = ["--disable-uvicorn-access-log"]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [*command, "--port", str(port), "--kv-cache-memory", "256MiB", *quiet, *options],
            stderr=subprocess.DEVNULL,
        )
        while True:
            with suppress(OSError), urllib.request.urlopen(self.url + "/ready", timeout=5):
                return
            if self.process.poll() is not None:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.2)

    def stop(self) -> None:
        stop(self.process, 60)

    @property
    def resident(self) -> float:
        """MiB."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"octavo:{name}{{"):
                    return float(line.rsplit(" ", 1)[1])
        return 0.0


async def send(
    url: str, path: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (place.hostname, place.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 12)
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: {place.netloc}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()
    return reader, writer


async def read_slowly(url: str, body: bytes) -> None:
    reader, writer = await send(url, "/v1/completions", body)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    with suppress(OSError):
        while True:
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            await reader.read(1)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(1.0)


async def slow_readers(server: Server, seconds: float) -> dict[str, float]:
    before = server.resident
    body = json.dumps(SLOW | {"stream": True}).encode()
    tasks = [asyncio.create_task(read_slowly(server.url, body)) for _ in range(READERS)]
    found, paused, unsent = [], 0.0, 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(1.0)
        found.append(server.resident)
        paused = max(paused, await asyncio.to_thread(server.metric, "num_requests_paused"))
        unsent = max(unsent, await asyncio.to_thread(server.metric, "unsent_output_bytes"))
    for task in tasks:
        task.cancel()
    half = found[len(found) // 2 :]
    return {
        "resident_mib_before": before,
        "resident_mib_peak": max(found),
        "resident_mib_end": found[-1],
        "growth_mib_second_half": half[-1] - half[0],
        "unsent_mib_peak": unsent / (1 << 20),
        "sequences_paused_peak": paused,
    }


async def first_token(url: str) -> float:
    """Milliseconds to the first event of a stream."""
    began = time.perf_counter()
    reader, writer = await send(url, "/v1/completions", json.dumps(VICTIM).encode())
    await reader.readuntil(b"data: ")
    took = time.perf_counter() - began
    await reader.read(1 << 20)
    writer.close()
    return took * 1000


async def victim(url: str, requests: int) -> dict[str, float]:
    await first_token(url)
    times = sorted([await first_token(url) for _ in range(requests)])
    return {"p50_ttft_ms": statistics.median(times), "p99_ttft_ms": times[int(0.99 * len(times))]}


SENDER = """
import http.client, sys
host, port, path, file, counts = sys.argv[1:]
body = open(file, "rb").read()
while True:
    try:
        connection = http.client.HTTPConnection(host, int(port), timeout=600)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        connection.getresponse().read()
        connection.close()
        open(counts, "a").write(".")
    except OSError:
        pass
"""


async def beside(server: Server, kind: str, requests: int, folder: Path) -> dict[str, float]:
    path, make = HOSTILE[kind]
    body, counts = folder / "body.json", folder / "counts"
    body.write_text(json.dumps(make(), separators=(",", ":")))
    counts.write_text("")
    place = urlsplit(server.url)
    command = [sys.executable, "-c", SENDER, str(place.hostname), str(place.port), path]
    senders = [subprocess.Popen([*command, str(body), str(counts)]) for _ in range(SENDERS)]
    try:
        await asyncio.sleep(2.0)
        found = await victim(server.url, requests)
    finally:
        for sender in senders:
            sender.kill()
            sender.wait()
    return found | {"bodies_refused": len(counts.read_text())}


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--seconds", type=float, default=60.0, help="that slow readers read")
    parser.add_argument("--requests", type=int, default=200, help="of the victim, of each kind")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("options", nargs="*", help="of octavo serve")
    asked = parser.parse_args()
    server = Server(asked.model, asked.options)
    found: dict[str, dict[str, float]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            alone = asyncio.run(victim(server.url, asked.requests))
            found["victim alone"] = alone
            for kind in HOSTILE:
                row = asyncio.run(beside(server, kind, asked.requests, Path(folder)))
                row["p99_ratio"] = row["p99_ttft_ms"] / alone["p99_ttft_ms"]
                found[f"beside {kind}"] = row
            found["victim alone, again"] = asyncio.run(victim(server.url, asked.requests))
        found[f"{READERS} slow readers"] = asyncio.run(slow_readers(server, asked.seconds))
    finally:
        server.stop()
    if asked.json:
        print(json.dumps(found))
        return
    for name, row in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.1f}" for key, value in row.items()))


if __name__ == "__main__":
    as_script(main)
