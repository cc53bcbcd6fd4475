"""The tier of the prefix cache on disk: a file a block, trusted only when it proves itself.

    FOLDER/octavo-kv-1/<16 hex: the engine>/<2 hex>/<64 hex: the block's digest>-<group>

A file is a header of 96 bytes and the block's bytes. The header says what the reader expects: the
format, engine and key, the length, and a CRC-32 of the bytes; who reads makes the header that ought
to be there and compares. What is too short or too long, altered, somebody else's or no file at all
is removed and counted, and its block is computed again. What could not be read is a miss, and
stays: until its block has been written anew, or while there is no memory or no descriptor left.

Files are written under another name and renamed, so that a reader sees a whole one or none; they
are not synced, for after a power failure the checksum tells. Names are contents: several servers
may share a folder, each finding what the others have written (kv_cache/ledger.py), and a file that
another has evicted is a miss. The budget is the folder's, whichever engine wrote the files.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from octavo.kv_cache.arena import Bytes
from octavo.kv_cache.digest import DIGEST_BYTES, Key
from octavo.kv_cache.folders import check_folder, opened, unlink
from octavo.kv_cache.ledger import UNFINISHED, Ledger

logger = logging.getLogger(__name__)

FORMAT = "octavo-kv-1"
_HEADER = struct.Struct("<8s32s32sIQI8x")  # magic, engine, digest, group, length, CRC-32
HEADER_BYTES = _HEADER.size
_MAGIC = b"octavokv"
_PAUSE = 60.0  # seconds without writing after the disk has failed
_FOR_NOW = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))  # cannot be read
_STRANGE = frozenset(  # something else is in a folder's place, or it is somebody else's
    (errno.EACCES, errno.EEXIST, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EPERM)
)


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
        self.failed_reads = 0  # of which nobody knows what the file is
        self.failed_writes = 0
        self._engine = engine.ljust(DIGEST_BYTES, b"\0")[:DIGEST_BYTES]
        self._root = str(folder / FORMAT)
        self._folder = self._engine.hex()[:16]
        self._file_bytes = HEADER_BYTES + block_bytes
        self._now = now
        self._paused_until = -float("inf")
        self._strange = False  # a folder was seen that could not be written to
        for own in (folder / FORMAT, folder / FORMAT / self._folder):
            if own.is_symlink():
                raise OSError(errno.ELOOP, f"{own.name} is a link, which is not followed")
            check_folder(own)
        self._index: dict[Key, None] = {}
        self._ledger = Ledger(self._root, budget, self._found, self._lost)

    @property
    def used(self) -> int:
        """Bytes of all engines' files, as far as is known here."""
        return self._ledger.used

    def __len__(self) -> int:
        return len(self._index)

    def limit(self, budget: int) -> None:
        """To so many bytes of files; less than a block: none are written."""
        self.budget = self._ledger.budget = budget

    def holds(self, key: Key) -> bool:
        return key in self._index

    def read(self, key: Key, into: Bytes) -> bool:
        """Fill ``into`` [block_bytes]; False if the block is not, or not rightly, there."""
        path = self._path(key)
        try:
            whole = self._read(key, path, into)
        except FileNotFoundError:  # evicted by another server, or by hand
            self._index.pop(key, None)
            self._ledger.gone(path)
            return False
        except OSError as error:
            self._count_unread(key, path, error)
            return False
        if not whole:
            self._drop(key, path, "its content is not what was written")
            return False
        self._ledger.use(path)
        self.bytes_read += self.block_bytes
        return True

    def write(self, key: Key, data: Bytes) -> None:
        """Keep a block [block_bytes], if nothing prevents it."""
        if key in self._index or self._now() < self._paused_until:
            return
        size = self._file_bytes
        if size > self.budget or not self._ledger.make_room(size):
            return
        path = self._path(key)
        try:
            self._write(key, path, data)
        except OSError as error:
            self._count_unwritten(path, error)
            return
        self._ledger.add(path, size)
        self.bytes_written += self.block_bytes
        self._index[key] = None

    # A file

    def _path(self, key: Key) -> str:
        """Of a block's file, from the root on."""
        digest, group = key
        name = digest.hex()
        return f"{self._folder}/{name[:2]}/{name}-{group}"

    def _header(self, key: Key, data: Bytes) -> bytes:
        digest, group = key
        return _HEADER.pack(_MAGIC, self._engine, digest, group, len(data), zlib.crc32(data.data))

    def _read(self, key: Key, path: str, into: Bytes) -> bool:
        folder, name = os.path.split(path)
        with opened(self._root, folder) as where:
            # What is no file is not opened: that may wait, or do whatever a device does.
            found = os.stat(name, dir_fd=where, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode) or found.st_size != self._file_bytes:
                return False
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(name, flags, dir_fd=where)
        try:
            header = bytearray(HEADER_BYTES)
            if _transfer(os.readv, file, header, into.data) != self._file_bytes:
                return False
            return bytes(header) == self._header(key, into)
        finally:
            os.close(file)

    def _write(self, key: Key, path: str, data: Bytes) -> None:
        folder, name = os.path.split(path)
        unfinished = f"{name}.{secrets.token_hex(8)}{UNFINISHED}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with opened(self._root, folder, make=True) as where:
            file = os.open(unfinished, flags, 0o600, dir_fd=where)
            try:
                try:
                    written = _transfer(os.writev, file, self._header(key, data), data.data)
                    if written != self._file_bytes:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                finally:
                    os.close(file)
                os.rename(unfinished, name, src_dir_fd=where, dst_dir_fd=where)
            except OSError:
                with suppress(OSError):
                    os.unlink(unfinished, dir_fd=where)
                raise

    def _drop(self, key: Key, path: str, why: str) -> None:
        self._index.pop(key, None)
        self._discard(path, why)
        self._ledger.gone(path)

    def _discard(self, path: str, why: str) -> bool:
        self.corrupted += 1
        if self.corrupted == 1:
            self._warn(path, f"{why}; it is dropped")
        folder, name = os.path.split(path)
        try:
            with opened(self._root, folder) as where:
                unlink(name, where)
        except OSError:
            return False
        return True

    def _count_unwritten(self, path: str, error: OSError) -> None:
        self.failed_writes += 1
        if isinstance(error, IsADirectoryError):
            self._discard(path, "a folder in its place")
        elif error.errno not in _STRANGE:
            self._paused_until = self._now() + _PAUSE
            why = error.strerror or str(error)
            logger.warning("kv offload: %s; nothing is written for %g seconds", why, _PAUSE)
        elif not self._strange:  # other folders may be as good as ever
            self._strange = True
            self._warn(path, f"cannot be written: {error.strerror or error}")

    def _count_unread(self, key: Key, path: str, error: OSError) -> None:
        self.failed_reads += 1
        if self.failed_reads == 1:
            self._warn(path, f"cannot be read: {error.strerror or error}")
        if error.errno not in _FOR_NOW:  # when it has been computed again it is written anew
            self._index.pop(key, None)

    def _warn(self, path: str, why: str) -> None:
        logger.warning("kv offload: %s/%s: %s (more are only counted)", self._root, path, why)

    # Files of others

    def _found(self, path: str, found: os.stat_result) -> int | None:
        """How many bytes a file counts; None if it is no block of ours, and was removed."""
        key = self._key(path)
        if key is not None and found.st_size == self._file_bytes:
            self._index[key] = None
            return found.st_size
        if key is not None and self._discard(path, "it is not as long as a block"):
            return None
        # Another engine's, of whatever length. What it takes, for a hole takes nothing.
        return min(found.st_size, found.st_blocks * 512)

    def _lost(self, path: str) -> None:
        if (key := self._key(path)) is not None:
            self._index.pop(key, None)

    def _key(self, path: str) -> Key | None:
        """Of a file of this engine."""
        if not path.startswith(f"{self._folder}/"):
            return None
        digest, _, group = os.path.basename(path).partition("-")
        return bytes.fromhex(digest), int(group)


def _transfer(
    call: Callable[[int, list[Any]], int], file: int, *parts: bytes | bytearray | memoryview
) -> int:
    """Read or write all ``parts``, in as many calls as it takes; how many bytes it were."""
    left = [memoryview(part) for part in parts]
    total = 0
    while left and (count := call(file, left)):
        total += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return total
