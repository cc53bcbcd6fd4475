"""The native sampler's options, and that the property tests and the documentation have each."""

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings

from engine.test_same_bits import drawn_params
from octavo import _native
from octavo.sampling.params import SamplingParams, parameters
from paths import ROOT
from sampling.test_sampler import draws_params

NATIVE = {name for name, row in parameters().items() if row.native}
OPTIONS: dict[str, Any] = {
    name: getattr(SamplingParams(), name)
    for name in sorted(NATIVE - {"logit_bias", "logprobs", "seed"})
} | {"logit_bias": [], "logprobs": -1, "seed": 0, "choice": 0}


def state(options: dict[str, Any]) -> _native.SamplerState:
    return _native.SamplerState(vocab_size=9, prompt_token_ids=(), **options)


def test_every_option_is_given_and_no_other() -> None:
    assert state(OPTIONS).num_generated == 0
    for name in OPTIONS:
        fewer = {each: value for each, value in OPTIONS.items() if each != name}
        with pytest.raises(TypeError, match=f"the option {name} is missing"):
            state(fewer)
    with pytest.raises(TypeError, match="there is no option top_q"):
        state(OPTIONS | {"top_q": 1.0})


@pytest.mark.parametrize("name", OPTIONS)
def test_values_of_the_wrong_type_are_refused_by_name(name: str) -> None:
    wrong: tuple[object, ...] = ("x", object(), {"a": 1})
    for value in wrong if name == "allowed_token_ids" else (*wrong, None):
        with pytest.raises(TypeError, match=re.escape(f"the option {name} is {value!r}")):
            state(OPTIONS | {name: value})


@pytest.mark.parametrize("name", ["top_k", "min_tokens", "logprobs", "seed", "choice"])
def test_integers_are_whole_and_in_range(name: str) -> None:
    for value in (1.5, 2**63):
        with pytest.raises(TypeError, match=f"the option {name} is "):
            state(OPTIONS | {name: value})


def said(params: SamplingParams) -> set[str]:
    """The native parameters that are not at their defaults."""
    default = SamplingParams()
    return {name for name in NATIVE if getattr(params, name) != getattr(default, name)}


def test_drawn_params_draws_every_option() -> None:
    rng = random.Random(0)
    assert set().union(*(said(drawn_params(rng, 300, False)) for _ in range(200))) == NATIVE


def test_draws_params_draws_every_option() -> None:
    found: set[str] = set()

    @settings(max_examples=200, derandomize=True, database=None)
    @given(params=draws_params(300))
    def note(params: SamplingParams) -> None:
        found.update(said(params))

    note()
    # Those who draw give the stop tokens to the state, and logprobs have tests of their own.
    assert found == NATIVE - {"stop_token_ids", "logprobs"}


def test_the_documentation_names_every_option() -> None:
    serving = (ROOT / "docs/serving.md").read_text()
    assert [name for name in NATIVE if f"`{name}`" not in serving] == []
