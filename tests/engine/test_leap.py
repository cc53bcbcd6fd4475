"""Leaping is stepping: whatever the load, all is the same to the last digit at every step's end."""

import random
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import repeat
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checking import layout, model
from engine.world import drawn_policy, random_terms
from faults import patch
from octavo.engine.clock import Clock, VirtualClock
from octavo.engine.engine import Engine, Step
from octavo.engine.leap import Leap
from octavo.engine.step_time import StepTimePredictor
from octavo.executor.base import Batch, Int32, StepResult
from octavo.executor.cost import CostModel, Rates
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.kv_cache.layout import KvLayout
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import Sampled
from octavo.sampling.scripted import ScriptedSampler
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.policies.config import POLICIES
from octavo.scheduler.policies.fair import Fair
from octavo.scheduler.request import (
    AdmissionError,
    Outcome,
    Request,
    RequestRecord,
    SchedulingParams,
)
from octavo.scheduler.scheduler import Scheduler

VOCAB = 5  # small: requests generate the same tokens, and so share blocks
STOP = 3
WINDOWS = ((None,), (6,), (None, 5), (9, None, 1))
RATES = (
    Rates(),
    Rates(1e9, 1e10, 1e-4),
    Rates(3e8, 7e9, 1.7e-4, knee=2.5, attention_knee=1.7, row_overhead=3e-6),
    Rates(3e8, 7e9, knee=1.0, kv_bytes_per_second=1.3e6, attention_ops_per_second=1e7),
)


@dataclass(frozen=True)
class Arrival:
    time: float
    request: Request


@dataclass(frozen=True)
class Load:
    windows: Sequence[int | None]
    rates: Rates
    block_size: int
    num_blocks: int
    limits: SchedulerConfig
    stop_rate: float
    arrivals: list[Arrival]
    state_pages: int = 0


