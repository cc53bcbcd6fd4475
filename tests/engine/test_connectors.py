"""What connectors save and load, and when loading is worth it."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest

from engine.checking import Crash, build, layout
from engine.connecting import FakeDisk, ToldConnectors, told_connectors
from faults import patch
from octavo.engine.clock import VirtualClock
from octavo.engine.engine import Engine
from octavo.engine.snapshot import snapshot
from octavo.kv_cache.connectors.prefetch import Prefetcher
from octavo.kv_cache.transfer_cost import Measured
from octavo.sampling.params import SamplingParams
from octavo.scheduler.policies.base import BY_ARRIVAL
from octavo.scheduler.request import Outcome, Request, RequestRecord, SchedulingParams
from octavo.scheduler.sequence import Status
from octavo.scheduler.token_budget import TokenBudget
from scheduling import SAMPLES


def made(
    windows: Sequence[int | None] = (None,),
    *,
    host: int = 64,
    disk: FakeDisk | None = None,
    blocks: int = 8,
    length: int = 128,
    policy: str = "fcfs",
    target: float | None = None,
    batching: Literal["continuous", "static"] = "continuous",
    **more: Any,
) -> tuple[Engine, ToldConnectors]:
    clock = VirtualClock()
    connectors = told_connectors(layout(windows), host, disk=disk, clock=clock, **more)
    built = build(
        windows=windows,
        num_blocks=blocks,
        max_model_len=length,
        scheduling_policy=policy,
        itl_target=target and 1000 * target,
        batching=batching,
        connectors=connectors,
        clock=clock,
    )
    return built, connectors


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_reader_that_takes_no_jobs_costs_no_slot(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    disk = Whole(layout([None]).block_bytes)
    _, connectors = made(host=16, disk=disk, seconds_per_token=10.0)
    keys = [(bytes([number]) * 32, 0) for number in range(6)]
    for key in keys:
        disk.write(key, np.zeros(disk.block_bytes, np.uint8))
    blocks = [(key, disk) for key in keys]
    prefetcher, worker = connectors.prefetcher, connectors.workers[0]
    assert prefetcher is not None
    real = worker.submit

    def refuse(job: Any) -> None:
        if len(worker.jobs) == count:
            raise MemoryError
        real(job)

    with monkeypatch.context() as patched:
        patched.setattr(worker, "submit", refuse)
        with pytest.raises(MemoryError):
            prefetcher.start(blocks, 0, 24, 0.0)
    assert prefetcher.num_slots == count
    assert connectors.staging.num_takeable == 16 - count
    connectors.settle()
    connectors.check([])
    ahead = prefetcher.start(blocks[count:], 0, 24, 0.0)
    connectors.settle()
    assert prefetcher.is_ready(ahead, 0.0)
    assert len(ahead.pinned) == 6 - count
    prefetcher.end(ahead)
    connectors.check([])


class Whole(FakeDisk):
    """Loses nothing."""

    def read(self, key: Any, into: Any) -> bool:
        if key not in self.files:
            return False
        into[:] = self.files[key]
        self.counters.loaded_bytes += self.block_bytes
        return True

    def write(self, key: Any, data: Any) -> None:
        self.files[key] = data.copy()


def whole() -> Whole:
    return Whole(layout().block_bytes)


def ask(
    engine: Engine,
    name: str,
    prompt: Sequence[int],
    salt: str | None = None,
    terms: Mapping[str, Any] | None = None,
    **params: Any,
) -> RequestRecord:
    params = {"max_tokens": 1, "seed": 1} | params
    return engine.add_request(
        Request(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(**params),
            scheduling=SchedulingParams(cache_salt=salt, **(terms or {})),
        )
    )


def run(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.has_work():
            break
        engine.step()
        engine.scheduler.check_integrity()
    assert not engine.has_work()
    engine.check_integrity()


def text(number: int, length: int = 100) -> list[int]:
    return [(number * 31 + at * 7 + at * at) % 50 for at in range(length)]


def left_on_disk() -> Whole:
    """By an engine that has answered a prompt, `text` 1, and is no more."""
    disk = whole()
    engine, connectors = made(disk=disk)
    ask(engine, "first", text(1))
    run(engine)
    connectors.settle()
    return disk


def overwritten(engine: Engine) -> None:
    """Let others have the whole pool."""
    for number in (7, 8):
        ask(engine, f"other {number}", text(number, 120))
        run(engine)


@pytest.mark.parametrize("windows", [(None,), (None, 40), (24, None, 100)])
def test_what_the_pool_forgot_is_taken_from_host_memory(windows: Sequence[int | None]) -> None:
    engine, connectors = made(windows, blocks=8 * len(windows), host=200)
    ask(engine, "first", text(1))
    run(engine)
    overwritten(engine)
    again = ask(engine, "again", text(1))
    run(engine)
    assert again.cached_tokens == 96
    stats = engine.stats()
    assert (stats.prefix_hits, stats.external_hits) == (96, {"host": 96})
    assert connectors.stats()["host"].loaded_blocks > 0
    assert connectors.stats()["host"].saved_blocks > 0


def test_a_whole_prompt_from_host_memory_computes_its_last_token() -> None:
    engine, _ = made()
    ask(engine, "first", text(1, 96))
    run(engine)
    overwritten(engine)
    before = engine.stats().computed_tokens
    again = ask(engine, "again", text(1, 96), max_tokens=20)
    run(engine)
    assert again.cached_tokens == 95
    assert engine.stats().computed_tokens - before == 1 + 19


def loading_takes(connectors: ToldConnectors, seconds: float) -> None:
    """A block, for as long as it is not measured again."""
    connectors.cost.loading = Measured(seconds, connectors.clock.now)


def test_what_is_dearer_to_load_than_to_compute_is_computed() -> None:
    engine, connectors = made()
    loading_takes(connectors, 1000.0)
    ask(engine, "first", text(1))
    run(engine)
    overwritten(engine)
    assert connectors.stats()["host"].saved_blocks == 0  # nor is it kept
    loading_takes(connectors, 0.0)
    ask(engine, "second", text(2))
    run(engine)
    overwritten(engine)
    assert connectors.stats()["host"].saved_blocks > 0
    loading_takes(connectors, 1000.0)
    again = ask(engine, "again", text(2))
    for _ in range(3):  # looking changes nothing
        engine.scheduler.kv.lookup(array("i", text(2)), None)
    run(engine)
    assert again.cached_tokens == 0
    assert connectors.stats()["host"].skipped_hits == 1
    loading_takes(connectors, 0.0)
    overwritten(engine)
    again = ask(engine, "once more", text(2))
    run(engine)
    assert again.cached_tokens == 96


def test_one_hiccup_does_not_switch_host_memory_off() -> None:
    """Nor many, for ever: what is not loaded is not measured, so it is tried again some time."""
    engine, connectors = made()
    executor = engine.executor
    real = executor.import_blocks

    def slow(*given: Any) -> None:
        connectors.clock.advance(1.0)
        real(*given)

    def found(name: str) -> int:
        overwritten(engine)
        again = ask(engine, name, text(1))
        run(engine)
        return again.cached_tokens

    ask(engine, "first", text(1))
    run(engine)
    patch(executor, import_blocks=slow)
    assert found("hiccup") == 96
    patch(executor, import_blocks=real)
    assert found("after it") == 96
    patch(executor, import_blocks=slow)
    for number in range(100):
        if not found(f"slow {number}"):
            break
    else:
        raise AssertionError("what took a second a block was taken for worth it")
    patch(executor, import_blocks=real)
    connectors.clock.advance(600.0)
    ask(engine, "computed again", text(1))
    run(engine)
    assert found("later") == 96


def test_what_is_copied_out_goes_straight_to_its_place() -> None:
    """And what waits for the disk keeps no more than itself."""
    size = layout().block_bytes
    disk = whole()
    engine, connectors = made(disk=disk, blocks=20, length=320)
    patch(connectors, _take=lambda most: [])
    executor = engine.executor
    exported = 0
    real = executor.export_blocks

    def export(blocks: Any, into: Any) -> Any:
        nonlocal exported
        assert into.base is connectors.staging.data
        exported += len(blocks)
        return real(blocks, into)

    patch(executor, export_blocks=export)
    written: list[Any] = []
    patch(disk, write=lambda key, data: written.append(data))
    ask(engine, "first", text(1, 300))
    run(engine)
    ask(engine, "second", text(2, 300))
    run(engine)
    connectors.settle()
    assert exported == connectors.stats()["host"].saved_blocks > 9
    assert written
    assert all(data.base is None or data.base.nbytes == size for data in written)


def test_salts_and_engines_share_nothing() -> None:
    disk = whole()
    engine, connectors = made(disk=disk)
    ask(engine, "first", text(1), "a")
    run(engine)
    overwritten(engine)
    for salt, cached in ((None, 0), ("b", 0), ("a", 96)):
        again = ask(engine, f"again {salt}", text(1), salt)
        run(engine)
        assert again.cached_tokens == cached
        overwritten(engine)
    connectors.settle()
    for name, cached in ((b"another", 0), (b"engine", 96)):
        other, _ = made(disk=disk, engine=name)
        again = ask(other, "again", text(1), "a")
        run(other)
        assert again.cached_tokens == cached


def test_after_a_restart_the_disk_answers() -> None:
    disk = left_on_disk()
    # Killed: nothing is flushed. What had been computed before the last step is there.
    engine, connectors = made(disk=disk)
    again = ask(engine, "again", text(1))
    assert engine.scheduler.waiting.fetching
    assert engine.stats().waiting == 1
    run(engine)
    assert again.cached_tokens == 96
    stats = engine.stats()
    assert stats.external_hits == {"host": 0, "disk": 96}
    assert (connectors.stats()["disk"].loads_in_time, connectors.stats()["disk"].loads_late) == (
        1,
        0,
    )
    # The second time it comes from host memory.
    overwritten(engine)
    ask(engine, "third", text(1))
    run(engine)
    assert engine.stats().external_hits["host"] == 96


def test_a_static_batch_is_not_joined_by_whom_the_disk_was_read_for_when_it_began() -> None:
    engine, connectors = made(disk=left_on_disk(), blocks=20, batching="static")
    late = ask(engine, "late", text(1))
    first = ask(engine, "first", text(2), max_tokens=4)  # read in two steps: the budget is 64
    engine.step()
    assert engine.scheduler.waiting.fetching
    connectors.settle()
    while first.outcome is None:
        assert late.scheduled is None
        engine.step()
    run(engine)
    assert late.cached_tokens == 96


def test_at_the_end_everything_is_written() -> None:
    disk = whole()
    engine, connectors = made(disk=disk)
    ask(engine, "first", text(1), max_tokens=28)
    run(engine)
    connectors.settle()
    disk.files.clear()
    writer = connectors.workers[1]
    submit = writer.submit
    patch(writer, submit=lambda job: (submit(job), writer.run(1))[0])
    engine.close()
    assert len(disk.files) == 7


def test_others_go_on_while_a_request_waits_for_the_disk() -> None:
    disk = left_on_disk()
    engine, connectors = made(disk=disk)
    patch(connectors.workers[0], run=lambda count: None)
    waiting = ask(engine, "waiting", text(1))
    other = ask(engine, "other", text(2, 40))
    engine.step()
    assert other.scheduled is not None
    assert waiting.scheduled is None
    assert [seq.status for seq in engine.scheduler.waiting.fetching] == [Status.FETCHING]


def test_nobody_waits_longer_than_computing_would_take() -> None:
    disk = left_on_disk()
    engine, connectors = made(disk=disk, seconds_per_token=0.01)
    patch(connectors.workers[0], run=lambda count: None)
    late = ask(engine, "late", text(1))
    run(engine)
    assert late.outcome is Outcome.FINISHED
    assert late.cached_tokens == 0
    assert late.scheduled is not None
    assert 0.95 < late.scheduled - late.arrival < 1.0  # 96 tokens of a hundredth of a second
    assert connectors.stats()["disk"].loads_late == 1
    # What comes too late is of use to the next.
    del connectors.workers[0].run
    connectors.settle()
    assert len(connectors.staging) == 6
    connectors.check([])


def test_a_disk_slower_than_computing_is_not_asked() -> None:
    disk = left_on_disk()
    engine, connectors = made(disk=disk, seconds_per_token=1e-9)
    connectors.prefetcher._seconds["disk"] = Measured(1.0, connectors.clock.now)
    again = ask(engine, "again", text(1))
    assert not engine.scheduler.waiting.fetching
    run(engine)
    assert again.cached_tokens == 0


def test_a_block_lost_on_the_way_ends_the_prefix_there() -> None:
    disk = left_on_disk()
    third = [*disk.files][2]
    engine, _ = made(disk=disk)
    again = ask(engine, "again", text(1))
    del disk.files[third]
    run(engine)
    assert again.outcome is Outcome.FINISHED
    assert again.cached_tokens == 32


def test_asking_whether_all_is_read_counts_nothing() -> None:
    disk = left_on_disk()
    engine, connectors = made(disk=disk)
    ask(engine, "again", text(1))
    (seq,) = engine.scheduler.waiting.fetching
    assert seq.prefetch is not None
    for _ in range(3):
        assert not connectors.prefetcher.is_ready(seq.prefetch, connectors.clock.now())
    assert connectors.prefetcher.is_ready(seq.prefetch, seq.prefetch.deadline)
    connectors.settle()
    for _ in range(3):
        assert connectors.prefetcher.is_ready(seq.prefetch, connectors.clock.now())
    assert (connectors.stats()["disk"].loads_in_time, connectors.stats()["disk"].loads_late) == (
        0,
        0,
    )
    run(engine)
    assert (connectors.stats()["disk"].loads_in_time, connectors.stats()["disk"].loads_late) == (
        1,
        0,
    )


def test_copies_within_the_pool_are_no_blocks_loaded() -> None:
    connectors = told_connectors(layout(), 4, disk=None, clock=VirtualClock())
    content = np.zeros((4, connectors.staging.data.shape[1]), np.uint8)
    content[1] = 7

    class Blocks:
        def export_blocks(self, blocks: Any) -> Any:
            return content[blocks]

        def import_blocks(self, blocks: Any, data: Any) -> None:
            content[blocks] = data

    connectors.register_kv_caches(Blocks())
    slot = connectors.staging.take()
    assert slot is not None
    connectors.staging.data[slot] = 9
    key = (b"key", 0)
    connectors.staging.put(key, slot)
    copies = [(1, 2), (2, 3)]
    connectors.load(key, 1, copies)
    connectors.transfer()
    assert not copies
    assert content[:, 0].tolist() == [0, 9, 7, 7]
    assert connectors.stats()["host"].loaded_blocks == 1


def test_who_was_let_in_is_not_read_for_when_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nothing was read for it before, for want of room: others would pass it."""
    engine, _ = made(disk=left_on_disk())
    with monkeypatch.context() as patched:
        patched.setattr(Prefetcher, "capacity", 0)
        again = ask(engine, "again", text(1), max_tokens=20)
        engine.step()
    scheduler = engine.scheduler
    (seq,) = scheduler.decoding + scheduler.prefilling
    scheduler._preempt(seq)
    scheduler.kv.clear()
    scheduler.waiting.poll(may_read=True)
    assert seq.status is Status.WAITING
    run(engine)
    assert (again.outcome, again.cached_tokens) == (Outcome.FINISHED, 0)


