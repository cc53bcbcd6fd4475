"""Output that nobody takes: its request is paused, and then goes on as if it had not been."""

import asyncio
from contextlib import suppress

import pytest

from engine.test_async_engine import collect, started
from engine.test_engine import request
from faults import patch
from octavo.engine import stream as streams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.outputs import Delta
from octavo.engine.stream import Mailbox, OutputUnread, Stream
from octavo.executor.base import Batch, StepResult
from octavo.scheduler.request import FinishReason, Outcome, RequestRecord
from patience import until

MOST = 10_000


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MOST_UNSENT", MOST)


async def one_by_one() -> AsyncEngine:
    """An engine whose steps wait until the loop has seen what the one before has brought."""
    engine, loop = await started(), asyncio.get_running_loop()
    execute = engine.engine.executor.execute

    async def seen() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    def after_the_loop(batch: Batch) -> StepResult:
        with suppress(TimeoutError):  # the loop waits for this thread
            asyncio.run_coroutine_threadsafe(seen(), loop).result(0.5)
        return execute(batch)

    patch(engine.engine.executor, execute=after_the_loop)
    return engine


def tokens_of(deltas: list[Delta]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for delta in deltas:
        found.setdefault(delta.choice, []).extend(delta.token_ids)
    return found


@pytest.mark.parametrize("n", [1, 3])
async def test_it_waits_and_goes_on_with_the_same_tokens(n: int) -> None:
    engine = await one_by_one()
    params = {"max_tokens": 90, "n": n, "seed": 3}
    plain = await collect(engine.submit(request("plain", [1, 2], **params)))
    unread = engine.submit(request("unread", [1, 2], **params))
    for _ in range(2):  # and again, when some of it has been taken
        await until(lambda: unread._paused and engine.stats().paused == n)
        assert not engine.engine.has_work()
        made = unread.record.completion_tokens
        assert MOST <= unread.unsent < 2 * MOST
        # Others run on, and find all blocks free.
        other = await collect(engine.submit(request("other", [5], max_tokens=20)))
        assert len(tokens_of(other)[0]) == 20
        assert unread.record.completion_tokens == made < 90 * n
        taken = [await anext(unread) for _ in range(n)]
        plain_so_far = tokens_of(plain)
        for choice, tokens in tokens_of(taken).items():
            assert plain_so_far[choice][: len(tokens)] == tokens
            del plain_so_far[choice][: len(tokens)]
        plain = [delta._replace(token_ids=plain_so_far.pop(delta.choice, [])) for delta in plain]
    rest = await collect(unread)
    assert tokens_of(rest) == tokens_of(plain)
    assert unread.record.outcome is Outcome.FINISHED
    assert unread.record.pauses >= 2
    assert unread.unsent == engine.unsent == 0
    await engine.stop()
    engine.engine.check_integrity()


async def test_a_paused_request_can_end() -> None:
    """By an abort, by a drain, and by the engine's stop."""
    for end in ("abort", "drain", "stop"):
        engine = await one_by_one()
        unread = engine.submit(request("unread", [1, 2], max_tokens=90))
        await until(lambda engine=engine: engine.stats().paused == 1)
        if end == "abort":
            unread.abort()
        elif end == "drain":
            assert not await engine.drain(0.01)
        else:
            await engine.stop()
        *_, last = await collect(unread)
        assert last.finish_reason is FinishReason.ABORT
        assert last.record is unread.record
        assert engine.unsent == 0
        await engine.stop()
        engine.engine.check_integrity()


async def test_all_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then those are ended that have been paused for the longest time."""
    monkeypatch.setattr(streams, "_MOST_UNSENT_TOTAL", 3 * MOST)
    engine = await one_by_one()
    unread: list[Stream] = []
    for index in range(5):
        params = {"max_tokens": 90}
        unread.append(engine.submit(request(f"unread-{index}", [1, 2], **params)))
        await until(lambda: unread[-1].record.pauses == 1)
    assert engine.unsent <= 3 * MOST
    await until(lambda: unread[0].record.outcome is not None)
    for gone in unread[:3]:
        with pytest.raises(OutputUnread):
            await collect(gone)
        assert gone.record.outcome is Outcome.ABORTED
    for kept in unread[3:]:
        assert len(tokens_of(await collect(kept))[0]) == 90
    assert engine.unsent == 0
    await engine.stop()
    engine.engine.check_integrity()


async def test_who_is_paused_makes_nobody_wait_for_a_look_at_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At all of its blocks, each time that there is nothing to do."""
    looks: list[int] = []
    engine = await one_by_one()
    inner = engine.engine
    check = inner.check_integrity
    monkeypatch.setattr(
        inner, "check_integrity", lambda: (looks.append(len(inner.requests)), check())
    )
    unread = engine.submit(request("unread", [1, 2], max_tokens=90))
    await until(lambda: engine.stats().paused == 1)
    await collect(engine.submit(request("other", [5], max_tokens=2)))
    await until(lambda: engine._busy_since is None)
    unread.abort()
    await collect(unread)
    await until(lambda: engine._busy_since is None)
    assert looks
    assert not any(looks)
    await engine.stop()


async def test_what_comes_after_an_abort_is_held_against_nobody() -> None:
    """The last deltas of a request whose consumer has left, and which nobody takes."""
    engine = await one_by_one()
    left = engine.submit(request("left", [1, 2], max_tokens=90, n=3))
    await anext(left)
    left.abort()
    await until(lambda: left._over)
    assert left.unsent == engine.unsent == 0
    assert (await collect(left))[-1].record is left.record
    assert engine.unsent == 0
    await engine.stop()


async def test_what_comes_while_some_is_being_taken_counts() -> None:
    record = RequestRecord("unread", 0.0, 2)
    stream = Stream(record, Mailbox(asyncio.get_running_loop()), print, print)
    first = [Delta("unread", choice, "text", [choice]) for choice in range(2)]
    more = [Delta("unread", choice, "more text", [choice, 1]) for choice in range(2)]
    stream.push(first)
    assert await anext(stream) == first[0]
    stream.push(more)
    rest = streams.joined([first[1], *more])
    assert await anext(stream) == rest[0]
    assert stream.unsent == stream.mailbox.unsent == streams._size(rest[1])
    assert await anext(stream) == rest[1]
    assert stream.unsent == stream.mailbox.unsent == 0
