"""A process of its own for what strangers' files make us run: templates, odd tokenizers.

Its memory is limited by the kernel, and it is killed when its time is over. A call costs a round
trip over a socket; the process starts with the first one, and again after it has died.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from struct import Struct
from typing import Any

LENGTH = Struct("<I")
_PATH = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})"
START_SECONDS = 20.0  # for the process to start: importing on a machine busy loading weights


class ApartError(Exception):
    """The process took too long or died."""


class Apart:
    """``worker`` is the module whose ``main`` runs there, ``hello`` what it is given once, as JSON,
    and ``what`` what runs there, for errors. Thread-safe; answers one request at a time.

    ``hello["limits"]`` has ``seconds`` of wall time for a request and ``memory`` in bytes, of
    address space.
    """

    def __init__(self, worker: str, hello: dict[str, Any], what: str) -> None:
        self._module = worker
        self._hello = hello
        self._what = what
        self._seconds: float = hello["limits"]["seconds"]
        self._worker: _Worker | None = None
        self._lock = threading.Lock()

    def ask(self, request: bytes) -> dict[str, Any]:
        """The answer, an object with ``error`` if the request failed. Raises `ApartError`."""
        with self._lock:
            return self._ask(request)

    def _ask(self, request: bytes) -> dict[str, Any]:
        if self._worker is not None and self._worker.ended:  # while idle: no request's fault
            self._drop_worker()
        if self._worker is None:
            self._worker = _Worker(self._module, self._hello)
            self._stop_worker = weakref.finalize(self, self._worker.stop)
        worker = self._worker
        try:
            if (refusal := worker.wait_until_ready()) is not None:
                raise ApartError(refusal)
            answer: dict[str, Any] = json.loads(worker.call(request, self._seconds))
        except TimeoutError:
            error = f"the {self._what} ran longer than {self._seconds:g} s"
        except (OSError, EOFError):
            error = f"the {self._what}'s process died"
        else:
            return answer
        self._drop_worker()
        raise ApartError(error)

    def _drop_worker(self) -> None:
        self._stop_worker()
        self._worker = None


class _Worker:
    """The process and the socket to it."""

    def __init__(self, module: str, hello: dict[str, Any]) -> None:
        self._ready = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: no module of the current folder
                [sys.executable, "-P", "-c", f"{_PATH}; from {module} import main; main()"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self._hello = json.dumps(hello).encode()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait_until_ready(self) -> str | None:
        """Why it does not get ready, if it says so."""
        if self._ready:
            return None
        answer: dict[str, str] = json.loads(self.call(self._hello, START_SECONDS))
        self._ready = "error" not in answer
        return answer.get("error")

    def call(self, request: bytes, seconds: float) -> bytes:
        """Raises `TimeoutError`, and `OSError` or `EOFError` when the process is gone."""
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(LENGTH.pack(len(request)) + request)
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        return self._read(length, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def stop(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
