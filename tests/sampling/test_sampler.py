"""The native sampler against the plain one in reference.py, in every tier this CPU has."""

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo import _native
from octavo.sampling.native import NativeSampler
from octavo.sampling.params import SamplingParams
from sampling import reference

Float32 = npt.NDArray[np.float32]


def available(isa: str) -> bool:
    try:
        NativeSampler(1, isa)
    except ValueError:
        return False
    return True


TIERS = [isa for isa in ("generic", "avx2", "avx512", "avx512_bf16") if available(isa)]
# One token, around a vector, around a block, all values sorted, blocks, groups of blocks.
SIZES = [1, 2, 15, 16, 17, 127, 128, 129, 1000, 1024, 1025, 5000, 20011]


def make_logits(seed: int, size: int, kind: str) -> Float32:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, size)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "equal":
        logits = np.copysign(0.0, logits)
    elif kind == "peaked":
        logits[rng.integers(size)] += 12
    elif kind == "flat":
        logits *= 0.05
    elif kind == "masked":
        logits[rng.random(size) < 0.7] = -np.inf
        logits[rng.integers(size)] = 1
    return logits.astype(np.float32)


kinds = st.sampled_from(["normal", "ties", "equal", "peaked", "flat", "masked"])


@st.composite
def draws_params(draw: st.DrawFn, size: int) -> SamplingParams:
    ids = st.integers(0, size - 1)
    several = st.lists(ids, max_size=8, unique=True)
    allowed = draw(st.one_of(st.none(), st.lists(ids, min_size=1, max_size=40, unique=True)))
    banned = draw(several)
    if (allowed is not None and not set(allowed) - set(banned)) or len(banned) >= size:
        banned = []
    penalty = st.sampled_from([0.0, 0.0, -2.0, 0.7, 2.0])
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 1.7, 50.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, 40, size // 3, size - 1, size, 10 * size])),
        top_p=draw(st.sampled_from([1.0, 1e-4, 0.3, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        top_n_sigma=draw(st.sampled_from([0.0, 0.0, -1.0, 1e-3, 0.7, 1.5, 4.0, 1000.0])),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0]), max_size=6)),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        banned_token_ids=tuple(banned),
        min_tokens=draw(st.integers(0, 3)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    ).validated(size)


@settings(max_examples=400)
@given(
    data=st.data(),
    isa=st.sampled_from(TIERS),
    size=st.sampled_from(SIZES),
    kind=kinds,
    seed=st.integers(0, 2**32 - 1),
    choice=st.integers(0, 127),
)
def test_draws_what_the_reference_draws(
    data: st.DataObject, isa: str, size: int, kind: str, seed: int, choice: int
) -> None:
    params = data.draw(draws_params(size))
    ids = st.integers(0, size - 1)
    prompt = data.draw(st.lists(ids, max_size=6))
    stops = frozenset(data.draw(st.lists(ids, max_size=min(3, size - 1))))
    generated = data.draw(st.lists(ids, max_size=6))
    logits = make_logits(seed, size, kind)

    sampler = NativeSampler(size, isa)
    state = sampler.new_state(params, prompt, stops, choice)
    for token_id in generated:
        state.record(token_id)
    (token_id,), _, errors = sampler.sample(logits[None], [0], [state])

    adjusted = reference.adjust(logits, params, prompt, generated, stops)
    if adjusted.max() == -np.inf:
        assert token_id == -1
        assert errors == {0: "no token is allowed"}
        assert state.num_generated == len(generated)
        return
    assert not errors
    assert state.num_generated == len(generated) + 1
    if params.temperature == 0:
        assert token_id == int(adjusted.argmax())
        return
    assume(not reference.near_a_limit(adjusted, params))
    probabilities = reference.probabilities(adjusted, params)
    assert probabilities[token_id] > 0
    # The noise falls into the token's part of the cumulative distribution.
    noise = reference.noise(params.seed or 0, choice, len(generated))
    above = probabilities[: token_id + 1].sum()
    assert above - probabilities[token_id] - 1e-5 <= noise <= above + 1e-5


