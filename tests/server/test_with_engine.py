"""The server on the real engine, whose executor computes nothing and whose sampler is scripted."""

import asyncio
import random
import re
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_fakes import events
from serving import listening, real_engine, serving, started

from engine.drafting import Coin
from octavo.engine.calibration import Prediction
from octavo.executor.cost import Rates
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Request
from octavo.server.api_keys import ApiKey, digest
from octavo.server.metrics import Metrics
from octavo.spec_decode.speculator import Speculator
from patience import Leave, until


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={"prompt": "hello", "seed": 1} | body)
    assert response.status_code == 200, response.text
    return response.json()


async def values(client: httpx.AsyncClient) -> dict[str, float]:
    """Every sample of /metrics by name, labels aside (but the ones that tell ends apart)."""
    text = (await client.get("/metrics")).text
    return {
        sample.name.removeprefix("octavo:")
        + sample.labels.get("finished_reason", sample.labels.get("reason", ""))
        + (sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_streamed_and_not_are_the_same(path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "hello"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "hello"}]}
    async with serving() as (client, _, _):
        for settings in (
            {"max_tokens": 50},
            {"max_tokens": 50, "n": 3},
            {"max_tokens": 50, "stop": ["A", "z", "\n"]},
            {"max_tokens": 50, "stop_token_ids": list(range(0, 258, 8)), "min_tokens": 10},
            {"max_tokens": 20, "logprobs": True if "chat" in path else 2, "n": 2},
            {"max_tokens": 400, "allowed_token_ids": [200, 97]},
        ):
            body = prompt | settings | {"seed": 5, "return_token_ids": True}
            whole = (await client.post(path, json=body)).json()
            response = await client.post(
                path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
            )
            *chunks, last = events(response.text)
            assert last["usage"] | {"prompt_tokens_details": 0} == whole["usage"] | {
                "prompt_tokens_details": 0
            }
            for choice in whole["choices"]:
                mine = [c for e in chunks for c in e["choices"] if c["index"] == choice["index"]]
                if "chat" in path:
                    text = "".join(c["delta"].get("content", "") for c in mine)
                    assert text == choice["message"]["content"]
                    told = [c["logprobs"]["content"] for c in mine if c["logprobs"]]
                    whole_logprobs = (choice["logprobs"] or {}).get("content", [])
                    assert [entry for part in told for entry in part] == whole_logprobs
                else:
                    assert "".join(c["text"] for c in mine) == choice["text"]
                ids = [token for c in mine for token in c.get("token_ids", [])]
                assert ids == choice["token_ids"]
                assert mine[-1]["finish_reason"] == choice["finish_reason"]
                assert mine[-1]["stop_reason"] == choice["stop_reason"]


async def test_usage_tells_what_was_cached() -> None:
    async with serving() as (client, _, _):
        prompt = "x" * 100
        cached = [
            (await complete(client, prompt=prompt, cache_salt=salt))["usage"][
                "prompt_tokens_details"
            ]["cached_tokens"]
            for salt in ("a", "a", "b")
        ]
        assert cached == [0, 96, 0]


@pytest.mark.parametrize("shared", [False, True])
async def test_named_keys_do_not_see_each_others_prompts(shared: bool) -> None:
    """Unless they say so: by their own salts in the key file, or for all of the server."""
    salts = {"a": None, "b": None, "team-1": "team", "team-2": "team"}
    keys = tuple(
        ApiKey(name=name, digest=digest(name.encode()), cache_salt=salt)
        for name, salt in salts.items()
    )
    engine, _ = real_engine()
    async with (
        started(engine),
        listening(engine, named_keys=keys, api_key=("open",), share_prefix_cache=shared) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):

        async def cached(name: str, **body: Any) -> int:
            client.headers["authorization"] = f"Bearer {name}"
            answer = await complete(client, prompt="x" * 100, **body)
            tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return tokens

        assert await cached("a") == 0
        assert await cached("a") == 96
        for other in ("b", "open", "team-1"):
            assert await cached(other) == (96 if shared else 0)
        for attempt in ("a", "a\n", "team"):
            assert await cached("open", cache_salt=attempt) == 0
        assert await cached("team-2") == 96
        assert await cached("a", cache_salt="own") == 0
        assert await cached("b", cache_salt="own") == (96 if shared else 0)


