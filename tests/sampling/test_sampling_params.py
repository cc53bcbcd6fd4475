"""What `SamplingParams.validated` refuses, by name, and what it lets through unchanged."""

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling.params import InvalidParameter, SamplingParams

VOCAB = 1000
NOT_FINITE = [math.nan, math.inf, -math.inf]
NOT_A_NUMBER = ["1", "NaN", None, True, [1], 1j]
NOT_AN_INTEGER = [*NOT_FINITE, 0.01, 1.0, "1", True, [1]]


def refused(field: str, value: Any, **others: Any) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value}, **others).validated(VOCAB)
    return caught.value


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 129, 10**30, None, *NOT_AN_INTEGER]),
        ("max_tokens", [0, -1, 2**31, *NOT_AN_INTEGER]),
        ("min_tokens", [-1, 17, None, *NOT_AN_INTEGER]),
        ("temperature", [-0.1, 100.1, 999999, 10**400, *NOT_FINITE, *NOT_A_NUMBER]),
        ("top_k", [-2, 0.01, None, *NOT_AN_INTEGER]),
        ("top_p", [-1, 0, 0.0, 1.01, *NOT_FINITE, *NOT_A_NUMBER]),
        ("min_p", [-0.01, 1.01, *NOT_FINITE, *NOT_A_NUMBER]),
        ("top_n_sigma", [-0.5, -1.01, -2, -1e-9, 1000.5, 10**400, *NOT_FINITE, *NOT_A_NUMBER]),
        ("presence_penalty", [-2.1, 2.1, *NOT_FINITE, *NOT_A_NUMBER]),
        ("frequency_penalty", [-2.1, 2.1, *NOT_FINITE, *NOT_A_NUMBER]),
        ("repetition_penalty", [0, 0.0, -1, 1e-300, 100.5, *NOT_FINITE, *NOT_A_NUMBER]),
        ("logit_bias", [{VOCAB: 1.0}, {-1: 1.0}, {"5": 1.0}, {True: 1.0}, {1.0: 1.0}]),
        ("logit_bias", [{5: 100.5}, {5: -101}, {5: "1"}, {5: None}, *({5: x} for x in NOT_FINITE)]),
        ("logit_bias", [None, [1], dict.fromkeys(range(4097), 0.5)]),
        ("allowed_token_ids", [(), (VOCAB,), (-1,), (1.0,), (True,), "12", 5]),
        ("banned_token_ids", [(VOCAB,), (-1,), tuple(range(VOCAB)), None, 5]),
        ("stop_token_ids", [(VOCAB,), (-1,), ("1",), None, 5]),
        ("seed", [2**63, -(2**63) - 1, *NOT_AN_INTEGER]),
        ("stop", ["", ("",), ("a", ""), (5,), ("x" * 257,), ("x",) * 33, None, 5]),
        ("include_stop_str_in_output", [0, 1, "true", None]),
        ("ignore_eos", [0, 1, "true", None]),
        ("skip_special_tokens", [0, 1, "true", None]),
        ("logprobs", [-1, 21, 10**9, *NOT_AN_INTEGER]),
        ("prompt_logprobs", [-1, 21, 10**9, *NOT_AN_INTEGER]),
    ],
)
def test_refused_by_name_with_what_is_allowed(field: str, values: list[Any]) -> None:
    for value in values:
        error = refused(field, value)
        assert error.param == field
        assert str(error).startswith(f"{field} ")
        assert len(str(error)) < 300


def test_the_message_names_the_field_the_value_and_the_range() -> None:
    assert str(refused("temperature", 999999)) == (
        "temperature is 999999; it must be a number from 0 to 100"
    )
    assert str(refused("top_p", -1)) == "top_p is -1; it must be a number above 0, up to 1"
    assert str(refused("top_n_sigma", -2)) == (
        "top_n_sigma is -2; it must be a number from 0 to 1000, or -1"
    )
    assert str(refused("top_k", 0.01)) == "top_k is 0.01; it must be an integer from -1"
    assert str(refused("stop_token_ids", (3, VOCAB))) == (
        "stop_token_ids contains 1000; it may contain token ids from 0 to 999"
    )
    assert "more than max_tokens, 16" in str(refused("min_tokens", 17))
    assert "leaves none" in str(refused("allowed_token_ids", (1, 2), banned_token_ids=(2, 1)))


def test_a_number_too_long_to_write_is_refused_all_the_same() -> None:
    assert refused("n", 10**5000).param == "n"
    assert refused("temperature", 10**5000).param == "temperature"


def test_defaults_and_limits_are_accepted() -> None:
    assert SamplingParams().validated(VOCAB) == SamplingParams()
    at_the_limits = SamplingParams(
        n=128,
        max_tokens=None,
        min_tokens=10**6,
        temperature=100,
        top_k=VOCAB - 1,
        top_p=1e-9,
        min_p=1,
        top_n_sigma=1000,
        presence_penalty=-2,
        frequency_penalty=2.0,
        repetition_penalty=0.01,
        logit_bias={0: -100, VOCAB - 1: 100.0},
        allowed_token_ids=(0, VOCAB - 1),
        banned_token_ids=(0,),
        seed=-(2**63),
        stop=("x" * 256,) * 32,
        stop_token_ids=(VOCAB - 1,),
        logprobs=20,
        prompt_logprobs=0,
    )
    assert at_the_limits.validated(VOCAB) == at_the_limits


def test_lists_become_tuples_and_a_single_stop_string_a_list() -> None:
    params = SamplingParams(
        stop="END",  # type: ignore[arg-type]
        stop_token_ids=[5, 6],  # type: ignore[arg-type]
        banned_token_ids=[1],  # type: ignore[arg-type]
    ).validated(VOCAB)
    assert params.stop == ("END",)
    assert params.stop_token_ids == (5, 6)
    assert params.banned_token_ids == (1,)


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 10**30])
def test_every_way_to_say_all_is_top_k_0(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).validated(VOCAB).top_k == 0


@pytest.mark.parametrize("top_n_sigma", [-1, -1.0, 0, -0.0])
def test_every_way_to_say_all_is_top_n_sigma_0(top_n_sigma: float) -> None:
    assert SamplingParams().top_n_sigma == 0
    assert SamplingParams(top_n_sigma=top_n_sigma).validated(VOCAB) == SamplingParams()


def test_the_cap_of_logprobs_is_the_servers() -> None:
    SamplingParams(logprobs=100).validated(VOCAB, max_logprobs=100)
    with pytest.raises(InvalidParameter, match="from 0 to 5"):
        SamplingParams(logprobs=6).validated(VOCAB, max_logprobs=5)


anything = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary()
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=3)), inner, max_size=4),
    ),
    max_leaves=6,
)


@given(field=st.sampled_from([field.name for field in fields(SamplingParams)]), value=anything)
def test_anything_is_accepted_or_refused_by_name(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    culprit = None
    try:
        params = params.validated(VOCAB)
    except InvalidParameter as error:
        culprit = error.param
    assert culprit in (None, field)
    if culprit is None:
        assert params.validated(VOCAB) == params


def test_ending_ids() -> None:
    assert SamplingParams(stop_token_ids=(5,)).ending_ids([1, 2]) == {1, 2, 5}
    assert SamplingParams(stop_token_ids=(5,), ignore_eos=True).ending_ids([1, 2]) == {5}


def test_they_are_given_by_name_and_do_not_change() -> None:
    with pytest.raises(TypeError):
        SamplingParams(0.5)
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 0.5
