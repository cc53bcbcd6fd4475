"""What refused bodies cost is charged to their key, and takes a small share of the time."""

import asyncio
import json
import threading
from hashlib import sha256
from typing import Any

import httpx
import pytest
from serve_fakes import ByteTokenizer, FakeEngine, PlainTemplate
from serving import listening
from starlette.types import Message

from octavo.server.api_keys import ApiKey
from octavo.server.clients import Clients
from octavo.server.context import RequestContext
from octavo.server.errors import ClientGone
from octavo.server.workers import SMALL, Refusals, Workers
from patience import PATIENCE, until


def test_all_that_is_refused_takes_a_tenth_of_the_time() -> None:
    now, worked = 0.0, 0.0
    refusals = Refusals(lambda: now)
    assert refusals.delay_s("a", 1000, 0.001) == 0.0  # at once: it is next to nothing
    now = 100.0
    for _ in range(50):  # a sender that comes again as soon as it is told
        worked += 0.02
        now += 0.02
        now += refusals.delay_s("a", 0, 0.02)
    assert worked <= 0.1 * (now - 100.0 + 2.0) + 0.01
    assert now - 100.0 > 7.0
    # Several at once wait for each other, and for nobody else.
    delays = [refusals.delay_s("b", 4 << 20, 0.1) for _ in range(4)]
    assert delays == sorted(delays)
    assert delays[0] == 0.0  # once is nothing
    assert delays[-1] > 2.0
    assert refusals.delay_s("c", 100, 0.0) == 0.0


def test_no_refusal_is_later_than_half_a_minute() -> None:
    """Whoever else has no key has sent ever so many, and as soon as they stop it is over."""
    now = 0.0
    refusals = Refusals(lambda: now)
    for _ in range(1000):
        assert refusals.delay_s("", 4 << 20, 1.0) <= 30.0
    now = 32.0
    assert refusals.delay_s("", 100, 0.0) == 0.0


async def test_who_waits_for_a_refusal_is_let_go() -> None:
    """When its client has left, and when the server drains."""
    refusals = Refusals()
    refusals.delay_s("", 1, 1.0)  # others' bodies: from now on each waits

    async def never() -> Message:
        return await asyncio.Future()

    async def left() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    nothing_read, read = (RequestContext("id", "POST", "/", body_bytes=size) for size in (0, 100))
    with pytest.raises(ClientGone):
        await refusals.pay(read, left)
    await refusals.pay(nothing_read, never)
    waits = asyncio.create_task(refusals.pay(read, never))
    done, _ = await asyncio.wait([waits], timeout=0.05)
    assert not done
    refusals.drain()
    await waits


async def test_a_refused_body_is_charged(make_client: Any, engine: FakeEngine) -> None:
    """The request, and tokens by its length; a quota of either keeps the next one out."""
    keys = (
        ApiKey(name="requests", digest=sha256(b"sk-requests").digest(), max_requests_per_minute=2),
        ApiKey(name="tokens", digest=sha256(b"sk-tokens").digest(), max_tokens_per_minute=30_000),
    )
    client = make_client(named_keys=keys)
    body = json.dumps({"prompt": "a", "logit_bias": {str(key): 0 for key in range(9000)}}).encode()
    assert len(body) > 60_000
    for name in ("requests", "tokens"):
        headers = {"authorization": f"Bearer sk-{name}", "content-type": "application/json"}
        found = [
            (await client.post("/v1/completions", content=body, headers=headers)).status_code
            for _ in range(3)
        ]
        assert found == [400, 400, 429]
    assert not engine.submitted


async def test_whose_client_leaves_while_it_is_read_is_charged(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it takes as long as if somebody waited for the answer."""
    going, begun = threading.Event(), threading.Event()
    encode = ByteTokenizer.encode

    def slow(self: ByteTokenizer, text: str, **kwargs: Any) -> list[int]:
        begun.set()
        going.wait(PATIENCE)
        return encode(self, text, **kwargs)

    monkeypatch.setattr(ByteTokenizer, "encode", slow)
    key = ApiKey(name="a", digest=sha256(b"sk-a").digest(), max_requests_per_minute=1)
    headers = {"authorization": "Bearer sk-a"}
    clients = Clients()
    async with (
        listening(engine, clients=clients, named_keys=(key,)) as url,
        httpx.AsyncClient(base_url=url, headers=headers) as client,
    ):
        body = {"prompt": "a", "max_tokens": 1}
        leaves = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(begun.is_set)
        leaves.cancel()
        await until(lambda: not len(clients))
        going.set()
        assert (await client.post("/v1/completions", json=body)).status_code == 429
    assert not engine.submitted


async def test_small_bodies_do_not_wait_for_large_ones() -> None:
    """Nor texts for chats, whose templates may take their time."""
    going = threading.Event()
    workers = Workers()
    waiting = [
        workers.run(lambda _: going.wait(PATIENCE), bytes(size), kind)
        for kind, size, count in (
            ("text", SMALL + 1, 10), ("chat", SMALL + 1, 10), ("chat", 1, 100)
        )
        for _ in range(count)
    ]  # fmt: skip
    assert await workers.run(len, b"abc", "text") == 3
    going.set()
    assert all(await asyncio.gather(*waiting))


async def test_a_completion_does_not_wait_for_templates(
    make_client: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, begun = threading.Event(), []
    render = PlainTemplate.render

    def slow(self: PlainTemplate, messages: Any, **kwargs: Any) -> str:
        if messages[0]["content"] == "slow":
            begun.append(1)
            going.wait(PATIENCE)
        return render(self, messages, **kwargs)

    monkeypatch.setattr(PlainTemplate, "render", slow)
    client: httpx.AsyncClient = make_client()

    def chat(content: str) -> asyncio.Task[httpx.Response]:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return asyncio.create_task(client.post("/v1/chat/completions", json=body))

    slow_ones = [chat("slow") for _ in range(12)]
    await until(lambda: len(begun) == 12)
    answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200
    assert (await chat("quick")).status_code == 200
    going.set()
    for task in slow_ones:
        assert (await task).status_code == 200
