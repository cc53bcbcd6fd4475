"""What is counted of a record, and by which labels."""

import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from serving import real_engine, started

from octavo.engine.outputs import Delta
from octavo.engine.stats import EngineStats
from octavo.kv_cache.connectors.base import ConnectorStats
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import FinishReason, LatencyTarget, Outcome, Request, RequestRecord
from octavo.server.metrics import Metrics
from octavo.server.metrics.metric_families import Families
from octavo.server.metrics.request_metrics import REJECTIONS
from octavo.server.metrics.slo_metrics import SloMetrics, class_of
from octavo.server.streaming import MergedStream
from paths import ROOT
from scheduling import new_record

TARGET = LatencyTarget(ttft=1.0, tpot=0.1, e2el=5.0)
CLASS = "ttft:1000 tpot:100 e2el:5000"


def record(**changes: Any) -> RequestRecord:
    """One that keeps `TARGET`: first token after 1 s, 0.1 s a token."""
    facts: dict[str, Any] = {
        "arrival": 100.0, "prompt_tokens": 5, "completion_tokens": 11, "scheduled": 100.5,
        "first_token": 101.0, "last_token": 102.0, "finished": 102.0,
        "outcome": Outcome.FINISHED, "finish_reasons": [FinishReason.STOP], "target": TARGET,
    }  # fmt: skip
    return new_record("id", **(facts | changes))


def test_a_scrape_reads_its_source_once() -> None:
    registry, reads = CollectorRegistry(), []

    def source() -> int:
        reads.append(None)
        return len(reads)

    families = Families(registry, "m")
    families.read(source, {"a": ("A gauge.", float)}, {"b": ("A counter.", float)})
    reads.clear()
    list(registry.collect())
    assert len(reads) == 1


class Slo:
    def __init__(self) -> None:
        self.now = 102.0
        self.registry = CollectorRegistry()
        self.metrics = SloMetrics(Families(self.registry, "m"), lambda: self.now)

    def value(self, name: str, **labels: str) -> float:
        labels |= {"model_name": "m", "engine": "0"}
        found = self.registry.get_sample_value(f"octavo:{name}", labels)
        return 0.0 if found is None else found

    def results(self, slo_class: str = CLASS) -> dict[str, float]:
        counts = {
            result: self.value("slo_requests_total", slo_class=slo_class, result=result)
            for result in ("met", "missed", "shed", "aborted")
        }
        return {result: count for result, count in counts.items() if count}


NEVER_BEGUN: dict[str, Any] = {
    "scheduled": None, "first_token": None, "last_token": None, "completion_tokens": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({}, "met"),
        ({"first_token": 101.01}, "missed"),
        ({"last_token": 102.1}, "missed"),  # per token
        ({"finished": 105.5}, "missed"),
        ({"last_token": 110.0, "finished": 110.0, "pauses": 1}, "met"),  # its client did not read
        ({"first_token": 101.01, "pauses": 1}, "missed"),
        ({"outcome": Outcome.FAILED}, "missed"),
        ({"outcome": Outcome.ABORTED}, "aborted"),  # all was well when its client left
        ({"outcome": Outcome.ABORTED, "first_token": 101.5}, "missed"),
        ({"outcome": Outcome.ABORTED, "finished": 100.8} | NEVER_BEGUN, "aborted"),
        ({"outcome": Outcome.ABORTED, "finished": 101.8} | NEVER_BEGUN, "missed"),
        ({"outcome": Outcome.REJECTED, "finish_reasons": [FinishReason.SHED]}, "shed"),
        ({"outcome": Outcome.REJECTED, "finish_reasons": []}, None),
        ({"target": None}, None),
        ({"target": LatencyTarget()}, None),
    ],
)
def test_what_became_of_a_promise(changes: dict[str, Any], result: str | None) -> None:
    slo = Slo()
    slo.metrics.on_end(record(**changes))
    assert slo.results() == ({} if result is None else {result: 1})
    if result is not None:
        tokens = slo.value("slo_tokens_total", slo_class=CLASS, result=result)
        assert tokens == changes.get("completion_tokens", 11)


def test_the_time_that_a_client_does_not_read_is_no_latency() -> None:
    metrics = Metrics("m", EngineStats, 512)
    gaps = MergedStream([], 1, metrics.inter_token.observe)
    for each in (record(), record(last_token=110.0, finished=110.0, pauses=1)):
        for at in (101.0, each.last_token):
            gaps.count(0, each, Delta("id", 0, "a", [1], at=at))
        metrics.on_end(each)
    labels = {"model_name": "m", "engine": "0"}
    for name in ("inter_token_latency", "request_time_per_output_token"):
        assert metrics.registry.get_sample_value(f"octavo:{name}_seconds_count", labels) == 1


