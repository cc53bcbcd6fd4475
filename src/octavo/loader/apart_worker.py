"""The other end of `octavo.loader.apart`: answers requests within limits.

What runs there imports little of octavo. File descriptor 0 is a socket to the parent. Frames both
ways are a 4-byte length and JSON: first the parent's hello, answered with {}, then requests. The
stream's end ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any

LENGTH = Struct("<I")
Json = dict[str, Any]


def serve(prepare: Callable[[Json], Callable[[Json], Json]], what: str) -> None:
    """``prepare`` makes of the hello what answers requests; ``what`` that is, for errors."""
    # The terminal's Ctrl-C and a supervisor's SIGTERM are for the parent, whose end ends this too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = socket.socket(fileno=0).makefile("rwb")
    hello = _receive(channel)
    if hello is None:
        return
    limits = hello["limits"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(limits.get("loading", limits["memory"]))
    try:
        answer = prepare(hello)
    except Exception as error:
        _send(channel, {"error": f"the {what} cannot be read: {error}"})
        return
    _limit_memory(limits["memory"])
    _send(channel, {})
    while (request := _receive(channel)) is not None:
        # The parent kills what runs too long; should the parent be gone, this does.
        spent = resource.getrusage(resource.RUSAGE_SELF)
        cpu = int(spent.ru_utime + spent.ru_stime + limits["seconds"]) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
        try:
            reply = answer(request)
        except MemoryError:
            reply = {"error": f"the {what} needs more than {limits['memory'] >> 20} MB"}
        except RecursionError:
            reply = {"error": f"the {what} recurses without end"}
        except Exception as error:
            reply = {"error": f"the {what} failed: {type(error).__name__}: {error}"}
        _send(channel, reply)


def _limit_memory(more: int) -> None:
    """To so many bytes of address space beside what the process has already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))


def _receive(channel: Any) -> Json | None:
    header = channel.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    message: Json = json.loads(channel.read(*LENGTH.unpack(header)))
    return message


def _send(channel: Any, message: Json) -> None:
    data = json.dumps(message).encode()
    channel.write(LENGTH.pack(len(data)) + data)
    channel.flush()
