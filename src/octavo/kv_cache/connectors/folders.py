"""The folders of the disk connector, opened one by one from its root on, so that a link in the
place of a folder is not followed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def opened(root: str, folder: str = "", *, make: bool = False) -> Iterator[int]:
    """Open ROOT/``folder`` and yield its descriptor, for calls relative to it. If ``make``, make
    folders that are missing, for their owner only. Raise `OSError`; for a link, the root included,
    `NotADirectoryError`.
    """
    where = _enter(root, None, make)
    try:
        for name in filter(None, folder.split("/")):
            above, where = where, _enter(name, where, make)
            os.close(above)
        yield where
    finally:
        os.close(where)


def _enter(name: str, within: int | None, make: bool) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=within)
    except FileNotFoundError:
        if not make:
            raise
    if within is None:
        make_folder(Path(name).parent)
    with suppress(FileExistsError):  # another was quicker
        os.mkdir(name, 0o700, dir_fd=within)
    return os.open(name, _FOLDER, dir_fd=within)


def make_folder(folder: Path) -> None:
    """Make the folder and its parents if they are missing, for the owner only. Raise `OSError`."""
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)


def check_folder(folder: Path) -> None:
    """Make the folder if it is missing, and try to write to it. Raise `OSError`."""
    make_folder(folder)
    with tempfile.TemporaryFile(dir=folder):
        pass


def unlink(name: str, where: int) -> None:
    """Remove the entry ``name`` of the folder ``where``, unless it is a folder that is not empty.
    Raise `OSError`.
    """
    try:
        os.unlink(name, dir_fd=where)
    except IsADirectoryError:
        os.rmdir(name, dir_fd=where)
