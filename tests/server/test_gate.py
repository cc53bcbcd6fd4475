"""What is logged and counted of an answer that broke off."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import suppress

import pytest
from starlette.types import Message, Receive, Scope, Send

from octavo.server.errors import ApiError, ClientGone
from octavo.server.exchange import Exchange
from octavo.server.gate import Door, Gate, send_json
from octavo.server.keys import ApiKey, Keyring


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
        Door(breaks, Keyring(()), lambda: bool(error.args)),
        lambda *of: counted.append(of),
        frozenset({"/a"}),
        access_log=True,
    )
    with suppress(asyncio.CancelledError):
        await gate(scope, receive, send)
    assert counted == [("/a", "GET", status)]
    assert Exchange.of(scope).error_type == error_type


async def test_a_field_given_very_often_is_put_together_once() -> None:
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

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert Exchange.of(scope).headers[b"a"] == b", ".join([b"bbb"] * 9000)
        await send_json(send, 200, b"{}")

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        pass

    headers = Headers([*[(b"a", Value(b"bbb"))] * 9000, (b"authorization", b"Bearer k")])
    scope: Scope = {"type": "http", "method": "GET", "path": "/a", "headers": headers}
    door = Door(app, Keyring((ApiKey(name="k", digest=hashlib.sha256(b"k").digest()),)))
    await Gate(door, lambda *_: None, frozenset(), access_log=False)(scope, receive, send)
    assert Exchange.of(scope).status == 200
    assert copied < 9000 * len(b"bbb, ")
    assert headers.walks == 1
