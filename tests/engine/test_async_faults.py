"""Faults around the engine's thread: each who asks gets an end, and each record has one."""

import asyncio
import contextlib
import random
import subprocess
import sys
import threading

import pytest

from engine.checking import Crash, FakeSampler, FakeState, build
from engine.test_async_engine import collect, started
from engine.test_engine import request
from faults import patch
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.clock import Clock
from octavo.engine.engine import Engine, Step
from octavo.engine.stream import EngineDead, Stream
from octavo.executor.base import Batch, StepResult
from octavo.scheduler.request import AdmissionError, FinishReason, Outcome, RequestRecord
from paths import ROOT, TESTS
from patience import PATIENCE, Leave, lose_patience, until


class Told:
    """Every outcome, once."""

    def __init__(self, engine: Engine) -> None:
        self.records: list[RequestRecord] = []
        engine.observers.append(self)

    def on_step(self, step: Step) -> None: ...

    def on_end(self, record: RequestRecord) -> None:
        self.records.append(record)


def faulty(engine: Engine, share: float, seed: int) -> list[int]:
    """Its steps fail now and then; returns in how many sequences each of them was."""
    executor = engine.executor
    execute = executor.execute
    rng = random.Random(seed)
    failed: list[int] = []

    def execute_or_fail(batch: Batch) -> StepResult:
        if rng.random() < share or not failed:
            executor.crashes.append(rng.choice(("before", "half", "after")))
            failed.append(len(batch.seq_slots))
        return execute(batch)

    patch(executor, execute=execute_or_fail)
    return failed


async def consume(engine: AsyncEngine, name: str, rng: random.Random) -> Stream | None:
    """One client: reads all, reads nothing, reads late, or leaves."""
    seed = rng.randint(1, 4)
    try:
        stream = engine.submit(
            request(
                name,
                [rng.randrange(3)] * rng.randint(1, 60),
                max_tokens=rng.randint(1, 30),
                n=rng.choice((1, 1, 2)),
                seed=seed,
            )
        )
    except AdmissionError:
        return None
    manner = rng.random()
    if manner < 0.2:
        stream.abort()
    elif manner < 0.4:  # nobody reads it for a while
        await until(lambda: stream.record.outcome, "the end")
    elif manner < 0.6:
        async for _ in stream:
            await asyncio.sleep(0.001)
        return stream
    tokens: dict[int, list[int]] = {}
    deltas = await collect(stream)
    for delta in deltas:
        tokens.setdefault(delta.choice, []).extend(delta.token_ids)
    assert [delta.record is not None for delta in deltas].count(True) == 1
    assert deltas[-1].record is stream.record
    sampler = engine.engine.sampler
    for choice, drawn in tokens.items():
        assert all_drawn(sampler, FakeState(seed, choice), drawn)
    return stream


def all_drawn(sampler: FakeSampler, state: FakeState, tokens: list[int]) -> bool:
    for token in tokens:
        if sampler.draw(state) != token:
            return False
        state.record(token)
    return True


@pytest.mark.parametrize("seed", range(3))
async def test_clients_of_all_manners_on_an_engine_that_fails(seed: int) -> None:
    inner = build(clock=Clock(), num_blocks=20, max_num_queued_reqs=30)
    told = Told(inner)
    failed = faulty(inner, 0.05, seed)
    engine = await started(inner)
    rng = random.Random(seed)
    numbers = iter(range(10_000))

    async def clients(count: int) -> None:
        names = [f"{next(numbers) // 2}" for _ in range(count)]  # each comes twice
        await asyncio.gather(*(consume(engine, name, rng) for name in names))

    def leaving() -> None:
        async def leave() -> None:
            for _ in range(5):  # never read, and the loop is closed over them
                with contextlib.suppress(AdmissionError):
                    engine.submit(request(f"left {next(numbers)}", [1], max_tokens=200))
            await asyncio.sleep(0.005)

        asyncio.run(leave())

    await asyncio.gather(*(clients(25) for _ in range(3)), asyncio.to_thread(leaving))
    late = asyncio.create_task(clients(20))
    await asyncio.sleep(0)
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    for _ in range(50):  # a storm while it drains
        with pytest.raises(AdmissionError, match="shutting down"):
            engine.submit(request(f"storm {next(numbers)}", [1]))
    assert await draining
    await late
    assert engine.alive
    await engine.stop()
    assert failed
    assert len({id(record) for record in told.records}) == len(told.records)
    assert all(record.outcome is not None for record in told.records)
    alone = [record for record in told.records if record.outcome is Outcome.FAILED]
    assert len(alone) <= len(failed)
    inner.check_integrity()
    assert inner.stats().kv_blocks_used == 0


