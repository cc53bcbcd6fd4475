"""The threads that read bodies, and the memory that large bodies leave behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.serve.errors import TooMany

T = TypeVar("T")

_THREADS = 4  # so that one long prompt does not keep the short ones waiting
_MOST = 1024  # bodies at a time
_LARGE = 256 << 10  # bytes
_PAUSE = 1.0  # seconds after a large body: by then its answer is often gone, and the next have come


class Workers:
    """Runs the work on a body in a thread.

    What a few large bodies take for a moment, hundreds of megabytes, the C library keeps for its
    threads' later use; it is told to give it back.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="octavo-prompt")
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        self._planned = False
        self.pending = 0  # bodies being worked on, or waiting for a thread

    async def run(self, work: Callable[[bytes], T], body: bytes) -> T:
        """Raises `TooMany` when too many others wait for a thread."""
        if self.pending >= _MOST:
            raise TooMany(f"{self.pending} requests are being read", None, "capacity")
        loop = asyncio.get_running_loop()
        self.pending += 1
        try:
            return await loop.run_in_executor(self._threads, work, body)
        finally:
            self.pending -= 1
            if len(body) >= _LARGE and not self._planned:
                self._planned = True
                loop.call_later(_PAUSE, self._threads.submit, self._give_back)

    def _give_back(self) -> None:
        self._planned = False
        gc.collect()
        if self._trim is not None:
            self._trim(0)
