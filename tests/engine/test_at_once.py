"""Deltas taken as they come, without waking whoever waits for them: all of them, in their order."""

import asyncio
import random

import pytest

from engine.test_async_engine import collect, started
from engine.test_engine import request
from octavo.engine.outputs import Delta
from octavo.engine.stream import Stream
from patience import Leave, held_up_until


async def taken(stream: Stream, rng: random.Random) -> tuple[dict[int, list[int]], int]:
    """Each choice's tokens in the order in which they came one way or the other, and how many
    deltas were taken at once; the consumer is now and then busy, and declines now and then.
    """
    tokens: dict[int, list[int]] = {}
    at_once = 0

    def take(delta: Delta) -> bool:
        nonlocal at_once
        assert delta.record is None
        if rng.random() < 0.3:
            return False
        at_once += 1
        tokens.setdefault(delta.choice, []).extend(delta.token_ids)
        return True

    stream.at_once = take
    async for delta in stream:
        tokens.setdefault(delta.choice, []).extend(delta.token_ids)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.003)
        last = delta
    assert last.record is stream.record
    return tokens, at_once


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_lost_or_out_of_order(seed: int) -> None:
    rng = random.Random(seed)
    engine = await started()

    def submit(name: str, index: int) -> Stream:
        n = 1 + index % 3
        return engine.submit(request(f"{name}-{index}", [1, 2, index], max_tokens=60, n=n, seed=5))

    plain = await asyncio.gather(*(collect(submit("plain", index)) for index in range(12)))
    async with Leave(engine.engine.executor).one_by_one():
        found = await asyncio.gather(*(taken(submit("taken", index), rng) for index in range(12)))
    await engine.stop()
    for deltas, (tokens, _) in zip(plain, found, strict=True):
        expected: dict[int, list[int]] = {}
        for delta in deltas:
            expected.setdefault(delta.choice, []).extend(delta.token_ids)
        assert tokens == expected
    assert sum(at_once for _, at_once in found) > 12  # or the test shows nothing


async def test_what_it_raises_is_its_own_streams() -> None:
    engine = await started()
    steps = Leave(engine.engine.executor)
    others = [engine.submit(request(f"other-{index}", [1], max_tokens=80)) for index in range(3)]
    stream = engine.submit(request("fails", [1], max_tokens=80))
    count = 0

    def fails(delta: Delta) -> bool:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyError("mine")
        return True

    stream.at_once = fails
    results = asyncio.gather(*map(collect, others))
    async with steps.one_by_one():
        with pytest.raises(KeyError, match="mine"):
            await collect(stream)
    assert count == 3
    stream.abort()
    for deltas in await results:
        assert sum(len(delta.token_ids) for delta in deltas) == 80
    await engine.stop()


async def test_nothing_comes_after_what_it_raises() -> None:
    """Or the output would have a hole."""
    engine = await started()
    steps = Leave(engine.engine.executor)
    stream = engine.submit(request("fails", [1], max_tokens=80))

    def fails(delta: Delta) -> bool:
        raise KeyError("mine")

    steps.let()
    await anext(stream)
    waits = asyncio.create_task(anext(stream))
    stream.at_once = fails
    await asyncio.sleep(0)
    stream.push([Delta("fails", 0, "x", [1])])
    steps.let_all()
    held_up_until(lambda: stream.record.outcome, "the end")  # before it is looked at
    stream.push([Delta("fails", 0, "x", [1])])
    with pytest.raises(KeyError, match="mine"):
        await waits
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            await anext(stream)
    await engine.stop()
