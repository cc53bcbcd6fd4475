"""The simulated engine: what must hold of any load, and the pictures that serving is known by."""

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import classic_pictures as pictures
from octavo.engine.config import DoesNotFit, EngineConfig, SettingsError
from octavo.engine.engine import Step
from octavo.engine.leap import Leap
from octavo.scheduler.request import RequestRecord
from octavo.tools.plan import load_replay
from octavo.tools.plan.capacity import capacity
from octavo.tools.plan.hardware import PUBLISHED, Device
from octavo.tools.plan.load_replay import QUEUE_FULL, replay
from octavo.tools.plan.phase import prefill_batch
from octavo.tools.plan.report import INTERVALS, figures, text
from octavo.tools.plan.saturation import Saturation, saturation
from octavo.tools.plan.schemes import scheme
from octavo.tools.plan.series import Series
from octavo.tools.plan.simulation import Setup, Simulation, simulate, simulated_engine, weights_on
from octavo.tools.plan.subject import Subject
from octavo.tools.plan.timeline import Timeline
from octavo.tools.workload.datasets import PREFIXES, RANDOM, Part, Sample
from octavo.tools.workload.demand import Demand
from paths import TINY

LLAMA = Subject.find("llama-3-8b")
H100 = PUBLISHED["h100"]
SLO = {"ttft": 500.0, "tpot": 50.0}


def setup(device: Device = H100, speculative: dict[str, Any] | None = None, **more: Any) -> Setup:
    techniques = {
        name: more.pop(name)
        for name in ("batching", "memory", "chunked_prefill", "acceptance")
        if name in more
    }
    defaults = {"memory_utilization": 0.9, "max_num_batched_tokens": 2048}
    config = EngineConfig(**(defaults | more), speculative_config=speculative)
    return Setup(LLAMA, weights_on(device, LLAMA), device, config, **techniques)


def alone(index: int, prompt_len: int, output_len: int, arrival: float = 0.0) -> Sample:
    return Sample(prompt_len, output_len, (Part(RANDOM + 1 + index, prompt_len),), arrival=arrival)


def poisson(count: int, rate: float, seed: int = 0, **lengths: int) -> list[Sample]:
    demand = Demand(
        num_prompts=count, request_rate=rate, seed=seed, random_range_ratio=0.5,
        random_input_len=lengths.get("input_len", 512),
        random_output_len=lengths.get("output_len", 100),
    )  # fmt: skip
    samples, _ = demand.timed(len)
    return samples


# --- what a request takes ------------------------------------------------------------------------


def test_a_request_alone_takes_what_its_steps_cost() -> None:
    run = simulate(setup(), [alone(0, 1000, 5)])
    (record,) = run.replay.records
    executor = run.engine.executor
    assert record.ttft == executor.costs.seconds(prefill_batch(1000), executor.rates)
    assert len(record.itl) == 4
    assert record.itl[0] < record.itl[-1]  # a key more each time
    assert record.latency == pytest.approx(record.ttft + sum(record.itl))
    assert (record.output_tokens, record.waited, record.cached_tokens) == (5, 0.0, 0)


@pytest.mark.parametrize(
    ("count", "rate", "output_len"), [(300, 20.0, 100), (40, 0.1, 100), (40, 0.02, 5)]
)
def test_time_adds_up(count: int, rate: float, output_len: int) -> None:
    """Little's law: sequences that run are arrivals a second times the time that each runs."""
    run = simulate(setup(), poisson(count, rate, output_len=output_len))
    found = figures(run, SLO)
    served = [record.latency - record.waited for record in run.replay.records]
    assert found["running"]["mean"] == pytest.approx(sum(served) / found["duration"], rel=1e-6)
    over = found["over_time"]
    assert sum(over["running"]) / INTERVALS == pytest.approx(found["running"]["mean"])
    assert found["completed"] == count
    assert found["total_output_tokens"] == sum(sample.output_len for sample in run.samples)
    assert found["steps"] * found["mean_step_ms"] / 1e3 == pytest.approx(
        found["duration"] - run.replay.idle
    )
    run.engine.check_integrity()