def test_an_aborted_request_lets_go_of_what_was_read_for_it() -> None:
    disk = left_on_disk()
    engine, connectors = made(disk=disk)
    ask(engine, "gone", text(1))
    connectors.workers[0].run(3)
    engine.scheduler.waiting.poll(may_read=True)
    assert connectors.staging.num_pins == 3
    assert engine.abort("gone")
    assert not connectors.staging.num_pins
    run(engine)
    connectors.settle()
    connectors.check([])


def test_a_preempted_sequence_takes_its_blocks_back_from_host_memory() -> None:
    """Swapped, that is, and not computed again; and as quick as that is decided otherwise."""
    for worth, least in ((True, 16), (False, 0)):
        engine, connectors = made(blocks=7, length=80)
        if not worth:
            loading_takes(connectors, 1000.0)
        first = ask(engine, "first", text(1, 34), max_tokens=35)
        second = ask(engine, "second", text(2, 34), max_tokens=35, seed=2)
        run(engine)
        assert first.preemptions + second.preemptions == 1
        assert engine.stats().swapped_tokens >= least
        assert worth or not engine.stats().swapped_tokens


def holding(texts: int) -> Whole:
    """So many texts of 34 tokens, of an engine that is no more."""
    disk = whole()
    engine, connectors = made(disk=disk, blocks=200)
    for number in range(texts):
        ask(engine, f"first {number}", text(number, 34))
    run(engine)
    connectors.settle()
    return disk


