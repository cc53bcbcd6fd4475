"""`octavo serve`: set up the log, bind, load, serve, drain on a signal, exit."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from prometheus_client import disable_created_metrics

from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import load_engine
from octavo.extras import install_command
from octavo.loader.base import ChatTemplate
from octavo.loader.chat_template import problem
from octavo.server.clients import Clients, raise_file_limit
from octavo.server.config import ServeConfig
from octavo.server.logs import set_up_logging
from octavo.server.server import EngineHangs, Server, bind, bounded, build_server

if TYPE_CHECKING:
    from octavo.server.tracing import Tracer

log = logging.getLogger("octavo.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NICE = 5  # steps of niceness; a single one is still in the scheduler's discretion


def run(model: str | Path, engine: EngineConfig, serve: ServeConfig) -> int:
    """Load ``model`` and serve it until a signal.

    Returns the exit code: 0 after a drain, 1 if the address cannot be had. Raises what
    `load_engine` raises, and `SettingsError` if traces cannot be sent. If the engine hangs at the
    end, the process exits with code 1.
    """
    # They are a third of a scrape, and Prometheus does not read them.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    set_up_logging(serve.log_level, serve.log_format, serve.access_log_format)
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
        server = build_server(loaded, serve, model, tracer, Clients.of_files(files))
        if (template := loaded.checkpoint.chat_template) is not None:
            threading.Thread(target=_try_template, args=(template,), daemon=True).start()
        return uvloop.run(_serve(server, listener))
    finally:
        if tracer is not None:
            tracer.close()
        listener.close()
        _remove_socket_file(serve.uds)


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


def _try_template(template: ChatTemplate) -> None:
    """Warn at the start of what the first chat would find out."""
    if (reason := problem(template)) is not None:
        log.warning("chats will be refused, the chat template cannot be used: %s", reason)


async def _serve(server: Server, listener: socket.socket) -> int:
    """Serve until one of `_SIGNALS`, then drain; a second one ends the process at once."""
    config, loop = server.app.config, asyncio.get_running_loop()
    draining: asyncio.Task[None] | None = None

    def on_signal(which: signal.Signals) -> None:
        nonlocal draining
        if draining is not None:
            log.warning("%s again: stopping at once", which.name)
            _exit_now(128 + which, config)
        log.info("%s: draining, for at most %g s", which.name, config.shutdown_timeout)
        draining = loop.create_task(server.drain())

    def ready() -> None:
        give_way(server.engine.thread)
        for which in _SIGNALS:
            # nohup ignores SIGHUP: the end of the terminal is no reason to stop.
            if which is not signal.SIGHUP or signal.getsignal(which) is not signal.SIG_IGN:
                loop.add_signal_handler(which, on_signal, which)
        log.info("listening on %s (docs at /docs)", _url(listener, config))

    try:
        await server.serve(listener, ready)
    except EngineHangs:
        log.error("the engine hangs: ending without it")
        _exit_now(1, config)
    return 0


def give_way(engine: threading.Thread) -> None:
    """Lower the priority of the engine's thread, and of those that compute for it: all threads of
    this process that Python has not started. Linux only, where each thread has its own niceness.

    The event loop's work comes in short pieces, and clients wait for each of them, while the
    threads that compute keep every core busy for the whole of a step. With equal priorities a piece
    waits until one of these has used up its slice: that is most of the time that a busy server
    takes to answer 429.
    """
    if sys.platform != "linux":
        return
    own = {thread.native_id for thread in threading.enumerate() if thread is not engine}
    own.add(os.getpid())  # the main thread; after a fork threading has the parent's number for it
    for thread_id in map(int, os.listdir("/proc/self/task")):
        if thread_id not in own:
            with suppress(OSError):  # it has ended meanwhile
                niceness = os.getpriority(os.PRIO_PROCESS, thread_id)
                os.setpriority(os.PRIO_PROCESS, thread_id, niceness + _NICE)


def _exit_now(code: int, config: ServeConfig) -> None:
    """Exit without waiting for any thread."""
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
