"""The folders of the tier on disk, entered one by one from its root on, so that no link in the
place of any is followed.
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
    """A descriptor of ROOT/``folder``, for calls relative to it. What is not there is made, for its
    owner only, if ``make``. Raises `OSError`; for a link, be it the root, `NotADirectoryError`.
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
    """Make it and what it lies in where that is not there, for the owner only. Raises `OSError`."""
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)


def check_folder(folder: Path) -> None:
    """Make it where it is not there, and try to write to it. Raises `OSError`."""
    make_folder(folder)
    with tempfile.TemporaryFile(dir=folder):
        pass


def unlink(name: str, where: int) -> None:
    """Whatever has that name in the folder ``where``, if it is no folder with something in it.
    Raises `OSError`.
    """
    try:
        os.unlink(name, dir_fd=where)
    except IsADirectoryError:
        os.rmdir(name, dir_fd=where)