def test_those_at_the_end_of_the_queue_do_not_hold_host_memory() -> None:
    """What is read ahead is for those who come next, and leaves room for others."""
    engine, connectors = made(disk=holding(20), blocks=8, host=64, seconds_per_token=10.0)
    again = [ask(engine, f"again {number}", text(number, 34)) for number in range(20)]
    assert len(engine.scheduler.waiting.fetching) == 8
    connectors.settle()
    assert connectors.staging.num_pinned == 16
    for _ in range(10_000):
        if not engine.has_work():
            break
        engine.step()
        assert len(engine.scheduler.waiting.fetching) <= 16
        assert connectors.staging.num_pinned <= 32
    assert not engine.has_work()
    assert [record.cached_tokens for record in again] == [32] * 20


@pytest.mark.parametrize("policy", SAMPLES)
def test_who_comes_next_by_the_policy_is_read_for_next(policy: str) -> None:
    terms, order = SAMPLES[policy]
    engine, _ = made(disk=holding(24), policy=policy, seconds_per_token=10.0)
    for number in range(24):
        ask(engine, f"again {number}", text(number, 34), terms=terms(number))
    scheduler = engine.scheduler
    begun = scheduler.waiting.fetching[:]
    in_turn = list(scheduler.policy.in_turn())
    by_arrival = sorted(in_turn, key=BY_ARRIVAL)
    assert (in_turn[:8] == by_arrival[:8]) is ([*order] == [*range(12)])
    scheduler.waiting.poll(may_read=True)
    assert scheduler.waiting.fetching == [*begun, *in_turn[:8]]
    run(engine)


