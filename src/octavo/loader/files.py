"""Opening files that somebody else wrote: regular ones only, and no larger than they may be."""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from octavo.loader.base import CheckpointError
from octavo.strict_json import once


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """A descriptor and the size in bytes. A pipe or a device is neither waited for nor read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        if isinstance(error, OSError) and error.errno == errno.ENXIO:  # a socket
            raise CheckpointError(f"{path}: is not a regular file") from None
        raise CheckpointError(f"{path}: cannot be opened: {_reason(error)}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is not a regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def map_file(path: Path, least: int, kind: str) -> mmap.mmap:
    """The file's bytes, read when they are used. ``least``: bytes of the smallest file of a kind.

    Raises `CheckpointError`.
    """
    with _opened(path) as (descriptor, size):
        if size < least:
            raise CheckpointError(
                f"{path}: has {size} bytes, fewer than a {kind} header's {least}: "
                f"not a {kind} file, or a truncated download"
            )
        try:
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be mapped: {_reason(error)}") from None


def read_file(path: Path, most: int) -> bytes:
    """The whole file, of at most ``most`` bytes. Raises `CheckpointError`."""
    with _opened(path) as (descriptor, size):
        if size > most:
            raise CheckpointError(f"{path}: has {size} bytes, more than {most}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            try:
                return file.read(size)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from None


def json_object(path: Path, data: bytes, what: str = "") -> dict[str, Any]:
    """A JSON object in which no key appears twice. Raises `CheckpointError` naming ``what``."""

    def no_number(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value = json.loads(data.decode(), object_pairs_hook=once, parse_constant=no_number)
    except RecursionError:
        raise CheckpointError(f"{path}: {what}is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {what}is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {what}is not a JSON object")
    return value


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
