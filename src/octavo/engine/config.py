"""The settings of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from octavo.engine.offload import STAGING_BYTES
from octavo.executor.registry import EXECUTORS
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader.rounding import PLANNED, is_known
from octavo.models.config import ModelConfig
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.policies.config import PolicyConfig
from octavo.spec_decode.config import SpeculativeConfig


class SettingsError(ValueError):
    """Settings that contradict each other, or that this machine or build cannot honour."""


class DoesNotFit(SettingsError):
    """The settings ask for more than the machine has; the message carries the arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(PolicyConfig):
    """Names and meanings of vLLM's flags. None: derived from the model or the machine."""

    max_model_len: int | None = None  # tokens; None: the model's context, or what fits of it
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512  # a step's token budget
    itl_target: float | None = None  # ms that a step may take in which somebody decodes
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None  # wins over memory_utilization
    memory_utilization: float = 0.5  # share of the memory available beside the weights; of GPUs,
    # for plans, of all their memory
    # "auto" (bf16), "bf16", "fp16", "int8" or "int4"; of GPUs, for plans, "fp8".
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    max_logprobs: int = 20
    threads: int | None = None
    seed: int | None = None  # of requests that bring none; None: random
    isa: str | None = None  # force an instruction-set tier
    executor: str = "native"  # or, for developers, one of `octavo.executor.registry.EXECUTORS`
    # "int8" or "int4": round a float checkpoint while loading; for plans of GPUs also "fp8".
    quantization: str | None = None
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None  # None: no speculation
    kv_offload_memory: int | None = None  # bytes, for what the KV cache has no room for
    kv_offload_dir: str | None = None  # a folder for them, which outlives the process
    kv_offload_disk: int | None = None  # bytes of files in it; None: some of what is free

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, below 1")
        # The shortest sequence is a token of prompt and a new one.
        for name, least in (
            ("max_model_len", 2),
            ("kv_cache_memory_bytes", 1),
            ("threads", 1),
            ("kv_offload_memory", 1),
            ("kv_offload_disk", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, below {least}")
        if self.max_logprobs < 0:
            raise ValueError(f"max_logprobs is {self.max_logprobs}, below 0")
        if self.itl_target is not None and not 0 < self.itl_target < inf:
            raise ValueError(f"itl_target is {self.itl_target} ms, not above 0")
        if self.block_size % 16:
            raise ValueError(f"block_size is {self.block_size}, not a multiple of 16")
        if not 0 < self.memory_utilization <= 1:
            raise ValueError(f"memory_utilization is {self.memory_utilization}, outside 0 to 1")
        KvDtype.of(self.kv_cache_dtype)  # refuses
        if self.executor not in EXECUTORS:
            raise ValueError(f"executor {self.executor!r} is none of {', '.join(EXECUTORS)}")
        if self.kv_offload_disk is not None and self.kv_offload_dir is None:
            raise ValueError("kv_offload_disk is a budget of kv_offload_dir, which is not given")
        if self.kv_offload_bytes and not self.enable_prefix_caching:
            raise ValueError(
                "kv_offload_memory and kv_offload_dir are tiers of the prefix cache, which "
                "enable_prefix_caching turns off"
            )
        PolicyConfig.__post_init__(self)
        if self.quantization not in (None, *PLANNED) and not is_known(self.quantization):
            raise ValueError(
                f"quantization {self.quantization!r} is not supported; int8 and int4 round a float "
                "checkpoint, and a quantized one is recognised by itself"
            )
        if self.speculative_config is not None:
            speculation = SpeculativeConfig.of(self.speculative_config)
            object.__setattr__(self, "speculative_config", speculation)
            if self.max_num_batched_tokens < 2:
                raise ValueError(
                    "speculation needs max_num_batched_tokens of 2 or more, a token and a draft; "
                    f"it is {self.max_num_batched_tokens}"
                )

    @property
    def kv_offload_bytes(self) -> int:
        """Bytes of host memory for the KV cache; the disk is read through some of it."""
        if self.kv_offload_memory is None:
            return STAGING_BYTES if self.kv_offload_dir is not None else 0
        return self.kv_offload_memory

    @property
    def policy(self) -> PolicyConfig:
        names = [each.name for each in fields(PolicyConfig)]
        return PolicyConfig(**{name: getattr(self, name) for name in names})

    @property
    def speculation(self) -> SpeculativeConfig | None:
        given = self.speculative_config
        return None if given is None else SpeculativeConfig.of(given)

    def max_logits_rows(self, longest: int | None = None) -> int:
        """Return the most rows of logits in a step: one for each sequence, and drafts as they fit.

        ``longest``: tokens of a draft, where the drafter gives fewer than the settings allow.
        """
        speculation = self.speculation
        if speculation is None:
            return self.max_num_seqs
        paths = self.max_num_seqs + speculation.max_branches
        return min(self.max_num_batched_tokens, paths * (1 + (longest or speculation.longest)))

    def limits(
        self, max_model_len: int, longest: int | None = None, **simulated: Any
    ) -> SchedulerConfig:
        """Return the scheduler's limits. ``longest``: as for `max_logits_rows`. ``simulated``: the
        older ways to serve.
        """
        shared = {
            name: getattr(self, name)
            for name in (
                *("max_num_seqs", "max_num_batched_tokens", "max_branches", "policy"),
                *("enable_prefix_caching", "max_num_queued_reqs", "max_num_queued_tokens"),
            )
        }
        target = None if self.itl_target is None else self.itl_target / 1000
        rows = self.max_logits_rows(longest)
        own = {"max_model_len": max_model_len, "max_logits_rows": rows, "itl_target": target}
        return SchedulerConfig(**shared | own | simulated)

    @property
    def max_branches(self) -> int:
        """Most alternatives that a step checks beside the drafts."""
        return 0 if self.speculation is None else self.speculation.max_branches

    def layout_of(self, model: ModelConfig) -> KvLayout:
        return KvLayout.of(model, self.block_size, KvDtype.of(self.kv_cache_dtype))
