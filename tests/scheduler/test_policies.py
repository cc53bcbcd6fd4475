"""Who goes first under each policy, who gives way, and that everybody comes to the end."""

import random
from collections import Counter
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checking import build
from engine.test_engine import request as plain
from engine.test_engine import run
from octavo.engine.engine import Engine, Step
from octavo.sampling.params import InvalidParameter
from octavo.scheduler.policies import fair
from octavo.scheduler.policies.base import Policy
from octavo.scheduler.policies.config import POLICIES, PolicyConfig
from octavo.scheduler.request import (
    FinishReason,
    LatencyTarget,
    Outcome,
    Request,
    RequestRecord,
    SchedulingParams,
)
from octavo.scheduler.sequence import Sequence
from scheduling import SETTINGS


def request(
    name: str,
    prompt: list[int],
    *,
    priority: int = 0,
    client: str = "",
    weight: float = 1.0,
    target: LatencyTarget | None = None,
    **params: Any,
) -> Request:
    scheduling = SchedulingParams(priority=priority, client=client, weight=weight, target=target)
    return replace(plain(name, prompt, **params), scheduling=scheduling)


def made(policy: str, **limits: Any) -> Engine:
    return build(scheduling_policy=policy, **limits)


def running(engine: Engine) -> set[str]:
    scheduler = engine.scheduler
    return {seq.owner.request_id for seq in scheduler.decoding + scheduler.prefilling}


