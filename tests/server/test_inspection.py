"""GET /requests: what it tells of each request, what it never tells, and whom it answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Any

import httpx
import pytest
from serving import PacedExecutor, listening, real_engine, served_model, serving, started

from faults import patch
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.snapshot import EngineSnapshot, PoolSnapshot, snapshot
from octavo.engine.stream import EngineDead
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import LatencyTarget, Request, RequestSnapshot, SchedulingParams
from octavo.server.app import App
from octavo.server.config import ServeConfig
from patience import Leave, until
from scheduling import SAMPLES

SECRET = "nobody else may read this"


def request(name: str, prompt: int = 8, tokens: int = 400, **more: Any) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, n=more.pop("n", 1), seed=1)
    ids = [(index * 7 + len(name)) % 200 for index in range(prompt)]
    return Request(
        request_id=name, prompt_token_ids=ids, params=params, scheduling=SchedulingParams(**more)
    )


@asynccontextmanager
async def asked(
    engine: AsyncEngine, key: str | None = None, **config: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = App(engine, served_model(), ServeConfig(**config))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", headers=headers
    ) as client:
        yield client


def manual(**settings: Any) -> tuple[Any, PacedExecutor]:
    """An engine that only the test steps."""
    engine, executor = real_engine(**settings)
    return engine.engine, executor


def test_states_and_figures() -> None:
    engine, _ = manual(max_num_seqs=2, max_num_batched_tokens=16)
    engine.add_request(request("first", 8, tokens=50, client="ann", n=1))
    for _ in range(4):
        engine.step()
    engine.add_request(request("second", 40, client="bob"))
    engine.step()
    engine.add_request(request("third", 12))
    seen = snapshot(engine, 10)
    rows = {row.id: row for row in seen.requests}
    assert [row.id for row in seen.requests] == ["first", "second", "third"]
    assert [row.state for row in seen.requests] == ["decode", "prefill", "waiting"]
    assert [row.client for row in seen.requests] == ["ann", "bob", ""]
    assert rows["first"].output_tokens == 5
    assert (rows["first"].prompt_tokens_done, rows["first"].prompt_tokens) == (8, 8)
    assert (rows["second"].prompt_tokens_done, rows["second"].prompt_tokens) == (15, 40)
    assert (rows["third"].prompt_tokens_done, rows["third"].prompt_tokens) == (0, 12)
    assert rows["first"].ttft is not None
    assert rows["first"].ttft <= rows["first"].age
    record = engine.scheduler.decoding[0].owner
    seconds = record.last_token - record.first_token
    assert rows["first"].tokens_per_second == pytest.approx(4 / seconds)
    assert rows["second"].ttft is None
    assert rows["second"].tokens_per_second is None
    assert rows["second"].queue_time is not None
    assert rows["third"].queue_time is None
    assert (seen.running, seen.waiting, seen.waiting_tokens, seen.unlisted) == (2, 1, 12, 0)
    assert seen.step_tokens == 16
    assert seen.steps == 5
    pool = seen.pool
    assert pool.used + pool.cached + pool.free == pool.blocks
    assert pool.used == engine.scheduler.kv.pool.num_used > 0
    engine.step()  # the second fills a block, which stays of use
    for name in rows:
        engine.abort(name)
    engine.step()
    after = snapshot(engine, 10)
    assert after.requests == []
    assert after.pool.used == 0
    assert after.pool.cached > 0


def test_several_answers_are_one_request() -> None:
    engine, _ = manual(max_num_seqs=8)
    engine.add_request(request("three", 8, n=3))
    for _ in range(3):
        engine.step()
    [row] = snapshot(engine, 10).requests
    assert (row.n, row.state, row.output_tokens) == (3, "decode", 9)


def test_preempted_requests_wait_and_say_so() -> None:
    engine, _ = manual(num_blocks=24, max_num_seqs=8, max_model_len=256)
    for name in ("a", "b", "c"):
        engine.add_request(request(name, 64, tokens=150))
    while not any(row.preemptions for row in snapshot(engine, 10).requests):
        assert engine.step()
    rows = snapshot(engine, 10).requests
    assert {row.id for row in rows} == {"a", "b", "c"}
    [row] = [row for row in rows if row.preemptions]
    assert row.state == "waiting"
    assert row.output_tokens > 0
    assert row.prompt_tokens_done == 0


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        (None, None),
        (LatencyTarget(ttft=1000.0), True),
        (LatencyTarget(ttft=1e-9), False),
        (LatencyTarget(tpot=1e-12), False),
        (LatencyTarget(ttft=1000.0, tpot=1000.0, e2el=1e-9), False),
        (LatencyTarget(ttft=1000.0, tpot=1000.0, e2el=1000.0), True),
    ],
)
def test_what_was_promised(target: LatencyTarget | None, kept: bool | None) -> None:
    engine, _ = manual()
    engine.add_request(request("one", target=target))
    for _ in range(3):
        engine.step()
    assert snapshot(engine, 1).requests[0].on_target is kept


def test_a_first_token_that_is_overdue_is_a_promise_broken() -> None:
    engine, _ = manual(max_num_seqs=1)
    engine.add_request(request("runs"))
    engine.add_request(request("waits", target=LatencyTarget(ttft=1e-9)))
    engine.step()
    rows = {row.id: row for row in snapshot(engine, 10).requests}
    assert rows["waits"].state == "waiting"
    assert rows["waits"].on_target is False


def test_listing_is_bounded_whatever_waits() -> None:
    engine, _ = manual(max_num_seqs=4)
    for index in range(2000):
        engine.add_request(request(str(index), 1))
    engine.step()
    seen = snapshot(engine, 100)
    assert len(seen.requests) == 100
    assert seen.unlisted == 1900
    assert [row.state for row in seen.requests].count("decode") == 4
    assert [row.id for row in seen.requests[4:7]] == ["4", "5", "6"]  # who is next comes next
    assert snapshot(engine, 0).requests == []
    assert snapshot(engine, 0).unlisted == 2000


@pytest.mark.parametrize("policy", SAMPLES)
def test_who_is_next_comes_next_under_every_policy(policy: Any) -> None:
    engine, _ = manual(max_num_seqs=1, scheduling_policy=policy)
    engine.add_request(request("runs", tokens=3))
    engine.step()
    for number in range(12):
        engine.add_request(request(f"w{number}", 4, tokens=1, **SAMPLES[policy].terms(number)))
    waiting = [row.id for row in snapshot(engine, 13).requests[1:]]
    assert waiting == [f"w{number}" for number in SAMPLES[policy].order]
    ended: list[str] = []
    while engine.has_work():
        ended += [delta.request_id for delta in engine.step() if delta.record is not None]
    ended.remove("runs")  # it may have given way
    assert ended == waiting


def test_looking_changes_nothing() -> None:
    plain, _ = manual(num_blocks=24, max_num_seqs=4, max_model_len=256)
    looked, _ = manual(num_blocks=24, max_num_seqs=4, max_model_len=256)
    for engine in (plain, looked):
        for index in range(6):
            engine.add_request(request(str(index), 30, tokens=60))
    while plain.has_work():
        snapshot(looked, 3)
        assert [delta[:4] for delta in plain.step()] == [delta[:4] for delta in looked.step()]
    looked.check_integrity()


async def test_the_route(caplog: pytest.LogCaptureFixture) -> None:
    engine, executor = real_engine()
    async with (
        started(engine),
        listening(engine) as url,
        httpx.AsyncClient(base_url=url) as client,
        Leave(executor).one_by_one(),
    ):
        body = {"prompt": SECRET, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            found = await client.get("/requests")
            assert found.status_code == 200
            assert found.headers["content-type"] == "application/json"
            listed = found.json()
        assert set(listed) == {"model", "version", "draining", "engine"}
        assert listed["model"] == "tiny"
        assert listed["draining"] is False
        assert set(listed["engine"]) == {field.name for field in fields(EngineSnapshot)}
        assert set(listed["engine"]["pool"]) == {field.name for field in fields(PoolSnapshot)}
        [row] = listed["engine"]["requests"]
        assert set(row) == {field.name for field in fields(RequestSnapshot)}
        assert row["id"].startswith(first["id"])
        assert row["state"] == "decode"
        assert row["prompt_tokens"] == len(SECRET)
        assert SECRET not in found.text


async def test_it_is_behind_the_key() -> None:
    engine, _ = real_engine()
    async with started(engine):
        async with asked(engine, api_key=("k",)) as client:
            assert (await client.get("/requests")).status_code == 401
        async with asked(engine, "k", api_key=("k",)) as client:
            assert (await client.get("/requests")).status_code == 200


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=-1", "limit"),
        ("limit=", "limit"),
        ("limit=1e3", "limit"),
        ("limit=1001", "limit"),
        ("limit=99999999999999999999", "limit"),
        ("limit=%D9%A3", "limit"),  # a digit, but not an ASCII one
        ("limit=1&limit=2", "limit"),
        ("limit=1%00", "limit"),
        ("text=1", "text"),
        ("limit=5&prompt=yes", "prompt"),
        ("x" * 500 + "=1", "x" * 100),
    ],
)
async def test_other_queries_are_refused_by_name(query: str, param: str) -> None:
    async with serving() as (client, _, _):
        answer = await client.get(f"/requests?{query}")
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


async def test_other_methods_and_paths() -> None:
    async with serving() as (client, _, _):
        for method in ("POST", "DELETE", "PUT"):
            assert (await client.request(method, "/requests")).status_code == 405
        for path in ("/requests/", "/requests/abc", "/v1/requests"):
            assert (await client.get(path)).status_code == 404


async def test_many_askers_share_one_look() -> None:
    engine, executor = real_engine()
    steps = Leave(executor)
    looks = 0
    real = engine.inspect

    async def counted(at: Any) -> Any:
        nonlocal looks
        looks += 1
        return await real(at)

    patch(engine, inspect=counted)
    async with started(engine), asked(engine) as client:
        engine.submit(request("one"))
        await until(lambda: steps.asked, "a step")
        asking = asyncio.gather(*(client.get("/requests") for _ in range(50)))
        await until(lambda: engine._inspections, "a look")
        async with steps.one_by_one():
            answers = await asking
        assert {answer.status_code for answer in answers} == {200}
        assert looks <= 3
        assert len((await client.get("/requests?limit=0")).json()["engine"]["requests"]) == 0


async def test_an_engine_that_is_busy_or_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor = real_engine()
    steps = Leave(executor)
    async with started(engine), asked(engine) as client:
        engine.submit(request("slow", 4, tokens=3))
        await until(lambda: steps.asked, "a step")
        with monkeypatch.context() as hurried:
            hurried.setattr("octavo.server.shared_snapshot._PATIENCE_S", 0.05)
            answer = await client.get("/requests")
        assert answer.status_code == 503
        assert "/live" in answer.text
        steps.let_all()
        assert (await client.get("/requests")).status_code == 200
    async with asked(engine) as client:
        assert (await client.get("/requests")).status_code in (500, 503)
    with pytest.raises(EngineDead):
        await engine.inspect(lambda engine: 0)


async def test_a_look_that_fails_is_the_askers_alone() -> None:
    engine, _ = real_engine()

    def fails(engine: object) -> None:
        raise KeyError("mine")

    async with started(engine):
        with pytest.raises(KeyError):
            await engine.inspect(fails)
        assert await engine.inspect(lambda engine: len(engine.requests)) == 0


def test_snapshots_are_values() -> None:
    engine, _ = manual()
    engine.add_request(request("one"))
    engine.step()
    before = snapshot(engine, 1)
    copy = replace(before, requests=[replace(row) for row in before.requests])
    engine.step()
    assert before == copy != snapshot(engine, 1)
