"""The sampler in C++ (kernels/sampler.h)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from octavo import _native
from octavo.sampling.params import MIN_TEMPERATURE, SamplingParams, parameters
from octavo.sampling.sampler import Float32, Sampled, SamplerState, TokenLogprobs


class NativeSampler:
    """Implements `Sampler`. Not thread-safe; works without the GIL.

    ``isa`` forces an instruction-set tier ("generic", "avx2", "avx512", "avx512_bf16"); "" takes
    the best. Rows are spread over the threads of ``pool``, on which nothing else may run meanwhile;
    without one the caller's thread does the work.
    """

    def __init__(
        self, vocab_size: int, isa: str = "", pool: _native.ThreadPool | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self._native = _native.Sampler(vocab_size, isa, pool)

    def new_state(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: Collection[int],
        choice: int = 0,
    ) -> SamplerState:
        if params.seed is None:
            raise ValueError("the seed is not resolved: the engine does that at admission")
        options = {name: getattr(params, name) for name, row in parameters().items() if row.native}
        return _native.SamplerState(
            vocab_size=self.vocab_size,
            prompt_token_ids=prompt_token_ids if params.repetition_penalty != 1.0 else (),
            choice=choice,
            **options
            | {
                "temperature": params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0,
                "logit_bias": list(params.logit_bias.items()),
                "stop_token_ids": sorted(stop_token_ids),
                "logprobs": -1 if params.logprobs is None else params.logprobs,
            },
        )

    def sample(
        self, logits: Float32 | None, rows: Sequence[int], states: Sequence[SamplerState]
    ) -> Sampled:
        return _named(*self._native.sample(logits, rows, states))

    def verify(
        self,
        logits: Float32 | None,
        rows: Sequence[int],
        states: Sequence[SamplerState],
        guesses: Sequence[int],
        drawn_from: Sequence[Float32 | None],
    ) -> Sampled:
        return _named(*self._native.verify(logits, rows, states, guesses, drawn_from))

    def probabilities(
        self,
        logits: Float32 | None,
        rows: Sequence[int],
        states: Sequence[SamplerState],
        out: Float32 | None = None,
    ) -> Float32:
        if out is None:
            out = np.empty((len(states), self.vocab_size), np.float32)
        self._native.probabilities(logits, rows, states, out)
        return out

    def prompt_logprobs(
        self, logits: Float32 | None, rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[TokenLogprobs]:
        """As the protocol says. Raises ValueError where a logit is not a number or infinite."""
        entries = self._native.prompt_logprobs(logits, rows, token_ids, top)
        return [TokenLogprobs(*entry) for entry in entries]


def _named(token_ids: list[int], logprobs: list[Any] | None, errors: dict[int, str]) -> Sampled:
    if logprobs is not None:
        logprobs = [entry and TokenLogprobs(*entry) for entry in logprobs]
    return Sampled(token_ids, logprobs, errors)
