"""Steps sized in seconds: what they are predicted to take, how that is learned, what is kept."""

import random
from dataclasses import dataclass, field, replace
from math import inf, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checking import VOCAB, layout, model
from octavo.engine.clock import VirtualClock
from octavo.engine.engine import Engine, Step
from octavo.engine.step_time import StepTimePredictor, guessed
from octavo.executor.base import Batch, StepResult
from octavo.executor.cost import Rates
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.sampling.scripted import ScriptedSampler
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import Outcome, Request, RequestRecord
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.token_budget import ALONE, LEAST
from octavo.spec_decode.scripted_drafter import ScriptedDrafter
from octavo.spec_decode.speculator import Speculator

# Of the tiny model: 1 ms to read the weights, 0.1 ms a token, and attention that is felt.
RATES = Rates(
    3.2e6,
    2.4e7,
    2e-4,
    knee=3.0,
    attention_knee=1.0,
    attention_ops_per_second=4e9,
    kv_bytes_per_second=3e8,
    threads=2,
    unpacking=2.0,
    batch_overhead=1e-4,
    row_overhead=1e-5,
    chunk_overhead=1e-4,
)
TARGET = 0.010


class Machine(SimulatedExecutor):
    """One whose steps take what its rates say, times a factor of the moment."""

    factor = 1.0
    noise = random.Random(1)
    spread = 0.0
    held_up = 0.0  # how often a step takes five times as long

    def execute(self, batch: Batch) -> StepResult:
        seconds = self.costs.seconds(batch, self.rates) * self.factor
        seconds *= self.noise.lognormvariate(0, self.spread)
        return StepResult(None, seconds * (5 if self.noise.random() < self.held_up else 1))


