"""The soak: what it calls a fault, and a minute's hundredth of it on a small server."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

import soak
from loader.gguf_writer import tiny_llama
from soak import Counts, Sample

ENDED = {
    "request_success_total:stop": 10.0,
    "request_success_total:length": 20.0,
    "request_success_total:abort": 8.0,
    "request_success_total:error": 0.0,
    "requests_admitted_total": 38.0,
    "request_prompt_tokens_count": 38.0,
    "request_prompt_tokens_sum": 500.0,
    "prompt_tokens_total": 480.0,
    "generation_tokens_total": 900.0,
    "request_generation_tokens_sum": 900.0,
    "num_requests_running": 0.0,
    "num_requests_waiting": 0.0,
    "kv_cache_usage_perc": 0.0,
}
READ = Counts(
    sent=40,
    finished=29,
    aborted=10,
    begun=5,
    prompt_tokens=400,
    completion_tokens=800,
    seconds=1802.0,
)


def samples(growth: float = 0.0, slowing: float = 0.0) -> list[Sample]:
    """Every ten seconds of half an hour; memory grows by so much in all, and the last third is
    so much slower.
    """
    found, generated = [], 0.0
    for at in range(0, 1810, 10):
        generated += 100.0 * (1 - slowing * (at > 1200))
        found.append(Sample(float(at), 1e8 * (1 + growth * at / 1800), generated))
    return found


def bad(counts: Counts = READ, seen: list[Sample] | None = None, **last: float) -> list[str]:
    found = soak.checks(counts, seen or samples(), {}, ENDED | last)
    return [check.what for check in found if not check.good]


def test_nothing_is_wrong() -> None:
    assert bad() == []
    assert bad(seen=samples(growth=0.01, slowing=0.05)) == []


@pytest.mark.parametrize(
    ("seen", "last", "what"),
    [
        (samples(growth=0.1), {}, ["memory"]),
        (samples(slowing=0.2), {}, ["throughput"]),
        (None, {"kv_cache_usage_perc": 0.01}, ["blocks"]),
        (None, {"num_requests_waiting": 1.0}, ["blocks"]),
        (None, {"request_generation_tokens_sum": 899.0}, ["generated tokens"]),
        (None, {"prompt_tokens_total": 501.0}, ["prompt tokens"]),
        (None, {"request_prompt_tokens_count": 37.0}, ["records"]),
        (None, {"requests_admitted_total": 39.0}, ["records"]),
        (None, {"request_success_total:abort": 3.0}, ["outcomes", "records"]),
        (samples()[:-10], {}, ["samples"]),
        (None, {"request_success_total:error": 1.0}, ["outcomes", "records"]),
    ],
)
def test_what_is_called_a_fault(
    seen: list[Sample] | None, last: dict[str, float], what: list[str]
) -> None:
    assert bad(seen=seen, **last) == what


def test_answers_that_differ_and_answers_that_nobody_gave() -> None:
    assert bad(Counts(finished=31, aborted=7)) == ["outcomes"]
    assert bad(Counts(finished=29, aborted=10, wrong=["another answer"])) == ["answers"]


def test_a_stream_is_read_whatever_its_chunks() -> None:
    rng = random.Random(0)
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 1, "text": "b", "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]},
        {"choices": [{"index": 1, "text": "c", "finish_reason": "length"}]},
        {"choices": [], "usage": usage},
    ]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    content, chunked = text.encode(), b""
    while content:
        size = rng.randint(1, 20)
        chunked += b"%x\r\n%b\r\n" % (len(content[:size]), content[:size])
        content = content[size:]
    whole = soak.dechunked(chunked + b"0\r\n\r\n")
    assert soak.Client._parsed({"stream": True}, whole) == ("a\0bc", ["stop", "length"], usage)


def test_who_watches_does_not_die_in_silence() -> None:
    class Gone(soak.Server):
        def model(self) -> str:
            return "m"

        def metrics(self) -> dict[str, float]:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        asyncio.run(soak.soak(Gone("http://127.0.0.1:9"), 0.001, 0, 0.0, 0.0))


def test_on_a_small_server(tmp_path: Path) -> None:
    model = tiny_llama().write(tmp_path / "tiny.gguf")
    with soak.started(str(model), ["--kv-cache-memory", "1M", "--max-model-len", "64"]) as server:
        first = server.metrics()
        counts, seen, last = asyncio.run(soak.soak(server, 0.05, 3, 0.2, 0.01))
    assert counts.sent > 0
    assert len(seen) > 2
    good = {check.what: check.good for check in soak.checks(counts, seen, first, last)}
    assert good["samples"]
    assert good["blocks"]
    assert good["outcomes"]
    assert good["generated tokens"]
    assert good["records"]
