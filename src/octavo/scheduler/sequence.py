"""One stream of tokens in the making, and the request it belongs to."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from octavo.kv_cache.connectors.prefetch import Prefetch
from octavo.kv_cache.prefix_lookup import Hit
from octavo.scheduler.request import Request, RequestRecord


class Status(Enum):
    """Where a sequence is. Several tokens may be missing from the cache only while PREFILLING."""

    WAITING = auto()  # queued, new or preempted; holds nothing
    PREFILLING = auto()  # has a slot; its known tokens go through the model in chunks
    DECODING = auto()  # has a slot; its last token is the next to go through the model
    FORKING = auto()  # one of n > 1: begins when the first of them has put the prompt through
    FETCHING = auto()  # its prefix is on its way from disk; queued when it is there, or too late
    HELD = auto()  # its request is paused; holds nothing but its place among those admitted
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's n answers. ``token_ids`` is prompt and output in one array."""

    owner: RequestState
    choice: int
    order: tuple[int, int]  # (arrival number, choice): who came first
    token_ids: array[int]
    status: Status = Status.WAITING
    slot: int = -1  # row in the block tables while PREFILLING or DECODING
    num_scored: int = 0  # prompt positions whose logprobs have been delivered
    queued: float = 0.0  # clock seconds when it joined the queue last
    stood: float = 0.0  # seconds that it stood at the head of its line: the policy's
    prefetch: Prefetch | None = None  # what is loaded for it, until it is admitted
    sought: bool = False  # on disk
    hit: Hit | None = None  # that it was let in with, until its first chunk has been computed
    output: Any = None  # the engine's: sampler state, detokenizer, stop rules

    @property
    def num_to_come(self) -> int:
        """The tokens that it may still draw: at least 1 until it has ended."""
        return self.owner.num_prompt_tokens + self.owner.max_tokens - len(self.token_ids)

    @property
    def followers(self) -> list[Sequence]:
        """The sequences that will fork from this one when it has put the prompt through."""
        if self.choice:
            return []
        return [seq for seq in self.owner.sequences if seq.status is Status.FORKING]


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in the engine: its sequences and its record."""

    request: Request
    record: RequestRecord
    max_tokens: int
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    charged: int = 0  # prompt tokens to be computed, as the policy was told
    counted: bool = False  # something of it has been computed, and what was cached is counted

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt logprobs are still to be computed."""
        return (
            self.request.params.prompt_logprobs is not None
            and self.sequences[0].num_scored < self.num_prompt_tokens - 1
        )
