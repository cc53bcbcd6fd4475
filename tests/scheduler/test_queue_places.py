"""Which request a newcomer replaces in a full queue, by the rule worked out for all that wait."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.scheduler.admission import Admission
from octavo.scheduler.policies.config import POLICIES, PolicyConfig
from octavo.scheduler.request import AdmissionError, LatencyTarget, RequestRecord
from scheduling import new_record

AGEING, BEST_EFFORT = 10.0, 5.0


def policy(name: str) -> PolicyConfig:
    settings: dict[str, Any] = {
        "priority": {"priority_ageing": AGEING},
        "deadline": {"best_effort_deadline": BEST_EFFORT},
    }.get(name, {})
    return PolicyConfig(scheduling_policy=name, **settings)


class Queue:
    """The queue of a scheduler whose engine may be late in removing requests that were replaced."""

    def __init__(self, name: str, requests: int | None, tokens: int | None) -> None:
        self.bound = requests
        config = SimpleNamespace(max_num_queued_reqs=requests, max_num_queued_tokens=tokens)
        self.policy = policy(name).new_policy()
        self.there: list[RequestRecord] = []
        scheduler: Any = SimpleNamespace(config=config, policy=self.policy, waiting=self)
        self.admission = Admission(scheduler)
        self.leaving: list[RequestRecord] = []

    def __len__(self) -> int:
        return len(self.there)

    @property
    def tokens(self) -> int:
        return sum(record.prompt_tokens for record in self.there)

    @property
    def kept(self) -> list[RequestRecord]:
        gone = {id(record) for record in self.leaving}
        return [record for record in self.there if id(record) not in gone]

    def submit(self, *asks: RequestRecord) -> list[RequestRecord]:
        replaced = self.admission.find_places(asks)
        self.admission.enter(asks, replaced)
        self.leaving += replaced
        self.there += asks
        return replaced

    def end_replaced(self) -> None:
        """Let the engine end those that were replaced."""
        for record in self.leaving:
            if record.scheduled is None:
                record.outcome = "rejected"  # type: ignore[assignment]
            if record in self.there:
                self.there.remove(record)
        self.leaving.clear()


def replaceable(name: str, waiting: list[RequestRecord], asks: RequestRecord) -> Any:
    """Return those of whom one is to be replaced, by the rule itself; None: no request."""
    if not POLICIES[name].replaces or not waiting:
        return None
    if name == "fair":
        shares = Counter[str]()
        for record in waiting:
            shares[record.scheduling.client] += 1 / record.scheduling.weight  # type: ignore[assignment]
        most = max(shares.values())
        own = shares[asks.scheduling.client] + 1 / asks.scheduling.weight
        fattest = [client for client, share in shares.items() if share == most]
        if own >= most or asks.scheduling.client in fattest:
            return None
        return [
            max((r for r in waiting if r.scheduling.client == c), key=lambda r: r.arrival)
            for c in fattest
        ]

    def level(record: RequestRecord) -> float:
        if name == "priority":
            return record.scheduling.priority - (asks.arrival - record.arrival) / AGEING
        if record.scheduling.target is None or record.scheduling.target.ttft is None:
            return record.arrival + BEST_EFFORT
        due = record.arrival + record.scheduling.target.ttft
        return record.arrival + BEST_EFFORT if due < asks.arrival else due

    worst = max(waiting, key=level)
    return [worst] if level(asks) < level(worst) else None


@pytest.mark.parametrize("name", POLICIES)
def test_a_newcomer_replaces_the_last_of_all_if_it_comes_before_it(name: str) -> None:
    rng = random.Random(name)
    replaced_ever = refused_ever = 0
    for _ in range(60):
        queue = Queue(name, rng.randrange(1, 9), None)
        bound = queue.bound
        assert bound is not None
        weights = {client: rng.choice((1.0, 2.0, 3.0)) for client in "abc"}
        now, ended = 0.0, list[RequestRecord]()
        for number in range(60):
            now += rng.expovariate(1.0)
            client = rng.choice("aaabc")
            record = new_record(
                str(number), now, rng.randrange(1, 9), client=client, weight=weights[client],
                priority=rng.choice((0, 0, 1, 5)),
                target=rng.choice((None, LatencyTarget(ttft=rng.uniform(0.1, 9.0)))),
            )  # fmt: skip
            before = queue.kept
            expected = replaceable(name, before, record)
            refused = None
            replaced: list[RequestRecord] = []
            try:
                replaced = queue.submit(record)
            except AdmissionError as error:
                refused = error
            if len(before) < bound:
                assert refused is None
                assert not replaced
            elif expected is None:
                assert refused.retryable
                refused_ever += 1
            else:
                assert len(replaced) == 1
                assert replaced[0] in expected
                replaced_ever += 1
            assert len(queue.kept) <= bound
            for each in replaced:  # once, and never one that has begun
                assert each.scheduled is None
                assert not any(each is other for other in ended)
            ended += replaced
            if rng.random() < 0.3 and queue.kept:
                runs = rng.choice(queue.there)  # it may just have been told to leave
                runs.scheduled = now
                queue.there.remove(runs)
            if rng.random() < 0.5:
                queue.end_replaced()
    assert refused_ever
    assert (replaced_ever > 0) is POLICIES[name].replaces


@pytest.mark.parametrize("name", POLICIES)
def test_as_many_are_replaced_as_its_tokens_need_and_none_if_that_is_not_enough(name: str) -> None:
    queue = Queue(name, None, 100)
    for number in range(10):
        queue.submit(new_record(str(number), 1.0, 10, client="many", priority=3))
    small = new_record("small", 2.0, 25, client="one", target=LatencyTarget(ttft=0.5))
    if not POLICIES[name].replaces:
        with pytest.raises(AdmissionError):
            queue.submit(small)
        return
    assert len(queue.submit(small)) == 3
    queue.end_replaced()
    large = new_record("large", 2.1, 90, client="two", target=LatencyTarget(ttft=0.001))
    if name == "fair":  # its client has as much with it as the other, before there is room
        with pytest.raises(AdmissionError):
            queue.submit(large, new_record("more", 2.1, 20, client="two"))
        assert len(queue.kept) == 8
        return
    top = new_record("top", 2.1, 101, priority=-1, target=LatencyTarget(ttft=0.001))
    kept = len(queue.kept)
    pair = large, new_record("even", 2.2, 90, priority=4, target=LatencyTarget(ttft=99.0))
    with pytest.raises(AdmissionError):  # all or none: the second comes before nobody
        queue.submit(*pair)
    assert len(queue.kept) == kept
    queue.submit(top)  # an empty queue takes any request
    assert queue.kept == [top]


def test_a_request_that_has_waited_long_enough_keeps_its_place() -> None:
    """A stream of urgent newcomers, and a client that comes back at once whenever it is refused."""
    queue = Queue("priority", 1, None)
    low = new_record("low", 0.0, 1, priority=2)
    queue.submit(low)
    with pytest.raises(AdmissionError):
        queue.submit(new_record("urgent", 2 * AGEING, 1))
    assert queue.submit(new_record("more urgent", 2 * AGEING, 1, priority=-1)) == [low]
    queue.end_replaced()
    with pytest.raises(AdmissionError):
        queue.submit(new_record("again", 2 * AGEING, 1, priority=2))


def test_among_equals_no_request_is_replaced() -> None:
    for name in POLICIES:
        queue = Queue(name, 2, None)
        for number in range(2):
            queue.submit(new_record(str(number), float(number), 1))
        for number in range(2, 9):
            with pytest.raises(AdmissionError):
                queue.submit(new_record(str(number), float(number), 1))


def test_several_that_come_together_count_together() -> None:
    """Else fair shares would give their client more than one that came before."""
    queue = Queue("fair", 4, None)
    for number in range(4):
        queue.submit(new_record(str(number), 1.0, 1, client="a"))
    several = [new_record(f"b{number}", 2.0, 1, client="b") for number in range(3)]
    with pytest.raises(AdmissionError):
        queue.submit(*several)
    # A third one would leave the first client one place: these two have as many as it.
    assert len(queue.submit(*several[:2])) == 2
    queue.end_replaced()
    assert Counter(record.scheduling.client for record in queue.kept) == {"a": 2, "b": 2}


def test_requests_that_have_left_the_queue_are_forgotten() -> None:
    queue = Queue("priority", 4, None)
    for number in range(2000):
        record = new_record(str(number), float(number), 1, priority=number % 3)
        queue.submit(record)
        record.scheduled = 1.0
        queue.there.remove(record)
    assert len(queue.admission._queued) < 200


def test_requests_being_read_do_not_keep_out_one_that_comes_before_a_waiting_one() -> None:
    """How urgent they are is not known; they are counted when they are submitted."""
    for name in POLICIES:
        queue = Queue(name, 4, None)
        urgent = new_record(
            "urgent", 5.0, 1, priority=-1, client="b", target=LatencyTarget(ttft=0.1)
        )
        assert queue.admission.would_replace(urgent) is POLICIES[name].replaces  # nobody waits
        for number in range(4):
            queue.submit(new_record(str(number), 4.0, 1, client="a"))
        again = new_record("again", 5.0, 1, client="a")
        assert queue.admission.would_replace(urgent) is POLICIES[name].replaces
        assert not queue.admission.would_replace(again)
