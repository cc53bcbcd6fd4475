"""What every request passes, whatever its route: a name, the log, the key, one kind of error."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, MutableMapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.access_log import log_access
from octavo.server.errors import ApiError, ClientGone, as_api_error, draining, reason_of
from octavo.server.exchange import Exchange
from octavo.server.keys import Keyring

PROBES = frozenset({"/health", "/live", "/ready", "/ping"})
_ROUTINE = PROBES | {"/metrics", "/requests"}  # asked every few seconds
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_CLIENT_CLOSED = 499  # what nginx logs when nobody waited for the answer


Trace = Callable[[Exchange], str]  # told of an exchange that is over; returns the id of its trace


class Gate:
    """Outermost layer: gives each request its id and its one line in the log.

    ``count`` is told (handler, method, status) of each answer; handlers are named by ``paths``.
    ``refuse`` is told (reason, client) of each request that was answered by an error before the
    engine had it. ``trace`` must not raise.
    """

    def __init__(
        self,
        app: ASGIApp,
        count: Callable[[str, str, int], None],
        paths: frozenset[str],
        *,
        access_log: bool,
        trace: Trace | None = None,
        refuse: Callable[[str, str], None] = lambda reason, client: None,
    ) -> None:
        self._app = app
        self._count = count
        self._refuse = refuse
        self._paths = paths
        self._access_log = access_log
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _lists(scope["headers"])
        given = headers.get(b"x-request-id")
        valid = given is not None and _REQUEST_ID.fullmatch(given) is not None
        exchange = Exchange(
            given.decode() if given and valid else uuid.uuid4().hex,
            scope["method"],
            scope["path"].removeprefix(scope.get("root_path", "")),
            headers,
        )
        exchange.attach(scope)
        request_id = (b"x-request-id", exchange.request_id.encode())
        complete = False

        async def tell(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), request_id]
                if exchange.account is not None:
                    message["headers"] += exchange.account.headers()
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            if given is None or valid:
                await self._app(scope, receive, tell)
            else:
                refusal = ApiError(400, "X-Request-Id must be 1 to 128 visible ASCII characters")
                await answer_error(tell, exchange, refusal)
        finally:
            if not complete:  # whatever its head said
                exchange.status = 500
            self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        exchange.ended = time.monotonic()
        if exchange.client_gone:
            exchange.status = exchange.cut_off or _CLIENT_CLOSED
        # A probe's no is its answer, and what the engine has taken is counted by how it ends.
        if exchange.status >= 400 and exchange.path not in PROBES and not exchange.submitted:
            self._refuse(exchange.refusal or reason_of(exchange.status), exchange.client)
        # What scanners make up must not become time series.
        self._count(
            exchange.path if exchange.path in self._paths else "other",
            exchange.method if exchange.method in _METHODS else "other",
            exchange.status,
        )
        if self._trace is not None:
            exchange.trace_id = self._trace(exchange)
        if self._access_log:
            routine = exchange.path in _ROUTINE and exchange.status < 400
            log_access(exchange, logging.DEBUG if routine else logging.INFO)

    def refused(self, status: int) -> None:
        """What came was no request, or was answered before all of its head was there."""
        self._count("other", "other", status)
        self._refuse(reason_of(status), "")


class Door:
    """401 to whoever names none of the keys (the health probes are open), and an error object for
    whatever is raised inside.
    """

    def __init__(
        self, app: ASGIApp, keys: Keyring, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        """``stopping``: whether the server stops, which cancels whoever has not been answered."""
        self._app = app
        self._keys = keys
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        scope["app"] = self  # so that the router raises instead of answering in plain text
        try:
            self._check_key(exchange)
            await self._app(scope, receive, send)
        except ClientGone:
            exchange.client_gone = True
        except asyncio.CancelledError:
            if not self._stopping():
                raise
            await answer_error(send, exchange, draining())
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no `Exception`
            await answer_error(send, exchange, as_api_error(error))

    def _check_key(self, exchange: Exchange) -> None:
        if not self._keys or exchange.path in PROBES:
            return
        scheme, _, key = exchange.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            exchange.account = self._keys.find(key.strip())
        if exchange.account is None:
            raise ApiError(
                401,
                "the API key is missing or wrong",
                headers={"WWW-Authenticate": "Bearer"},
            )


async def answer_error(send: Send, exchange: Exchange, failure: ApiError) -> None:
    # Not in the frame that caught it: the error would hold that frame, and so the request's body.
    exchange.error_type = failure.type
    if not exchange.status:
        exchange.refusal = failure.reason
        await send_json(send, failure.status, failure.body(), failure.headers)


async def send_json(
    send: Send, status: int, body: bytes, headers: MutableMapping[str, str] | None = None
) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *((name.lower().encode(), v.encode()) for name, v in (headers or {}).items()),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})


def _lists(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """By name. What is given several times is one list (RFC 9110, section 5.3)."""
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    return {name: b", ".join(given) for name, given in values.items()}
