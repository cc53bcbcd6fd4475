"""The engine in its thread: streams, back-pressure, aborts, drain, death."""

import asyncio
import time
from typing import Any

import pytest

from engine.checking import build
from engine.test_engine import request
from faults import patch
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.clock import Clock
from octavo.engine.engine import Engine
from octavo.engine.outputs import Delta
from octavo.engine.stream import EngineDead, Stream, joined
from octavo.scheduler.request import AdmissionError, FinishReason, Outcome, Request
from patience import PATIENCE, Leave, held_up_until, until


async def started(engine: Engine | None = None, **kwargs: float) -> AsyncEngine:
    async_engine = AsyncEngine(engine or build(clock=Clock()), **kwargs)
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
    assert not engine.thread.is_alive()


async def test_admission_errors_are_raised_at_once() -> None:
    engine = await started()
    steps = Leave(engine.engine.executor)
    with pytest.raises(AdmissionError, match="no tokens"):
        engine.submit(request("a", []))
    with pytest.raises(AdmissionError, match=r"200 prompt tokens \+ 100 max_tokens = 300.* 256"):
        engine.submit(request("a", [1] * 200, max_tokens=100))
    stream = engine.submit(request("a", [1], max_tokens=50))
    with pytest.raises(AdmissionError, match="in use"):
        engine.submit(request("a", [1]))
    steps.let_all()
    await collect(stream)
    await engine.stop()


async def test_who_finds_a_seat_at_the_next_step_does_not_wait_in_the_queue() -> None:
    """Neither while it is on its way to the scheduler, nor when it has come and no step has begun
    since. Who was left waiting does.
    """
    core = build(max_num_seqs=3, max_num_queued_reqs=1, clock=Clock())
    engine = AsyncEngine(core)

    def admit(name: str) -> None:
        asked = core.check(request(name, [1], max_tokens=5))
        core.admit(asked, core.new_record(asked))

    record = core.new_record(request("asks", [1]))
    for index in range(3):
        engine.admission.check_queue([record], 0, 0)
        engine.admission.check_queue([], 2 - index, 2 - index)
        admit(f"{index}")
    engine.admission.check_queue([record], 0, 0)  # the one that the queue has room for
    with pytest.raises(AdmissionError, match="1 request waits, of at most 1"):
        engine.admission.check_queue([record], 1, 1)
    admit("waits")
    core.step()
    assert len(core.scheduler.waiting) == 1
    with pytest.raises(AdmissionError, match="1 request waits, of at most 1"):
        engine.admission.check_queue([record], 0, 0)
    core.abort("waits")
    core.abort("0")
    engine.admission.check_queue([record, record], 0, 0)
    core.close()


async def test_an_abandoned_stream_stops_within_a_step() -> None:
    engine = await started()
    steps = Leave(engine.engine.executor)
    stream = engine.submit(request("a", [1], max_tokens=200))
    steps.let()
    await anext(stream)
    await until(lambda: steps.asked == 2, "a second step")
    stream.abort()
    steps.let_all()
    deltas = await collect(stream)
    assert sum(len(delta.token_ids) for delta in deltas) <= 1
    assert deltas[-1].finish_reason is FinishReason.ABORT
    assert stream.record.outcome is Outcome.ABORTED
    assert engine.stats().kv_blocks_used == 0
    stream.abort()
    await engine.stop()


async def test_a_slow_consumer_gets_everything_in_few_pieces() -> None:
    engine = await started()
    stream = engine.submit(request("a", [1], max_tokens=100, n=2))
    first = await anext(stream)
    held_up_until(lambda: stream.record.outcome, "the end")
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
    engine = await started()
    steps = Leave(engine.engine.executor)
    task = asyncio.create_task(collect(engine.submit(request("a", [1], max_tokens=200))))
    await until(lambda: steps.asked, "a step")
    drain = asyncio.create_task(engine.drain(0.01))
    await until(lambda: engine._calls, "the abort")
    steps.let_all()
    assert not await drain
    assert (await task)[-1].finish_reason is FinishReason.ABORT
    await engine.stop()


