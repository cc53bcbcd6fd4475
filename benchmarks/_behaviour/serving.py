"""A live `octavo serve` in a process of its own, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _script import stop

_PATIENCE = 180.0  # seconds for a server to start, and for an answer


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class Server:
    port: int
    log: list[str] = field(default_factory=list)  # its lines, once it has ended

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Return the answer. ``body`` is sent as JSON if it is neither bytes nor None."""
        sent = dict(headers or {})
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if content is not None:
            sent.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        try:
            connection.request(method, path, content, sent)
            answer = connection.getresponse()
            return Answer(answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()

    def ready(self) -> bool:
        try:
            return self.ask("GET", "/ready").status == 200
        except OSError:
            return False

    def raw(self, content: bytes) -> Answer:
        """Return what is answered to bytes that are no HTTP client's."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_PATIENCE) as connection:
            connection.sendall(content)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            return Answer(answer.status, answer.getheaders(), answer.read())


@contextmanager
def serving(model: str, log: Path, *options: str, env: Mapping[str, str] = {}) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = Server(free.getsockname()[1])
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", str(server.port)]
    with log.open("wb") as lines:
        process = subprocess.Popen(
            [*command, *options], stdout=lines, stderr=subprocess.STDOUT, env=os.environ | env
        )
    try:
        deadline = time.monotonic() + _PATIENCE
        while not server.ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"octavo serve did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield server
    finally:
        stop(process, 60)
        server.log = log.read_text("utf-8", "replace").splitlines()


def pieces(body: bytes) -> list[Any]:
    """Return the events of a stream: JSON as values, anything else as text."""
    found: list[Any] = []
    for line in body.decode().splitlines():
        name, _, value = line.partition(": ")
        if name == "data" and value != "[DONE]":
            found.append(json.loads(value))
        elif line:
            found.append(line)
    return found
