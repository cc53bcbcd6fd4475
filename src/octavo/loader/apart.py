"""Processes of their own for what strangers' files make us run: templates, odd tokenizers.

Their memory is limited by the kernel, and each is killed when its time is over. A call costs a
round trip over a socket; a process starts with the first one, and another after it has died.

No request waits for one that is slow: a request has one of a few seats for quick ones first, and
moves to one of the seats for slow ones, with its process, when it takes longer than almost all do.
Where these are taken, the slow request that has run longest is ended before its time.
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
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any

LENGTH = Struct("<I")
_PATH = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})"
_LONG = 0.05  # seconds; almost all take a few milliseconds
_SHARE = 8  # a slow request has this part of its time, however many others there are
START_SECONDS = 20.0  # for the process to start: importing on a machine busy loading weights


class ApartError(Exception):
    """The process took too long or died."""


class Apart:
    """``worker`` is the module whose ``main`` runs there, ``hello`` what it is given once, as JSON,
    and ``what`` what runs there, for errors. Thread-safe; answers ``quick`` requests at a time, and
    ``slow`` more that take long.

    ``hello["limits"]`` has ``seconds`` of wall time for a request and ``memory`` in bytes, of
    address space.
    """

    def __init__(
        self, worker: str, hello: dict[str, Any], what: str, *, quick: int = 2, slow: int = 4
    ) -> None:
        self._module = worker
        self._hello = hello
        self._what = what
        self._seconds: float = hello["limits"]["seconds"]
        self._quick = threading.Semaphore(quick)
        self._most_quick = quick
        self._most_slow = slow
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._idle: list[_Worker] = []
        self._slow: list[_Worker] = []  # the one that has run longest first
        self._workers: set[_Worker] = set()  # all
        weakref.finalize(self, _stop, self._workers)

    def ask(self, request: bytes) -> dict[str, Any]:
        """The answer, an object with ``error`` if the request failed. Raises `ApartError`."""
        self._quick.acquire()
        try:
            worker = self._free_worker()
        except BaseException:
            self._quick.release()
            raise
        sound = False
        try:
            if (refusal := worker.wait_until_ready()) is not None:
                raise ApartError(refusal)
            answer: dict[str, Any] = json.loads(worker.call(request, self._seconds, self._make_way))
            sound = True
            return answer
        except TimeoutError:
            raise ApartError(f"the {self._what} ran longer than {self._seconds:g} s") from None
        except (OSError, EOFError):
            if not worker.given_up:
                raise ApartError(f"the {self._what}'s process died") from None
            raise ApartError(
                f"the {self._what} was ended after {worker.seconds:.2g} s, because too many others "
                "take as long"
            ) from None
        finally:
            self._leave(worker, keep=sound)

    def _free_worker(self) -> _Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop(0)
                if not worker.ended:  # while idle: no request's fault
                    return worker
                self._workers.discard(worker)
                worker.stop()
            return self._new_worker()

    def _new_worker(self) -> _Worker:
        worker = _Worker(self._module, self._hello)
        self._workers.add(worker)
        return worker

    def _make_way(self, worker: _Worker) -> None:
        """A request takes long. It leaves its seat to a quick one if there is one for it."""
        with self._lock:
            if worker in self._slow:
                return
            if len(self._slow) >= self._most_slow:
                longest = self._slow[0]
                if longest.seconds >= self._seconds / _SHARE:
                    longest.give_up()
                return
            self._slow.append(worker)
            while len(self._idle) < self._most_quick:  # they start while nobody waits for them yet
                self._idle.append(self._new_worker())
        self._quick.release()

    def _leave(self, worker: _Worker, *, keep: bool) -> None:
        """A request has ended. Its worker is kept for the next one, if it is not one too many."""
        with self._lock:
            was_slow = worker in self._slow
            if was_slow:
                self._slow.remove(worker)
            if keep and not worker.given_up and len(self._idle) < self._most_quick:
                self._idle.append(worker)
            else:
                self._workers.discard(worker)
                worker.stop()
        if not was_slow:
            self._quick.release()


def _stop(workers: set[_Worker]) -> None:
    for worker in [*workers]:
        worker.stop()


class _Worker:
    """The process and the socket to it."""

    def __init__(self, module: str, hello: dict[str, Any]) -> None:
        self.given_up = False
        self._ready = False
        self._began = time.monotonic()  # with its request
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

    @property
    def seconds(self) -> float:
        """Since its request began."""
        return time.monotonic() - self._began

    def give_up(self) -> None:
        """End it although it has time left. From any thread."""
        self.given_up = True
        self._process.kill()

    def call(
        self, request: bytes, seconds: float, slow: Callable[[_Worker], None] = lambda worker: None
    ) -> bytes:
        """``slow`` is called when it has taken long, and again. Raises `TimeoutError`, and
        `OSError` or `EOFError` when the process is gone.
        """
        self._began = time.monotonic()
        deadline = self._began + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(LENGTH.pack(len(request)) + request)
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline, slow))
        return self._read(length, deadline, slow)

    def _read(self, size: int, deadline: float, slow: Callable[[_Worker], None]) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(min(left, _LONG))
            try:
                piece = self._socket.recv(size - len(data))
            except TimeoutError:
                slow(self)
                continue
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def stop(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
