"""Bodies are counted before they are decoded: what is refused so, and that nothing else is."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.body import decode_object
from octavo.server.counting import check_counts
from octavo.server.errors import ApiError
from octavo.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, read

MANY = 70_000
KEYS = {str(key): 0 for key in range(MANY)}
PAD = " " * (16 << 10)


@pytest.mark.parametrize(
    ("fields", "to", "says", "param"),
    [
        (KEYS, CompletionRequest, "the request has 70001 fields, more than 256", None),
        ({"logit_bias": KEYS}, CompletionRequest, "70000 entries, more than 4096", "logit_bias"),
        ({"stop": ["x"] * MANY}, ChatRequest, "70000 entries, more than 32", "stop"),
        ({"metadata": KEYS}, ChatRequest, "70000 entries, more than 16", "metadata"),
        ({"stop_token_ids": [1] * MANY}, ChatRequest, "more than 4096", "stop_token_ids"),
        ({"prompt": [1] * MANY}, CompletionRequest, "70000 entries, more than 65536", "prompt"),
        ({"prompt": [[1] * 1050] * 1000}, CompletionRequest, "more than 1048576", "prompt"),
        ({"messages": [{"role": "a"}] * MANY}, ChatRequest, "more than 65536", "messages"),
        ({"messages": [KEYS]}, ChatRequest, "more than 65536", "messages"),
        ({"chat_template_kwargs": {"a": [KEYS]}}, ChatRequest, "4096", "chat_template_kwargs"),
        ({"tokens": [1] * MANY}, DetokenizeRequest, "more than 65536", "tokens"),
        ({"nonsense": [[1]] * MANY}, CompletionRequest, "more than 4096", "nonsense"),
    ],
)
def test_what_no_model_could_use_is_not_decoded(
    fields: Any, to: Any, says: str, param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.server.protocol.decode_object", lambda _: pytest.fail("decoded"))
    with pytest.raises(ApiError, match=says) as raised:
        read(json.dumps({"seed": 1} | fields).encode(), to, 512)
    assert raised.value.status == 400
    assert raised.value.param == param


@pytest.mark.parametrize("deep", ["[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65])
def test_what_is_nested_too_deeply(deep: str) -> None:
    with pytest.raises(ApiError, match="nested too deeply"):
        check_counts((PAD + '{"a": %s}' % (deep + ",[]" * 99)).encode(), {"a": 9}, 9, 9)


def test_text_is_not_counted() -> None:
    """However it is written: what looks like structure in it is none."""
    text = '{"a": [1, 2, {"b": "\\\\" }]}, \\"' * 3000
    for ascii_only in (False, True):
        body = json.dumps({"prompt": text, "stop": ["a"]}, ensure_ascii=ascii_only).encode()
        assert read(body, CompletionRequest, 512).prompt == text


VALUES = st.recursive(
    st.none() | st.integers() | st.text('"\\\\{}[],:a'),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\\\{,a'), inner, max_size=4)
    ),
    max_leaves=25,
)


def values_in(value: object) -> int:
    """Count the lists and maps in a field, and the commas between what they have."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + sum(map(values_in, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(values_in, value))
    return 0


@given(st.dictionaries(st.sampled_from("abc"), VALUES), st.integers(0, 12), st.integers(0, 12))
def test_counts_are_right(fields: dict[str, object], of_a: int, others: int) -> None:
    limits = {"a": of_a}
    over = [values_in(value) > limits.get(name, others) for name, value in fields.items()]
    body = PAD + json.dumps(fields)
    if any(over):
        with pytest.raises(ApiError):
            check_counts(body.encode(), limits, others, 1000)
    else:
        check_counts(body.encode(), limits, others, 1000)


@given(st.binary(max_size=60) | st.text('{}[],:"\\\\1 ').map(str.encode))
def test_what_is_no_json_is_left_to_the_decoder(junk: bytes) -> None:
    body = PAD.encode() + junk
    with suppress(ApiError):
        check_counts(body, {"a": 1}, 1, 1)
    with suppress(ApiError):
        decode_object(body)
