"""More than can be done: what is refused, when, how soon, and what it costs nobody else."""

import asyncio
import gc
import hashlib
import json
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from serve_fakes import ByteTokenizer, FakeEngine, events
from serving import PacedExecutor, listening, serving
from test_access_log import logged

from faults import patch
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.clock import VirtualClock
from octavo.engine.stats import EngineStats
from octavo.executor.base import Batch, StepResult
from octavo.scheduler.request import FinishReason, LatencyTarget, Outcome, RequestRecord
from octavo.server.api_keys import ApiKey
from octavo.server.logs import JsonFormatter
from octavo.server.workers import Workers
from patience import PATIENCE, Leave, until

ASK = {"prompt": "hello", "max_tokens": 300, "seed": 1}


def ask(client: httpx.AsyncClient, **body: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post("/v1/completions", json=ASK | body))


@asynccontextmanager
async def begun(
    client: httpx.AsyncClient, engine: AsyncEngine, steps: Leave
) -> AsyncIterator[httpx.Response]:
    """A stream whose answer has begun, with a token, beside those that the engine knows."""
    known = len(engine._streams)
    async with AsyncExitStack() as stack:

        async def ask() -> httpx.Response:
            body = ASK | {"stream": True}
            return await stack.enter_async_context(
                client.stream("POST", "/v1/completions", json=body)
            )

        asked = asyncio.create_task(ask())
        await until(lambda: len(engine._streams) > known, "the request")

        def has_begun() -> bool:
            steps.let_one_that_waits()
            return asked.done()

        await until(has_begun, "its head")
        yield await asked


def in_its_own_time(engine: AsyncEngine, executor: PacedExecutor) -> None:
    """Each step takes 2 ms by the engine's clock, however long it takes here."""
    clock = engine.engine.clock = VirtualClock(time.monotonic())
    execute = executor.execute

    def takes(batch: Batch) -> StepResult:
        return execute(batch)._replace(duration=0.002)

    patch(executor, execute=takes)
    assert clock.now() > 0


def of(stats: EngineStats) -> tuple[int, int]:
    return stats.running, stats.waiting


async def idle(engine: AsyncEngine) -> None:
    """Whoever has been answered may still be counted for a moment."""
    await until(lambda: of(engine.stats()) == (0, 0), "the end of who ran before")


async def full(
    client: httpx.AsyncClient, engine: AsyncEngine, waiting: int = 1
) -> list[asyncio.Task[httpx.Response]]:
    """One that runs and so many that wait, where one may run."""
    await idle(engine)
    tasks = [ask(client)]
    await until(lambda: engine.stats().running == 1)
    tasks += [ask(client) for _ in range(waiting)]
    await until(lambda: engine.stats().waiting == waiting)
    return tasks


async def test_a_full_queue_is_told_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The body is never sent, and the connection can still be used."""
    async with serving(max_num_seqs=1, max_num_queued_reqs=1) as (client, engine, executor):
        steps = Leave(executor)
        tasks = await full(client, engine)

        def encode(*_: object, **__: object) -> list[int]:
            raise AssertionError("it is not to be tokenized")

        monkeypatch.setattr(ByteTokenizer, "encode", encode)
        place = client.base_url
        reader, writer = await asyncio.open_connection(place.host, place.port)
        for _ in range(3):
            content = b'{"prompt": "' + b"x" * 100_000 + b'"}'
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(content)
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ")
            told = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            assert int(told[b"retry-after"]) >= 1
            assert 0 < int(told[b"retry-after-ms"]) <= 1000 * int(told[b"retry-after"])
            error = json.loads(await reader.readexactly(int(told[b"content-length"])))["error"]
            assert error["message"] == "1 request waits, of at most 1"
            writer.write(content)  # too late, and read away
        writer.close()
        monkeypatch.undo()
        steps.let_all()
        assert [(await task).status_code for task in tasks] == [200, 200]


async def test_threads_that_are_all_taken_keep_nobody_from_being_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is still being read counts as waiting, beyond the seats that are free."""
    going = threading.Event()

    def slow(self: ByteTokenizer, text: str, **kwargs: bool) -> list[int]:
        going.wait(PATIENCE)
        return list(text.encode())

    monkeypatch.setattr(ByteTokenizer, "encode", slow)
    async with serving(max_num_seqs=2, max_num_queued_reqs=5) as (client, engine, _):
        tasks = [ask(client, max_tokens=5) for _ in range(20)]
        await until(lambda: sum(task.done() for task in tasks) == 13)
        assert {task.result().status_code for task in tasks if task.done()} == {429}
        assert engine.stats().running == engine.stats().waiting == 0
        going.set()
        statuses = [(await task).status_code for task in tasks]
        assert (statuses.count(200), statuses.count(429)) == (7, 13)


