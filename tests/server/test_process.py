"""The server as a process: how it starts, what it says, how it ends."""

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


@pytest.fixture(autouse=True)
def _hangups_are_not_ignored() -> Iterator[None]:
    """By the servers, which inherit it: the tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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
    *,
    gate: Path | None = None,
    hang: bool = False,
    policy: str | None = None,
    files: tuple[int, int] | None = None,
    **config: Any,
) -> Iterator[Process]:
    """Answers have one token until ``gate`` exists. ``files``: soft and hard limit of open ones."""
    settings = {"hang": hang, "policy": policy, "files": files, "serve": {"port": 0} | config}
    running = Process(settings | {"gate": gate and str(gate)})
    try:
        running.start()
        yield running
    finally:
        if running.child.poll() is None:
            running.child.kill()
            running.child.wait()


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
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


def connected(server: Process, sent: bytes = b"") -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), PATIENCE)
    connection.sendall(sent)
    return connection


def read_all(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.read()


BODY = b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"


def test_whoever_is_still_sending_is_told_of_the_end() -> None:
    """The head, the body, or the body of a route that does not generate."""
    unfinished = [
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + BODY,
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n" + BODY + b'"messages": [',
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + BODY,
        b"GET /live HTTP/1.1\r\nhos",
    ]
    with process() as server:
        connections = [connected(server, sent) for sent in unfinished]
        for route in (b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/live"):
            # Those before it have been received too, for connections are looked at in turn.
            with connected(server, b"GET %b HTTP/1.0\r\n\r\n" % route) as connection:
                read_all(connection)
        server.child.terminate()
        for connection in connections:
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
            connection.close()
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in head.lower()
            assert b"retry-after: 1" in head.lower()
            assert json.loads(body)["error"]["type"] == "ServiceUnavailableError"
        assert server.wait() == 0
        assert "Traceback" not in server.said


def test_who_ignores_the_end_of_the_terminal_goes_on() -> None:
    """As under nohup."""
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with process() as server:
            server.child.send_signal(signal.SIGHUP)
            assert client_ready(server.url)
            server.child.terminate()
            assert server.wait() == 0
            assert "SIGHUP" not in server.said
    finally:
        signal.signal(signal.SIGHUP, ignored)


def test_idle_connections_make_room(tmp_path: Path) -> None:
    """More of them than there may be files: nobody else is kept out, and who waits for an answer
    gets it. The soft limit is raised before.
    """
    asks = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    body = b'{"prompt": "a", "max_tokens": 5}'
    asks += b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    gate = tmp_path / "gate"
    with process(files=(100, 200), gate=gate) as server:
        waiting = connected(server, asks)
        running = re.compile(r"requests_running\S* 1.0")
        held_up_until(
            lambda: running.search(httpx.get(f"{server.url}/metrics").text), "the request"
        )
        idle = []
        for _ in range(300):
            idle.append(connected(server))
            if len(idle) % 50 == 0:
                assert client_ready(server.url)
        text = httpx.get(f"{server.url}/metrics").text
        closed = re.search(r'connections_closed_total\{.*"no_room"\} (\d+)', text)
        assert closed
        assert 150 < int(closed[1]) < 290
        # The last ones are still there.
        idle[-1].sendall(b"GET /live HTTP/1.0\r\n\r\n")
        assert read_all(idle[-1]).startswith(b"HTTP/1.1 200 ")
        gate.touch()
        assert b'"finish_reason":"length"' in read_all(waiting)
        for connection in (*idle, waiting):
            connection.close()
        server.child.terminate()
        assert server.wait() == 0
        assert server.said.count("connections are open, the most there may be") == 1


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
