"""Threads that compute give way to the event loop, and nothing else does."""

import _thread
import os
import sys
import threading

import pytest

from octavo.server.process import give_way


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is each thread's own on Linux only")
def test_only_what_computes_gives_way() -> None:
    """In a process of its own, for niceness cannot be taken back."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = check()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def check() -> int:
    done, begun = threading.Event(), threading.Event()
    kernel_threads: list[int] = []

    def kernel() -> None:  # as the pool's threads are: not known to threading
        kernel_threads.append(threading.get_native_id())
        begun.set()
        done.wait()

    _thread.start_new_thread(kernel, ())
    begun.wait()
    engine = threading.Thread(target=done.wait, daemon=True)
    other = threading.Thread(target=done.wait, daemon=True)
    engine.start()
    other.start()
    assert engine.native_id is not None
    assert other.native_id is not None
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    give_way(engine)
    found = [
        os.getpriority(os.PRIO_PROCESS, thread_id)
        for thread_id in (0, other.native_id, engine.native_id, *kernel_threads)
    ]
    nicer = min(mine + 5, 19)
    return 0 if found == [mine, mine, nicer, nicer] else 1