def test_the_last_minute() -> None:
    slo = Slo()
    assert slo.value("slo_attainment_perc") == 1
    for changes in ({}, {}, {"first_token": 101.5}, {"outcome": Outcome.ABORTED}):
        slo.metrics.on_end(record(**changes))
    shed = {"outcome": Outcome.REJECTED, "finish_reasons": [FinishReason.SHED]}
    slo.metrics.on_end(record(**shed, completion_tokens=0))
    assert slo.value("slo_attainment_perc") == 2 / 4
    assert slo.value("goodput_requests_per_second") == pytest.approx(2 / 60)
    assert slo.value("goodput_tokens_per_second") == pytest.approx(22 / 60)
    slo.now = 161.9
    slo.metrics.on_end(record(finished=161.9, arrival=160.9, first_token=161.0, last_token=161.9))
    assert slo.value("slo_attainment_perc") == 3 / 5
    slo.now = 162.1  # a minute after the others
    assert slo.value("slo_attainment_perc") == 1
    assert slo.value("goodput_tokens_per_second") == pytest.approx(11 / 60)


def test_a_share_is_of_series_that_are_there() -> None:
    slo = Slo()
    slo.metrics.on_end(record(first_token=103.0))
    labels = {"model_name": "m", "engine": "0", "slo_class": CLASS, "result": "met"}
    assert slo.registry.get_sample_value("octavo:slo_requests_total", labels) == 0


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=60))
def test_clients_cannot_make_series_without_end(limits: list[float]) -> None:
    slo = Slo()
    for limit in limits:
        slo.metrics.on_end(record(target=LatencyTarget(ttft=limit)))
    (family,) = (f for f in slo.registry.collect() if f.name == "octavo:slo_requests")
    samples = [sample for sample in family.samples if sample.name.endswith("_total")]
    assert sum(sample.value for sample in samples) == len(limits)
    classes = {sample.labels["slo_class"] for sample in samples} - {""}
    own = {class_of(LatencyTarget(ttft=limit)) for limit in limits}
    assert len(classes) == min(len(own), 17)
    assert ("other" in classes) == (len(own) > 16)


def test_the_servers_own_promises_keep_their_series_whatever_clients_make_up() -> None:
    slo = Slo()
    slo.metrics.expect(TARGET)
    assert slo.value("slo_requests_total", slo_class=CLASS, result="met") == 0
    for number in range(40):
        slo.metrics.on_end(record(target=LatencyTarget(ttft=10.0 + number)))
    slo.metrics.on_end(record())
    assert slo.results() == {"met": 1}
    assert slo.results("other") == {"met": 24}  # clients have no less for it
    of_priorities = metrics()
    of_priorities.expect([], [77])
    for priority in range(20):
        of_priorities.on_end(record(priority=priority))
    of_priorities.on_end(record(priority=77))
    queue = "request_queue_time_by_priority_seconds_count"
    assert value(of_priorities, queue, priority="77") == 1
    assert value(of_priorities, queue, priority="other") == 11


def test_goodput_has_no_limit() -> None:
    slo = Slo()
    for number in range(12_000):  # 200 a second
        at = 102.0 + number / 200
        slo.metrics.on_end(record(arrival=at - 2, first_token=at - 1, last_token=at, finished=at))
    slo.now = 161.99
    assert slo.value("goodput_requests_per_second") == pytest.approx(200, rel=0.01)
    assert slo.value("goodput_tokens_per_second") == pytest.approx(2200, rel=0.01)
    slo.now = 131.99 + 60
    assert slo.value("goodput_requests_per_second") == pytest.approx(100, rel=0.01)


def metrics(stats: EngineStats | None = None) -> Metrics:
    return Metrics("m", lambda: stats or EngineStats(), 512)


def value(of: Metrics, name: str, **labels: str) -> float | None:
    return of.registry.get_sample_value(
        f"octavo:{name}", {"model_name": "m", "engine": "0", **labels}
    )


def test_series_of_clients_and_priorities_have_a_bound() -> None:
    counted = metrics()
    for number in range(200):
        counted.on_end(record(client=f"c{number}", priority=number))
    assert value(counted, "client_requests_total", client="c127", outcome="finished") == 1
    assert value(counted, "client_requests_total", client="c128", outcome="finished") is None
    assert value(counted, "client_requests_total", client="other", outcome="finished") == 72
    assert value(counted, "client_generation_tokens_total", client="other") == 72 * 11
    queue = "request_queue_time_by_priority_seconds_count"
    assert value(counted, queue, priority="8") == 1  # beside 0, which everybody has
    assert value(counted, queue, priority="other") == 191
    assert value(counted, "request_queue_time_seconds_count") == 200


def test_usage_of_a_client() -> None:
    counted = metrics()
    counted.on_end(record(client="ann"))
    counted.on_end(record(client="ann", outcome=Outcome.ABORTED, completion_tokens=3))
    counted.on_end(record(client="ann", outcome=Outcome.REJECTED, **NEVER_BEGUN))
    counted.refuse("quota", "ann")  # who answers it counts it
    counted.refuse("quota")
    counted.on_end(record())  # of nobody by name
    for outcome in ("finished", "aborted", "rejected"):
        assert value(counted, "client_requests_total", client="ann", outcome=outcome) == 1
    assert value(counted, "client_prompt_tokens_total", client="ann") == 10
    assert value(counted, "client_generation_tokens_total", client="ann") == 14
    assert value(counted, "client_requests_total", client="", outcome="finished") == 1
    assert value(counted, "client_requests_total", client="", outcome="rejected") == 1
    assert value(counted, "admission_rejections_total", reason="quota") == 2
    shed = {"outcome": Outcome.REJECTED, "finish_reasons": [FinishReason.SHED]}
    counted.on_end(record(client="ann", **shed))
    assert value(counted, "client_requests_total", client="ann", outcome="rejected") == 2


