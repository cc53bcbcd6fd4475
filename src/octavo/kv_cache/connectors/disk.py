"""The connector on disk: one file for each block, whose content is verified whenever it is read.

    FOLDER/octavo-kv-1/<16 hex: the engine>/<2 hex>/<64 hex: the block's hash>-<group>

A file has a header of 96 bytes and the block's bytes. The header has the format, engine and key,
the length, and a CRC-32 of the bytes; the reader builds the header that it expects and compares. A
file that is too short or too long, altered, of another engine, or not a regular file is removed and
counted, and its block is computed again. A file that cannot be read is a miss. It stays until the
block is written again, or until the process has memory and descriptors again.

Files are written under another name and renamed, so that a reader sees a whole file or none. They
are not synced: after a power failure the checksum detects damage. A name determines the content,
so several servers may share a folder. Each finds the files of the others
(kv_cache/connectors/disk_index.py), and a file that another server has evicted is a miss. The
budget holds for the folder, whichever engine wrote the files.

Files of another format or engine digest have other names or headers: they are never read, and are
evicted when they are the least recently used.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.kv_cache.block_hash import DIGEST_BYTES, Key
from octavo.kv_cache.connectors.base import Bytes, ConnectorStats, KvConnector
from octavo.kv_cache.connectors.disk_index import UNFINISHED, DiskIndex
from octavo.kv_cache.connectors.folders import check_folder, opened, unlink
from octavo.kv_cache.connectors.worker import ThreadWorker

logger = logging.getLogger(__name__)

FORMAT = "octavo-kv-1"
_HEADER = struct.Struct("<8s32s32sIQI8x")  # magic, engine, digest, group, length, CRC-32
HEADER_BYTES = _HEADER.size
_MAGIC = b"octavokv"
_PAUSE = 60.0  # seconds without writing after the disk has failed
_TEMPORARY = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))  # of reading
_ONE_FOLDER = frozenset(  # a folder is another user's, or something else is in its place
    (errno.EACCES, errno.EEXIST, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EPERM)
)


class Disk(KvConnector):
    """Blocks of ``block_bytes`` of one engine, as files. One thread may `read`, one `write`, and a
    third `lookup`, at the same time. Only the constructor raises (`OSError`), when the folder
    cannot be made or written to.
    """

    name = "disk"
    bandwidth = 200e6

    def __init__(
        self,
        folder: Path,
        engine: bytes,
        block_bytes: int,
        budget: int,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.budget = budget
        self.block_bytes = block_bytes
        self._engine = engine.ljust(DIGEST_BYTES, b"\0")[:DIGEST_BYTES]
        self._root = str(folder / FORMAT)
        self._folder = self._engine.hex()[:16]
        self._file_bytes = HEADER_BYTES + block_bytes
        self._now = now
        self._paused_until = -float("inf")
        self._warned = False  # about a folder that could not be written to
        self._reader = ThreadWorker("octavo-kv-read")
        self._writer = ThreadWorker("octavo-kv-write", patient=True)
        for own in (folder / FORMAT, folder / FORMAT / self._folder):
            if own.is_symlink():
                raise OSError(errno.ELOOP, f"{own.name} is a link, which is not followed")
            check_folder(own)
        self._keys: set[Key] = set()
        self._lock = threading.Lock()  # of a change of the keys and its event
        self._index = DiskIndex(self._root, budget, self._found, self._remove_path)

    @property
    def used(self) -> int:
        """Bytes of all engines' files, as far as this process knows."""
        return self._index.used

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter([*self._keys])

    def limit(self, budget: int) -> None:
        """Set the budget to so many bytes of files; none is written if it is less than a block."""
        self.budget = self._index.budget = budget

    # The interface of all connectors

    def lookup(self, key: Key) -> bool:
        return key in self._keys

    def start_load_kv(self, key: Key, into: Bytes) -> None:
        def job() -> None:
            ok, began = False, self._now()
            try:
                ok = self.read(key, into)
            finally:
                self._finish_load(key, ok, self._now() - began)

        self._reader.submit(job)

    def start_save_kv(self, key: Key, data: Bytes) -> None:
        def job() -> None:
            try:
                self.write(key, data)
            finally:
                self._saved.append(key)

        self._writer.submit(job)

    def flush(self) -> None:
        self._writer.hurry()

    def shutdown(self) -> None:
        self._reader.close(1.0)
        self._writer.close(1.0)

    def stats(self) -> ConnectorStats:
        return replace(
            self.counters,
            blocks=len(self),
            used_bytes=self.used,
            capacity_bytes=self.budget,
        )

    # In the threads

    def read(self, key: Key, into: Bytes) -> bool:
        """Fill ``into`` [block_bytes]. Return False if the block is not there or is damaged."""
        path = self._path(key)
        try:
            whole = self._read(key, path, into)
        except FileNotFoundError:  # evicted by another server, or by hand
            self._remove(key)
            self._index.gone(path)
            return False
        except OSError as error:
            self._count_unread(key, path, error)
            return False
        if not whole:
            self._remove(key)
            self._discard(path, "its content is not what was written")
            self._index.gone(path)
            return False
        self._index.use(path)
        self.counters.loaded_bytes += self.block_bytes
        return True

    def write(self, key: Key, data: Bytes) -> None:
        """Write a block [block_bytes], if nothing prevents it."""
        if key in self._keys or self._now() < self._paused_until:
            return
        size = self._file_bytes
        if size > self.budget or not self._index.make_room(size):
            return
        path = self._path(key)
        try:
            self._write(key, path, data)
        except OSError as error:
            self._count_unwritten(path, error)
            return
        self._index.add(path, size)
        self.counters.saved_bytes += self.block_bytes
        self._add(key)

    def _add(self, key: Key) -> None:
        with self._lock:
            if key not in self._keys:
                self._keys.add(key)
                self.events.stored(key, self.name)

    def _remove(self, key: Key) -> None:
        with self._lock:
            if key in self._keys:
                self._keys.remove(key)
                self.events.removed(key, self.name)

    # A file

    def _path(self, key: Key) -> str:
        """Return the path of a block's file, from the root on."""
        digest, group = key
        name = digest.hex()
        return f"{self._folder}/{name[:2]}/{name}-{group}"

    def _header(self, key: Key, data: Bytes) -> bytes:
        digest, group = key
        return _HEADER.pack(_MAGIC, self._engine, digest, group, len(data), zlib.crc32(data.data))

    def _read(self, key: Key, path: str, into: Bytes) -> bool:
        folder, name = os.path.split(path)
        with opened(self._root, folder) as where:
            # Only a regular file is opened: opening a pipe waits, opening a device may do anything.
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

    def _discard(self, path: str, why: str) -> bool:
        """Count a file and remove it; return whether it could be removed."""
        self.counters.corrupted_blocks += 1
        if self.counters.corrupted_blocks == 1:
            self._warn(path, f"{why}; it is dropped")
        folder, name = os.path.split(path)
        try:
            with opened(self._root, folder) as where:
                unlink(name, where)
        except OSError:
            return False
        return True

    def _count_unwritten(self, path: str, error: OSError) -> None:
        self.counters.failed_saves += 1
        if isinstance(error, IsADirectoryError):
            self._discard(path, "a folder in its place")
        elif error.errno not in _ONE_FOLDER:
            self._paused_until = self._now() + _PAUSE
            why = error.strerror or str(error)
            logger.warning("kv offload: %s; nothing is written for %g seconds", why, _PAUSE)
        elif not self._warned:  # other folders may be writable
            self._warned = True
            self._warn(path, f"cannot be written: {error.strerror or error}")

    def _count_unread(self, key: Key, path: str, error: OSError) -> None:
        self.counters.failed_loads += 1
        if self.counters.failed_loads == 1:
            self._warn(path, f"cannot be read: {error.strerror or error}")
        if error.errno not in _TEMPORARY:  # then it is written again once it has been computed
            self._remove(key)

    def _warn(self, path: str, why: str) -> None:
        logger.warning("kv offload: %s/%s: %s (more are only counted)", self._root, path, why)

    # Files that other servers have written or removed

    def _found(self, path: str, found: os.stat_result) -> int | None:
        """Enter a file. Return the bytes that it counts; None if it was damaged and is removed."""
        key = self._key(path)
        if key is not None and found.st_size == self._file_bytes:
            self._add(key)
            return found.st_size
        if key is not None and self._discard(path, "it is not as long as a block"):
            return None
        # A file of another engine, of any length. Holes in it take no space.
        return min(found.st_size, found.st_blocks * 512)

    def _remove_path(self, path: str) -> None:
        if (key := self._key(path)) is not None:
            self._remove(key)

    def _key(self, path: str) -> Key | None:
        """Return the key of a file of this engine; None for another engine's."""
        if not path.startswith(f"{self._folder}/"):
            return None
        digest, _, group = os.path.basename(path).partition("-")
        return bytes.fromhex(digest), int(group)


def _transfer(
    call: Callable[[int, list[Any]], int], file: int, *parts: bytes | bytearray | memoryview
) -> int:
    """Read or write all ``parts``, in as many calls as it takes. Return the number of bytes."""
    left = [memoryview(part) for part in parts]
    total = 0
    while left and (count := call(file, left)):
        total += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return total
