"""Every refusal is counted once, by its reason: all ways to be refused, against the counters."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_fakes import ByteTokenizer
from serving import listening, real_engine, started

from octavo.serve.keys import ApiKey, digest
from octavo.serve.metrics.requests import REJECTIONS
from patience import Leave, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}

# (path, body, status): JSON, or bytes as they are
BODIES: list[tuple[str, Any, int]] = [
    (COMPLETIONS, b"{", 400),
    (COMPLETIONS, b"[]", 400),
    (COMPLETIONS, b"\xff", 400),
    (COMPLETIONS, b'{"prompt": "a", "prompt": "a"}', 400),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400),
    (COMPLETIONS, {}, 400),
    (COMPLETIONS, ASK | {"unknown": 1}, 400),
    (COMPLETIONS, ASK | {"suffix": "a"}, 400),
    (COMPLETIONS, ASK | {"temperature": 1e6}, 400),
    (COMPLETIONS, ASK | {"priority": 1}, 400),
    (COMPLETIONS, ASK | {"max_tokens": 0}, 400),
    (COMPLETIONS, ASK | {"prompt": "x" * 600}, 400),
    (COMPLETIONS, ASK | {"prompt": [-1]}, 400),
    (COMPLETIONS, ASK | {"n": 2000}, 400),
    (COMPLETIONS, ASK | {"model": "other"}, 404),
    (COMPLETIONS, b"x" * 5000, 413),
    (CHAT, SAY | {"tools": [{"type": "function"}]}, 400),
    (CHAT, SAY | {"messages": []}, 400),
    (CHAT, SAY | {"messages": [{"role": "user", "content": [IMAGE]}]}, 400),
    (CHAT, SAY | {"response_format": {"type": "json_object"}}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a"}] * 2}, 400),
    (CHAT, SAY | {"model": "other"}, 404),
    ("/tokenize", {}, 400),
    ("/detokenize", {"tokens": [9999]}, 400),
]
WITHOUT_BODY: list[tuple[str, str, dict[str, str], int]] = [
    ("GET", "/v1/models/other", {}, 404),
    ("GET", "/nothing", {}, 404),
    ("PUT", COMPLETIONS, {}, 405),
    ("GET", "/requests?limit=x", {}, 400),
    ("GET", "/metrics", {"authorization": "Bearer wrong"}, 401),
    ("POST", COMPLETIONS, {"authorization": ""}, 401),
    ("POST", COMPLETIONS, {}, 415),
    ("POST", COMPLETIONS, {"content-type": "text/plain"}, 415),
    ("POST", CHAT, {"content-type": "application/json", "content-encoding": "gzip"}, 415),
    ("GET", "/version", {"host": "evil.example"}, 421),
    ("GET", "/version", {"x-request-id": "a b"}, 400),
]
# What is refused before it is a request to the application.
RAW = [
    (b"nonsense\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 501),
    (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * (99 << 10), 431),
]
REASONS = {
    400: "invalid", 401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "invalid",
    413: "invalid", 415: "invalid", 421: "misdirected", 431: "invalid", 500: "error",
    501: "invalid", 503: "draining",
}  # fmt: skip


async def test_each_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor = real_engine(max_num_queued_reqs=1, max_num_seqs=1)
    keys = (
        ApiKey(name="k", digest=digest(b"k")),
        ApiKey(name="once", digest=digest(b"once"), max_requests_per_minute=1),
        ApiKey(name="low", digest=digest(b"low"), priority=5),
    )
    expected: Counter[str] = Counter()

    async with (
        started(engine),
        listening(
            engine, named_keys=keys, max_request_bytes=4096, allowed_hosts=("localhost",)
        ) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        client.headers["authorization"] = "Bearer k"
        place = urlsplit(url)

        async def counted() -> tuple[Counter[str], dict[str, float], float]:
            """By reason, of each client, and all answers that are errors."""
            text = (await client.get("/metrics")).text
            samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
            reasons = Counter[str]()
            clients: dict[str, float] = {}
            errors = 0.0
            for sample in samples:
                if sample.name == "octavo:admission_rejections_total":
                    reasons[sample.labels["reason"]] = int(sample.value)
                if (
                    sample.name == "octavo:client_requests_total"
                    and sample.labels["outcome"] == "rejected"
                ):
                    clients[sample.labels["client"]] = sample.value
                if (
                    sample.name == "octavo:http_requests_total"
                    and int(sample.labels["status"]) >= 400
                ):
                    errors += sample.value
            return reasons, clients, errors

        async def refused(status: int, answer: Awaitable[httpx.Response], reason: str = "") -> None:
            response = await answer
            assert response.status_code == status, response.text
            assert response.json()["error"]["code"] == status
            expected[reason or REASONS[status]] += 1

        def post(path: str, body: Any, **more: Any) -> Awaitable[httpx.Response]:
            if isinstance(body, bytes):
                more["headers"] = {"content-type": "application/json"} | more.get("headers", {})
                return client.post(path, content=body, **more)
            return client.post(path, json=body, **more)

        for path, body, status in BODIES:
            await refused(status, post(path, body))
        for method, path, headers, status in WITHOUT_BODY:
            await refused(status, client.request(method, path, headers=headers))
        for sent, status in RAW:
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(sent)
            assert int((await reader.readline()).split()[1]) == status
            writer.close()
            expected[REASONS[status]] += 1
        low = {"authorization": "Bearer low"}
        await refused(403, post(COMPLETIONS, ASK | {"priority": 1}, headers=low))
        once = {"authorization": "Bearer once"}
        assert (await post(COMPLETIONS, ASK, headers=once)).status_code == 200
        await refused(429, post(COMPLETIONS, ASK, headers=once), "quota")

        with monkeypatch.context() as patch:
            patch.setattr(ByteTokenizer, "encode", _fail)
            await refused(500, post(COMPLETIONS, ASK))
            await refused(500, post("/tokenize", {"prompt": "a"}))

        # One that leaves before its body is there.
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"
            "content-type: application/json\r\ncontent-length: 99\r\n\r\n{".encode()
        )
        await writer.drain()
        writer.transport.abort()
        expected["gone"] += 1

        steps = Leave(executor)
        tasks = [asyncio.create_task(_response(post(COMPLETIONS, ASK))) for _ in range(2)]
        await until(lambda: engine.stats().running and engine.stats().waiting, "a full queue")
        for stream in (False, True):
            await refused(429, post(COMPLETIONS, ASK | {"stream": stream}), "capacity")
            await refused(429, post(CHAT, SAY | {"stream": stream}), "capacity")
        assert (await client.get("/ready")).status_code == 503  # its answer, and no refusal
        steps.let_all()
        assert [(await task).status_code for task in tasks] == [200, 200]

        async def all_counted() -> bool:
            return (await counted())[0]["gone"] == 1

        await until(all_counted, "the one that left")
        found, clients, errors = await counted()
        assert {reason: found[reason] for reason in REJECTIONS if found[reason]} == expected
        assert sum(clients.values()) == expected.total()
        assert errors == expected.total() + 1  # and the probe
        engine._draining = True
        await refused(503, post(COMPLETIONS, ASK))
        await refused(503, post(CHAT, SAY))
        assert (await counted())[0]["draining"] == 2


def _fail(*_: Any, **__: Any) -> list[int]:
    raise RuntimeError("a fault")


async def _response(answer: Awaitable[httpx.Response]) -> httpx.Response:
    return await answer
