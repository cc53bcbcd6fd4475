"""A thread that does jobs in order, so that nobody else waits for a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

logger = logging.getLogger(__name__)

_RESTS = 9  # times as long as a job has computed: it takes a tenth of a core

Job = Callable[[], None]


class Worker(Protocol):
    def submit(self, job: Job) -> None: ...

    def hurry(self) -> None:
        """What can wait no longer does: the end is near."""
        ...

    def close(self, timeout: float) -> None:
        """Take no more jobs; wait for those taken, at most so many seconds."""
        ...


class ThreadWorker:
    """A daemon thread, so that a disk that hangs keeps no process alive. ``patient``: what it does
    can wait, and it rests after each job for as long as leaves a core to those who compute. It has
    no lower priority: whoever is not let on while it holds the interpreter's lock lets nobody on.
    """

    def __init__(self, name: str, *, patient: bool = False) -> None:
        self._patient = patient
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = False
        self._hurried = threading.Event()
        self._late = False  # what has not been done by now no longer is
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        if not self._closed:
            self._jobs.put(job)

    def hurry(self) -> None:
        self._hurried.set()

    def close(self, timeout: float) -> None:
        self.hurry()
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join(timeout)
        self._late = True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._late:
            began = time.thread_time()
            try:
                job()
            except Exception:  # jobs see to their own; the thread outlives what they overlook
                logger.exception("%s: a job failed", threading.current_thread().name)
            if self._patient:
                self._hurried.wait(_RESTS * (time.thread_time() - began))
