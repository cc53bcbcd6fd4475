"""From a model argument to a running engine: what fits, and the arithmetic when it does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.checkpoint.base import Checkpoint
from octavo.engine.engine import Engine


class DoesNotFit(ValueError):
    """The settings ask for more than the machine has; the message carries the arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Names and meanings of vLLM's flags. None: derived from the model or the machine."""

    max_model_len: int | None = None  # tokens; None: the model's context, capped to what fits
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512  # a step's token budget
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None  # wins over memory_utilization
    memory_utilization: float = 0.5  # share of the memory available after the weights
    kv_cache_dtype: str = "f16"
    enable_prefix_caching: bool = True
    max_logprobs: int = 20
    threads: int | None = None
    seed: int | None = None
    isa: str | None = None  # force an instruction-set tier


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine ready to run, and what the start report says about it."""

    engine: Engine
    checkpoint: Checkpoint
    config: EngineConfig
    max_model_len: int
    num_blocks: int
    kv_cache_bytes: int
    weight_bytes: int
    capacity_tokens: int  # tokens of cache if every slot is filled
    capacity_sequences: float  # sequences of max_model_len tokens that fit at once

    def report(self) -> str:
        """The start report: one line a fact."""
        raise NotImplementedError


def load_engine(model: str | Path | Checkpoint, config: EngineConfig | None = None) -> LoadedEngine:
    """Checkpoint → Program → layout → number of blocks → NativeExecutor → Engine.

    Raises `CheckpointError`, or `DoesNotFit` before anything large is allocated.
    """
    raise NotImplementedError