def test_a_prompt_too_long_for_host_memory_is_read_in_part() -> None:
    disk = whole()
    engine, connectors = made(disk=disk, blocks=30, length=300)
    ask(engine, "first", text(1, 290))
    run(engine)
    connectors.settle()
    engine, connectors = made(disk=disk, blocks=30, length=300, host=8)
    again = ask(engine, "again", text(1, 290))
    other = ask(engine, "other", text(1, 290), "another salt")
    assert connectors.prefetcher.num_slots == 4
    run(engine)
    assert (again.cached_tokens, other.cached_tokens) == (64, 0)


def test_a_request_that_is_refused_on_its_way_into_the_queue_pins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = left_on_disk()
    engine, connectors = made(disk=disk)

    def full(state: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler.shedding, "add", full)
        with pytest.raises(MemoryError):
            ask(engine, "refused", text(1))
    connectors.settle()
    assert not connectors.staging.num_pins
    engine.check_integrity()


def test_prompt_logprobs_are_computed_whole() -> None:
    disk = whole()
    engine, connectors = made(disk=disk)
    ask(engine, "first", text(1))
    run(engine)
    overwritten(engine)
    connectors.settle()
    again = ask(engine, "again", text(1), prompt_logprobs=0)
    assert not engine.scheduler.waiting.fetching
    run(engine)
    assert again.cached_tokens == 0


