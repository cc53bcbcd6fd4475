"""Spans as a collector gets them, from a server with a real engine."""

import asyncio
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from collector import Collector, attributes, collecting
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult
from serving import serving
from test_process import process

from octavo.engine.stats import EngineStats
from octavo.extras import install_command
from octavo.server.context import RequestContext
from octavo.server.metrics import Metrics
from octavo.server.tracing import Tracer, _Exporter
from patience import PATIENCE, Leave, lose_patience, until

REMOTE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = f"00-{REMOTE}-{PARENT}-01"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@contextmanager
def traced(collector: Collector) -> Iterator[Tracer]:
    tracer = Tracer(collector.url)
    try:
        yield tracer
    finally:
        tracer.close()


def by_name(spans: list[Any]) -> dict[str, Any]:
    named = {span.name: span for span in spans}
    assert len(named) == len(spans)
    return named


async def test_the_spans_of_a_request() -> None:
    before = time.time_ns()
    with collecting() as collector, traced(collector) as tracer:
        async with serving({"trace": tracer.trace}, pause=0.002) as (client, _, _):
            body = {
                "model": "alias", "prompt": "my secret", "max_tokens": 20, "ignore_eos": True,
                "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 2**60, "n": 2,
            }  # fmt: skip
            headers = [
                ("traceparent", TRACEPARENT), ("tracestate", "a=b"), ("tracestate", "c=d"),
                ("x-request-id", "mine"),
            ]  # fmt: skip
            answer = (await client.post("/v1/completions", json=body, headers=headers)).json()
            spans = await asyncio.to_thread(collector.spans, 5)
    after = time.time_ns()
    assert collector.paths[0] == "/v1/traces"
    assert collector.resources[0]["service.name"] == "octavo"
    named = by_name(spans)
    assert named.keys() == {"text_completion tiny", "prepare", "queue", "prefill", "decode"}
    root = named["text_completion tiny"]
    assert root.trace_id.hex() == REMOTE
    assert root.parent_span_id.hex() == PARENT
    assert root.trace_state == "a=b,c=d"
    assert root.kind == 2  # SERVER
    assert root.status.code == 0
    phases = [named[name] for name in ("prepare", "queue", "prefill", "decode")]
    for phase in phases:
        assert (phase.trace_id, phase.parent_span_id) == (root.trace_id, root.span_id)
    # On the wall clock, each phase begins where the one before it ends.
    times = [root.start_time_unix_nano, phases[0].start_time_unix_nano]
    for phase, following in pairwise(phases):
        assert phase.end_time_unix_nano == following.start_time_unix_nano
        times.append(phase.end_time_unix_nano)
    times += [phases[-1].end_time_unix_nano, root.end_time_unix_nano]
    assert before <= times[0]
    assert times == sorted(times)
    assert times[-1] <= after
    assert phases[-1].end_time_unix_nano - phases[-1].start_time_unix_nano >= 19 * 2_000_000
    said = attributes(root)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "alias",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.seed": 2**60,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.n": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 40,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.num_sequences": 2,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "octavo.outcome": "finished",
        "octavo.priority": 0,
        "octavo.preemptions": 0,
    }
    latencies = {
        name.removeprefix("gen_ai.latency."): value
        for name, value in said.items()
        if name not in expected
    }
    assert {name: said[name] for name in expected} == expected
    assert latencies.keys() == {
        *("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill"),
        *("time_in_model_decode", "time_in_model_inference"),
    }
    _, queue, prefill, decode = (
        (phase.end_time_unix_nano - phase.start_time_unix_nano) / 1e9 for phase in phases
    )
    assert latencies["time_in_queue"] == pytest.approx(queue, abs=2e-6)
    assert latencies["time_to_first_token"] == pytest.approx(queue + prefill, abs=2e-6)
    assert latencies["time_in_model_decode"] == pytest.approx(decode, abs=2e-6)
    assert "secret" not in str(spans)


