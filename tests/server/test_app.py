"""What is logged and counted of an answer that broke off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from serve_fakes import FakeEngine, served_model
from starlette.types import Message, Receive, Scope, Send

from octavo.server.app import App
from octavo.server.config import ServeConfig
from octavo.server.context import CONTEXT, RequestContext
from octavo.server.errors import ApiError, ClientGone
from octavo.server.routes import HttpRoute


def app_of(handler: Any, engine: FakeEngine, **config: Any) -> App:
    """An application with one route, /a."""
    routes = [HttpRoute("GET", "/a", handler)]
    return App(engine, served_model(), ServeConfig(**config), routes=routes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "begun", "status", "error_type"),
    [
        (RuntimeError("a fault"), True, 500, "InternalServerError"),
        (RuntimeError("a fault"), False, 500, "InternalServerError"),
        (ApiError(429, "no"), False, 429, "RateLimitError"),
        (ClientGone(), True, 499, ""),
        (ClientGone(), False, 499, ""),
        (asyncio.CancelledError(), True, 500, ""),
        (asyncio.CancelledError("stopping"), True, 500, "ServiceUnavailableError"),
        (asyncio.CancelledError("stopping"), False, 503, "ServiceUnavailableError"),
    ],
)
async def test_who_broke_it_off(
    engine: FakeEngine, error: BaseException, begun: bool, status: int, error_type: str
) -> None:
    async def breaks(app: App, context: RequestContext, receive: Receive, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise error

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        pass

    engine.draining = bool(error.args)
    scope: Scope = {"type": "http", "method": "GET", "path": "/a", "headers": []}
    app = app_of(breaks, engine)
    with suppress(asyncio.CancelledError):
        await app(scope, receive, send)
    labels = {"handler": "/a", "method": "GET", "status": str(status)}
    assert app.metrics.registry.get_sample_value("octavo:http_requests_total", labels) == 1
    assert scope[CONTEXT].error_type == error_type


async def test_a_field_given_very_often_is_put_together_once(engine: FakeEngine) -> None:
    """And in one go: anybody may send it, before any key is asked for."""
    copied = 0

    class Value(bytes):
        def __add__(self, other: object) -> Value:
            nonlocal copied
            assert isinstance(other, bytes)
            copied += len(self) + len(other)
            return Value(bytes(self) + other)

    class Headers(list[tuple[bytes, bytes]]):
        walks = 0

        def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
            self.walks += 1
            return super().__iter__()

    async def answers(app: App, context: RequestContext, receive: Receive, send: Send) -> bytes:
        assert context.headers[b"a"] == b", ".join([b"bbb"] * 9000)
        return b"{}"

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        pass

    headers = Headers([*[(b"a", Value(b"bbb"))] * 9000, (b"authorization", b"Bearer k")])
    scope: Scope = {"type": "http", "method": "GET", "path": "/a", "headers": headers}
    await app_of(answers, engine, api_key=("k",))(scope, receive, send)
    assert scope[CONTEXT].status == 200
    assert copied < 9000 * len(b"bbb, ")
    assert headers.walks == 1
