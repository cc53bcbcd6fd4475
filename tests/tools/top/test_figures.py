"""Rates, shares and quantiles, reckoned by hand beside."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from samples import request, sample

from octavo.tools.top.figures import SORTS, WINDOW, History, as_json, quantile, sorted_requests
from octavo.tools.top.source import ScrapedMetrics

INF = math.inf


def test_rates_are_of_the_last_seconds() -> None:
    history = History()
    for second in range(11):
        # 100 output tokens a second at first, 700 in the last three seconds.
        output = 100 * min(second, 7) + 700 * max(0, second - 7)
        history.add(
            sample(
                second,
                prompt_tokens=50 * second,
                generation_tokens=output,
                steps=10 * second,
                computed=400 * second,
                busy=0.8 * second,
            )
        )
    batch = history.figures().batch
    assert batch.output_tokens_per_second == pytest.approx(700)
    assert batch.prompt_tokens_per_second == pytest.approx(50)
    assert batch.tokens == pytest.approx(40)
    assert batch.seconds == pytest.approx(0.08)
    assert batch.busy == pytest.approx(0.8)
    assert batch.predicted_seconds is None
    assert batch.ratio is None


def test_an_idle_engine_shows_its_last_step() -> None:
    history = History()
    for second in range(5):
        history.add(sample(second, steps=7, busy=1.0, step_tokens=16, step_seconds=0.0125))
    batch = history.figures().batch
    assert (batch.tokens, batch.seconds, batch.busy) == (16, 0.0125, 0.0)
    assert (batch.prompt_tokens_per_second, batch.output_tokens_per_second) == (0.0, 0.0)


def test_predicted_step_times() -> None:
    history = History()
    history.add(sample(0, predicted=(1.0, 100), actual=(1.0, 100)))
    history.add(sample(4, predicted=(3.0, 200), actual=(4.0, 200), gauges={"step_time_ratio": 9}))
    batch = history.figures().batch
    assert batch.predicted_seconds == pytest.approx(0.02)
    assert batch.ratio == pytest.approx(1.5)


def test_a_request_has_its_rate_of_late_or_its_mean() -> None:
    history = History()
    history.add(sample(0, requests=[request("old", output_tokens=100, tokens_per_second=50.0)]))
    rows = [
        request("old", output_tokens=130, tokens_per_second=42.0),
        request("new", output_tokens=9, tokens_per_second=8.5),
        request("waits", state="waiting", output_tokens=0, ttft=None, tokens_per_second=None),
    ]
    history.add(sample(3, requests=rows))
    shown = {row.id: row.tokens_per_second for row in history.figures().engine.requests}
    assert shown == {"old": pytest.approx(10.0), "new": 8.5, "waits": None}


def test_latencies_are_of_the_last_minute() -> None:
    history = History()
    for second in range(0, 200, 2):
        # Every second one request of 0.15 s; in the first minute as many of 5 s.
        slow = float(min(second, 60))
        history.add(sample(second, ttft={0.1: 0.0, 0.2: second, 4.0: second, INF: second + slow}))
    figures = history.figures()
    assert figures.window == pytest.approx(WINDOW)
    ttft = figures.latency["ttft"]
    assert ttft.count == 60
    assert ttft.p50 == pytest.approx(0.15)
    assert ttft.p99 == pytest.approx(0.199)
    assert (ttft.p50_bound, ttft.p99_bound) == ("", "")
    ever = history.figures(since_start=True)
    assert ever.window is None
    assert ever.latency["ttft"].count == 198 + 60
    assert (ever.latency["ttft"].p99, ever.latency["ttft"].p99_bound) == (4.0, ">")
    assert figures.latency["e2e"].count == 0
    assert figures.latency["e2e"].p99 is None


def test_the_first_sample_says_what_has_been_since_the_start() -> None:
    history = History()
    history.add(sample(7, ttft={0.1: 0.0, 0.2: 4.0, INF: 4.0}, queries=10, hits=4))
    figures = history.figures()
    assert figures.window is None
    assert figures.latency["ttft"].count == 4
    assert figures.hit_rate == pytest.approx(0.4)


def test_shares() -> None:
    history = History()
    history.add(sample(0, queries=100, hits=100))
    history.add(sample(5, queries=300, hits=150, drafts=80, accepted=60))
    figures = history.figures()
    assert figures.hit_rate == pytest.approx(0.25)
    assert figures.acceptance == pytest.approx(0.75)
    history.add(sample(6, queries=300, hits=150, drafts=80, accepted=60))
    assert history.figures().hit_rate == pytest.approx(0.25)


@pytest.mark.parametrize("change", [{"started": 77.0}, {"steps": 1}, {"clock": -100.0}])
def test_a_server_that_starts_anew_begins_anew(change: dict[str, float]) -> None:
    history = History()
    history.add(sample(0, steps=50, generation_tokens=1000))
    history.add(sample(10, steps=90, generation_tokens=2000))
    later = {"steps": 90, "generation_tokens": 10} | change
    history.add(sample(later.pop("clock", 20), **later))
    figures = history.figures()
    assert figures.window is None
    assert figures.batch.output_tokens_per_second == 0.0


def test_the_history_is_bounded() -> None:
    history = History()
    for tenth in range(5000):
        history.add(sample(tenth / 10))
    assert len(history._samples) <= 10 * WINDOW + 2


@pytest.mark.parametrize(
    ("cumulative", "q", "value", "bound"),
    [
        ([(1, 0), (2, 10), (INF, 10)], 0.5, 1.5, ""),
        ([(1, 0), (2, 10), (INF, 10)], 0.99, 1.99, ""),
        ([(1, 5), (2, 10), (INF, 10)], 0.5, 1.0, "<"),
        ([(1, 5), (2, 10), (INF, 10)], 0.75, 1.5, ""),
        ([(1, 1), (2, 1), (4, 1), (INF, 10)], 0.5, 4.0, ">"),
        ([(1, 0), (2, 0), (4, 2), (INF, 2)], 0.5, 3.0, ""),
    ],
)
def test_quantiles(
    cumulative: list[tuple[float, float]], q: float, value: float, bound: str
) -> None:
    assert quantile(cumulative, q) == (pytest.approx(value), bound)


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_in_its_bucket(values: list[float], q: float) -> None:
    """Through Prometheus's own exposition and back."""
    registry = CollectorRegistry()
    buckets = (0.5, 1.0, 2.0, 5.0, 10.0)
    name = "octavo:time_to_first_token_seconds"
    histogram = Histogram(name, "x", ("model_name",), buckets=buckets, registry=registry)
    for value in values:
        histogram.labels("m").observe(value)
    counts = ScrapedMetrics.read(generate_latest(registry).decode())
    cumulative = sorted(counts.buckets["time_to_first_token_seconds"].items())
    found, bound = quantile(cumulative, q)
    true = sorted(values)[math.ceil(q * len(values)) - 1]
    if bound == "<":
        assert true <= found == buckets[0]
    elif bound == ">":
        assert true > found == buckets[-1]
    else:
        lower = max((b for b in buckets if b < true), default=0.0)
        assert lower <= found <= min(b for b in buckets if b >= true)


