"""What is logged and counted of an answer that broke off."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from octavo.serve.errors import ApiError, ClientGone
from octavo.serve.exchange import Exchange
from octavo.serve.gate import Door, Gate
from octavo.serve.keys import Keyring


@pytest.mark.parametrize(
    ("error", "begun", "status", "error_type"),
    [
        (RuntimeError("a fault"), True, 500, "InternalServerError"),
        (RuntimeError("a fault"), False, 500, "InternalServerError"),
        (ApiError(429, "no"), False, 429, "RateLimitError"),
        (ClientGone(), True, 499, ""),
        (ClientGone(), False, 499, ""),
        (asyncio.CancelledError(), True, 500, ""),
    ],
)
async def test_who_broke_it_off(
    error: BaseException, begun: bool, status: int, error_type: str
) -> None:
    async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise error

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        pass

    counted = []
    scope: Scope = {"type": "http", "method": "GET", "path": "/a", "headers": []}
    gate = Gate(
        Door(breaks, Keyring(())),
        lambda *of: counted.append(of),
        frozenset({"/a"}),
        access_log=True,
    )
    try:
        await gate(scope, receive, send)
    except asyncio.CancelledError:
        assert isinstance(error, asyncio.CancelledError)
    assert counted == [("/a", "GET", status)]
    assert Exchange.of(scope).error_type == error_type
