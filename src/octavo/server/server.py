"""The process: bind, load, say what was loaded, serve, drain on a signal."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, cast

import uvicorn
import uvloop
from prometheus_client import disable_created_metrics
from starlette.types import ASGIApp

from octavo import __version__
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.calibration import Calibration
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import LoadedEngine, load_engine
from octavo.engine.sampling_defaults import SamplingDefaults, sampling_defaults
from octavo.extras import install_command
from octavo.loader.base import ChatTemplate
from octavo.loader.chat_template import problem
from octavo.scheduler.policies.config import POLICIES
from octavo.server.app import App, create_app
from octavo.server.clients import Clients, raise_file_limit
from octavo.server.config import ServeConfig
from octavo.server.connection import Connection
from octavo.server.keys import in_effect
from octavo.server.logs import set_up_logging
from octavo.server.metrics import Metrics
from octavo.server.model import ServedModel, public_name, utf8
from octavo.server.niceness import give_way

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
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LAST_BYTES = 5  # seconds that answers already complete have to reach their clients
_STOP_TIMEOUT = 5.0  # seconds that the engine has to end its last step
_SEND_BUFFER = 256 << 10  # bytes that the system keeps for a client; Linux takes twice as many
_IDLE_BEFORE_PROBE = 30  # seconds of silence before TCP asks whether the peer still exists


def run(model: str | Path, engine: EngineConfig, serve: ServeConfig) -> int:
    """Load ``model`` and serve it until a signal.

    Returns the exit code: 0 after a drain, 1 if the address cannot be had. Raises what
    `load_engine` raises, and `SettingsError` where traces cannot be sent. With an engine that hangs
    it ends the process, with code 1.
    """
    # A third of what a scrape would be, and Prometheus does not read it.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    set_up_logging(serve.log_level, serve.log_format, serve.access_log_format)
    named, told = in_effect(serve.named_keys, engine.scheduling_policy, serve.api_key_file)
    serve = replace(serve, named_keys=named)
    for line in told:
        log.warning("%s", line)
    tracer = None if serve.otlp_traces_endpoint is None else _tracer(serve.otlp_traces_endpoint)
    files = raise_file_limit()
    try:
        # Before loading: a port that is taken is known at once.
        listener = bind(serve)
    except OSError as error:
        where = serve.uds or f"{serve.host}:{serve.port}"
        hint = " (--port takes another, 0 any free one)" if error.errno == errno.EADDRINUSE else ""
        print(f"octavo: cannot listen on {where}: {error.strerror or error}{hint}", file=sys.stderr)
        return 1
    try:
        loaded = load_engine(model, bounded(engine))
        defaults = sampling_defaults(
            loaded.checkpoint, serve.generation_config, serve.override_generation_config
        )
        calibration = Calibration.of_engine(loaded)
        if calibration is not None:
            loaded.engine.step_times.calibrate(calibration.current, calibration.noise)
        for line in (*loaded.report().splitlines(), _predictions(calibration)):
            log.info("%s", line)
        if said := defaults.report():
            log.info("%s", said)
        if serve.named_keys and engine.enable_prefix_caching:
            log.info("%s", ONE_CACHE if serve.share_prefix_cache else OWN_CACHE)
        if POLICIES[engine.scheduling_policy].by_client and len(serve.keys) < 2:
            log.warning(ONE_CLIENT, engine.scheduling_policy)
        clients = Clients.of_files(files)
        return uvloop.run(
            _serve(loaded, model, defaults, serve, listener, clients, calibration, tracer)
        )
    finally:
        if tracer is not None:
            tracer.close()
        listener.close()
        _remove_socket_file(serve.uds)


def bounded(config: EngineConfig) -> EngineConfig:
    """With a bound on what may wait, so that memory does not grow with the queue: a server is not
    to promise in silence what it cannot do in minutes.
    """
    most = config.max_num_queued_reqs
    tokens = config.max_num_queued_tokens
    return replace(
        config,
        max_num_queued_reqs=_QUEUED * config.max_num_seqs if most is None else most,
        max_num_queued_tokens=_QUEUED_TOKENS if tokens is None else tokens,
    )


def _tracer(endpoint: str) -> Tracer:
    try:
        from octavo.server.tracing import Tracer
    except ImportError as error:
        raise SettingsError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): {install_command('otel')}"
        ) from None
    try:
        return Tracer(endpoint)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _predictions(calibration: Calibration | None) -> str:
    """A line of the start report."""
    if calibration is None:
        return "step times: not calibrated (octavo calibrate MODEL), so none is predicted"
    return f"step times: predicted, as {calibration.standing}"


async def _serve(
    loaded: LoadedEngine,
    model: str | Path,
    defaults: SamplingDefaults,
    config: ServeConfig,
    listener: socket.socket,
    clients: Clients,
    calibration: Calibration | None,
    tracer: Tracer | None,
) -> int:
    tokenizer = loaded.checkpoint.tokenizer
    served = ServedModel(
        names=tuple(map(utf8, config.served_model_name or (public_name(model),))),
        tokenizer=tokenizer,
        chat_template=loaded.checkpoint.chat_template,
        max_model_len=loaded.max_model_len,
        root=utf8(public_name(model)),
        sampling_defaults=defaults.values,
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
        prediction = calibration.prediction(loaded)
        prediction.tell = metrics.predicting(lambda: prediction.ratio)
        engine.observe(prediction)
    if tracer is not None:
        tracer.spans.tell = metrics.spans
    if served.chat_template is not None:
        Thread(target=_try_template, args=(served.chat_template,), daemon=True).start()
    await engine.start()
    give_way(engine.thread)
    try:
        trace = None if tracer is None else tracer.trace
        app = create_app(engine, served, config, metrics, trace, clients)
        await serve(app, engine, config, listener)
    finally:
        try:
            async with asyncio.timeout(_STOP_TIMEOUT):
                await engine.stop()
        except TimeoutError:
            log.error("the engine hangs: ending without it")
            _exit_now(1, config)
    return 0


def _try_template(template: ChatTemplate) -> None:
    """Say at the start what would else be found out by the first chat."""
    if (reason := problem(template)) is not None:
        log.warning("chats will be refused, the chat template cannot be used: %s", reason)


def http_server(app: ASGIApp, config: ServeConfig) -> uvicorn.Server:
    """uvicorn as it is used here; it leaves the signals to `serve`."""
    clients = app.clients if isinstance(app, App) else Clients()
    refused = app.refused if isinstance(app, App) else lambda status: None
    return _Server(
        uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], partial(Connection, config, refused, clients)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            root_path=config.root_path,
            backlog=clients.backlog,
            timeout_graceful_shutdown=_LAST_BYTES,
        )
    )


async def serve(
    app: App, engine: AsyncEngine, config: ServeConfig, listener: socket.socket
) -> None:
    """Answer on ``listener`` until one of `_SIGNALS`, then drain; a second one ends at once."""
    server = http_server(app, config)
    loop = asyncio.get_running_loop()
    draining: asyncio.Task[None] | None = None

    async def drain() -> None:
        app.drain()
        await _drain(engine, config.shutdown_timeout)
        server.should_exit = True

    def on_signal(which: signal.Signals) -> None:
        nonlocal draining
        if draining is not None:
            log.warning("%s again: stopping at once", which.name)
            _exit_now(128 + which, config)
        log.info("%s: draining, for at most %g s", which.name, config.shutdown_timeout)
        draining = loop.create_task(drain())

    handled = list(_SIGNALS)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        handled.remove(signal.SIGHUP)  # nohup: the end of the terminal is no reason to stop
    for which in handled:
        loop.add_signal_handler(which, on_signal, which)
    try:
        listener.listen(app.clients.backlog)  # who reads the next line may connect
        log.info("listening on %s (docs at /docs)", _url(listener, config))
        await server.serve(sockets=[listener])
    finally:
        for which in handled:
            loop.remove_signal_handler(which)


async def _drain(engine: AsyncEngine, timeout: float) -> None:
    if await engine.drain(timeout):
        log.info("all requests have ended")
    elif engine.alive:
        log.info("timeout: the rest was aborted")
    else:
        log.error("the engine is dead or hangs: what was left has failed")


def bind(config: ServeConfig) -> socket.socket:
    """A socket bound as ``config`` says, not yet listening. Raises `OSError`."""
    if config.uds is not None:
        _refuse_foreign_file(config.uds)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(config.uds)
        except OSError:
            listener.close()
            raise
        return listener
    family, kind, protocol, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A peer that vanished without a word is noticed even while its request waits. Accepted
        # connections inherit this.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_BEFORE_PROBE)
        # What a client does not take of its answer is not the system's memory's, either.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    """Leaves the signals to `serve`, which drains before it stops."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _refuse_foreign_file(path: str) -> None:
    """Take the place of a socket nobody listens on; leave anything else alone."""
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


def _exit_now(code: int, config: ServeConfig) -> None:
    """End without waiting for any thread."""
    logging.shutdown()
    _remove_socket_file(config.uds)
    os._exit(code)


def _remove_socket_file(path: str | None) -> None:
    if path is not None:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _url(listener: socket.socket, config: ServeConfig) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}{config.root_path}/v1"
