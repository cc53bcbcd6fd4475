"""Predicted waits beside those that come, on a simulated engine."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.engine.clock import VirtualClock
from octavo.engine.engine import Engine
from octavo.engine.wait_time import LONGEST, WaitTimePredictor
from octavo.executor.cost import Rates
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.kv_cache.layout import KvLayout
from octavo.models.config import Activation, Layer, ModelConfig, Rope
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.sampling.scripted import ScriptedSampler
from octavo.scheduler.admission import Forecast
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import (
    AdmissionError,
    LatencyTarget,
    Request,
    RequestRecord,
    SchedulingParams,
)
from octavo.scheduler.scheduler import Scheduler
from scheduling import new_record

MODEL = ModelConfig(
    family="llama",
    vocab_size=1000,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    context_length=2048,
    norm_eps=1e-5,
    activation=Activation.SILU,
    attention_scale=0.125,
    tied_embeddings=True,
    layers=(Layer(Rope(10000.0, 64, False)),) * 4,
)
# Of a machine on which a step has a fixed part, a part for each sequence and one for each token.
RATES = Rates(2e9, 2e9, 2e-3, row_overhead=200e-6)


class Simulated:
    """An engine and the waiting of those who come to it, told at once."""

    def __init__(self, num_blocks: int = 4096, **limits: Any) -> None:
        layout = KvLayout.of(MODEL)
        self.engine = Engine(
            SimulatedExecutor(program(MODEL), layout, num_blocks=num_blocks, rates=RATES),
            Scheduler(
                SchedulerConfig(max_model_len=2048, **{"max_num_seqs": 16} | limits),
                layout,
                num_blocks,
            ),
            ScriptedSampler(MODEL.vocab_size),
            VirtualClock(),
            vocab_size=MODEL.vocab_size,
        )
        self.waiting = WaitTimePredictor(self.engine)
        self.engine.observers.append(self.waiting)
        self.told: list[tuple[Forecast, RequestRecord]] = []

    def ask(self, prompt: int, output: int) -> None:
        forecast = self.waiting.forecast(asks(prompt))
        number = len(self.told)
        ids = [(number * 7 + place * 13) % MODEL.vocab_size for place in range(prompt)]
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        record = self.engine.add_request(
            Request(request_id=str(number), prompt_token_ids=ids, params=params)
        )
        self.told.append((forecast, record))

    def run(self, seconds: float | None = None) -> None:
        clock = self.engine.clock
        end = None if seconds is None else clock.now() + seconds
        while self.engine.has_work() and (end is None or clock.now() < end):
            self.engine.step()
        if end is not None:
            clock.sleep_until(end)


def asks(prompt: int, **more: Any) -> RequestRecord:
    return new_record("new", 0.0, prompt, **more)


def errors(told: Sequence[tuple[Forecast, RequestRecord]]) -> list[tuple[float, float]]:
    """(predicted, actual) waits."""
    return [
        (forecast.wait, record.scheduled - record.arrival)
        for forecast, record in told
        if record.scheduled is not None
    ]


def check(simulated: Simulated, target: LatencyTarget | None, forecast: Forecast) -> None:
    admission = simulated.engine.scheduler.admission
    admission.within_target = True
    expected = simulated.waiting.expected_output
    told = SimpleNamespace(forecast=lambda *_: forecast, expected_output=expected)
    admission.forecaster = cast(Any, told)
    admission.check_forecast([asks(100, target=target)], 0, 0)


def test_before_anything_is_known_nobody_waits() -> None:
    assert Simulated().waiting.forecast(asks(1000)) == (None, 0.0, 0.0)


def test_an_idle_engine_lets_in_at_once() -> None:
    simulated = Simulated()
    for _ in range(20):
        simulated.ask(100, 20)
        simulated.run()
    forecast, record = simulated.told[-1]
    assert forecast.wait == 0.0
    assert record.first_token is not None
    assert forecast.ttft == pytest.approx(record.first_token - record.arrival, rel=0.2)
    assert forecast.tpot == pytest.approx(record.tpot, rel=0.2)


@pytest.mark.parametrize("limit", [4, 16, 64])
def test_waits_for_a_seat(limit: int) -> None:
    """Twice as much as can be done, of answers whose length nobody tells: the queue grows."""
    rng = random.Random(1)
    simulated = Simulated(max_num_seqs=limit)
    for _ in range(2 * limit):  # it learns what steps take, and how long answers are
        simulated.ask(rng.randrange(50, 150), rng.randrange(20, 100))
    simulated.run()
    simulated.told.clear()
    for _ in range(8 * limit):
        simulated.ask(rng.randrange(50, 150), rng.randrange(20, 100))
        simulated.run(0.3 / limit)
    simulated.run()
    waits = [pair for pair in errors(simulated.told) if pair[1] > 0.3]
    assert len(waits) > 10
    ratios = sorted(predicted / actual for predicted, actual in waits)
    assert ratios[len(ratios) // 10] > 0.6
    assert 0.8 < ratios[len(ratios) // 2] < 1.25
    assert ratios[-len(ratios) // 10] < 1.6


def test_waits_for_blocks() -> None:
    """Sixteen may run, but the cache holds four."""
    simulated = Simulated(num_blocks=64)
    for _ in range(8):
        simulated.ask(160, 80)
    simulated.run()
    simulated.told.clear()
    for _ in range(24):
        simulated.ask(160, 80)
    simulated.run()
    predicted, actual = errors(simulated.told)[-1]
    assert 0.7 < predicted / actual < 1.4


def test_waits_for_prompts() -> None:
    """There are seats, but a hundred long prompts before."""
    simulated = Simulated(max_num_seqs=256)
    for _ in range(10):
        simulated.ask(1000, 5)
        simulated.run()
    simulated.told.clear()
    for _ in range(100):
        simulated.ask(1000, 5)
    simulated.run()
    record = simulated.told[-1][1]
    assert record.first_token is not None
    assert simulated.told[-1][0].ttft == pytest.approx(
        record.first_token - record.arrival, rel=0.25
    )


def test_what_would_miss_its_target_is_told_when_it_would_not() -> None:
    simulated = Simulated()
    for _ in range(2):
        for _ in range(48):
            simulated.ask(100, 50)
        if not simulated.waiting.prompt_tokens:
            simulated.run()
    simulated.run(0.1)
    waiting = simulated.waiting
    forecast = waiting.forecast(asks(100))
    assert forecast.ttft > forecast.wait > 0.5
    check(simulated, LatencyTarget(forecast.ttft * 2, forecast.tpot * 2), forecast)
    with pytest.raises(AdmissionError, match="the first token would take") as late:
        check(simulated, LatencyTarget(ttft=forecast.ttft / 2), forecast)
    with pytest.raises(AdmissionError, match="the token would take") as slow:
        check(simulated, LatencyTarget(tpot=forecast.tpot / 2), forecast)
    for error in (late.value, slow.value):
        assert error.retryable
        assert error.retry_after is not None
        assert error.retry_after > 0
    assert late.value.retry_after is not None
    simulated.run(late.value.retry_after)  # who comes back then is let in
    check(simulated, LatencyTarget(ttft=forecast.ttft / 2), waiting.forecast(asks(100)))


def test_who_would_wait_longer_than_the_most_is_refused() -> None:
    simulated = Simulated(max_queue_time=0.5)
    simulated.ask(100, 5)
    check(simulated, None, Forecast(0.5, 0.0, 0.0))
    with pytest.raises(AdmissionError, match=r"it would wait .* by prediction") as refused:
        check(simulated, None, Forecast(0.75, 0.0, 0.0))
    assert refused.value.retry_after == 0.25


def test_predictions_are_bounded() -> None:
    simulated = Simulated()
    for _ in range(4):
        simulated.ask(100, 1000)
    simulated.run()
    forecast = simulated.waiting.forecast(asks(100), pending=10**6, pending_tokens=10**9)
    assert forecast.wait == LONGEST


def queued(policy: str, *others: dict[str, Any]) -> WaitTimePredictor:
    """Return the predictor of an engine that runs one request, its most, while these wait."""
    simulated = Simulated(max_num_seqs=1, scheduling_policy=policy)
    for _ in range(4):
        simulated.ask(50, 50)
        simulated.run()
    simulated.ask(50, 50)
    simulated.run(0.01)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    for number, more in enumerate(others):
        simulated.engine.add_request(
            Request(
                request_id=f"w{number}",
                prompt_token_ids=[7] * 50,
                params=params,
                scheduling=SchedulingParams(**more),
            )
        )
    return simulated.waiting


def test_who_is_more_urgent_does_not_wait_for_the_others() -> None:
    waiting = queued("priority", *({"priority": priority} for priority in (0, 0, 5, 5, 5)))
    waits = [waiting.forecast(asks(50, priority=priority)).wait for priority in (-1, 0, 5)]
    assert waits[0] == 0.0  # it displaces who runs
    assert 0 < waits[1] < 0.6 * waits[2]
    assert waits[2] == waiting.forecast().wait


def test_clients_take_turns() -> None:
    waiting = queued("fair", *({"client": "flood"} for _ in range(20)), {"client": "other"})
    flood, other, polite = (
        waiting.forecast(asks(50, client=client)).wait for client in ("flood", "other", "new")
    )
    assert polite < other < flood / 4


def test_who_is_due_first_comes_first() -> None:
    targets = [LatencyTarget(ttft=1000.0), None, None, LatencyTarget(ttft=1.0)]
    waiting = queued("deadline", *({"target": target} for target in targets))
    soon, late = (
        waiting.forecast(asks(50, target=LatencyTarget(ttft=ttft))).wait for ttft in (5.0, 5000.0)
    )
    assert 0 < soon < 0.6 * late


def test_of_those_without_a_target_one_is_due_every_so_often() -> None:
    """So of twenty that wait, a request that is due in 150 s is behind two."""
    waiting = queued("deadline", *({} for _ in range(20)))
    waits = [
        waiting.forecast(asks(50, target=None if ttft is None else LatencyTarget(ttft=ttft))).wait
        for ttft in (50.0, 150.0, None)
    ]
    each = (waits[2] - waits[0]) / 20
    assert waits[0] > 0
    assert waits[1] - waits[0] == pytest.approx(2 * each, rel=0.05)
    assert waits[2] == waiting.forecast().wait
