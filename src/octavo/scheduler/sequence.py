"""One token sequence of a request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from octavo.kv_cache.connectors.prefetch import Prefetch
from octavo.kv_cache.prefix_lookup import Hit
from octavo.scheduler.request import RequestRecord


class Status(Enum):
    """What a sequence is doing. Only while PREFILLING may the cache lack several of its tokens."""

    WAITING = auto()  # queued, new or preempted; holds no slot and no blocks
    PREFILLING = auto()  # has a slot; its known tokens go through the model in chunks
    DECODING = auto()  # has a slot; its last token is the next to go through the model
    FORKING = auto()  # one of n > 1: starts when the first of them has computed the prompt
    FETCHING = auto()  # its prefix is being read from disk; queued when that is done or too slow
    PAUSED = auto()  # its request is paused; holds no slot and no blocks
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's n answers. ``token_ids`` is prompt and output in one array."""

    owner: RequestRecord
    choice: int
    order: tuple[int, int]  # (arrival number, choice): the order of arrival
    token_ids: array[int]
    max_length: int  # most tokens, prompt and output
    status: Status = Status.WAITING
    slot: int = -1  # row in the block tables while PREFILLING or DECODING
    num_scored: int = 0  # prompt positions whose logprobs have been delivered
    queued: float = 0.0  # clock seconds when it was last queued
    stood: float = 0.0  # seconds at the head of its queue; the policy counts them
    prefetch: Prefetch | None = None  # what is being loaded for it, until it is admitted
    sought: bool = False  # the disk has been searched for it
    hit: Hit | None = None  # the prefix it was admitted with, until its first chunk is computed
    output: Any = None  # the engine's `SequenceOutput`

    @property
    def num_to_come(self) -> int:
        """The most tokens it may still draw: at least 1 until it has ended."""
        return self.max_length - len(self.token_ids)

    @property
    def followers(self) -> list[Sequence]:
        """The sequences that will fork from this one when it has computed the prompt."""
        if self.choice:
            return []
        return [seq for seq in self.owner.sequences if seq.status is Status.FORKING]
