"""Random request fields: each is answered properly or refused by name, and the server lives on."""

import asyncio
import json
import random
from typing import Any

import pytest
from serve_fakes import events, served_model
from serving import real_engine
from starlette.types import ASGIApp, Message

from octavo.server.app import App
from octavo.server.config import ServeConfig
from octavo.server.protocol import (
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    NEUTRAL_MESSAGE,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

FIELDS = sorted(
    {
        *CompletionRequest.__struct_fields__,
        *ChatRequest.__struct_fields__,
        *NEUTRAL_COMPLETION,
        *NEUTRAL_CHAT,
    }
)
KNOWN = {
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 3}),
    "/v1/chat/completions": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    ),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [97]}),
}
NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 20, 21, 128, 257, 258, 511, 512, 2**31 - 1, 2**31, 2**63, 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -1e-9, 1e-300, 1e308, -1e308, 2.0, 100.0, 100.1),
]
TEXTS = [
    *("", "a", "0", "NaN", "Infinity", "null", "user", "tiny", "text", "\0", "é", "\U0001f600"),
    *("\ufffd", "\u2028", "<eos>", "a" * 600, "\n\ndata: [DONE]\n\n", "{{ 1/0 }}", "json_object"),
]


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind in (1, 2):
        return rng.choice(NUMBERS)
    if kind in (3, 4):
        return rng.choice(TEXTS)
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {
            rng.choice([*TEXTS, "role", "content", "type", "text", *NEUTRAL_MESSAGE]): value(
                rng, depth + 1
            )
            for _ in range(rng.randrange(4))
        }
    return rng.choice(
        [
            [{"role": "user", "content": value(rng, depth + 1)}],
            [{"role": rng.choice(TEXTS), "content": "a", "name": value(rng, depth + 1)}],
            {"include_usage": value(rng, depth + 1)},
            {str(rng.randrange(-1, 260)): value(rng, depth + 1)},
            [rng.randrange(-1, 260) for _ in range(rng.randrange(5))],
        ]
    )


def body(rng: random.Random, path: str) -> tuple[bytes, int]:
    """(a request's body, how many of its fields are random)."""
    request, plain = KNOWN[path]
    fields = dict(plain)
    count = rng.choice([1, 1, 1, 2, 3, 8])
    for _ in range(count):
        names = request.__struct_fields__ if rng.random() < 0.8 else (*FIELDS, *TEXTS)
        fields[rng.choice(names)] = value(rng)
    encoded = bytearray(json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode())
    if rng.random() < 0.1:
        for _ in range(rng.randrange(1, 4)):
            encoded[rng.randrange(len(encoded))] = rng.randrange(256)
    if rng.random() < 0.05:
        del encoded[rng.randrange(len(encoded)) :]
    return bytes(encoded), count


async def call(app: ASGIApp, method: str, path: str, content: bytes = b"") -> tuple[int, bytes]:
    """The status and the body, without an HTTP client's cost."""
    status, parts, sent = 0, [], False
    over = asyncio.Event()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await over.wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": content}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message["body"])

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
        "root_path": "",
    }
    await app(scope, receive, send)
    over.set()
    return status, b"".join(parts)


async def fuzz(seed: int, fields: int) -> None:
    rng = random.Random(seed)
    engine, _ = real_engine(max_num_seqs=256)
    await engine.start()
    app = App(engine, served_model(), ServeConfig(access_log=False))
    refused = answered = 0
    try:
        while fields > 0:
            path = rng.choices(list(KNOWN), [4, 4, 1, 1])[0]
            content, count = body(rng, path)
            fields -= count
            status, answer = await call(app, "POST", path, content)
            note = f"{path} {content!r} -> {status} {answer[:500]!r}"
            if status == 200:
                answered += 1
                if answer.startswith(b"data: "):
                    assert not any("error" in event for event in events(answer.decode())), note
                else:
                    assert isinstance(json.loads(answer), dict), note
            else:
                refused += 1
                assert status in (400, 404), note
                error = json.loads(answer)["error"]
                assert error["code"] == status, note
                assert error["message"], note
            status, _ = await call(app, "GET", "/live")
            assert status == 200, note
        assert refused
        assert answered
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    finally:
        await engine.stop()


async def test_fuzzed_fields() -> None:
    await fuzz(seed=0, fields=4000)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
async def test_a_million_fuzzed_fields(seed: int) -> None:
    await fuzz(seed, fields=100_000)
