"""A server that is built and used without a process of its own."""

import asyncio
import logging
import signal

import httpx

from octavo.engine.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.server.config import ServeConfig
from octavo.server.server import bind, bounded, build_server
from paths import TINY
from patience import PATIENCE


async def test_a_server_leaves_the_process_alone() -> None:
    """It answers until it has drained, and changes neither signals nor the log."""
    loggers = [logging.getLogger(name) for name in (None, "octavo", "uvicorn.error")]
    handlers = [list(logger.handlers) for logger in loggers]
    on_signal = [signal.getsignal(which) for which in signal.valid_signals()]
    loaded = load_engine(TINY, bounded(EngineConfig(kv_cache_memory_bytes=1 << 20)))
    server = build_server(loaded, ServeConfig(port=0), TINY)
    listener = bind(server.app.config)
    ready = asyncio.Event()
    serving = asyncio.create_task(server.serve(listener, ready.set))
    await asyncio.wait_for(ready.wait(), PATIENCE)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["model"] == TINY.name
        assert answer["usage"]["completion_tokens"] == 4
        assert [signal.getsignal(which) for which in signal.valid_signals()] == on_signal
    await server.drain()
    await asyncio.wait_for(serving, PATIENCE)
    assert [logger.handlers for logger in loggers] == handlers
    listener.close()