def test_means_are_of_the_whole_time_also_of_that_without_requests() -> None:
    """Five requests a minute apart: busy for 1.2 % of the time, with one sequence."""
    timeline = Timeline()
    samples = [alone(index, 500, 100, arrival=60.0 * index) for index in range(5)]
    run = simulate(setup(), samples, observers=[timeline])
    found = figures(run, SLO)
    assert found["busy"] < 0.02
    assert found["running"]["mean"] == pytest.approx(found["busy"])
    assert found["running"]["max"] == 1
    held = found["kv_usage"]["max"] * found["busy"]
    assert 0.8 * held < found["kv_usage"]["mean"] < held
    over = found["over_time"]
    assert max(over["running"]) < 0.5  # of an interval of 2.4 s each request takes 0.7
    assert [value for value in over["running"][2:24] if value] == []
    levels = [e["args"]["running"] for e in events(timeline, run) if e["name"] == "running"]
    times = [e["ts"] / 1e6 for e in events(timeline, run) if e["name"] == "running"]
    area = sum(
        level * (after - before)
        for level, (before, after) in zip(levels, pairwise(times), strict=False)
    )
    assert area == pytest.approx(found["busy"] * found["duration"])
    idle = [
        after - before
        for level, (before, after) in zip(levels, pairwise(times), strict=False)
        if level == 0
    ]
    assert sum(idle) == pytest.approx(run.replay.idle, rel=0.01)