class Hit:
    """A prompt of 18 blocks comes back from host memory while another request's tokens stream, on a
    machine where copying a block in takes a millisecond, as a step does.
    """

    def __init__(self, target: float | None, policy: str = "fcfs") -> None:
        self.engine, self.connectors = made(
            blocks=40, length=400, host=200, target=target, policy=policy
        )
        for number in (1, 7, 8, 9):
            ask(self.engine, f"first {number}", text(number, 300))
            run(self.engine)
        executor = self.engine.executor
        self.executor = executor
        self.copied = 0
        self.fails_after: int | None = None
        self._import = executor.import_blocks
        patch(executor, import_blocks=self.slow_import)
        loading_takes(self.connectors, 0.001)
        self.stream = ask(self.engine, "stream", text(5, 20), max_tokens=100)
        for _ in range(30):  # what a step takes is learned
            self.engine.step()
        self.again = ask(
            self.engine, "again", text(1, 300), max_tokens=5, terms={"client": "again"}
        )

    def slow_import(self, *given: Any) -> None:
        if self.copied == self.fails_after:
            self.fails_after = None
            raise Crash("injected")
        self.connectors.clock.advance(0.001)
        self.copied += 1
        self._import(*given)

    def step(self) -> tuple[int, float]:
        """Blocks copied in, and seconds until the stream's next token."""
        copied, tokens, began = self.copied, self.stream.completion_tokens, self.engine.clock.now()
        self.engine.step()
        self.engine.scheduler.check_integrity()
        assert self.stream.completion_tokens == tokens + 1
        return self.copied - copied, self.engine.clock.now() - began

    def half(self) -> Any:
        """The sequence, when a part of its blocks is there."""
        while self.copied < 6:
            self.step()
        assert self.copied < 18
        (seq,) = self.engine.scheduler.prefilling
        return seq

    def end(self, cached: int = 288, from_host: int = 288) -> None:
        run(self.engine)
        assert self.again.outcome is Outcome.FINISHED
        assert self.again.cached_tokens == cached
        stats = self.engine.stats()
        assert (stats.prefix_hits, stats.external_hits.get("host", 0)) == (cached, from_host)
        assert not stats.swapped_tokens
        assert not self.connectors.staging.num_pins


