"""A server with everything that has metrics, and traffic in which all of it happens."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from serving import listening, real_engine, started

from engine.connecting import per_token
from engine.drafting import Coin
from octavo.engine.calibration import Prediction
from octavo.executor.cost import Rates
from octavo.kv_cache.connectors.disk import Disk
from octavo.kv_cache.connectors.host import HostMemory
from octavo.kv_cache.connectors.manager import ConnectorManager
from octavo.kv_cache.transfer_cost import TransferCost
from octavo.server.metrics import Metrics
from octavo.spec_decode.speculator import Speculator
from patience import PATIENCE, until

MODEL = "tiny"
KEY = "secret"
HEADERS = {"authorization": f"Bearer {KEY}"}


@asynccontextmanager
async def observed_server(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Metrics]]:
    """A calibrated server that speculates, with a key, a bound on its queue and a cache so small
    that sequences are preempted and blocks moved to host memory and disk, in ``folder``.
    """
    engine, executor = real_engine(
        pause=0.001,
        num_blocks=24,
        max_num_seqs=8,
        max_num_queued_reqs=6,
        itl_target=0.5,  # ms, less than any step takes
        scheduling_policy="priority",
        max_queue_time=0.1,
    )
    drafter = Coin(0.6, engine.engine.sampler)
    drafter.speculator = Speculator(drafter, engine.engine.vocab_size, 3)
    engine.engine.speculator = drafter.speculator
    kv = engine.engine.scheduler.kv
    size = kv.layout.block_bytes
    kv.attach(
        ConnectorManager(
            b"engine",
            HostMemory(16, size),
            [Disk(folder, b"engine", size, 1 << 20)],
            cost=TransferCost(size, kv.layout.block_size, per_token(1.0), 1, time.perf_counter),
        )
    )
    kv.connectors.register_kv_caches(executor)
    metrics = Metrics(MODEL, engine.stats, 512)
    metrics.info("build_info", "The program.", {"version": "1"})
    metrics.info("cache_config_info", "The paged cache.", {"block_size": 16, "num_blocks": 24})
    prediction = Prediction(engine.engine, Rates(step_overhead=0.001))
    prediction.tell = metrics.predicting(lambda: prediction.ratio)
    engine.observe(prediction)
    async with (
        started(engine),
        listening(engine, metrics=metrics, api_key=(KEY,)) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE, headers=HEADERS) as client,
    ):
        yield client, metrics


async def make_traffic(client: httpx.AsyncClient, metrics: Metrics) -> None:
    """Answers that end by themselves, at a limit and by an abort; promises kept and broken; cached
    prompts, preemptions, refusals of every kind.
    """

    async def post(**body: Any) -> int:
        settings = {"prompt": "x" * 40, "max_tokens": 40, "ignore_eos": True} | body
        return (await client.post("/v1/completions", json=settings)).status_code

    async def serve(**body: Any) -> None:
        async def served() -> bool:  # a busy machine may keep it waiting too long
            status = await post(**body)
            assert status in (200, 429)
            return status == 200

        await until(served, "an answer")

    await serve(slo={"ttft": 10_000.0, "tpot": 10_000.0})
    await serve(slo={"ttft": 0.001})
    await serve(ignore_eos=False, stop_token_ids=list(range(128)), n=2)
    for prompt in ("a", "b", "c", "d", "a", "b", "c", "d"):  # more than the pool holds
        await serve(prompt=prompt * 200)
    assert await post(max_tokens=0) == 400
    assert await post(prompt="x" * 500) == 400

    def shed() -> float:
        labels = {"model_name": MODEL, "engine": "0", "reason": "shed"}
        found = metrics.registry.get_sample_value("octavo:admission_rejections_total", labels)
        assert found is not None
        return found

    before, seen = shed(), set[int]()
    for _ in range(20):  # until some are served, some refused, and somebody has waited too long
        posts = (
            post(prompt=f"{i}" * 60, max_tokens=120, priority=i % 2, slo={"tpot": 10_000.0})
            for i in range(30)
        )
        seen |= {*await asyncio.gather(*posts)}
        if shed() > before and len(seen) == 2:
            break
    assert shed() > before
    assert seen == {200, 429}
    with suppress(httpx.TimeoutException):
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        await client.post("/v1/completions", json=body, timeout=0.05)
    await client.get("/nothing")
