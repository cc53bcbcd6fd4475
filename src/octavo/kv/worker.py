"""A thread that does jobs in order, so that nobody else waits for a disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class Worker(Protocol):
    def submit(self, job: Job) -> None: ...

    def close(self, timeout: float) -> None:
        """Take no more jobs; wait for those taken, at most so many seconds."""
        ...


class ThreadWorker:
    """A daemon thread, so that a disk that hangs keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        if not self._closed:
            self._jobs.put(job)

    def close(self, timeout: float) -> None:
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # jobs see to their own; the thread outlives what they overlook
                logger.exception("%s: a job failed", threading.current_thread().name)