async def test_free_seats_are_no_queue() -> None:
    """As many at once as may run, on an idle server whose queue has room for one."""
    async with serving(max_num_seqs=16, max_num_queued_reqs=1, pause=0.001) as (client, _, _):
        tasks = [ask(client, max_tokens=20) for _ in range(16)]
        assert {(await task).status_code for task in tasks} == {200}


async def test_the_queue_never_grows_beyond_its_bound() -> None:
    most = 0

    async with serving(max_num_seqs=4, max_num_queued_reqs=8) as (client, engine, executor):
        steps = Leave(executor)

        async def look() -> None:
            nonlocal most
            while True:
                most = max(most, engine.stats().waiting)
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        tasks = [ask(client, max_tokens=20) for _ in range(100)]
        await until(lambda: any(task.done() for task in tasks), "a refusal")
        async with steps.one_by_one():
            statuses = [(await task).status_code for task in tasks]
        looking.cancel()
        assert set(statuses) == {200, 429}
        assert most <= 8 + 4  # those whom a seat is promised are let in at the next step
        assert engine.stats().kv_blocks_used == 0
        assert (await ask(client, max_tokens=5)).status_code == 200


async def test_prompt_tokens_have_a_bound_too() -> None:
    async with serving(max_num_seqs=1, max_num_queued_tokens=20) as (client, engine, executor):
        steps = Leave(executor)
        tasks = await full(client, engine, waiting=2)
        refused = await ask(client, prompt="x" * 11)
        assert refused.status_code == 429
        assert "10 prompt tokens wait; with 11 more they exceed 20" in refused.text
        tasks.append(ask(client, prompt="x" * 10, max_tokens=1))
        await until(lambda: engine.stats().waiting == 3)
        steps.let_all()
        assert {(await task).status_code for task in tasks} == {200}


async def test_ready_while_there_is_room() -> None:
    async with serving(max_num_seqs=1, max_num_queued_reqs=1) as (client, engine, executor):
        steps = Leave(executor)
        assert (await client.get("/ready")).status_code == 200
        tasks = await full(client, engine)
        refused = await client.get("/ready")
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "1 request waits, of at most 1"
        assert (await client.get("/live")).status_code == 200
        steps.let_all()
        await asyncio.gather(*tasks)
        assert (await client.get("/ready")).status_code == 200


async def test_before_anything_is_known_a_second_is_told() -> None:
    """A cold engine has never been seen to move the queue, so its wait is not known."""
    limits = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    async with serving(**limits) as (client, engine, executor):
        steps = Leave(executor)
        tasks = await full(client, engine)
        refused = await ask(client)
        assert refused.status_code == 429
        assert refused.headers["retry-after-ms"] == "1000"
        steps.let_all()
        assert {(await task).status_code for task in tasks} == {200}


async def test_retry_after_is_the_predicted_wait() -> None:
    """Which is that of all who are ahead: steps, as many as their answers have tokens."""
    async with serving(max_num_seqs=1, max_num_queued_reqs=3) as (client, engine, executor):
        in_its_own_time(engine, executor)
        for _ in range(3):  # one at a time: what an answer takes is learned of those that ended
            assert (await ask(client, max_tokens=100)).status_code == 200
        await idle(engine)
        before, steps = engine.stats(), Leave(executor)
        tasks = [ask(client, max_tokens=100)]
        await until(lambda: engine.stats().running == 1)
        tasks += [ask(client, max_tokens=100) for _ in range(3)]
        await until(lambda: engine.stats().waiting == 3)
        refused = await ask(client, max_tokens=100)
        assert refused.status_code == 429
        told = int(refused.headers["retry-after-ms"]) / 1000
        steps.let_all()
        assert {(await task).status_code for task in tasks} == {200}
        after = engine.stats()
        took = after.step_seconds - before.step_seconds
        assert took / 4 < told < 3 * took


