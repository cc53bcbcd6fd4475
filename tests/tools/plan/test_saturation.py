"""Saturation, headroom and error bands of simulated loads, against what is found otherwise."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import saturation as drawn
import strict_json
from octavo.cli import app
from octavo.engine.config import EngineConfig
from octavo.tools.plan.band import FRESH, OF_GIVEN, Doubt, band, doubt, of_calibration, uncertain
from octavo.tools.plan.capacity import TokenCost, capacity
from octavo.tools.plan.hardware import device, published
from octavo.tools.plan.report import ROWS, figures, text
from octavo.tools.plan.saturation import saturation
from octavo.tools.plan.simulation import Setup, Simulation, simulate, weights_on
from octavo.tools.plan.subject import Subject
from octavo.tools.workload.datasets import RANDOM, Part, Sample
from tools.plan.test_calibration import calibration, key

SLO = {"ttft": 500.0, "tpot": 50.0}
SMALL = Subject.find("smollm2-135m")
FIGURES = "memory=10,int8=150,bf16=80,fp32=37,capacity=16"
DEVICE = device(FIGURES, None)  # type: ignore[arg-type]


def setup(**settings: Any) -> Setup:
    stored = weights_on(DEVICE, SMALL)
    return Setup(SMALL, stored, DEVICE, EngineConfig(max_model_len=2048, **settings))


def load(
    count: int, rate: float, prompt: int = 32, answer: int = 20, seed: int = 1
) -> list[Sample]:
    times = np.cumsum(np.random.default_rng(seed).exponential(1, count))
    times *= count / rate / times[-1]
    return [
        Sample(prompt, answer, (Part(RANDOM + 1 + index, prompt),), arrival=float(time))
        for index, time in enumerate(times)
    ]


def judged(run: Simulation) -> Any:
    return saturation(run, capacity(run))


# --- the verdict ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [10, 22])
def test_a_drawn_load_is_judged_as_its_work_grows(seed: int) -> None:
    row = drawn.study(seed, requests=(60, 80), seats=3)
    assert row.near or not row.wrong, row
    assert 1 / row.headroom == pytest.approx(row.share, rel=0.15)


@pytest.mark.long
def test_hundred_drawn_loads() -> None:
    rows = [drawn.study(seed) for seed in range(100)]
    counted = [row for row in rows if not row.near]
    wrong = [row for row in counted if row.wrong]
    assert len(wrong) <= 0.03 * len(counted), wrong
    assert not [row for row in wrong if row.far]


def test_work_that_piles_up_among_those_that_run_is_saturation() -> None:
    """No request waits: there are more seats than requests."""
    run = simulate(setup(max_num_seqs=64), load(60, 40.0, answer=40))
    found = judged(run)
    assert max(r.waited / r.latency for r in run.replay.records) < 0.3
    assert run.series.most[0] == 60
    assert found.saturated
    assert found.headroom < 0.8
    assert found.work_at_end > 1.5 * found.work_at_half
    alone = capacity(simulate(setup(max_num_seqs=64), load(60, 1.0, answer=40)))
    assert found.capacity == pytest.approx(alone.requests_per_second, rel=0.05)


@pytest.mark.parametrize("seats", [1, 4])
def test_headroom_is_capacity_over_what_comes(seats: int) -> None:
    """The capacity of one seat is a sum: one request follows the other."""
    config = setup(max_num_seqs=seats)
    found = judged(simulate(config, load(60, 2.0)))
    assert found.headroom == pytest.approx(found.capacity / found.offered, rel=1e-9)
    assert found.saturated is (found.headroom < 1)
    if seats == 1:
        one = simulate(config, load(1, 1.0)).replay.records[0].latency
        assert found.capacity == pytest.approx(1 / one, rel=0.02)


def test_capacity_is_the_same_however_the_load_comes() -> None:
    config = setup(max_num_seqs=4)
    rates = [capacity(simulate(config, load(60, rate))) for rate in (0.5, 5.0, 50.0)]
    values = [rate.requests_per_second for rate in rates if rate is not None]
    assert values == pytest.approx([values[0]] * 3, rel=0.01)


def test_a_load_that_rises_beyond_capacity_is_beyond_it_in_its_second_half() -> None:
    config = setup(max_num_seqs=4)
    found = capacity(simulate(config, load(60, 1.0)))
    can = found.requests_per_second
    calm, busy = load(80, 0.4 * can), load(160, 1.5 * can, seed=2)
    begin = 107 / can  # as long as the busy half takes
    times = [*(c.arrival or 0.0 for c in calm if (c.arrival or 0.0) < begin)]
    rising = [
        Sample(32, 20, (Part(RANDOM + 1 + index, 32),), arrival=time)
        for index, time in enumerate([*times, *(begin + (b.arrival or 0.0) for b in busy)])
    ]
    verdict = judged(simulate(config, rising))
    assert verdict.saturated
    assert "the load's second half brings" in verdict.why
    assert len(rising) / max(sample.arrival or 0.0 for sample in rising) < can, "on the whole"
    assert f"come over {verdict.over}" in verdict.room


@pytest.mark.parametrize(
    ("count", "seats", "saturated", "said"),
    [
        (8, 4, True, "at most 4 of 8 run at a time"),
        (8, 8, False, "all run at once"),
        (3, 256, False, "all run at once"),
    ],
)
def test_what_is_said_of_requests_at_once_is_so(
    count: int, seats: int, saturated: bool, said: str
) -> None:
    samples = [replace(sample, arrival=0.0) for sample in load(count, 1.0)]
    run = simulate(setup(max_num_seqs=seats), samples)
    found = figures(run, SLO, doubt=doubt(run.setup)) | {"notices": []}
    assert found["saturated"] is saturated
    assert said in found["saturation"]["why"]
    assert ("run at once" in text(found)) is (found["running"]["max"] == count)
    assert found["headroom"] is None
    assert "headroom" not in text(found)


def test_the_rows_of_a_short_load_have_times_of_their_own() -> None:
    run = simulate(setup(max_num_seqs=4), load(8, 10.0))
    assert run.replay.duration < 10
    lines = text(figures(run, SLO) | {"notices": []}).splitlines()
    first = next(index for index, line in enumerate(lines) if line.split()[:1] == ["until"]) + 1
    times = [line.partition(" s")[0].strip() for line in lines[first : first + ROWS]]
    assert len(set(times)) == ROWS


def test_who_waits_for_a_step_does_not_run_at_once() -> None:
    """Seats for all, but prompts longer than a step: a queue, and no word that denies it."""
    samples = [replace(sample, arrival=0.0) for sample in load(8, 1.0, prompt=600)]
    run = simulate(setup(), samples)
    found = figures(run, SLO, doubt=doubt(run.setup)) | {"notices": []}
    assert found["running"]["max"] == 8
    assert found["waiting"]["max"] > 0
    why = found["saturation"]["why"]
    assert "all run beside each other once the last has left the queue, after " in why
    assert "at once; all run at once" not in text(found)


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.floats(0, 4, allow_nan=False), st.integers(1, 300), st.integers(1, 40)),
        min_size=1,
        max_size=10,
    ),
    st.integers(1, 6),
    st.sampled_from([None, 1, 3]),
)
def test_any_load_has_a_verdict_that_agrees_with_its_headroom(
    requests: list[tuple[float, int, int]], seats: int, most: int | None
) -> None:
    samples = [
        Sample(prompt, answer, (Part(RANDOM + 1 + index, prompt),), arrival=time)
        for index, (time, prompt, answer) in enumerate(sorted(requests))
    ]
    run = simulate(setup(max_num_seqs=seats), samples, max_concurrency=most)
    found = capacity(run)
    assert 0 < found.requests_per_second < np.inf
    verdict = saturation(run, found)
    assert verdict.work_at_half >= 0
    assert verdict.work_at_end >= 0
    if verdict.headroom is None:
        assert run.series.span == 0 or len(samples) == 1
    else:
        assert 0 < verdict.headroom < np.inf
        assert verdict.saturated is (verdict.headroom < 1)
    total = sum(found.work.of(record) for record in run.replay.records)
    spans = [0.0, run.series.span, run.replay.duration]
    left = [sum(found.work.left(r, time) for r in run.replay.records) for time in spans]
    assert all(0 <= each <= total * (1 + 1e-9) for each in left)
    assert left[-1] == 0


# --- the error band ------------------------------------------------------------------------------


def test_a_band_has_the_figures_in_it_and_is_wider_near_saturation() -> None:
    config = setup(max_num_seqs=4)
    found = capacity(simulate(config, load(60, 1.0)))
    can = found.requests_per_second
    unsure = Doubt(1.2, 1.2, "given")
    widths = []
    for share in (0.3, 0.9):
        run = simulate(config, load(80, share * can))
        verdict = saturation(run, found)
        ends = band(run, unsure, SLO, verdict)
        own = figures(run, SLO)
        for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
            for which in ("p50", "p99"):
                least, most = ends[name][which]
                assert least <= own[name][which] <= most
        assert verdict.headroom is not None
        assert ends["headroom"] == pytest.approx([verdict.headroom / 1.2, verdict.headroom * 1.2])
        widths.append(ends["ttft_ms"]["p50"][1] / ends["ttft_ms"]["p50"][0])
        assert bool(uncertain(verdict, unsure)) is (share == 0.9)
    assert widths[1] > 2 * widths[0]


def test_an_end_of_a_band_is_what_a_slower_device_makes_of_the_load() -> None:
    run = simulate(setup(max_num_seqs=4), load(80, 2.0))
    ends = band(run, Doubt(1.25, 1.0, ""), SLO, judged(run))
    slower = ",".join(
        f"{name}={float(value) / (1.25 if name != 'capacity' else 1)}"
        for name, value in (item.split("=") for item in FIGURES.split(","))
    )
    slow = device(slower, None)  # type: ignore[arg-type]
    other = simulate(replace(run.setup, device=slow), run.samples)
    there, here = figures(other, SLO), figures(run, SLO)
    for name in ("ttft_ms", "tpot_ms"):
        assert ends[name]["p50"] == pytest.approx([here[name]["p50"], there[name]["p50"]], rel=0.01)


def test_the_band_of_a_long_load_is_that_of_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.tools.plan.band.MOST", 40)
    run = simulate(setup(max_num_seqs=4), load(80, 2.0))
    ends = band(run, Doubt(1.25, 1.25, ""), SLO, judged(run))
    own = figures(run, SLO)
    assert ends["ttft_ms"]["p50"][0] <= own["ttft_ms"]["p50"] <= ends["ttft_ms"]["p50"][1]


def test_only_shares_fitted_to_published_runs_have_their_error() -> None:
    fitted = published("a100")
    given = fitted.assuming(compute=0.5)
    config = setup()
    assert "published" in doubt(replace(config, device=fitted)).basis
    assert doubt(replace(config, device=given)) == OF_GIVEN


def test_a_refresh_makes_a_calibration_surer_for_two_minutes() -> None:
    from octavo.engine.calibration import Moment

    now = datetime(2026, 6, 1, tzinfo=UTC)
    stored = calibration(key())
    alone = of_calibration(stored, now)
    ends = []
    for age in (timedelta(seconds=30), 2 * FRESH):
        moment = Moment(1.0, 1.0, (now - age).isoformat(), 99)
        ends.append(of_calibration(replace(stored, moment=moment), now).slower)
    assert 1 < ends[0] < ends[1] == alone.slower == alone.faster < 1.3
    biased = replace(stored, errors=tuple(replace(e, bias=0.3) for e in stored.errors))
    assert of_calibration(biased, now).slower > 1.5


# --- the command ---------------------------------------------------------------------------------


def run_json(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--device", FIGURES, "--json"])
    assert result.exit_code == 0, result.output
    return strict_json.loads(result.stdout)


OVERLOAD = (
    "--random-input-len", "32", "--random-output-len", "300", "--request-rate", "4",
    "--num-prompts", "200",
)  # fmt: skip


@pytest.mark.long
def test_the_load_that_ran_and_ran() -> None:
    found = run_json("simulate", "--model", "smollm2-135m", *OVERLOAD)
    assert found["saturated"] is True
    assert found["headroom"] < 1


def test_tune_does_not_call_an_overload_kept() -> None:
    load = (
        "--random-input-len", "32", "--random-output-len", "40", "--request-rate", "60",
        "--num-prompts", "30", "--slo", "ttft=1e9,tpot=1e9", "--trials", "1", "--lossless",
        "--max-num-seqs", "16", "--max-num-batched-tokens", "256",
    )  # fmt: skip
    shown = CliRunner().invoke(app, ["tune", "smollm2-135m", *load, "--device", FIGURES]).stdout
    assert "BEYOND SATURATION" in shown
    assert "\nthe SLO is kept" not in shown
    assert "headroom 0." in shown


def test_work_left_is_what_has_not_been_given() -> None:
    run = simulate(setup(max_num_seqs=2), load(10, 5.0))
    work = TokenCost(1.0, 1.0)
    for record in run.replay.records:
        first = record.start + record.ttft
        assert work.left(record, record.start) == 32 + 20
        assert work.left(record, first) == 19
        assert work.left(record, first + sum(record.itl[:5]) + 1e-9) == 14
        assert work.left(record, record.start + record.latency) == 0
