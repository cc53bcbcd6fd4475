"""Where the limits of this process's control groups are to be read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

logger = logging.getLogger(__name__)


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the directories of this process's control groups and of their ancestors: of version 2,
    and of version 1 for the controller ("cpu", "memory").

    Inside a container the own path may not be visible; the mount point, which comes last, then is
    the own group. ``root`` is where /proc and /sys are found.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        path = PurePosixPath(name)
        for part in (path, *path.parents):
            yield mount / str(part).lstrip("/")


@cache
def ignored(file: Path, what: str) -> None:
    """Log that ``file`` is not ``what`` it should be; only once, since it is read often."""
    try:
        said = repr(file.read_text(errors="replace").strip()[:50])
    except OSError as error:
        said = str(error.strerror)
    logger.warning("%s is not %s (%s) and is ignored", file, what, said)
