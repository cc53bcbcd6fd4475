"""The event loop goes before the engine's computation.

Its work comes in short pieces, and clients wait for each of them, while the threads that compute
keep every core busy for the whole of a step. Where all are equal, a piece waits until one of these
has used up its slice: that is most of the time it takes to tell someone 429 at a busy server.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_NICE = 5  # steps of niceness; at 1 it is still in the scheduler's discretion


def give_way(engine: threading.Thread) -> None:
    """Make the engine's thread nicer, and those that compute for it: all of this process that
    Python has not started. Linux only, where niceness is each thread's own.
    """
    if sys.platform != "linux":
        return
    own = {thread.native_id for thread in threading.enumerate() if thread is not engine}
    own.add(os.getpid())  # the main thread, of which threading has the parent's number after a fork
    for thread_id in map(int, os.listdir("/proc/self/task")):
        if thread_id not in own:
            with suppress(OSError):  # it has ended meanwhile
                niceness = os.getpriority(os.PRIO_PROCESS, thread_id)
                os.setpriority(os.PRIO_PROCESS, thread_id, niceness + _NICE)
