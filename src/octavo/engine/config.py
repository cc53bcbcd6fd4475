"""The settings of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from octavo.scheduler.config import SchedulerConfig, SchedulerSettings
from octavo.scheduler.policies.config import PolicyConfig
from octavo.settings import setting

if TYPE_CHECKING:  # the command line reads the fields, and imports nothing heavy for them
    from octavo.kv_cache.layout import KvLayout
    from octavo.models.config import ModelConfig
    from octavo.spec_decode.config import SpeculativeConfig

_STAGING_BYTES = 256 << 20  # host memory that a disk is read into, unless a size is given
_STATE_LOG_BYTES = 64 << 20  # of the drafts of one step, unless one draft has more


class SettingsError(ValueError):
    """Settings that contradict each other, or that this machine or build cannot honour."""


class DoesNotFit(SettingsError):
    """The settings ask for more than the machine has; the message carries the arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SchedulerSettings):
    """Names and meanings of vLLM's flags. None: derived from the model or the machine."""

    # fmt: off
    block_size: int = setting(16, "Tokens in a KV cache block, a multiple of 16.", least=1, min=16)
    kv_cache_memory_bytes: int | None = setting(  # wins over memory_utilization
        None, "Memory for the KV cache: 512MiB, 4GiB.", least=1,
        flags=("--kv-cache-memory-bytes", "--kv-cache-memory"), parse="amount", metavar="SIZE",
        show_default="a share of what is free")
    # A plan for GPUs takes it as a share of all their memory.
    memory_utilization: float = setting(0.5,
        "Share for the KV cache of the memory that the weights leave free, 0 to 1.", above=0,
        most=1, flags=("--memory-utilization", "--gpu-memory-utilization"))
    # A plan for GPUs also takes "fp8".
    kv_cache_dtype: str = setting("auto",
        "Numbers in the KV cache: auto (bf16), bf16, fp16, int8 (1.9 × as many), int4 (3.5 ×).")
    max_logprobs: int = setting(20, "Most alternatives a request may ask for.", least=0)
    threads: int | None = setting(None, "Compute threads.", least=1, min=1,
        show_default="one per core this process may use")
    seed: int | None = setting(None, "Seed of requests that bring none.", show_default="random")
    isa: str | None = setting(None,
        "Force an instruction-set tier: generic, avx2, avx512, avx512_bf16.",
        parse="instruction_set", metavar="NAME", envvar="OCTAVO_ISA", show_default="the best here")
    executor: str = setting("native", "For developers: native, reference or simulated.",
        hidden=True)
    # A plan for GPUs also takes "fp8".
    quantization: str | None = setting(None,
        "Round a float checkpoint to 8 or 4 bits while loading: int8 or int4.",
        flags=("--quantization", "-q"), show_default="as stored")
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = setting(None,
        'Guess tokens ahead, as JSON: {"method": "suffix"} or "ngram"; the output is the same.',
        parse="json_object", metavar="JSON", show_default="none")
    kv_offload_memory: int | None = setting(None,
        "Host memory for blocks of the prefix cache that the KV cache has no room for: 4GiB.",
        least=1, parse="amount", metavar="SIZE", show_default="none")
    kv_offload_dir: str | None = setting(None,
        "Folder for them, too: a prefix cache that outlives the server.", metavar="DIR",
        show_default="none")
    kv_offload_disk: int | None = setting(None, "Most bytes of files in --kv-offload-dir.", least=1,
        parse="amount", metavar="SIZE", show_default="16GiB, or half of what is free and its own")
    # fmt: on

    def __post_init__(self) -> None:
        from octavo.executor.registry import EXECUTORS
        from octavo.kv_cache.layout import KvDtype
        from octavo.loader.rounding import PLANNED, is_known
        from octavo.spec_decode.config import SpeculativeConfig

        PolicyConfig.__post_init__(self)  # and all bounds
        if self.block_size % 16:
            raise ValueError(f"block_size is {self.block_size}, not a multiple of 16")
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
            return _STAGING_BYTES if self.kv_offload_dir is not None else 0
        return self.kv_offload_memory

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, as `__post_init__` has read it."""
        return self.speculative_config  # type: ignore[return-value]

    def max_logits_rows(self, longest: int | None = None) -> int:
        """Return the most rows of logits in a step: one for each sequence, and drafts as they fit.

        ``longest``: tokens of a draft, where the drafter gives fewer than the settings allow.
        """
        speculation = self.speculation
        if speculation is None:
            return self.max_num_seqs
        paths = self.max_num_seqs + speculation.max_branches
        return min(self.max_num_batched_tokens, paths * (1 + (longest or speculation.longest)))

    def state_log_rows(self, layout: KvLayout, longest: int | None = None) -> int:
        """Return of how many drafts the inputs of recurrent layers are kept. Those of one step are
        used in the next, which has drafts of its own. ``longest``: as for `max_logits_rows`.
        """
        speculation = self.speculation
        if speculation is None or layout.state is None:
            return 0
        drafts = self.max_logits_rows(longest) - self.max_num_seqs
        most = max(_STATE_LOG_BYTES // layout.state.row_bytes, longest or speculation.longest)
        return 2 * min(drafts, most)

    def limits(
        self, max_model_len: int, layout: KvLayout, longest: int | None = None, **simulated: Any
    ) -> SchedulerConfig:
        """Return the scheduler's limits. ``longest``: as for `max_logits_rows`. ``simulated``: the
        older ways to serve.
        """
        shared = {each.name: getattr(self, each.name) for each in fields(SchedulerSettings)}
        rows = self.max_logits_rows(longest)
        own = {
            "max_model_len": max_model_len,
            "max_logits_rows": rows,
            "max_branches": self.max_branches,
            "state_log_rows": self.state_log_rows(layout, longest),
        }
        return SchedulerConfig(**shared | own | simulated)

    @property
    def max_branches(self) -> int:
        """Most alternatives that a step checks beside the drafts."""
        return 0 if self.speculation is None else self.speculation.max_branches

    def layout_of(self, model: ModelConfig) -> KvLayout:
        from octavo.kv_cache.layout import KvDtype, KvLayout

        mtp = self.speculation is not None and self.speculation.own_mtp
        dtype = KvDtype.of(self.kv_cache_dtype)
        return KvLayout.of(model, self.block_size, dtype, mtp=mtp and model.mtp_layers > 0)
