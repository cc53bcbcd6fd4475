"""Keys with names: the file, who is who, and what a key may."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_fakes import FakeEngine, events

from octavo.scheduler.request import FinishReason, LatencyTarget, Outcome
from octavo.server.api_keys import ApiKey, in_effect, read_keys, unnamed
from octavo.server.config import ServeConfig
from patience import until

SECRET = "sk-very-secret"
MakeClient = Callable[..., httpx.AsyncClient]


def key(name: str, secret: str = "", **more: Any) -> ApiKey:
    return ApiKey(name=name, digest=hashlib.sha256((secret or name).encode()).digest(), **more)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def written(path: Path, *entries: dict[str, Any]) -> Path:
    file = path / "keys.json"
    file.write_text(json.dumps({"keys": entries}))
    return file


def test_a_file_of_keys(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"other").hexdigest()
    first, second = read_keys(
        written(
            tmp_path,
            {
                "key": SECRET,
                "name": "chat",
                "weight": 2,
                "priority": -1,
                "may_raise_priority": True,
                "max_requests_per_minute": 60,
                "max_tokens_per_minute": 100_000,
                "slo": {"ttft": 500, "tpot": 50},
            },
            {"sha256": digest, "name": "batch"},
        )
    )
    assert first == key(
        "chat",
        SECRET,
        weight=2.0,
        priority=-1,
        may_raise_priority=True,
        max_requests_per_minute=60,
        max_tokens_per_minute=100_000,
        target=LatencyTarget(0.5, 0.05, None),
    )
    assert second == key("batch", "other")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({}, "name is missing"),
        ({"name": "a"}, "a: give either key or sha256"),
        ({"name": "a", "key": SECRET, "sha256": "0" * 64}, "a: give either key or sha256"),
        ({"name": "a", "key": ""}, "a: key is not 1 or more visible ASCII characters"),
        ({"name": "a", "key": f" {SECRET}"}, "a: key is not 1 or more visible ASCII"),
        ({"name": "a", "key": "a\nb"}, "a: key is not 1 or more visible ASCII"),
        ({"name": "a", "key": "ключ"}, "a: key is not 1 or more visible ASCII"),
        ({"name": "a", "sha256": "12"}, "a: sha256 is not 64 hexadecimal digits"),
        ({"name": "a b", "key": SECRET}, "name 'a b' is not"),
        ({"name": "a", "key": SECRET, "weigth": 2}, "unknown field weigth"),
        ({"name": "a", "key": SECRET, "weight": 0}, "a: weight is 0.0, not above 0"),
        ({"name": "a", "key": SECRET, "max_tokens_per_minute": 0}, "max_tokens_per_minute is 0"),
        ({"name": "a", "key": SECRET, "priority": 2**31}, "a: priority is 2147483648"),
        (
            {"name": "a", "key": SECRET, "priority": "high"},
            "keys[0].priority: expected int, got str",
        ),
        ({"name": "a", "key": SECRET, "slo": {"ttft": 0}}, "keys[0].slo.ttft"),
        ({"name": "a", "key": SECRET, "slo": {"ttl": 1}}, "unknown field ttl"),
        ({"name": "a", "key": 5}, "keys[0].key"),
        ({"name": "a", "key": SECRET, "cache_salt": "a\0b"}, "a: cache_salt has a NUL"),
    ],
)
def test_bad_entries_are_refused_by_name(tmp_path: Path, entry: dict[str, Any], why: str) -> None:
    file = written(tmp_path, entry)
    with pytest.raises(ValueError, match=r"keys\.json: ") as error:
        read_keys(file)
    assert str(file) in str(error.value)
    assert why in str(error.value)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", '{"keys": []}', '{"keys": 1}', '{"a": 1, "a": 2}'])
def test_files_that_are_none(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"keys\.json: "):
        read_keys(file)


@pytest.mark.parametrize(
    ("policy", "told", "kept"),
    [
        ("fcfs", ["priority of a ", "weight of a, b "], (0, 1.0)),
        ("priority", ["weight of a, b "], (5, 1.0)),
        ("fair", ["priority of a "], (0, 3.0)),
        ("deadline", ["priority of a ", "weight of a, b "], (0, 1.0)),
    ],
)
def test_what_a_policy_does_not_look_at_is_said_and_left_out(
    policy: str, told: list[str], kept: tuple[int, float]
) -> None:
    keys = key("a", weight=3.0, priority=5), key("b", weight=2.0), key("c")
    (a, _, c), said = in_effect(keys, policy, Path("/etc/keys.json"))
    assert (a.priority, a.weight) == kept
    assert c == keys[2]
    assert [
        line.partition(": ")[2][: len(what)] for line, what in zip(said, told, strict=True)
    ] == (told)
    for line in said:
        assert line.startswith("/etc/keys.json: ")
        assert f"under --scheduling-policy {policy}; it has one under --scheduling-policy " in line


def test_salts_of_keys_and_bodies_do_not_meet() -> None:
    """Each pair of a key's salt and a body's gives another one, and without named keys nothing
    changes.
    """
    names = ("a", "b", "ab")
    keys = [key(name) for name in names] + [
        key(f"{name}.", cache_salt=name + "b") for name in names
    ]
    asked = (None, "a", "b", "ab", "b\n", "a:b", "chat")
    found = {
        (each.cache_salt or each.name, body): each.salted(body) for each in keys for body in asked
    }
    assert len(set(found.values())) == len(found)
    for open_key in unnamed(["x", "y"]):
        assert [open_key.salted(body) for body in asked] == list(asked)
    assert not {*found.values()} & {*asked}


def test_a_salt_outlives_the_key_and_the_server() -> None:
    """What is on disk is found again by who has the same name, or setting, and another key."""
    assert key("chat", "old").salted("x") == key("chat", "new").salted("x")
    assert key("a", cache_salt="team").salted(None) == key("b", cache_salt="team").salted(None)
    shared = ServeConfig(
        named_keys=(key("a"), key("b", cache_salt="x")), share_prefix_cache=True
    ).keys
    assert [each.salted(None) for each in shared] == [None, None]


def test_names_and_keys_are_distinct() -> None:
    with pytest.raises(ValueError, match="two keys have the name 'a'"):
        ServeConfig(named_keys=(key("a", "x"), key("a", "y")))
    with pytest.raises(ValueError, match="'key-1' and 'a' are the same key"):
        ServeConfig(api_key=("x",), named_keys=(key("a", "x"),))


def test_two_alike_in_a_file_are_refused_with_its_name(tmp_path: Path) -> None:
    file = written(tmp_path, {"name": "a", "key": "x"}, {"name": "a", "key": "y"})
    with pytest.raises(ValueError, match=r"keys\.json: two keys have the name 'a'"):
        read_keys(file)


def test_a_file_without_end_is_none() -> None:
    with pytest.raises(ValueError, match="/dev/zero: more than 67108864 bytes"):
        read_keys(Path("/dev/zero"))


@pytest.mark.parametrize("secret", ["", " a", "a\x00b", "ключ"])
def test_a_key_that_no_client_can_send_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="api_key is not 1 or more visible ASCII"):
        ServeConfig(api_key=(secret,))


async def test_who_asks(make_client: MakeClient, engine: FakeEngine) -> None:
    client = make_client(api_key=("plain",), named_keys=(key("chat", SECRET),))
    for secret in ("plain", SECRET):
        response = await client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=bearer(secret)
        )
        assert response.status_code == 200
        assert "x-ratelimit-limit-requests" not in response.headers  # it has no quota
    assert [request.scheduling.client for request in engine.submitted] == ["key-1", "chat"]
    for headers in ({}, bearer("chat"), {"authorization": SECRET}, bearer("")):
        assert (await client.get("/v1/models", headers=headers)).status_code == 401


async def test_a_key_is_nowhere_in_log_or_metrics(
    make_client: MakeClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(named_keys=(key("chat", SECRET, max_requests_per_minute=1),))
    answers = [
        await client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=bearer(SECRET)
        )
        for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 429]
    metrics = (await client.get("/metrics", headers=bearer(SECRET))).text
    everything = caplog.text + metrics + "".join(a.text + str(a.headers) for a in answers)
    assert 'client="chat"' in metrics
    assert SECRET not in everything
    assert hashlib.sha256(SECRET.encode()).hexdigest() not in everything


async def test_priority_is_a_default_and_a_bound(
    make_client: MakeClient, engine: FakeEngine
) -> None:
    client = make_client(
        named_keys=(key("low", priority=5), key("free", priority=5, may_raise_priority=True))
    )

    async def ask(name: str, **body: Any) -> httpx.Response:
        body = {"prompt": "a", "max_tokens": 1} | body
        return await client.post("/v1/completions", json=body, headers=bearer(name))

    assert (await ask("low")).status_code == 200
    assert (await ask("low", priority=9)).status_code == 200
    refused = await ask("low", priority=4)
    assert refused.status_code == 403
    assert refused.json()["error"]["param"] == "priority"
    assert refused.json()["error"]["type"] == "PermissionDeniedError"
    assert (await ask("free", priority=-3)).status_code == 200
    assert [request.scheduling.priority for request in engine.submitted] == [5, 9, -3]


async def test_targets_come_from_request_key_and_server(
    make_client: MakeClient, engine: FakeEngine
) -> None:
    client = make_client(
        slo=LatencyTarget(1.0, 0.1, None),
        named_keys=(key("fast", target=LatencyTarget(0.2, None, None)), key("any")),
    )
    for name, body in (
        ("any", {}),
        ("fast", {}),
        ("fast", {"slo": {"ttft": 50, "e2el": 3000}}),
        ("any", {"slo": {}}),
    ):
        body = {"prompt": "a", "max_tokens": 1} | body
        response = await client.post("/v1/completions", json=body, headers=bearer(name))
        assert response.status_code == 200
    assert [request.scheduling.target for request in engine.submitted] == [
        (1.0, 0.1, None),
        (0.2, 0.1, None),
        (0.05, 0.1, 3.0),
        (1.0, 0.1, None),
    ]
    await make_client().post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert engine.submitted[-1].scheduling.target is None


@pytest.mark.parametrize(
    ("slo", "param"),
    [
        ({"ttft": 0}, "slo.ttft"),
        ({"tpot": -1}, "slo.tpot"),
        ({"tpot": "50"}, "slo.tpot"),
        ({"e2el": 1e300}, "slo.e2el"),
        ({"itl": 5}, "slo"),
        (5, "slo"),
    ],
)
async def test_bad_targets_are_refused_by_name(
    client: httpx.AsyncClient, slo: Any, param: str
) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a", "slo": slo})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_quotas_over_http(make_client: MakeClient, engine: FakeEngine) -> None:
    """The buckets fill by one in six seconds, and ten a second: longer than this test takes, and
    as many tokens as the bounds allow for.
    """
    client = make_client(
        named_keys=(key("a", max_requests_per_minute=10, max_tokens_per_minute=600), key("b"))
    )

    async def ask(name: str = "a", **body: Any) -> httpx.Response:
        body = {"prompt": "x" * 100, "max_tokens": 50} | body
        return await client.post("/v1/completions", json=body, headers=bearer(name))

    first = await ask()
    assert first.headers["x-ratelimit-limit-requests"] == "10"
    assert first.headers["x-ratelimit-remaining-requests"] == "9"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert first.headers["x-ratelimit-limit-tokens"] == "600"
    assert 450 <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 510
    streamed = await ask(stream=True)
    assert events(streamed.text)
    assert streamed.headers["x-ratelimit-remaining-requests"] == "8"
    invalid = await ask(temperature=-1)
    assert invalid.status_code == 400
    assert invalid.headers["x-ratelimit-remaining-requests"] == "7"
    assert (await ask(prompt="x" * 200, max_tokens=1)).status_code == 200
    refused = await ask()
    assert refused.status_code == 429
    assert 0 < int(refused.headers["retry-after-ms"]) <= 10_000
    assert refused.headers["x-ratelimit-remaining-requests"] == "6"  # that is not charged
    assert refused.json()["error"]["type"] == "RateLimitError"
    assert (await ask("b")).status_code == 200  # a neighbour does not notice
    found = (await client.get("/metrics", headers=bearer("b"))).text
    assert 'admission_rejections_total{engine="0",model_name="tiny",reason="quota"} 1.0' in found
    of_client = 'octavo:client_requests_total{client="a",engine="0",model_name="tiny"'
    assert f'{of_client},outcome="rejected"}} 2.0' in found  # for the quota, and the invalid one
    assert f'{of_client},outcome="finished"}} 3.0' in found


async def test_what_was_shed_is_not_charged(make_client: MakeClient, engine: FakeEngine) -> None:
    engine.auto = False
    client = make_client(named_keys=(key("a", max_requests_per_minute=2),))
    for _ in range(3):
        task = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "a"}, headers=bearer("a"))
        )
        await until(lambda: engine.streams)
        engine.streams[0].end(FinishReason.SHED, Outcome.REJECTED)
        assert (await task).status_code == 429


async def test_what_the_server_promises_has_its_series_from_the_start(make_client: Any) -> None:
    """So that clients cannot take its place with promises they make up."""
    named = (key("a", target=LatencyTarget(ttft=0.5), priority=40), key("b"))
    client = make_client(named_keys=named, slo=LatencyTarget(ttft=2.0, tpot=0.05))
    page = (await client.get("/metrics", headers=bearer("b"))).text
    labels = 'engine="0",model_name="tiny",result="met",slo_class='
    for slo_class in ("ttft:500 tpot:50", "ttft:2000 tpot:50"):  # a key's limits come first
        assert f'octavo:slo_requests_total{{{labels}"{slo_class}"}} 0.0' in page
