"""Executors by name: the one place that knows which there are."""

from __future__ import annotations

from importlib import import_module

from octavo.executor.base import Executor

# Imported when it is asked for: the compiled module is not needed to know the names.
EXECUTORS = {
    "native": "octavo.executor.native.executor:NativeExecutor",
    "reference": "octavo.executor.reference.reference:ReferenceExecutor",
    "simulated": "octavo.executor.simulated.simulated:SimulatedExecutor",
}


def executor_class(kind: str) -> type[Executor]:
    """Return the class of a kind of executor, which knows its capabilities before it is built."""
    module, _, name = EXECUTORS[kind].partition(":")
    found: type[Executor] = getattr(import_module(module), name)
    return found