async def test_what_would_miss_its_target_is_refused() -> None:
    """And nobody else is."""
    config = {"slo": LatencyTarget(ttft=0.2)}
    async with serving(config, max_num_seqs=2) as (client, engine, executor):
        in_its_own_time(engine, executor)
        engine.admission.within_target = True
        for _ in range(4):
            assert (await ask(client, max_tokens=200)).status_code == 200
        await idle(engine)
        steps = Leave(executor)
        tasks = [ask(client, max_tokens=200, slo={"ttft": 1e6}) for _ in range(8)]
        await until(lambda: sum(of(engine.stats())) == 8)
        steps.let()  # it may have been begun when the first was alone
        await until(lambda: of(engine.stats()) == (2, 6))
        refused = await ask(client)
        assert refused.status_code == 429
        assert "the first token would take" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after-ms"]) > 0
        # However a client writes that it can wait.
        content = json.dumps(ASK | {"slo": {"ttft": 1e6}}).replace('"slo"', '"\\u0073lo"')
        tasks.append(
            asyncio.create_task(
                client.post(
                    "/v1/completions",
                    content=content,
                    headers={"content-type": "application/json"},
                )
            )
        )
        await until(lambda: engine.stats().waiting == 7)
        slow = await ask(client, slo={"ttft": 1e6, "tpot": 1e-3})
        assert slow.status_code == 429
        assert "the token would take" in slow.json()["error"]["message"]
        steps.let_all()
        assert {(await task).status_code for task in tasks} == {200}
        assert (await ask(client, max_tokens=5)).status_code == 200
        found = (await client.get("/metrics")).text
        assert 'rejections_total{engine="0",model_name="tiny",reason="capacity"} 2.0' in found


async def test_an_idle_server_takes_whom_it_predicts_no_good_for() -> None:
    """Else a step that once was slow would keep everyone out for ever."""
    config = {"slo": LatencyTarget(ttft=0.5, tpot=0.1)}
    async with serving(config) as (client, engine, executor):
        in_its_own_time(engine, executor)
        engine.admission.within_target = True
        engine.engine.step_times.on_step(1, 5, 100.0)
        assert engine.forecast().tpot > 1.0
        for _ in range(3):
            assert (await ask(client, max_tokens=60)).status_code == 200
        assert engine.forecast().tpot < 0.1


async def test_who_would_wait_too_long_is_refused_and_who_does_is_shed() -> None:
    async with serving(max_num_seqs=1, max_queue_time=0.2) as (client, engine, executor):
        in_its_own_time(engine, executor)
        await ask(client, max_tokens=100)
        await idle(engine)
        steps = Leave(executor)
        tasks = [ask(client, max_tokens=400) for _ in range(6)]
        await until(lambda: any(task.done() for task in tasks), "a refusal")
        steps.let_all()
        answers = [await task for task in tasks]
        assert {answer.status_code for answer in answers} == {200, 429}
        told = " ".join(answer.text for answer in answers if answer.status_code == 429)
        assert "it would wait" in told
        assert "by prediction, and 0.2 s is the most" in told
        assert engine.stats().waiting == 0


async def test_one_key_does_not_fill_the_queue_where_shares_are_fair(engine: FakeEngine) -> None:
    engine.auto = False
    engine.fair_queue = 8
    keys = tuple(ApiKey(name=name, digest=hashlib.sha256(name.encode()).digest()) for name in "abc")
    async with (
        listening(engine, named_keys=keys) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):

        def of(name: str, prompts: int = 1) -> asyncio.Task[httpx.Response]:
            headers = {"authorization": f"Bearer {name}"}
            body = ASK | {"max_tokens": 1, "prompt": ["hello"] * prompts}
            return asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))

        served = [of("a") for _ in range(4)]
        await until(lambda: len(engine.streams) == 4)
        refused = await of("a")  # alone, half of it
        assert refused.status_code == 429
        assert "4 requests of the key 'a' wait, of at most 4" in refused.text
        served += [of("b") for _ in range(2)]
        await until(lambda: len(engine.streams) == 6)
        assert (await of("b")).status_code == 429  # of two, a third
        served.append(of("c"))
        await until(lambda: len(engine.streams) == 7)
        engine.step()
        assert {(await task).status_code for task in served} == {200}
        # Nobody waits any more. One body may have many prompts, and each of them waits.
        refused = await of("a", prompts=5)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"
        assert "5 prompts, more than the 4 requests that a key may have waiting" in refused.text
        last = [of("a", prompts=3)]
        await until(lambda: len(engine.streams) == 3)
        refused = await of("a", prompts=2)
        assert refused.status_code == 429
        assert "3 requests of the key 'a' wait, of at most 4" in refused.text
        last.append(of("a"))
        await until(lambda: len(engine.streams) == 4)
        assert (await of("b", prompts=3)).status_code == 429
        last.append(of("b", prompts=2))
        await until(lambda: len(engine.streams) == 6)
        engine.step()
        assert {(await task).status_code for task in last} == {200}


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_shed_gets_a_429(
    client: httpx.AsyncClient, engine: FakeEngine, streamed: bool
) -> None:
    engine.auto = False
    task = ask(client, stream=streamed, n=2)
    await until(lambda: len(engine.streams) == 1)
    stream = engine.streams[0]
    stream.record.finish_reasons = [FinishReason.SHED] * 2
    stream.end(FinishReason.SHED, Outcome.REJECTED, "it waited 5.0 s")
    answer = await task
    assert answer.status_code == 429
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["retry-after-ms"] == "2500"
    assert answer.json()["error"]["message"] == "it waited 5.0 s"
    found = (await client.get("/metrics")).text
    assert 'rejections_total{engine="0",model_name="tiny",reason="shed"} 1.0' in found
    assert 'reason="capacity"} 0.0' in found


