"""Tiny models of every family and format, made from the files of tests/oracle."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np

T = TypeVar("T")

TESTS = Path(__file__).resolve().parents[2] / "tests"
ORACLE = TESTS / "oracle"
REAL = ("smollm2", "gemma3-270m")

if str(TESTS) not in sys.path:  # so that the makers of tiny models can be imported
    sys.path.append(str(TESTS))


def files() -> list[Path]:
    """Return the tiny GGUF files."""
    return sorted(ORACLE.glob("tiny-*.gguf"))


def families() -> list[str]:
    return sorted(path.name for path in (ORACLE / "families").iterdir())


def quantized() -> list[str]:
    return sorted(path.name for path in (ORACLE / "quantized").iterdir())


def converted() -> list[tuple[str, str]]:
    """Return family and label of each GGUF file that llama.cpp's converter made."""
    found = []
    for path in sorted((ORACLE / "families").glob("*/gguf.npz")):
        with np.load(path) as data:
            found += [(path.parent.name, label) for label in json.loads(str(data["meta"]))]
    return found


def texts() -> list[str]:
    """Return the texts of the oracle, each of some thousand characters."""
    return [path.read_text("utf-8") for path in sorted((ORACLE / "texts").glob("*.txt"))]


def first(cases: Iterable[T], share: float) -> list[T]:
    """Return the first of the cases, at least one."""
    every = list(cases)
    return every[: max(1, round(len(every) * share))]


def without_paths(text: str, folder: Path | None = None) -> str:
    """Return ``text`` with "…" for ``folder``, the oracle's and folders of the package itself."""
    text = text.replace(str(ORACLE), "…").replace(str(folder or ORACLE), "…")
    return re.sub(r"[^\s'\"]*/src/octavo(/[\w-]+)*/(?=[\w.-]+)", "…/", text)


def make(name: str, folder: Path) -> str:
    """Return the path or name of a model. What has to be made is made in ``folder`` once.

    A name is one of `REAL`, a file of tests/oracle, or KIND:FAMILY[:LABEL] with kind "folder",
    "bf16", "gguf", "quantized" or "talking" (which has a chat template).
    """
    if name in REAL:
        return name
    kind, _, rest = name.partition(":")
    if not rest and kind != "talking":
        return str(ORACLE / name)
    from oracle import tiny_folders

    path = folder / name.replace(":", "-")
    if kind == "gguf":
        path = path.with_name(path.name + ".gguf")
    if path.exists():
        return str(path)
    if kind == "talking":
        return str(tiny_folders.talking_folder(path))
    if kind == "quantized":
        return str(tiny_folders.quantized_folder(rest, path))
    if kind == "gguf":
        family, _, label = rest.partition(":")
        return str(tiny_folders.gguf_file(family, label, path))
    return str(tiny_folders.folder(rest, path, bf16=kind == "bf16"))
