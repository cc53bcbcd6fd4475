"""Make the garbage collector's full passes rare while requests run.

Waiting requests become old objects. A full pass looks at all of them (over HTTP at some hundred
objects a request), holds the interpreter's lock meanwhile, and finds nothing, because an ended
request leaves no reference cycles. So while streams run there are few full passes, and one when
nothing runs; young objects are collected as ever. Cycles that libraries make cannot pile up: there
is a full pass all the same when about `_OBJECTS` objects have grown old since the last, or a
quarter of those that were there then, if that is more, which is CPython's own rule. From CPython
3.14 on there are no full passes: old objects are looked at a part at a time, and the third
threshold is ignored. There this does nothing.
"""

from __future__ import annotations

import gc
import sys
import threading

_OBJECTS = 2_000_000  # grown old, after which a full pass is due while streams run
_IDLE = 10  # of them, after which one is worth it when nothing runs: CPython's own figure
_FULL_PASSES = sys.version_info < (3, 14)  # whether there are any

_lock = threading.Lock()
_holders = 0
_before = gc.get_threshold()  # before the first holder


def hold_back() -> None:
    """Make full passes rare, until `release` has been called as often."""
    global _holders, _before
    with _lock:
        if not _holders:
            young, middle, old = _before = gc.get_threshold()
            if _FULL_PASSES:
                # Counts must exceed thresholds, and what is due is seen at the next young pass.
                passes = _OBJECTS // ((young + 1) * (middle + 2)) - 1
                gc.set_threshold(young, middle, max(old, passes))
        _holders += 1


def release() -> None:
    """Undo one `hold_back`."""
    global _holders
    with _lock:
        _holders -= 1
        if not _holders:
            gc.set_threshold(*_before)


def catch_up() -> None:
    """Make a full pass if one is worth it: nothing runs, so it delays no one."""
    if _FULL_PASSES and gc.isenabled() and gc.get_count()[2] >= _IDLE:
        gc.collect()
