"""What others take of the processor while this process measures something."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

MUCH = 0.05  # of the processor: more makes times too long


class Taken(NamedTuple):
    """Means over some time, in CPUs of those that this process may use."""

    others: float  # by other processes
    stolen: float  # by the host of a virtual machine
    cpus: int

    @property
    def share(self) -> float:
        return (self.others + self.stolen) / self.cpus

    @property
    def text(self) -> str:
        """A sentence for people; "" where others took little."""
        if self.share <= MUCH:
            return ""
        host = f" and the machine's host {self.stolen:.1f}" if self.stolen >= 0.05 else ""
        return f"other processes took {self.others:.1f}{host} of {self.cpus} CPUs meanwhile"


class Others:
    """Count what others take from now on. ``root`` is where /proc is found."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._file = root / "proc/stat"
        self._from = self._now()

    def taken(self) -> Taken:
        """Return what was taken since it was made; nothing where the system does not say."""
        cpus = len(os.sched_getaffinity(0))
        if self._from is None or (now := self._now()) is None:
            return Taken(0.0, 0.0, cpus)
        seconds, busy, stolen, own = (
            after - before for after, before in zip(now, self._from, strict=True)
        )
        seconds = max(seconds, 1e-3)
        return Taken(max(0.0, busy - own) / seconds, max(0.0, stolen) / seconds, cpus)

    def _now(self) -> tuple[float, float, float, float] | None:
        """Return seconds: of the clock, of CPUs at work, stolen from them, and of this process."""
        tick = os.sysconf("SC_CLK_TCK")
        allowed = os.sched_getaffinity(0)
        busy = stolen = 0
        try:
            for line in self._file.read_text().splitlines():
                name, *fields = line.split()
                if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in allowed:
                    # user, nice, system, idle, iowait, irq, softirq, steal (proc_stat(5))
                    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
                    busy += user + nice + system + irq + softirq
                    stolen += steal
        except (OSError, ValueError):
            return None
        return time.monotonic(), busy / tick, stolen / tick, time.process_time()
