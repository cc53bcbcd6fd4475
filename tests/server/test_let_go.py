"""Nothing is left of a request that has ended, however it ended: full passes of the garbage
collector are rare while streams run, and what waits for one has grown old in the queue.
"""

import gc
import logging
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from serving import listening, real_engine, started
from test_leaving import post
from test_overload import Poisoned

from faults import patch
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.stream import EngineDead
from octavo.sampling.params import InvalidParameter
from octavo.scheduler.request import AdmissionError
from octavo.scheduler.sequence import Sequence
from octavo.server.errors import ApiError, ClientGone
from octavo.server.reply import Reply
from patience import Leave, until

_MADE = (
    *(Reply, Sequence),
    *(ApiError, ClientGone, AdmissionError, InvalidParameter),
)


def alive() -> dict[str, int]:
    kinds = [kind for kind in map(type, gc.get_objects()) if issubclass(kind, _MADE)]
    return {kind.__name__: kinds.count(kind) for kind in kinds}


def few(left: dict[str, int], before: dict[str, int]) -> bool:
    """Whether they are not all of the three; ``before``: those of other tests."""
    return all(count - before.get(kind, 0) < 3 for kind, count in left.items())


Body = dict[str, Any]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 200),
        ("/v1/completions", {"prompt": [97, 256]}, 500),  # its step fails
        ("/v1/completions", {"prompt": "a", "max_tokens": 1000}, 400),  # beyond the context
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400),
        ("/v1/completions", {"prompt": "a", "top_p": "much"}, 400),
        ("/tokenize", {"prompt": 1}, 400),
    ],
)
async def test_who_is_answered(route: str, body: Body, status: int, streamed: bool) -> None:
    async def ask(client: httpx.AsyncClient, _: AsyncEngine, __: str) -> None:
        more = {} if route == "/tokenize" else {"stream": streamed}
        # With a seed, so that no answer begins with what the executor cannot compute.
        answer = await client.post(route, json={"max_tokens": 3, "seed": 1} | body | more)
        assert answer.status_code == status

    await nothing_is_left(ask)


@pytest.mark.parametrize("streamed", [False, True])
async def test_who_is_shed(streamed: bool) -> None:
    """While another runs who has the only place."""

    async def ask(client: httpx.AsyncClient, engine: AsyncEngine, url: str) -> None:
        await until(lambda: engine.stats().running == 0, "the end of who ran before")
        runs = await post(url)
        await until(lambda: engine.stats().running == 1)
        answer = await client.post("/v1/completions", json={"prompt": "a", "stream": streamed})
        assert answer.status_code == 429
        assert "stood in the queue" in answer.text
        runs.transport.abort()
        await until(lambda: engine.stats().running == 0)

    await nothing_is_left(ask, max_num_seqs=1, pause=0.02, max_queue_time=0.2)


@pytest.mark.parametrize("streamed", [False, True])
async def test_who_leaves(streamed: bool) -> None:
    async def ask(_: httpx.AsyncClient, engine: AsyncEngine, url: str) -> None:
        await until(lambda: engine.stats().running == 0, "the end of who ran before")
        leaves = await post(url, stream=streamed)
        await until(lambda: engine.stats().running == 1)
        leaves.transport.abort()
        await until(lambda: engine.stats().running == 0)

    await nothing_is_left(ask, pause=0.02)


async def nothing_is_left(
    ask: Callable[[httpx.AsyncClient, AsyncEngine, str], Any], **settings: Any
) -> None:
    engine, executor = real_engine(**settings)
    executor.__class__ = Poisoned
    patch(engine.admission, check_forecast=lambda *_: None)
    async with (
        started(engine),
        listening(engine) as url,
        httpx.AsyncClient(base_url=url) as client,
        AsyncExitStack() as stack,
    ):

        async def plain() -> None:  # of the last step something may be left
            body = {"prompt": "a", "max_tokens": 2}

            async def served() -> bool:  # on a slow machine this, too, is shed
                return (await client.post("/v1/completions", json=body)).status_code == 200

            for _ in range(2):
                await until(served, "an answer")

        steps = Leave(executor)  # ends nothing that runs while the loop has not seen the rest
        await stack.enter_async_context(steps.one_by_one())
        await plain()
        gc.collect()
        gc.disable()
        before = alive()
        logging.disable()  # pytest keeps what is logged, and so the frames of a step that fails
        try:
            for _ in range(3):
                await ask(client, engine, url)
            await plain()
            await until(lambda: few(alive(), before), "the end of all that was made")
        finally:
            logging.disable(logging.NOTSET)
            gc.enable()


async def test_a_dead_engine_keeps_nothing_of_those_who_ask() -> None:
    engine, _ = real_engine()
    await engine.start()
    await engine.stop()
    lengths = []
    for _ in range(3):
        with pytest.raises(EngineDead) as caught:
            engine.check_room()
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(lengths)) == 1