def events(timeline: Timeline, run: Simulation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = timeline.trace(run)["traceEvents"]
    return found


def test_what_a_client_holds_back_is_shown() -> None:
    """Half of what 8 sequences serve is sent by a client that allows 2 at a time."""
    samples = poisson(100, 0.8 * served())
    run = simulate(setup(**FEW), samples, max_concurrency=2)
    found = figures(run, SLO, capacity=capacity(run)) | {"notices": []}
    waits = [record.queue_time for record in run.replay.records]
    assert found["client_queue_ms"]["mean"] == pytest.approx(1e3 * np.mean(waits))
    assert found["client_queue_ms"]["max"] == 1e3 * max(waits) > 1000
    assert found["queue_ms"]["max"] < 100
    assert found["saturated"]
    served_by_two = 100 / run.replay.duration
    assert found["headroom"] == pytest.approx(served_by_two / (0.8 * served()), rel=0.05)
    held = sum(wait > 0 for wait in waits)
    said = f"the client held back {held} of 100 requests, for "
    assert said in found["saturation"]["why"]
    assert said in text(found)
    assert "held back by the client" in text(found)
    assert "requests that were sent then" in text(found)
    free = figures(simulate(setup(**FEW), samples), SLO) | {"notices": []}
    assert free["client_queue_ms"]["max"] == free["saturation"]["held"] == 0
    assert "client" not in text(free)
    few = figures(simulate(setup(**FEW), poisson(100, 1.0), max_concurrency=2), SLO)
    assert few["saturation"]["held"] > 0
    assert not few["saturated"]
    assert "the client held back" in few["saturation"]["why"]


def test_a_client_that_holds_some_back_does_not_hide_the_engines_own_queue() -> None:
    found = verdict(poisson(150, 3 * served()), most=40)
    assert found.held > 0
    assert found.saturated
    assert found.headroom == pytest.approx(1 / 3, rel=0.1)


def test_a_closed_loop_keeps_to_its_concurrency() -> None:
    run = simulate(setup(), [alone(i, 100, 20) for i in range(12)], max_concurrency=3)
    found = figures(run, SLO)
    assert found["running"]["max"] <= 3
    assert found["waiting"]["max"] == 0
    ends = sorted(record.start + record.latency for record in run.replay.records)
    starts = [record.start for record in run.replay.records]
    assert starts[:3] == [0.0] * 3
    assert starts[3:] == pytest.approx(ends[:9])
    assert [record.queue_time for record in run.replay.records] == starts
    assert not found["saturated"]


def test_shared_blocks_are_real_prefix_hits() -> None:
    """The first of four prompts of 512 + 100 tokens computes the shared 512, 32 blocks of 16."""
    parts = (Part(PREFIXES, 512),)
    samples = [
        Sample(612, 4, (*parts, Part(RANDOM + 1 + index, 100)), arrival=float(index))
        for index in range(4)
    ]
    found = figures(simulate(setup(), samples), SLO)
    assert found["prefix_hits"] == 3 * 512
    assert found["prefix_queries"] == 4 * 612
    off = figures(simulate(setup(enable_prefix_caching=False), samples), SLO)
    assert off["prefix_hits"] == 0
    assert off["ttft_ms"]["mean"] > 1.5 * found["ttft_ms"]["p50"]


# --- what is refused -----------------------------------------------------------------------------


def test_what_does_not_fit_the_context_is_counted_and_named() -> None:
    run = simulate(setup(), [alone(0, 8192, 1), alone(1, 100, 10), alone(2, 8100, 93)])
    found = figures(run, SLO) | {"notices": []}
    assert (found["requests"], found["completed"], found["rejected"]) == (3, 1, 2)
    (reason,) = found["reasons"]
    assert reason["count"] == 2
    assert "! 2 x rejected: request 0: the prompt has 8192 tokens; the context" in text(found)
    assert run.replay.records[2].detail.startswith("8100 prompt tokens + 93 max_tokens = 8193,")
    assert found["request_goodput"] == 1 / found["duration"]


def test_tokens_of_what_is_too_long_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    draws = load_replay.draws

    def seen(seed: int, key: int, length: int) -> Any:
        made.append(length)
        return draws(seed, key, length)

    monkeypatch.setattr(load_replay, "draws", seen)
    samples = [
        Sample(length, 5, (Part(RANDOM + 1, length),), arrival=0.0) for length in (99_999_999, 50)
    ]
    records = simulate(setup(), samples).replay.records
    assert [record.reason for record in records] == ["rejected", ""]
    assert "the prompt has 99999999 tokens; the context of" in records[0].detail
    assert made == [50]


def test_what_does_not_fit_the_device_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(DoesNotFit, match=r"available - 14\.96 GiB weights"):
        simulate(setup(PUBLISHED["t4"]), [alone(0, 1, 1)])
    four_bits = replace(setup(PUBLISHED["t4"]), stored=weights_on(H100, LLAMA, scheme("q4_0")))
    assert simulate(four_bits, [alone(0, 1, 1)]).replay.records[0].success
    unknown = Device("figures", H100.rates)
    with pytest.raises(SettingsError, match="the memory of figures is not known"):
        simulate(setup(unknown), [alone(0, 1, 1)])


def test_speculation_needs_an_acceptance_rate_and_the_other_way() -> None:
    with pytest.raises(ValueError, match="acceptance rate"):
        setup(speculative={"method": "ngram"})
    with pytest.raises(ValueError, match="acceptance rate"):
        setup(acceptance=0.5)


@pytest.mark.parametrize(
    "how",
    [
        {"method": "draft_model", "model": "no-such-model"},
        {"method": "medusa", "model": "no-such-folder"},
        {"method": "layer_skip", "layers": [0]},
    ],
)
def test_drafters_that_compute_are_not_simulated_as_free(how: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"'{how['method']}' is not simulated"):
        setup(speculative=how, acceptance=0.5)


# --- what each technique brings ------------------------------------------------------------------


def test_reserving_lets_four_of_eight_run_and_paging_all_on_arrival() -> None:
    base = pictures.setup("llama-3-8b", "h100")
    reserved, paged = (
        figures(pictures.eight_in_96_blocks(base, memory), SLO) for memory in ("reserve", "paged")
    )
    assert (reserved["running"]["max"], reserved["waiting"]["max"]) == (4, 4)
    assert (paged["running"]["max"], paged["waiting"]["max"]) == (8, 0)
    assert paged["preemptions"] == reserved["preemptions"] == 0
    assert paged["queue_ms"]["max"] == 0 < reserved["queue_ms"]["p90"]
    assert reserved["duration"] > 1.8 * paged["duration"]


def test_reserved_memory_is_mostly_waste_and_pages_are_not() -> None:
    base = pictures.setup("llama-3-8b", "h100")
    reserved = pictures.where_memory_goes(base, "reserve")
    paged = pictures.where_memory_goes(base, "paged")
    assert 0.60 <= reserved["kv_waste"] <= 0.80
    assert paged["kv_waste"] < 0.04


def test_continuous_batching_is_several_times_static() -> None:
    base = pictures.setup("llama-2-7b", "a100-40gb")
    static = pictures.throughput(base, "static", "reserve", 256, 200)
    only_continuous = pictures.throughput(base, "continuous", "reserve", 256, 200)
    both = pictures.throughput(base, "continuous", "paged", 256, 200)
    assert static["completed"] == both["completed"] == 200
    assert only_continuous["output_throughput"] > 2 * static["output_throughput"]
    assert both["output_throughput"] > 3 * static["output_throughput"]


def test_paging_serves_two_to_four_times_as_much_where_memory_is_short() -> None:
    """Kwon et al. report 2 to 4 times; sums of blocks say how many run: 6 reserved."""
    reserved, paged = (pictures.what_paging_brings(memory, 100) for memory in ("reserve", "paged"))
    base = pictures.setup(*pictures.SHORT_OF_MEMORY)
    assert reserved["running"]["max"] == base.plan()[0].num_blocks * 16 // pictures.CONTEXT
    assert 2 <= paged["output_throughput"] / reserved["output_throughput"] <= 4
    assert paged["kv_waste"] < 0.04


def test_chunks_keep_a_long_prompt_from_holding_up_the_others() -> None:
    """One sequence decodes when a prompt of 8,000 tokens comes."""
    samples = [alone(0, 16, 400), alone(1, 8000, 2, arrival=0.5)]
    chunked = simulate(setup(max_num_batched_tokens=512), samples)
    whole = simulate(setup(max_num_batched_tokens=8192, chunked_prefill=False), samples)
    pauses = [max(run.replay.records[0].itl) for run in (chunked, whole)]
    assert pauses[1] > 8 * pauses[0]


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 60), st.floats(0, 2)), min_size=1, max_size=12
    ),
    blocks=st.integers(24, 80),
)
@settings(max_examples=25)
def test_where_memory_is_paged_it_does_not_matter_what_requests_allow_for(
    lengths: list[tuple[int, int, float]], blocks: int
) -> None:
    """Answers end by themselves; with preemptions, too."""
    size = setup().config.layout_of(LLAMA.program.config).block_bytes
    small = setup(kv_cache_memory_bytes=blocks * size, max_model_len=384, max_num_seqs=8)
    times = sorted(arrival for *_, arrival in lengths)
    samples = [
        alone(index, prompt_len, output_len, time)
        for index, ((prompt_len, output_len, _), time) in enumerate(
            zip(lengths, times, strict=True)
        )
    ]
    runs = []
    for most in (None, 300):
        asked = [
            replace(sample, max_tokens=most and min(most, 384 - sample.prompt_len))
            for sample in samples
        ]
        run = simulate(small, asked)
        assert all(record.success for record in run.replay.records)
        run.engine.check_integrity()
        runs.append(
            [
                (record.ttft, record.latency, record.output_tokens, record.preemptions)
                for record in run.replay.records
            ]
        )
    assert runs[0] == runs[1]
    assert [each[2] for each in runs[0]] == [output_len for _, output_len, _ in lengths]