def chi_square(counts: Counter[int], probabilities: npt.NDArray[np.float64], draws: int) -> None:
    """Bins of at least 20 expected draws, neighbours in id joined."""
    statistic, degrees = 0.0, -1
    expected = observed = 0.0
    for token_id, probability in enumerate(probabilities):
        if probability == 0:
            assert counts[token_id] == 0
        expected += probability * draws
        observed += counts[token_id]
        if expected >= 20:
            statistic += (observed - expected) ** 2 / expected
            degrees += 1
            expected = observed = 0.0
    assert degrees >= 3
    assert statistic < reference.chi_square_limit(degrees)


@pytest.mark.parametrize(
    ("size", "kind", "fields"),
    [
        (60, "normal", {}),
        (60, "flat", {"temperature": 0.1}),
        (300, "ties", {"temperature": 2.0, "top_k": 50}),
        (300, "normal", {"temperature": 3.0, "top_p": 0.8}),
        (300, "normal", {"temperature": 3.0, "min_p": 0.05}),
        (300, "normal", {"temperature": 3.0, "top_n_sigma": 2.0}),
        (3000, "flat", {}),
        (3000, "flat", {"top_k": 2000, "top_p": 0.9}),
        (3000, "normal", {"temperature": 4.0, "top_p": 0.95, "min_p": 0.001}),
        (20011, "normal", {"temperature": 2.0, "top_k": 30, "top_p": 0.9}),
        (20011, "ties", {"temperature": 2.0, "top_p": 0.7}),
        (20011, "normal", {"temperature": 9.0, "top_n_sigma": 2.5, "top_p": 0.9}),
        (20011, "ties", {"temperature": 2.0, "top_k": 700, "presence_penalty": 0.0}),
    ],
)
def test_frequencies_are_the_probabilities(size: int, kind: str, fields: dict[str, Any]) -> None:
    params = SamplingParams(seed=20261129, **fields).validated(size)
    logits = make_logits(7, size, kind)
    sampler = NativeSampler(size)
    state = sampler.new_state(params, [], ())
    draws = 4000
    tokens = sampler.sample(logits[None], [0] * draws, [state] * draws).token_ids
    chi_square(Counter(tokens), reference.probabilities(logits, params), draws)


def kept(
    sampler: NativeSampler, logits: npt.NDArray[Any], *, exact: bool = True, **fields: Any
) -> list[int]:
    """The token ids that may be drawn. ``exact``: they must be those of the reference."""
    row = np.asarray(logits, np.float32)
    params = SamplingParams(seed=0, **fields)
    state = sampler.new_state(params, [], ())
    (p,) = sampler.probabilities(row[None], [0], [state])
    found: list[int] = p.nonzero()[0].tolist()
    adjusted = reference.adjust(row, params, [], [], frozenset())
    if exact and not reference.near_a_limit(adjusted, params):
        assert found == reference.probabilities(adjusted, params).nonzero()[0].tolist()
    return found


@pytest.mark.parametrize("isa", TIERS)
def test_top_n_sigma_keeps_what_numpy_says(isa: str) -> None:
    for size in SIZES:
        sampler = NativeSampler(size, isa)
        for kind in ("normal", "ties", "equal", "peaked", "flat", "masked"):
            logits = make_logits(size, size, kind)
            there = logits[logits > -np.inf].astype(np.float64)
            for n in (0.013, 0.51, 1.03, 2.7, 5.1):
                wanted = np.flatnonzero(logits >= there.max() - n * np.std(there)).tolist()
                assert kept(sampler, logits, top_n_sigma=n) == wanted
                # A temperature at which no weight that is kept is 0 in single precision.
                assert kept(sampler, logits, top_n_sigma=n, temperature=30.0) == wanted


