"""Speculative sampling by rejection: whatever is guessed, what comes has the target's distribution.

Twenty thousand chains of three positions, each with two guesses, are compared by Pearson's test to
the exact distributions, given what came before; wrong rules must fail the same test.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo import _native
from octavo.sampling.native import NativeSampler
from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import SamplerState
from octavo.tools.verify.chi_square import chi_square
from sampling import reference
from sampling.test_sampler import SIZES, TIERS, draws_params, kinds, make_logits

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
    "top-n-sigma": {"temperature": 1.6, "top_n_sigma": 1.6},
    "top-n-sigma, bans and top-p": {
        "top_n_sigma": 2.2,
        "top_p": 0.9,
        "banned_token_ids": (2, 6),
        "logit_bias": {4: -3.0},
    },
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
    """Yield p-values of the first position, and of later ones, given each of the commonest
    beginnings.
    """
    plain = SamplingParams(seed=0, **params).validated(VOCAB)
    for position in range(3):
        counts: dict[tuple[int, ...], npt.NDArray[np.int64]] = defaultdict(
            lambda: np.zeros(VOCAB, np.int64)
        )
        for run in came:
            if len(run) > position:
                counts[tuple(run[:position])][run[position]] += 1
        for before in sorted(counts, key=lambda key: -counts[key].sum())[:4]:
            yield f"{before}", chi_square(counts[before], target(plain, position, before))


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


@st.composite
def rows_and_states(
    draw: st.DrawFn,
) -> tuple[NativeSampler, Float32, SamplingParams, list[int], frozenset[int], list[int]]:
    size = draw(st.sampled_from(SIZES))
    logits = make_logits(draw(st.integers(0, 2**32 - 1)), size, draw(kinds))
    params = draw(draws_params(size))
    ids = st.integers(0, size - 1)
    prompt = draw(st.lists(ids, max_size=6))
    stops = frozenset(draw(st.lists(ids, max_size=min(3, size - 1))))
    generated = draw(st.lists(ids, max_size=6))
    sampler = NativeSampler(size, draw(st.sampled_from(TIERS)))
    return sampler, logits, params, prompt, stops, generated


def state_of(
    sampler: NativeSampler,
    params: SamplingParams,
    prompt: list[int],
    stops: frozenset[int],
    generated: list[int],
) -> SamplerState:
    state = sampler.new_state(params, prompt, stops)
    for token in generated:
        state.record(token)
    return state


@settings(max_examples=150)
@given(drawn=rows_and_states())
def test_probabilities_are_those_of_the_reference(drawn: Any) -> None:
    sampler, logits, params, prompt, stops, generated = drawn
    state = state_of(sampler, params, prompt, stops, generated)
    out = np.full((3, len(logits)), np.nan, np.float32)
    assert sampler.probabilities(logits[None], [0] * 3, [state] * 3, out) is out
    assert state.num_generated == len(generated)
    assert (out[0] == out[1:]).all()
    adjusted = reference.adjust(logits, params, prompt, generated, stops)
    if adjusted.max() == -np.inf:
        assert not out.any()
        return
    if params.temperature == 0:
        assert out[0].nonzero()[0].tolist() == [adjusted.argmax()]
        assert out[0].max() == 1
        return
    assume(not reference.near_a_limit(adjusted, params))
    expected = reference.probabilities(adjusted, params)
    np.testing.assert_allclose(out[0], expected, rtol=2e-5, atol=1e-37)
    assert out[0].sum(dtype=np.float64) == pytest.approx(1, abs=1e-6)


def drafters_row(kind: str, p: Float32, rng: np.random.Generator) -> Float32 | None:
    """Distributions, and what is none."""
    n = len(p)
    other = rng.dirichlet(np.full(n, 0.2)).astype(np.float32)
    hostile = np.array([np.nan, np.inf, -np.inf, -1, 0, 5, 1e-45], np.float32)
    return {
        "certain": None,
        "same": p,
        "near": np.float32(0.9) * p + np.float32(0.1) * other,
        "other": other,
        "zeros": np.zeros(n, np.float32),
        "twice": 2 * p,
        "hostile": rng.choice(hostile, n),
    }[kind]


@settings(max_examples=250)
@given(
    drawn=rows_and_states(),
    kind=st.sampled_from(["certain", "same", "near", "other", "zeros", "twice", "hostile"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_comes_may_come(drawn: Any, kind: str, seed: int) -> None:
    """It has a probability; the noise says whether the guess is accepted; and where it is not,
    something else comes, of what is more probable than the drafter thought.
    """
    sampler, logits, params, prompt, stops, generated = drawn
    state = state_of(sampler, params, prompt, stops, generated)
    (p,) = sampler.probabilities(logits[None], [0], [state])
    rng = np.random.default_rng(seed)
    q = drafters_row(kind, p, rng)
    of_p = p.any() and rng.random() < 0.7
    guess = int(pick(rng, p)) if of_p else int(rng.integers(len(p)))
    (token,), _, errors = sampler.verify(logits[None], [0], [state], [guess], [q])
    if not p.any():
        assert token == -1
        assert errors == {0: "no token is allowed"}
        assert state.num_generated == len(generated)
        return
    assert not errors
    assert state.num_generated == len(generated) + 1
    assert p[token] > 0
    if params.temperature == 0:
        return
    certainty = 1.0 if q is None else float(q[guess]) if q[guess] > 0 else 0.0
    test = reference.noise(params.seed or 0, 0, len(generated), stream=1)
    if test * certainty < p[guess]:
        assert token == guess
        return
    assert token != guess or p[guess] == 1
    if q is None or kind == "hostile":
        return
    left = np.maximum(0, p.astype(np.float64) - q)
    if left.sum() > 1e-4:
        noise = reference.noise(params.seed or 0, 0, len(generated), stream=2)
        above = left[: token + 1].sum() / left.sum()
        assert above - left[token] / left.sum() - 1e-2 <= noise <= above + 1e-2


def test_a_drafter_like_the_target_is_always_right() -> None:
    """To rounding and beyond: its numbers are the very ones."""
    sampler = NativeSampler(5000)
    rng = np.random.default_rng(0)
    for seed in range(300):
        logits = make_logits(seed, 5000, "flat" if seed % 2 else "normal")[None]
        top_p, top_k = ((1.0, 0), (0.9, 0), (1.0, 40), (0.7, 3000))[seed % 4]
        sigma = (0.0, 0.0, 2.0)[seed % 3]
        params = SamplingParams(seed=seed, top_p=top_p, top_k=top_k, top_n_sigma=sigma)
        state = sampler.new_state(params, [], ())
        (q,) = sampler.probabilities(logits, [0], [state])
        guess = int(pick(rng, q))
        assert sampler.verify(logits, [0], [state], [guess], [q]).token_ids == [guess]


def test_the_noise_is_not_that_of_plain_draws() -> None:
    state = native_state(seed=77)
    for stream in range(3):
        for position in (0, 5, 2**33):
            assert state.uniform(position, stream) == reference.noise(77, 0, position, stream)
    assert (
        len({state.uniform(position, stream) for position in range(9) for stream in range(3)}) > 26
    )


def native_state(seed: int) -> _native.SamplerState:
    return NativeSampler(10).new_state(SamplingParams(seed=seed), [], ())


def test_entries_end_with_the_first_that_is_not_the_guess() -> None:
    """They end for one state, and others go on. Logprobs are those of the tokens that stand, by the
    model's distribution.
    """
    logits = np.stack([make_logits(seed, 300, "normal") for seed in range(4)])
    best = logits.argmax(axis=1).tolist()
    sampler = NativeSampler(300)
    greedy = SamplingParams(temperature=0, seed=0, logprobs=1)
    first, second = (sampler.new_state(greedy, [], ()) for _ in range(2))
    wrong = (best[1] + 1) % 300
    tokens, logprobs, errors = sampler.verify(
        logits,
        [0, 0, 1, 1, 2, 2, 3, 3],
        [first, second] * 4,
        [best[0], best[0], best[1], wrong, best[2], best[2], -1, -1],
        [None] * 8,
    )
    assert tokens == [best[0], best[0], best[1], best[1], best[2], -1, best[3], -1]
    assert errors == {}
    assert (first.num_generated, second.num_generated) == (4, 2)
    assert logprobs is not None
    for at, (row, entry) in enumerate(zip([0, 0, 1, 1, 2, 2, 3, 3], logprobs, strict=True)):
        if tokens[at] < 0:
            assert entry is None
        else:
            assert (entry.token_id, entry.rank) == (tokens[at], 1)
            expected = reference.log_softmax(logits[row])[tokens[at]]
            assert entry.logprob == pytest.approx(expected, abs=2e-6)


def test_a_row_that_is_not_a_number_ends_its_state_alone() -> None:
    logits = np.zeros((3, 50), np.float32)
    logits[1, 20] = np.nan
    sampler = NativeSampler(50)
    states = [sampler.new_state(SamplingParams(seed=seed), [], ()) for seed in (1, 2)]
    never = np.zeros(50, np.float32)
    tokens, _, errors = sampler.verify(
        logits,
        [0, 1, 2, 0, 2, 2],
        [states[0]] * 3 + [states[1]] * 3,
        [7, 8, 9, 7, 8, -1],
        [never] * 5 + [None],
    )
    assert tokens[:3] == [7, -1, -1]
    assert tokens[3:5] == [7, 8]
    assert tokens[5] >= 0
    assert errors == {1: "a logit is not a number or infinite"}
    assert [state.num_generated for state in states] == [1, 3]
    assert not sampler.probabilities(logits, [1], [states[0]]).any()


def test_threads_and_neighbours_change_nothing() -> None:
    size, count = 20_011, 12
    logits = make_logits(3, 3 * size, "normal").reshape(3, size)
    q = np.exp(make_logits(4, size, "normal"))
    q /= q.sum()
    rng = np.random.default_rng(1)
    guesses = [int(pick(rng, q)) for _ in range(3 * count)]
    params = [SamplingParams(seed=seed, top_p=(1.0, 0.95)[seed % 2]) for seed in range(count)]
    results = []
    for sampler in (NativeSampler(size), NativeSampler(size, pool=_native.ThreadPool(3))):
        states = [sampler.new_state(one, [], ()) for one in params]
        rows = [row for row in range(3) for _ in states]
        together = sampler.verify(logits, rows, states * 3, guesses, [q] * len(rows)).token_ids
        results.append(together)
        results.append([row.tolist() for row in sampler.probabilities(logits, rows, states * 3)])
    assert results[:2] == results[2:]
    single = NativeSampler(size)
    for index, one in enumerate(params):
        state = single.new_state(one, [], ())
        own = slice(index, None, count)
        alone = single.verify(logits, range(3), [state] * 3, guesses[own], [q] * 3).token_ids
        assert alone == results[0][own]


def test_wrong_calls_are_refused_and_nothing_is_recorded() -> None:
    sampler = NativeSampler(10)
    state = sampler.new_state(SamplingParams(seed=0), [], ())
    logits = np.zeros((2, 10), np.float32)
    q = np.full(10, 0.1, np.float32)
    for guesses, drawn_from, named in (
        ([10], [None], "outside the vocabulary"),
        ([-2], [None], "outside the vocabulary"),
        ([], [None], "as many"),
        ([1], [], "as many"),
        ([1], [q[:9]], "not one over the vocabulary"),
    ):
        with pytest.raises(ValueError, match=named):
            sampler.verify(logits, [0], [state], guesses, drawn_from)
    with pytest.raises(ValueError, match="row"):
        sampler.verify(logits, [2], [state], [1], [None])
    for out in (np.empty((2, 10), np.float32), np.empty((1, 11), np.float32)):
        with pytest.raises(ValueError, match="a row of the vocabulary"):
            sampler.probabilities(logits, [0], [state], out)
    with pytest.raises(TypeError):
        sampler.probabilities(logits, [0], [state], np.empty((1, 10)))  # type: ignore[arg-type]
    assert state.num_generated == 0
    strided = np.repeat(q, 2)[::2]
    wide = np.full(10, 0.1)
    for row in (strided, wide):  # copied
        sampler.verify(logits, [0], [state], [1], [row])  # type: ignore[list-item]
    assert state.num_generated == 2
