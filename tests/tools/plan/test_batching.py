"""The sums of continuous batching beside the engine itself, simulated, and beside arithmetic."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import strict_json
from octavo.cli import app
from octavo.engine.clock import VirtualClock
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.engine import Engine
from octavo.executor.base import Batch, Int32, StepResult
from octavo.executor.cost import Rates
from octavo.kv_cache.layout import KvLayout
from octavo.sampling.scripted import ScriptedSampler
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.tools.plan.continuous_batching import (
    Batching,
    EngineLimits,
    LinearStep,
    Load,
    ModelStep,
    StepTime,
    batching,
)
from octavo.tools.plan.hardware import Device
from octavo.tools.plan.lengths import Lengths, parse
from octavo.tools.plan.load_replay import Replay, replay
from octavo.tools.plan.quantization import cost_model, in_scheme
from octavo.tools.plan.schemes import scheme
from octavo.tools.plan.simulation import Setup, simulated_engine
from octavo.tools.plan.subject import Subject
from octavo.tools.workload.arrivals import arrival_times
from octavo.tools.workload.datasets import Part, Sample

LLAMA = Subject.find("llama-3-8b")
BF16 = in_scheme(LLAMA, scheme("bf16"), scheme("bf16"))
CHIP = Device("a chip", lambda _: Rates(3e12, 9e14), 80 << 30)
LINEAR = LinearStep(0.02, 0.0005, 0.00002)


class LinearExecutor:
    """Takes the time of a `LinearStep` and computes nothing."""

    def __init__(self, step: LinearStep, layout: KvLayout, limits: EngineLimits) -> None:
        self.layout, self.num_blocks = layout, 1 << 15
        self.max_tokens = limits.max_num_batched_tokens
        self.max_logits_rows = limits.max_num_seqs
        self._step = step

    def execute(self, batch: Batch) -> StepResult:
        sizes = np.diff(batch.seq_offsets)
        # A chunk of a prompt may be one token, too, but then it wants no logits.
        decodes = (sizes == 1) & np.isin(batch.seq_offsets[1:] - 1, batch.logits_rows)
        seconds = self._step(float(decodes.sum()), 0, float(sizes[~decodes].sum()), 0)
        return StepResult(None, seconds)

    def export_blocks(self, blocks: Int32, into: Any = None) -> Any:
        raise NotImplementedError

    def import_blocks(self, blocks: Int32, data: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def linear_engine(step: LinearStep, limits: EngineLimits, static: bool = False) -> Engine:
    layout = KvLayout.of(LLAMA.program.config)
    config = SchedulerConfig(
        max_model_len=8192,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        enable_prefix_caching=False,
        batching="static" if static else "continuous",
    )
    executor = LinearExecutor(step, layout, limits)
    return Engine(
        executor,
        Scheduler(config, layout, executor.num_blocks),
        ScriptedSampler(1000),
        VirtualClock(),
        vocab_size=1000,
        seed=0,
    )


def model_engine(limits: EngineLimits) -> Engine:
    config = EngineConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        enable_prefix_caching=False,
        memory_utilization=0.9,
    )
    return simulated_engine(Setup(LLAMA, BF16, CHIP, config))


def model_step() -> ModelStep:
    layout = KvLayout.of(LLAMA.program.config)
    return ModelStep(cost_model(LLAMA, BF16, layout, CHIP), CHIP.rates(BF16.bytes))


def samples(load: Load, count: int, seed: int = 3) -> list[Sample]:
    """Quantiles of the lengths in random order, so that few have the mean of many."""
    rng = np.random.default_rng(seed)

    def some(lengths: Lengths) -> list[int]:
        at = (np.arange(count) + 0.5) / count
        found = np.searchsorted(np.cumsum(lengths.shares), at)
        return rng.permutation(found).tolist()

    times = arrival_times(count, load.rate, 1.0, None, seed).tolist()
    lengths = zip(some(load.prompts), some(load.outputs), times, strict=True)
    return [
        Sample(prompt, output, (Part(index, prompt),), arrival=time)
        for index, (prompt, output, time) in enumerate(lengths)
    ]


def tokens_per_second(done: Replay) -> float:
    """Return the rate of answers' tokens in the middle of the run."""
    first, last = 0.2 * done.duration, 0.8 * done.duration
    count = 0
    for record in done.records:
        times = record.start + record.ttft + np.cumsum([0.0, *record.itl])
        count += int(((times > first) & (times < last)).sum())
    return count / (last - first)


