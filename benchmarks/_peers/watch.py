"""How much of the machine others used while something was measured, from /proc."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def machine_busy() -> float:
    """Processor seconds spent on anything since boot, all cores (steal included)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = [int(value) for value in fields[:8]]
    return (sum(ticks) - ticks[3] - ticks[4]) / TICK


def own_seconds(pid: int | None) -> float:
    """Processor seconds of this process, of its finished children, and of a running one."""
    total = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    if pid is not None:
        values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += sum(int(v) for v in values[11:15]) / TICK
    return total


class Interference:
    """The share of the machine that others used between construction and `share`."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._wall, self._busy, self._own = time.monotonic(), machine_busy(), own_seconds(pid)

    def share(self) -> float:
        wall = time.monotonic() - self._wall
        others = machine_busy() - self._busy - (own_seconds(self._pid) - self._own)
        return max(0.0, others / (wall * (os.cpu_count() or 1)))
