"""Faults planted to show that a certificate would notice them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from octavo.executor.base import Batch, Float32, StepResult
from octavo.sampling.sampler import Sampled, Sampler, SamplerState


class FlippedBit:
    """The lowest bit of one logit is wrong, in one step of all."""

    def __init__(self, step: int = 12) -> None:
        self._left = step  # steps of several rows until then

    def __call__(self, batch: Batch, result: StepResult) -> StepResult:
        if result.logits is None or len(result.logits) < 2:
            return result
        self._left -= 1
        if self._left != 0:
            return result
        wrong = result.logits.copy()
        wrong.view(np.uint32)[0, wrong.shape[1] // 2] ^= 1
        return result._replace(logits=wrong)


class WrongGuess:
    """One guess stands that is not what the target drew there, all guesses before it right."""

    def __init__(self, mistake: int = 5) -> None:
        self._left = mistake  # wrong guesses until then
        self._batch: Batch | None = None

    def see(self, batch: Batch, result: StepResult) -> StepResult:
        self._batch = batch
        return result

    def sampler(self, inner: Sampler) -> Sampler:
        """``inner`` with the mistake."""
        return cast(Sampler, _Mistaken(inner, self))

    def spoil(
        self, rows: Sequence[int], states: Sequence[SamplerState], sampled: Sampled
    ) -> Sampled:
        assert self._batch is not None
        inputs = self._batch.logits_rows
        mistaken: set[int] = set()  # states whose later draws count for nothing
        for index in range(len(rows) - 1):
            state = id(states[index])
            if states[index] is not states[index + 1] or state in mistaken:
                continue
            guess = int(self._batch.token_ids[inputs[rows[index]] + 1])
            if guess == sampled.token_ids[index]:
                continue
            mistaken.add(state)
            self._left -= 1
            if self._left == 0:
                sampled.token_ids[index] = guess
        return sampled


class _Mistaken:
    """A sampler in every way, but for `WrongGuess.spoil`."""

    def __init__(self, inner: Sampler, fault: WrongGuess) -> None:
        self._inner = inner
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sample(
        self, logits: Float32 | None, rows: Sequence[int], states: Sequence[SamplerState]
    ) -> Sampled:
        return self._fault.spoil(rows, states, self._inner.sample(logits, rows, states))


class _Unresidual:
    """A sampler in every way, but that a rejected guess is replaced by a draw from the target's
    distribution p instead of max(0, p - q): likely tokens come too often.
    """

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def verify(
        self,
        logits: Float32 | None,
        rows: Sequence[int],
        states: Sequence[SamplerState],
        guesses: Sequence[int],
        drawn_from: Sequence[Float32 | None],
    ) -> Sampled:
        sampled = self._inner.verify(logits, rows, states, guesses, drawn_from)
        token_ids = sampled.token_ids
        rejected = [
            index
            for index, (token, guess) in enumerate(zip(token_ids, guesses, strict=True))
            if token >= 0 and guess >= 0 and token != guess
        ]
        if rejected:
            for index in rejected:
                states[index].rewind(1)
            again = self._inner.sample(
                logits, [rows[index] for index in rejected], [states[index] for index in rejected]
            )
            for index, token in zip(rejected, again.token_ids, strict=True):
                token_ids[index] = token
        return sampled


def wrong_rule(sampler: Sampler) -> Sampler:
    """``sampler`` with a well-known mistake in its rule of rejection."""
    return cast(Sampler, _Unresidual(sampler))