def both(
    step: StepTime, engine: Engine, load: Load, limits: EngineLimits, count: int
) -> tuple[Batching, Replay]:
    done = replay(engine, samples(load, count))
    assert all(record.success for record in done.records)
    return batching(step, load, limits), done


def check_below(found: Batching, done: Replay, rate: float) -> None:
    """By Little's law, the mean number of requests is the sum of their stays over the time."""
    assert not found.saturated
    records = done.records
    stays = sum(record.latency for record in records)
    arrived = len(records) / rate
    present = found.spread.running + found.spread.waiting
    assert present == pytest.approx(stays / arrived, rel=0.04)
    decodes = sum(record.output_tokens - 1 for record in records)
    tpot = sum(record.latency - record.ttft for record in records) / decodes
    assert found.tpot_seconds == pytest.approx(tpot, rel=0.03)
    assert found.spread.idle == pytest.approx(done.idle / done.duration, abs=0.02)
    assert found.requests_per_second == rate


@pytest.mark.parametrize(
    ("prompts", "outputs", "rate", "count"),
    [
        ("200", "geometric:100", 0.5, 300),
        ("geometric:200", "geometric:100", 5.0, 1200),
        ("uniform:100-300", "lognormal:60,1", 9.0, 1500),
    ],
)
def test_below_saturation(prompts: str, outputs: str, rate: float, count: int) -> None:
    limits = EngineLimits(32, 512)
    load = Load(parse(prompts), parse(outputs), rate)
    found, done = both(LINEAR, linear_engine(LINEAR, limits), load, limits, count)
    check_below(found, done, rate)


@pytest.mark.parametrize(
    ("prompts", "outputs", "max_num_seqs", "limit"),
    [
        ("200", "100", 32, "sequences"),
        ("geometric:200", "geometric:100", 32, "sequences"),
        ("300", "uniform:10-30", 64, "tokens"),
        ("2000", "uniform:10-30", 32, "tokens"),
    ],
)
def test_beyond_saturation(prompts: str, outputs: str, max_num_seqs: int, limit: str) -> None:
    limits = EngineLimits(max_num_seqs, 512)
    load = Load(parse(prompts), parse(outputs), 100.0)
    found, done = both(LINEAR, linear_engine(LINEAR, limits), load, limits, 900)
    assert found.saturated
    assert found.saturation.limit == limit
    assert found.tokens_per_second == pytest.approx(tokens_per_second(done), rel=0.03)


def test_a_model_on_a_device_below_saturation() -> None:
    limits = EngineLimits(64, 1024)
    load = Load(parse("lognormal:512,0.8"), parse("geometric:100"), 20.0)
    found, done = both(model_step(), model_engine(limits), load, limits, 800)
    check_below(found, done, 20.0)


@pytest.mark.parametrize(
    ("prompts", "outputs", "limit"),
    [
        ("geometric:400", "geometric:100", "sequences"),
        ("uniform:100-1000", "uniform:2-30", "tokens"),
    ],
)
def test_a_model_on_a_device_beyond_saturation(prompts: str, outputs: str, limit: str) -> None:
    limits = EngineLimits(64, 1024)
    load = Load(parse(prompts), parse(outputs), 500.0)
    found, done = both(model_step(), model_engine(limits), load, limits, 900)
    assert found.saturation.limit == limit
    assert found.tokens_per_second == pytest.approx(tokens_per_second(done), rel=0.04)


def test_static_batches_beside_the_engines() -> None:
    """Equal hardware, the same requests: several times apart, and each as the sums have it."""
    limits = EngineLimits(32, 512)
    step = LinearStep(0.02, 0.0001)
    load = Load(parse("64"), parse("geometric:100"), 1000.0)
    found = batching(step, load, limits)
    rates = [
        tokens_per_second(replay(linear_engine(step, limits, static), samples(load, 1600)))
        for static in (False, True)
    ]
    assert found.saturation.tokens_per_second == pytest.approx(rates[0], rel=0.03)
    assert found.static.tokens_per_second == pytest.approx(rates[1], rel=0.05)
    assert found.ratio == pytest.approx(rates[0] / rates[1], rel=0.06)
    assert found.ratio > 3.5


