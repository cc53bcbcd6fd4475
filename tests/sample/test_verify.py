"""Speculative sampling by rejection: whatever is guessed, what comes has the target's distribution.

Twenty thousand chains of three positions, each with two guesses, are compared by Pearson's test to
the exact distributions, given what came before; wrong rules must fail the same test.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from octavo.sample.native import NativeSampler
from octavo.sample.params import SamplingParams
from octavo.sample.sampler import SamplerState
from octavo.speculate.chi_square import chi_square
from sample import reference

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

VOCAB = 24
STOPS = frozenset((0, 5))
PROMPT = [1, 1, 7]
CHAINS = 20_000
LIMIT = 1e-6  # the streams are seeded: this is passed or failed for good

PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.8, "min_p": 0.02},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.8},
    "top-k and top-p": {"temperature": 1.3, "top_k": 10, "top_p": 0.85},
    "min-p": {"min_p": 0.1},
    "penalties": {
        "presence_penalty": 0.8,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.4,
    },
    "bias, bans": {"logit_bias": {3: 2.5, 4: -3.0}, "banned_token_ids": (2,)},
    "only some": {"allowed_token_ids": (1, 2, 3, 5, 8, 13, 21)},
    "min_tokens": {"min_tokens": 2},
}


def logits_of(seed: int, scale: float = 1.3) -> Float32:
    """A row for each of three positions."""
    return np.random.default_rng(seed).normal(0, scale, (3, VOCAB)).astype(np.float32)


LOGITS = logits_of(1)
# A drafter's distributions, unlike the target's in places, with a token that it never guesses and
# one that it is all but sure of.
DRAFTER = np.exp(LOGITS + 1.5 * logits_of(2))
DRAFTER[:, 9] = 0
DRAFTER[1, 11] = 2 * DRAFTER[1].sum()
DRAFTER /= DRAFTER.sum(axis=1, keepdims=True)


def target(params: SamplingParams, position: int, before: Sequence[int]) -> Float64:
    adjusted = reference.adjust(LOGITS[position], params, PROMPT, list(before), STOPS)
    assert not reference.near_a_limit(adjusted, params)
    return reference.probabilities(adjusted, params)


Verify = Callable[..., list[int]]


def by_sampler(sampler: NativeSampler) -> Verify:
    def verify(states: list[SamplerState], guesses: list[int], q: list[Any]) -> list[int]:
        count = len(states) // 3
        return sampler.verify(LOGITS, [0, 1, 2] * count, states, guesses, q).token_ids

    return verify


def pick(rng: np.random.Generator, p: npt.NDArray[Any], count: int | None = None) -> Any:
    sums = np.cumsum(p, dtype=np.float64)
    return sums.searchsorted(rng.random(count) * sums[-1], side="right")


@cache
def guesses_of(kind: str) -> list[list[int]]:
    """Two guesses and none for each chain."""
    rng = np.random.default_rng(7)
    if kind == "certain":
        columns = rng.choice([22, 1, 8], size=CHAINS), rng.choice([6, 5, 13], size=CHAINS)
    else:
        columns = pick(rng, DRAFTER[0], CHAINS), pick(rng, DRAFTER[1], CHAINS)
    return np.stack([*columns, np.full(CHAINS, -1)], axis=1).tolist()


def chains(
    sampler: NativeSampler, params: dict[str, Any], kind: str, verify: Verify
) -> list[list[int]]:
    """What came of each chain."""
    came: list[list[int]] = []
    q = [None] * 3 if kind == "certain" else [*DRAFTER[:2], None]
    plain = SamplingParams(**params).validated(VOCAB)
    for first in range(0, CHAINS, 1000):
        states: list[SamplerState] = []
        guesses: list[int] = []
        for chain in range(first, first + 1000):
            each = replace(plain, seed=chain)
            states += [sampler.new_state(each, PROMPT, STOPS)] * 3
            guesses += guesses_of(kind)[chain]
        tokens = verify(states, guesses, q * 1000)
        for at in range(0, 3000, 3):
            run = tokens[at : at + 3]
            came.append(run[: run.index(-1)] if -1 in run else run)
            assert states[at].num_generated == len(came[-1])
    return came


def ps(came: list[list[int]], params: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Of the first position; of later ones, given each of the commonest beginnings."""
    settings = SamplingParams(seed=0, **params).validated(VOCAB)
    for position in range(3):
        counts: dict[tuple[int, ...], npt.NDArray[np.int64]] = defaultdict(
            lambda: np.zeros(VOCAB, np.int64)
        )
        for run in came:
            if len(run) > position:
                counts[tuple(run[:position])][run[position]] += 1
        for before in sorted(counts, key=lambda key: -counts[key].sum())[:4]:
            yield f"{before}", chi_square(counts[before], target(settings, position, before))


@pytest.fixture(scope="module")
def sampler() -> NativeSampler:
    return NativeSampler(VOCAB)


@pytest.mark.parametrize("kind", ["certain", "drawn"])
@pytest.mark.parametrize("name", PARAMS)
def test_what_comes_has_the_targets_distribution(
    sampler: NativeSampler, name: str, kind: str
) -> None:
    params = PARAMS[name]
    came = chains(sampler, params, kind, by_sampler(sampler))
    assert {len(run) for run in came} == {1, 2, 3}
    found = dict(ps(came, params))
    assert len(found) > 5
    assert min(found.values()) > LIMIT, found


def wrong_rule(sampler: NativeSampler, fault: str) -> Verify:
    """The rule in plain Python, one position at a time, with a fault."""

    rng = np.random.default_rng(11)

    def verify(states: list[SamplerState], guesses: list[int], q: list[Any]) -> list[int]:
        tokens = [-1] * len(states)
        for first in range(0, len(states), 3):
            for at in range(3):
                index = first + at
                (p,) = sampler.probabilities(LOGITS, [at], [states[index]])
                guess = guesses[index]
                given = np.zeros(VOCAB) if q[index] is None else q[index]
                if guess >= 0 and q[index] is None:
                    given[guess] = 1
                accepted = guess >= 0 and (
                    fault == "accepts all"
                    or rng.random() * given[guess] < p[guess] * (1.5 if fault == "lenient" else 1)
                )
                left = p if fault == "redraws from p" else np.maximum(0, p - given)
                if guess < 0 or left.sum() == 0:
                    left = p
                token = guess if accepted else int(pick(rng, left))
                states[index].record(token)
                tokens[index] = token
                if token != guess:
                    break
        return tokens

    return verify


@pytest.mark.parametrize("kind", ["certain", "drawn"])
@pytest.mark.parametrize("fault", ["none", "accepts all", "lenient", "redraws from p"])
def test_a_wrong_rule_would_be_noticed(sampler: NativeSampler, fault: str, kind: str) -> None:
    came = chains(sampler, PARAMS["top-k"], kind, wrong_rule(sampler, fault))
    least = min(p for _, p in ps(came, PARAMS["top-k"]))
    assert least > LIMIT if fault == "none" else least < 1e-12
