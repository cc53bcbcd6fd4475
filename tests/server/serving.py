"""A real engine on a simulated executor, and a real server on a free port of loopback."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from serve_fakes import VOCAB, ByteTokenizer, served_model

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.clock import Clock
from octavo.engine.engine import Engine
from octavo.engine.step_time import StepTimePredictor, guessed
from octavo.executor.base import Batch, StepResult
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.kv_cache.layout import KvLayout
from octavo.models.config import Activation, Layer, ModelConfig, Rope
from octavo.models.families import program
from octavo.sampling.scripted import ScriptedSampler
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.server.app import App, Trace
from octavo.server.clients import Clients
from octavo.server.config import ServeConfig
from octavo.server.metrics import Metrics
from octavo.server.model import ServedModel
from octavo.server.server import bind, http_server
from patience import until

TINY = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    context_length=512,
    norm_eps=1e-5,
    activation=Activation.SILU,
    attention_scale=0.25,
    tied_embeddings=True,
    layers=(Layer(Rope(10000.0, 16, False)),) * 2,
)


class PacedExecutor(SimulatedExecutor):
    """Each step takes ``pause`` seconds at least."""

    pause = 0.0

    def execute(self, batch: Batch) -> StepResult:
        time.sleep(self.pause)
        return super().execute(batch)


def real_engine(
    *, pause: float = 0.0, num_blocks: int = 1024, hang_timeout: float = 60.0, **limits: Any
) -> tuple[AsyncEngine, PacedExecutor]:
    compute = program(TINY)
    layout = KvLayout.of(TINY)
    executor = PacedExecutor(compute, layout, num_blocks=num_blocks)
    executor.pause = pause
    tokenizer = ByteTokenizer()
    limits = {"max_model_len": 512, "max_num_seqs": 64, "max_logits_rows": 256} | limits
    engine = Engine(
        executor,
        Scheduler(SchedulerConfig(**limits), layout, num_blocks),
        ScriptedSampler(VOCAB),
        Clock(),
        vocab_size=VOCAB,
        eos_token_ids=tokenizer.eos_token_ids,
        step_times=StepTimePredictor(executor.costs, guessed(1), measured=False)
        if "itl_target" in limits
        else None,
        tokenizer=tokenizer,
    )
    return AsyncEngine(engine, hang_timeout=hang_timeout), executor


@asynccontextmanager
async def started(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def listening(
    engine: Any,
    trace: Trace | None = None,
    metrics: Metrics | None = None,
    clients: Clients | None = None,
    model: ServedModel | None = None,
    **config: Any,
) -> AsyncIterator[str]:
    """A server for ``engine`` in this loop; gives its URL."""
    settings = ServeConfig(**({"port": 0, "allowed_hosts": ("*",)} | config))
    listener = bind(settings)
    app = App(engine, model or served_model(), settings, metrics, trace, clients)
    server = http_server(app)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started or task.done(), "the server")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task


@asynccontextmanager
async def serving(
    config: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncEngine, PacedExecutor]]:
    """A client of a server with ``config`` for a real engine with ``settings``."""
    engine, executor = real_engine(**settings)
    limits = httpx.Limits(max_connections=None)
    async with (
        started(engine),
        listening(engine, **(config or {})) as url,
        httpx.AsyncClient(base_url=url, limits=limits) as client,
    ):
        yield client, engine, executor