async def test_a_scheduler_that_always_fails_fails_each_request_and_the_engine_lives() -> None:
    inner = build(clock=Clock())
    told = Told(inner)
    schedule = inner.scheduler.schedule

    def fail(*_: object) -> None:
        raise KeyError("injected")

    inner.scheduler.schedule = fail  # type: ignore[assignment,method-assign]
    engine = await started(inner)
    streams = [engine.submit(request(str(index), [1] * 20)) for index in range(5)]
    for stream in streams:
        deltas = await collect(stream)
        assert [delta.finish_reason for delta in deltas] == [FinishReason.ERROR]
        assert "injected" in str(stream.record.error)
    patch(inner.scheduler, schedule=schedule)
    after = await collect(engine.submit(request("after", [1], max_tokens=3)))
    assert after[-1].finish_reason is FinishReason.LENGTH
    assert len(told.records) == 6
    await engine.stop()


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
async def test_when_the_thread_ends_so_does_every_request(error: type[BaseException]) -> None:
    """Those that run, those that wait and those that had not reached the engine."""
    inner = build(clock=Clock(), max_num_seqs=2)
    told = Told(inner)
    executor = inner.executor
    stepping, going_on = threading.Event(), threading.Event()

    def die(batch: Batch) -> StepResult:
        stepping.set()
        going_on.wait(PATIENCE)
        raise error

    patch(executor, execute=die)
    engine = await started(inner)
    streams = [engine.submit(request(str(index), [1] * 20)) for index in range(4)]
    await until(stepping.is_set, "a step")
    streams += [engine.submit(request(f"late {index}", [1])) for index in range(3)]
    going_on.set()
    for stream in streams:
        with pytest.raises(EngineDead):
            await collect(stream)
    engine.thread.join(PATIENCE)
    assert not engine.alive
    assert [stream.record.outcome for stream in streams] == [Outcome.FAILED] * 7
    assert len(told.records) == 7
    with pytest.raises(EngineDead):
        engine.submit(request("after", [1]))
    assert not await engine.drain(1)
    await engine.stop()


async def test_a_step_that_comes_back_after_it_was_given_up_on_is_the_last() -> None:
    inner = build(clock=Clock())
    told = Told(inner)
    executor = inner.executor
    steps = Leave(executor)
    engine = await started(inner, hang_timeout=0.1)
    streams = engine.submit_all(
        [engine.check(request(str(index), [1], max_tokens=100)) for index in range(3)]
    )
    for stream in streams:
        with pytest.raises(EngineDead, match="not moved"):
            await collect(stream)
    steps.let_all()
    await asyncio.to_thread(engine.thread.join, PATIENCE)
    assert executor.steps == 1
    assert [record.outcome for record in told.records] == [Outcome.FAILED] * 3
    await engine.stop()


