"""The threads that read bodies, and the memory that large bodies leave behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_THREADS = 4  # so that one long prompt does not keep the short ones waiting
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

    async def run(self, work: Callable[[bytes], T], body: bytes) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, work, body)
        finally:
            if len(body) >= _LARGE and not self._planned:
                self._planned = True
                loop.call_later(_PAUSE, self._threads.submit, self._give_back)

    def _give_back(self) -> None:
        self._planned = False
        gc.collect()
        if self._trim is not None:
            self._trim(0)
