"""A server around a loaded engine, apart from any process: no signals, no log set-up, no exit.

`octavo serve` runs one in a process of its own (process.py). Tests, a fleet and a notebook build
one the same way and give it a socket::

    loaded = load_engine(model, bounded(EngineConfig()))
    server = build_server(loaded, ServeConfig(), model)
    await server.serve(bind(server.app.config))
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from octavo import __version__
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.calibration import Calibration, Prediction
from octavo.engine.config import EngineConfig
from octavo.engine.load import LoadedEngine
from octavo.engine.sampling_defaults import sampling_defaults
from octavo.engine.stream import EngineDead
from octavo.scheduler.policies.config import POLICIES
from octavo.server.api_keys import in_effect
from octavo.server.app import App
from octavo.server.clients import Clients
from octavo.server.config import ServeConfig
from octavo.server.connection import Connection
from octavo.server.metrics import Metrics
from octavo.server.model import ServedModel, public_name, utf8

if TYPE_CHECKING:
    from octavo.server.tracing import Tracer

log = logging.getLogger("octavo.server")

_QUEUED = 4  # requests that may wait, for each sequence that may run
_QUEUED_TOKENS = 1 << 20  # prompt tokens that may wait: some 40 MB
ONE_CLIENT = (
    "scheduling_policy %s is the same as fcfs here: without several API keys all requests are of "
    "one client (--api-key, --api-key-file)"
)
OWN_CACHE = (
    "prefix cache: API keys of the key file share only what has the same cache_salt, which is a "
    "key's name unless the file says another (--share-prefix-cache: all share one)"
)
ONE_CACHE = (
    "prefix cache: shared by all API keys, so that each can tell by the time of an answer whether "
    "another has sent the same prompt"
)
_LAST_BYTES_S = 5  # time for answers already complete to reach their clients
_STOP_TIMEOUT_S = 5.0  # time for the engine to end its last step
_SEND_BUFFER = 256 << 10  # bytes that the system keeps for a client; Linux takes twice as many
_IDLE_BEFORE_PROBE_S = 30  # silence before TCP asks whether the peer still exists


class EngineHangs(EngineDead):
    """The engine's thread has not ended in time, and would keep the process from ending."""


class Server:
    """An engine and the application that serves it."""

    def __init__(self, engine: AsyncEngine, app: App) -> None:
        self.engine = engine
        self.app = app
        self.http = http_server(app)

    async def serve(
        self, listener: socket.socket, ready: Callable[[], None] = lambda: None
    ) -> None:
        """Run the engine and answer on ``listener`` until `drain` has ended.

        ``ready`` is called when clients may connect. Raises `EngineHangs` if it does at the end.
        """
        await self.engine.start()
        try:
            listener.listen(self.app.clients.backlog)
            ready()
            await self.http.serve(sockets=[listener])
        finally:
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self.engine.stop()
            except TimeoutError:
                raise EngineHangs("the engine has not stopped in time") from None

    async def drain(self) -> None:
        """Refuse new requests, give the others ``shutdown_timeout`` to finish, and end `serve`."""
        self.app.drain()
        if await self.engine.drain(self.app.config.shutdown_timeout):
            log.info("all requests have ended")
        elif self.engine.alive:
            log.info("timeout: the rest was aborted")
        else:
            log.error("the engine is dead or hangs: what was left has failed")
        self.http.should_exit = True


