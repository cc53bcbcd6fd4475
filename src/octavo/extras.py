"""Optional packages, and the command that brings them to the Python that lacks them."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires


def install_command(extra: str) -> str:
    """What installs the packages of an ``extra`` beside this Octavo.

    The packages are named, not the extra: a clone knows that as ``.[train]`` and nothing else does,
    and no package index has Octavo.
    """
    try:
        lines = requires("octavo") or []
    except PackageNotFoundError:  # src/ on the path, nothing installed
        lines = []
    parts = [line.partition(";") for line in lines]
    packages = [
        name.strip() for name, _, marker in parts if marker.strip() == f'extra == "{extra}"'
    ]
    words = [sys.executable, "-m", "pip", "install", *(packages or [f".[{extra}]"])]
    return shlex.join(words)
