"""What an engine is set to on a device where nobody says otherwise."""

from __future__ import annotations

from typing import NamedTuple


class Defaults(NamedTuple):
    """The defaults of `EngineConfig` that differ by device."""

    # On a GPU of all its memory, for all that a server holds (vLLM's gpu_memory_utilization);
    # else for the cache, of what weights and work space leave free.
    memory_utilization: float
    max_num_batched_tokens: int  # of a step


# EngineConfig's are for a machine whose cores and memory do other things, too. A GPU is the
# engine's alone, and its steps are short enough for more tokens; its share is vLLM's.
GPU = Defaults(0.92, 2048)
OTHER = Defaults(0.9, 2048)  # of a CPU that is known by figures


def engine_defaults(measured: bool, gpu: bool = False) -> Defaults:
    """Return those of this machine, which is ``measured``, or of another device."""
    from octavo.engine.config import EngineConfig

    if not measured:
        return GPU if gpu else OTHER
    usual = EngineConfig()
    return Defaults(usual.memory_utilization, usual.max_num_batched_tokens)