def test_without_a_target_a_hit_is_copied_in_at_once() -> None:
    hit = Hit(None)
    assert hit.step()[0] == 18
    hit.end()


def test_a_hit_is_copied_in_as_steps_have_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []  # from the budgets
    take = TokenBudget.copy
    monkeypatch.setattr(TokenBudget, "copy", lambda self, s: (taken.append(s), take(self, s)))
    target = 0.006
    hit = Hit(target)
    steps = [hit.step() for _ in range(20)]
    assert sum(copied for copied, _ in steps) == 18
    assert max(copied for copied, _ in steps) > 1  # what there is time for
    assert all(seconds <= target for _, seconds in steps)
    assert sum(taken) == pytest.approx(0.018, rel=1e-4)
    hit.end()
    assert hit.copied == 18


def test_copying_a_hit_in_is_not_taken_for_a_wrong_prediction() -> None:
    hit = Hit(0.006)
    stats, began, copied = hit.engine.stats(), 0, 0
    while stats.paced_steps == began or not copied:
        before, began = stats, stats.paced_steps
        copied, seconds = hit.step()
        stats = hit.engine.stats()
    computing = stats.paced_seconds - before.paced_seconds
    assert computing == pytest.approx(seconds - copied * 0.001)


def test_a_hit_that_no_step_has_time_for_is_copied_in_all_the_same() -> None:
    hit = Hit(1e-6)
    while hit.copied < 18:
        assert hit.step()[0] >= 1
    hit.end()


def test_nobody_gives_way_for_what_a_step_has_no_time_for() -> None:
    hit = Hit(1e-6)
    scheduler = hit.engine.scheduler
    kv, seq = scheduler.kv, hit.half()
    budget = TokenBudget(scheduler.config, scheduler.decode_positions(), hit.engine.step_times)
    budget.take(0, budget.fit(0, 100), 0)
    scheduler._served.add(seq)  # the stream would be the one
    while kv.pool.num_free:
        kv.pool.allocate()
    assert scheduler._chunk(seq, budget) is None
    kv._to_load.pop(seq.slot)
    assert scheduler._chunk(seq, budget) is None
    assert not scheduler.num_preemptions