# --- speculation ---------------------------------------------------------------------------------


def speculating(acceptance: float, tokens: int | None, count: int = 16) -> Simulation:
    chosen = setup(
        speculative={"method": "ngram", "num_speculative_tokens": tokens}, acceptance=acceptance
    )
    return simulate(chosen, [alone(i, 50, 200, arrival=i / 4) for i in range(count)])


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_guesses_are_right_as_often_as_said_at_each_position(acceptance: float) -> None:
    stats = speculating(acceptance, 4).engine.stats()
    tried = stats.drafts
    for right in stats.accepted_per_position[:3]:
        # A binomial share, within four deviations.
        spread = 4 * (acceptance * (1 - acceptance) / tried) ** 0.5
        assert right / tried == pytest.approx(acceptance, abs=spread + 0.01)
        tried = right


def test_perfect_guesses_save_four_passes_of_five_and_wrong_ones_none() -> None:
    perfect, wrong, plain = (
        speculating(1.0, 4), speculating(0.0, 4), simulate(setup(), [alone(0, 50, 200)])
    )  # fmt: skip
    assert figures(perfect, SLO)["speculation"]["tokens_per_pass"] > 4.5
    assert figures(wrong, SLO)["speculation"]["tokens_per_pass"] == 1
    assert figures(plain, SLO)["speculation"] is None
    tpot = [figures(run, SLO)["tpot_ms"]["p50"] for run in (perfect, wrong)]
    assert tpot[0] < 0.3 * tpot[1]
    for run in (perfect, wrong):
        assert [record.output_tokens for record in run.replay.records] == [200] * 16


def test_the_real_policy_drafts_more_where_guesses_are_better() -> None:
    good, bad = speculating(0.9, None), speculating(0.1, None)
    lengths = [
        run.engine.stats().draft_tokens / max(run.engine.stats().drafts, 1) for run in (good, bad)
    ]
    assert lengths[0] > 1.5 * lengths[1]


