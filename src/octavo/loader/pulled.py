"""The models that `octavo pull` has put into the cache: listed, and removed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from octavo.loader.pull import KNOWN, PullError, cache_dir, cached, known, locked


class Pulled(NamedTuple):
    """A model in the cache. ``path`` is what is served of it, None where that is not whole."""

    name: str
    folder: Path
    path: Path | None
    size: int  # bytes on disk


def pulled() -> list[Pulled]:
    """All of the cache, by name."""
    models = cache_dir() / "models"
    if not models.is_dir():
        return []
    folders = (path for path in models.iterdir() if _is_model(path))
    return [_pulled(folder) for folder in sorted(folders)]


def find(name: str) -> Pulled:
    """The model in the cache that this names. Raises `PullError`."""
    here = pulled()
    other = known(name)
    for model in here:
        if model.name in (name, other and other.name):
            return model
    names = ", ".join(model.name for model in here)
    raise PullError(
        f"{name!r} is not a pulled model: {names or 'there are none'} (octavo list). A file that "
        "was not pulled is deleted with rm, and one of Hugging Face with hf cache"
    )


def remove(name: str) -> int:
    """Delete a pulled model and return the bytes that are free now. A pull of it that runs is
    waited for. Raises `PullError`.
    """
    model = find(name)
    with locked(model.folder.parent / f".{model.name}.lock", lambda: None):
        if model.folder.is_symlink():
            model.folder.unlink()  # the user's own folder stays
        else:
            shutil.rmtree(model.folder)
    return model.size


def _is_model(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")  # of locks and pulls that run


def _pulled(folder: Path) -> Pulled:
    name = folder.name
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return Pulled(
        name,
        folder,
        cached(name) if name in KNOWN else None,
        sum(path.stat().st_size for path in files),
    )