async def test_counters_reconcile_with_usage() -> None:
    async with serving() as (client, engine, _):
        answers = await asyncio.gather(
            *(
                complete(client, prompt="x" * (i + 1), max_tokens=i + 1, n=i % 3 + 1, seed=i)
                for i in range(20)
            )
        )
        found = await values(client)
        prompt = sum(answer["usage"]["prompt_tokens"] for answer in answers)
        completion = sum(answer["usage"]["completion_tokens"] for answer in answers)
        assert found["prompt_tokens_total"] == prompt
        assert found["request_prompt_tokens_sum"] == prompt
        assert found["generation_tokens_total"] == completion
        assert found["request_generation_tokens_sum"] == completion
        assert found["request_success_totallength"] + found["request_success_totalstop"] == 20
        for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds"):
            assert found[f"{name}_count"] == 20
        choices = sum(len(answer["choices"]) for answer in answers)
        assert found["inter_token_latency_seconds_count"] == completion - choices
        assert engine.stats().kv_blocks_used == 0


async def test_many_streams_aborted_and_then_a_normal_load() -> None:
    rng = random.Random(1)
    async with serving(pause=0.0005, num_blocks=200) as (client, engine, executor):

        async def normal_load() -> int:
            """Tokens that go through the model for it."""
            executor.pause = 0.0
            before = engine.stats().computed_tokens
            answers = await asyncio.gather(*(complete(client, max_tokens=20) for _ in range(32)))
            assert len({answer["choices"][0]["text"] for answer in answers}) == 1
            return engine.stats().computed_tokens - before

        at_first = await normal_load()
        executor.pause = 0.0005
        connections = (await values(client))["http_connections"]

        async def leave(others: httpx.AsyncClient) -> None:
            body = {"prompt": "x" * rng.randrange(1, 100), "max_tokens": 300, "stream": True}
            task = asyncio.create_task(others.post("/v1/completions", json=body))
            await asyncio.sleep(rng.random())
            task.cancel()

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=client.base_url, limits=limits) as others:
            await asyncio.gather(*(leave(others) for _ in range(300)))
        # What a client sent before it left may reach the server later.
        while (await values(client))["http_connections"] > connections:
            await asyncio.sleep(0.01)
        await until(lambda: not (engine.stats().running or engine.stats().waiting), "the end")
        assert engine.stats().computed_tokens > 2 * at_first, "hardly any of them ran"
        assert engine.stats().kv_blocks_used == 0
        assert await normal_load() == at_first  # nothing is done for anybody else
        stats, scheduler = engine.stats(), engine.engine.scheduler
        assert (stats.kv_blocks, stats.kv_blocks_used) == (200, 0)
        assert scheduler.kv.num_free_slots == scheduler.config.max_num_seqs
        found = await values(client)
        assert (
            found["request_success_totalabort"] + found["request_success_totallength"]
            == (found["e2e_request_latency_seconds_count"])
        )


async def test_a_request_that_waits_never_runs_when_its_client_leaves() -> None:
    async with serving(max_num_seqs=1) as (client, engine, executor):
        steps = Leave(executor)
        running = asyncio.create_task(complete(client, max_tokens=300))
        await until(lambda: engine.stats().running)
        waiting = asyncio.create_task(complete(client, prompt="second"))
        await until(lambda: engine.stats().waiting)
        waiting.cancel()
        await until(lambda: engine._calls)
        steps.let()
        await until(lambda: not engine.stats().waiting)
        steps.let_all()
        await running
        assert (await values(client))["prompt_tokens_total"] == len("hello")


async def test_an_engine_that_hangs_is_noticed() -> None:
    async with serving(hang_timeout=0.3) as (client, _, executor):
        steps = Leave(executor)
        whole = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
        )
        streamed = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5, "stream": True})
        )

        async def noticed() -> bool:
            return (await client.get("/live")).status_code != 200

        await until(noticed, "the news")
        assert (await client.get("/ready")).status_code == 503
        assert (await whole).status_code == 500
        failed = await streamed  # before its first event: with the status of an error
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, 500)
        steps.let_all()


