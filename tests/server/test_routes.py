import logging
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from serve_fakes import ByteTokenizer, FakeEngine, served_model

import octavo
from octavo.engine.async_engine import AsyncEngine
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Request
from octavo.server.api_keys import ApiKey
from octavo.server.app import App
from octavo.server.config import ServeConfig
from octavo.server.model import public_name
from octavo.server.protocol import (
    LABELS,
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    ChatRequest,
    CompletionRequest,
)
from octavo.server.quota import Account
from octavo.server.routes import DOCS_ROUTES, ROUTES
from octavo.server.server import Server


async def test_models(client: httpx.AsyncClient) -> None:
    cards = (await client.get("/v1/models")).json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["tiny", "alias"]
    assert cards["data"][0]["max_model_len"] == 512
    assert (await client.get("/v1/models/tiny")).json() == cards["data"][0]


async def test_a_model_id_may_have_slashes(make_client: Any) -> None:
    client = make_client(model=served_model(names=("org/name",)))
    assert (await client.get("/v1/models/org/name")).json()["id"] == "org/name"


@pytest.mark.parametrize("argument", ["{0}/model.gguf", "{0}/folder", "{0}/folder/."])
def test_no_path_of_a_model_is_told(tmp_path: Path, argument: str) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "folder").mkdir()
    assert public_name(argument.format(tmp_path)) in ("model.gguf", "folder")


def test_a_link_to_a_model_has_the_name_of_the_link(tmp_path: Path) -> None:
    """By which it was asked for, wherever it leads."""
    (tmp_path / "blob-123").touch()
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blob-123")
    assert public_name(tmp_path / "model.gguf") == "model.gguf"


def test_a_name_that_is_no_path_is_told_as_it_is() -> None:
    for name in ("smollm2", "org/repo", "org/repo:Q4_K_M"):
        assert public_name(name) == name


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": octavo.__version__}


