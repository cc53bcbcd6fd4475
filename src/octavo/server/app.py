"""The ASGI application: what every request passes, whatever its route.

A request gets its id and context (`App.__call__`), is refused if its host is another's, passes CORS
where browsers of other origins are allowed, shows its key (`App._guarded`), and goes to the handler
of its route. Whatever is raised on the way becomes one kind of error object. Then it is counted,
traced and logged once (`App._finish`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.engine.async_engine import AsyncEngine
from octavo.sampling.params import InvalidParameter
from octavo.scheduler.request import AdmissionError, LatencyTarget
from octavo.server import docs
from octavo.server.access_log import log_access
from octavo.server.api_keys import digest
from octavo.server.body import Bodies
from octavo.server.clients import Clients
from octavo.server.config import ServeConfig
from octavo.server.context import CONTEXT, CYCLE, RequestContext
from octavo.server.errors import (
    ApiError,
    ClientGone,
    as_api_error,
    draining,
    is_fault_of_client,
    reason_of,
)
from octavo.server.hosts import own_hosts
from octavo.server.metrics import Metrics
from octavo.server.model import ServedModel
from octavo.server.protocol import json
from octavo.server.quota import accounts
from octavo.server.routes import DOCS_ROUTES, ROUTES, HttpRoute
from octavo.server.shared_snapshot import SharedSnapshot
from octavo.server.streaming import send_whole
from octavo.server.workers import Refusals, Workers

Trace = Callable[[RequestContext], str]  # told of a request that is over; returns its trace's id

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_CLIENT_CLOSED = 499  # what nginx logs when nobody waited for the answer
# The headers of an answer that a page of another origin may read.
_EXPOSED = (
    "X-Request-Id",
    "Retry-After",
    "retry-after-ms",
    *(
        f"x-ratelimit-{what}-{bucket}"
        for what in ("limit", "remaining", "reset")
        for bucket in ("requests", "tokens")
    ),
)


class App:
    """The server as an ASGI application, with what all its requests share.

    The caller starts and stops ``engine``. ``trace`` must not raise.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        model: ServedModel,
        config: ServeConfig,
        metrics: Metrics | None = None,
        trace: Trace | None = None,
        clients: Clients | None = None,
        routes: Sequence[HttpRoute] = ROUTES,
    ) -> None:
        if metrics is None:
            metrics = Metrics(model.name, engine.stats, model.max_model_len)
        self.engine = engine
        self.model = model
        self.config = config
        self.metrics = metrics
        self.clients = Clients() if clients is None else clients
        self.bodies = Bodies(config.max_request_bytes)
        self.workers = Workers()  # of what is to be generated
        self.token_workers = Workers(threads=1)
        self.refusals = Refusals()
        self.snapshot = SharedSnapshot(engine)
        self.routes = (*routes, *DOCS_ROUTES) if config.docs else tuple(routes)
        self._paths = {route.path: route for route in self.routes if not route.prefix}
        self._is_own_host = own_hosts(config)
        self._accounts = accounts(config.keys, engine.fair_queue)
        self._trace = trace
        metrics.clients(self.clients, lambda: engine.unsent)
        own = (None, *(key.target for key in config.keys))
        # What is promised to requests that ask for nothing.
        promised = [target for each in own if (target := LatencyTarget.first_of(each, config.slo))]
        metrics.expect(promised, {0, *(key.priority for key in config.keys)})
        engine.observe(metrics)
        self._inner: ASGIApp = self._guarded
        if config.allowed_origins:
            self._inner = CORSMiddleware(
                self._guarded,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
                expose_headers=_EXPOSED,
            )

    def drain(self) -> None:
        """Refuse what is still being received, and let no refusal wait: the engine drains."""
        self.bodies.drain()
        self.refusals.drain()

    # Made when they are first asked for: most servers never are.

    @cached_property
    def openapi(self) -> dict[str, Any]:
        return docs.openapi(self.routes, self.config)

    @cached_property
    def docs_page(self) -> bytes:
        return docs.page(self.openapi)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give a request its context, and one line in the log when it is over."""
        if scope["type"] != "http":
            await Router()(scope, receive, send)
            return
        headers = _joined(scope["headers"])
        given = headers.get(b"x-request-id")
        valid = given is not None and _REQUEST_ID.fullmatch(given) is not None
        context = scope[CONTEXT] = RequestContext(
            given.decode() if given and valid else uuid.uuid4().hex,
            scope["method"],
            scope["path"].removeprefix(scope.get("root_path", "")),
            headers,
            scope.get("query_string", b""),
            scope.get(CYCLE),
        )
        request_id = (b"x-request-id", context.request_id.encode())
        complete = False

        async def tell(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message["headers"] = [*message.get("headers", ()), request_id]
                if context.account is not None:
                    message["headers"] += context.account.headers()
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            if given is not None and not valid:
                refusal = ApiError(400, "X-Request-Id must be 1 to 128 visible ASCII characters")
                await _answer_error(tell, context, refusal)
            elif (refused := self._misdirected(context)) is not None:
                await _answer_error(tell, context, refused)
            else:
                await self._inner(scope, receive, tell)
        finally:
            if not complete:  # whatever its head said
                context.status = 500
            self._finish(context)

    def _misdirected(self, context: RequestContext) -> ApiError | None:
        host = context.headers.get(b"host")  # None: HTTP/1.0, which no browser speaks
        if host is None or self._is_own_host(host.decode("latin-1")):
            return None
        return ApiError(
            421,
            f"the host {host.decode('latin-1')!r} is not one of this server's names "
            "(--allowed-hosts adds names)",
        )

    def _finish(self, context: RequestContext) -> None:
        context.ended = time.monotonic()
        if context.client_gone:
            context.status = context.cut_off or _CLIENT_CLOSED
        route = self._paths.get(context.path)
        # A probe's refusal is its answer, and what the engine has taken is counted by how it ends.
        probe = route is not None and route.open
        if context.status >= 400 and not probe and not context.submitted:
            self.metrics.refuse(context.refusal or reason_of(context.status), context.client)
        # What scanners make up must not become time series.
        self.metrics.http(
            "other" if route is None else context.path,
            context.method if context.method in _METHODS else "other",
            context.status,
        )
        if self._trace is not None:
            context.trace_id = self._trace(context)
        if self.config.access_log:
            routine = route is not None and route.polled and context.status < 400
            log_access(context, logging.DEBUG if routine else logging.INFO)

    def refused(self, status: int) -> None:
        """Count what was no request, or was answered before all of its head was there."""
        self.metrics.http("other", "other", status)
        self.metrics.refuse(reason_of(status), "")

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with an error object for whatever is raised inside."""
        context: RequestContext = scope[CONTEXT]
        try:
            answer = await self._settled(scope, context, receive, send)
            if isinstance(answer, tuple):
                await send_whole(send, *answer)
            elif answer is not None:
                body = answer if isinstance(answer, bytes) else json.encode(answer)
                await send_whole(send, body)
        except ClientGone:
            context.client_gone = True
        except asyncio.CancelledError:  # of whoever has not been answered when the server stops
            if not self.engine.draining:
                raise
            await _answer_error(send, context, draining())
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no `Exception`
            await _answer_error(send, context, as_api_error(error))

    async def _settled(
        self, scope: Scope, context: RequestContext, receive: Receive, send: Send
    ) -> object:
        """Return the handler's answer, and charge the key for what the request costs."""
        try:
            return await self._route(scope, context).handler(self, context, receive, send)
        except (ApiError, InvalidParameter, AdmissionError) as error:
            # Its traceback has the frames that hold the body, and all that came of it.
            if is_fault_of_client(error.with_traceback(None)):
                if context.charge is not None:
                    context.charge.fault(context.body_bytes)
                await self.refusals.pay(context, receive)
            raise
        except ClientGone:
            if context.charge is not None and context.body_bytes and not context.submitted:
                context.charge.fault(context.body_bytes)  # it has been read all the same
            raise
        finally:
            if context.charge is not None:
                context.charge.close()

    def _route(self, scope: Scope, context: RequestContext) -> HttpRoute:
        """Return the route of a request that may use it. Raises `ApiError` 401, 404 or 405."""
        route = self._paths.get(context.path)
        if self._accounts and (route is None or not route.open):
            self._check_key(context)
        for other in self.routes:
            if route is None and other.prefix and context.path.startswith(other.prefix):
                route = other
        if route is None:
            hint = "; see /docs" if self.config.docs else ""
            raise ApiError(404, f"there is no {scope['path']} here{hint}")
        if context.method not in route.methods:
            allow = {"Allow": ", ".join(route.methods)}
            raise ApiError(405, "Method Not Allowed", headers=allow)
        return route

    def _check_key(self, context: RequestContext) -> None:
        scheme, _, key = context.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            context.account = self._accounts.get(digest(key.strip()))
        if context.account is None:
            authenticate = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "the API key is missing or wrong", headers=authenticate)


async def _answer_error(send: Send, context: RequestContext, failure: ApiError) -> None:
    # Not in the frame that caught it: the error would hold that frame, and so the request's body.
    context.error_type = failure.type
    if not context.status:
        context.refusal = failure.reason
        await send_whole(send, failure.body(), status=failure.status, headers=failure.headers)


def _joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the headers by name. One that is given several times is one list (RFC 9110, 5.3)."""
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    return {name: b", ".join(given) for name, given in values.items()}