async def test_what_is_shed_after_a_comment_gets_an_error_event(engine: FakeEngine) -> None:
    engine.auto = False
    async with (
        listening(engine, sse_keep_alive_interval=0.01) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as response,
    ):
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        engine.streams[0].end(FinishReason.SHED, Outcome.REJECTED)
        said = [line async for line in lines if line.startswith("data: ")]
    assert json.loads(said[0].removeprefix("data: "))["error"]["code"] == 429
    assert said[1:] == ["data: [DONE]"]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_an_error_has_its_status_until_the_first_event(
    engine: FakeEngine, has_begun: bool
) -> None:
    engine.auto = False
    async with (
        listening(engine) as url,
        httpx.AsyncClient(base_url=url) as client,
        AsyncExitStack() as stack,
    ):
        asking = client.stream("POST", "/v1/completions", json=ASK | {"stream": True})
        asked = asyncio.create_task(stack.enter_async_context(asking))
        await until(lambda: len(engine.streams) == 1)
        if has_begun:
            engine.step()
            await asked  # its head has come, which goes out with the first event
        engine.streams[0].end(FinishReason.ERROR, Outcome.FAILED, "broken")
        answer = await asked
        text = (await answer.aread()).decode()
    assert answer.status_code == (200 if has_begun else 500)
    error = (events(text)[-1] if has_begun else json.loads(text))["error"]
    assert (error["code"], error["type"]) == (500, "InternalServerError")


class Poisoned(PacedExecutor):
    """Cannot compute a step with a prompt whose second token begins a text."""

    def execute(self, batch: Batch) -> StepResult:
        if 256 in batch.token_ids[batch.positions == 1]:
            raise RuntimeError("poison")
        return super().execute(batch)


async def test_a_fault_in_a_share_of_a_step_is_that_requests_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as (client, engine, executor):
        executor.__class__ = Poisoned
        kept: list[RequestRecord] = []
        engine.engine.observers.append(Kept(kept))
        alone = (await ask(client)).json()["choices"]
        await idle(engine)
        steps = Leave(executor)
        beside = [ask(client) for _ in range(5)]
        steps.let(2)  # in which they have all begun, if they are there
        await until(lambda: sum(of(engine.stats())) == 5, "all five")
        broken = [ask(client, prompt=[97, 256], stream=streamed) for streamed in (False, True)]
        await until(lambda: sum(of(engine.stats())) == 7, "the broken beside them")
        steps.let_all()
        assert [(await task).status_code for task in broken] == [500, 500]
        for task in beside:
            assert (await task).json()["choices"] == alone
        outcomes = [record.outcome for record in kept]
        assert outcomes.count(Outcome.FINISHED) == 6
        assert outcomes.count(Outcome.FAILED) == 2
        found = (await client.get("/metrics")).text
        assert 'finished_reason="error",model_name="tiny"} 2.0' in found
        assert engine.stats().kv_blocks_used == 0


class Kept:
    """Keeps every record that ends."""

    def __init__(self, kept: list[RequestRecord]) -> None:
        self._kept = kept

    def on_step(self, step: object) -> None: ...

    def on_end(self, record: RequestRecord) -> None:
        self._kept.append(record)