# --- by hand -------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """20 ms a step, whoever runs; 8 places; answers of 100: a request takes 100 steps, 2 s; so 4 a
    second at most, 400 tokens. At 3 a second 6 run (Little), and each sees the same steps.
    """
    load = Load(parse("50"), parse("100"), 3.0)
    found = batching(LinearStep(0.02), load, EngineLimits(8, 512))
    assert found.saturation.requests_per_second == pytest.approx(4)
    assert found.saturation.tokens_per_second == pytest.approx(400)
    assert found.utilisation == pytest.approx(0.75)
    assert found.fixed_point.running == pytest.approx(6)
    assert found.spread.running == pytest.approx(6)  # Little, whatever the spread
    assert found.load.context == pytest.approx(50 + 49)
    # Erlang's C formula: 8 servers at a load of 6.
    assert found.spread.full == pytest.approx(0.35698, rel=1e-3)
    assert found.spread.waiting == pytest.approx(0.35698 * 6 / (8 - 6), rel=1e-3)
    # All as long as the longest: static batching loses nothing but its own prefill's overlap.
    assert found.static.longest == 100
    assert found.ratio == pytest.approx(1, rel=1e-6)


def test_a_step_that_grows_with_its_batch() -> None:
    """time(n) = a + b·n: π(n) is negative binomial, with mean r·p ÷ (1 - p), p = rate·steps·b and
    r = 1 + a ÷ b.
    """
    a, b, rate, steps = 0.01, 0.001, 4.0, 100
    found = batching(
        LinearStep(a, b), Load(parse("10"), parse("100"), rate), EngineLimits(400, 512)
    )
    p = rate * steps * b
    # The first of the steps reads and does not decode: a hundredth less of b.
    assert found.spread.running == pytest.approx((1 + a / b) * p / (1 - p), rel=0.02)
    assert found.fixed_point.running == pytest.approx(found.spread.running, rel=0.01)


def test_nothing_arrives_and_too_much_arrives() -> None:
    limits = EngineLimits(8, 512)
    none = batching(LINEAR, Load(parse("50"), parse("100"), 0.0), limits)
    assert (none.spread.running, none.spread.idle, none.fixed_point) == (0, 1, None)
    assert not none.saturated
    much = batching(LINEAR, Load(parse("50"), parse("100"), 1e6), limits)
    assert much.saturated
    assert much.ttft_seconds == float("inf")
    assert much.requests_per_second == much.saturation.requests_per_second


def test_a_cache_for_fewer_than_may_run() -> None:
    load = Load(parse("50"), parse("100"), 0.0)
    found = batching(LinearStep(0.02), load, EngineLimits(64, 512, cached_seqs=12.5))
    assert found.saturation.limit == "cache"
    assert found.saturation.requests_per_second == pytest.approx(12.5 / 2)
    with pytest.raises(ValueError, match=r"holds 0\.4 sequences"):
        batching(LinearStep(0.02), load, EngineLimits(64, 512, cached_seqs=0.4))


@given(
    constant=st.floats(1e-4, 1),
    each=st.floats(0, 0.01),
    token=st.floats(0, 1e-3),
    prompt=st.integers(1, 3000),
    output=st.integers(1, 400),
    seqs=st.integers(1, 128),
    share=st.floats(0.01, 0.98),
)
@settings(max_examples=12)
def test_what_holds_for_any_load(
    constant: float, each: float, token: float, prompt: int, output: int, seqs: int, share: float
) -> None:
    step, limits = LinearStep(constant, each, token), EngineLimits(seqs, 512)
    lengths = Lengths.fixed(prompt), Lengths.geometric(output)
    most = batching(step, Load(*lengths, 0.0), limits).saturation
    found = batching(step, Load(*lengths, share * most.requests_per_second), limits)
    assert found.utilisation == pytest.approx(share)
    spread = found.spread
    assert 0 < spread.running <= most.running + 1e-6
    assert 0 <= spread.idle <= 1
    assert 0 <= spread.full <= 1
    assert 0 <= spread.waiting < float("inf")
    # An idle share of its own work: less is asked than there is time.
    assert spread.idle <= 1 - share + 0.35
    assert found.ttft_seconds > 0
    assert found.static.requests_per_second > 0
    more = batching(step, Load(*lengths, (share + 0.01) * most.requests_per_second), limits)
    assert more.spread.running >= spread.running
    assert more.spread.waiting >= spread.waiting


@pytest.mark.parametrize(("prompt", "most"), [(1, 1000), (16, 62.5), (17, 1000 / 17)])
def test_prompts_shorter_than_what_a_step_is_divided_into(prompt: int, most: float) -> None:
    """1 ms a token of a prompt and next to nothing else: 1000 ÷ prompt requests a second."""
    step = LinearStep(1e-6, 0, 1e-3)
    found = batching(
        step, Load(Lengths.fixed(prompt), Lengths.fixed(2), 0.0), EngineLimits(64, 2048)
    )
    assert found.saturation.requests_per_second == pytest.approx(most, rel=1e-3)


@given(
    token=st.floats(1e-6, 1),
    prompts=st.one_of(
        st.integers(1, 40).map(Lengths.fixed),
        st.integers(1, 3000).map(Lengths.fixed),
        st.floats(1, 200).map(Lengths.geometric),
    ),
    output=st.integers(1, 60),
    seqs=st.integers(1, 64),
    budget=st.sampled_from([64, 100, 512, 2048]),
)
@example(1.0, Lengths.geometric(153.875), 22, 13, 100)  # 20 full steps and 3/8 of a token
@settings(max_examples=8)
def test_no_prompt_is_lost(
    token: float, prompts: Lengths, output: int, seqs: int, budget: int
) -> None:
    """What all prompts of a second take is at most a second; and static batches lose none."""
    step, load = LinearStep(1e-9, 0, token), Load(prompts, Lengths.geometric(output), 0.0)
    found = batching(step, load, EngineLimits(seqs, budget))
    for rate in (found.saturation.requests_per_second, found.static.requests_per_second):
        assert rate * prompts.mean * token <= 1 + 1e-6
    assert found.saturation.requests_per_second * prompts.mean * token > 0.99


def test_prompts_of_very_many_steps() -> None:
    found = batching(
        LINEAR, Load(Lengths.fixed(200_000), Lengths.fixed(5), 1e-5), EngineLimits(8, 16)
    )
    assert found.saturation.requests_per_second * 200_000 * LINEAR.per_prompt_token < 1
    assert 12_500 * LINEAR.constant < found.ttft_seconds < 2 * 12_500 * LINEAR.constant
    assert found.tpot_seconds >= 0


def test_a_cache_for_less_than_two() -> None:
    load = Load(parse("3000"), parse("100"), 0.001)
    found = batching(LINEAR, load, EngineLimits(64, 512, cached_seqs=1.5))
    assert found.tpot_seconds >= LINEAR.constant


def test_a_static_batch_that_does_not_fit_the_cache() -> None:
    load, limits = Load(parse("50"), parse("100"), 0.0), EngineLimits(64, 512, cached_seqs=12.5)
    assert batching(LINEAR, load, limits, 12).static.size == 12
    with pytest.raises(ValueError, match=r"--static-batch 13: the cache holds 12\.5 sequences"):
        batching(LINEAR, load, limits, 13)


# --- the command ---------------------------------------------------------------------------------


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", "batching", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


GIVEN = ("--step-ms", "20", "--max-num-seqs", "8", "--input-len", "50", "--output-len", "100")


def test_the_command() -> None:
    facts = strict_json.loads(run(*GIVEN, "--request-rate", "3", "--json"))
    assert facts["saturation"]["request_throughput"] == pytest.approx(4)
    assert facts["saturated"] is False
    assert facts["running"] == pytest.approx(6)
    text = run(*GIVEN, "--request-rate", "3")
    assert "6 = 3/s × 100 × 20 ms" in text
    assert max(map(len, text.splitlines())) <= 110
    over = run(*GIVEN, "--request-rate", "6")
    assert "SATURATED" in over
    assert "6 - 4 = 2 requests a second" in over
    assert "who comes after an hour waits 30 minutes" in over
    rare = run(*GIVEN, "--request-rate", "0.0001")
    assert "headroom 40,000 ×" in rare
    assert "no request 100 % of the time" in rare
    assert "e+0" not in rare + run(*GIVEN, "--request-rate", "100000")
    only = run(*GIVEN)
    assert "Little" not in only
    assert "saturated" in only


def test_of_a_model_and_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00.0,100,10\n2023-11-16 18:00:01.0,300,50\n2023-11-16 18:00:04.0,200,30\n"
    )
    facts = strict_json.loads(
        run("llama-3-8b", "--device", "h100", "--trace", str(trace), "--json")
    )
    assert facts["request_rate"] == pytest.approx(0.5)
    assert facts["prompts"]["mean"] == pytest.approx(200)
    assert facts["outputs"]["mean"] == pytest.approx(30)
    decodes = [(100, 10), (300, 50), (200, 30)]
    context = sum(sum(p + k for k in range(o - 1)) for p, o in decodes) / (9 + 49 + 29)
    assert facts["context"] == pytest.approx(context)
    assert facts["step_time"]["measured"] is False
    text = run("llama-3-8b", "--device", "h100", "--trace", str(trace))
    assert "not measured" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either MODEL or --step-ms"),
        (("llama-3-8b", "--step-ms", "1"), "either MODEL or --step-ms"),
        (("llama-3-8b", "--per-sequence-ms", "1"), "--per-sequence-ms does not go with MODEL"),
        (("--step-ms", "1", "--device", "h100"), "--device does not go with --step-ms"),
        (("--step-ms", "0"), "--step-ms must be at least 10⁻⁶"),
        (("--step-ms", "1e-320"), "--step-ms must be at least 10⁻⁶"),  # infinite throughput
        (("--step-ms", "1", "--per-sequence-ms", "-1"), "--per-sequence-ms must be 0 or more"),
        (("--step-ms", "1", "--request-rate", "0"), "--request-rate must be above 0"),
        (("--step-ms", "1", "--input-len", "-5"), "--input-len '-5'"),
        (("--step-ms", "1", "--output-len", "zipf:2"), "--output-len 'zipf:2'"),
        (("--step-ms", "1", "--max-num-seqs", "600"), "--max-num-batched-tokens 512 is below"),
        (("--step-ms", "1", "--static-batch", "0"), "--static-batch"),
        (("--step-ms", "1", "--input-len", "5", "--trace", "x.csv"), "--input-len does not go"),
        (("llama-3-8b", "--device", "h100", "--compute-share", "0"), "--compute-share"),
        (("--step-ms", "1", "--bandwidth-share", "1"), "--bandwidth-share does not go"),
        (
            ("llama-3-8b", "--device", "h100", "--memory-utilization", "2"),
            "--memory-utilization is 2",
        ),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", "batching", *arguments])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["2023-11-16 18:00:00,1,1"], "give --request-rate"),
        (["2023-11-16 18:00:05,1,1", "2023-11-16 18:00:00,1,1"], ":3"),
        (["2023-11-16 18:00:00,1,9000000", "2023-11-16 18:00:05,1,1"], "more than"),
    ],
)
def test_traces_that_are_refused(rows: list[str], message: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    with pytest.raises(SettingsError, match=message):
        run("--step-ms", "1", "--trace", str(trace))


def test_answers_of_a_token_to_prompts_of_one() -> None:
    facts = strict_json.loads(
        run("llama-3-8b", "--device", "h100", "--input-len", "1", "--output-len", "1", "--json")
    )
    assert facts["saturation"]["request_throughput"] * facts["saturation"]["step_seconds"] >= 1


def test_what_no_model_could_do() -> None:
    with pytest.raises(SettingsError, match=r"--static-batch 100: the cache holds \d"):
        run("llama-3-8b", "--device", "a10", "--static-batch", "100", "--input-len", "4000")
    with pytest.raises(SettingsError, match="more than the model's context"):
        run("llama-3-8b", "--device", "h100", "--input-len", "9000")
    small = "memory=100,bf16=1000,capacity=4"
    with pytest.raises(SettingsError, match="4 GiB available"):
        run("llama-3-8b", "--device", small)
