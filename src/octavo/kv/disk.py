"""The tier of the prefix cache on disk: a file a block, trusted only when it proves itself.

    FOLDER/octavo-kv-1/<16 hex: the engine>/<2 hex>/<64 hex: the block's digest>-<group>

A file is a header of 96 bytes and the block's bytes. The header says what the reader expects: the
format, engine and key, the length, and a CRC-32 of the bytes; who reads makes the header that ought
to be there and compares. A file that is cut short, altered, somebody else's or no file at all is
removed and counted, and its block is computed again.

Files are written under another name and renamed, so that a reader sees a whole one or none; they
are not synced, for after a power failure the checksum tells. Names are contents: several servers
may share a folder, each finding what the others had written when it looked last, and a file that
another has evicted is a miss. The budget is the folder's, whichever engine wrote the files; whoever
exceeds it counts all of them anew and removes the least recently used.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.kv.digest import DIGEST_BYTES, Key

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

FORMAT = "octavo-kv-1"
_HEADER = struct.Struct("<8s32s32sIQI8x")  # magic, engine, digest, group, length, CRC-32
HEADER_BYTES = _HEADER.size
_MAGIC = b"octavokv"
_KEPT = 0.9  # of the budget, when room is made
_PAUSE = 60.0  # seconds without writing after a write has failed
_ABANDONED = 600.0  # seconds after which an unfinished file is nobody's
_UNFINISHED = ".tmp"
_OURS = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}-(0|[1-9][0-9]{{0,5}})(\.[0-9]+\.tmp)?")


def check_folder(folder: Path) -> None:
    """Make it where it is not there, and try to write to it. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    probe = folder / f"{os.getpid()}{_UNFINISHED}"
    probe.write_bytes(b"")
    probe.unlink()


class _File(NamedTuple):
    used: float  # when it was read or written last, seconds of the file system's clock
    size: int
    path: str


class Disk:
    """Blocks of ``block_bytes`` of one engine, as files. One thread may read, one write, and a
    third ask `holds`, at the same time. Nothing here raises but the constructor (`OSError`), when
    the folder cannot be made or written to.
    """

    def __init__(
        self,
        folder: Path,
        engine: bytes,
        block_bytes: int,
        budget: int,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self.block_bytes = block_bytes
        self.bytes_read = 0
        self.bytes_written = 0
        self.corrupted = 0  # files that were not what their name says
        self.failed_writes = 0
        self._engine = engine.ljust(DIGEST_BYTES, b"\0")[:DIGEST_BYTES]
        self._root = folder / FORMAT
        self._folder = self._root / self._engine.hex()[:16]
        self._now = now
        self._paused_until = -float("inf")
        check_folder(self._folder)
        self._index: dict[Key, None] = dict.fromkeys(self._scan())
        self.used = sum(file.size for file in self._files())  # as far as is known here

    def __len__(self) -> int:
        return len(self._index)

    def holds(self, key: Key) -> bool:
        return key in self._index

    def read(self, key: Key, into: Bytes) -> bool:
        """Fill ``into`` [block_bytes]; False if the block is not, or not rightly, there."""
        path = self._path(key)
        try:
            whole = self._read(key, path, into)
        except FileNotFoundError:  # evicted by another server, or by hand
            self._index.pop(key, None)
            return False
        except OSError as error:
            self._drop(key, path, error.strerror or str(error))
            return False
        if not whole:
            self._drop(key, path, "its content is not what was written")
            return False
        with suppress(OSError):
            os.utime(path)
        self.bytes_read += self.block_bytes
        return True

    def write(self, key: Key, data: Bytes) -> None:
        """Keep a block [block_bytes], if nothing prevents it."""
        if key in self._index or self._now() < self._paused_until:
            return
        size = HEADER_BYTES + self.block_bytes
        if size > self.budget:
            return
        try:
            if self.used + size > self.budget:
                self._make_room(size)
            self._write(key, data)
        except OSError as error:
            self.failed_writes += 1
            self._paused_until = self._now() + _PAUSE
            logger.warning(
                "kv offload: %s; nothing is written for %g seconds",
                error.strerror or error,
                _PAUSE,
            )
            return
        self.used += size
        self.bytes_written += self.block_bytes
        self._index[key] = None

    # A file

    def _path(self, key: Key) -> str:
        digest, group = key
        name = digest.hex()
        return f"{self._folder}/{name[:2]}/{name}-{group}"

    def _header(self, key: Key, data: Bytes) -> bytes:
        digest, group = key
        return _HEADER.pack(_MAGIC, self._engine, digest, group, len(data), zlib.crc32(data.data))

    def _read(self, key: Key, path: str, into: Bytes) -> bool:
        # Neither a link nor something that waits for a writer is followed or waited for.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(file)
            length = HEADER_BYTES + self.block_bytes
            if not stat.S_ISREG(found.st_mode) or found.st_size != length:
                return False
            header = bytearray(HEADER_BYTES)
            if os.readv(file, [header, into.data]) != length:
                return False
            return bytes(header) == self._header(key, into)
        finally:
            os.close(file)

    def _write(self, key: Key, data: Bytes) -> None:
        path = self._path(key)
        unfinished = f"{path}.{os.getpid()}{_UNFINISHED}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.open(unfinished, flags, 0o600)
        except FileNotFoundError:  # no folder yet, or no more
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            file = os.open(unfinished, flags, 0o600)
        try:
            try:
                written = os.writev(file, [self._header(key, data), data.data])
                if written != HEADER_BYTES + len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
            os.rename(unfinished, path)
        except OSError:
            with suppress(OSError):
                os.unlink(unfinished)
            raise

    def _drop(self, key: Key, path: str, why: str) -> None:
        self.corrupted += 1
        if self.corrupted == 1:
            logger.warning("kv offload: %s is dropped: %s (more are only counted)", path, why)
        self._index.pop(key, None)
        with suppress(OSError):
            os.unlink(path)

    # All files

    def _scan(self) -> Iterator[Key]:
        """The keys that files of this engine are named by."""
        for path, name in _entries(self._folder):
            digest, _, group = name.partition("-")
            if not name.endswith(_UNFINISHED) and path.endswith(f"/{name[:2]}/{name}"):
                yield bytes.fromhex(digest), int(group)

    def _files(self) -> Iterator[_File]:
        """Of all engines; what is unfinished and abandoned is removed."""
        for engine in _names(self._root):
            for path, name in _entries(self._root / engine):
                try:
                    found = os.lstat(path)
                except OSError:
                    continue
                if not stat.S_ISREG(found.st_mode):
                    continue
                if name.endswith(_UNFINISHED) and time.time() - found.st_mtime > _ABANDONED:
                    with suppress(OSError):
                        os.unlink(path)
                    continue
                yield _File(found.st_mtime, found.st_size, path)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files, until a tenth of the budget is free."""
        files = sorted(self._files())
        self.used = sum(file.size for file in files)
        most = min(int(self.budget * _KEPT), self.budget - size)
        for file in files:
            if self.used <= most:
                break
            with suppress(OSError):
                os.unlink(file.path)
                self.used -= file.size
        self._index = dict.fromkeys(self._scan())


def _names(folder: Path | str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _entries(folder: Path) -> Iterator[tuple[str, str]]:
    """Path and name of whatever is named as our files are, in the folders of an engine's folder."""
    for shard in _names(folder):
        for name in _names(f"{folder}/{shard}"):
            if _OURS.fullmatch(name):
                yield f"{folder}/{shard}/{name}", name