@pytest.mark.parametrize("streamed", [False, True])
async def test_who_is_killed_frees_its_blocks_within_a_step(streamed: bool) -> None:
    async with serving() as (client, engine, executor):
        kept: list[RequestRecord] = []
        engine.engine.observers.append(Kept(kept))
        steps = Leave(executor)
        task = ask(client, stream=streamed, prompt="x" * 100)
        steps.let(3)
        await until(lambda: steps.asked == 4, "a step that is under way")
        task.cancel()
        await until(lambda: engine._calls, "the news")
        steps.let_all()
        await until(lambda: engine.stats().kv_blocks_used == 0)
        assert steps.asked == 4
        assert [record.outcome for record in kept] == [Outcome.ABORTED]
        assert kept[0].completion_tokens == 4


async def test_one_life_of_five_that_leave_in_every_count() -> None:
    """Log and metrics, all of the same five records."""
    with logged(JsonFormatter()) as written:
        await five_that_leave()
    lines = map(json.loads, written.getvalue().splitlines())
    left = [line for line in lines if line["path"] == "/v1/completions"]
    assert [(line["status"], line["outcome"]) for line in left] == [(499, "aborted")] * 5
    assert sum(line["prompt_tokens"] for line in left) == 150


async def five_that_leave() -> None:
    async with serving() as (client, engine, executor):
        kept: list[RequestRecord] = []
        engine.engine.observers.append(Kept(kept))
        steps = Leave(executor)
        for tokens in range(1, 6):
            before = steps.asked
            task = ask(client, stream=True, prompt="x" * 10 * tokens)
            steps.let(tokens)
            await until(lambda t=tokens, b=before: steps.asked == b + t + 1)
            task.cancel()
            await until(lambda: engine._calls, "the news")
            steps.let()
            await until(lambda t=tokens: len(kept) == t)
        text = (await client.get("/metrics")).text
        label = 'engine="0",model_name="tiny"'
        generated = sum(record.completion_tokens for record in kept)
        assert generated == engine.stats().generation_tokens
        for line in (
            'request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 5.0',
            'http_requests_total{handler="/v1/completions",method="POST",status="499"} 5.0',
            f"request_prompt_tokens_sum{{{label}}} 150.0",
            f"prompt_tokens_total{{{label}}} 150.0",
            f"request_generation_tokens_sum{{{label}}} {generated}.0",
            f"generation_tokens_total{{{label}}} {generated}.0",
            f"e2e_request_latency_seconds_count{{{label}}} 5.0",
            f"time_to_first_token_seconds_count{{{label}}} 5.0",
            f"request_queue_time_seconds_count{{{label}}} 5.0",
            f"num_requests_running{{{label}}} 0.0",
            f"num_requests_waiting{{{label}}} 0.0",
        ):
            assert f"octavo:{line}" in text


async def test_who_is_being_read_when_the_server_drains_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    being_read, going = threading.Event(), threading.Event()
    encode = ByteTokenizer.encode

    def slow(self: ByteTokenizer, text: str, **kwargs: bool) -> list[int]:
        being_read.set()
        going.wait(PATIENCE)
        return encode(self, text, **kwargs)

    monkeypatch.setattr(ByteTokenizer, "encode", slow)
    async with serving() as (client, engine, _):
        task = ask(client)
        await until(being_read.is_set)
        assert await engine.drain()
        going.set()
        answer = await task
        assert answer.status_code == 503
        assert answer.headers["connection"] == "close"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/live")).status_code == 200
        later = await ask(client)  # on a connection that was kept
        assert (later.status_code, later.headers["connection"]) == (503, "close")


async def test_what_runs_at_the_end_of_a_drain_is_told() -> None:
    async with serving() as (client, engine, executor):
        steps = Leave(executor)
        whole = ask(client)
        await until(lambda: engine._streams, "the first")
        async with (
            begun(client, engine, steps) as streamed,
            begun(client, engine, steps) as another,
        ):
            draining = asyncio.create_task(engine.drain(0.1))
            await until(lambda: len(engine._calls) == 3, "the end of its patience")
            steps.let_all()
            assert not await draining
            assert (await whole).status_code == 503
            for answer in (streamed, another):
                assert answer.status_code == 200
                assert events((await answer.aread()).decode())[-1]["error"]["code"] == 503
        assert engine.stats().kv_blocks_used == 0


