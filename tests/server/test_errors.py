"""What must be refused, and that it is refused in the one form clients read."""

import json
from typing import Any

import httpx
import pytest
from serve_fakes import VOCAB, ByteTokenizer, FakeEngine

from octavo.server.errors import ApiError


def error_of(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [""]}, "prompt[0]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt[0]"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [[1], [2, 10**20]]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"prompt": ["a"] * 600, "n": 2}, "n"),
        ({"prompt": ["a"] * 1000, "banned_token_ids": [1] * 2000}, "banned_token_ids"),
        ({"prompt": ["a"] * 8, "n": 100, "allowed_token_ids": [1] * 2000}, "allowed_token_ids"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ({"logit_bias": {"1": 1e300}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB], "min_tokens": 1}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"temperature": 999999}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "NaN"}, "temperature"),
        ({"temperature": "Infinity"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_n_sigma": -2}, "top_n_sigma"),
        ({"top_n_sigma": "1"}, "top_n_sigma"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"top_k": 0.01}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"stream": True, "n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"seed": 10**30}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logprobs": 10**9}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1000}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 512}, "max_tokens"),
        ({"max_tokens": 512, "stream": True}, "max_tokens"),
        ({"prompt": "x" * 512}, "prompt"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"tools": []}, "tools"),
        ({"foo": 1}, "foo"),
    ],
)
async def test_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a"} | body)
    error_of(response, 400, param)
    assert engine.streams == []
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_the_arithmetic_is_given(client: httpx.AsyncClient) -> None:
    body = {"prompt": "x" * 100, "max_tokens": 500}
    message = error_of(await client.post("/v1/completions", json=body), 400, "max_tokens")[
        "message"
    ]
    assert all(number in message for number in ("100", "500", "512"))


async def test_a_large_top_k_means_all(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a", "top_k": 10**9})
    assert response.status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_json_has_not(client: httpx.AsyncClient, number: str) -> None:
    response = await client.post(
        "/v1/completions",
        content=f'{{"prompt": "a", "temperature": {number}}}',
        headers={"content-type": "application/json"},
    )
    error_of(response, 400, "temperature")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_unknown_model(client: httpx.AsyncClient, path: str) -> None:
    body = {"model": "gpt-\U0001f600", "prompt": "a"}
    if "chat" in path:
        body = {"model": "gpt-4", "messages": [{"role": "user", "content": "a"}]}
    error_of(await client.post(path, json=body), 404, "model")
    error_of(await client.get("/v1/models/gpt-4"), 404, "model")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_too_long_a_body(make_client: Any, engine: FakeEngine, path: str) -> None:
    client = make_client(max_request_bytes=1000)

    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 100

    for content in (b"x" * 1001, chunks()):
        response = await client.post(
            path, content=content, headers={"content-type": "application/json"}
        )
        error_of(response, 413)
        assert response.headers["connection"] == "close"
    assert engine.submitted == []


async def test_ten_megabytes_in_one_message(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 10_000_000}]}
    error_of(await client.post("/v1/chat/completions", json=body), 413)
    body = {"messages": [{"role": "user", "content": "x" * 3_000_000}]}
    error_of(await client.post("/v1/chat/completions", json=body), 400, "messages")
    assert engine.submitted == []


async def test_not_json(client: httpx.AsyncClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        response = await client.post(
            "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind}
        )
        error_of(response, 415)
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        response = await client.post(
            "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind}
        )
        assert response.status_code == 200
        response = await client.post(
            "/v1/completions", content=b"{", headers={"content-type": kind}
        )
        error_of(response, 400)


async def test_no_such_place(client: httpx.AsyncClient) -> None:
    assert "no /v2 here; see /docs" in error_of(await client.get("/v2"), 404)["message"]
    error_of(await client.get("/v1/models/"), 404, "model")
    error_of(await client.post("/v1/models"), 405)
    response = await client.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(await client.request("BREW", "/v1/completions"), 405)


async def test_unexpected_errors_are_not_described(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: object) -> object:
        raise RuntimeError("at 0x7f00, in /home/me")

    monkeypatch.setattr(engine, "submit_all", broken)
    response = await client.post("/v1/completions", json={"prompt": "a"})
    error = error_of(response, 500)
    assert "/home" not in error["message"]


async def test_a_panic_is_an_error_object(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic of a library written in Rust is a `BaseException`."""

    class PanicException(BaseException):
        pass

    def panic(*_: object, **__: object) -> object:
        raise PanicException("called `Option::unwrap()` on a `None` value, /home/me/src/lib.rs:1")

    monkeypatch.setattr(ByteTokenizer, "encode", panic)
    for path in ("/v1/completions", "/tokenize"):
        response = await client.post(path, json={"prompt": "a"})
        error = error_of(response, 500)
        assert "/home" not in error["message"]
        assert "unwrap" not in error["message"]


def test_an_error_does_not_tell_addresses() -> None:
    error = ApiError(400, "<built-in method of str object at 0x7f00deadbeef> is no text")
    assert "0x7f" not in json.loads(error.body())["error"]["message"]


def test_an_error_body_is_always_json() -> None:
    error = ApiError(400, "half a character \ud800 " + "x" * 10_000, "\udfff")
    decoded = json.loads(error.body())["error"]
    assert len(decoded["message"]) < 3000