def test_top_n_sigma_at_its_edges() -> None:
    logits = np.array([2.0, -np.inf, 4.0, 0.0, 4.0, 0.0])
    # Of the five: mean 2, variance (0 + 4 + 4 + 4 + 4) / 5 = 3.2.
    sigma = math.sqrt(3.2)
    sampler = NativeSampler(6)
    for off in (0.0, -1.0, 1000.0):
        assert kept(sampler, logits, top_n_sigma=off) == [0, 2, 3, 4, 5]
    for least in (5e-324, 1e-50, 1e-30):
        assert kept(sampler, logits, top_n_sigma=least) == [2, 4]
    assert kept(sampler, logits, top_n_sigma=1.99 / sigma) == [2, 4]
    assert kept(sampler, logits, top_n_sigma=2.01 / sigma) == [0, 2, 4]
    assert kept(sampler, logits, top_n_sigma=4.01 / sigma) == [0, 2, 3, 4, 5]
    assert kept(sampler, logits, exact=False, top_n_sigma=1e-30, temperature=0) == [2]

    # At the limit itself: -1 and 1 have σ 1, and at least max - 2 σ is -1.
    assert kept(NativeSampler(4), np.array([-1, 1, -1, 1]), top_n_sigma=2) == [0, 1, 2, 3]
    assert kept(NativeSampler(1), np.array([-7.5]), top_n_sigma=0.5) == [0]
    for value in (0.1, -0.0, 3.4e38, -3.4e38, 1e-42):  # equal ones all stay, as σ is 0
        assert kept(NativeSampler(5), np.full(5, value), top_n_sigma=0.5) == [0, 1, 2, 3, 4]
    huge = np.array([3.4e38, -3.4e38, 3.3e38, 0])
    assert kept(NativeSampler(4), huge, temperature=100, top_n_sigma=0.01) == [0]


def test_sigma_is_right_where_the_maximum_is_far_away() -> None:
    """The worst case of its formula: a token far above all others, so that the variance is the
    small difference of two large numbers."""
    size = 200_003
    logits = np.random.default_rng(5).normal(0, 1e-3, size).astype(np.float32)
    logits[77] = 100.0
    sampler = NativeSampler(size)
    sigma = logits.std(dtype=np.float64)
    for place in (0.01, 0.5, 0.99):
        limit = float(np.quantile(logits, place))
        n = (100.0 - limit) / sigma
        found = kept(sampler, logits, exact=False, top_n_sigma=n, temperature=100.0)
        least = np.count_nonzero(logits > limit + 1e-6)
        most = np.count_nonzero(logits > limit - 1e-6)
        assert least <= len(found) <= most <= least + 500


def test_sigma_is_of_what_masks_left_and_of_all_that_truncation_drops() -> None:
    size = 3000
    sampler = NativeSampler(size)
    logits = make_logits(3, size, "normal")
    order = np.argsort(-logits, kind="stable")
    hot: dict[str, Any] = {"temperature": 10.0, "top_n_sigma": 2.0}
    plain = kept(sampler, logits, **hot)
    assert 20 < len(plain) < size // 2

    # Truncation changes no σ: the tokens are those that both keep.
    assert kept(sampler, logits, top_k=7, **hot) == sorted(order[:7].tolist())
    assert kept(sampler, logits, top_k=2500, **hot) == plain
    only_min_p = kept(sampler, logits, temperature=10.0, min_p=0.7)
    assert kept(sampler, logits, min_p=0.7, **hot) == sorted(set(plain) & set(only_min_p))
    # top_p is a share of what is left.
    assert len(kept(sampler, logits, top_p=0.5, **hot)) < 0.6 * len(plain)

    # Banned tokens count nothing, so they might as well not be there.
    banned = tuple(order[-1000:].tolist())
    fewer = kept(sampler, logits, banned_token_ids=banned, **hot)
    rest = np.setdiff1d(np.arange(size), banned)
    assert fewer == rest[kept(NativeSampler(2000), logits[rest], **hot)].tolist()
    assert len(fewer) < len(plain)
    allowed = tuple(int(token) for token in rest)
    assert kept(sampler, logits, allowed_token_ids=allowed, **hot) == fewer
    # A bias counts.
    bias = dict.fromkeys(banned, -100.0)
    assert len(kept(sampler, logits, logit_bias=bias, **hot)) >= 2000


