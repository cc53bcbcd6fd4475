"""A thread that does jobs in order, so that the engine does not wait for a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

_RESTS = 9  # rest this many times as long as a job has computed: use a tenth of a core

Job = Callable[[], None]


class ThreadWorker:
    """A daemon thread, so that a disk that hangs does not keep the process alive. It starts with
    the first job. ``patient``: its jobs can wait, so it rests after each one and leaves the core to
    threads that compute. It does not run at a lower priority: a thread that is preempted while it
    holds the interpreter's lock blocks all others.
    """

    def __init__(self, name: str, *, patient: bool = False) -> None:
        self._patient = patient
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = False
        self._hurried = threading.Event()
        self._late = False  # jobs that have not begun by now are dropped
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, job: Job) -> None:
        if not self._closed:
            if self._thread.ident is None:
                self._thread.start()  # first: a job whose thread did not start must not run later
            self._jobs.put(job)

    def hurry(self) -> None:
        """Do not rest any more."""
        self._hurried.set()

    def close(self, timeout: float) -> None:
        """Take no more jobs. Wait for those taken, at most ``timeout`` seconds."""
        self.hurry()
        self._closed = True
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        self._late = True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._late:
            began = time.thread_time()
            try:
                job()
            except Exception:  # jobs handle their own errors; the thread survives the others
                logger.exception("%s: a job failed", threading.current_thread().name)
            if self._patient:
                self._hurried.wait(_RESTS * (time.thread_time() - began))