def test_every_reason_is_there_before_it_is_needed() -> None:
    counted = metrics()
    for reason in REJECTIONS:
        assert value(counted, "admission_rejections_total", reason=reason) == 0
    counted.on_end(record(outcome=Outcome.REJECTED, finish_reasons=[FinishReason.SHED]))
    assert value(counted, "admission_rejections_total", reason="shed") == 1
    counted.on_end(record(outcome=Outcome.REJECTED, finish_reasons=[]))
    assert value(counted, "admission_rejections_total", reason="invalid") == 0  # by who answers
    for reason in ("stop", "length", "abort", "error"):
        assert value(counted, "request_success_total", finished_reason=reason) == 0


def test_sources_add_up() -> None:
    connectors = {
        "host": ConnectorStats(used_bytes=1, capacity_bytes=2),
        "disk": ConnectorStats(used_bytes=3, capacity_bytes=4),
    }
    counted = metrics(
        EngineStats(
            prompt_tokens=100, prefix_queries=90, prefix_hits=60,
            external_hits={"host": 20, "disk": 10}, waiting=5, waiting_deferred=2,
            connectors=connectors,
        )
    )  # fmt: skip
    by_source = {
        source: value(counted, "prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert by_source == {"local_compute": 40, "local_cache_hit": 30, "external_kv_transfer": 30}
    cached = [
        value(counted, "prompt_tokens_cached_by_source_total", source=source)
        for source in ("device", "host", "disk")
    ]
    assert cached == [30, 20, 10]
    assert value(counted, "prompt_tokens_cached_total") == 60
    assert value(counted, "prefix_cache_hits_total") == 30
    assert value(counted, "external_prefix_cache_queries_total") == 60
    assert value(counted, "external_prefix_cache_hits_total") == 30
    waiting = [
        value(counted, "num_requests_waiting_by_reason", reason=reason)
        for reason in ("capacity", "deferred")
    ]
    assert waiting == [3, 2]
    assert value(metrics(), "external_prefix_cache_hits_total") == 0
    assert value(metrics(), "external_prefix_cache_queries_total") == 0


async def test_phases_add_up_to_the_steps() -> None:
    engine, _ = real_engine(pause=0.002)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    async with started(engine):
        request = Request(request_id="one", prompt_token_ids=[5, 6, 7], params=params)
        async for _ in engine.submit(request):
            pass
    stats = engine.stats()
    counted = Metrics("m", lambda: stats, 512)
    phases = {
        phase: value(counted, "step_phase_seconds_total", phase=phase) or 0.0
        for phase in ("schedule", "execute", "sample", "deliver")
    }
    assert min(phases.values()) > 0
    assert sum(phases.values()) == pytest.approx(stats.step_seconds)
    assert phases["execute"] >= 0.002 * stats.steps


def test_scrapes_while_requests_end() -> None:
    """The engine's thread counts, another reads."""
    counted = metrics()
    done = threading.Event()

    def count() -> None:
        for number in range(2000):
            counted.on_end(record(client=f"c{number % 200}", priority=number % 20))
        done.set()

    thread = threading.Thread(target=count)
    thread.start()
    while not done.is_set():
        for accept in ("", "application/openmetrics-text"):
            assert counted.exposition(accept)[0]
    thread.join()
    assert value(counted, "request_success_total", finished_reason="stop") == 2000


def test_a_server_that_was_asked_for_nothing_has_every_name_of_the_dashboard() -> None:
    asked = metrics()
    asked.http("/ready", "GET", 200)
    text = asked.exposition("")[0].decode()
    there = {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }
    dashboard = (ROOT / "docs/grafana.json").read_text()
    names = set(re.findall(r"octavo:\w+", dashboard))
    assert len(names) > 50
    assert names <= there


@pytest.mark.parametrize(
    ("accept", "open_metrics"),
    [
        ("application/openmetrics-text;version=1.0.0;q=0.6,text/plain;q=0.5,*/*;q=0.1", True),
        ("text/plain, application/openmetrics-text", True),
        ("Application/OpenMetrics-Text", True),
        ("application/openmetrics-text; q=1.000", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;version=1.0.0; Q=0.000, */*", False),
        ("application/openmetrics-text;q=0.4,text/plain;version=0.0.4;q=0.5", False),
        ("application/openmetrics-textual", False),
        ("*/*", False),
        (";;,q=,", False),
    ],
)
def test_the_format_that_is_wanted(accept: str, open_metrics: bool) -> None:
    media = metrics().exposition(accept)[1].split(";")[0]
    assert media == ("application/openmetrics-text" if open_metrics else "text/plain")
