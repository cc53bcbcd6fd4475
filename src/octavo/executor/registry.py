"""Executors by name: the one place that knows which there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Protocol, Unpack

from octavo.executor.base import Capabilities, Executor, LoadOptions
from octavo.kv_cache.layout import KvLayout
from octavo.loader.base import Checkpoint, Weight
from octavo.models.program import Program

# Imported when it is asked for: the compiled module is not needed to know the names.
EXECUTORS = {
    "native": "octavo.executor.native.executor:NativeExecutor",
    "reference": "octavo.executor.reference.reference:ReferenceExecutor",
    "simulated": "octavo.executor.simulated.simulated:SimulatedExecutor",
}


class ExecutorKind(Protocol):
    """A class of executors."""

    capabilities: Capabilities

    def load(
        self,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
        **options: Unpack[LoadOptions],
    ) -> Executor:
        """Return an executor of a model, in memory.

        Raises `CheckpointError` for weights that do not fit the program and `ValueError` for
        settings that cannot be honoured.
        """
        ...

    def held_bytes(
        self, weights: Iterable[Weight], program: Program, source: str, isa: str | None
    ) -> int:
        """Return the bytes that its own copy of the weights will take.

        Raises `CheckpointError`, naming ``source``, for a weight that it cannot take.
        """
        ...


def _class_of(kind: str) -> ExecutorKind:
    module, _, name = EXECUTORS[kind].partition(":")
    found: ExecutorKind = getattr(import_module(module), name)
    return found


def capabilities(kind: str) -> Capabilities:
    """Return what an executor can do, before it is built."""
    return _class_of(kind).capabilities


def weight_bytes(
    kind: str, weights: Mapping[str, Weight], program: Program, source: str, isa: str | None = None
) -> int:
    """Return the bytes that an executor's own copy of the weights will take. Raises as
    `ExecutorKind.held_bytes`.
    """
    return _class_of(kind).held_bytes(weights.values(), program, source, isa)


def build_executor(
    kind: str,
    checkpoint: Checkpoint,
    program: Program,
    layout: KvLayout,
    **options: Unpack[LoadOptions],
) -> Executor:
    """Return an executor of a model, in memory. Raises as `ExecutorKind.load`."""
    return _class_of(kind).load(checkpoint, program, layout, **options)
