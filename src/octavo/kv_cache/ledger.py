"""What lies in a folder of cached blocks, of all engines: how much it is, and what goes first.

What counts is a file with a block's name, where that belongs. Whatever else lies there is not
counted and stays, and links are not followed.

Several servers write to a folder and evict from it, and none tells the others. Each knows all files
from its start on and lists a folder of them anew from time to time, a small one at a time, so that
nobody waits: by the time it has written a 64th of the budget it has seen what the others did.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from octavo.kv_cache.digest import DIGEST_BYTES
from octavo.kv_cache.folders import opened, unlink

UNFINISHED = ".tmp"
_ENGINE = re.compile("[0-9a-f]{16}")
_SHARD = re.compile("[0-9a-f]{2}")
_BLOCK = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}-(0|[1-9][0-9]{{0,5}})(\.[0-9a-f]+\.tmp)?")
_ABANDONED = 600.0  # seconds after which an unfinished file is nobody's
_KEPT = 1 - 1 / 16  # of the budget: the rest is for what others write before it is seen here
_SEEN = 1 / 64  # of the budget is written while all folders are listed once
_AT_ONCE = 64  # files removed for one, at most
_TOLD = 1 << 16  # files used or gone of late that are remembered until the next is written


class Ledger:
    """The files ROOT/<engine>/<2 hex>/<name>, least recently used first; a path is what comes after
    the root. For one thread, but for `use` and `gone`, which another may call.

    ``found`` is asked about a file that lies there, and says how many bytes it counts; None if it
    is no block, and was removed. ``lost`` is told the path of one that is no more.
    """

    def __init__(
        self,
        root: str,
        budget: int,
        found: Callable[[str, os.stat_result], int | None],
        lost: Callable[[str], None],
    ) -> None:
        self.budget = budget
        self.used = 0  # bytes, as far as is known here
        self._root = root
        self._found, self._lost = found, lost
        self._files: OrderedDict[str, tuple[int, int]] = OrderedDict()  # size, last use in ns
        self._folders: dict[str, set[str]] = {}  # the same paths
        # Of these, what takes less on disk than it is long, perhaps only because its file system
        # has not got round to it: it is looked at again in each round.
        self._growing: set[str] = set()
        self._told: deque[tuple[str, bool]] = deque(maxlen=_TOLD)
        self._unlisted = self._list()  # folders of this round
        self._round = len(self._unlisted)
        self._due = 0.0  # folders to be listed by now
        there: list[tuple[int, int, str]] = []
        for folder in self._unlisted:
            with suppress(OSError), opened(self._root, folder) as where:
                there += self._read(_paths(where, folder), where)
        for used, size, path in sorted(there):
            self._enter(path, size, used)

    def use(self, path: str) -> None:
        """It was wanted just now."""
        now = time.time_ns()
        folder, name = os.path.split(path)
        with suppress(OSError), opened(self._root, folder) as where:
            os.utime(name, ns=(now, now), dir_fd=where, follow_symlinks=False)
        self._told.append((path, True))

    def gone(self, path: str) -> None:
        """It is no more."""
        self._told.append((path, False))

    def add(self, path: str, size: int) -> None:
        """It has just been written."""
        self._remove(path)
        self._enter(path, size, time.time_ns())

    def make_room(self, size: int) -> bool:
        """For a file: look at what others have done lately, and remove what was used least. False
        if there is more to remove than is done at once.
        """
        while self._told:
            path, there = self._told.popleft()
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
        """The least recently used, unless another server has used it since."""
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
            pass  # another was quicker, or its folder has become something else
        except OSError:  # it takes its place all the same
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
        known = self._folders.get(folder, set())
        there: set[str] = set()
        new: list[tuple[int, int, str]] = []
        try:
            with opened(self._root, folder) as where:
                there.update(_paths(where, folder))
                new += self._read((there - known) | (there & self._growing), where)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # nobody knows
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
        """All folders of files."""
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
        """(last use in ns, bytes, path) of those in the folder ``where`` that are blocks; what is
        unfinished and abandoned is removed.
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
                    if size < found.st_size:
                        self._growing.add(path)
                    else:
                        self._growing.discard(path)
                    yield found.st_mtime_ns, size, path
            elif abs(time.time() - found.st_mtime) > _ABANDONED:
                with suppress(OSError):
                    unlink(name, where)

    def _move(self, path: str, used: int) -> None:
        """It was used last, and then."""
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
        """Files and bytes add up; `RuntimeError` otherwise."""
        if self.used != sum(size for size, _ in self._files.values()):
            raise RuntimeError("the bytes of the disk tier are miscounted")
        if self._files.keys() != {path for paths in self._folders.values() for path in paths}:
            raise RuntimeError("a file of the disk tier is in no folder")


def _paths(where: int, folder: str) -> list[str]:
    """Of whatever is named as a block that belongs in ``folder``. Raises `OSError`."""
    shard = os.path.basename(folder)
    return [
        f"{folder}/{name}"
        for name in os.listdir(where)
        if name.startswith(shard) and _BLOCK.fullmatch(name)
    ]
