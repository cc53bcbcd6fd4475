"""What large bodies leave behind."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from starlette.types import Message, Receive, Scope, Send

from octavo.serve.errors import ApiError
from octavo.serve.exchange import Exchange
from octavo.serve.gate import Door
from octavo.serve.workers import Workers


async def test_memory_is_given_back_after_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.serve.workers._PAUSE", 0.0)
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
        async with asyncio.timeout(20):
            while workers._planned or not trims:
                await asyncio.sleep(0.001)
        trims.clear()


async def test_a_refused_body_is_let_go_of_at_once() -> None:
    class Body:
        pass

    held: list[weakref.ref[Body]] = []

    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        body = Body()
        held.append(weakref.ref(body))
        raise ApiError(400, "no")

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        pass

    scope: Scope = {"type": "http", "headers": []}
    Exchange("id", "POST", "/").attach(scope)
    gc.disable()
    try:
        await Door(refuses, ())(scope, receive, send)
        assert held[0]() is None
    finally:
        gc.enable()
