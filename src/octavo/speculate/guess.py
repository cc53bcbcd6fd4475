"""Tokens drawn from a drafter's logits, as the target would draw them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.execute.batch import Float32, StepResult
from octavo.sample.sampler import Sampler, SamplerState


def draw_guesses(
    sampler: Sampler, result: StepResult, states: Sequence[SamplerState], *, probabilities: bool
) -> tuple[list[int], Float32 | None]:
    """A token for each of the states, from the row of logits that is as far down, and recorded in
    it; -1 where there is none. And the distributions that they were drawn by, [states, vocabulary],
    if these are wanted.
    """
    tokens: list[int] = []
    drawn_by: list[Float32] = []
    logits = result.logits
    while True:
        first = len(tokens)
        here = states[first:] if logits is None else states[first : first + len(logits)]
        if probabilities:
            drawn_by.append(sampler.probabilities(logits, range(len(here)), here))
        tokens += sampler.sample(logits, range(len(here)), here).token_ids
        if len(tokens) == len(states):
            return tokens, np.concatenate(drawn_by) if probabilities else None
        assert result.logits_from is not None
        logits = result.logits_from(len(tokens))
