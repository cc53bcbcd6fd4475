import math
from collections import Counter

import pytest

from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import Sampler, SamplerState
from octavo.sampling.scripted import ScriptedSampler, mix

SAMPLER = ScriptedSampler(50)


def tokens(sampler: Sampler, state: SamplerState, count: int) -> list[int]:
    return [sampler.sample(None, [0], [state]).token_ids[0] for _ in range(count)]


def test_tokens_depend_on_seed_choice_and_position_alone() -> None:
    params = SamplingParams(seed=3)
    state = SAMPLER.new_state(params, [1], ())
    first = tokens(SAMPLER, state, 100)
    assert first == tokens(SAMPLER, SAMPLER.new_state(params, [9, 9], ()), 100)
    state.rewind(60)
    assert tokens(SAMPLER, state, 60) == first[40:]
    fork = SAMPLER.new_state(params, [1], ()).fork(1)
    assert tokens(SAMPLER, fork, 100) != first
    assert fork.stream == SAMPLER.new_state(params, [1], (), 1).stream
    assert tokens(SAMPLER, SAMPLER.new_state(SamplingParams(seed=4), [1], ()), 100) != first
    states = [SAMPLER.new_state(params, [1], (), choice) for choice in range(3)]
    together = SAMPLER.sample(None, [0, 1, 2], states).token_ids
    apart = [tokens(SAMPLER, SAMPLER.new_state(params, [1], (), c), 1)[0] for c in range(3)]
    assert together == apart


def test_it_mixes_as_the_paper_does() -> None:
    assert [mix(0), mix(1)] == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]


def test_no_stop_token_unless_a_rate_is_given() -> None:
    stops = frozenset(range(49))
    state = SAMPLER.new_state(SamplingParams(seed=0), [1], stops)
    assert tokens(SAMPLER, state, 50) == [49] * 50
    with pytest.raises(ValueError, match="all 50"):
        SAMPLER.new_state(SamplingParams(seed=0), [1], range(50))


def test_stops_come_at_their_rate_and_not_before_min_tokens() -> None:
    sampler = ScriptedSampler(1000, stop_rate=0.25)
    state = sampler.new_state(SamplingParams(seed=1, min_tokens=500), [1], {7})
    drawn = tokens(sampler, state, 2500)
    assert 7 not in drawn[:500]
    assert 400 < Counter(drawn[500:])[7] < 600
    ignoring = sampler.new_state(SamplingParams(seed=1), [1], ())
    assert Counter(tokens(sampler, ignoring, 500))[7] < 20


def test_logprobs_are_uniform_and_only_for_who_asks() -> None:
    asking = SAMPLER.new_state(SamplingParams(seed=1, logprobs=2), [1], ())
    silent = SAMPLER.new_state(SamplingParams(seed=1), [1], ())
    assert SAMPLER.sample(None, [0], [silent]).logprobs is None
    logprobs = SAMPLER.sample(None, [0, 1], [asking, silent]).logprobs
    assert logprobs[1] is None
    assert logprobs[0] is not None
    assert logprobs[0].logprob == -math.log(50)
    assert logprobs[0].top == ((0, -math.log(50)), (1, -math.log(50)))
    (entry,) = SAMPLER.prompt_logprobs(None, [0], [4], 0)
    assert (entry.token_id, entry.logprob, entry.top) == (4, -math.log(50), ())


def test_rewinding_too_far_is_refused() -> None:
    state = SAMPLER.new_state(SamplingParams(seed=1), [1], ())
    with pytest.raises(ValueError, match="cannot forget"):
        state.rewind(1)


def test_verification_is_certain_of_the_script() -> None:
    script = tokens(SAMPLER, SAMPLER.new_state(SamplingParams(seed=5), [1], ()), 4)
    first, second = (SAMPLER.new_state(SamplingParams(seed=5, logprobs=0), [1], ()) for _ in "ab")
    p = SAMPLER.probabilities(None, [0], [first])
    assert p.shape == (1, 50)
    assert p[0].nonzero()[0].tolist() == script[:1]
    assert p[0, script[0]] == 1
    wrong = (script[1] + 1) % 50
    states = [first] * 4 + [second] * 4
    guesses = [*script[:3], -1, script[0], wrong, script[2], -1]
    drawn, logprobs, errors = SAMPLER.verify(None, range(8), states, guesses, [None] * 8)
    assert drawn == [*script, *script[:2], -1, -1]
    assert errors == {}
    assert [entry is None for entry in logprobs] == [token < 0 for token in drawn]
    assert (first.num_generated, second.num_generated) == (4, 2)


def test_what_is_coming_is_what_comes() -> None:
    sampler = ScriptedSampler(50, stop_rate=0.7)
    state = sampler.new_state(SamplingParams(seed=4, min_tokens=3), [1], [7])
    coming = sampler.coming(state, 12)
    drawn = [sampler.sample(None, [0], [state]).token_ids[0] for _ in range(12)]
    assert coming == drawn
    assert 7 in drawn[3:]
    assert 7 not in drawn[:3]


def test_drawing_ahead_is_drawing() -> None:
    for stops in ((), (7,)):
        ahead, apart = (
            [SAMPLER.new_state(SamplingParams(seed=seed), [1], stops) for seed in range(3)]
            for _ in "ab"
        )
        assert min(map(SAMPLER.draws_to_go, ahead)) > 80, "nothing ends them"
        for _ in range(2):
            drawn = SAMPLER.sample_ahead(ahead, 40)
            assert drawn.tolist() == [tokens(SAMPLER, state, 40) for state in apart]
        assert [state.num_generated for state in ahead] == [80] * 3