async def test_without_a_parent_each_request_is_a_trace() -> None:
    with collecting() as collector, traced(collector) as tracer:
        async with serving({"trace": tracer.trace}) as (client, _, _):
            parents = (
                [],
                [("traceparent", "00-zz-yy-01")],
                [("traceparent", "é" * 50)],
                [("traceparent", TRACEPARENT)] * 2,
            )
            for parent in parents:
                message = {"role": "user", "content": "a"}
                body = {"messages": [message], "max_tokens": 2, "stream": True}
                headers = [(name, value.encode()) for name, value in parent]
                await client.post("/v1/chat/completions", json=body, headers=headers)
            for path in ("/v1/models", "/health", "/metrics"):
                await client.get(path)
            spans = await asyncio.to_thread(collector.spans, 20)
    assert len(spans) == 20
    roots = [span for span in spans if not span.parent_span_id]
    assert [root.name for root in roots] == ["chat tiny"] * 4
    assert len({root.trace_id for root in roots}) == 4
    assert all(attributes(root)["gen_ai.request.stream"] for root in roots)


async def test_several_prompts_and_what_never_ran() -> None:
    with collecting() as collector, traced(collector) as tracer:
        async with serving({"trace": tracer.trace}) as (client, _, _):
            prompts = ["a", "b", "c"]
            await client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 2})
            refused = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": -1})
            assert refused.status_code == 400
            huge = await client.post("/v1/completions", json={"prompt": "a", "top_k": 2**80})
            assert huge.status_code == 200
            spans = await asyncio.to_thread(collector.spans, 17)
    assert len(spans) == 17
    roots = [span for span in spans if not span.parent_span_id]
    several, refusal, huge_span = roots
    assert attributes(huge_span)["gen_ai.request.top_k"] == str(2**80)
    assert attributes(several)["gen_ai.usage.input_tokens"] == 3
    assert "gen_ai.latency.time_in_model_decode" not in attributes(several)
    children = [span for span in spans if span.parent_span_id == several.span_id]
    found = sorted(
        (attributes(span)["octavo.prompt_index"], span.name)
        for span in children
        if span.name != "prepare"
    )
    assert found == [(i, name) for i in range(3) for name in ("decode", "prefill", "queue")]
    assert refusal.status.code == 0  # the client's fault is no error of the server's
    assert attributes(refusal)["http.response.status_code"] == 400
    assert attributes(refusal)["error.type"] == "BadRequestError"


async def test_a_client_that_leaves_and_an_engine_that_dies() -> None:
    with collecting() as collector, traced(collector) as tracer:
        async with serving({"trace": tracer.trace}) as (client, engine, _):
            body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
            steps = Leave(engine.engine.executor)
            leaves = asyncio.create_task(client.post("/v1/completions", json=body))
            steps.let(2)
            await until(lambda: steps.asked == 3, "a third step")
            leaves.cancel()
            await until(lambda: engine._calls)
            steps.let()
            (*_, left) = await asyncio.to_thread(collector.spans, 5)
            await until(lambda: engine._busy_since is None, "the end of its step")
            lose_patience(engine)
            dead = await client.post("/v1/completions", json=body)
            assert dead.status_code == 500
            spans = await asyncio.to_thread(collector.spans, 7)
            steps.let_all()
    assert attributes(left)["octavo.outcome"] == "aborted"
    assert attributes(left)["http.response.status_code"] == 499
    assert attributes(left)["gen_ai.response.finish_reasons"] == ["abort"]
    failed = spans[-1]
    assert failed.status.code == 2  # ERROR
    assert attributes(failed)["error.type"] == "InternalServerError"


async def test_the_standard_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with collecting() as collector, traced(collector) as tracer:
        async with serving({"trace": tracer.trace}) as (client, _, _):
            body = {"prompt": "a", "max_tokens": 2}
            await client.post("/v1/completions", json=body)  # not sampled
            await client.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT})
            spans = await asyncio.to_thread(collector.spans, 5)
    assert {span.trace_id.hex() for span in spans} == {REMOTE}
    assert collector.resources[0]["service.name"] == "mine"
    assert collector.resources[0]["deployment.environment"] == "test"
    assert collector.headers[0]["x-token"] == "abc"
    assert collector.headers[0]["content-encoding"] == "gzip"


def test_only_http_with_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(ValueError, match="'grpc': traces are sent as http/protobuf only"):
        Tracer("http://127.0.0.1:4317")