async def test_a_stopped_engine_fails_the_probe_and_all_who_wait() -> None:
    async with serving() as (client, engine, executor):
        steps = Leave(executor)
        task = ask(client)

        def die() -> bool:
            raise SystemExit

        await until(lambda: engine._streams, "the first")
        async with begun(client, engine, steps) as streamed:
            patch(engine, _turn=die)
            steps.let_all()
            assert (await task).status_code == 500
            assert events((await streamed.aread()).decode())[-1]["error"]["code"] == 500
        assert (await client.get("/live")).status_code == 503
        assert (await client.get("/ready")).status_code == 503
        assert (await ask(client)).status_code == 500


async def test_bodies_that_wait_for_a_thread_have_a_bound(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every route that reads one."""
    monkeypatch.setattr("octavo.server.workers._MOST", 0)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = await client.post(path, json={"prompt": "a"})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"


async def test_texts_that_are_only_tokenized_take_nobodys_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do those that wait to be generated take theirs; and /ready is of the latter."""
    going, stuck = threading.Event(), []
    encode = ByteTokenizer.encode

    def slow(self: ByteTokenizer, text: str, **kwargs: bool) -> list[int]:
        if text.startswith("slow"):
            stuck.append(text)
            going.wait(PATIENCE)
        return encode(self, text, **kwargs)

    monkeypatch.setattr(ByteTokenizer, "encode", slow)
    async with serving(max_num_seqs=2, max_num_queued_reqs=1) as (client, _, _):
        tasks = [
            asyncio.create_task(client.post("/tokenize", json={"prompt": "slow"}))
            for _ in range(12)
        ]
        await until(lambda: bool(stuck))
        assert (await ask(client, max_tokens=5)).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        asked = [ask(client, prompt="slow", max_tokens=5) for _ in range(3)]
        await until(lambda: len(stuck) == 4 + 3)  # threads of /tokenize, and those asked here
        refused = await ask(client, max_tokens=5)
        assert refused.status_code == 429
        unready = await client.get("/ready")
        assert unready.status_code == 503
        assert unready.json()["error"]["message"] == refused.json()["error"]["message"]
        going.set()
        assert {(await task).status_code for task in (*tasks, *asked)} == {200}


async def test_a_worker_that_fails_gives_its_place_back() -> None:
    workers = Workers()

    def fails(body: bytes) -> None:
        raise RuntimeError

    for _ in range(10):
        with pytest.raises(RuntimeError):
            await workers.run(fails, b"")
    assert workers.pending == 0


async def test_bodies_that_never_end_take_no_more_than_their_bound(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred connections, each with a body of a megabyte of which the last byte is missing."""
    monkeypatch.setattr("octavo.server.body._IN_FLIGHT", 8 << 20)
    size, connections = 1 << 20, 100
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % size
    )
    async with listening(engine) as url:
        place = urlsplit(url)
        told: list[bytes] = []
        writers: list[asyncio.StreamWriter] = []

        async def one() -> None:
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writers.append(writer)
            writer.write(head + bytes(size - 1))
            told.append(await reader.readline())

        tracemalloc.start()
        try:
            tasks = [asyncio.create_task(one()) for _ in range(connections)]
            await until(lambda: len(told) >= connections - 8)
            kept, _ = tracemalloc.get_traced_memory()
            ours = sum(writer.transport.get_write_buffer_size() for writer in writers)
        finally:
            tracemalloc.stop()
        assert {line.split()[1] for line in told} == {b"429"}
        assert kept - ours < 40 << 20, "of the hundred that were sent"
        for task in tasks:
            task.cancel()
        for writer in writers:
            writer.transport.abort()
        async with httpx.AsyncClient(base_url=url) as client:

            async def served() -> bool:
                return (await ask(client)).status_code == 200

            await until(served, "the end of those that held all of it")


async def test_a_flood_is_told(engine: FakeEngine) -> None:
    """Hundreds of bodies to a full server, each on a connection of its own."""
    engine.queue_full = 0
    async with listening(engine) as url:
        place = urlsplit(url)
        content = b'{"prompt": "' + b"x" * 200_000 + b'"}'
        request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(content)
        ) + content

        async def one() -> bytes:
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(request)
            head = await reader.readline()
            writer.close()
            return head

        async def flood() -> None:
            heads = await asyncio.gather(*(one() for _ in range(100)))
            assert {head.split()[1] for head in heads} == {b"429"}

        def kept() -> int:
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        await flood()  # what is made once
        tracemalloc.start()
        try:
            for _ in range(3):
                await flood()
                # Of a hundred bodies each time, once the connections are closed.
                await until(lambda: kept() < 20 * len(content), "the end of what they hold")
        finally:
            tracemalloc.stop()
    assert engine.submitted == []
