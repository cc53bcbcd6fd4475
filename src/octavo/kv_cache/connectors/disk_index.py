"""The index of a folder of cached blocks, of all engines: its size, and what is evicted first.

A file counts if it has a block's name and lies where that name belongs. Other files are not counted
and stay, and links are not followed.

The files are the truth, and the index is kept in memory: several servers write to a folder and
evict from it without telling each other, a file may vanish or be damaged at any time, and a second
record on disk could only contradict them. Each server knows all files from its start on. From then
on it lists one small folder at a time, so that no write waits for long; by the time it has written
a 64th of the budget it has seen what the others did.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from octavo.kv_cache.block_hash import DIGEST_BYTES
from octavo.kv_cache.connectors.folders import opened, unlink

UNFINISHED = ".tmp"
_ENGINE = re.compile("[0-9a-f]{16}")
_SHARD = re.compile("[0-9a-f]{2}")
_BLOCK = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}-(0|[1-9][0-9]{{0,5}})(\.[0-9a-f]+\.tmp)?")
_ABANDONED = 600.0  # seconds after which no server is still writing an unfinished file
_KEPT = 1 - 1 / 16  # of the budget: the rest is for files of others that are not seen here yet
_SEEN = 1 / 64  # of the budget is written while all folders are listed once
_AT_ONCE = 64  # files removed for one write, at most
_REPORTS = 1 << 16  # files used or gone that are remembered until the next write


class DiskIndex:
    """The files ROOT/<engine>/<2 hex>/<name>, least recently used first. A path is what follows the
    root. Used by one thread, except `use` and `gone`, which a second thread may call.

    ``found`` is called for a file that lies there, and returns the bytes that it counts; None if it
    is not a block and was removed. ``lost`` is called with the path of a file that is gone.
    """

    def __init__(
        self,
        root: str,
        budget: int,
        found: Callable[[str, os.stat_result], int | None],
        lost: Callable[[str], None],
    ) -> None:
        self.budget = budget
        self.used = 0  # bytes, as far as this process knows
        self._root = root
        self._found, self._lost = found, lost
        self._files: OrderedDict[str, tuple[int, int]] = OrderedDict()  # size, last use in ns
        self._folders: dict[str, set[str]] = {}  # the same paths
        # Files that take less space than they are long, perhaps only because their file system has
        # not allocated it yet: their size is read again whenever their folder is listed.
        self._growing: set[str] = set()
        # Files that another thread has used (True) or missed, in order.
        self._reports: deque[tuple[str, bool]] = deque(maxlen=_REPORTS)
        self._unlisted = self._list()  # folders still to be listed in this round
        self._round = len(self._unlisted)
        self._due = 0.0  # folders to be listed by now
        for folder in self._unlisted:
            self._compare(folder)
        self._files = OrderedDict(sorted(self._files.items(), key=lambda file: file[1][1]))

    def use(self, path: str) -> None:
        """Make the file the most recently used, for all servers."""
        now = time.time_ns()
        folder, name = os.path.split(path)
        with suppress(OSError), opened(self._root, folder) as where:
            os.utime(name, ns=(now, now), dir_fd=where, follow_symlinks=False)
        self._reports.append((path, True))

    def gone(self, path: str) -> None:
        """Forget the file, which is not there any more."""
        self._reports.append((path, False))

    def add(self, path: str, size: int) -> None:
        """Enter a file that has just been written."""
        self._remove(path)
        self._enter(path, size, time.time_ns())

    def make_room(self, size: int) -> bool:
        """Make room for a file: look at what other servers have done lately, and remove the least
        recently used files. Return False if more must be removed than is done at once.
        """
        while self._reports:
            path, there = self._reports.popleft()
            if not there:
                self._remove(path)
            elif path in self._files:
                self._move(path, time.time_ns())
        self._look(size)
        most = max(int(self.budget * _KEPT), size)
        for _ in range(_AT_ONCE):
            if self.used + size <= most or not self._files:
                break
            self._evict()
        return self.used + size <= most

    def _evict(self) -> None:
        """Remove the least recently used file, unless another server has used it since."""
        path, (_, used) = next(iter(self._files.items()))
        folder, name = os.path.split(path)
        try:
            with opened(self._root, folder) as where:
                seen = os.stat(name, dir_fd=where, follow_symlinks=False).st_mtime_ns
                if seen > used:
                    self._move(path, seen)
                    return
                unlink(name, where)
        except (FileNotFoundError, NotADirectoryError):
            pass  # another server has removed it, or its folder is no folder any more
        except OSError:  # it still takes its space
            self._move(path, used)
            return
        self._remove(path)
        self._lost(path)

    def _look(self, size: int) -> None:
        """List as many folders as are due when ``size`` bytes are written."""
        folders = max(1, self._round, len(self._folders))
        self._due += folders * min(1.0, size / (self.budget * _SEEN))
        while self._due >= 1.0:
            self._due -= 1.0
            if not self._unlisted:
                self._unlisted = [*{*self._list(), *self._folders}]
                self._round = len(self._unlisted)
            if self._unlisted:
                self._compare(self._unlisted.pop())

    def _compare(self, folder: str) -> None:
        """Enter and remove files as the folder now has them."""
        known = self._folders.get(folder, set())
        there: set[str] = set()
        new: list[tuple[int, int, str]] = []
        try:
            with opened(self._root, folder) as where:
                there.update(_paths(where, folder))
                new += self._read((there - known) | (there & self._growing), where)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # what it has is unknown
            return
        for path in known - there:
            self._remove(path)
            self._lost(path)
        for used, size, path in new:
            if path in self._files:
                self.used += size - self._files[path][0]
                self._files[path] = size, self._files[path][1]
            else:
                self._enter(path, size, used)

    def _list(self) -> list[str]:
        """Return all folders that may have files."""
        return [
            f"{engine}/{shard}"
            for engine in self._folders_in("", _ENGINE)
            for shard in self._folders_in(engine, _SHARD)
        ]

    def _folders_in(self, folder: str, named: re.Pattern[str]) -> list[str]:
        try:
            with opened(self._root, folder) as where, os.scandir(where) as entries:
                return [
                    entry.name
                    for entry in entries
                    if named.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
        except OSError:
            return []

    def _read(self, paths: Iterable[str], where: int) -> Iterator[tuple[int, int, str]]:
        """Yield (last use in ns, bytes, path) of the blocks among files of the folder ``where``.
        Remove unfinished files that are abandoned.
        """
        for path in paths:
            name = os.path.basename(path)
            try:
                found = os.stat(name, dir_fd=where, follow_symlinks=False)
            except OSError:
                continue
            if not stat.S_ISREG(found.st_mode):
                continue
            if not path.endswith(UNFINISHED):
                if (size := self._found(path, found)) is not None:
                    (self._growing.add if size < found.st_size else self._growing.discard)(path)
                    yield found.st_mtime_ns, size, path
            elif abs(time.time() - found.st_mtime) > _ABANDONED:
                with suppress(OSError):
                    unlink(name, where)

    def _move(self, path: str, used: int) -> None:
        """Make the file the most recently used; ``used``: when it was."""
        self._files[path] = self._files[path][0], used
        self._files.move_to_end(path)

    def _enter(self, path: str, size: int, used: int) -> None:
        self._files[path] = size, used
        self._folders.setdefault(os.path.dirname(path), set()).add(path)
        self.used += size

    def _remove(self, path: str) -> None:
        if (file := self._files.pop(path, None)) is not None:
            self.used -= file[0]
            self._growing.discard(path)
            folder = os.path.dirname(path)
            self._folders[folder].discard(path)
            if not self._folders[folder]:
                del self._folders[folder]

    def check(self) -> None:
        """Raise `RuntimeError` unless files and bytes add up."""
        if self.used != sum(size for size, _ in self._files.values()):
            raise RuntimeError("the bytes of the disk cache are miscounted")
        if self._files.keys() != {path for paths in self._folders.values() for path in paths}:
            raise RuntimeError("a file of the disk cache is in no folder")


def _paths(where: int, folder: str) -> list[str]:
    """Return the paths in ``folder`` that are named as blocks of that folder. Raise `OSError`."""
    shard = os.path.basename(folder)
    return [
        f"{folder}/{name}"
        for name in os.listdir(where)
        if name.startswith(shard) and _BLOCK.fullmatch(name)
    ]