# --- saturation ----------------------------------------------------------------------------------

# With 8 sequences an H100 serves 512 + 100 tokens at about 15 requests a second.
FEW: dict[str, Any] = {"max_num_seqs": 8}


def verdict(samples: list[Sample], most: int | None = None, **more: Any) -> Any:
    run = simulate(setup(**(FEW | more)), samples, max_concurrency=most)
    return judged(run)


def judged(run: Simulation) -> Saturation:
    return saturation(run, capacity(run) if run.series.span else None)


@cache
def served() -> float:
    run = simulate(setup(**FEW), poisson(200, np.inf))
    return len(run.replay.records) / run.replay.duration


@pytest.mark.parametrize(
    ("share", "saturated"), [(0.3, False), (0.8, False), (1.3, True), (4, True)]
)
def test_a_rate_above_what_can_be_served_is_beyond_saturation(share: float, saturated: int) -> None:
    found = verdict(poisson(200, share * served()))
    assert found.saturated == saturated, found.why


def test_a_burst_is_not_saturation_wherever_it_comes() -> None:
    calm = poisson(150, 0.5 * served())
    span = calm[-1].arrival or 0.0
    for when in (0.0, 0.5 * span, 0.95 * span):
        burst = [alone(1000 + i, 512, 100, when) for i in range(30)]
        samples = sorted(calm + burst, key=lambda sample: sample.arrival or 0.0)
        found = verdict(samples)
        assert not found.saturated, (when, found.why)


@pytest.mark.parametrize("leaps", [True, False])
def test_a_burst_after_a_pause_has_not_waited_through_the_pause(leaps: bool) -> None:
    samples = [alone(0, 512, 100), *(alone(1 + i, 512, 100, 40.0) for i in range(60))]
    run = simulate(setup(**FEW), [*samples, alone(61, 512, 100, 41.0)], leaps=leaps)
    found = judged(run)
    assert found.work_at_half == 0
    assert found.work_at_end > 1
    assert not found.saturated, found.why
    assert found.headroom == pytest.approx(41 / 62 * served(), rel=0.1)


def test_requests_that_all_come_at_once_are_too_many_where_some_wait_for_others_to_end() -> None:
    assert verdict([alone(i, 100, 10) for i in range(20)]).saturated
    assert not verdict([alone(i, 100, 10) for i in range(8)]).saturated


def test_a_full_queue_that_turns_many_away_is_saturation_and_one_that_turns_few_is_not() -> None:
    rate = served()
    found = verdict(poisson(150, 3 * rate), max_num_queued_reqs=4)
    assert found.saturated
    assert "requests were refused: the queue was full" in found.why
    run = simulate(setup(**FEW, max_num_queued_reqs=4), poisson(150, 3 * rate))
    assert sum(record.reason == QUEUE_FULL for record in run.replay.records) == found.refused
    assert not verdict(poisson(150, 0.5 * rate), max_num_queued_reqs=4).saturated


# --- over time -----------------------------------------------------------------------------------


def test_what_is_shown_over_time_adds_up() -> None:
    run = simulate(setup(**FEW), poisson(150, 30.0))
    found = figures(run, SLO)
    over = found["over_time"]
    assert {len(values) for values in over.values()} == {INTERVALS}
    width = over["time"][0]
    assert over["time"][-1] == pytest.approx(found["duration"])
    assert sum(over["arrived"]) == 150
    assert sum(over["good"]) == found["good"]
    assert width * sum(over["output_throughput"]) == pytest.approx(found["total_output_tokens"])
    assert max(over["waiting"]) <= found["waiting"]["max"]
    assert max(over["kv_usage"]) <= found["kv_usage"]["max"] + 1e-12


def test_percentiles_of_the_table_are_of_the_requests_of_each_row() -> None:
    run = simulate(setup(**FEW), poisson(150, 30.0))
    found = figures(run, SLO) | {"notices": []}
    rows = found["over_tenths"]
    lines = [line.split() for line in text(found).splitlines() if re.match(r" +[\d.]+ s ", line)]
    assert len(lines) == len(rows["time"]) == 10
    for row, until in enumerate(rows["time"]):
        arrived = [
            record
            for record in run.replay.records
            if until - rows["time"][0] <= record.start < until
        ]
        assert rows["arrived"][row] == len(arrived)
        if not arrived:
            assert rows["ttft_ms_p99"][row] is None
            continue
        for percentile in (50, 99):
            expected = np.percentile([1e3 * record.ttft for record in arrived], percentile)
            assert rows[f"ttft_ms_p{percentile}"][row] == pytest.approx(expected)
        assert f"{rows['ttft_ms_p99'][row]:.0f}" in {
            lines[row][9].replace(",", ""), f"{float(lines[row][9].replace(',', '')):.0f}",
        }  # fmt: skip


