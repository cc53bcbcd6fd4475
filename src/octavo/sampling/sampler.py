"""The protocol of samplers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from octavo.sampling.params import SamplingParams

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
        """Return an independent copy whose random numbers are those of another choice."""
        ...


class Sampler(Protocol):
    def new_state(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: Collection[int],
        choice: int = 0,
    ) -> SamplerState:
        """Return the state of sequence ``choice`` of a request, before its first token.

        ``params`` is validated and has its seed resolved. ``stop_token_ids`` are all ids that end
        the sequence (`SamplingParams.ending_ids`); none is drawn before min_tokens.
        """
        ...

    def sample(
        self, logits: Float32 | None, rows: Sequence[int], states: Sequence[SamplerState]
    ) -> Sampled:
        """Draw one token for each (row of ``logits`` [L, vocab], state) and records it there.

        A state given several times takes its rows in order, each draw following the one before:
        to verify drafted tokens, sample all their rows, compare, and rewind what came after the
        first difference. A row that cannot give a token (not a number, nothing allowed) is
        reported in ``errors`` and records nothing; it never affects another row.
        """
        ...

    def probabilities(
        self,
        logits: Float32 | None,
        rows: Sequence[int],
        states: Sequence[SamplerState],
        out: Float32 | None = None,
    ) -> Float32:
        """Return the distribution that each (row, state) would draw from, [len(states), vocab], in
        ``out`` if given (contiguous). Records nothing. A row that cannot give a token gets zeros.

        After bias, masks, penalties, temperature and truncation; at temperature 0 the one token has
        all of it.
        """
        ...

    def verify(
        self,
        logits: Float32 | None,
        rows: Sequence[int],
        states: Sequence[SamplerState],
        guesses: Sequence[int],
        drawn_from: Sequence[Float32 | None],
    ) -> Sampled:
        """Draw a token for each (row, state) by way of guesses (Leviathan et al., 2023; Chen et
        al., 2023) and records it. The result has the distribution p that `sample` draws from.

        A guess x that was drawn from q, ``drawn_from`` [vocab] (None: x for certain), is accepted
        with probability min(1, p(x) / q(x)); else the token is drawn from max(0, p - q), which
        never gives x. After that the state's later entries are not looked at: they give -1 and no
        error. An entry with the guess -1 is drawn from p; it is its state's last. Failures are as
        in `sample`, and end their state's entries too.

        It has random numbers of its own, so that guesses may be drawn with forks of the states. p
        is met exactly if whether an entry is there does not depend on its guess, unless q is None.
        """
        ...

    def prompt_logprobs(
        self, logits: Float32 | None, rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[TokenLogprobs]:
        """Return, for each row, the logprob of the given token (the prompt's next) and the ``top``
        ids.
        """
        ...
