"""Old names of packages, which still import, with a warning.

`octavo.plan.memory` is now `octavo.tools.plan.memory`; scripts of users may have the old name.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

RENAMED = {
    "bench": "tools.bench",
    "checkpoint": "loader",
    "execute": "executor",
    "kv": "kv_cache",
    "model": "models",
    "plan": "tools.plan",
    "quant": "tools.quantize",
    "sample": "sampling",
    "schedule": "scheduler",
    "serve": "server",
    "speculate": "spec_decode",
    "top": "tools.top",
    "train": "tools.train",
    "verify": "tools.verify",
    "workload": "tools.workload",
}


class _Alias(Loader):
    """A module of the old name that has the attributes of the new one."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def exec_module(self, module: ModuleType) -> None:
        warnings.warn(f"{self._old} is now {self._new}", DeprecationWarning, stacklevel=2)
        real = import_module(self._new)
        module.__getattr__ = real.__getattribute__  # type: ignore[method-assign]
        module.__path__ = []


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        octavo, _, name = fullname.partition(".")
        package, dot, rest = name.partition(".")
        if octavo != "octavo" or package not in RENAMED:
            return None
        new = f"octavo.{RENAMED[package]}{dot}{rest}"
        return ModuleSpec(fullname, _Alias(fullname, new))


def install() -> None:
    """Make the old names importable."""
    sys.meta_path.insert(0, _Finder())
