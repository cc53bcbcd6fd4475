"""The engine in its thread: streams, back-pressure, aborts, drain, death."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from engine.checking import CheckingExecutor, build
from engine.test_engine import request
from octavo.engine.async_engine import AsyncEngine, EngineDead, Stream, joined
from octavo.engine.clock import RealClock
from octavo.engine.engine import Engine
from octavo.engine.outputs import Delta
from octavo.schedule.request import AdmissionError, FinishReason, Outcome


async def started(engine: Engine | None = None, **kwargs: float) -> AsyncEngine:
    async_engine = AsyncEngine(engine or build(clock=RealClock()), **kwargs)
    await async_engine.start()
    return async_engine


async def collect(stream: Stream) -> list[Delta]:
    return [delta async for delta in stream]


async def test_streams_end_once_with_all_tokens() -> None:
    engine = await started()
    streams = [
        engine.submit(request(str(i), list(range(1 + i)), max_tokens=20, n=1 + i % 3))
        for i in range(40)
    ]
    results = await asyncio.gather(*map(collect, streams))
    for i, deltas in enumerate(results):
        assert sum(len(delta.token_ids) for delta in deltas) == 20 * (1 + i % 3)
        assert [delta.record is not None for delta in deltas].count(True) == 1
        assert deltas[-1].record is streams[i].record
        assert streams[i].record.outcome is Outcome.FINISHED
    await engine.stop()
    assert not engine._thread.is_alive()


async def test_admission_errors_are_raised_at_once() -> None:
    engine = await started()
    with pytest.raises(AdmissionError, match="no tokens"):
        engine.submit(request("a", []))
    with pytest.raises(AdmissionError, match=r"200 prompt tokens \+ 100 max_tokens = 300.* 256"):
        engine.submit(request("a", [1] * 200, max_tokens=100))
    stream = engine.submit(request("a", [1], max_tokens=50))
    with pytest.raises(AdmissionError, match="in use"):
        engine.submit(request("a", [1]))
    await collect(stream)
    await engine.stop()


async def test_an_abandoned_stream_stops_within_a_step() -> None:
    engine = await started(build(clock=RealClock(), max_model_len=100_000, num_blocks=7000))
    stream = engine.submit(request("a", [1], max_tokens=99_000))
    await anext(stream)
    stream.abort()
    deltas = await collect(stream)
    assert deltas[-1].finish_reason is FinishReason.ABORT
    assert stream.record.outcome is Outcome.ABORTED
    assert engine.stats().kv_blocks_used == 0
    stream.abort()
    await engine.stop()


async def test_a_slow_consumer_gets_everything_in_few_pieces() -> None:
    engine = await started()
    stream = engine.submit(request("a", [1], max_tokens=100, n=2))
    first = await anext(stream)
    while stream.record.outcome is None:
        time.sleep(0.001)  # the consumer's loop is held up; the engine is not
    rest = await collect(stream)
    assert len(rest) <= 4
    assert len(first.token_ids) + sum(len(delta.token_ids) for delta in rest) == 200
    await engine.stop()


async def test_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    engine = await started()
    tasks = [
        asyncio.create_task(collect(engine.submit(request(str(i), [1], max_tokens=30))))
        for i in range(4)
    ]
    await asyncio.sleep(0)
    drain = asyncio.create_task(engine.drain(30))
    await asyncio.sleep(0)
    with pytest.raises(AdmissionError) as refused:
        engine.submit(request("late", [1]))
    assert refused.value.retryable
    assert await drain
    for deltas in await asyncio.gather(*tasks):
        assert deltas[-1].finish_reason is FinishReason.LENGTH
    await engine.stop()


async def test_drain_aborts_what_is_left_at_the_timeout() -> None:
    engine = await started(build(clock=RealClock(), max_model_len=100_000, num_blocks=7000))
    task = asyncio.create_task(collect(engine.submit(request("a", [1], max_tokens=99_000))))
    await asyncio.sleep(0.01)
    assert not await engine.drain(0.01)
    assert (await task)[-1].finish_reason is FinishReason.ABORT
    await engine.stop()


async def test_when_the_thread_dies_every_stream_gets_an_error() -> None:
    engine = await started()

    def die(now: float, *others: object) -> None:
        raise SystemExit("injected")

    engine.engine.scheduler.schedule = die  # type: ignore[assignment,method-assign]
    streams = [engine.submit(request(str(i), [1])) for i in range(3)]
    for stream in streams:
        with pytest.raises(EngineDead, match="injected"):
            await collect(stream)
    engine._thread.join()
    assert [stream.record.outcome for stream in streams] == [Outcome.FAILED] * 3
    assert not engine.alive
    assert not await engine.drain(1)
    with pytest.raises(EngineDead):
        engine.submit(request("b", [1]))
    await engine.stop()


async def test_when_a_step_hangs_every_stream_gets_an_error() -> None:
    inner = build(clock=RealClock())
    assert isinstance(inner.executor, CheckingExecutor)
    release = threading.Event()
    execute = inner.executor.execute
    inner.executor.execute = lambda batch: (release.wait(20), execute(batch))[1]  # type: ignore
    engine = await started(inner, hang_timeout=0.1)
    stream = engine.submit(request("a", [1]))
    with pytest.raises(EngineDead, match="not moved"):
        await collect(stream)
    assert not engine.alive
    release.set()
    await engine.stop()


async def test_a_hang_is_noticed_after_the_loop_that_watched_has_closed() -> None:
    inner = build(clock=RealClock())
    engine = await started(inner, hang_timeout=0.2)

    async def before() -> None:
        await collect(engine.submit(request("before", [1])))

    await asyncio.to_thread(lambda: asyncio.run(before()))
    release = threading.Event()
    execute = inner.executor.execute
    inner.executor.execute = lambda batch: (release.wait(20), execute(batch))[1]  # type: ignore
    with pytest.raises(EngineDead, match="not moved"):
        await asyncio.wait_for(collect(engine.submit(request("a", [1]))), 10)
    release.set()
    await engine.stop()


async def test_an_idle_engine_sleeps_until_work_comes() -> None:
    engine = await started()
    await collect(engine.submit(request("a", [1])))
    turns = 0
    step = engine.engine.step

    def counted() -> list[Delta]:
        nonlocal turns
        turns += 1
        return step()

    engine.engine.step = counted  # type: ignore[method-assign]
    await asyncio.sleep(0.2)
    assert turns == 0
    assert engine.alive
    await collect(engine.submit(request("b", [1], max_tokens=3)))
    assert turns == 3
    await engine.stop()


async def test_a_request_aborted_before_its_first_step_never_runs() -> None:
    engine = AsyncEngine(build(clock=RealClock()))
    stream = engine.submit(request("a", [1] * 50))
    stream.abort()
    await engine.start()
    deltas = await collect(stream)
    assert [delta.finish_reason for delta in deltas] == [FinishReason.ABORT]
    assert stream.record.scheduled is None
    assert engine.stats().steps == 0
    await engine.stop()


async def test_streams_of_several_event_loops_share_the_engine() -> None:
    engine = await started()

    def elsewhere() -> list[Delta]:
        async def consume() -> list[Delta]:
            return await collect(engine.submit(request("there", [1], max_tokens=30)))

        return asyncio.run(consume())

    there = asyncio.create_task(asyncio.to_thread(elsewhere))
    here = await collect(engine.submit(request("here", [2], max_tokens=30)))
    for deltas in (here, await there):
        assert sum(len(delta.token_ids) for delta in deltas) == 30
    await engine.stop()


async def test_a_consumer_whose_loop_has_closed_is_aborted() -> None:
    engine = await started(build(clock=RealClock(), max_model_len=100_000, num_blocks=7000))

    async def leave() -> Stream:
        stream = engine.submit(request("gone", [1], max_tokens=99_000))
        await anext(stream)
        return stream

    stream = await asyncio.to_thread(lambda: asyncio.run(leave()))
    while stream.record.outcome is None:
        await asyncio.sleep(0.01)
    assert stream.record.outcome is Outcome.ABORTED
    assert await engine.drain(10)
    await engine.stop()


def test_joined_deltas_keep_order_and_put_the_record_last() -> None:
    record = build().new_record(request("a", [1]))
    length = FinishReason.LENGTH
    deltas = [
        Delta("a", 1, "x", [1], prompt_logprobs=[None]),
        Delta("a", 0, "y", [2]),
        Delta("a", 1, "z", [3], finish_reason=length, record=record),
        Delta("a", 0, "w", [4], finish_reason=length),
    ]
    first, last = joined(deltas)
    assert (first.choice, first.text, first.token_ids) == (0, "yw", [2, 4])
    assert (last.choice, last.text, last.token_ids, last.record) == (1, "xz", [1, 3], record)
    assert first.prompt_logprobs == [None]
    assert last.prompt_logprobs is None