async def test_tokenize(make_client: Any) -> None:
    client = make_client(model=served_model(tokenizer=ByteTokenizer(add_bos=True)))

    async def post(path: str, **body: Any) -> Any:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    assert await post("/tokenize", prompt="hé") == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [256, 104, 195, 169],
        "token_strs": None,
    }
    plain = await post(
        "/tokenize", prompt="h", add_special_tokens=False, return_token_strs=True, model="tiny"
    )
    assert (plain["tokens"], plain["token_strs"]) == ([104], ["h"])
    assert (await post("/tokenize", prompt=""))["tokens"] == [256]
    messages = [{"role": "user", "content": "hi"}]
    chat = await post("/tokenize", messages=messages)
    assert bytes(chat["tokens"]) == b"user:hi\nassistant:"
    chat = await post("/tokenize", messages=messages, add_generation_prompt=False)
    assert bytes(chat["tokens"]) == b"user:hi\n"
    assert await post("/detokenize", tokens=[256, 104, 195, 169]) == {"prompt": "<bos>hé"}
    assert await post("/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "foo": 1}, "foo"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_tokenize_refusals(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_probes(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path in PROBES:
        assert (await client.get(path)).status_code == 200
    engine.draining = True
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/live")).status_code == 200
    response = await client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.headers["connection"] == "close"
    engine.draining = False
    engine.alive = False
    for path in PROBES:
        response = await client.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == 503


PROBES = [route.path for route in ROUTES if route.open]


async def test_keys(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(api_key=("first", "second"))
    closed = {route.path for route in (*ROUTES, *DOCS_ROUTES) if not route.open}
    for path in (*closed, "/v1/models/tiny", "/nothing"):
        for method in ("GET", "POST"):
            for key in (None, "Bearer", "Bearer ", "Bearer third", "Basic first", "first"):
                headers = {} if key is None else {"authorization": key}
                response = await client.request(method, path, headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == 401
                assert response.headers["www-authenticate"] == "Bearer"
    for key in ("first", "second"):
        headers = {"authorization": f"Bearer {key}"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert (await client.get("/nothing", headers=headers)).status_code == 404
    for path in PROBES:
        assert (await client.get(path)).status_code == 200


async def test_other_origins(make_client: Any) -> None:
    asking = {"origin": "http://a.example", "access-control-request-method": "POST"}
    closed = make_client()
    response = await closed.options("/v1/completions", headers=asking)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in response.headers
    opened = make_client(allowed_origins=("http://a.example",), api_key=("key",))
    response = await opened.options("/v1/completions", headers=asking)
    assert response.status_code == 200
    response = await opened.post("/v1/completions", headers=asking, json={})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "http://a.example"
    exposed = response.headers["access-control-expose-headers"].lower().split(", ")
    limited = ApiKey(name="k", digest=b"", max_requests_per_minute=1, max_tokens_per_minute=1)
    limits = {name.decode() for name, _ in Account(limited).headers()}
    assert limits | {"x-request-id", "retry-after"} <= set(exposed)
    response = await opened.get("/health", headers={"origin": "http://b.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("alive", "left", "said"),
    [
        (True, False, "all requests have ended"),
        (True, True, "timeout: the rest was aborted"),
        (False, True, "the engine is dead or hangs: what was left has failed"),
    ],
)
async def test_how_a_drain_ended(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, alive: bool, left: bool, said: str
) -> None:
    engine.auto = False
    if left:
        engine.submit_all(
            [Request(request_id="a", prompt_token_ids=[1], params=SamplingParams(max_tokens=5))]
        )
    engine.alive = alive
    with caplog.at_level(logging.INFO, "octavo.server"):
        app = App(cast(AsyncEngine, engine), served_model(), ServeConfig(shutdown_timeout=0.01))
        await Server(app.engine, app).drain()
    assert [record.getMessage() for record in caplog.records] == [said]


async def test_request_ids(client: httpx.AsyncClient) -> None:
    response = await client.get("/health", headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    first, second = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
    assert first != second
    for bad in ("", "a b", "x" * 200):
        response = await client.get("/health", headers={"x-request-id": bad})
        assert response.status_code == 400
        assert response.headers["x-request-id"] != bad


async def test_one_line_in_the_log(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "octavo.access"):
        await client.post(
            "/v1/completions",
            json={"prompt": "my secret", "max_tokens": 2, "user": "me"},
            headers={"x-request-id": "mine"},
        )
        await client.get("/health")
        await client.get("/a%0Ab")
    first, labels, probe, other = [record.getMessage() for record in caplog.records]
    assert first.startswith("POST /v1/completions 200 id=mine answer=cmpl-")
    assert "prompt=9 cached=0 completion=2 outcome=finished" in first
    assert labels == "id=mine labels={'user': 'me'}"
    assert probe.startswith("GET /health 200")
    assert "\n" not in other
    assert "secret" not in caplog.text


async def test_docs(make_client: Any) -> None:
    client = make_client(root_path="/llm")
    document = (await client.get("/openapi.json")).json()
    assert document["servers"] == [{"url": "/llm"}]
    described = set(document["paths"])
    assert described >= {"/v1/completions", "/v1/chat/completions", "/tokenize", "/metrics"}
    schemas = document["components"]["schemas"]
    assert "Slo" in schemas  # generated clients have a class of this name
    fields = schemas["ChatRequest"]["properties"]
    page = (await client.get("/docs")).text
    assert "<script" not in page
    for name in (*fields, *LABELS, *NEUTRAL_CHAT, "limit (query)"):
        assert name in page
    closed = make_client(docs=False)
    assert (await closed.get("/docs")).status_code == 404


def test_a_field_has_one_meaning() -> None:
    for request, neutral in (
        (CompletionRequest, NEUTRAL_COMPLETION),
        (ChatRequest, NEUTRAL_CHAT),
    ):
        fields = set(request.__struct_fields__)
        assert not fields & set(neutral)
        assert fields >= set(LABELS)


@pytest.mark.parametrize(
    "bad",
    [
        {"port": 70000},
        {"max_request_bytes": 0},
        {"api_key": ("",)},
        {"api_key": ("ключ",)},
        {"root_path": "llm"},
        {"log_level": "loud"},
        {"stream_write_timeout": 0},
        {"shutdown_timeout": -1},
        {"served_model_name": ("",)},
        {"allow_credentials": True, "allowed_origins": ("*",)},
    ],
)
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ServeConfig(**bad)