async def test_refused_by_the_real_engine() -> None:
    """What the fake engine refuses in the other tests is refused by the real one alike."""
    async with serving(max_num_queued_reqs=1, max_num_seqs=1) as (client, engine, executor):
        steps = Leave(executor)
        for body, param in (
            ({"max_tokens": 512}, "max_tokens"),
            ({"prompt": "x" * 512}, "prompt"),
            ({"prompt": [1] * 512}, "prompt"),
            ({"temperature": 1e6}, "temperature"),
            ({"logprobs": 100}, "logprobs"),
            ({"prompt": "x" * 500, "prompt_logprobs": 21}, "prompt_logprobs"),
        ):
            response = await client.post("/v1/completions", json={"prompt": "a"} | body)
            assert response.status_code == 400, body
            assert response.json()["error"]["param"] == param
        messages = [{"role": "user", "content": "a"}]
        for body, param in (
            ({"max_completion_tokens": 512}, "max_completion_tokens"),
            ({"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
            ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ):
            response = await client.post("/v1/chat/completions", json={"messages": messages} | body)
            assert response.status_code == 400, body
            assert response.json()["error"]["param"] == param
        tasks = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))]
        await until(lambda: engine.stats().running)
        tasks += [
            asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
            for _ in range(5)
        ]
        await until(lambda: sum(task.done() for task in tasks) == 4, "four refusals")
        steps.let_all()
        statuses = sorted([(await task).status_code for task in tasks])
        assert statuses == [200, 200, 429, 429, 429, 429]
        found = await values(client)
        assert found["admission_rejections_totalcapacity"] == 4
        assert found["admission_rejections_totalinvalid"] == 9


async def test_what_drafts_did_is_counted_and_told_on_request() -> None:
    body = {"max_tokens": 100, "n": 2}
    async with serving() as (client, served, _):
        plain = await complete(client, **body)
        assert "completion_tokens_details" not in plain["usage"]
        drafter = Coin(0.6, served.engine.sampler)
        drafter.speculator = Speculator(drafter, served.engine.vocab_size, 3)
        served.engine.speculator = drafter.speculator
        told = await complete(client, **body, return_prediction_details=True)
        assert [c["text"] for c in told["choices"]] == [c["text"] for c in plain["choices"]]
        assert told["usage"]["completion_tokens"] == 200
        details = told["usage"]["completion_tokens_details"]
        metrics = await values(client)
        accepted = metrics["spec_decode_num_accepted_tokens_total"]
        checked = metrics["spec_decode_num_draft_tokens_total"]
        assert accepted == details["accepted_prediction_tokens"] > 0
        assert checked - accepted == details["rejected_prediction_tokens"] > 0
        assert 0 < metrics["spec_decode_num_drafts_total"] <= metrics["decode_passes_total"]
        assert metrics["spec_decode_drafter_failures_total"] == 0
        assert metrics["generation_tokens_total"] == 400
        text = (await client.get("/metrics")).text
        positions = re.findall(r"accepted_tokens_per_pos_total\{.*\} ([0-9.]+)", text)
        assert sum(map(float, positions)) == accepted
        assert len(positions) == 3


async def test_predicted_step_times_are_beside_the_actual_ones() -> None:
    """Every step but the last, which has not been delivered when it is observed."""
    engine, _ = real_engine(pause=0.002)
    prediction = Prediction(engine.engine, Rates(step_overhead=0.5))
    metrics = Metrics("tiny", engine.stats, 512)
    prediction.tell = metrics.predicting(lambda: prediction.ratio)
    engine.observe(prediction)
    async with started(engine):
        async for _ in engine.submit(_request(12)):
            pass
        steps = engine.stats().steps
    text = metrics.exposition("text/plain")[0].decode()
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert steps > 10
    assert found["octavo:step_time_seconds_count"] == steps - 1
    assert found["octavo:predicted_step_time_seconds_count"] == steps - 1
    assert found["octavo:predicted_step_time_seconds_sum"] == pytest.approx(0.5 * (steps - 1))
    actual = found["octavo:step_time_seconds_sum"]
    assert actual >= 0.002 * (steps - 1)
    assert found["octavo:step_time_ratio"] >= 0.004


def _request(tokens: int) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(request_id="one", prompt_token_ids=[5, 6, 7], params=params)
