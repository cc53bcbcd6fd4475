"""A thread that does jobs in order, so that nobody else waits for a disk."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

logger = logging.getLogger(__name__)

_NICE = 10  # a tenth of a core against somebody who computes, all of one that is idle

Job = Callable[[], None]


class Worker(Protocol):
    def submit(self, job: Job) -> None: ...

    def close(self, timeout: float) -> None:
        """Take no more jobs; wait for those taken, at most so many seconds."""
        ...


class ThreadWorker:
    """A daemon thread, so that a disk that hangs keeps no process alive. ``patient``: what it does
    can wait, for hours if need be; it takes the time that nobody else wants.
    """

    def __init__(self, name: str, *, patient: bool = False) -> None:
        self._patient = patient
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = False
        self._late = False  # what has not been done by now no longer is
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
        self._late = True

    def _run(self) -> None:
        if self._patient:
            _give_way()
        while (job := self._jobs.get()) is not None and not self._late:
            try:
                job()
            except Exception:  # jobs see to their own; the thread outlives what they overlook
                logger.exception("%s: a job failed", threading.current_thread().name)


def _give_way() -> None:
    """On Linux, where each thread has a priority of its own."""
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
