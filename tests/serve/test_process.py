"""The server as a process: how it starts, what it says, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_fakes import events

from patience import PATIENCE, held_up_until

SCRIPT = Path(__file__).parent / "server_process.py"


class Process:
    """A running server; ``lines`` is what it has printed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.child = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(settings)], stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        """Until it listens, or has ended."""
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(line)
            if match := re.search(r"listening on (\S+)/v1 ", line):
                self.url = match[1]
                break
            if "unix:" in line:
                break
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stderr is not None
        self.lines += self.child.stderr

    def wait(self) -> int:
        code = self.child.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    @property
    def said(self) -> str:
        return "".join(self.lines)


@contextmanager
def process(
    *, gate: Path | None = None, hang: bool = False, policy: str | None = None, **config: Any
) -> Iterator[Process]:
    """Answers have one token until ``gate`` exists."""
    settings = {"hang": hang, "policy": policy, "serve": {"port": 0} | config}
    running = Process(settings | {"gate": gate and str(gate)})
    try:
        running.start()
        yield running
    finally:
        if running.child.poll() is None:
            running.child.kill()
            running.child.wait()


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_streams_finish_and_new_requests_are_refused(which: signal.Signals, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with process(gate=gate) as server, httpx.Client(base_url=server.url) as client:
        assert "model: tiny" in server.said
        body = {"prompt": "a", "stream": True, "max_tokens": 60}
        with client.stream("POST", "/v1/completions", json=body) as response:
            chunks = response.iter_text()
            text = next(chunks)
            server.child.send_signal(which)
            with httpx.Client(base_url=server.url) as other:
                held_up_until(lambda: other.get("/ready").status_code != 200, "the drain")
                assert other.get("/live").status_code == 200
                refused = other.post("/v1/completions", json={"prompt": "a"})
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
                assert refused.headers["connection"] == "close"
                assert refused.json()["error"]["code"] == 503
            gate.touch()
            text += "".join(chunks)
        assert len(events(text)) == 60
        assert server.wait() == 0
        assert "Traceback" not in server.said


def test_at_the_timeout_streams_end_with_an_error(tmp_path: Path) -> None:
    with process(gate=tmp_path / "never", shutdown_timeout=0.2) as server:
        with httpx.Client(base_url=server.url) as client:
            body = {"prompt": "a", "stream": True, "max_tokens": 500}
            with client.stream("POST", "/v1/completions", json=body) as response:
                chunks = response.iter_text()
                text = next(chunks)
                server.child.terminate()
                text += "".join(chunks)
        *_, last = events(text)
        assert last["error"]["code"] == 503
        assert server.wait() == 0


def test_a_waiting_answer_ends_with_an_error_too(tmp_path: Path) -> None:
    with process(gate=tmp_path / "never", shutdown_timeout=0.2) as server:
        with httpx.Client(base_url=server.url) as client, ThreadPoolExecutor(1) as pool:
            body = {"prompt": "a", "max_tokens": 500}
            waiting = pool.submit(client.post, "/v1/completions", json=body)
            running = re.compile(r"requests_running\S* 1.0")
            held_up_until(
                lambda: running.search(httpx.get(f"{server.url}/metrics").text), "the request"
            )
            assert not waiting.done()
            server.child.terminate()
            answer = waiting.result()
        assert answer.status_code == 503
        assert server.wait() == 0


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 500}
    with (
        process(gate=tmp_path / "never", shutdown_timeout=1000.0) as server,
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        chunks = response.iter_text()
        next(chunks)
        server.child.terminate()
        held_up_until(lambda: not client_ready(server.url), "the drain")
        server.child.terminate()
        assert server.wait() == 128 + signal.SIGTERM


def client_ready(url: str) -> bool:
    return httpx.get(f"{url}/ready").status_code == 200


def test_an_idle_keep_alive_connection_does_not_hold_the_exit() -> None:
    with process() as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        server.child.terminate()
        assert server.wait() == 0


def test_an_engine_that_hangs_does_not_hold_the_exit() -> None:
    with process(hang=True) as server:
        server.child.terminate()
        assert server.wait() == 1
        assert "the engine hangs" in server.said


@pytest.mark.parametrize(
    ("policy", "keys", "told"),
    [("fair", [], True), ("fair", ["a"], True), ("fair", ["a", "b"], False), (None, [], False)],
)
def test_fair_shares_of_one_client_are_said_to_be_none(
    policy: str | None, keys: list[str], told: bool
) -> None:
    with process(policy=policy, api_key=keys) as server:
        said = "fair is the same as fcfs here" in server.said
    assert said is told


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process(port=port) as server:
            assert server.wait() == 1
            assert (
                f"cannot listen on 127.0.0.1:{port}: Address already in use (--port" in server.said
            )
            assert "model: tiny" not in server.said  # nothing was loaded for it


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "octavo.sock"
    with process(uds=str(path)) as server:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://x") as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        with process(uds=str(path)) as second:
            assert second.wait() == 1
            assert "somebody listens" in second.said
        server.child.kill()
        server.child.wait()
    assert path.exists()  # killed, it could not clean up: the next start does
    with process(uds=str(path)) as server:
        os.kill(server.child.pid, signal.SIGTERM)
        assert server.wait() == 0
    assert not path.exists()


def test_a_model_whose_name_is_not_utf8() -> None:
    with process(served_model_name=[os.fsdecode(b"b\xff")]) as server:
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert model["id"] == "b\ufffd"
        assert 'model_name="b\ufffd"' in httpx.get(f"{server.url}/metrics").text
        body = {"model": model["id"], "prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
