"""How many threads this process may really use."""

from __future__ import annotations

import os
from pathlib import Path


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
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            base, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "sys/fs/cgroup/cpu", _quota_v1
        else:
            continue
        folder = base / path.lstrip("/")
        # Inside a container the path may be the host's; its own group is then the mount's root.
        for candidate in (folder, *folder.parents):
            if candidate == base or base in candidate.parents:
                quotas.append(read(candidate))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    """``cpu.max``: "max 100000" or "<quota> <period>" in microseconds."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    """``cpu.cfs_quota_us`` over ``cpu.cfs_period_us``; -1 is no quota."""
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
