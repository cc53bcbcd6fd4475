"""What large bodies leave behind."""

import asyncio
import gc
import threading
import weakref

import pytest
from serve_fakes import FakeEngine, served_model
from starlette.types import Message, Receive, Scope, Send

from octavo.server.app import App
from octavo.server.config import ServeConfig
from octavo.server.context import RequestContext
from octavo.server.errors import ApiError, ClientGone
from octavo.server.routes import HttpRoute
from octavo.server.workers import Workers, unless_gone
from patience import PATIENCE, until


async def test_memory_is_given_back_after_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.server.workers._PAUSE", 0.0)
    workers = Workers()
    trims: list[int] = []
    workers._trim = trims.append

    def fails(body: bytes) -> int:
        raise ApiError(400, "no")

    assert await workers.run(len, b"small") == 5
    assert not workers._planned
    for _ in range(2):  # and again, once the first time is over
        with pytest.raises(ApiError):
            await workers.run(fails, bytes(1 << 20))
        assert workers._planned
        await until(lambda: trims and not workers._planned)
        trims.clear()


def test_memory_is_given_back_without_a_collection() -> None:
    """Which would hold up everyone, as often as any client likes."""
    workers, collections, trims = Workers(), [], []
    workers._trim = trims.append
    note = lambda phase, _: collections.append(phase)  # noqa: E731
    gc.callbacks.append(note)
    gc.disable()
    try:
        workers._give_back()
    finally:
        gc.enable()
        gc.callbacks.remove(note)
    assert (trims, collections) == ([0], [])


async def test_a_refused_body_is_let_go_of_at_once(engine: FakeEngine) -> None:
    class Body:
        pass

    held: list[weakref.ref[Body]] = []

    async def refuses(app: App, context: RequestContext, receive: Receive, send: Send) -> None:
        body = Body()
        held.append(weakref.ref(body))
        raise ApiError(400, "no")

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        pass

    scope: Scope = {"type": "http", "method": "POST", "path": "/a", "headers": []}
    app = App(engine, served_model(), ServeConfig(), routes=[HttpRoute("POST", "/a", refuses)])  # type: ignore[arg-type]
    gc.disable()
    try:
        await app(scope, receive, send)
        assert held[0]() is None
    finally:
        gc.enable()


async def test_what_waits_for_a_thread_is_let_go_of_when_its_client_leaves() -> None:
    """Its work is never begun, and its place is free at once."""
    going, leave = threading.Event(), asyncio.Event()
    workers, begun = Workers(threads=1), []
    first = workers.run(lambda _: going.wait(PATIENCE), b"")

    async def receive() -> Message:
        await leave.wait()
        return {"type": "http.disconnect"}

    gone = [
        asyncio.create_task(unless_gone(receive, workers.run(begun.append, b""))) for _ in range(3)
    ]
    await until(lambda: workers.pending == 4)
    leave.set()
    for task in gone:
        with pytest.raises(ClientGone):
            await task
    assert workers.pending == 1
    going.set()
    await first
    assert await workers.run(len, b"123") == 3  # after all others
    assert begun == []


async def test_work_that_comes_to_its_end_and_work_that_is_cancelled() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def work(seconds: float) -> int:
        await asyncio.sleep(seconds)
        return 5

    assert await unless_gone(receive, asyncio.create_task(work(0))) == 5
    task = asyncio.create_task(unless_gone(receive, asyncio.create_task(work(20))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