def test_samples_stay_few_however_long_it_takes() -> None:
    engine = simulated_engine(setup())
    series = Series(0.0)
    for step in range(50_000):
        series.observe(engine, step * 0.01)
    times = series.columns()["time"]
    assert 1000 < len(times) < 5000
    assert times[-1] > 480
    assert (np.diff(times) > 0).all()


def test_a_timeline_nests_and_has_every_request() -> None:
    timeline = Timeline()
    run = simulate(setup(**FEW), poisson(40, 30.0), observers=[timeline])
    events = timeline.trace(run)["traceEvents"]
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(steps) == run.engine.stats().steps
    for before, after in pairwise(steps):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    spans = [event for event in events if event.get("cat") == "request"]
    whole = [event for event in spans if event["name"].startswith("request ")]
    assert len(whole) == 40
    lanes: dict[int, float] = {}
    for event in sorted(whole, key=lambda event: event["ts"]):
        assert lanes.get(event["tid"], 0.0) <= event["ts"] + 1e-3
        lanes[event["tid"]] = event["ts"] + event["dur"]
    parts = [event for event in spans if event not in whole]
    assert sum(event["dur"] for event in parts) == pytest.approx(sum(e["dur"] for e in whole))


# --- the same loop on a real engine --------------------------------------------------------------


def test_the_real_engine_runs_the_same_replay() -> None:
    from octavo.engine.load import load_engine

    loaded = load_engine(TINY, EngineConfig(max_model_len=64, max_num_seqs=2))
    samples = [alone(index, 5 + index, 4, arrival=index / 100) for index in range(5)]
    done = replay(loaded.engine, samples)
    assert [record.output_tokens for record in done.records] == [4] * 5
    assert all(record.success and record.ttft > 0 for record in done.records)
    assert done.duration >= 0.04
    loaded.engine.close()


# --- leaping --------------------------------------------------------------------------------------


class Leapt:
    """Counts the leaps."""

    def __init__(self) -> None:
        self.leaps = 0

    def on_step(self, step: Step) -> None: ...

    def on_leap(self, leap: Leap) -> None:
        self.leaps += 1

    def on_end(self, record: RequestRecord) -> None: ...


SAMPLES = [
    Sample(
        300 + 40 * (index % 7),
        20 + 37 * (index % 5),
        (Part(PREFIXES + index % 3, 200), Part(RANDOM + index, 100 + 40 * (index % 7))),
    )
    for index in range(40)
]


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {}),
        ({"max_num_seqs": 4}, {"max_concurrency": 9}),
        ({"max_model_len": 1024, "kv_cache_memory_bytes": 330 << 20}, {}),
        ({"max_num_seqs": 8}, {"batching": "static"}),
        ({}, {"memory": "reserve", "max_tokens": 120}),
        ({}, {"apart": 1.7}),
    ],
)
def test_leaping_changes_nothing(settings: dict[str, Any], more: dict[str, Any]) -> None:
    subject, device = Subject.find("llama-3-8b"), PUBLISHED["h100"]
    config = EngineConfig(**{"memory_utilization": 0.9} | settings)
    apart = more.pop("apart", 0.031)
    samples = [replace(each, arrival=apart * index) for index, each in enumerate(SAMPLES)]
    techniques = {name: more.pop(name) for name in ("batching", "memory") if name in more}
    setup = Setup(subject, weights_on(device, subject), device, config, **techniques)
    results = []
    for leaps in (True, False):
        timeline, leapt = Timeline(), Leapt()
        run = simulate(setup, samples, observers=[timeline, leapt], leaps=leaps, **more)
        assert (leapt.leaps > 0) is leaps
        run.engine.check_integrity()
        columns = {name: column.tolist() for name, column in run.series.columns().items()}
        stats = run.engine.stats()
        gauges = run.series.most, run.series.means()
        results.append((run.replay, columns, stats, gauges, timeline.trace(run)))
    assert results[0] == results[1]