@settings(max_examples=60)
@given(
    size=st.sampled_from(SIZES[1:]),
    kind=kinds,
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_top_n_sigma_has_the_same_bits_in_every_tier(
    size: int, kind: str, seed: int, data: st.DataObject
) -> None:
    """Also where rounding decides: n is chosen so that some token lies at the limit."""
    logits = make_logits(seed, size, kind)
    there = logits[logits > -np.inf].astype(np.float64)
    at = data.draw(st.sampled_from(there[:50].tolist()))
    n = float(np.clip((there.max() - at) / max(there.std(), 1e-9), 0, 1000))
    found = [
        kept(NativeSampler(size, isa), logits, exact=False, top_n_sigma=n, temperature=50.0)
        for isa in TIERS
    ]
    assert found == [found[0]] * len(TIERS)


def test_philox_known_answers() -> None:
    """From the known-answer file of the Random123 library, by the paper's authors."""
    ones = 0xFFFFFFFF
    for counter, key, answer in [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, [ones] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]:
        assert _native.philox(counter, key) == answer
        assert reference.philox(counter, key) == answer


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_noise_is_a_function_of_seed_choice_and_position(seed: int) -> None:
    sampler = NativeSampler(10)
    for choice in (0, 1, 127):
        state = sampler.new_state(SamplingParams(seed=seed), [], (), choice)
        for position in (0, 1, 5, 2**31, 2**40):
            assert state.uniform(position) == reference.noise(seed, choice, position)


def test_choices_of_a_request_are_independent() -> None:
    """Joint counts of two choices' tokens against the product of the uniform distribution."""
    size, draws = 8, 6400
    sampler = NativeSampler(size)
    params = SamplingParams(seed=5, n=2)
    row = np.zeros((1, size), np.float32)
    first, second = (
        sampler.sample(
            row, [0] * draws, [sampler.new_state(params, [], (), choice)] * draws
        ).token_ids
        for choice in range(2)
    )
    pairs = Counter(a * size + b for a, b in zip(first, second, strict=True))
    chi_square(pairs, np.full(size * size, 1 / size**2), draws)


ALL_KINDS_OF_PARAMS = [
    SamplingParams(temperature=0, seed=1),
    SamplingParams(temperature=0, seed=1, frequency_penalty=1.0, logprobs=3),
    SamplingParams(seed=2),
    SamplingParams(seed=3, top_k=40, top_p=0.9),
    SamplingParams(seed=4, top_p=0.95, temperature=3.0, logprobs=0),
    SamplingParams(seed=5, min_p=0.1, repetition_penalty=1.2, presence_penalty=-0.5),
    SamplingParams(seed=6, top_k=2500, temperature=2.0),
    SamplingParams(seed=7, allowed_token_ids=(3, 4000, 77), logit_bias={3: 2.0}, logprobs=20),
    SamplingParams(seed=8, top_n_sigma=2.0, temperature=3.0, banned_token_ids=(5, 6), logprobs=1),
]


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("isa", TIERS)
def test_a_row_is_the_same_alone_and_in_a_crowd(isa: str, threads: int | None) -> None:
    """Tokens and every bit of the logprobs, whatever the neighbours, their order, the place of
    the row in memory and the number of threads; with neighbours that fail."""
    size, steps = 5003, 6
    sampler = NativeSampler(size, isa, threads and _native.ThreadPool(threads))
    rng = np.random.default_rng(0)
    params = [ALL_KINDS_OF_PARAMS[i % len(ALL_KINDS_OF_PARAMS)] for i in range(24)]
    logits = rng.normal(0, 3, (steps, len(params), size)).astype(np.float32)
    logits[:, 5] = np.nan

    alone = []
    for index, one in enumerate(params):
        lone = NativeSampler(size, isa)
        state = lone.new_state(one, [1, 2], (0,))
        alone.append([lone.sample(logits[step, index : index + 1], [0], [state])
                      for step in range(steps)])  # fmt: skip

    states = [sampler.new_state(one, [1, 2], (0,)) for one in params]
    for step in range(steps):
        order = rng.permutation(len(params))
        spread = np.full((len(params) + 3, size + 7), np.nan, np.float32)[:, 7:]
        rows = rng.permutation(len(params) + 3)[: len(params)]
        spread[rows] = logits[step, order]
        crowd = sampler.sample(spread, rows.tolist(), [states[index] for index in order])
        assert crowd.logprobs is not None
        for place, index in enumerate(order):
            single = alone[index][step]
            assert crowd.token_ids[place] == single.token_ids[0]
            assert crowd.errors.get(place) == single.errors.get(0)
            own = single.logprobs[0] if single.logprobs is not None else None
            assert crowd.logprobs[place] == own


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("params", [*ALL_KINDS_OF_PARAMS[:7], ALL_KINDS_OF_PARAMS[8]])
def test_a_row_that_is_not_a_number_fails_alone(bad: float, params: SamplingParams) -> None:
    size = 3001
    sampler = NativeSampler(size)
    logits = np.zeros((3, size), np.float32)
    for position in (0, 1500, size - 1):
        logits[1] = 0
        logits[1, position] = bad
        states = [sampler.new_state(params, [], ()) for _ in range(3)]
        sampled = sampler.sample(logits, [0, 1, 2], states)
        assert sampled.errors == {1: "a logit is not a number or infinite"}
        assert sampled.token_ids[1] == -1
        assert sampled.token_ids[0] == sampled.token_ids[2] >= 0
        assert [state.num_generated for state in states] == [1, 0, 1]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    for size in SIZES:
        sampler = NativeSampler(size)
        logits = np.full((1, size), -3, np.float32)
        best = sorted({size - 1, size // 2, size // 3})
        logits[0, best] = 0.0
        logits[0, best[-1]] = -0.0
        for params in (SamplingParams(temperature=0, seed=0), SamplingParams(top_k=1, seed=0)):
            state = sampler.new_state(params, [], ())
            assert sampler.sample(logits, [0], [state]).token_ids == [best[0]]


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("kind", ["normal", "ties", "peaked", "masked"])
def test_logprobs_are_of_the_untouched_logits(isa: str, kind: str) -> None:
    for size in SIZES:
        logits = make_logits(size, size, kind)
        params = SamplingParams(
            seed=1, logprobs=20, temperature=5.0, top_k=3, logit_bias={size - 1: 100.0}
        ).validated(size)
        sampler = NativeSampler(size, isa)
        state = sampler.new_state(params, [], ())
        (token_id,), (logprobs,), _ = sampler.sample(logits[None], [0], [state])
        expected = reference.log_softmax(logits)
        order = np.argsort(-logits, kind="stable")[:20]
        order = order[logits[order] > -np.inf]
        assert logprobs.token_id == token_id
        assert logprobs.rank == reference.rank(logits, token_id)
        assert [other for other, _ in logprobs.top] == order.tolist()
        np.testing.assert_allclose([p for _, p in logprobs.top], expected[order], atol=2e-6)
        if expected[token_id] == -np.inf:
            assert logprobs.logprob == -np.inf
        else:
            assert logprobs.logprob == pytest.approx(expected[token_id], abs=2e-6, rel=1e-6)


def test_prompt_logprobs() -> None:
    size = 3000
    logits = np.stack([make_logits(seed, size, "normal") for seed in range(4)])
    sampler = NativeSampler(size)
    entries = sampler.prompt_logprobs(logits, [3, 1], [17, 2999], 5)
    for (token_id, logprob, rank, top), row in zip(entries, (3, 1), strict=True):
        expected = reference.log_softmax(logits[row])
        assert logprob == pytest.approx(expected[token_id], abs=2e-6, rel=1e-6)
        assert rank == reference.rank(logits[row], token_id)
        assert [other for other, _ in top] == np.argsort(-expected, kind="stable")[:5].tolist()
    assert sampler.prompt_logprobs(logits, [], [], 5) == []
    assert sampler.prompt_logprobs(logits, [0], [0], 0)[0].top == ()
    logits[1, 7] = np.nan
    with pytest.raises(ValueError, match="prompt position 1"):
        sampler.prompt_logprobs(logits, [0, 1], [5, 5], 2)


def test_threads_take_the_rows_of_a_state_in_order() -> None:
    size, count = 20011, 24
    params = [SamplingParams(seed=seed, frequency_penalty=1.0, top_p=0.9) for seed in range(3)]
    logits = make_logits(3, count * size, "normal").reshape(count, size)
    pool = _native.ThreadPool(3)
    assert pool.size == 3
    results = []
    for sampler in (NativeSampler(size), NativeSampler(size, pool=pool)):
        states = [sampler.new_state(one, [], ()) for one in params]
        # The rows of the three states are mixed.
        order = [states[row * row % 3] for row in range(count)]
        results.append(sampler.sample(logits, range(count), order).token_ids)
        found = sampler.prompt_logprobs(logits, range(count), results[-1], 3)
        assert [entry.token_id for entry in found] == results[-1]
        results.append(found)
    assert results[:2] == results[2:]


@settings(max_examples=60)
@given(data=st.data(), drafted=st.integers(1, 6), wrong=st.integers(0, 6))
def test_rewinding_repeats_the_draws(data: st.DataObject, drafted: int, wrong: int) -> None:
    """Verifying drafts: the rows of one state in one call, then back to the first difference, give
    the tokens that one step at a time gives."""
    size = 400
    params = data.draw(draws_params(size))
    rows = np.random.default_rng(1).normal(0, 2, (12, size)).astype(np.float32)
    sampler = NativeSampler(size)

    plain = sampler.new_state(params, [4, 5], (1, 2))
    expected = [sampler.sample(rows, [row], [plain]).token_ids[0] for row in range(12)]

    state = sampler.new_state(params, [4, 5], (1, 2))
    tokens: list[int] = []
    while len(tokens) < 12:
        count = min(drafted, 12 - len(tokens))
        ahead = range(len(tokens), len(tokens) + count)
        sampled = sampler.sample(rows, ahead, [state] * count).token_ids
        accepted = min(count, wrong + 1)
        state.rewind(count - accepted)
        tokens += sampled[:accepted]
        assert state.num_generated == len(tokens)
    assert tokens == expected


def test_a_fork_goes_its_own_way() -> None:
    size = 500
    params = SamplingParams(seed=9, frequency_penalty=1.5, repetition_penalty=1.1)
    logits = make_logits(0, size, "flat")[None]
    sampler = NativeSampler(size)
    state = sampler.new_state(params, [1], ())
    first = sampler.sample(logits, [0] * 5, [state] * 5).token_ids
    fork = state.fork(3)
    same = state.fork(0)
    ahead = sampler.sample(logits, [0] * 5, [state] * 5).token_ids
    assert sampler.sample(logits, [0] * 5, [same] * 5).token_ids == ahead
    other = sampler.new_state(params, [1], (), 3)
    for token_id in first:
        other.record(token_id)
    assert (
        sampler.sample(logits, [0] * 5, [fork] * 5).token_ids
        == sampler.sample(logits, [0] * 5, [other] * 5).token_ids
        != ahead
    )


def test_min_tokens_holds_off_a_forced_end_until_the_fifth_token() -> None:
    size, eos = 100, 7
    params = SamplingParams(temperature=0, min_tokens=4, logit_bias={eos: 100.0}, seed=0)
    sampler = NativeSampler(size)
    state = sampler.new_state(params, [], params.ending_ids({eos}))
    logits = make_logits(0, size, "normal")[None]
    tokens = sampler.sample(logits, [0] * 5, [state] * 5).token_ids
    assert eos not in tokens[:4]
    assert tokens[4] == eos


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    size = 50
    logits = np.zeros((1, size), np.float32)
    logits[0, 3] = 1.0
    sampler = NativeSampler(size)
    for fields in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        params = SamplingParams(temperature=0, seed=0, **fields)
        state = sampler.new_state(params, [3, 3, 3], ())
        assert sampler.sample(logits, [0, 0], [state] * 2).token_ids == [3, 0]
    params = SamplingParams(temperature=0, seed=0, repetition_penalty=2.0)
    logits[0, 4] = 0.9
    state = sampler.new_state(params, [3], ())
    assert sampler.sample(logits, [0], [state]).token_ids == [4]


def test_wrong_calls_are_refused_and_nothing_is_read() -> None:
    sampler = NativeSampler(10)
    params = SamplingParams(seed=0)
    state = sampler.new_state(params, [], ())
    logits = np.zeros((2, 10), np.float32)
    for rows in ([2], [-1], [0, 1], []):
        with pytest.raises(ValueError, match="row"):
            sampler.sample(logits, rows, [state])
    with pytest.raises(ValueError, match="vocabulary"):
        sampler.sample(np.zeros((2, 11), np.float32), [0], [state])
    with pytest.raises(ValueError, match="vocabulary"):
        sampler.sample(logits, [0], [NativeSampler(11).new_state(params, [], ())])
    with pytest.raises(ValueError, match="vocabulary"):
        sampler.prompt_logprobs(logits, [0], [10], 1)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sampler.new_state(params, [], (10,))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        state.record(-1)
    with pytest.raises(ValueError, match="cannot forget"):
        state.rewind(1)
    with pytest.raises(ValueError, match="seed"):
        sampler.new_state(SamplingParams(), [], ())
    assert state.num_generated == 0


def test_logprob_of_a_certain_token_is_zero() -> None:
    logits = np.full((1, 300), -200.0, np.float32)
    logits[0, 42] = 0
    sampler = NativeSampler(300)
    (entry,) = sampler.prompt_logprobs(logits, [0], [42], 1)
    assert entry == (42, 0.0, 1, ((42, 0.0),))
    assert math.copysign(1, entry.logprob) == 1
