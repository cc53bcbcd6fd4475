import asyncio
import gzip
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_fakes import served_model
from starlette.types import Message

from octavo.server.body import Bodies, decode_object
from octavo.server.errors import ApiError, ClientGone
from octavo.server.protocol import ChatRequest, CompletionRequest, parse

JSON_HEAD = {b"content-type": b"application/json"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": NaN}', "a is nan"),
        (b'{"a": [1, Infinity]}', "a[1] is inf"),
        (b'{"a": {"b": -Infinity}}', "a.b is -inf"),
        (b'{"a": 1e999}', "a is inf"),
        (b'{"a": -1E+400}', "a is -inf"),
        (b'{"a": ' + b"9" * 400 + b".0}", "a is inf"),
        (b"NaN", "the body is nan"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number in the body has 5000 digits, more than 1000"),
        (b'{"a": 0.' + b"9" * 5000 + b"}", "a number in the body has 5002 digits"),
        (b'{"a": 1, "a": 1}', "'a' is given twice"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' is given twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"a": ["\\ud800"]}', "a[0] has half a surrogate pair"),
        (b'{"\\udfff": 1}', "half a surrogate pair"),
        (b'{"a": "\\ud800\\u0041"}', "half a surrogate pair"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": "tab\there"}', "not valid JSON"),
    ],
)
def test_refused(body: bytes, says: str) -> None:
    with pytest.raises(ApiError) as raised:
        decode_object(body)
    assert raised.value.status == 400
    assert says in raised.value.message


async def test_a_body_without_end_is_not_read_for_ever() -> None:
    """What is beyond the limit is the connection's to read away."""
    read = 0

    async def receive() -> Message:
        nonlocal read
        read += 100
        assert read <= 300
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    with pytest.raises(ApiError) as raised:
        async with Bodies(200).read(JSON_HEAD, receive):
            raise AssertionError
    assert raised.value.status == 413


async def test_a_drain_comes_just_as_the_time_of_a_body_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.server.body._TIMEOUT", 0.01)
    bodies = Bodies(100)

    async def receive() -> Message:
        try:
            return await asyncio.Future()
        finally:  # the time is over, and what it cancels has not ended yet
            bodies.drain()

    with pytest.raises(ApiError) as raised:
        async with bodies.read(JSON_HEAD, receive):
            raise AssertionError
    assert raised.value.status == 503


class Slow:
    """A body of which the test says what has come."""

    def __init__(self) -> None:
        self._come: asyncio.Queue[Message] = asyncio.Queue()

    def come(self, size: int, *, more: bool = True) -> None:
        self._come.put_nowait({"type": "http.request", "body": bytes(size), "more_body": more})

    def leave(self) -> None:
        self._come.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Message:
        return await self._come.get()


async def test_all_bodies_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts what has come of them until they are worked on, however each ends."""
    monkeypatch.setattr("octavo.server.body._IN_FLIGHT", 1000)
    monkeypatch.setattr("octavo.server.body.SMALL", 0)  # more than that has another room
    bodies, done = Bodies(300), asyncio.Event()

    async def read(slow: Slow, announced: int = 300) -> int:
        head = JSON_HEAD | {b"content-length": b"%d" % announced}
        async with bodies.read(head, slow.receive) as body:
            await done.wait()
            return len(body)

    slows = [Slow() for _ in range(5)]
    tasks = [asyncio.create_task(read(slow)) for slow in slows]
    await asyncio.sleep(0)
    assert bodies.free == 1000  # announced alone is nothing
    for slow in slows[:4]:
        slow.come(240)
    await asyncio.sleep(0)
    assert bodies.free == 40
    with pytest.raises(ApiError, match="too many bytes"):  # before anything of it is read
        await read(Slow(), announced=41)
    slows[4].come(41)
    with pytest.raises(ApiError, match="too many bytes"):
        await tasks[4]
    slows[0].come(61)  # beyond its own limit
    slows[1].leave()
    slows[2].come(10, more=False)
    with pytest.raises(ClientGone):
        await tasks[1]
    with pytest.raises(ApiError, match="longer than 300 bytes"):
        await tasks[0]
    tasks[3].cancel()
    done.set()
    assert await tasks[2] == 250
    with suppress(asyncio.CancelledError):
        await tasks[3]
    assert bodies.free == 1000


def test_accepted() -> None:
    body = b'{"text": "\\ud83d\\ude00 \\u0000 \\\\ud800 NaN 1e999", "n": 1.5, "deep": [[[[{}]]]]}'
    assert decode_object(body) == {
        "text": "\U0001f600 \0 \\ud800 NaN 1e999",
        "n": 1.5,
        "deep": [[[[{}]]]],
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": ["a", [1], {}]}, "prompt[2]"),
        ({"prompt": [[1], True]}, "prompt[1]"),
        ({"prompt": "a", "temperature": "0"}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "top_k": 0.01}, "top_k"),
        ({"prompt": "a", "n": "1"}, "n"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "stop": [1]}, "stop[0]"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logit_bias": {"1": "a"}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": []}, "logit_bias"),
        ({"prompt": "a", "stream_options": {"foo": 1}}, "stream_options"),
        ({"prompt": "a", "stream_options": True}, "stream_options"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "a\0b"}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "\0\n"}, "cache_salt"),
        ({"prompt": "a", "priority": 2**40}, "priority"),
        ({"prompt": "a", "user": "x" * 600}, "user"),
        ({"prompt": "a", "metadata": {"k": 1}}, "metadata"),
        ({"prompt": "a", "nonsense": None}, "nonsense"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "suffix": "x"}, "suffix"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "store": 0}, "store"),
    ],
)
def test_completion_fields_are_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse(fields, CompletionRequest)
    assert raised.value.status == 400
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": "a"}, "prompt"),
        ({"logprobs": 1}, "logprobs"),
        ({"messages": {}}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
    ],
)
def test_chat_fields_are_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse({"messages": []} | fields, ChatRequest)
    assert raised.value.status == 400
    assert raised.value.param == param


def test_what_asks_for_nothing_is_accepted() -> None:
    request = parse(
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": None,
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "store": False,
            "modalities": ["text"],
            "user": "me",
            "metadata": {"k": "v"},
            "n": None,
            "temperature": 0,
        },
        ChatRequest,
    )
    assert request.temperature == 0.0
    assert request.user == "me"


def test_conversion_of_deep_values_is_bounded() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ApiError):
        parse({"prompt": deep}, CompletionRequest)


def python_calls(body: bytes) -> int:
    """How many functions in Python are called while ``body`` is decoded: at each of them another
    thread can have its turn.
    """
    calls = 0

    def note(frame: object, event: str, of: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        with suppress(ApiError):
            decode_object(body)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("item", [b"123,", b"1.5,", b"[],", b'"",', b"{},", b'{"a":[]},'])
def test_other_threads_go_on_while_many_values_are_decoded(item: bytes) -> None:
    body = b'{"a": [' + item * 100_000 + b"1]}"
    assert python_calls(body) > 50_000  # decoded at once it would be some few


def test_a_long_text_costs_no_more_than_to_decode_it() -> None:
    """By CPU time, of which a regular expression over the text takes fifteen times as much."""
    body = json.dumps({"a": "x \n" * (1 << 20)}).encode()

    def cost(decode: Callable[[bytes], object]) -> float:
        def once() -> float:
            start = time.thread_time()
            decode(body)
            return time.thread_time() - start

        return min(once() for _ in range(5))

    assert cost(decode_object) < 4 * cost(json.loads)


@pytest.mark.parametrize("item", ["[]", "{}", "[{}]"])
def test_lists_and_objects_have_a_bound(item: str) -> None:
    each = item.count("[") + item.count("{")
    fits = "[" + ",".join([item] * ((1 << 16) // each - 2)) + "]"
    assert decode_object(b'{"a": %b}' % fits.encode())
    with pytest.raises(ApiError, match="more than 65536 lists and objects"):
        decode_object(b'{"a": [%b,%b]}' % (fits.encode(), fits.encode()))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON), st.booleans(), st.sampled_from([-1, 1 << 16]))
def test_what_is_json_is_read_as_json_reads_it(
    value: dict[str, object], escaped: bool, at_once: int
) -> None:
    """By the scanner in C and by that in Python."""
    body = json.dumps(value, ensure_ascii=escaped).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.server.body._AT_ONCE", at_once)
        assert decode_object(body) == value


@pytest.mark.parametrize("encoding", ["gzip", "br, identity", "identity, gzip", "ÿ", "identityx"])
async def test_an_encoded_body_is_refused(client: httpx.AsyncClient, encoding: str) -> None:
    """Also where the body is plain: what the head says and what came must not be two things."""
    headers = {"content-type": "application/json", "content-encoding": encoding.encode("latin-1")}
    for content in (gzip.compress(b'{"prompt": "a"}'), b'{"prompt": "a"}'):
        refused = await client.post("/v1/completions", content=content, headers=headers)
        assert refused.status_code == 415
        assert refused.headers["accept-encoding"] == "identity"
        assert f"Content-Encoding: {encoding}" in refused.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["identity", "Identity", "", "identity, identity"])
async def test_a_body_as_it_is(client: httpx.AsyncClient, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("name", "values", "status"),
    [
        ("content-encoding", ["gzip", "identity"], 415),
        ("content-type", ["application/json", "text/plain"], 415),
        ("content-type", ["text/plain", "application/json"], 415),
        ("content-type", ["application/json; charset=utf-8", "text/plain"], 415),
        ("content-type", ["application/json; charset=utf-8"], 200),
        ("x-request-id", ["a", "b"], 400),
    ],
)
async def test_a_field_given_twice(
    client: httpx.AsyncClient, name: str, values: list[str], status: int
) -> None:
    """No value is passed over because another came behind it."""
    headers = [(name, value) for value in values]
    if name != "content-type":
        headers.append(("content-type", "application/json"))
    answer = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == status


MANY = {str(key): 0.0 for key in range(70_000)}


@pytest.mark.parametrize(
    ("route", "field", "value", "param"),
    [
        ("/v1/completions", "prompt", [0] * 70_000, "prompt"),
        ("/v1/completions", "prompt", [[1], [0] * 70_000], "prompt[1]"),
        ("/v1/completions", "prompt", ["a"] * 70_000, "prompt"),
        ("/v1/completions", "stop_token_ids", [0] * 70_000, "stop_token_ids"),
        ("/v1/chat/completions", "allowed_token_ids", [0] * 70_000, "allowed_token_ids"),
        ("/detokenize", "tokens", [0] * 70_000, "tokens"),
        ("/v1/chat/completions", "chat_template_kwargs", MANY, "chat_template_kwargs"),
    ],
)
async def test_a_list_longer_than_anything_is_not_walked(
    make_client: Callable[..., httpx.AsyncClient],
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    field: str,
    value: object,
    param: str,
) -> None:
    """But one that fits into a large context is."""
    monkeypatch.setattr("octavo.server.protocol.convert", lambda *_: pytest.fail("walked"))
    refused = await make_client().post(route, json={field: value})
    assert refused.status_code == 400
    error = refused.json()["error"]
    most = 4096 if field in ("stop_token_ids", "chat_template_kwargs") else 65536
    if isinstance(value, list) and not isinstance(value[-1], list):
        assert error["message"] == f"{param} has 70000 entries, more than {most}"
    assert error["param"] == param
    monkeypatch.undo()
    client = make_client(model=served_model(max_model_len=80_000))
    answer = await client.post(route, json={field: value})
    assert "entries" not in answer.text or most == 4096


def test_nothing_in_a_list_is_taken_for_a_list() -> None:
    with pytest.raises(ApiError, match=r"prompt\[0\]"):
        parse({"prompt": [[[1]]]}, CompletionRequest)
    with pytest.raises(ApiError, match=r"^prompt\[1\]\[2\]: expected int, got float$"):
        parse({"prompt": [[1], [1, 2, 3.5]]}, CompletionRequest)
    deep: list[object] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(ApiError):
        parse({"prompt": deep}, CompletionRequest)


def test_no_call_checks_more_than_one_long_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: a call is into C, and nobody else runs until it ends."""
    called = []

    def counted(value: Any, to: Any) -> Any:
        called.append(len(value))
        return converts(value, to)

    converts = msgspec.convert
    monkeypatch.setattr("octavo.server.body.msgspec.convert", counted)
    prompts = [[0] * 40_000] * 30
    assert parse({"prompt": prompts}, CompletionRequest).prompt == prompts
    assert called == [1, *[40_000] * 30]
    converts({"prompt": [[object()]]}, CompletionRequest)  # that first one does not look into them


def test_a_map_longer_than_any_is_not_walked() -> None:
    """Told by its length, before what is in it is looked at."""
    for key, entry in (("a", {}), (1, 0.0)):
        bias = {**{str(each): 0.0 for each in range(4096)}, key: entry}
        with pytest.raises(ApiError, match="logit_bias: expected object of length <= 4096"):
            parse({"prompt": "a", "logit_bias": bias}, CompletionRequest)
    messages = [{str(key): 0 for key in range(700)} for _ in range(100)]
    with pytest.raises(ApiError, match="messages has 70100 entries, more than 65536"):
        parse({"messages": messages}, ChatRequest)