def test_a_process_whose_engine_hangs_can_end() -> None:
    program = """
import asyncio, threading
from engine.checking import build
from engine.test_engine import request
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.stream import EngineDead
from octavo.engine.clock import Clock

async def main():
    inner = build(clock=Clock())
    inner.executor.execute = lambda batch: threading.Event().wait()
    engine = AsyncEngine(inner, hang_timeout=0.2)
    await engine.start()
    try:
        async for _ in engine.submit(request("a", [1])):
            pass
    except EngineDead:
        assert not engine.alive
        await engine.stop()
        print("ended")

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=TESTS,
        env={"PYTHONPATH": f"{TESTS}:{ROOT / 'src'}"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, b"ended"), done.stderr.decode()


async def test_an_observer_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    inner = build(clock=Clock())

    class Bad:
        def on_step(self, step: Step) -> None:
            raise MemoryError("injected")

        def on_end(self, record: RequestRecord) -> None:
            raise Crash("injected")

    inner.observers.append(Bad())
    told = Told(inner)
    engine = await started(inner)
    with pytest.raises(AdmissionError):
        engine.submit(request("refused", []))
    deltas = await collect(engine.submit(request("a", [1], max_tokens=9)))
    assert sum(len(delta.token_ids) for delta in deltas) == 9
    assert [record.outcome for record in told.records] == [Outcome.REJECTED, Outcome.FINISHED]
    assert caplog.text.count("must not raise") == 1
    await engine.stop()


async def test_a_stream_that_is_never_read_holds_its_output_once() -> None:
    engine = await started(build(clock=Clock(), max_model_len=2000, num_blocks=200))
    stream = engine.submit(request("a", [1], max_tokens=400))
    await until(lambda: stream._over, "the end")
    assert len(stream._arrived) <= 400
    (delta,) = await collect(stream)
    assert len(delta.token_ids) == 400
    await engine.stop()


@pytest.mark.parametrize("end", ["dead", "hung"])
async def test_who_comes_to_a_dead_engine_is_not_told_to_come_back(end: str) -> None:
    """However full its queue is."""
    inner = build(clock=Clock(), max_num_seqs=1, max_num_queued_reqs=1)
    reached, go = threading.Event(), threading.Event()

    def execute(batch: Batch) -> StepResult:
        reached.set()
        go.wait(PATIENCE)
        raise SystemExit("injected")

    patch(inner.executor, execute=execute)
    engine = await started(inner)
    streams = [engine.submit(request("runs", [1]))]
    await until(reached.is_set, "a step")
    streams.append(engine.submit(request("waits", [1])))
    with pytest.raises(AdmissionError):
        engine.submit(request("refused", [1]))
    if end == "dead":
        go.set()
    else:
        lose_patience(engine)
    for stream in streams:
        with pytest.raises(EngineDead):
            await collect(stream)
    if end == "dead":
        engine.thread.join(PATIENCE)
    told = Told(inner)
    for _ in range(2):
        with pytest.raises(EngineDead):
            engine.check_room()
        with pytest.raises(EngineDead):
            engine.submit(request("late", [1]))
    assert [record.outcome for record in told.records] == [Outcome.FAILED] * 2
    go.set()
    await asyncio.to_thread(engine.thread.join, PATIENCE)
    assert engine.stats().waiting == engine.stats().waiting_tokens == 0
    assert {stream.record.outcome for stream in streams} == {Outcome.FAILED}
    await engine.stop()


async def test_what_is_refused_after_it_was_accepted_has_failed() -> None:
    """Also by an error that would have rejected it before: nobody has told the client so."""
    inner = build(clock=Clock())

    def admit(*_: object) -> None:
        raise AdmissionError("injected")

    patch(inner, admit=admit)
    engine = await started(inner)
    stream = engine.submit(request("a", [1]))
    assert [delta.finish_reason for delta in await collect(stream)] == [FinishReason.ERROR]
    assert (stream.record.outcome, stream.record.error) == (Outcome.FAILED, "injected")
    await engine.stop()


async def test_who_is_being_let_in_when_the_thread_dies_has_an_outcome() -> None:
    inner = build(clock=Clock())
    told = Told(inner)

    def admit(*_: object) -> None:
        raise SystemExit("injected")

    patch(inner, admit=admit)
    engine = AsyncEngine(inner)
    streams = [engine.submit(request(str(index), [1])) for index in range(3)]
    await engine.start()
    for stream in streams:
        with pytest.raises(EngineDead, match="injected"):
            await collect(stream)
    engine.thread.join()
    assert [stream.record.outcome for stream in streams] == [Outcome.FAILED] * 3
    assert len(told.records) == 3
    await engine.stop()


async def test_who_gives_up_looking_at_a_hung_engine_leaves_nothing_behind() -> None:
    inner = build(clock=Clock())
    steps = Leave(inner.executor)
    engine = await started(inner)
    stream = engine.submit(request("a", [1]))
    await until(lambda: steps.asked, "a step")
    looked = 0

    def look(engine: Engine) -> None:
        nonlocal looked
        looked += 1

    for _ in range(10):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.inspect(look), 0.005)
    assert not engine._inspections
    steps.let_all()
    await collect(stream)
    await engine.inspect(look)
    assert looked == 1
    await engine.stop()
