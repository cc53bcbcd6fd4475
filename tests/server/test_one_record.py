"""One record a request: metrics, log, traces and usage tell the same of it."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from collector import attributes, collecting
from prometheus_client.parser import text_string_to_metric_families
from serve_fakes import events
from serving import listening, real_engine, started
from test_access_log import logged

from octavo.server.logs import JsonFormatter
from octavo.server.tracing import Tracer
from patience import Leave, until

FINISHED, ABORTED = 7, 5


async def test_metrics_log_traces_and_usage_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven answers and five clients that leave in the middle of theirs."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    engine, executor = real_engine()
    used: list[dict[str, Any]] = []
    with collecting() as collector, logged(JsonFormatter()) as written:
        tracer = Tracer(collector.url)
        async with (
            started(engine),
            listening(engine, tracer.trace) as url,
            httpx.AsyncClient(base_url=url) as client,
        ):

            async def ask(number: int) -> None:
                body: dict[str, Any] = {
                    "prompt": "x" * (20 + 7 * number), "max_tokens": 5 + number,
                    "n": 1 + number % 2, "ignore_eos": True, "stream": number % 3 == 0,
                }  # fmt: skip
                if body["stream"]:
                    body["stream_options"] = {"include_usage": True}
                response = await client.post("/v1/completions", json=body)
                whole = not body["stream"]
                answer = response.json() if whole else events(response.text)[-1]
                used.append(answer["usage"])

            async def leave(number: int) -> None:
                body = {"prompt": "y" * (30 + number), "max_tokens": 400, "ignore_eos": True}
                async with client.stream(
                    "POST", "/v1/completions", json=body | {"stream": True}
                ) as response:
                    async for _ in response.aiter_text():
                        break

            async with Leave(executor).one_by_one():
                await asyncio.gather(*map(ask, range(FINISHED)), *map(leave, range(ABORTED)))
                await until(lambda: not engine.stats().running, "the end")
            await until(lambda: written.getvalue().count("\n") >= 12, "each one's line")
            text = (await client.get("/metrics")).text
            spans = await asyncio.to_thread(collector.spans, 5 * (FINISHED + ABORTED))
        tracer.close()
    found = {
        (sample.name.removeprefix("octavo:"), sample.labels.get("finished_reason", "")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }

    def metric(name: str, reason: str = "") -> float:
        return found[name, reason].value

    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    lines = [line for line in lines if line["path"] == "/v1/completions"]
    roots = [attributes(span) for span in spans if not span.parent_span_id]
    ended = {line["outcome"]: [] for line in lines}
    for line in lines:
        ended[line["outcome"]].append(line)
    assert {outcome: len(each) for outcome, each in ended.items()} == {
        "finished": FINISHED,
        "aborted": ABORTED,
    }
    assert metric("request_success_total", "length") == FINISHED
    assert metric("request_success_total", "abort") == ABORTED
    assert [line["status"] for line in ended["aborted"]] == [499] * ABORTED
    assert sorted(root["octavo.outcome"] for root in roots) == sorted(
        line["outcome"] for line in lines
    )
    assert {root["gen_ai.request.id"] for root in roots} == {line["request_id"] for line in lines}

    for of_log, of_trace, of_metrics, in_usage in (
        ("prompt_tokens", "gen_ai.usage.input_tokens", "prompt_tokens_total", "prompt_tokens"),
        (
            *("completion_tokens", "gen_ai.usage.output_tokens"),
            *("generation_tokens_total", "completion_tokens"),
        ),
    ):
        total = sum(line[of_log] for line in lines)
        assert total == sum(root[of_trace] for root in roots)
        assert total == metric(of_metrics)
        finished = sum(line[of_log] for line in ended["finished"])
        assert finished == sum(usage[in_usage] for usage in used)
    cached = sum(line["cached_tokens"] for line in lines)
    assert cached == metric("prompt_tokens_cached_total")
    assert metric("request_generation_tokens_sum") == metric("generation_tokens_total")
    assert metric("e2e_request_latency_seconds_count") == FINISHED + ABORTED
    ttft = sum(line["ttft_ms"] for line in lines) / 1000
    assert abs(metric("time_to_first_token_seconds_sum") - ttft) < 1e-4
    by_id = {line["request_id"]: line for line in lines}
    for root in roots:
        line = by_id[root["gen_ai.request.id"]]
        assert abs(root["gen_ai.latency.e2e"] * 1000 - line["e2e_ms"]) < 0.01
