"""What the engine asks of a sampler, whatever computes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from octavo.sample.params import SamplingParams

Float32 = npt.NDArray[np.float32]


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities at one position: the token there and the most likely ones.

    Of the model's own distribution, before any bias, penalty, mask or temperature.
    """

    token_id: int
    logprob: float
    rank: int  # 1 = most likely; equal logits rank by token id
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


class Sampled(NamedTuple):
    """One entry a row asked for, in the order asked."""

    token_ids: list[int]  # -1 for a row in ``errors``
    logprobs: list[TokenLogprobs | None] | None  # None when no state asked for any
    errors: dict[int, str]  # index into token_ids -> why that row gave no token


class SamplerState(Protocol):
    """What the draws of one sequence depend on besides the logits."""

    @property
    def num_generated(self) -> int:
        """Tokens recorded so far: the position, and the random counter, of the next draw."""
        ...

    def record(self, token_id: int) -> None:
        """Append a token that was chosen elsewhere."""
        ...

    def rewind(self, count: int) -> None:
        """Forget the last ``count`` tokens; drawing again repeats the same draws."""
        ...

    def fork(self, choice: int) -> Self:
        """An independent copy whose random numbers are those of another choice."""
        ...


class Sampler(Protocol):
    def new_state(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: Collection[int],
        choice: int = 0,
    ) -> SamplerState:
        """The state of sequence ``choice`` of a request, before its first token.

        ``params`` is validated and has its seed resolved. ``stop_token_ids`` are all ids that end
        the sequence (`SamplingParams.ending_ids`); none is drawn before min_tokens.
        """
        ...

    def sample(
        self, logits: Float32 | None, rows: Sequence[int], states: Sequence[SamplerState]
    ) -> Sampled:
        """Draws one token for each (row of ``logits`` [L, vocab], state) and records it there.

        A state given several times takes its rows in order, each draw following the one before:
        to verify drafted tokens, sample all their rows, compare, and rewind what came after the
        first difference. A row that cannot give a token (not a number, nothing allowed) is
        reported in ``errors`` and records nothing; it never affects another row.
        """
        ...

    def prompt_logprobs(
        self, logits: Float32 | None, rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[TokenLogprobs]:
        """For each row, the logprob of the given token (the prompt's next) and the ``top`` ids."""
        ...
