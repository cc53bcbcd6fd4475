"""The garbage collector has little to do, and does it when nobody waits."""

import asyncio
import gc
import sys
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.checking import build
from engine.test_engine import request, run
from octavo.engine import collector
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.clock import Clock
from octavo.scheduler.request import Outcome
from octavo.scheduler.sequence import Sequence


@pytest.fixture(autouse=True)
def _nobody_holds_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine that a test which failed left behind does."""
    thresholds = gc.get_threshold()
    if collector._holders:
        gc.set_threshold(*collector._before)
        monkeypatch.setattr(collector, "_holders", 0)
    yield
    gc.set_threshold(*thresholds)


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(*kinds: type) -> int:
    return sum(issubclass(kind, kinds) for kind in map(type, gc.get_objects()))


@pytest.mark.parametrize("limits", [{}, {"max_queue_time": 3600.0, "shed_late": True}])
def test_of_requests_that_have_ended_nothing_stays_without_a_collector(
    limits: dict[str, float | bool],
) -> None:
    engine = build(**limits)
    executor = engine.executor
    with no_collector():
        before = alive(Sequence)
        for index in range(20):
            engine.add_request(request(f"{index}", [index] * 30, max_tokens=5, n=1 + index % 3))
        engine.step()
        for index in range(0, 20, 4):
            engine.abort(f"{index}")
        run(engine)
        engine.add_request(request("last", [1], max_tokens=1))  # its step was one with a prompt
        run(engine)
        executor._prefixes.clear()
        assert alive(Sequence) == before


def test_a_prompt_is_one_object_for_the_collector() -> None:
    engine = build()
    prompt = list(range(40))
    checked = engine.check(request("a", prompt))
    assert isinstance(checked.prompt_token_ids, array)
    assert checked.prompt_token_ids.tolist() == prompt
    assert engine.check(checked).prompt_token_ids is checked.prompt_token_ids
    for typecode in "Hq":
        other = engine.check(request("b", array(typecode, prompt))).prompt_token_ids
        assert isinstance(other, array)
        assert (other.typecode, other.tolist()) == ("i", prompt)


def test_nobody_is_guilty_of_what_fails_behind_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    engine.add_request(request("a", [1], max_tokens=3))
    (state,) = engine.requests.values()
    lets_go, faults = engine._release, [MemoryError()]

    def nothing_runs(_: object) -> None:
        engine.culprit = state

    def fails() -> None:
        if faults:
            raise faults.pop()
        lets_go()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_step", nothing_runs)
        patched.setattr(engine, "_release", fails)
        assert engine.step() == []
    run(engine)
    assert state.outcome is Outcome.FINISHED


def test_a_closed_engine_keeps_nobody() -> None:
    engine = build()
    engine.add_request(request("a", [1], max_tokens=3))
    (state,) = engine.requests.values()
    engine.close()
    assert not state.sequences


def test_requests_share_the_ids_that_end_them() -> None:
    eos = frozenset({3, 4})
    params = [request(name, [1], ignore_eos=False).params for name in "ab"]
    assert all(each.ending_ids(eos) is eos for each in params)


full_passes = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="CPython has no full passes, and no third threshold"
)


@full_passes
async def test_full_passes_are_rare_while_a_server_runs_and_come_when_it_is_idle() -> None:
    before = gc.get_threshold()
    by: list[str] = []  # threads that made full passes

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            by.append(threading.current_thread().name)

    engine = AsyncEngine(build(clock=Clock()))
    await engine.start()
    gc.callbacks.append(note)
    try:
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > before[2]
        for _ in range(20):  # full ones are due by CPython's own thresholds
            gc.collect(1)
        stream = engine.submit(request("a", [1], max_tokens=3))
        async for _ in stream:
            pass
        async with asyncio.timeout(60):
            while engine.thread.name not in by:
                await asyncio.sleep(0.01)
    finally:
        gc.callbacks.remove(note)
        await engine.stop()
    assert gc.get_threshold() == before


@full_passes
@pytest.mark.parametrize("young", [200, 700, 2000])  # CPython's own differ by version
def test_so_many_objects_grow_old_until_there_is_a_full_pass(
    young: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 300_000
    monkeypatch.setattr(collector, "_OBJECTS", most)
    before, full = gc.get_threshold(), []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(info)

    made: list[list[object]] = []
    gc.freeze()  # else a quarter of what there is may be more
    gc.collect()
    gc.set_threshold(young, *before[1:])
    collector.hold_back()
    gc.callbacks.append(note)
    try:
        while not full and len(made) < 2 * most:
            made.append([])
    finally:
        gc.callbacks.remove(note)
        collector.release()
        gc.set_threshold(*before)
        gc.unfreeze()
    assert 0.8 * most < len(made) < 1.02 * most


def test_where_there_are_no_full_passes_nothing_is_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "_FULL_PASSES", False)
    before = gc.get_threshold()
    collector.hold_back()
    assert gc.get_threshold() == before
    collector.release()
    assert gc.get_threshold() == before


@full_passes
def test_where_the_collector_is_off_it_stays_off() -> None:
    with no_collector():
        for _ in range(20):
            gc.collect(1)
        collector.catch_up()
        assert gc.get_count()[2] >= 20
