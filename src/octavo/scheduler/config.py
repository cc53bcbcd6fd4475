"""The limits a scheduler works within."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from octavo.scheduler.policies.config import PolicyConfig
from octavo.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(PolicyConfig):
    """What users choose of the limits, under the names of vLLM's flags."""

    # fmt: off
    # None: the model's context, or what fits of it. Least: a token of prompt and a new one.
    max_model_len: int | None = setting(None,
        "Longest prompt + output in tokens: 4096, 8k (8000), 8K (8192).", least=2,
        parse="max_model_len", metavar="TOKENS", show_default="the model's, capped to what fits")
    # The option's range is part of its help.
    max_num_seqs: int = setting(256, "Most sequences in a step.", least=1, min=1, max=1 << 20)
    max_num_batched_tokens: int = setting(512, "Most tokens in a step.", least=1, parse="amount",
        metavar="TOKENS")
    itl_target: float | None = setting(  # ms that a step may take in which somebody decodes
        None, "Milliseconds from token to token: prompts go through in parts that fit.", above=0,
        below=inf, unit=" ms", metavar="MS", show_default="none")
    max_num_queued_reqs: int | None = setting(  # None: no bound; a server has one (server.py)
        None, "Requests that may wait; the next gets a 429.", show_default="4 x --max-num-seqs")
    max_num_queued_tokens: int | None = setting(  # the same
        None, "Prompt tokens that may wait; the next gets a 429.", show_default="1Mi")
    enable_prefix_caching: bool = setting(True, "Reuse the KV of prompts that begin alike.")
    state_snapshots: float = setting(0.5,
        "Share of the cache that snapshots of recurrent layers' states may take.", least=0.0,
        most=1.0)
    # fmt: on

    @property
    def itl_target_s(self) -> float | None:
        """``itl_target`` in seconds."""
        return None if self.itl_target is None else self.itl_target / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulerSettings):
    """The settings with the limits that a loaded model sets. Raises `ValueError` with the
    arithmetic.
    """

    max_model_len: int  # most tokens of a sequence, prompt and output together
    max_logits_rows: int | None = None  # most rows of logits in a step; None: max_num_seqs
    max_branches: int = 0  # most alternatives that a step checks beside the drafts
    state_log_rows: int = 0  # drafts whose inputs of recurrent layers the executor can keep
    # Older ways to serve, for comparison (octavo simulate):
    batching: Literal["continuous", "static"] = "continuous"  # static: the next batch is
    # admitted when the last of this one has ended
    memory: Literal["paged", "reserve"] = "paged"  # reserve: at admission, for the longest answer
    chunked_prefill: bool = True  # False: a prompt goes through the model in one step

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)
        if self.max_model_len < 1:
            raise ValueError(f"max_model_len is {self.max_model_len}, below 1")
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