async def test_a_collector_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts and never answers. Requests are served, and what waits for it has a bound."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "40")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = Tracer(f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with serving({"trace": tracer.trace}) as (client, _, _):
            for _ in range(100):
                body = {"prompt": "a", "max_tokens": 2}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
        processor = tracer._provider._active_span_processor._span_processors[0]
        assert len(processor._batch_processor._queue) <= 40  # type: ignore[attr-defined]
        closing = threading.Thread(target=tracer.close)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()


async def test_a_collector_that_fails_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """And once when it works again, however many batches it missed; what it missed is counted."""
    caplog.set_level("INFO")
    with collecting() as collector, traced(collector) as tracer:
        metrics = Metrics("tiny", EngineStats, 512)
        tracer.tell = metrics.spans

        def trace() -> None:
            context = RequestContext("id", "POST", "/v1/completions")
            context.ended = context.started
            tracer.trace(context)

        for status, before in ((400, 0), (413, 3)):
            collector.status = status
            for failed in (1, 2, 3):
                trace()
                await until(lambda failed=before + failed: tracer.spans["failed"] == failed)
            said = [record.getMessage() for record in caplog.records]
            (line,) = said
            assert collector.url in line
            assert str(status) in line
            collector.status = 200
            trace()
            await until(lambda: len(caplog.records) == 2)
            assert "takes them again; 3 spans were lost" in caplog.records[1].getMessage()
            caplog.clear()
        assert tracer.spans == {"made": 8, "sent": 2, "failed": 6}
        text = metrics.exposition("")[0].decode()
        for state, number in (("made", 8), ("sent", 2), ("failed", 6)):
            assert re.search(rf'trace_spans_total{{.*state="{state}"}} {number}.0', text)
    assert caplog.messages == ["traces: 6 of 8 spans were not sent"]


def test_an_export_that_raises_has_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(self: object, spans: object) -> None:
        logging.getLogger(OTLPSpanExporter.__module__).warning("It is down, retrying in 0.93s.")
        raise TimeoutError("no answer")

    monkeypatch.setattr(OTLPSpanExporter, "export", raises)
    library = logging.getLogger("opentelemetry.sdk")
    caplog.set_level(logging.DEBUG, library.name)
    exporter = _Exporter("http://h/v1/traces", lambda state, spans: None)
    assert exporter.export([]) is SpanExportResult.FAILURE
    (line,) = caplog.messages
    assert line.endswith("is lost until it works again: It is down")
    assert library.level == logging.ERROR
    exporter.hush(False)
    exporter.hush(False)
    assert library.level == logging.DEBUG


def test_a_process_whose_collector_is_down_serves_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")  # it is tried no second time
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = taken.getsockname()[1]
    with process(otlp_traces_endpoint=f"http://127.0.0.1:{nobody}") as server:
        for _ in range(5):
            body = {"prompt": "a", "max_tokens": 2}
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        end = time.monotonic() + 60
        while "traces: " not in server.said and time.monotonic() < end:
            time.sleep(0.01)
        server.child.terminate()
        assert server.wait() == 0
    assert "trace_id=" in server.said
    assert "Traceback" not in server.said
    assert server.said.count("traces: ") == 2
    assert f"traces: http://127.0.0.1:{nobody}/v1/traces fails" in server.said
    assert "traces: 25 of 25 spans were not sent" in server.said


def test_a_process_sends_what_is_left_when_it_ends() -> None:
    with collecting() as collector:
        endpoint = f"{collector.url}/own/path"
        with process(otlp_traces_endpoint=endpoint, access_log_format="json") as server:
            body = {"prompt": "a", "max_tokens": 2}
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
            server.child.terminate()
            assert server.wait() == 0
        spans = collector.spans(5)
    assert collector.paths[0] == "/own/path"
    assert f'"trace_id": "{spans[0].trace_id.hex()}"' in server.said


def test_without_opentelemetry_the_option_says_how_to_get_it() -> None:
    script = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "sys.argv = ['octavo', 'serve', 'm.gguf', '--otlp-traces-endpoint', 'http://h:4318']\n"
        "from octavo.cli import main, serve\n"
        "import octavo.loader.pull as pull\n"
        "pull.resolve = lambda name: name\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "octavo: --otlp-traces-endpoint needs OpenTelemetry" in done.stderr
    assert install_command("otel") in done.stderr
    assert "opentelemetry-exporter-otlp-proto-http" in done.stderr
