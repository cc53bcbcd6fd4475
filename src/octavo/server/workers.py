"""The threads that read bodies, and the memory that large bodies leave behind."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from octavo.server.errors import too_many

T = TypeVar("T")

Kind = Literal["text", "chat"]

_THREADS = 4  # so that one long prompt does not keep the short ones waiting
# A thread that waits for a chat template's process uses no core, so chats may have more threads.
_CHAT_THREADS = 4  # for each thread of texts
SMALL = 64 << 10  # bytes; what is longer is read by other threads, so that nobody waits for it
_MOST = 1024  # bodies at a time
_LARGE = 256 << 10  # bytes
_PAUSE = 1.0  # seconds after a large body: by then its answer is often gone, and the next have come


class Workers:
    """Runs the work on bodies in threads. Texts and chats, small bodies and large ones have threads
    of their own, so that no body waits for a kind that takes longer.

    A few large bodies may take hundreds of megabytes for a moment. The C library would keep them
    for its threads' later use, and is told to give them back.
    """

    def __init__(self, threads: int = _THREADS) -> None:
        sizes = {"text": threads, "chat": threads * _CHAT_THREADS}
        self._threads = {
            (kind, large): ThreadPoolExecutor(
                1 if large else size, thread_name_prefix=f"octavo-{kind}"
            )
            for kind, size in sizes.items()
            for large in (False, True)
        }
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        self._planned = False
        self.pending = 0  # bodies being worked on, or waiting for a thread

    def run(
        self, work: Callable[[bytes], T], body: bytes, kind: Kind = "text"
    ) -> asyncio.Future[T]:
        """Do ``work`` on ``body`` in a thread. It counts as pending at once, and is never begun if
        it is cancelled before. Raises a 429 when too many others wait for a thread.
        """
        if self.pending >= _MOST:
            raise too_many(f"{self.pending} requests are being read", None, "capacity")
        held = [body]  # not in the threads' queue, which keeps what is cancelled until its turn
        large = len(body) >= _LARGE
        self.pending += 1
        threads = self._threads[kind, len(body) > SMALL]
        future = asyncio.wrap_future(threads.submit(lambda: work(held.pop())))

        def ended(_: object) -> None:
            held.clear()
            self.pending -= 1
            if large and not self._planned:
                self._planned = True
                future.get_loop().call_later(_PAUSE, threads.submit, self._give_back)

        future.add_done_callback(ended)
        return future

    def _give_back(self) -> None:
        self._planned = False
        if self._trim is not None:
            self._trim(0)
