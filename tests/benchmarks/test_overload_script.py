"""benchmarks/overload.py: what it counts, how much it asks, and that its server ends with it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import overload
from overload import Counted, Shape

STUBBORN = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


def test_a_server_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "LAST_WORDS", 0.2)
    port = overload.free_port()
    with overload.running([sys.executable, "-c", STUBBORN, str(port)], port, "/") as url:
        pid = int(overload.urllib.request.urlopen(url).read())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_does_not_start_is_said_to() -> None:
    with (
        pytest.raises(SystemExit, match="did not start"),
        overload.running([sys.executable, "-c", "raise SystemExit"], overload.free_port(), "/"),
    ):
        pass


async def test_tokens_are_counted_and_not_events() -> None:
    counts: list[int] = []
    answer = Counted(lambda count, _: counts.append(count))
    answer.status = 200
    for tokens in (1, 4, 9):
        event = {"choices": [{"text": "a"}], "usage": {"completion_tokens": tokens}}
        answer.data(b"data: " + json.dumps(event).encode() + b"\n\n", 0.0)
    assert counts == [1, 3, 5]
    assert answer.events == 3


def test_enough_are_refused_for_a_p99(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def load(url: str, shape: Shape, count: int, seed: int, **more: Any) -> dict[str, Any]:
        asked.append(count)
        return dict.fromkeys((*overload.SHOWN, "request_throughput"), 2.0)

    class Server:
        def __enter__(self) -> str:
            return ""

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(overload, "load", load)
    monkeypatch.setattr(overload, "octavo", lambda *_: Server())
    given = argparse.Namespace(
        model="m", slo="ttft=1", seconds=1.0, refusals=400, llama_cpp=None
    )  # fmt: skip
    overload.overload(given, Shape(8, 8), ())
    assert asked[-1] == 800
    assert max(asked[-len(overload.SHARES) : -1]) == 3
