import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.tools.plan.slo import Figures, Slo
from octavo.tools.workload.metrics import (
    LATENCIES,
    Record,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    peak_requests,
    peak_tokens,
    seconds,
    summarise,
    totals,
)


def record(index: int = 0, **fields: Any) -> Record:
    defaults = {"index": index, "success": True, "start": 0.0, "prompt_len": 1, "output_tokens": 1}
    return Record(**(defaults | fields))


#  request  start  first  gaps        last   tokens
#  0        0.0    0.2    0.1 0.1     0.4    3
#  1        0.3    0.7    0.2         0.9    4 (its second event had three)
#  2        1.0    1.5                1.5    1
#  3        fails
WORKED = [
    record(0, start=0.0, prompt_len=10, output_tokens=3, ttft=0.2, latency=0.4, itl=[0.1, 0.1]),
    record(1, start=0.3, prompt_len=20, output_tokens=4, ttft=0.4, latency=0.6, itl=[0.2],
           queue_time=0.3),
    record(2, start=1.0, prompt_len=30, output_tokens=1, ttft=0.5, latency=0.5),
    record(3, start=0.1, prompt_len=40, output_tokens=7, success=False, ttft=0.1, latency=0.2,
           reason="HTTP 500", detail="no"),
]  # fmt: skip


def figures(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "goodput": {}, "percentiles": [50, 99.9], "metrics": list(LATENCIES),
    } | changes  # fmt: skip
    return summarise(WORKED, 2.0, **arguments)


def test_a_worked_example() -> None:
    found = figures()
    expected = {
        "duration": 2.0,
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 60,
        "total_output_tokens": 8,
        "request_throughput": 1.5,
        "request_goodput": None,
        "output_throughput": 4.0,
        "total_token_throughput": 34.0,
        "max_concurrent_requests": 2,
        "max_output_tokens_per_s": 5.0,  # events at 0.2 0.3 0.4 0.7 0.9, then one at 1.5
        "mean_ttft_ms": 1100 / 3,
        "median_ttft_ms": 400.0,
        "mean_tpot_ms": (100 + 200 / 3) / 2,
        "median_tpot_ms": (100 + 200 / 3) / 2,
        "mean_itl_ms": 400 / 3,
        "median_itl_ms": 100.0,
        "mean_e2el_ms": 500.0,
        "std_e2el_ms": np.sqrt(20000 / 3),
        "mean_client_queue_time_ms": 100.0,
        "median_e2el_including_client_queue_ms": 500.0,
        "p50_ttft_ms": 400.0,
        "p99.9_e2el_ms": 599.8,
    }
    for name, value in expected.items():
        assert found[name] == (value if value is None else pytest.approx(value)), name
    assert found["errors"] == ["", "", "", "HTTP 500: no"]
    assert found["output_lens"] == [3, 4, 1, 0]
    assert found["input_lens"] == [10, 20, 30, 40]


def test_only_the_chosen_metrics_are_there() -> None:
    found = figures(metrics=["ttft"], percentiles=[99])
    assert {name for name in found if name.endswith("_ms")} == {
        "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms",
        "median_rejection_ms", "p99_rejection_ms",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("goodput", "good"),
    [
        ({"ttft": 200.0}, 1),
        ({"ttft": 199.9}, 0),
        ({"ttft": 1000.0, "tpot": 70.0}, 2),  # a request of one token has no TPOT to miss
        ({"ttft": 450.0, "tpot": 70.0, "e2el": 600.0}, 1),
        ({"e2el": 0.0}, 0),
    ],
)
def test_goodput_counts_requests_within_every_limit(goodput: dict[str, float], good: int) -> None:
    assert figures(goodput=goodput)["request_goodput"] == good / 2.0


def test_of_nothing() -> None:
    found = summarise([], 0.0, goodput={"ttft": 1}, percentiles=[99], metrics=["ttft", "tpot"])
    assert found["completed"] == found["failed"] == found["request_throughput"] == 0
    assert found["mean_ttft_ms"] == found["p99_tpot_ms"] == 0
    assert peak_tokens([]) == peak_requests([]) == 0


def test_what_no_request_has_is_said_in_the_same_way_by_all() -> None:
    """No TPOT where answers are of one token; no latency where nothing was served."""
    single = [record(0, ttft=0.5, latency=0.5), record(1, ttft=0.3, latency=0.3)]
    failed = [record(0, success=False, reason="failed")]
    limits = {"tpot": 0.001}
    found = totals(single, 2.0, limits)
    assert (found.requests, found.completed, found.good, found.goodput) == (2, 2, 2, 1.0)
    assert found.attainment == 1
    assert found.spread("tpot", (50,)) is None
    assert found.spread("itl", (50,)) is None
    assert found.spread("ttft", (50, 99.9)) == pytest.approx(
        {"mean": 400, "p50": 400, "p99.9": 499.8, "max": 500, "std": 100}
    )
    for records, duration in (([], 0.0), (failed, 1.0)):
        none = totals(records, duration, limits)
        assert (none.completed, none.good, none.goodput, none.attainment) == (0, 0, 0, 0)
        assert none.request_throughput == none.output_throughput == none.token_throughput == 0
        assert all(none.spread(name, (50,)) is None for name in (*LATENCIES, "queue"))
        promised = Figures.of(records, duration, Slo(limits))
        assert promised.as_dict()["tpot_ms"] == {"p50": None, "p99": None}
        assert (promised.attainment, promised.pressure(Slo(limits))) == (0, math.inf)
    kept = Figures.of(single, 2.0, Slo(limits))
    assert kept.as_dict()["tpot_ms"] == {"p50": None, "p99": None}
    assert kept.as_dict()["ttft_ms"] == pytest.approx({"p50": 400, "p99": 498})
    assert (kept.goodput, kept.attainment, kept.pressure(Slo(limits))) == (1.0, 1, 0)
    shown = summarise(single, 2.0, goodput=limits, percentiles=[99], metrics=["tpot", "ttft"])
    assert shown["request_goodput"] == kept.goodput
    assert shown["p99_tpot_ms"] == 0  # as vLLM has it
    assert shown["p99_ttft_ms"] == kept.latencies["ttft"].p99
    with pytest.raises(ValueError, match="'tps' is no latency"):
        seconds("tps", single)