@dataclass
class Seen:
    """Every step: who was in it with how many tokens, its seconds, and whether one decoded."""

    tokens: list[dict[str, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    decoded: list[bool] = field(default_factory=list)

    def on_step(self, step: Step) -> None:
        scheduled = step.scheduled
        counts = np.diff(scheduled.batch.seq_offsets).tolist()
        names = [seq.owner.request_id for seq in scheduled.sequences]
        self.tokens.append(dict(zip(names, counts, strict=False)))
        self.seconds.append(step.ended - step.started)
        self.decoded.append(bool(scheduled.decodes))

    def on_end(self, record: RequestRecord) -> None:
        pass

    @property
    def slowest(self) -> float:
        """Seconds of the longest step in which somebody decoded."""
        return max(
            seconds for seconds, decoded in zip(self.seconds, self.decoded, strict=True) if decoded
        )


def build(
    target: float | None = TARGET,
    *,
    begins: Rates | None = None,
    acceptance: float | None = None,
    max_num_batched_tokens: int = 512,
) -> tuple[Engine, Seen]:
    """``begins``: rates that the pace learns from; None: it knows the machine's."""
    kv = layout((None,))
    limits = SchedulerConfig(
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=max_num_batched_tokens,
        max_logits_rows=512 if acceptance else None,
        itl_target=target and 1000 * target,
    )
    machine = Machine(
        program(model((None,), VOCAB)),
        kv,
        num_blocks=4000,
        rates=RATES,
        max_tokens=max_num_batched_tokens,
        max_logits_rows=512,
    )
    machine.noise = random.Random(1)
    pace = None
    if target is not None:
        known = begins is None
        pace = StepTimePredictor(machine.costs, begins or RATES, measured=known, learns=not known)
    sampler, clock = ScriptedSampler(VOCAB, 0.0), VirtualClock()
    speculator = None
    if acceptance is not None:
        drafter = ScriptedDrafter(sampler, acceptance)
        speculator = Speculator(drafter, VOCAB, 8, now=clock.now)
    engine = Engine(
        machine, Scheduler(limits, kv, 4000), sampler, clock,
        vocab_size=VOCAB, seed=1, speculator=speculator, step_times=pace,
    )  # fmt: skip
    seen = Seen()
    engine.observers.append(seen)
    return engine, seen


def add(engine: Engine, name: str, prompt: int, answer: int) -> RequestRecord:
    rng = random.Random(name)
    return engine.add_request(
        Request(
            request_id=name,
            prompt_token_ids=[rng.randrange(VOCAB) for _ in range(prompt)],
            params=SamplingParams(max_tokens=answer, ignore_eos=True, seed=1),
        )
    )


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()
    engine.check_integrity()


def test_what_is_predicted_is_what_the_step_takes() -> None:
    engine, seen = build()
    add(engine, "a", 300, 40)
    add(engine, "b", 700, 40)
    finish(engine)
    stats = engine.stats()
    assert stats.predicted_seconds == pytest.approx(stats.paced_seconds)
    assert stats.paced_steps == sum(max(step.values()) > 1 for step in seen.tokens)
    assert stats.itl_target_s == TARGET
    assert stats.decode_steps == sum(seen.decoded)
    assert stats.late_steps == 0


def test_a_prompt_a_hundred_times_longer_does_not_stall_a_stream_nor_a_newcomer() -> None:
    for target in (TARGET, None):
        engine, seen = build(target)
        add(engine, "victim", 60, 2000)
        for _ in range(20):
            engine.step()
        long = add(engine, "long", 6000, 2)
        for _ in range(5):
            engine.step()
        short = add(engine, "short", 50, 3)
        finish(engine)
        assert short.first_token is not None
        assert long.first_token is not None
        waited = short.first_token - short.arrival
        if target is None:
            assert seen.slowest > 5 * TARGET, "the case would stall it"
            continue
        assert seen.slowest <= TARGET
        assert engine.stats().late_steps == 0
        assert waited < 4 * TARGET, "answered while the long prompt is under way"
        assert short.first_token < long.first_token
        filled = [
            seconds
            for step, seconds in zip(seen.tokens, seen.seconds, strict=True)
            if step.get("victim") == 1 and step.get("long", 0) > 1
        ]
        assert np.median(filled) > 0.8 * TARGET, "the step is used"


def test_a_long_prompt_goes_on_beside_a_stream_of_short_ones() -> None:
    engine, seen = build()
    add(engine, "victim", 60, 4000)
    long = add(engine, "long", 3000, 2)
    count = 0
    while long.first_token is None:
        add(engine, f"short{count}", 90, 2)  # more than what a step has room for
        count += 1
        engine.step()
        assert count < 300
    shares = [step["long"] / (sum(step.values()) - 1) for step in seen.tokens if "long" in step]
    assert min(shares[1:-1]) > 0.3, "about half of every step"
    assert seen.slowest <= TARGET


def test_prompts_get_through_where_decodes_alone_miss_the_target() -> None:
    engine, seen = build(1e-6)
    for index in range(8):
        add(engine, f"old{index}", 20, 300)
    for _ in range(30):
        engine.step()
    before = len(seen.tokens)
    long = add(engine, "long", 400, 2)
    short = add(engine, "short", 30, 2)
    finish(engine)
    assert long.outcome is short.outcome is Outcome.FINISHED
    prompts = [
        sum(count for name, count in step.items() if name in ("long", "short") and count > 1)
        for step in seen.tokens[before:]
    ]
    assert max(prompts) <= LEAST
    assert short.first_token is not None
    assert long.first_token is not None
    assert short.first_token - short.arrival < 0.3 * (long.first_token - long.arrival)
    assert engine.stats().late_steps == engine.stats().decode_steps


def test_a_step_without_decodes_is_longer_but_has_an_end_too() -> None:
    engine, seen = build()
    add(engine, "long", 4000, 1)
    engine.step()
    newcomer = add(engine, "short", 30, 1)
    finish(engine)
    assert TARGET < max(seen.seconds) <= ALONE * TARGET
    assert newcomer.first_token is not None
    assert newcomer.first_token - newcomer.arrival <= 2 * ALONE * TARGET


def test_prompts_of_one_length_are_served_one_after_the_other() -> None:
    engine, seen = build()
    for name in "abc":
        add(engine, name, 900, 1)
    finish(engine)
    order = [name for step in seen.tokens for name in step]
    assert order == sorted(order)
    assert max(map(len, seen.tokens)) == 2, "two share a step only where one ends"


def test_the_shortest_of_the_others_comes_next() -> None:
    engine, _ = build()
    records = {name: add(engine, name, size, 1) for name, size in
               (("first", 3000), ("longer", 2500), ("middle", 400), ("short", 40))}  # fmt: skip
    finish(engine)
    by_end = sorted(records, key=lambda name: records[name].first_token or inf)
    assert by_end[:2] == ["short", "middle"]


def test_drafts_count_against_the_target() -> None:
    target = 0.003
    for paced in (True, False):
        engine, seen = build(target if paced else None, acceptance=0.9)
        for index in range(6):
            add(engine, str(index), 16, 150)
        finish(engine)
        most = max(sum(step.values()) for step in seen.tokens[12:])
        assert engine.stats().draft_tokens > 100
        if paced:
            assert most < 40
            assert seen.slowest <= target
        else:
            assert most >= 40
            assert seen.slowest > target


# Learning


def errors(engine: Engine, seen: Seen, load: int = 15) -> list[float]:
    """How far steps with prompts are from what was predicted before them, as logarithms."""
    pace = engine.step_times
    found: list[float] = []

    class Beside:
        def on_step(self, step: Step) -> None:
            if step.scheduled.chunks:
                seconds = step.ended - step.started
                found.append(abs(log(pace.predict(step.scheduled.batch) / seconds)))

        def on_end(self, record: RequestRecord) -> None:
            pass

    beside = Beside()
    engine.observers.append(beside)
    rng = random.Random(3)
    name = len(seen.tokens)
    for index in range(load):
        add(engine, f"{name}-{index}", rng.choice((30, 200, 900)), rng.choice((20, 60)))
        for _ in range(12):
            engine.step()
    finish(engine)
    engine.observers.remove(beside)
    return found


@pytest.mark.parametrize("off", [1 / 100, 1 / 5, 1.0, 5.0, 100.0])
def test_it_learns_a_machine_of_which_it_knows_nothing(off: float) -> None:
    """Guesses that are far off, and off from each other."""
    assert RATES.attention_ops_per_second is not None
    begins = replace(
        RATES.slowed(1.6, 0.8),
        attention_ops_per_second=2 * RATES.attention_ops_per_second,
        knee=2.0,
    ).slowed(off)
    engine, seen = build(begins=begins)
    found = errors(engine, seen)
    assert np.median(found[5:15]) < 0.3, "useful within a few steps"
    assert np.median(found[30:]) < 0.1
    late = engine.stats().late_steps / engine.stats().decode_steps
    assert late < 0.1


def test_it_follows_a_machine_that_gets_slower() -> None:
    engine, seen = build(begins=RATES)
    machine = engine.executor
    errors(engine, seen)
    for factor in (1.3, 0.9, 2.0):
        machine.factor = factor
        found = errors(engine, seen)
        assert np.median(found[len(found) // 3 :]) < 0.1


def test_steps_that_were_held_up_do_not_mislead_it() -> None:
    engine, seen = build(begins=RATES)
    machine = engine.executor
    machine.spread, machine.held_up = 0.05, 0.03
    found = errors(engine, seen, 40)
    assert np.median(found) < 0.1
    assert 0.03 < engine.step_times.spread < 0.3


@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_a_simulated_margin_is_what_a_real_engines_comes_to(noise: float) -> None:
    """Steps that are as noisy as a calibration found them."""
    engine, seen = build(begins=RATES)
    machine = engine.executor
    machine.spread = noise
    errors(engine, seen, 40)
    simulated = StepTimePredictor(machine.costs, RATES, noise=noise, learns=False)
    assert simulated.margin == pytest.approx(engine.step_times.margin, abs=0.025)


def test_no_figure_of_a_clock_breaks_it() -> None:
    engine, _ = build(begins=RATES)
    pace = engine.step_times
    add(engine, "a", 100, 5)
    engine.step()
    scheduled = engine.scheduler.schedule(0.0)
    for seconds in (0.0, -1.0, 1e-300, 1e300, 1e-9, 1e9) * 50:
        pace.learn(scheduled.batch, seconds)
        predicted = pace.predict(scheduled.batch)
        assert 0.0 < predicted < inf
        assert 0.0 < pace.margin < 1.0
    for _ in range(300):
        pace.learn(scheduled.batch, 0.005)
    assert pace.predict(scheduled.batch) == pytest.approx(0.005, rel=0.1)


@given(
    rates=st.sampled_from((RATES, Rates(), Rates(1e9, 1e9), replace(guessed(2), knee=1.0))),
    decodes=st.lists(st.integers(0, 500), max_size=5),
    start=st.integers(0, 400),
)
def test_more_tokens_never_take_less_time(rates: Rates, decodes: list[int], start: int) -> None:
    engine, _ = build()
    pace = StepTimePredictor(engine.executor.costs, rates)
    pace.begin(np.array(decodes, np.int32))
    seconds = [pace.seconds(start, tokens, 0) for tokens in range(200)]
    assert seconds == sorted(seconds)


def test_a_target_needs_predictions_and_chunks() -> None:
    with pytest.raises(ValueError, match="above 0"):
        SchedulerConfig(max_model_len=8, itl_target=0.0)
    with pytest.raises(ValueError, match="chunked"):
        SchedulerConfig(max_model_len=8, itl_target=1.0, chunked_prefill=False)
    engine, _ = build()
    with pytest.raises(ValueError, match="takes predictions"):
        Engine(engine.executor, engine.scheduler, engine.sampler, engine.clock, vocab_size=VOCAB)


def test_the_mean_of_all_steps_is_fitted() -> None:
    times = StepTimePredictor()
    rng = random.Random(1)
    for _ in range(500):
        decoding, prompt = rng.randrange(0, 32), rng.choice((0, 0, 100, 512))
        noise = rng.uniform(0.9, 1.1)
        times.on_step(decoding, prompt, noise * (2e-3 + 5e-4 * decoding + 1e-4 * prompt))
    assert times.linear == pytest.approx((2e-3, 5e-4, 1e-4), rel=0.3)


def test_a_slow_first_step_is_soon_forgotten_and_a_stall_counts_little() -> None:
    times = StepTimePredictor()
    times.on_step(1, 100, 5.0)
    for _ in range(100):
        times.on_step(4, 0, 0.01)
        times.on_step(4, 100, 0.02)
    assert sum(times.linear) < 0.05
    before = times.linear
    times.on_step(4, 0, 60.0)
    each, sequence, _ = times.linear
    assert each + 4 * sequence < 1.5 * (before[0] + 4 * before[1])


@given(
    st.lists(
        st.tuples(
            st.integers(0, 256), st.integers(0, 512), st.floats(0, 100, allow_subnormal=False)
        ),
        max_size=50,
    )
)
def test_whatever_steps_take_no_part_is_negative(steps: list[tuple[int, int, float]]) -> None:
    times = StepTimePredictor()
    for step in steps:
        times.on_step(*step)
    assert all(0 <= part <= 100 for part in times.linear)
