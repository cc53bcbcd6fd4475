"""A closed loop of clients on an OpenAI-compatible server that is started for it."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from _peers.base import Figure, Task, Unavailable, environment, last_words
from _peers.watch import Interference
from _script import stop

STARTUP_SECONDS = 60.0


def serve(
    command: Callable[[int], list[str]],
    task: Task,
    clients: int,
    request: dict[str, Any],
    seed: int,
) -> Figure:
    """Output tokens/s of clients that each send their next completion when the last has finished.

    Prompts are random tokens and never shared, so that no prefix is cached; greedy, end of sequence
    ignored, so that all do the same work. ``request`` is added to each. Raises `Unavailable`.
    """
    port = free_port()
    with running(command(port), port) as (pid, ready):
        asyncio.run(load(port, replace(task, requests=1), 2, request, seed + 1000))  # warm-up
        watch = Interference(pid)
        rate, extra = asyncio.run(load(port, task, clients, request, seed))
        return Figure(rate, watch.share(), {"ready_after_s": ready, **extra})


async def load(
    port: int, task: Task, clients: int, request: dict[str, Any], seed: int
) -> tuple[float, dict[str, float]]:
    rng = np.random.default_rng(seed)
    firsts: list[float] = []
    latencies: list[float] = []

    async def client(prompts: list[list[int]]) -> None:
        for prompt in prompts:
            body: dict[str, Any] = {
                "model": "model",
                "prompt": prompt,
                "max_tokens": task.output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": task.stream,
                **request,
            }
            if body["stream"]:
                body["stream_options"] = {"include_usage": True}
            began = time.perf_counter()
            status, reply, first = await http(
                port, "POST", "/v1/completions", json.dumps(body).encode()
            )
            if status != 200:
                raise Unavailable(f"its server answered {status}: {reply[:300]!r}")
            got = completion_tokens(reply, bool(body["stream"]))
            if got != task.output:
                raise Unavailable(f"its server made {got} tokens instead of {task.output}")
            firsts.append(first)
            latencies.append(time.perf_counter() - began)

    prompts = task.tokens(rng, (clients, task.requests, task.input)).tolist()
    began = time.perf_counter()
    await asyncio.gather(*(client(p) for p in prompts))
    wall = time.perf_counter() - began
    extra = {"wall_s": wall, "median_latency_s": statistics.median(latencies)}
    if task.stream:
        extra["median_ttft_s"] = statistics.median(firsts)
    return clients * task.requests * task.output / wall, extra


async def http(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes, float]:
    """(status, body, seconds to the first byte of the body) of one request, then closes."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("closed without an answer")
    status = int(line.split()[1])
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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def running(command: list[str], port: int) -> Iterator[tuple[int, float]]:
    """(process id, seconds until /health answered 200) of a running server."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment())
        try:
            while not healthy(port):
                if process.poll() is not None:
                    raise ConnectionError("before it was ready")
                if time.monotonic() - began > STARTUP_SECONDS:
                    raise Unavailable(f"its server was not ready after {STARTUP_SECONDS} s")
                time.sleep(0.05)
            yield process.pid, time.monotonic() - began
        except (OSError, EOFError) as error:
            try:
                code = process.wait(5)
            except subprocess.TimeoutExpired:
                raise Unavailable(f"its server broke a connection off: {error}") from None
            log.seek(0)
            raise Unavailable(f"its server ended with {code}: {last_words(log.read())}") from None
        finally:
            stop(process, 20)


def healthy(port: int) -> bool:
    try:
        status, _, _ = asyncio.run(http(port, "GET", "/health"))
    except (OSError, ValueError, IndexError):
        return False
    return status == 200