async def test_when_the_thread_dies_every_stream_gets_an_error() -> None:
    engine = AsyncEngine(build(clock=Clock()))

    def die(now: float, *others: object) -> None:
        raise SystemExit("injected")

    engine.engine.scheduler.schedule = die  # type: ignore[assignment,method-assign]
    streams = [engine.submit(request(str(i), [1])) for i in range(3)]
    await engine.start()
    for stream in streams:
        with pytest.raises(EngineDead, match="injected"):
            await collect(stream)
    engine.thread.join()
    assert [stream.record.outcome for stream in streams] == [Outcome.FAILED] * 3
    assert not engine.alive
    assert not await engine.drain(1)
    with pytest.raises(EngineDead):
        engine.submit(request("b", [1]))
    await engine.stop()


async def test_when_a_step_hangs_every_stream_gets_an_error() -> None:
    engine = await started(hang_timeout=0.1)
    steps = Leave(engine.engine.executor)
    stream = engine.submit(request("a", [1]))
    with pytest.raises(EngineDead, match="not moved"):
        await collect(stream)
    assert not engine.alive
    steps.let_all()
    await engine.stop()


async def test_a_death_posted_before_a_delta_ends_the_stream() -> None:
    """The watchdog posts it while the engine's thread is about to post a delta."""
    engine = await started()
    steps = Leave(engine.engine.executor)
    stream = engine.submit(request("a", [1]))
    stream.push([Delta("a", 0, "b", [2]), EngineDead("injected"), Delta("a", 0, "c", [3])])
    assert (await anext(stream)).token_ids == [2]
    with pytest.raises(EngineDead, match="injected"):
        await asyncio.wait_for(anext(stream), PATIENCE)
    steps.let_all()
    await engine.stop()


async def test_a_hang_is_noticed_after_the_loop_that_watched_has_closed() -> None:
    engine = await started()

    async def before() -> None:
        await collect(engine.submit(request("before", [1])))

    await asyncio.to_thread(lambda: asyncio.run(before()))
    engine.hang_timeout = 0.2
    steps = Leave(engine.engine.executor)
    with pytest.raises(EngineDead, match="not moved"):
        await asyncio.wait_for(collect(engine.submit(request("a", [1]))), PATIENCE / 2)
    steps.let_all()
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

    patch(engine.engine, step=counted)
    await asyncio.sleep(0.2)
    assert turns == 0
    assert engine.alive
    await collect(engine.submit(request("b", [1], max_tokens=3)))
    assert turns == 3
    await engine.stop()


async def test_a_request_aborted_before_its_first_step_never_runs() -> None:
    engine = AsyncEngine(build(clock=Clock()))
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
    engine = await started()
    steps = Leave(engine.engine.executor)

    async def leave() -> Stream:
        stream = engine.submit(request("gone", [1], max_tokens=200))
        steps.let()
        await anext(stream)
        return stream

    stream = await asyncio.to_thread(lambda: asyncio.run(leave()))
    steps.let_all()
    await until(lambda: stream.record.outcome, "the end")
    assert stream.record.outcome is Outcome.ABORTED
    assert await engine.drain()
    await engine.stop()


def test_joined_deltas_have_the_time_of_their_last_token() -> None:
    """Not of an abort behind it, which has none: gaps between tokens are taken from it."""
    deltas = [
        Delta("a", 0, "x", [1], at=5.0),
        Delta("a", 0, "y", [2], at=6.0),
        Delta("a", 0, "", [], finish_reason=FinishReason.ABORT),
    ]
    (delta,) = joined(deltas)
    assert (delta.token_ids, delta.at, delta.finish_reason) == ([1, 2], 6.0, FinishReason.ABORT)


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