def test_sorting() -> None:
    rows = [
        request("a", age=1.0, output_tokens=5, ttft=0.2, tokens_per_second=3.0, client="zoe"),
        request("b", age=9.0, output_tokens=1, ttft=None, tokens_per_second=None, client=""),
        request("c", age=4.0, output_tokens=8, ttft=0.9, tokens_per_second=7.0, client="ann"),
    ]
    order = {by: "".join(row.id for row in sorted_requests(rows, by)) for by in SORTS}
    assert order == {
        "order": "abc",
        "age": "bca",
        "tok/s": "cab",
        "out": "cab",
        "prompt": "abc",
        "ttft": "cab",
        "client": "cab",
    }


def test_as_json() -> None:
    history = History()
    history.add(sample(0))
    rows = [request(str(index)) for index in range(3)]
    history.add(
        sample(4, requests=rows, unlisted=7, rejected={"capacity": 2.0}, ended={"stop": 5.0})
    )
    facts = as_json(history.figures(), "http://x")
    assert set(facts) == {
        *("url", "time", "model", "version", "draining", "uptime", "running", "waiting"),
        *("waiting_tokens", "max_num_seqs", "preemptions", "batch", "pool", "window", "latency"),
        *("rejected", "ended", "slo_attainment", "goodput", "acceptance", "requests", "unlisted"),
    }
    assert set(facts["latency"]) == {"ttft", "itl", "e2e", "queue"}
    assert set(facts["latency"]["ttft"]) == {"count", "p50", "p99", "p50_bound", "p99_bound"}
    assert (facts["unlisted"], len(facts["requests"])) == (7, 3)
    assert facts["requests"][0]["id"] == "0"
    assert (facts["rejected"], facts["ended"]) == ({"capacity": 2}, {"stop": 5})
    pool = facts["pool"]
    assert pool["used"] + pool["cached"] + pool["free"] == pool["blocks"]


