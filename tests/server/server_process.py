"""A server on the fake engine as a process of its own: ``server_process.py '{config as JSON}'``."""

import asyncio
import json
import resource
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import serve_fakes

from octavo.engine.config import EngineConfig
from octavo.server import process, server
from octavo.server.config import ServeConfig


class StartingEngine(serve_fakes.FakeEngine):
    """Takes a LoadedEngine's engine's place in `process.run`."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        self.thread = threading.Thread()

    async def _run(self, stream: serve_fakes.FakeStream) -> None:
        """A token, and the others when the file ``gate`` is there."""
        stream.step()
        while (gate := settings.get("gate")) and not Path(gate).exists():
            await asyncio.sleep(0.005)
        await super()._run(stream)

    async def start(self) -> None: ...

    async def stop(self) -> None:
        if settings.get("hang"):
            await asyncio.to_thread(threading.Event().wait)


settings: dict[str, Any] = json.loads(sys.argv[1])
if files := settings.get("files"):
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
checkpoint = SimpleNamespace(
    path=Path("tiny.gguf"),
    tokenizer=serve_fakes.ByteTokenizer(),
    chat_template=serve_fakes.PlainTemplate(),
    generation_config={},
)
loaded = SimpleNamespace(
    engine=SimpleNamespace(observers=[]),
    checkpoint=checkpoint,
    config=EngineConfig(scheduling_policy=settings.get("policy") or "fcfs"),
    max_model_len=512,
    num_blocks=32,
    report=lambda: "model: tiny\nstop tokens: <eos>",
)
cast(Any, process).load_engine = lambda model, config: loaded
patched = cast(Any, server)
patched.AsyncEngine = StartingEngine
patched.Calibration = SimpleNamespace(of_engine=lambda loaded: None)
patched._STOP_TIMEOUT_S = 0.2
serve = ServeConfig(**settings["serve"])
sys.exit(process.run("tiny", loaded.config, serve))
