"""The limits a scheduler works within."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from octavo.scheduler.policies.config import PolicyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Names and meanings of vLLM's flags. Raises `ValueError` with the arithmetic."""

    max_model_len: int  # most tokens of a sequence, prompt and output together
    max_num_seqs: int = 256  # most sequences in a batch
    max_num_batched_tokens: int = 512  # most tokens in a step
    max_logits_rows: int | None = None  # most rows of logits in a step; None: max_num_seqs
    itl_target: float | None = None  # seconds that a step may take if a sequence decodes
    max_branches: int = 0  # most alternatives that a step checks beside the drafts
    enable_prefix_caching: bool = True
    max_num_queued_reqs: int | None = None  # None: no bound
    max_num_queued_tokens: int | None = None  # prompt tokens waiting
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    # Older ways to serve, for comparison (octavo simulate):
    batching: Literal["continuous", "static"] = "continuous"  # static: the next batch is
    # admitted when the last of this one has ended
    memory: Literal["paged", "reserve"] = "paged"  # reserve: at admission, for the longest answer
    chunked_prefill: bool = True  # False: a prompt goes through the model in one step

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, below 1")
        if self.max_branches < 0:
            raise ValueError(f"max_branches is {self.max_branches}, below 0")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            bound = getattr(self, name)
            if bound is not None and bound < 1:
                raise ValueError(f"{name} is {bound}: nothing would ever be admitted")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: every running sequence needs one token a step"
            )
        if self.memory == "reserve" and self.enable_prefix_caching:
            raise ValueError("memory reserved for one sequence cannot be shared: no prefix caching")
        if self.memory == "reserve" and self.max_branches:
            raise ValueError("memory reserved for one sequence cannot be shared: no branches")
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill a step must take the longest prompt: "
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_model_len "
                f"{self.max_model_len}"
            )
        if self.itl_target is not None and not 0 < self.itl_target < inf:
            raise ValueError(f"itl_target is {self.itl_target} seconds, not above 0")
        if self.itl_target is not None and not self.chunked_prefill:
            raise ValueError("itl_target cannot be kept without chunked prefill")
        if self.logits_rows < self.max_num_seqs:
            raise ValueError(
                f"max_logits_rows {self.logits_rows} is below max_num_seqs {self.max_num_seqs}: "
                "every running sequence needs one row a step"
            )

    @property
    def logits_rows(self) -> int:
        return self.max_num_seqs if self.max_logits_rows is None else self.max_logits_rows
