"""Who may write when, in a stream that two write to."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message

from octavo.server.streaming import Writer
from octavo.server.workers import DisconnectWatch
from patience import until


class Slow:
    """Takes a message when it may."""

    def __init__(self) -> None:
        self.may = asyncio.Semaphore(0)
        self.taken: list[Message] = []

    async def send(self, message: Message) -> None:
        await self.may.acquire()
        self.taken.append(message)

    def writer(self) -> Writer:
        transport = SimpleNamespace(
            write=lambda data: self.taken.append({"body": data}), is_closing=lambda: False
        )
        cycle = SimpleNamespace(
            chunked_encoding=True, disconnected=False, response_complete=False,
            flow=SimpleNamespace(write_paused=False), transport=transport,
        )  # fmt: skip
        return Writer(self.send, cast(Any, cycle))

    async def release(self, messages: int = 1) -> None:
        for _ in range(messages):
            self.may.release()
        for _ in range(10):
            await asyncio.sleep(0)


async def test_nothing_passes_what_waits() -> None:
    slow = Slow()
    writer = slow.writer()
    first = asyncio.create_task(writer.write(b"first"))
    second = asyncio.create_task(writer.write(b"second"))
    for _ in range(2):  # the head, and the first body
        assert not writer.ready
        await slow.release()
    assert first.done()
    assert not second.done()
    assert not writer.ready
    await slow.release()
    assert second.done()
    assert writer.ready
    writer.write_now(b"third")
    assert [message.get("body") for message in slow.taken] == [
        *(None, b"first", b"second", b"5\r\nthird\r\n")
    ]


async def test_no_sign_of_life_where_something_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment behind what the client does not take would tell it nothing."""
    due = 0

    def looked_at() -> float:
        nonlocal due
        due += 1
        return time.monotonic()

    slow = Slow()
    writer = slow.writer()
    monkeypatch.setattr("octavo.server.streaming.time", SimpleNamespace(monotonic=looked_at))
    waiting = asyncio.create_task(writer.write(b"first"))
    beat = asyncio.create_task(writer.keep_alive(0.005))
    await until(lambda: due >= 3, "signs of life that are due")
    await slow.release(2)
    assert waiting.done()
    assert [message.get("body") for message in slow.taken] == [None, b"first"]
    await slow.release()
    await until(lambda: slow.taken[-1]["body"] == b": keep-alive\n\n", "a sign of life")
    beat.cancel()


async def test_closing_a_watch_hides_no_cancellation() -> None:
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def receive() -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ending.set()
            await may_end.wait()
            raise

    async def closes() -> None:
        watch = DisconnectWatch(receive, lambda: None)
        await asyncio.sleep(0)
        await watch.close()

    closing = asyncio.create_task(closes())
    await ending.wait()
    closing.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
