"""GGUF models in several files, as llama.cpp's gguf-split writes them.

The names end in ``-00001-of-00003.gguf`` and so on. Every file says which it is (``split.no``, from
0), of how many (``split.count``) and how many tensors all have together (``split.tensors.count``).
The model's metadata is in the first, and each file has tensors of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

from octavo.loader.gguf import GgufFile

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_SHOWN = 3  # missing files that are named


def shard_names(name: str) -> list[str]:
    """The names of all files of the model to which a file of this name belongs, in order."""
    stem, count = _shards(name)
    return [_shard(stem, number, count) for number in range(1, count + 1)] or [name]


def first_shard(name: str) -> str:
    """The first of `shard_names`, of which there may be 99,999."""
    stem, count = _shards(name)
    return _shard(stem, 1, count) if count else name


def _shards(name: str) -> tuple[str, int]:
    """What the files' names begin with, and how many they are: none, if it is not split."""
    match = _NAME.fullmatch(name)
    count = int(match["count"]) if match else 0
    if match is None or not 1 <= int(match["number"]) <= count:
        return name, 0
    return match["stem"], count


def _shard(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def open_gguf(path: Path) -> GgufFile:
    """The model that a file is, or is a part of: its first file, with the tensors of all.

    Raises `CheckpointError` naming the file that is wrong, missing or not of this model.
    """
    file = GgufFile(path)
    count = file.get("split.count", int, 1)
    if count <= 1:
        return file
    number = file.get("split.no", int)
    names = shard_names(path.name)
    if len(names) != count or not 0 <= number < count or names[number] != path.name:
        file.fail(
            f"says it is file {number + 1} of {count} of a split model, but is not named so "
            f"(…-{number + 1:05}-of-{count:05}.gguf)"
        )
    missing = [name for name in names if not path.with_name(name).exists()]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        file.fail(
            f"is one of {count} files of a split model; missing beside it: "
            f"{', '.join(missing[:_SHOWN])}{more}"
        )
    files = [file if name == path.name else GgufFile(path.with_name(name)) for name in names]
    first, *others = files
    for index, other in enumerate(files):
        _check(other, index, first)
    for other in others:
        first.adopt(other)
    total = first.get("split.tensors.count", int)
    if len(first.tensors) != total:
        first.fail(
            f"declares {total} tensors in its {count} files, which have {len(first.tensors)}"
        )
    return first


def _check(file: GgufFile, index: int, first: GgufFile) -> None:
    """That a file is the one its name says, and of the model that the first file begins."""
    if (number := file.get("split.no", int)) != index:
        file.fail(
            f"says it is file {number + 1} of a split model, but is named as file {index + 1}"
        )
    for key in ("split.count", "split.tensors.count"):
        if (value := file.get(key, int)) != (expected := first.get(key, int)):
            file.fail(f"has {key} {value}; {first.path.name} has {expected}")
    key = "general.architecture"  # need not be repeated
    if file.get(key, str, None) not in (None, first.get(key, str, None)):
        file.fail(f"has {key} {file.get(key, str)!r}, other than {first.path.name}")
