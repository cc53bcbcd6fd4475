"""Public names of the package, their parameters, and imports that the documentation shows."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

# Imports that README.md and docs/ have shown: name and its home, the first of which ever shown.
_SHOWN = (
    *(("octavo", "LLM"), ("octavo", "SamplingParams")),
    *(("octavo.plan.memory", "kv_cache_bytes"), ("octavo.plan.memory", "kv_cache_steps")),
    *(("octavo.plan.batching", name) for name in ("Limits", "LinearStep", "Load", "batching")),
    *(("octavo.plan.lengths", "parse"), ("octavo.speculate.drafter", "Draft")),
)


def record(folder: Path, share: float) -> dict[str, Any]:
    import octavo

    found: dict[str, Any] = {"all": sorted(octavo.__all__), "version": octavo.__version__}
    found["signatures"] = {
        name: _signatures(getattr(octavo, name), methods=name in ("LLM", "AsyncEngine"))
        for name in octavo.__all__
    }
    wording = {}
    found["imports"] = {}
    for module, name in _SHOWN:
        line = f"from {module} import {name}"
        done = subprocess.run(
            [sys.executable, "-W", "always", "-c", line], capture_output=True, text=True
        )
        found["imports"][line] = "fails" if done.returncode else "works"
        if done.returncode == 0 and done.stderr:
            wording[line] = done.stderr.splitlines()[0].partition(": ")[2]
    modules = ("octavo", "octavo.cli", "octavo.llm")
    found["modules"] = {name: importlib.import_module(name).__name__ for name in modules}
    return found | {"wording": wording}


def _signatures(of: Any, *, methods: bool) -> dict[str, str]:
    """Return parameters with kinds and defaults, without annotations, of ``of`` and its methods."""
    found = {"()": _signature(of)}
    if not methods:
        return found
    for name, member in sorted(vars(of).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        found[name] = _signature(member) if inspect.isfunction(member) else "attribute"
    return found


def _signature(of: Any) -> str:
    parameters = inspect.signature(of).parameters.values()
    return str(
        inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])
    )
