"""How many threads this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.machine.cgroups import cgroups, ignored
from octavo.words import plural


def usable_cpus() -> tuple[int, str]:
    """Return how many threads can run at once, and where the number comes from, for the log.

    The CPUs of the process's affinity mask (cpusets included), and no more than the CPU quota of
    its control groups, rounded up: with 1.5 CPUs two threads are right most of the time.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    if quota is not None and quota < allowed:
        return max(1, -int(-quota // 1)), f"CPU quota of {quota:g}"
    return allowed, f"{plural(allowed, 'CPU')} in the affinity mask"


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the tightest CPU quota in CPUs over the process's control groups and their parents."""
    quotas = [_quota(group) for group in cgroups("cpu", root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    """Return a group's quota.

    It is ``cpu.max`` of version 2: "max 100000" or "<quota> <period>" in microseconds; of version 1
    ``cpu.cfs_quota_us`` (-1: none) over ``cpu.cfs_period_us``. A file that says something else is
    named in the log and counts as no quota.
    """
    file = group / "cpu.max"
    try:
        if file.exists():
            quota, period = file.read_text().split()
        elif (file := group / "cpu.cfs_quota_us").exists():
            quota, period = file.read_text(), (group / "cpu.cfs_period_us").read_text()
        else:
            return None
        if quota.strip() in ("max", "-1"):
            return None
        cpus = int(quota) / int(period)
        if cpus > 0:
            return cpus
    except (OSError, ValueError, ZeroDivisionError):
        pass
    ignored(file, "a CPU quota")
    return None