def test_metrics_are_read_by_name_and_summed_over_labels() -> None:
    text = """\
# HELP octavo:prompt_tokens_total Prompt tokens.
# TYPE octavo:prompt_tokens_total counter
octavo:prompt_tokens_total{engine="0",model_name="m"} 5.0
octavo:prompt_tokens_total{engine="1",model_name="m"} 7.0
# TYPE octavo:prompt_tokens_by_source_total counter
octavo:prompt_tokens_by_source_total{source="x"} 100.0
# TYPE octavo:admission_rejections_total counter
octavo:admission_rejections_total{engine="0",reason="capacity"} 3.0
octavo:admission_rejections_total{engine="0",reason="quota"} 1.0
# TYPE octavo:request_success_total counter
octavo:request_success_total{finished_reason="stop"} 9.0
# TYPE octavo:step_time_seconds histogram
octavo:step_time_seconds_bucket{le="+Inf"} 4.0
octavo:step_time_seconds_count 4.0
octavo:step_time_seconds_sum 0.5
# TYPE octavo:step_time_ratio gauge
octavo:step_time_ratio 1.25
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
# TYPE somebody:elses counter
somebody:elses{a="\\"} 1.0
"""
    counts = ScrapedMetrics.read(text)
    assert counts.totals == {"prompt_tokens": 12.0}
    assert counts.by_label == {
        "admission_rejections": {"capacity": 3.0, "quota": 1.0},
        "request_success": {"stop": 9.0},
    }
    assert counts.sums == {"step_time_seconds": (0.5, 4.0)}
    assert counts.gauges == {"step_time_ratio": 1.25}
    assert counts.started == 1.7e9


def test_a_ratio_that_is_not_known_is_none() -> None:
    """As a server says it whose model has not been calibrated."""
    text = "# TYPE octavo:step_time_ratio gauge\noctavo:step_time_ratio NaN\n"
    assert ScrapedMetrics.read(text).gauges == {}


def test_random_order_does_not_change_what_is_read() -> None:
    lines = [f'octavo:time_to_first_token_seconds_bucket{{le="{b}"}} {n}.0\n' for b, n in
             (("0.1", 1), ("0.5", 2), ("+Inf", 4))]  # fmt: skip
    head = "# TYPE octavo:time_to_first_token_seconds histogram\n"
    random.Random(1).shuffle(lines)
    buckets = ScrapedMetrics.read(head + "".join(lines)).buckets["time_to_first_token_seconds"]
    assert buckets == {0.1: 1.0, 0.5: 2.0, INF: 4.0}
