"""Executors by name: the one place that knows which there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from octavo.executor.base import Capabilities, Executor, ExecutorSizes
from octavo.executor.cost import Rates
from octavo.kv_cache.layout import KvLayout
from octavo.loader.base import Checkpoint, Weight
from octavo.machine.cpu import usable_cpus
from octavo.models.program import Program

# The modules are imported when they are needed: the compiled one is not, to name types.
EXECUTORS = ("native", "reference", "simulated")


def capabilities(kind: str) -> Capabilities:
    """Return what an executor can do, before it is built. Raises `ValueError` for an unknown
    one.
    """
    match kind:
        case "native":
            from octavo.executor.native.executor import NativeExecutor

            return NativeExecutor.capabilities
        case "reference":
            from octavo.executor.reference.reference import ReferenceExecutor

            return ReferenceExecutor.capabilities
        case "simulated":
            from octavo.executor.simulated.simulated import SimulatedExecutor

            return SimulatedExecutor.capabilities
    raise ValueError(f"executor {kind!r} is none of {', '.join(EXECUTORS)}")


def weight_bytes(
    kind: str, weights: Mapping[str, Weight], program: Program, source: str, isa: str | None = None
) -> int:
    """Return the bytes that an executor's own copy of the weights will take.

    Raises `CheckpointError`, naming ``source``, for a weight that it cannot take.
    """
    match kind:
        case "native":
            from octavo.executor.native.packing import all_held_bytes

            return all_held_bytes(weights.values(), program, source, isa)
        case "reference":
            from octavo.executor.reference.reference import fp32_bytes

            return fp32_bytes(weights.values())
    return 0


def build_executor(
    kind: str,
    checkpoint: Checkpoint,
    program: Program,
    layout: KvLayout,
    *,
    threads: int | None = None,
    isa: str | None = None,
    keep_hidden: bool = False,
    digest: bool = False,
    rates: Rates | None = None,
    **sizes: Unpack[ExecutorSizes],
) -> Executor:
    """Return an executor of a model, in memory. Arguments as those of `NativeExecutor`; ``rates``
    are the speed of a simulated machine (None: infinitely fast).

    Raises `CheckpointError` for weights that do not fit the program and `ValueError` for settings
    that cannot be honoured.
    """
    match kind:
        case "native":
            from octavo.executor.native.executor import NativeExecutor

            return NativeExecutor(
                checkpoint,
                program,
                layout,
                threads=threads,
                isa=isa,
                keep_hidden=keep_hidden,
                digest=digest,
                **sizes,
            )
        case "reference":
            from octavo.executor.reference.reference import ReferenceExecutor

            return ReferenceExecutor(
                checkpoint, program, layout, keep_hidden=keep_hidden, digest=digest, **sizes
            )
        case "simulated":
            from octavo.executor.native.packing import cost_model, held_bytes, tier_name
            from octavo.executor.simulated.simulated import SimulatedExecutor

            weights = {role: checkpoint.weights[role] for role in program.weights}
            held = {role: (each.format, held_bytes(each, isa)) for role, each in weights.items()}
            return SimulatedExecutor(
                program,
                layout,
                num_blocks=sizes["num_blocks"],
                rates=rates,
                max_tokens=sizes["max_tokens"],
                max_logits_rows=sizes["max_logits_rows"],
                threads=threads or usable_cpus()[0],
                sleeps=True,
                costs=cost_model(program, layout, held, tier_name(isa)),
            )
    capabilities(kind)  # refuses
    raise AssertionError(kind)
