"""What an engine is set to on a device where nobody says otherwise."""

from __future__ import annotations

from typing import NamedTuple


class Defaults(NamedTuple):
    """Of `EngineConfig`, those that differ by device."""

    memory_utilization: float  # of what weights and work space leave free, for the cache
    max_num_batched_tokens: int  # of a step


# EngineConfig's are for a machine whose cores and memory do other things, too. A GPU is the
# engine's alone, and its steps are short enough for more tokens.
GPU = Defaults(0.9, 2048)


def engine_defaults(measured: bool) -> Defaults:
    """Of this machine, which is ``measured``, or of another device."""
    from octavo.engine.config import EngineConfig

    usual = EngineConfig()
    machine = Defaults(usual.memory_utilization, usual.max_num_batched_tokens)
    return machine if measured else GPU