def build_server(
    loaded: LoadedEngine,
    config: ServeConfig,
    model: str | Path,
    tracer: Tracer | None = None,
    clients: Clients | None = None,
) -> Server:
    """Build a server for what was loaded from ``model``, and log what it will do.

    Raises `CheckpointError` for sampling defaults that cannot be used.
    """
    named, told = in_effect(config.named_keys, loaded.config.scheduling_policy, config.api_key_file)
    config = replace(config, named_keys=named)
    for line in told:
        log.warning("%s", line)
    defaults, of_defaults = sampling_defaults(
        loaded.checkpoint, config.generation_config, config.override_generation_config
    )
    calibration = Calibration.of_engine(loaded)
    if calibration is not None:
        loaded.engine.step_times.calibrate(calibration.current, calibration.noise)
    for line in (*loaded.report().splitlines(), _predictions(calibration), of_defaults):
        if line:
            log.info("%s", line)
    if named and loaded.config.enable_prefix_caching:
        log.info("%s", ONE_CACHE if config.share_prefix_cache else OWN_CACHE)
    if POLICIES[loaded.config.scheduling_policy].by_client and len(config.keys) < 2:
        log.warning(ONE_CLIENT, loaded.config.scheduling_policy)
    served = ServedModel(
        names=tuple(map(utf8, config.served_model_name or (public_name(model),))),
        tokenizer=loaded.checkpoint.tokenizer,
        chat_template=loaded.checkpoint.chat_template,
        max_model_len=loaded.max_model_len,
        root=utf8(public_name(model)),
        sampling_defaults=defaults,
        control_tokens_in_content=config.control_tokens_in_content,
    )
    engine = AsyncEngine(
        loaded.engine,
        hang_timeout=config.live_timeout,
        admit_within_target=config.admit_within_slo,
    )
    metrics = Metrics(served.name, engine.stats, served.max_model_len)
    metrics.info("build_info", "The program.", {"version": __version__})
    metrics.info(
        "cache_config_info",
        "The paged cache.",
        {
            "block_size": loaded.config.block_size,
            "num_blocks": loaded.num_blocks,
            "cache_dtype": loaded.config.kv_cache_dtype,
            "enable_prefix_caching": loaded.config.enable_prefix_caching,
        },
    )
    if calibration is not None:
        prediction = Prediction(loaded.engine, calibration.current)
        prediction.tell = metrics.predicting(lambda: prediction.ratio)
        engine.observe(prediction)
    trace = None
    if tracer is not None:
        tracer.tell, trace = metrics.spans, tracer.trace
    return Server(engine, App(engine, served, config, metrics, trace, clients))


def bounded(config: EngineConfig) -> EngineConfig:
    """Bound what may wait, unless ``config`` does, so that memory does not grow with the queue: a
    server should not promise in silence what it cannot do in minutes.
    """
    most, tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    return replace(
        config,
        max_num_queued_reqs=_QUEUED * config.max_num_seqs if most is None else most,
        max_num_queued_tokens=_QUEUED_TOKENS if tokens is None else tokens,
    )


def _predictions(calibration: Calibration | None) -> str:
    """Return a line of the start report."""
    if calibration is None:
        return "step times: not calibrated (octavo calibrate MODEL), so none is predicted"
    return f"step times: predicted, as {calibration.standing}"


def http_server(app: App) -> uvicorn.Server:
    """Return uvicorn as it is used here."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], partial(Connection, app)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            root_path=app.config.root_path,
            backlog=app.clients.backlog,
            timeout_graceful_shutdown=_LAST_BYTES_S,
        )
    )
    # The signals are left to the process, which drains before it stops.
    server.capture_signals = nullcontext  # type: ignore
    return server


def bind(config: ServeConfig) -> socket.socket:
    """Return a socket bound as ``config`` says, not yet listening. Raises `OSError`."""
    address: Any = config.uds
    if config.uds is not None:
        _refuse_foreign_file(config.uds)
        listener = socket.socket(socket.AF_UNIX)
    else:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    try:
        if config.uds is None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # A peer that vanished without a word is noticed even while its request waits. Accepted
            # connections inherit this.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_BEFORE_PROBE_S)
            # What a client does not take of its answer must not fill the system's memory either.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _refuse_foreign_file(path: str) -> None:
    """Remove a socket that nobody listens on. Raises `OSError` for anything else at ``path``."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(f"{path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            else:
                raise OSError(f"somebody listens on {path}")
