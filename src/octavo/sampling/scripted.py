"""A sampler for an executor that computes no numbers: simulation and deterministic fault tests."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import Float32, Sampled, SamplerState, TokenLogprobs

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood: "Fast splittable pseudorandom number
    generators", 2014): 64 bits in, 64 well mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_all(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix` of each."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class ScriptedState:
    """Tokens are a function of (seed, choice, position), whatever was recorded before."""

    __slots__ = ("logprobs", "min_tokens", "num_generated", "seed", "stop_token_ids", "stream")

    def __init__(self, params: SamplingParams, stop_token_ids: frozenset[int], choice: int) -> None:
        self.num_generated = 0
        self.seed = params.seed or 0
        self.stream = mix(self.seed & _MASK) ^ mix(choice)
        self.stop_token_ids = stop_token_ids
        self.min_tokens = params.min_tokens
        self.logprobs = params.logprobs

    def record(self, token_id: int) -> None:
        self.num_generated += 1

    def rewind(self, count: int) -> None:
        if not 0 <= count <= self.num_generated:
            raise ValueError(f"cannot forget {count} of {self.num_generated} tokens")
        self.num_generated -= count

    def fork(self, choice: int) -> ScriptedState:
        forked = copy(self)
        forked.stream = mix(self.seed & _MASK) ^ mix(choice)
        return forked


class ScriptedSampler:
    """Implements `Sampler` for logits that are None. Logprobs are those of a uniform distribution.

    A sequence runs to its max_tokens, unless ``stop_rate`` is above 0: then each token from
    min_tokens on is, with that probability, one that ends the sequence.
    """

    def __init__(self, vocab_size: int, stop_rate: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self._stop_below = int(stop_rate * 2**32)

    def new_state(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: Collection[int],
        choice: int = 0,
    ) -> ScriptedState:
        stops = frozenset(stop_token_ids)
        if len(stops) >= self.vocab_size:
            raise ValueError(f"all {self.vocab_size} tokens of the vocabulary are stop tokens")
        return ScriptedState(params, stops, choice)

    def sample(
        self, logits: Float32 | None, rows: Sequence[int], states: Sequence[SamplerState]
    ) -> Sampled:
        token_ids = []
        logprobs: list[TokenLogprobs | None] = []
        asked = False
        for state in states:
            assert isinstance(state, ScriptedState)
            token_ids.append(self._token(state))
            state.num_generated += 1
            if state.logprobs is None:
                logprobs.append(None)
            else:
                asked = True
                logprobs.append(self._uniform(token_ids[-1], state.logprobs))
        return Sampled(token_ids, logprobs if asked else None, {})

    def coming(self, state: ScriptedState, count: int) -> list[int]:
        """The tokens that the state's next draws will give."""
        ahead = copy(state)
        tokens = []
        for _ in range(count):
            tokens.append(self._token(ahead))
            ahead.num_generated += 1
        return tokens

    def draws_to_go(self, state: ScriptedState) -> int:
        """How many of the state's next draws certainly do not end its sequence."""
        if not self._stop_below or not state.stop_token_ids:
            return sys.maxsize
        return max(0, state.min_tokens - state.num_generated)

    def sample_ahead(self, states: Sequence[ScriptedState], count: int) -> npt.NDArray[np.int32]:
        """[states, count]: what ``count`` times `sample` would draw, at most `draws_to_go`."""
        next_draws = [(state.stream + state.num_generated) & _MASK for state in states]
        steps = np.arange(count, dtype=np.uint64)
        random = _mix_all(np.array(next_draws, dtype=np.uint64)[:, None] + steps)
        low = random & np.uint64(0xFFFFFFFF)
        tokens = (low % np.uint64(self.vocab_size)).astype(np.int32)
        for row, state in zip(tokens, states, strict=True):
            if state.stop_token_ids and not state.stop_token_ids.isdisjoint(row.tolist()):
                row[:] = self.coming(state, count)
            state.num_generated += count
        return tokens

    def probabilities(
        self,
        logits: Float32 | None,
        rows: Sequence[int],
        states: Sequence[SamplerState],
        out: Float32 | None = None,
    ) -> Float32:
        if out is None:
            out = np.empty((len(states), self.vocab_size), np.float32)
        out[:] = 0
        for row, state in zip(out, states, strict=True):
            assert isinstance(state, ScriptedState)
            row[self._token(state)] = 1
        return out

    def verify(
        self,
        logits: Float32 | None,
        rows: Sequence[int],
        states: Sequence[SamplerState],
        guesses: Sequence[int],
        drawn_from: Sequence[Float32 | None],
    ) -> Sampled:
        token_ids = [-1] * len(states)
        logprobs: list[TokenLogprobs | None] = [None] * len(states)
        ended: set[int] = set()
        for index, (state, guess) in enumerate(zip(states, guesses, strict=True)):
            if id(state) not in ended:
                sampled = self.sample(None, (), (state,))
                (token_ids[index],) = sampled.token_ids
                if sampled.logprobs is not None:
                    (logprobs[index],) = sampled.logprobs
                if token_ids[index] != guess:
                    ended.add(id(state))
        return Sampled(token_ids, logprobs if any(logprobs) else None, {})

    def prompt_logprobs(
        self, logits: Float32 | None, rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[TokenLogprobs]:
        return [self._uniform(token_id, top) for token_id in token_ids]

    def _token(self, state: ScriptedState) -> int:
        random = mix(state.stream + state.num_generated)
        if (
            random >> 32 < self._stop_below
            and state.stop_token_ids
            and state.num_generated >= state.min_tokens
        ):
            return min(state.stop_token_ids)
        token_id = (random & 0xFFFFFFFF) % self.vocab_size
        while token_id in state.stop_token_ids:
            token_id = (token_id + 1) % self.vocab_size
        return token_id

    def _uniform(self, token_id: int, top: int) -> TokenLogprobs:
        logprob = -math.log(self.vocab_size)
        alternatives = tuple((other, logprob) for other in range(min(top, self.vocab_size)))
        return TokenLogprobs(token_id, logprob, token_id + 1, alternatives)