def test_a_request_that_starts_as_another_ends_does_not_overlap_it() -> None:
    assert peak_requests([record(start=0, latency=1), record(start=1, latency=1)]) == 1
    assert peak_requests([record(start=0, latency=1), record(start=0.999, latency=1)]) == 2


times = st.floats(0, 30)


@st.composite
def records(draw: st.DrawFn) -> Record:
    itl = draw(st.lists(st.floats(0, 3), max_size=6))
    ttft = draw(times)
    tokens = draw(st.integers(1, 3))
    return record(
        start=draw(times),
        prompt_len=draw(st.integers(0, 999)),
        output_tokens=tokens * (1 + len(itl)),
        ttft=ttft,
        itl=itl,
        latency=ttft + sum(itl),
        success=draw(st.booleans()),
    )


@settings(max_examples=60)
@given(st.lists(records(), max_size=12), st.floats(0.1, 100), st.floats(0, 100))
def test_against_another_computation(
    found: list[Record], duration: float, percentile: float
) -> None:
    result = summarise(
        found, duration, goodput={"ttft": 9000, "e2el": 15000}, percentiles=[percentile],
        metrics=["ttft", "tpot", "itl", "e2el"],
    )  # fmt: skip
    done = [r for r in found if r.success]
    values: dict[str, list[float]] = {
        "ttft": [r.ttft for r in done],
        "tpot": [sum(r.itl) / (r.output_tokens - 1) for r in done if r.output_tokens > 1],
        "itl": [gap for r in done for gap in r.itl],
        "e2el": [r.ttft + sum(r.itl) for r in done],
    }
    word = str(percentile).removesuffix(".0")
    for name, unordered in values.items():
        times = sorted(unordered) or [0.0]
        place = (len(times) - 1) * percentile / 100
        low = int(place)
        high = min(low + 1, len(times) - 1)
        between = times[low] + (times[high] - times[low]) * (place - low)
        close = {"rel": 1e-6, "abs": 1e-6}
        assert result[f"mean_{name}_ms"] == pytest.approx(statistics.fmean(times) * 1e3, **close)
        assert result[f"median_{name}_ms"] == pytest.approx(statistics.median(times) * 1e3, **close)
        assert result[f"std_{name}_ms"] == pytest.approx(statistics.pstdev(times) * 1e3, **close)
        assert result[f"p{word}_{name}_ms"] == pytest.approx(between * 1e3, **close)
    good = sum(r.ttft <= 9 and r.latency <= 15 for r in done)
    assert result["request_goodput"] == pytest.approx(good / duration)
    assert result["max_concurrent_requests"] == max(
        (sum(o.start <= r.start < o.start + o.latency for o in done) for r in done), default=0
    ) or any(r.latency == 0 for r in done)
    seconds_of: dict[int, int] = {}
    begin = min((r.start for r in done), default=0.0)
    for r in done:
        at = r.start + r.ttft - begin
        for gap in [0.0, *r.itl]:
            at += gap
            seconds_of[round(at, 9) // 1] = seconds_of.get(round(at, 9) // 1, 0) + 1
    # Sums of floats in another order may fall into the next second.
    assert abs(result["max_output_tokens_per_s"] - max(seconds_of.values(), default=0)) <= 1


def test_goodput_is_read() -> None:
    assert parse_goodput(["ttft:500", "tpot:50.5", "e2el:1e3"]) == {
        "ttft": 500.0, "tpot": 50.5, "e2el": 1000.0,
    }  # fmt: skip
    assert parse_goodput([]) == {}


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("ttft", "KEY:MS"),
        ("ttft:", "KEY:MS"),
        ("ttft:fast", "KEY:MS"),
        ("ttft:nan", "KEY:MS"),
        ("ttft:1:2", "KEY:MS"),
        ("itl:5", "none of ttft, tpot, e2el"),
        (":5", "none of"),
        ("ttft:-1", "0 or more"),
        ("e2el:inf", "0 or more"),
    ],
)
def test_a_wrong_goodput_is_refused(text: str, about: str) -> None:
    with pytest.raises(ValueError, match=about):
        parse_goodput([text])


def test_a_limit_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        parse_goodput(["ttft:1", "ttft:2"])


def test_percentiles_and_metrics_are_read() -> None:
    assert parse_percentiles("25,50,99.9") == [25, 50, 99.9]
    assert parse_metrics("ttft, e2el") == ["ttft", "e2el"]
    for text in ("", "x", "101", "-1", "nan", "50,"):
        with pytest.raises(ValueError, match="metric-percentiles"):
            parse_percentiles(text)
    with pytest.raises(ValueError, match="'tpt' is none of"):
        parse_metrics("ttft,tpt")
