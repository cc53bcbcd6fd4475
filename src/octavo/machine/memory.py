"""How much memory this process can really have: the machine's, within every cgroup limit."""

from __future__ import annotations

from pathlib import Path

from octavo.machine.cgroups import cgroups, ignored

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of the page size


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can still be allocated without swapping or being killed.

    The least of the kernel's estimate (`MemAvailable`) and what each memory cgroup of this
    process, v1 or v2, leaves: its limit less its use, not counting file pages it can drop.
    ``root`` is where /proc and /sys are found.
    """
    available = _figure(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        raise OSError("/proc/meminfo has no MemAvailable")
    rooms = [available * 1024, *map(_room, cgroups("memory", root))]
    return max(0, min(room for room in rooms if room is not None))


def _figure(file: Path, name: str) -> int | None:
    """Return the number behind a name at the beginning of a line."""
    for line in file.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value.split()[0])
    return None


def _room(group: Path) -> int | None:
    """Return the bytes that the group leaves; None without a limit."""
    for limit, usage, droppable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not (group / limit).exists():
            continue
        try:
            text = (group / limit).read_text().strip()
            if text == "max" or int(text) >= _UNLIMITED:
                return None
            used = int((group / usage).read_text())
            return int(text) - max(0, used - _droppable(group, droppable))
        except (OSError, ValueError):
            ignored(group / limit, "a limit of memory")
    return None


def _droppable(group: Path, name: str) -> int:
    try:
        return _figure(group / "memory.stat", name) or 0
    except (OSError, ValueError, IndexError):
        return 0


def as_size(count: float) -> str:
    """Format bytes in the largest binary unit that they fill, in up to four digits: "92.7 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
