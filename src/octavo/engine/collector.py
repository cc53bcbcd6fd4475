"""When Python's collector of circular garbage may walk over all there is.

Requests that wait are what it takes for old objects: a full pass looks at every one of them, over
HTTP at some hundred a request, holds the interpreter's lock meanwhile, and finds nothing, for what
a request is made of refers to itself nowhere once it has ended. So while streams run there are few
full passes, and one when nobody waits for anything; what is young is collected as ever. Objects
beyond the young ones can have grown by no more than `_PASSES` × 11 × 700 (CPython's thresholds)
before there is a full pass all the same: what circles some library makes cannot pile up.
"""

from __future__ import annotations

import gc
import threading

_PASSES = 250  # of the middle generation, until a full one is due while streams run
_IDLE = 10  # of them, after which one is worth it when nothing runs: CPython's own figure

_lock = threading.Lock()
_holders = 0
_before = gc.get_threshold()  # before the first holder


def hold_back() -> None:
    """Make full passes rare, until `let_go` has been called as often."""
    global _holders, _before
    with _lock:
        if not _holders:
            young, middle, old = _before = gc.get_threshold()
            gc.set_threshold(young, middle, max(old, _PASSES))
        _holders += 1


def let_go() -> None:
    global _holders
    with _lock:
        _holders -= 1
        if not _holders:
            gc.set_threshold(*_before)


def catch_up() -> None:
    """Nothing runs: a pass holds up nobody, and there is little to walk over."""
    if gc.isenabled() and gc.get_count()[2] >= _IDLE:
        gc.collect()
