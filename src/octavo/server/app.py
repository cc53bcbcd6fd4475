"""The ASGI application: its routes and the layers around them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.engine.async_engine import AsyncEngine
from octavo.scheduler.request import LatencyTarget
from octavo.server import chat, completions, routes
from octavo.server.body import Bodies
from octavo.server.clients import Clients
from octavo.server.config import ServeConfig
from octavo.server.docs import docs_routes
from octavo.server.gate import Door, Gate, Trace
from octavo.server.generate import Generate
from octavo.server.hosts import Hosts
from octavo.server.inspection import Inspection
from octavo.server.keys import Keyring
from octavo.server.metrics import Metrics
from octavo.server.model import ServedModel
from octavo.server.refusals import Refusals
from octavo.server.workers import Workers

# What a page of another origin may read of an answer's headers.
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


class App(Gate):
    """The server as an ASGI application."""

    def __init__(
        self, clients: Clients, bodies: Bodies, refusals: Refusals, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.clients = clients
        self._bodies = bodies
        self._refusals = refusals

    def drain(self) -> None:
        """Refuse what is still being received, and let no refusal wait, for the engine drains."""
        self._bodies.drain()
        self._refusals.drain()


def create_app(
    engine: AsyncEngine,
    model: ServedModel,
    config: ServeConfig,
    metrics: Metrics | None = None,
    trace: Trace | None = None,
    clients: Clients | None = None,
) -> App:
    """The engine is started and stopped by the caller."""
    if metrics is None:
        metrics = Metrics(model.name, engine.stats, model.max_model_len)
    clients = Clients() if clients is None else clients
    metrics.clients(clients, lambda: engine.unsent)
    metrics.expect(_promised(config), {0, *(key.priority for key in config.keys)})
    engine.observe(metrics)
    bodies = Bodies(config.max_request_bytes)
    workers, refusals = Workers(), Refusals()
    models = routes.Models(model)
    probes = routes.Probes(engine, workers)
    generate = partial(Generate, engine, config, metrics, bodies, workers, refusals)
    # Threads of their own, so that neither takes the other's place.
    worker = partial(routes.Worker, bodies, Workers(threads=1), refusals)
    get, post = ["GET"], ["POST"]
    table = [
        Route("/v1/models", models.list, methods=get),
        Route("/v1/models/{model:path}", models.get, methods=get),
        Route(
            "/v1/completions",
            generate(partial(completions.prepare, model, config), "text"),
            methods=post,
        ),
        Route(
            "/v1/chat/completions",
            generate(partial(chat.prepare, model, config), "chat"),
            methods=post,
        ),
        Route("/tokenize", worker(partial(routes.tokenize, model), "chat"), methods=post),
        Route("/detokenize", worker(partial(routes.detokenize, model), "text"), methods=post),
        Route("/health", probes.live, methods=get),
        Route("/ping", probes.live, methods=get),
        Route("/live", probes.live, methods=get),
        Route("/ready", probes.ready, methods=get),
        Route("/metrics", routes.MetricsRoute(metrics), methods=get),
        Route("/requests", Inspection(engine, model).answer, methods=get),
        Route("/version", routes.version, methods=get),
        *(docs_routes(config) if config.docs else ()),
    ]
    app: ASGIApp = Door(
        Router(
            table,
            redirect_slashes=False,
            default=partial(_not_found, "; see /docs" if config.docs else ""),
        ),
        Keyring(config.keys, engine.fair_queue),
        lambda: engine.draining,
    )
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=_EXPOSED,
        )
    paths = frozenset(route.path for route in table)
    return App(
        clients,
        bodies,
        refusals,
        Hosts(app, config),
        metrics.http,
        paths,
        access_log=config.access_log,
        trace=trace,
        refuse=metrics.refuse,
    )


def _promised(config: ServeConfig) -> Iterator[LatencyTarget]:
    """What is promised to those who ask for nothing."""
    for own in (None, *(key.target for key in config.keys)):
        if (target := LatencyTarget.first_of(own, config.slo)) is not None:
            yield target


async def _not_found(hint: str, scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404, f"there is no {scope['path']} here{hint}")
