"""What the engine delivers, step by step, and what it keeps of a sequence to make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from octavo.engine.detokenize import IncrementalDetokenizer
from octavo.sampling.sampler import SamplerState
from octavo.sampling.sampler import TokenLogprobs as TokenLogprobs
from octavo.scheduler.request import FinishReason, RequestRecord


class Delta(NamedTuple):
    """New output of one sequence of a request. Joined deltas equal the whole output.

    ``text`` never ends inside a character or inside what may still become a stop string.
    ``finish_reason`` is None until the sequence's last delta. ``record`` is set on the request's
    very last delta only, and the record is then complete. ``prompt_logprobs`` (None for the first
    token) comes with the request's first delta when asked for. ``at`` is when its last token was
    drawn, in clock seconds.
    """

    request_id: str
    choice: int  # which of the n sequences
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one a token id, when asked for
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    record: RequestRecord | None = None
    at: float = 0.0


@dataclass(slots=True)
class SequenceOutput:
    """What the engine keeps of a sequence (`Sequence.output`)."""

    sampler: SamplerState
    text: IncrementalDetokenizer
    num_tokens: int = 0  # delivered
    in_doubt: bool = False  # ``text`` has seen tokens that may not have been delivered
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # until the first delta takes it
