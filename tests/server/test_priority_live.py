"""Priorities over HTTP, on the real engine."""

import asyncio
import re

import httpx
import pytest
from serving import listening, real_engine, started

from octavo.engine.engine import Step
from octavo.scheduler.request import FinishReason, RequestRecord
from patience import PATIENCE, Leave, until

URGENT, BULK = 0, 5


class Sees:
    """When each step began and of which priorities it was; and the records of those that ended."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, list[int]]] = []
        self.ended: list[RequestRecord] = []

    def on_step(self, step: Step) -> None:
        there = [seq.owner.scheduling.priority for seq in step.scheduled.sequences]
        self.steps.append((step.started, there))

    def on_end(self, record: RequestRecord) -> None:
        self.ended.append(record)


async def test_at_the_full_limit_a_priority_request_starts_in_the_next_step() -> None:
    """Behind others that wait, too; and who gave way goes on, with the text it had begun."""
    engine, executor = real_engine(max_num_seqs=3, scheduling_policy="priority")
    sees = Sees()
    async with started(engine), listening(engine) as url:
        engine.observe(sees)

        async def ask(client: httpx.AsyncClient, index: int, **body: object) -> str:
            request = {"prompt": f"hello {index}", "seed": index, "ignore_eos": True} | body
            response = await client.post("/v1/completions", json=request)
            assert response.status_code == 200, response.text
            text: str = response.json()["choices"][0]["text"]
            return text

        async with httpx.AsyncClient(base_url=url) as client:
            bulk = [
                asyncio.create_task(ask(client, index, priority=BULK, max_tokens=100))
                for index in range(5)
            ]
            async with Leave(executor).one_by_one():
                await until(
                    lambda: (
                        sees.steps and len(sees.steps[-1][1]) == 3 and engine.stats().waiting == 2
                    )
                )
                await ask(client, 9, priority=URGENT, max_tokens=4)
                assert not any(task.done() for task in bulk)
            texts = await asyncio.gather(*bulk)
            urgent = next(record for record in sees.ended if record.scheduling.priority == URGENT)
            alone = [await ask(client, index, priority=BULK, max_tokens=100) for index in range(5)]
    began = [there for started_, there in sees.steps if started_ >= urgent.arrival]
    # It may have come while a step that it could not be in was about to begin.
    assert URGENT in began[0] or URGENT in began[1]
    first = next(there for there in began if URGENT in there)
    assert sorted(first) == [URGENT, BULK, BULK], "the limit was full, and one gave way"
    assert sum(record.preemptions for record in sees.ended) == 1
    assert texts == alone


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_gives_the_least_urgent_place_to_who_is_more_urgent(
    stream: bool,
) -> None:
    """While clients of low priority come back as soon as they are refused."""
    engine, executor = real_engine(
        max_num_seqs=1,
        max_num_queued_reqs=2,
        hang_timeout=10 * PATIENCE,  # its step waits for all that comes meanwhile
        scheduling_policy="priority",
    )
    sees = Sees()
    statuses: dict[int, list[int]] = {URGENT: [], BULK: []}
    over = False
    async with (
        started(engine),
        listening(engine) as url,
        httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=None)) as client,
    ):
        engine.observe(sees)

        async def ask(priority: int) -> httpx.Response:
            body = {"prompt": "a", "priority": priority, "max_tokens": 20, "stream": stream}
            response = await client.post("/v1/completions", json=body | {"ignore_eos": True})
            statuses[priority].append(response.status_code)
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["type"] == "RateLimitError"
            return response

        async def insist() -> None:
            while not over:
                await ask(BULK)
                await asyncio.sleep(0.01)

        steps = Leave(executor)
        bulk = [asyncio.create_task(insist()) for _ in range(8)]
        await until(lambda: steps.asked and engine.stats().waiting == 2, "a full queue")
        assert (await client.get("/ready")).status_code == 200  # for who is of priority 0
        urgent = [asyncio.create_task(ask(URGENT)) for _ in range(2)]
        await until(lambda: len(engine._calls) == 2, "two that take places")
        assert (await client.get("/ready")).status_code == 503
        refused = await ask(URGENT)  # all who wait are as urgent
        assert refused.status_code == 429
        assert statuses[URGENT] == [429]
        steps.let_all()
        assert [(await task).status_code for task in urgent] == [200, 200]
        over = True
        await asyncio.gather(*bulk)
        text = (await client.get("/metrics")).text
    assert 200 in statuses[BULK]  # and they were not kept out
    replaced = _replaced(sees)
    assert len(replaced) == 2
    for record in replaced:
        assert record.scheduling.priority == BULK
        assert (record.scheduled, record.completion_tokens) == (None, 0)
        assert "taken its place" in (record.error or "")
    counted = re.search(r'admission_rejections_total{.*reason="replaced"} (\S+)', text)
    assert counted
    assert float(counted[1]) == 2


def _replaced(sees: Sees) -> list[RequestRecord]:
    return [each for each in sees.ended if FinishReason.REPLACED in each.finish_reasons]
