"""How many threads this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.execute.cgroups import cgroups


def usable_cpus() -> tuple[int, str]:
    """Threads that can run at once, and where the number comes from, for the log.

    The CPUs of the process's affinity mask (cpusets included), and no more than the CPU quota of
    its control groups, rounded up: with 1.5 CPUs two threads are right most of the time.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    if quota is not None and quota < allowed:
        return max(1, -int(-quota // 1)), f"CPU quota of {quota:g}"
    return allowed, f"{allowed} CPUs in the affinity mask"


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The tightest CPU quota in CPUs over the process's control groups and their parents."""
    quotas = [_quota(group) for group in cgroups("cpu", root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    """``cpu.max`` of version 2: "max 100000" or "<quota> <period>" in microseconds; of version 1
    ``cpu.cfs_quota_us`` (-1: none) over ``cpu.cfs_period_us``.
    """
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        micros = int((group / "cpu.cfs_quota_us").read_text())
        return micros / int((group / "cpu.cfs_period_us").read_text()) if micros > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