class Sees:
    """Who was in each step."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[set[str]] = []
        engine.observers.append(self)

    def on_step(self, step: Step) -> None:
        self.steps.append({seq.owner.request_id for seq in step.scheduled.sequences})

    def on_end(self, record: RequestRecord) -> None:
        pass


# Priorities


def test_the_limit_full_of_low_priority_and_then_a_high_one() -> None:
    """It starts in the next step; the low one that gave way resumes and finishes."""
    engine = made("priority", max_num_seqs=3)
    sees = Sees(engine)
    low = [
        engine.add_request(request(f"low{i}", [i] * 20, priority=1, max_tokens=50, seed=i))
        for i in range(3)
    ]
    for _ in range(10):
        engine.step()
    high = engine.add_request(request("high", [9] * 20, max_tokens=5))
    engine.step()
    assert sees.steps[-1] == {"low0", "low1", "high"}, "the latest of the lowest gives way"
    run(engine)
    assert high.outcome is Outcome.FINISHED
    assert [record.outcome for record in low] == [Outcome.FINISHED] * 3
    assert [record.preemptions for record in low] == [0, 0, 1]
    assert [record.completion_tokens for record in low] == [50] * 3


def test_at_a_step_as_small_as_the_limit_a_high_one_has_the_token_of_whom_it_displaces() -> None:
    engine = made("priority", max_num_seqs=3, max_num_batched_tokens=3)
    sees = Sees(engine)
    for i in range(3):
        engine.add_request(request(f"low{i}", [i] * 4, priority=1, max_tokens=40, seed=i))
    while len(engine.scheduler.decoding) < 3:
        engine.step()
    engine.add_request(request("high", [50, 51], max_tokens=3))
    before = len(sees.steps)
    engine.step()
    assert "high" in sees.steps[before]
    run(engine)


def test_a_longer_prompt_of_the_same_priority_does_not_keep_a_high_one_out() -> None:
    engine = made("priority", max_num_seqs=2, max_num_batched_tokens=8)
    sees = Sees(engine)
    engine.add_request(request("low", [1] * 4, priority=1, max_tokens=40))
    while not engine.scheduler.decoding:
        engine.step()
    engine.add_request(request("long", [2] * 60, max_tokens=3))
    engine.step()
    engine.add_request(request("high", [50, 51], max_tokens=3))
    before = len(sees.steps)
    engine.step()
    assert {"long", "high"} == sees.steps[before]
    run(engine)


def test_a_high_prompt_goes_ahead_of_low_ones_under_way() -> None:
    engine = made("priority", max_num_seqs=8, max_num_batched_tokens=16)
    sees = Sees(engine)
    engine.add_request(request("low", [1] * 200, priority=1, max_tokens=2))
    engine.step()
    engine.add_request(request("high", [2] * 16, max_tokens=2, seed=2))
    engine.step()
    assert "high" in sees.steps[-1]
    assert engine.scheduler.decoding, "the whole of it went through"


def test_high_priority_takes_blocks_and_no_more_than_it_needs() -> None:
    engine = made("priority", num_blocks=14, max_num_seqs=8)
    low = [
        engine.add_request(request(f"low{i}", [i] * 60, priority=1, max_tokens=8, seed=i))
        for i in range(3)
    ]
    for _ in range(4):
        engine.step()
    assert len(running(engine)) == 3
    high = engine.add_request(request("high", [9] * 40, max_tokens=4))
    engine.step()
    assert running(engine) == {"low0", "low1", "high"}
    run(engine)
    assert sum(record.preemptions for record in low) == 1
    assert {record.outcome for record in (*low, high)} == {Outcome.FINISHED}


def test_nobody_gives_way_for_what_would_not_fit_all_the_same() -> None:
    engine = made("priority", num_blocks=16, max_num_seqs=8)
    first = engine.add_request(request("first", [1] * 150, max_tokens=20))
    for _ in range(4):
        engine.step()
    low = engine.add_request(request("low", [2] * 10, priority=1, max_tokens=20, seed=2))
    for _ in range(2):
        engine.step()
    assert running(engine) == {"first", "low"}
    engine.add_request(request("high", [3] * 100, max_tokens=2, seed=3))
    for _ in range(4):
        engine.step()
    assert running(engine) == {"first", "low"}, "high needs what first has"
    run(engine)
    assert (first.preemptions, low.preemptions) == (0, 0)


def test_equals_do_not_displace_each_other_however_long_they_wait() -> None:
    engine = made("priority", max_num_seqs=1, priority_ageing=0.001)
    first = engine.add_request(request("first", [1] * 8, priority=3, max_tokens=200))
    engine.step()
    others = [
        engine.add_request(request(f"{i}", [2] * 8, priority=3, max_tokens=50, seed=i))
        for i in range(3)
    ]
    run(engine)
    assert [record.preemptions for record in (first, *others)] == [0] * 4
    ends = [record.finished for record in (first, *others)]
    assert ends == sorted(ends)  # type: ignore[type-var]


def test_whoever_gave_way_resumes_ahead_of_its_equals() -> None:
    engine = made("priority", max_num_seqs=1)
    low = engine.add_request(request("low", [1] * 8, priority=1, max_tokens=20))
    for _ in range(3):
        engine.step()
    equal = engine.add_request(request("equal", [2] * 8, priority=1, max_tokens=4, seed=2))
    high = engine.add_request(request("high", [3] * 8, max_tokens=4, seed=3))
    run(engine)
    assert high.finished < low.finished < equal.finished  # type: ignore[operator]
    assert low.preemptions == 1


def test_low_priority_finishes_under_a_stream_of_high_as_fast_as_ageing_says() -> None:
    """A step takes a millisecond, a level 20, so that three levels are worth 60."""
    engine = made("priority", max_num_seqs=2, priority_ageing=0.02, max_model_len=256)
    low = engine.add_request(request("low", [1] * 8, priority=3, max_tokens=30))
    count = 0
    while low.outcome is None:
        while len(engine.scheduler.waiting) + len(running(engine)) < 6:
            count += 1
            engine.add_request(request(f"high{count}", [2] * 8, max_tokens=10, seed=count))
        engine.step()
        assert engine.clock.now() < 0.2
    assert low.outcome is Outcome.FINISHED
    assert low.preemptions <= 1, "who came to its turn by waiting keeps it"
    assert low.finished > 0.05, "and not before"  # type: ignore[operator]


def test_high_priority_does_not_wait_behind_low_that_came_to_its_turn() -> None:
    """At the limit full of low priority, one low waits so long that it is next; a newcomer of high
    priority takes another's place all the same.
    """
    engine = made("priority", max_num_seqs=2, priority_ageing=0.001)
    for i in range(3):
        engine.add_request(request(f"low{i}", [i] * 8, priority=5, max_tokens=100, seed=i))
    for _ in range(50):
        engine.step()
    assert running(engine) == {"low0", "low1"}
    engine.add_request(request("high", [9] * 8, max_tokens=4))
    engine.step()
    assert running(engine) == {"low0", "high"}
    run(engine)


@pytest.mark.parametrize(
    "policy", [name for name, each in POLICIES.items() if "priority" not in each.request_fields]
)
def test_a_priority_without_effect_is_refused_by_name(policy: str) -> None:
    engine = made(policy)
    with pytest.raises(InvalidParameter, match=f"no effect under the policy {policy}"):
        engine.add_request(request("a", [1], priority=1, max_tokens=1))


# Deadlines


def test_the_earliest_deadline_is_next_and_who_has_none_comes_after() -> None:
    engine = made("deadline", max_num_seqs=1)
    strict = LatencyTarget(ttft=0.5, tpot=0.001)
    first = engine.add_request(request("first", [1] * 8, max_tokens=5, target=strict))
    engine.step()
    records = [
        engine.add_request(request(name, [2] * 8, max_tokens=1, seed=2, target=target))
        for name, target in (
            ("none", None),
            ("late", LatencyTarget(ttft=3.0)),
            ("soon", LatencyTarget(ttft=0.1)),
            ("end", LatencyTarget(e2el=0.7)),
        )
    ]
    run(engine)
    order = sorted((first, *records), key=lambda record: record.finished or 0)
    assert [record.request_id for record in order] == ["first", "soon", "end", "late", "none"]


def test_who_would_be_late_displaces_whoever_has_no_deadline_and_not_before_it_must() -> None:
    engine = made("deadline", max_num_seqs=1)
    easy = engine.add_request(request("easy", [1] * 8, max_tokens=200))
    for _ in range(5):
        engine.step()
    target = LatencyTarget(ttft=0.1)
    due = engine.add_request(request("due", [2] * 8, max_tokens=5, target=target))
    for _ in range(80):
        engine.step()
    assert running(engine) == {"easy"}, "it may end of itself"
    run(engine)
    assert target.met_by(due)
    assert (easy.outcome, easy.preemptions, due.preemptions) == (Outcome.FINISHED, 1, 0)


def test_a_line_of_deadlines_begins_to_move_in_time_for_its_last() -> None:
    """Each prompt takes 10 steps, so that the first must go 50 ms before the last is due."""
    engine = made("deadline", max_num_seqs=1, max_num_batched_tokens=8, max_model_len=500)
    engine.add_request(request("easy", [1] * 80, max_tokens=400))
    while not engine.scheduler.decoding:
        engine.step()
    target = LatencyTarget(ttft=0.2)
    due = [
        engine.add_request(request(f"due{i}", [2 + i] * 80, max_tokens=1, seed=i, target=target))
        for i in range(5)
    ]
    run(engine)
    assert all(target.met_by(record) for record in due)


def test_who_is_ahead_of_its_deadlines_lends_its_place() -> None:
    """A token is promised every 200 ms and comes every millisecond: soon seconds are to spare."""
    engine = made("deadline", max_num_seqs=1)
    slow = engine.add_request(
        request("slow", [1] * 8, max_tokens=200, target=LatencyTarget(ttft=1.0, tpot=0.2))
    )
    for _ in range(20):
        engine.step()
    target = LatencyTarget(ttft=0.05, tpot=0.2)
    due = engine.add_request(request("due", [2] * 8, max_tokens=5, seed=2, target=target))
    run(engine)
    assert (slow.preemptions, due.preemptions) == (1, 0)
    assert slow.scheduling.target.met_by(slow)
    assert target.met_by(due)


@pytest.mark.parametrize("tpot", [1.0, 0.3, 0.2, 0.1])
@pytest.mark.parametrize(("count", "slots"), [(2, 1), (4, 2)])
def test_two_do_not_take_turns_in_pushing_each_other_aside(
    tpot: float, count: int, slots: int
) -> None:
    """To come back costs 1.3 s, as no blocks are left of who was pushed aside. Both may have some
    slack all the time; it is used as long as it pays, and no promise is broken for it that would
    have been kept without.
    """
    target = LatencyTarget(ttft=10.0, tpot=tpot)

    def lived(policy: str) -> tuple[Engine, int]:
        engine = made(
            policy, max_num_seqs=slots, num_blocks=62 * slots, max_model_len=960, duration=0.1
        )
        records = [
            engine.add_request(request(f"r{i}", [i] * 800, max_tokens=150, seed=i, target=target))
            for i in range(count)
        ]
        run(engine)
        return engine, sum(target.met_by(record) for record in records)

    plain, met_by_arrival = lived("fcfs")
    engine, met = lived("deadline")
    assert met >= met_by_arrival
    assert met == count or tpot < 0.3
    assert engine.clock.now() < 1.25 * plain.clock.now()
    assert engine.stats().computed_tokens < 3 * plain.stats().computed_tokens


def test_who_is_not_ahead_keeps_its_place() -> None:
    engine = made("deadline", max_num_seqs=1)
    target = LatencyTarget(ttft=1.0, tpot=0.002)
    first = engine.add_request(request("first", [1] * 8, max_tokens=60, target=target))
    for _ in range(20):
        engine.step()
    second = engine.add_request(request("due", [2] * 8, max_tokens=5, target=LatencyTarget(0.2)))
    run(engine)
    assert first.preemptions == 0
    assert second.scheduling.target.met_by(second)


def test_a_missed_deadline_is_nothing_to_hurry_for() -> None:
    engine = made("deadline", max_num_seqs=1)
    strict, soon, later = LatencyTarget(0.1, 0.001), LatencyTarget(0.05), LatencyTarget(0.15)
    engine.add_request(request("first", [1] * 8, max_tokens=100, target=strict))
    engine.step()
    missed = engine.add_request(request("missed", [2] * 8, max_tokens=4, target=soon))
    kept = engine.add_request(request("kept", [3] * 8, max_tokens=4, target=later))
    run(engine)
    assert kept.finished < missed.finished  # type: ignore[operator]
    assert missed.outcome is Outcome.FINISHED


# Shedding


@pytest.mark.parametrize("policy", POLICIES)
def test_who_waits_too_long_is_shed_and_its_record_says_so(policy: str) -> None:
    engine = made(policy, max_num_seqs=1, max_queue_time=0.05)
    first = engine.add_request(request("first", [1] * 8, max_tokens=100))
    engine.step()
    second = engine.add_request(request("second", [2] * 8, max_tokens=4))
    deltas = run(engine)
    assert first.outcome is Outcome.FINISHED, "who runs is not shed, however long it takes"
    assert second.outcome is Outcome.REJECTED
    assert second.finish_reasons == [FinishReason.SHED]
    assert second.error.startswith("shed: it stood in the queue for 0.05")
    assert second.scheduled is None
    assert second.finished == pytest.approx(0.052, abs=0.0015)
    last = [delta for delta in deltas if delta.request_id == "second"]
    assert [(delta.finish_reason, delta.record) for delta in last] == [(FinishReason.SHED, second)]


def test_who_was_preempted_is_not_shed_for_waiting() -> None:
    engine = made("priority", max_num_seqs=1, max_queue_time=0.01)
    low = engine.add_request(request("low", [1] * 8, priority=1, max_tokens=40))
    for _ in range(5):
        engine.step()
    engine.add_request(request("high", [2] * 8, max_tokens=60, seed=2))
    run(engine)
    assert (low.outcome, low.preemptions) == (Outcome.FINISHED, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_late_work_is_shed_as_soon_as_it_is_known_to_be_late(policy: str) -> None:
    """A step of 16 tokens takes a millisecond, so 160 tokens take 10: who has 9 left is sent away,
    and not before.
    """
    engine = made(policy, max_num_seqs=1, max_num_batched_tokens=16, shed_late=True)
    strict = LatencyTarget(ttft=0.02, tpot=0.001)
    engine.add_request(request("first", [1] * 160, max_tokens=30, target=strict))
    engine.step()
    target = LatencyTarget(ttft=0.03)
    late = engine.add_request(request("late", [2] * 160, max_tokens=4, target=target))
    added = engine.clock.now()
    run(engine)
    assert late.outcome is Outcome.REJECTED
    assert "160 tokens are still to be computed" in late.error
    assert late.finished is not None
    assert 0.018 < late.finished - added < 0.024


def test_who_is_in_time_is_not_shed() -> None:
    engine = made("deadline", max_num_seqs=1, shed_late=True)
    record = engine.add_request(
        request("a", [1] * 8, max_tokens=100, target=LatencyTarget(ttft=0.01, e2el=0.02))
    )
    run(engine)
    assert record.outcome is Outcome.FINISHED, "its first token was in time, though not its last"


def test_who_is_cached_is_in_time_for_longer() -> None:
    """Only 16 of its 160 tokens are to be computed, in a millisecond and not in ten."""
    engine = made("fcfs", max_num_seqs=1, max_num_batched_tokens=16, shed_late=True)
    engine.add_request(request("before", [2] * 160, max_tokens=1))
    run(engine)
    engine.add_request(request("first", [1] * 16, max_tokens=30))
    engine.step()
    target = LatencyTarget(ttft=0.035)
    record = engine.add_request(request("cached", [2] * 160, max_tokens=4, target=target))
    run(engine)
    assert target.met_by(record)


def test_what_has_ended_is_not_kept_until_its_time_would_have_come() -> None:
    engine = made("fcfs", max_queue_time=3600.0, shed_late=True)
    target = LatencyTarget(ttft=3600.0)
    for index in range(500):
        engine.add_request(request(str(index), [1], max_tokens=1, target=target))
        engine.step()
    assert len(engine.scheduler.shedding._entries) < 150


# Fair shares


def shares(engine: Engine) -> dict[str, float]:
    """Tokens of output by client, of all requests there are."""
    found: dict[str, float] = {}
    for state in engine.requests.values():
        name = state.client
        found[name] = found.get(name, 0) + state.completion_tokens
    return found


def test_a_flood_does_not_take_the_share_of_others() -> None:
    engine = made("fair", max_num_seqs=4, max_model_len=256, num_blocks=200)
    for i in range(40):
        engine.add_request(request(f"f{i}", [i] * 16, client="flood", max_tokens=100, seed=i))
    for _ in range(20):
        engine.step()
    polite = engine.add_request(request("polite", [50] * 16, client="polite", max_tokens=20))
    run(engine)
    assert polite.finished < 0.06, "it did not wait for a hundred tokens"  # type: ignore[operator]
    assert polite.preemptions == 0


def test_weights_are_shares() -> None:
    engine = made("fair", max_num_seqs=6, num_blocks=400, max_model_len=64)
    for i in range(100):
        for client, weight in (("one", 1.0), ("three", 3.0)):
            engine.add_request(
                request(f"{client}{i}", [i % 50] * 4, client=client, weight=weight, max_tokens=16)
            )
    for _ in range(150):
        engine.step()
    policy = engine.scheduler.policy
    assert policy.served("one") == pytest.approx(policy.served("three"), rel=0.15)
    ended = [
        name for name in ("one", "three") for i in range(100) if f"{name}{i}" not in engine.requests
    ]
    assert ended.count("three") == pytest.approx(3 * ended.count("one"), rel=0.25)


def test_nobody_saves_up_while_away() -> None:
    engine = made("fair", max_num_seqs=2, num_blocks=200)
    policy = engine.scheduler.policy
    engine.add_request(request("early", [1] * 8, client="away", max_tokens=2))
    run(engine)
    for i in range(30):
        engine.add_request(request(f"b{i}", [i] * 8, client="busy", max_tokens=20, seed=i))
    for _ in range(150):
        engine.step()
    engine.add_request(request("back", [3] * 8, client="away", max_tokens=20))
    assert policy.served("away") == policy.served("busy")


def test_what_the_cache_has_is_not_charged_nor_what_is_computed_again() -> None:
    engine = made("fair", max_num_seqs=1)
    policy = engine.scheduler.policy
    prompt = [i % 50 for i in range(65)]
    engine.add_request(request("a", prompt, client="c", max_tokens=1))
    run(engine)
    assert policy.served("c") == 65 + 2
    engine.add_request(request("b", prompt, client="c", max_tokens=10))
    for _ in range(4):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.decoding[0])
    run(engine)
    assert policy.served("c") == 67 + 1 + 20


def test_the_clients_known_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "_KNOWN", 64)
    engine = made("fair", max_num_seqs=8)
    policy = engine.scheduler.policy
    engine.add_request(request("stays", [1] * 8, client="stays", max_tokens=200))
    for i in range(200):
        engine.add_request(request(str(i), [1], client=f"client {i}", max_tokens=1))
        engine.step()
        assert len(policy._clients) <= 65
    assert policy.served("stays") > 200, "who has something to its debit is not forgotten"


BACKLOGS = {
    "seed": st.integers(0, 2**32),
    "num_clients": st.integers(2, 4),
    "num_blocks": st.sampled_from((20, 60)),
    "max_num_seqs": st.sampled_from((1, 2, 3)),
}


def check_backlogged(
    seed: int, num_clients: int, num_blocks: int, max_num_seqs: int, steps: int
) -> None:
    """What two clients i and j were served, in every stretch of time in which both always have
    something in the queue, differs by e_i + e_j at most, where e is what a client can be given
    after it was let in last: (longest prompt + output_cost × max_num_seqs × longest answer) / its
    weight.

    For whoever is let in, first or again after a preemption, and by displacing or not, is of the
    client i whose counter is least, so that c_i ≤ c_j. It is charged a prompt, or nothing if
    it comes back; and until the next of i's is let in, i's counter moves only by what those draw
    that run, at most max_num_seqs sequences, each up to its longest answer. c_j does not
    fall. So at any time c_i ≤ c_j + e_i, and the other way; and a stretch of time adds to the one
    difference what it takes from the other.

    Nobody comes nearer: when c_j is high all places are i's, and all of them answer at length. This
    is theorem 4.4 of VTC for places and answers that are bounded. There it is the cache that
    bounds what runs, 2 output_cost × its tokens; but where it is paged, whoever ends makes room for
    the others to grow, and what they draw in all is not bounded by it.

    Both always have something in the queue only if a step cannot empty it: it lets in at most
    max_num_seqs, who may even end in it.
    """
    rng = random.Random(seed)
    engine = made("fair", max_num_seqs=max_num_seqs, num_blocks=num_blocks, max_model_len=200)
    policy = engine.scheduler.policy
    weights = [rng.choice((0.5, 1.0, 2.0)) for _ in range(num_clients)]
    kinds = [(rng.randint(1, 100), rng.randint(1, 60)) for _ in range(num_clients)]
    after = [
        (prompt + 2 * max_num_seqs * answer) / weight
        for (prompt, answer), weight in zip(kinds, weights, strict=True)
    ]
    prompts = [0.0] * num_clients
    outputs = [0.0] * num_clients

    class Counts:
        def on_step(self, step: Step) -> None:
            for seq, drawn in zip(step.scheduled.samples, step.drawn.runs, strict=True):
                outputs[int(seq.owner.scheduling.client)] += len(drawn)

        def on_end(self, record: RequestRecord) -> None:
            pass

    engine.observers.append(Counts())
    waiting: list[RequestRecord] = []
    count = 0
    extremes: dict[tuple[int, int], tuple[float, float]] = {}
    for _ in range(steps):
        queued = Counter(int(seq.owner.scheduling.client) for seq in engine.scheduler.waiting)
        for client, (prompt, answer) in enumerate(kinds):
            for _ in range(queued[client], max_num_seqs + 1):
                count += 1
                record = engine.add_request(
                    request(
                        str(count),
                        [rng.randrange(60) for _ in range(rng.randint(1, prompt))],
                        client=str(client),
                        weight=weights[client],
                        max_tokens=rng.randint(1, answer),
                        seed=count,
                    )
                )
                waiting.append(record)
        engine.step()
        for record in waiting:
            if record.scheduled is not None:
                computed = record.prompt_tokens - record.cached_tokens
                prompts[int(record.scheduling.client)] += computed
        waiting = [record for record in waiting if record.scheduled is None]
        served = [
            (prompt + 2 * output) / weight
            for prompt, output, weight in zip(prompts, outputs, weights, strict=True)
        ]
        assert served == [policy.served(str(client)) for client in range(num_clients)]
        for pair in combinations(range(num_clients), 2):
            difference = served[pair[0]] - served[pair[1]]
            low, high = extremes.get(pair, (0.0, 0.0))
            extremes[pair] = min(low, difference), max(high, difference)
    for (i, j), (low, high) in extremes.items():
        assert -after[j] <= low <= high <= after[i]
        assert high - low <= after[i] + after[j]


@settings(max_examples=10)
@given(**BACKLOGS)
def test_backlogged_clients_are_served_alike(**values: int) -> None:
    check_backlogged(**values, steps=400)


@pytest.mark.long
@settings(max_examples=200)
@given(**BACKLOGS)
def test_many_backlogged_clients_are_served_alike(**values: int) -> None:
    check_backlogged(**values, steps=1500)


# Progress


CROWDS: dict[str, Any] = {
    "policy": st.sampled_from([*POLICIES]),
    "seed": st.integers(0, 2**32),
    "num_blocks": st.sampled_from((7, 10, 24, 200)),
    "max_num_seqs": st.sampled_from((1, 2, 5)),
    "window": st.sampled_from(((None,), (None, 20))),
}


def check_progress(
    policy: str, seed: int, num_blocks: int, max_num_seqs: int, window: tuple[int | None, ...]
) -> None:
    """However urgent, and of whatever clients, newcomers are who never stop coming: each request
    of the beginning finishes, and comes ever nearer to it.
    """
    rng = random.Random(seed)
    values = {name: SETTINGS[name][1] for name in POLICIES[policy].settings()}
    engine = made(
        policy,
        num_blocks=num_blocks * len(window),
        max_num_seqs=max_num_seqs,
        max_model_len=100,
        max_num_batched_tokens=16,
        windows=window,
        **values,
    )

    def anybody(name: str, *, priority: int, target: LatencyTarget | None, client: str) -> Request:
        return request(
            name,
            [rng.randrange(60) for _ in range(rng.choice((1, 5, 40, 60)))],
            max_tokens=rng.choice((1, 4, 20, 40)),
            n=rng.choice((1, 1, min(2, max_num_seqs))),
            seed=rng.randrange(1000),
            priority=priority if "priority" in POLICIES[policy].request_fields else 0,
            target=target,
            client=client,
        )

    count = 0

    def newcomers() -> None:
        nonlocal count
        while len(engine.scheduler.waiting) < 3 or rng.random() < 0.02:
            count += 1
            tight = LatencyTarget(rng.choice((0.001, 0.01, 0.1)), rng.choice((None, 0.001, 0.1)))
            client = rng.choice(("flood", f"new {count}"))
            engine.add_request(anybody(str(count), priority=0, target=tight, client=client))

    for _ in range(10):
        newcomers()
        engine.step()
    victims = [
        engine.add_request(
            anybody(f"v{i}", priority=rng.choice((1, 20)), target=None, client="victim")
        )
        for i in range(3)
    ]
    limit = 4000
    while any(record.outcome is None for record in victims):
        newcomers()
        engine.step()
        engine.check_integrity()
        limit -= 1
        assert limit, f"{[record.completion_tokens for record in victims]} tokens, and no more"
    assert {record.outcome for record in victims} == {Outcome.FINISHED}


@settings(max_examples=20)
@given(**CROWDS)
def test_nobody_is_passed_for_ever(**values: Any) -> None:
    check_progress(**values)


@pytest.mark.long
@settings(max_examples=1000)
@given(**CROWDS)
def test_nobody_is_passed_for_ever_in_many_crowds(**values: Any) -> None:
    check_progress(**values)


def check_no_vain_work(seed: int, policy: str, count: int) -> None:
    """What is computed for nothing stays a part of what is computed for something."""
    rng = random.Random(seed)
    engine = made(policy, num_blocks=60, max_num_seqs=4, max_model_len=200)
    for i in range(count):
        target = rng.choice((None, LatencyTarget(0.1, 0.01), LatencyTarget(1.0, 0.1)))
        engine.add_request(
            request(
                str(i),
                [rng.randrange(60) for _ in range(rng.randint(1, 60))],
                max_tokens=rng.randint(1, 60),
                seed=i,
                priority=rng.choice((0, 1, 5)) * ("priority" in POLICIES[policy].request_fields),
                client=rng.choice("aab"),
                target=target,
            )
        )
        for _ in range(rng.choice((0, 1, 10, 30))):
            engine.step()
    run(engine)
    stats = engine.stats()
    assert stats.computed_tokens < 2 * (stats.prompt_tokens + stats.generation_tokens)


MIXES = {"seed": st.integers(0, 2**32), "policy": st.sampled_from([*POLICIES])}


@settings(max_examples=12)
@given(**MIXES)
def test_nobody_is_let_in_only_to_give_way_again(seed: int, policy: str) -> None:
    check_no_vain_work(seed, policy, 30)


@pytest.mark.long
@settings(max_examples=300)
@given(**MIXES)
def test_many_are_not_let_in_only_to_give_way_again(seed: int, policy: str) -> None:
    check_no_vain_work(seed, policy, 60)


# Settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy 'lifo' is none of fcfs, priority"),
        ({"priority_ageing": 1.0}, "priority_ageing has no effect under scheduling_policy fcfs"),
        (
            {"scheduling_policy": "fair", "best_effort_deadline": 1.0},
            "best_effort_deadline has no effect under scheduling_policy fair: it is of deadline",
        ),
        ({"scheduling_policy": "priority", "priority_ageing": 0.0}, "is 0.0, not above 0"),
        ({"max_queue_time": -1.0}, "max_queue_time is -1.0, not above 0"),
        ({"max_queue_time": float("nan")}, "max_queue_time is nan, not above 0"),
    ],
)
def test_settings_without_effect_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyConfig(**values)


def test_each_setting_of_a_policy_is_a_field_of_the_config() -> None:
    known = {each.name for each in fields(PolicyConfig)}
    assert all(policy.settings().keys() <= known for policy in POLICIES.values())


def test_a_new_policy_is_a_class_and_a_place_in_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ShortestPrompt(Policy):
        """A second of waiting is worth 1000 tokens of prompt."""

        name = "shortest_prompt"

        def queue_key(self, seq: Sequence) -> tuple[float, tuple[int, int]]:
            return seq.owner.prompt_tokens + 1000.0 * seq.owner.arrival, seq.order

    monkeypatch.setitem(POLICIES, ShortestPrompt.name, ShortestPrompt)
    engine = made(ShortestPrompt.name, max_num_seqs=1)
    sees = Sees(engine)
    for name, length in (("runs", 20), ("long", 20), ("short", 5), ("middle", 10)):
        engine.add_request(request(name, [1] * length, max_tokens=20))
        engine.step()
    while engine.scheduler.waiting.tokens > 20:
        engine.step()
    engine.add_request(request("late", [2], max_tokens=1))  # more than 20 tokens' time later
    run(engine)
    served = list(dict.fromkeys(next(iter(names)) for names in sees.steps))
    assert served == ["runs", "short", "middle", "long", "late"]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_in_turn_is_the_order_in_which_all_would_be_let_in(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    fields = POLICIES[policy].request_fields
    engine = made(policy, max_num_seqs=2, num_blocks=40)
    for number in range(rng.randrange(30)):
        target = LatencyTarget(
            rng.choice((None, 0.001, 0.5, 60.0)), rng.choice((None, 0.01)), rng.choice((None, 90.0))
        )
        engine.add_request(
            request(
                f"r{number}",
                [1 + number] * rng.randint(1, 40),
                priority=rng.randrange(3) if "priority" in fields else 0,
                client=rng.choice("abc") if POLICIES[policy].by_client else "",
                weight=rng.choice((1.0, 2.0)) if "weight" in fields else 1.0,
                target=rng.choice((None, target)),
                max_tokens=rng.randint(1, 30),
                n=rng.choice((1, 1, 2)),
            )
        )
        for _ in range(rng.randrange(3)):
            engine.step()
    queue = engine.scheduler.policy
    told = list(queue.in_turn())
    assert told == list(queue.in_turn())  # to ask changes nothing
    assert len(told) == len(engine.scheduler.waiting)
    for seq in told:
        assert queue.head() is seq
        queue.remove(seq)
        if seq.owner.scheduled is None:
            queue.on_admit(seq.owner, seq.owner.prompt_tokens)
            seq.owner.scheduled = queue.now
    assert queue.head() is None


@pytest.mark.parametrize("policy", POLICIES)
def test_to_remove_whom_nobody_queued_is_an_error(policy: str) -> None:
    engine = made(policy, max_num_seqs=1)
    engine.add_request(request("a", [1] * 5))
    engine.step()
    with pytest.raises(KeyError):
        engine.scheduler.policy.remove(engine.scheduler.decoding[0])