@st.composite
def loads(draw: st.DrawFn) -> Load:
    windows = draw(st.sampled_from(WINDOWS))
    block_size = draw(st.sampled_from((1, 2, 4, 16)))
    max_model_len = draw(st.sampled_from((24, 64, 200)))
    max_num_seqs = draw(st.integers(1, 6))
    memory = draw(st.sampled_from(("paged", "paged", "paged", "reserve")))
    limits = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from((0, 3, 20, 200))),
        enable_prefix_caching=memory == "paged" and draw(st.integers(0, 4)) > 0,
        max_num_queued_reqs=draw(st.sampled_from((None, None, 2))),
        batching=draw(st.sampled_from(("continuous", "continuous", "static"))),
        memory=memory,
        **drawn_policy(random.Random(draw(st.integers(0, 99)))),
    )
    if draw(st.integers(0, 4)) == 0:
        most = max(max_model_len, limits.max_num_batched_tokens)
        limits = replace(limits, chunked_prefill=False, max_num_batched_tokens=most)
    whole = len(windows) * -(-max_model_len // block_size)
    num_blocks = max(1, int(whole * draw(st.sampled_from((0.6, 1.0, 1.5, 4.0)))))
    state_pages = draw(st.sampled_from((0, 0, 1, 3)))
    num_blocks += state_pages * draw(st.sampled_from((1, 2, 5, 30)))
    limits = replace(limits, state_snapshots=draw(st.sampled_from((0.0, 0.2, 0.5))))
    rates = draw(st.sampled_from(RATES))
    if limits.chunked_prefill and draw(st.booleans()):
        limits = replace(limits, itl_target=draw(st.sampled_from((1e-3, 0.2, 0.5, 3.0))))
    unit = 1e-3 if rates == RATES[0] else 1.3e-4
    time = 0.0
    arrivals = []
    for index in range(draw(st.integers(1, 12))):
        time += unit * draw(st.sampled_from((0, 0, 1, 7, 40, 200)))
        prompt = [at % 3 for at in range(draw(st.integers(1, max_model_len // 2)))]
        prompt += draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
        room = max_model_len - len(prompt)
        max_tokens = draw(st.none() | st.integers(1, max(1, room)))
        ends_itself = draw(st.booleans())
        most = room if max_tokens is None else max_tokens
        params = SamplingParams(
            temperature=0.0,
            n=draw(st.sampled_from((1, 1, 1, 2, 3))),
            max_tokens=max_tokens,
            ignore_eos=True,
            seed=draw(st.integers(0, 2)),
            stop_token_ids=(STOP,) if ends_itself else (),
            min_tokens=draw(st.integers(0, max(0, most))) if ends_itself else 0,
            logprobs=draw(st.sampled_from((None, None, None, None, None, 1))),
            prompt_logprobs=draw(st.sampled_from((None, None, None, None, None, 0))),
        )
        salt = draw(st.sampled_from((None, None, "a")))
        request = Request(
            request_id=str(index),
            prompt_token_ids=prompt,
            params=params,
            scheduling=SchedulingParams(cache_salt=salt, **terms(limits, draw(st.integers(0, 99)))),
        )
        arrivals.append(Arrival(time, request))
    stop_rate = draw(st.sampled_from((0.0, 1.0, 1.0, 0.1)))
    return Load(windows, rates, block_size, num_blocks, limits, stop_rate, arrivals, state_pages)


def terms(limits: SchedulerConfig, seed: int) -> dict[str, Any]:
    found = random_terms(random.Random(seed))
    if "priority" not in POLICIES[limits.scheduling_policy].request_fields:
        found["priority"] = 0
    return found


@dataclass
class Times:
    """An observer of steps: their beginnings and ends, and whom they decoded."""

    steps: list[tuple[float, float, list[tuple[int, int]]]] = field(default_factory=list)
    outcomes: list[list[Any]] = field(default_factory=list)

    def on_step(self, step: Step) -> None:
        decodes = [seq.order for seq in step.scheduled.decodes]
        self.steps.append((step.started, step.ended, decodes))

    def on_leap(self, leap: Leap) -> None:
        decodes = [seq.order for seq in leap.decodes]
        self.steps += [
            (started, ended, decodes)
            for started, ended in zip(leap.times, leap.times[1:], strict=False)
        ]

    def on_end(self, record: RequestRecord) -> None:
        self.outcomes.append(told(record))


def build(load: Load) -> Engine:
    config = model(load.windows)
    kv_layout: KvLayout = layout(load.windows, load.block_size, load.state_pages)
    executor = SimulatedExecutor(
        program(config), kv_layout, num_blocks=load.num_blocks, rates=load.rates,
        max_tokens=load.limits.max_num_batched_tokens,
    )  # fmt: skip
    paced = load.limits.itl_target is not None
    return Engine(
        executor,
        Scheduler(load.limits, kv_layout, load.num_blocks),
        ScriptedSampler(VOCAB, load.stop_rate),
        VirtualClock(),
        vocab_size=VOCAB,
        seed=1,
        step_times=StepTimePredictor(executor.costs, load.rates, learns=False) if paced else None,
    )


def told(record: RequestRecord) -> list[Any]:
    """All that a record says, but for its sequences."""
    return [getattr(record, each.name) for each in fields(record) if each.name != "sequences"]


def state(engine: Engine) -> dict[str, Any]:
    """All that decides what comes next, and all that is reported."""
    scheduler = engine.scheduler
    kv = scheduler.kv
    requests = engine.requests.values()
    return {
        "now": engine.clock.now(),
        "stats": replace(engine.stats()),
        "records": [told(record) for record in requests],
        "tokens": [
            (seq.status, seq.slot, seq.token_ids.tolist(), seq.output.num_tokens)
            for request in requests
            for seq in request.sequences
        ],
        "drawn": [
            seq.output.sampler.num_generated for request in requests for seq in request.sequences
        ],
        "last": scheduler._builder.last_token[[seq.slot for seq in scheduler.decoding]].tolist(),
        "tables": kv.tables.tobytes(),
        "written": kv.num_tokens.tolist(),
        "held": kv.num_blocks.tolist(),
        "first": [first[:] for first in kv._first],
        "registered": kv._registered[:],
        "refs": kv.pool.refs[:],
        "empty": kv.pool._empty[:],
        "never used": kv.pool._never_used,
        "shared tails": set(kv.shared_tails),
        "cached": list(kv.pool._cached),
        "index": {
            key: (node.tokens, node.blocks[:], node.pages[:], node.refs)
            for key, node in kv.index._nodes.items()
        },
        "states": kv.state
        and (
            [pages[:] for pages in kv.state._pages],
            {slot: pages[:] for slot, pages in kv.state._writes.items()},
            kv.state._busy.tolist(),
            {slot: node.key for slot, node in kv.state._rolling.items()},
            [(node.key, kind) for node, kind in kv.state.snapshots._kinds.items()],
        ),
        "waiting": [(seq.order, seq.queued, seq.stood) for seq in scheduler.waiting],
        "served": (
            [scheduler.policy.served(request.scheduling.client) for request in requests]
            if isinstance(scheduler.policy, Fair)
            else None
        ),
        "blocked": scheduler._refused,
        "to join": scheduler._to_join,
    }


def run(
    load: Load, *, leaps: bool, at: Container[int] | None = None
) -> tuple[dict[int, dict[str, Any]], Times, int]:
    """States by how many steps had been taken (``at``; None: after each call), what an observer
    saw, and how many steps were leapt over.
    """
    engine = build(load)
    times = Times()
    engine.observers.append(times)
    arrivals = iter([*load.arrivals, Arrival(inf, load.arrivals[0].request)])
    states: dict[int, dict[str, Any]] = {}
    leapt = 0
    due = next(arrivals)
    while True:
        while due.time <= engine.clock.now():
            with suppress(AdmissionError):
                engine.add_request(due.request, due.time)
            due = next(arrivals)
        if not engine.has_work():
            if due.time == inf:
                break
            engine.clock.sleep_until(due.time)
            continue
        leap = engine.leap(due.time) if leaps else None
        if leap is None:
            engine.step()
        else:
            leapt += leap.steps
        steps = engine._stats.steps
        if at is None or steps in at:
            engine.scheduler.check_integrity()
            states[steps] = state(engine)
    engine.check_integrity()
    return states, times, leapt


def compare(load: Load) -> None:
    leapt, seen_leaping, _ = run(load, leaps=True)
    stepped, seen, _ = run(load, leaps=False, at=leapt)
    assert leapt == stepped
    assert seen_leaping == seen


@settings(max_examples=60)
@given(load=loads())
def test_leaping_is_stepping(load: Load) -> None:
    compare(load)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=3000)
@given(load=loads())
def test_leaping_is_stepping_at_length(load: Load) -> None:
    compare(load)


def decoding(count: int, *, max_tokens: int = 100, num_blocks: int = 200) -> Load:
    limits = SchedulerConfig(max_model_len=200, max_num_seqs=8, max_num_batched_tokens=64)
    arrivals = [
        Arrival(
            0.0,
            Request(
                request_id=str(index),
                prompt_token_ids=[index % VOCAB] * 10,
                params=SamplingParams(max_tokens=max_tokens, seed=index),
            ),
        )
        for index in range(count)
    ]
    return Load((None,), RATES[1], 4, num_blocks, limits, 0.0, arrivals)


def test_all_but_the_first_and_the_last_step_are_leapt_over() -> None:
    states, _, leapt = run(decoding(3), leaps=True)
    assert (len(states), leapt) == (3, 98)  # a prompt each, 98 tokens, the last of the 100


def test_scarce_blocks_cut_a_leap() -> None:
    """Three grow to 110 positions, 28 blocks each, in a pool of 50: one is preempted."""
    load = decoding(3, num_blocks=50)
    states, _, leapt = run(load, leaps=True)
    assert states[max(states)]["stats"].preemptions > 0
    assert leapt > 0.8 * max(states)


def test_a_leap_ends_with_the_step_that_ends_after_the_time_asked_for() -> None:
    engine = build(decoding(1))
    engine.add_request(decoding(1).arrivals[0].request)
    engine.step()
    leap = engine.leap(engine.clock.now() + 0.01)
    assert leap.times[-2] < leap.times[0] + 0.01 <= leap.times[-1]
    assert engine.leap(engine.clock.now()) is None


def test_an_observer_that_wants_every_step_gets_it() -> None:
    class Watchful:
        def on_step(self, step: Step) -> None: ...

        def on_end(self, record: RequestRecord) -> None: ...

    engine = build(decoding(1))
    engine.add_request(decoding(1).arrivals[0].request)
    engine.observers.append(Watchful())
    engine.step()
    assert engine.leap(inf) is None


class Faulty(SimulatedExecutor):
    """Its fourth step fails."""

    executed = 0

    def execute(self, batch: Batch) -> StepResult:
        self.executed += 1
        if self.executed == 4:
            raise RuntimeError("the fourth step")
        return super().execute(batch)


class Slow(SimulatedExecutor):
    """Promises anew what it overrides."""

    def execute(self, batch: Batch) -> StepResult:
        return StepResult(None, 0.25)

    def decode_seconds(self, positions: Int32) -> Iterator[float]:
        return repeat(0.25)


class Repeating(ScriptedSampler):
    def sample(self, *args: Any) -> Sampled:
        return super().sample(*args)._replace(token_ids=[0] * len(args[1]))


def leaps_with(**replaced: Any) -> Leap | None:
    """What becomes of a leap in an engine with a part of another kind."""
    engine = build(decoding(1))
    patch(engine, **replaced)
    engine.add_request(decoding(1).arrivals[0].request)
    engine.step()
    return engine.leap(inf)


def executor(kind: type[SimulatedExecutor]) -> SimulatedExecutor:
    return kind(program(model((None,))), layout((None,), 4), num_blocks=200, rates=RATES[1])


def test_a_promise_is_not_inherited() -> None:
    """Whoever overrides what was promised of gets every step."""

    class Ticking(VirtualClock):
        def now(self) -> float:
            self.advance(1e-6)
            return super().now()

    assert leaps_with() is not None
    assert leaps_with(executor=executor(SimulatedExecutor)) is not None
    assert leaps_with(executor=executor(Faulty)) is None
    assert leaps_with(sampler=Repeating(VOCAB)) is None
    assert leaps_with(clock=Ticking()) is None
    assert leaps_with(clock=Clock()) is None
    patched = executor(SimulatedExecutor)
    patch(patched, execute=executor(Faulty).execute)
    assert leaps_with(executor=patched) is None


def test_a_promise_made_anew_is_trusted() -> None:
    leap = leaps_with(executor=executor(Slow))
    assert np.diff(leap.times).tolist() == [0.25] * 98


def test_a_fault_is_met_in_a_loop_that_leaps() -> None:
    engine = build(decoding(1))
    engine.executor = executor(Faulty)
    record = engine.add_request(decoding(1).arrivals[0].request)
    while engine.has_work():
        if engine.leap(inf) is None:
            engine.step()
    assert (record.outcome, record.completion_tokens) == (Outcome.FAILED, 3)
    assert "the fourth step" in (record.error or "")


@settings(max_examples=50)
@given(
    positions=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    windows=st.sampled_from(WINDOWS),
    rates=st.sampled_from(RATES[1:]),
)
def test_seconds_ahead_are_those_of_the_steps(
    positions: list[int], windows: Sequence[int | None], rates: Rates
) -> None:
    costs = CostModel(program(model(windows)), layout(windows))
    count = len(positions)
    counting = np.arange(count + 1, dtype=np.int32)
    empty = np.zeros((0, 2), np.int32)
    at = np.array(positions, dtype=np.int32)
    ahead = costs.decode_seconds(at, rates)
    for step in range(20):
        batch = Batch(
            counting[:-1], at + step, counting, counting[:-1], empty, counting[:-1], empty
        )
        assert next(ahead) == costs.seconds(batch, rates)
