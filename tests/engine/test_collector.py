"""The garbage collector has little to do, and does it when nobody waits."""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from engine.checking import CheckingExecutor, build
from engine.test_engine import request, run
from octavo.engine import collector
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.clock import RealClock
from octavo.schedule.sequence import RequestState, Sequence


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(*kinds: type) -> int:
    return sum(isinstance(each, kinds) for each in gc.get_objects())


def test_of_requests_that_have_ended_nothing_stays_without_a_collector() -> None:
    engine = build()
    executor = engine.executor
    assert isinstance(executor, CheckingExecutor)
    with no_collector():
        before = alive(RequestState, Sequence)
        for index in range(20):
            engine.add_request(request(f"{index}", [index] * 30, max_tokens=5, n=1 + index % 3))
        engine.step()
        for index in range(0, 20, 4):
            engine.abort(f"{index}")
        run(engine)
        engine.add_request(request("last", [1], max_tokens=1))  # what the last step was made of
        run(engine)
        executor._prefixes.clear()
        assert alive(RequestState, Sequence) <= before + 2


def test_a_prompt_is_one_object_for_the_collector() -> None:
    engine = build()
    prompt = list(range(40))
    checked = engine.check(request("a", prompt))
    assert isinstance(checked.prompt_token_ids, array)
    assert checked.prompt_token_ids.tolist() == prompt
    assert engine.check(checked).prompt_token_ids is checked.prompt_token_ids


def test_requests_share_the_ids_that_end_them() -> None:
    eos = frozenset({3, 4})
    params = [request(name, [1], ignore_eos=False).params for name in "ab"]
    assert all(each.ending_ids(eos) is eos for each in params)


async def test_full_passes_are_rare_while_a_server_runs_and_come_when_it_is_idle() -> None:
    before = gc.get_threshold()
    engine = AsyncEngine(build(clock=RealClock()))
    await engine.start()
    try:
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > before[2]
        for _ in range(20):  # full ones are due by CPython's own thresholds
            gc.collect(1)
        assert gc.get_count()[2] >= 20
        stream = engine.submit(request("a", [1], max_tokens=3))
        async for _ in stream:
            pass
        for _ in range(500):
            if gc.get_count()[2] < 20:
                break
            await asyncio.sleep(0.01)
        assert gc.get_count()[2] < 20
    finally:
        await engine.stop()
    assert gc.get_threshold() == before


def test_where_the_collector_is_off_it_stays_off() -> None:
    with no_collector():
        for _ in range(20):
            gc.collect(1)
        collector.catch_up()
        assert gc.get_count()[2] >= 20
