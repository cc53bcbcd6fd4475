"""Loads that a machine cannot keep up with, in the simulator: shares and promises are kept."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from engine.test_leap import model
from octavo.engine.clock import VirtualClock
from octavo.engine.engine import Engine, Step
from octavo.executor.cost import Rates
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.kv_cache.layout import KvLayout
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.sampling.scripted import ScriptedSampler
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import (
    LatencyTarget,
    Outcome,
    Request,
    RequestRecord,
    SchedulingParams,
)
from octavo.scheduler.scheduler import Scheduler

PROMPT = 40
SECONDS = 40.0


def engine(max_num_seqs: int = 4, **policy: Any) -> Engine:
    """A step takes 4 ms and a fifth more for each sequence."""
    config = model((None,))
    layout = KvLayout.of(config)
    limits = SchedulerConfig(
        max_model_len=256,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=128,
        **policy,
    )
    rates = Rates(step_overhead=0.004, row_overhead=0.0008)
    executor = SimulatedExecutor(
        program(config), layout, num_blocks=400, rates=rates, max_tokens=128
    )
    sampler, clock = ScriptedSampler(config.vocab_size), VirtualClock()
    scheduler = Scheduler(limits, layout, 400)
    return Engine(executor, scheduler, sampler, clock, vocab_size=config.vocab_size, seed=1)


@dataclass
class Source:
    """Requests of one kind, at random times, so many a second."""

    name: str
    rate: float
    max_tokens: int
    terms: dict[str, Any] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)

    def arrivals(self, seed: int) -> Iterator[tuple[float, Request]]:
        rng = random.Random(f"{self.name} {seed}")
        now, count = rng.expovariate(self.rate), 0
        while now < SECONDS:
            count += 1
            prompt = [rng.randrange(5) for _ in range(PROMPT)]
            params = SamplingParams(
                temperature=0.0, max_tokens=rng.randint(1, 2 * self.max_tokens - 1), ignore_eos=True
            )
            request = Request(
                request_id=f"{self.name}-{count}",
                prompt_token_ids=prompt,
                params=params,
                scheduling=SchedulingParams(client=self.name, **self.terms),
            )
            yield now, request
            now += rng.expovariate(self.rate)

    def served(self) -> float:
        """Tokens, as fair shares count them."""
        return sum(
            (record.prompt_tokens - record.cached_tokens) * (record.scheduled is not None)
            + 2 * record.completion_tokens
            for record in self.records
        )

    def attainment(self, target: LatencyTarget) -> float:
        return sum(map(target.met_by, self.records)) / len(self.records)


def play(running: Engine, sources: list[Source], until: float = SECONDS) -> None:
    """Their requests as they come, until the time is over; ``inf``: until all have ended."""
    arrivals = sorted(
        (
            (time, source.name, request, source)
            for source in sources
            for time, request in source.arrivals(0)
        ),
        key=lambda each: each[:2],
    )
    index = 0
    while running.clock.now() < until:
        while index < len(arrivals) and arrivals[index][0] <= running.clock.now():
            time, _, request, source = arrivals[index]
            source.records.append(running.add_request(request, time))
            index += 1
        if running.has_work():
            running.step()
        elif index < len(arrivals):
            running.clock.sleep_until(arrivals[index][0])
        else:
            break


@cache
def total(max_num_seqs: int = 4) -> float:
    """Tokens a second, as fair shares count them, that the machine has to give."""
    running = engine(max_num_seqs, scheduling_policy="fair")
    flood = Source("flood", 40.0, 30)
    play(running, [flood])
    return flood.served() / SECONDS


def crowd(total: float, times: float) -> tuple[Source, list[Source]]:
    """One client that floods and nine that ask for ``times`` a tenth of all there is."""
    each = times * total / 10 / (PROMPT + 2 * 30)
    polite = [Source(f"polite{i}", each, 30) for i in range(9)]
    return Source("flood", 10 * each / times, 30), polite


def test_nine_polite_clients_keep_their_share_beside_one_that_floods() -> None:
    """Asking for half of their share they get all of it; asking for twice as much, at least
    95 % of their share.
    """
    rate = total()
    flood, polite = crowd(rate, 0.5)
    play(engine(scheduling_policy="fair"), [flood, *polite])
    asked = [sum(PROMPT + 2 * (record.max_tokens or 0) for record in p.records) for p in polite]
    for source, wanted in zip(polite, asked, strict=True):
        assert source.served() >= 0.95 * wanted
    flood, polite = crowd(rate, 2.0)
    running = engine(scheduling_policy="fair")
    play(running, [flood, *polite])
    everything = sum(source.served() for source in (flood, *polite))
    for source in polite:
        assert source.served() >= 0.95 * everything / 10
    assert everything >= 0.9 * rate * SECONDS, "nothing is left unused for the sake of shares"


class Shares:
    """By how much each source has been behind at most: what it would have been served if
    the tokens of every step were divided equally among those that had asked for more, less what
    it was.
    """

    def __init__(self, running: Engine, sources: list[Source]) -> None:
        self.behind = {source.name: 0.0 for source in sources}
        self._sources = sources
        self._counted = dict.fromkeys(self.behind, 0)  # records
        self._asked = dict.fromkeys(self.behind, 0.0)
        self._share = dict.fromkeys(self.behind, 0.0)
        self._served = dict.fromkeys(self.behind, 0.0)
        running.observers.append(self)

    def on_step(self, step: Step) -> None:
        for source in self._sources:
            for record in source.records[self._counted[source.name] :]:
                self._asked[source.name] += PROMPT + 2 * (record.max_tokens or 0)
            self._counted[source.name] = len(source.records)
        left = 0.0
        for name, tokens in (
            *((chunk.seq.owner.scheduling.client, chunk.size) for chunk in step.scheduled.chunks),
            *(
                (seq.owner.scheduling.client, 2 * len(drawn))
                for seq, drawn in zip(step.scheduled.samples, step.drawn.runs, strict=True)
            ),
        ):
            self._served[name] += tokens
            left += tokens
        while left > 1e-6:
            wanted = {n: self._asked[n] - share for n, share in self._share.items()}
            wanting = [name for name, tokens in wanted.items() if tokens > 1e-6]
            if not wanting:
                break
            each = min(left / len(wanting), *(wanted[name] for name in wanting))
            for name in wanting:
                self._share[name] += each
            left -= each * len(wanting)
        for name, share in self._share.items():
            self.behind[name] = max(self.behind[name], share - self._served[name])

    def on_end(self, record: RequestRecord) -> None:
        pass


@pytest.mark.parametrize("max_num_seqs", [4, 8])
@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_who_is_behind_its_share_is_so_by_two_requests_at_most(
    times: float, max_num_seqs: int
) -> None:
    """At any time and for as long as it goes on. In ten seconds a share is but some twenty
    requests, and who has not asked for its share from the first second on does not get all of it.
    """
    flood, polite = crowd(total(max_num_seqs), times)
    running = engine(max_num_seqs, scheduling_policy="fair")
    shares = Shares(running, [flood, *polite])
    play(running, [flood, *polite], 10.0)
    longest = PROMPT + 2 * (2 * 30 - 1)
    assert max(shares.behind[source.name] for source in polite) <= 2 * longest


def test_first_come_first_served_does_not_keep_it() -> None:
    """What the other test measures can be missed."""
    flood, polite = crowd(total(), 0.5)
    play(engine(), [flood, *polite])
    wanted = sum(PROMPT + 2 * (r.max_tokens or 0) for p in polite for r in p.records)
    assert sum(p.served() for p in polite) < 0.8 * wanted


TARGET = LatencyTarget(ttft=0.3, tpot=0.02)
AGEING: dict[str, dict[str, Any]] = {
    "priority": {"scheduling_policy": "priority", "priority_ageing": 1.0},
    "deadline": {"scheduling_policy": "deadline", "best_effort_deadline": 5.0},
}


def classes(rate: float, policy: str) -> tuple[Source, Source]:
    """Somebody at a screen asks for two fifths of what the machine can give, and somebody with much
    to do asks for twice all of it.
    """
    terms = {"target": TARGET}, {"priority": 5} if policy == "priority" else {}
    urgent = Source("urgent", 0.4 * rate / (PROMPT + 2 * 30), 30, terms[0])
    return urgent, Source("bulk", 2 * rate / (PROMPT + 2 * 30), 30, terms[1])


@pytest.mark.parametrize("policy", AGEING)
def test_who_was_promised_something_has_it_and_all_finish(policy: str) -> None:
    urgent, bulk = classes(total(), policy)
    running = engine(**AGEING[policy])
    play(running, [urgent, bulk])
    assert urgent.attainment(TARGET) > 0.95
    ended = sum(record.outcome is Outcome.FINISHED for record in bulk.records)
    assert ended > 0.2 * len(bulk.records), "what the others leave is used"
    while running.has_work():
        running.step()
    outcomes = {record.outcome for record in urgent.records + bulk.records}
    assert outcomes == {Outcome.FINISHED}


def test_promises_are_not_kept_in_order_of_arrival() -> None:
    urgent, bulk = classes(total(), "fcfs")
    play(engine(), [urgent, bulk])
    assert urgent.attainment(TARGET) < 0.2


@pytest.mark.parametrize("policy", ["fcfs", "deadline"])
def test_shedding_what_is_late_keeps_goodput_at_twice_what_can_be_served(policy: str) -> None:
    rate = total() / (PROMPT + 2 * 30)
    found = []
    for times in (0.9, 2.0):
        source = Source("all", times * rate, 30, {"target": LatencyTarget(ttft=0.5, tpot=0.03)})
        play(engine(scheduling_policy=policy, shed_late=True), [source], float("inf"))
        found.append(sum(map(LatencyTarget(0.5, 0.03).met_by, source.records)))
        late = [r for r in source.records if r.outcome is Outcome.REJECTED]
        assert all(record.error and record.completion_tokens == 0 for record in late)
    assert found[1] >= 0.9 * found[0]