def test_half_of_a_hit_is_let_go_of_with_its_request() -> None:
    hit = Hit(0.006)
    hit.half()
    assert hit.connectors.staging.num_pins
    shown = {request.id: request for request in snapshot(hit.engine, 10).requests}
    assert shown["again"].prompt_tokens_done == 0
    assert hit.engine.abort("again")
    assert not hit.connectors.staging.num_pins
    hit.engine.scheduler.check_integrity()
    run(hit.engine)
    assert not hit.again.cached_tokens
    assert not hit.engine.stats().prefix_hits


def test_half_of_a_hit_is_taken_back_after_a_preemption() -> None:
    hit = Hit(0.006)
    hit.engine.scheduler._preempt(hit.half())
    assert not hit.connectors.staging.num_pins
    there = hit.copied * 16  # tokens, which are still in the pool
    hit.end(from_host=288 - there)
    assert hit.copied == 18


def test_when_the_rest_of_a_hit_cannot_be_copied_in_it_is_computed() -> None:
    hit = Hit(0.006)
    hit.half()
    hit.fails_after = hit.copied
    before = hit.engine.stats().computed_tokens
    hit.end(cached=0, from_host=0)  # what is not there was not cached
    assert hit.stream.outcome is Outcome.FINISHED
    assert hit.engine.stats().computed_tokens - before > 300


def test_what_is_lost_of_a_hit_is_charged_to_the_client() -> None:
    hit = Hit(0.006, policy="fair")
    policy = hit.engine.scheduler.policy
    hit.half()
    charged = policy.served("again")
    hit.fails_after = hit.copied
    while hit.again.first_token is None:
        hit.engine.step()
    assert policy.served("again") - charged == 288 + 2  # and its first token


def test_what_two_hits_have_in_common_is_copied_in_once() -> None:
    hit = Hit(0.006)
    other = ask(hit.engine, "other", text(1, 290), max_tokens=5)
    run(hit.engine)
    assert (hit.again.cached_tokens, other.cached_tokens) == (288, 288)
    assert hit.copied == 18


def test_blocks_that_cannot_be_copied_in_cost_nobody_an_answer() -> None:
    engine, connectors = made()
    ask(engine, "first", text(1))
    run(engine)
    executor = engine.executor

    def broken(*_: object) -> None:
        raise Crash("injected")

    patch(executor, import_blocks=broken)
    for number in range(5):
        overwritten(engine)
        again = ask(engine, f"again {number}", text(1))
        run(engine)
        assert again.outcome is Outcome.FINISHED
    assert connectors.stats()["host"].loaded_blocks == 0


@pytest.mark.parametrize("takes", [0.0, 100.0])
def test_nor_whoever_runs_alone_then(takes: float) -> None:
    engine, connectors = made()
    ask(engine, "first", text(1))
    run(engine)
    overwritten(engine)
    executor, failed = engine.executor, 0

    def broken(*_: object) -> None:
        nonlocal failed
        failed += 1
        connectors.clock.advance(takes)
        raise Crash("injected")

    patch(executor, import_blocks=broken)
    again = ask(engine, "again", text(1))
    while not failed:
        engine.step()
    connectors.clock.advance(100.0)
    run(engine)
    assert failed == 2
    assert again.outcome is Outcome.FINISHED


def test_blocks_that_cannot_be_copied_out_are_forgotten() -> None:
    engine, connectors = made(disk=whole())
    executor = engine.executor

    def broken(*_: object) -> Any:
        raise Crash("injected")

    patch(executor, export_blocks=broken)
    ask(engine, "first", text(1))
    run(engine)
    overwritten(engine)
    again = ask(engine, "again", text(1))
    run(engine)
    assert again.outcome is Outcome.FINISHED
    assert not len(connectors.staging)


def test_tiers_need_a_prefix_cache() -> None:
    with pytest.raises(ValueError, match="prefix cache is off"):
        build(
            connectors=told_connectors(layout(), 4, disk=None, clock=VirtualClock()),
            enable_prefix_caching=False,
        )