async def test_several_are_submitted_together_or_not_at_all() -> None:
    inner = build(clock=Clock(), max_num_seqs=2, max_num_queued_reqs=2)
    steps = Leave(inner.executor)
    engine = await started(inner)

    def several(name: str, count: int) -> list[Request]:
        return [engine.check(request(f"{name}-{index}", [1])) for index in range(count)]

    running = engine.submit_all(several("runs", 2))
    await until(lambda: steps.asked, "a step")
    waiting = engine.submit_all(several("waits", 1))
    with pytest.raises(AdmissionError, match="2 requests wait") as refused:
        engine.submit_all(several("refused", 2))  # there is room for one of them
    assert refused.value.retryable
    assert engine.stats().waiting == 1
    with pytest.raises(AdmissionError, match="in use"):
        engine.submit_all(several("runs", 1))
    with pytest.raises(AdmissionError, match="in use"):
        engine.submit_all(several("twice", 1) * 2)
    with pytest.raises(AdmissionError, match="5 prompts, and no more than 4") as refused:
        engine.submit_all(several("never", 5))
    assert not refused.value.retryable  # it would be refused by an idle engine, too
    waiting += engine.submit_all(several("last", 1))
    steps.let_all()
    for deltas in await asyncio.gather(*map(collect, running + waiting)):
        assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert engine.stats().kv_blocks_used == 0
    await engine.stop()


async def test_a_loop_that_is_late_gets_what_has_come_meanwhile_in_one_piece() -> None:
    """Without having been woken for each step."""
    engine = await started()
    steps = Leave(engine.engine.executor)
    loop = asyncio.get_running_loop()
    calls = 0
    call_soon = loop.call_soon_threadsafe

    def counted(callback: Any, *args: Any, context: Any = None) -> Any:
        nonlocal calls
        calls += callback.__name__ == "_take"
        return call_soon(callback, *args, context=context)

    patch(loop, call_soon_threadsafe=counted)
    sizes: list[int] = []

    def take(delta: Delta) -> bool:
        sizes.append(len(delta.token_ids))
        return True

    stream = engine.submit(request("a", [1], max_tokens=200))
    steps.let()
    first = await anext(stream)
    waits = asyncio.create_task(collect(stream))
    stream.at_once = take
    await asyncio.sleep(0)
    calls = 0
    steps.let(50)
    held_up_until(lambda: steps.asked == 52, "50 steps and who asks for one more")
    assert calls == 1
    await until(lambda: sizes, "what those steps brought")
    assert sizes == [50]
    steps.let_all()
    rest = await waits
    assert len(first.token_ids) + sum(sizes) + sum(len(d.token_ids) for d in rest) == 200
    await engine.stop()


async def test_deliveries_let_the_loop_do_other_things_in_between() -> None:
    engine = await started()
    steps = Leave(engine.engine.executor)
    order: list[str] = []

    def slow(delta: Delta) -> bool:
        order.append("delta")
        time.sleep(0.002)
        return True

    streams = [engine.submit(request(str(i), [1], max_tokens=30)) for i in range(8)]
    tasks = [asyncio.create_task(collect(stream)) for stream in streams]
    for stream in streams:
        stream.at_once = slow
    stop = False

    async def other() -> None:
        while not stop:
            order.append("other")
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    async with steps.one_by_one():
        await asyncio.gather(*tasks)
    stop = True
    await beside
    runs = "".join(each[0] for each in order).split("o")
    assert 1 <= max(map(len, runs)) <= 2
    await engine.stop()


async def test_a_delta_says_when_its_token_was_drawn() -> None:
    """However late it is looked at."""
    engine = await started()
    stream = engine.submit(request("a", [1], max_tokens=30))
    times = []
    async for delta in stream:
        times.append(delta.at)
        if len(times) == 1:
            assert stream.record.first_token == delta.at or len(delta.token_ids) > 1
            time.sleep(0.01)
    assert times == sorted(times)
    assert times[-1] == stream.record.last_token
    await engine.stop()
