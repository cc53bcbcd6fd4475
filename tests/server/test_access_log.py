"""What the log says of requests, as text and as JSON."""

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from serve_fakes import FakeEngine
from serving import listening, real_engine, started
from test_process import process

from octavo.scheduler.request import FinishReason, LatencyTarget, Outcome, RequestRecord
from octavo.server.access_log import of_records
from octavo.server.logs import JsonFormatter
from patience import Leave, until
from scheduling import new_record


@contextmanager
def logged(formatter: logging.Formatter | None = None) -> Iterator[io.StringIO]:
    """What ``octavo.access`` writes meanwhile."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter or logging.Formatter())
    logger = logging.getLogger("octavo.access")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield written
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


async def test_one_object_a_request() -> None:
    engine, _ = real_engine()
    with logged(JsonFormatter()) as written:
        async with (
            started(engine),
            listening(engine) as url,
            httpx.AsyncClient(base_url=url) as client,
        ):
            body = {"prompt": "my secret", "max_tokens": 5, "ignore_eos": True, "user": "me"}
            headers = {"x-request-id": "mine"}
            answer = (await client.post("/v1/completions", json=body, headers=headers)).json()
            stream = body | {"stream": True, "n": 2, "user": None}
            await client.post("/v1/completions", json=stream)
            await client.post("/v1/completions", json={"prompt": "secret", "max_tokens": -1})
            await client.get("/health")
    whole, labels, streamed, refused, _ = map(json.loads, written.getvalue().splitlines())
    assert "secret" not in written.getvalue()
    assert whole["request_id"] == labels["request_id"] == "mine"
    assert labels["labels"] == {"user": "me"}
    assert whole["answer_id"] == answer["id"]
    assert (whole["method"], whole["path"], whole["status"]) == ("POST", "/v1/completions", 200)
    assert whole["model"] == "tiny"
    assert whole["prompt_tokens"] == 9
    assert whole["cached_tokens"] == 0
    assert whole["completion_tokens"] == 5
    assert whole["outcome"] == "finished"
    assert whole["finish_reasons"] == ["length"]
    assert whole["preemptions"] == whole["priority"] == 0
    assert 0 <= whole["queue_ms"] <= whole["ttft_ms"] <= whole["e2e_ms"] <= whole["duration_ms"]
    assert whole["tpot_ms"] >= 0
    assert not {"error_type", "slo_met", "client", "trace_id"} & whole.keys()
    assert whole["level"] == "info"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", whole["time"])
    assert streamed["completion_tokens"] == 10
    assert streamed["finish_reasons"] == ["length", "length"]
    assert refused["error_type"] == "BadRequestError"
    assert "outcome" not in refused


HOSTILE = [
    '/a"b\\',
    "/a%0Ab%0D%0A",
    "/%00%1b%5B31m",
    "/%E2%80%A8%C2%85%E2%80%A9",
    "/%ff%fe",
    '/","status":200,"x":"',
    "/" + "x" * 3000,
    "/a%20id=forged",
]


@pytest.mark.parametrize("path", HOSTILE)
@pytest.mark.parametrize("kind", ["text", "json"])
async def test_nothing_a_client_sends_breaks_the_line(
    path: str, kind: str, engine: FakeEngine
) -> None:
    with logged(JsonFormatter() if kind == "json" else None) as written:
        async with listening(engine) as url, httpx.AsyncClient() as client:
            headers = {"user-agent": 'x"\\', "x-request-id": '"}{"\\'}
            response = await client.get(httpx.URL(url).copy_with(raw_path=path.encode()))
            assert response.status_code in (404, 400)
            await client.get(f"{url}/nothing", headers=headers)
    text = written.getvalue()
    assert text.isascii()
    first, second = text.splitlines()
    assert not re.search(r"[\x00-\x1f]", first)
    if kind == "json":
        assert json.loads(first)["status"] == response.status_code
        assert json.loads(second)["request_id"] == '"}{"\\'


def record(**changes: Any) -> RequestRecord:
    facts: dict[str, Any] = {
        "arrival": 10.0, "prompt_tokens": 7, "n": 2, "cached_tokens": 3, "completion_tokens": 12,
        "scheduled": 10.5, "first_token": 11.0, "last_token": 12.0, "finished": 12.0,
        "preemptions": 1, "outcome": Outcome.FINISHED, "client": "ann", "priority": -3,
        "pauses": 2,
        "finish_reasons": [FinishReason.STOP, FinishReason.LENGTH],
    }  # fmt: skip
    return new_record("id", **(facts | changes))


def test_the_facts_of_a_request() -> None:
    assert of_records([record(target=LatencyTarget(ttft=1.0, tpot=0.2))], 12.0) == {
        "priority": -3, "prompt_tokens": 7, "cached_tokens": 3,
        "completion_tokens": 12, "outcome": "finished", "finish_reasons": ["stop", "length"],
        "preemptions": 1, "queue_ms": 500.0, "ttft_ms": 1000.0, "tpot_ms": 200.0,
        "pauses": 2,
        "e2e_ms": 2000.0, "slo_met": True,
    }  # fmt: skip


def test_the_facts_of_several_prompts() -> None:
    late = record(
        pauses=0,
        scheduled=13.0,
        first_token=None,
        last_token=None,
        finished=14.0,
        completion_tokens=0,
        outcome=Outcome.ABORTED,
        finish_reasons=[FinishReason.ABORT],
        target=LatencyTarget(e2el=3.0),
    )
    facts = of_records([record(target=LatencyTarget(ttft=5.0)), late], 14.0)
    assert facts["outcome"] == "aborted,finished"
    assert facts["finish_reasons"] == ["stop", "length", "abort"]
    assert (facts["queue_ms"], facts["ttft_ms"], facts["e2e_ms"]) == (500.0, 1000.0, 4000.0)
    assert (facts["prompt_tokens"], facts["completion_tokens"]) == (14, 12)
    assert facts["slo_met"] is False


async def test_a_promise_is_kept_alike_in_log_metrics_and_list() -> None:
    """A client that leaves in time is no promise broken, for whoever tells of it."""
    engine, executor = real_engine()
    with logged(JsonFormatter()) as written:
        async with (
            started(engine),
            listening(engine) as url,
            httpx.AsyncClient(base_url=url) as client,
            Leave(executor).one_by_one(),
        ):
            for ttft, kept in ((60_000.0, True), (0.001, False)):
                body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
                body |= {"slo": {"ttft": ttft}}
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    lines = answer.aiter_lines()
                    await anext(lines)
                    [row] = (await client.get("/requests")).json()["engine"]["requests"]
                    assert row["on_target"] is kept
                await until(lambda: not engine.stats().running, "the end")
            await until(lambda: written.getvalue().count("/v1/completions") == 2, "their lines")
            page = (await client.get("/metrics")).text
    told = map(json.loads, written.getvalue().splitlines())
    left, late = [line for line in told if line["path"] == "/v1/completions"]
    assert left["outcome"] == late["outcome"] == "aborted"
    assert "slo_met" not in left
    assert late["slo_met"] is False
    for slo_class, result in (("ttft:60000", "aborted"), ("ttft:0.001", "missed")):
        labels = f'engine="0",model_name="tiny",result="{result}",slo_class="{slo_class}"'
        assert f"octavo:slo_requests_total{{{labels}}} 1.0" in page


async def test_what_is_asked_every_few_seconds_is_for_those_who_debug(engine: FakeEngine) -> None:
    with logged(JsonFormatter()) as written:
        async with listening(engine) as url, httpx.AsyncClient(base_url=url) as client:
            for path in ("/metrics", "/health", "/v1/models"):
                await client.get(path)
            await client.get("/requests?limit=no")  # something is wrong with who asks
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [(line["path"], line["level"]) for line in lines] == [
        ("/metrics", "debug"),
        ("/health", "debug"),
        ("/v1/models", "info"),
        ("/requests", "info"),
    ]


@pytest.mark.parametrize(
    ("settings", "server", "access"),
    [
        ({}, "text", "text"),
        ({"log_format": "json"}, "json", "json"),
        ({"access_log_format": "json"}, "text", "json"),
        ({"log_format": "json", "access_log_format": "text"}, "json", "text"),
    ],
)
def test_the_processs_log(settings: dict[str, str], server: str, access: str) -> None:
    with process(**settings) as running:
        httpx.get(f"{running.url}/v1/models")
        running.child.terminate()
        assert running.wait() == 0
    about_requests = [line for line in running.lines if "/v1/models" in line]
    others = [line for line in running.lines if line not in about_requests]
    assert len(about_requests) == 1
    for lines, kind in ((about_requests, access), (others, server)):
        for line in lines:
            if kind == "json":
                assert json.loads(line)["level"] == "info"
            else:
                assert re.match(r"\d{4}-\d\d-\d\d .* INFO ", line)


@pytest.mark.parametrize("formatter", [None, JsonFormatter()])
async def test_no_client_writes_a_long_line(
    engine: FakeEngine, formatter: logging.Formatter | None
) -> None:
    with logged(formatter) as written:
        async with listening(engine) as url, httpx.AsyncClient(base_url=url) as client:
            path = "/" + "a" * 60_000
            assert (await client.get(path)).status_code == 404
            await client.post("/v1/completions", json={"prompt": "a", "n": 100, "max_tokens": 1})
    of_path, of_choices = written.getvalue().splitlines()
    assert "… (60001 characters)" in of_path or "\\u2026 (60001 characters)" in of_path
    assert len(of_path) < 700
    if formatter is None:
        assert "finish_reasons=length*100" in of_choices
