"""Whole benchmarks against servers that behave and servers that do not."""

import asyncio
import io
import json
import math
import shutil
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from load_servers import HEAD, Asked, chunk, good, serving_script, token, usage, whole

from octavo.tools.bench.load import benchmark as module
from octavo.tools.bench.load.benchmark import LoadError, Settings, benchmark
from octavo.tools.bench.load.client import Body, Client, Endpoint
from octavo.tools.workload.arrivals import Ramp
from octavo.tools.workload.metrics import PER_REQUEST
from octavo.tools.workload.traces import Window


def settings(url: str, **changes: Any) -> Settings:
    defaults: dict[str, Any] = {
        "base_url": url, "num_prompts": 6, "random_input_len": 8, "random_output_len": 3,
        "progress": False, "prompt_format": "text", "request_timeout_sec": 20.0,
    }  # fmt: skip
    return Settings(**(defaults | changes))


async def test_vllms_result() -> None:
    async with serving_script(good) as server:
        result = await benchmark(
            settings(
                server.url, goodput={"ttft": 60000.0}, max_concurrency=2, label="l",
                metadata={"version": "1"}, sampling={"temperature": 0.5, "top_k": None},
                extra_body={"min_tokens": 3}, num_warmups=2, save_detailed=True,
                headers={"X-Trace": "7"}, metrics=("ttft", "tpot", "itl", "e2el"),
            )
        )  # fmt: skip
    assert list(result)[:13] == [
        "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
        "version", "request_rate", "burstiness", "max_concurrency", "duration", "completed",
    ]  # fmt: skip
    figures = {
        "endpoint_type": "openai", "backend": "openai", "label": "l", "model_id": "m",
        "tokenizer_id": None, "num_prompts": 6, "version": "1", "request_rate": "inf",
        "burstiness": 1.0, "max_concurrency": 2, "completed": 6, "failed": 0,
        "total_input_tokens": 48, "total_output_tokens": 18, "input_lens": [8] * 6,
        "output_lens": [3] * 6, "generated_texts": ["aaa"] * 6, "errors": [""] * 6,
        "max_concurrent_requests": 2, "failures": [], "interrupted": False,
    }  # fmt: skip
    assert {name: result[name] for name in figures} == figures
    assert result["request_throughput"] == pytest.approx(6 / result["duration"])
    assert result["request_goodput"] == result["request_throughput"]
    assert result["total_token_throughput"] == pytest.approx(66 / result["duration"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert result[f"p99_{name}_ms"] >= result[f"median_{name}_ms"] >= 0
    assert [len(gaps) for gaps in result["itls"]] == [2] * 6
    for name in PER_REQUEST:
        assert len(result[name]) == 6
    assert not set(PER_REQUEST) & set(module.without_requests(result))
    assert len(server.generations) == 8  # with the warmups
    asked = server.generations[-1]
    assert asked.headers["x-trace"] == "7"
    assert asked.headers["content-type"] == "application/json"
    prompt = asked.json.pop("prompt")
    assert len(prompt.split()) == 8
    assert asked.json == {
        "model": "m", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True, "temperature": 0.5, "min_tokens": 3,
    }  # fmt: skip


async def test_connections_are_kept() -> None:
    async with serving_script(good) as server:
        result = await benchmark(settings(server.url, max_concurrency=2, num_prompts=20))
        assert result["completed"] == 20
        assert server.connections <= 2


async def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    answers = 0

    async def once(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        nonlocal answers
        answers += 1
        if answers > 1 and answers % 2 == 0:
            writer.transport.abort()  # promised to be kept, and gone with the next request
        else:
            await good(reader, writer, asked)

    async with serving_script(once) as server:
        result = await benchmark(settings(server.url, max_concurrency=1, num_prompts=5))
        assert (result["completed"], result["failures"]) == (5, [])


async def test_a_server_that_hangs_up_on_everyone() -> None:
    """At once, so that the connection may be gone before the request is written."""

    async def hang_up(reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with serving_script(good) as server:
        listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        client = Client(Endpoint.of(f"http://127.0.0.1:{port}"), {})
        for _ in range(20):
            assert (await client.get("GET", "/")).reason.startswith("connection closed before")
        listener.close()
        connection = await Client(Endpoint.of(server.url), {})._connect(5)
        connection._transport.abort()
        await asyncio.sleep(0.05)
        for kept in (False, True):
            body = Body()
            connection.send(b"x", body, kept)
            assert body.ended.done()
            assert (connection.lost is body) is kept
            assert bool(body.reason) is not kept


async def test_chat() -> None:
    async def chat(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(HEAD)
        for delta in ('{"role":"assistant","content":""}', '{"content":"a"}', '{"content":"b"}'):
            writer.write(chunk(b'data: {"choices":[{"delta":%s}]}\n\n' % delta.encode()))
        writer.write(chunk(usage(14, 2)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with serving_script(chat) as server:
        result = await benchmark(settings(server.url, backend="openai-chat", num_prompts=2))
    asked = server.generations[0]
    assert asked.path == "/v1/chat/completions"
    assert [message["role"] for message in asked.json["messages"]] == ["user"]
    assert len(asked.json["messages"][0]["content"].split()) == 8
    assert asked.json["max_completion_tokens"] == 3
    assert result["total_input_tokens"] == 28
    assert any("chat template" in notice for notice in result["notices"])
    assert any("4 tokens of 6" in notice for notice in result["notices"])


async def test_without_usage_events_are_counted_and_it_is_said() -> None:
    async def silent(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(HEAD + chunk(token() + token() + b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with serving_script(silent) as server:
        result = await benchmark(settings(server.url))
    assert result["total_output_tokens"] == 12
    assert result["total_input_tokens"] == 48
    assert any("6 answers came without usage" in notice for notice in result["notices"])


BAD = {
    "429": (whole("429 Too Many Requests", b'{"error":{"message":"full"}}'), "HTTP 429", "full"),
    "500": (whole("500 Oops", b"<b>x</b>"), "HTTP 500", "<b>x</b>"),
    "redirect": (whole("302 Found", b"", "location: /\r\n"), "HTTP 302", ""),
    "hang up": (b"", "connection closed before an answer", "server"),
    "hang up in the head": (b"HTTP/1.1 200 OK\r\nconte", "connection closed in the middle", ""),
    "hang up in the stream": (HEAD + chunk(token()), "connection closed in the middle", ""),
    "hang up in a chunk": (HEAD + chunk(token())[:-9], "connection closed in the middle", ""),
    "no http": (b"SSH-2.0-OpenSSH\r\n\r\n", "malformed HTTP", ""),
    "bad chunk size": (HEAD + b"zz\r\n", "malformed HTTP", ""),
    "bad json": (HEAD + chunk(b"data: {oops\n\n") + b"0\r\n\r\n", "malformed event", "oops"),
    "error event": (
        HEAD + chunk(token() + b'data: {"error":{"message":"died"}}\n\n') + b"0\r\n\r\n",
        "error event in the stream", "died",
    ),
    "no token": (HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "no token", "came"),
    "no end": (HEAD + chunk(token()) + b"0\r\n\r\n", "stream ended early", "1 events"),
    "json": (whole("200 OK", b'{"choices":[{"text":"a"}]}'), "no token", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
async def test_a_server_that_fails_half_the_time(case: str) -> None:
    data, reason, detail = BAD[case]
    count = 0

    async def half(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        nonlocal count
        count += 1
        if count % 2:
            await good(reader, writer, asked)
            return
        writer.write(data)
        if "hang up" in case:
            await writer.drain()
            writer.close()

    async with serving_script(half) as server:
        # Connections of their own: with a kept one a hang-up is taken for its old age.
        result = await benchmark(settings(server.url, headers={"connection": "close"}))
    kind = "rejected" if case == "429" else "failed"  # there was too much to do: no failure
    assert (result["completed"], result["rejected"] + result["failed"]) == (3, 3)
    assert result[kind] == 3
    (failure,) = result["rejections" if case == "429" else "failures"]
    assert failure["count"] == 3
    assert failure["reason"].startswith(reason)
    assert detail in failure["example"]
    assert result["total_output_tokens"] == 9


async def test_a_server_that_never_answers() -> None:
    async def never(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        if len(server.generations) % 2:
            await good(reader, writer, asked)
        else:
            await reader.read(1)

    async with serving_script(never) as server:
        result = await benchmark(settings(server.url, request_timeout_sec=0.5, max_concurrency=3))
    assert result["completed"] + result["failed"] == 6
    assert result["failed"] >= 3
    assert {failure["reason"] for failure in result["failures"]} == {"no answer in time"}


async def test_a_body_that_ends_with_its_connection() -> None:
    async def old(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + token() + token("b", "stop"))
        await writer.drain()
        writer.close()

    async with serving_script(old) as server:
        result = await benchmark(settings(server.url))
    assert (result["completed"], result["total_output_tokens"]) == (6, 12)


async def test_an_interim_answer_is_not_the_answer() -> None:
    async def interim(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await good(reader, writer, asked)

    async with serving_script(interim) as server:
        assert (await benchmark(settings(server.url)))["completed"] == 6


@pytest.mark.parametrize("size", [1, 2, 7])
async def test_answers_in_small_pieces(size: int) -> None:
    async def dribble(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        data = HEAD + chunk(token("é")) + chunk(token("b", "stop"))
        data += chunk(usage(8, 2) + b"data: [DONE]\n\n") + b"0\r\n\r\n"
        for begin in range(0, len(data), size):
            writer.write(data[begin : begin + size])
            await writer.drain()
            if begin % 50 == 0:
                await asyncio.sleep(0)

    async with serving_script(dribble) as server:
        result = await benchmark(settings(server.url, num_prompts=2, save_detailed=True))
    assert result["generated_texts"] == ["éb", "éb"]
    assert result["total_output_tokens"] == 4


# --- the schedule --------------------------------------------------------------------------------


async def test_arrivals_do_not_wait_for_answers() -> None:
    release = asyncio.Event()

    async def waits_for_all(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        if len(server.generations) == 6:
            release.set()
        await release.wait()
        await good(reader, writer, asked)

    async with serving_script(waits_for_all) as server:
        result = await benchmark(settings(server.url, request_rate=200.0))
    assert (result["completed"], result["max_concurrent_requests"]) == (6, 6)
    assert result["request_rate"] == 200.0
    assert set(result["lateness"]) == {"mean_ms", "p99_ms", "max_ms", "late_share"}


async def test_requests_leave_in_the_order_and_at_the_times_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00.0,5,1\n2023-11-16 18:00:02.0,6,2\n2023-11-16 18:00:04.0,7,3\n"
    )
    async with serving_script(good) as server:
        result = await benchmark(
            settings(
                server.url, dataset_name="trace", dataset_path=path, num_prompts=None,
                window=Window(speedup=20, max_input_len=6),
            )
        )  # fmt: skip
    assert [len(asked.json["prompt"].split()) for asked in server.generations] == [5, 6, 6]
    assert [asked.json["max_tokens"] for asked in server.generations] == [1, 2, 3]
    starts = result["start_times"]
    assert starts == sorted(starts)
    assert starts[2] - starts[0] >= 0.19
    assert any("1 of 3 prompts cut to 6" in notice for notice in result["notices"])


@pytest.mark.parametrize("ahead", [0, 1, 400, 1 << 20])
async def test_requests_made_ahead_stay_in_order(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr("octavo.tools.bench.load.load_generator._AHEAD", ahead)
    async with serving_script(good) as server:
        result = await benchmark(settings(server.url, max_concurrency=1, random_range_ratio=0.8))
        lengths = [len(asked.json["prompt"].split()) for asked in server.generations]
    assert lengths == result["input_lens"]
    assert len(lengths) == 6
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("tty", [True, False])
async def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch, tty: bool) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: tty)
    monkeypatch.setattr("octavo.tools.bench.load.load_report.sys.stderr", shown)
    async with serving_script(good) as server:
        await benchmark(settings(server.url, progress=True))
    assert ("6/6 ended, 0 in flight" in shown.getvalue()) is tty
    assert bool(shown.getvalue()) is tty


async def test_waiting_for_a_turn_is_queue_time_not_latency() -> None:
    async def slow(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        await asyncio.sleep(0.05)
        await good(reader, writer, asked)

    names = ("e2el", "client_queue_time", "e2el_including_client_queue")
    async with serving_script(slow) as server:
        result = await benchmark(
            settings(server.url, num_prompts=4, max_concurrency=1, metrics=names)
        )
    assert result["max_concurrent_requests"] == 1
    assert result["queue_times"] == sorted(result["queue_times"])
    assert result["queue_times"][3] >= 0.14
    assert result["mean_e2el_including_client_queue_ms"] == pytest.approx(
        result["mean_e2el_ms"] + result["mean_client_queue_time_ms"]
    )


async def test_ctrl_c_reports_what_has_been() -> None:
    async def third_interrupts(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        if len(server.generations) < 3:
            await good(reader, writer, asked)
            return
        writer.write(HEAD + chunk(token()))
        await writer.drain()
        signal.raise_signal(signal.SIGINT)
        await reader.read(1)

    async with serving_script(third_interrupts) as server:
        result = await benchmark(settings(server.url, max_concurrency=1))
    assert result["interrupted"]
    assert (result["completed"], result["failed"], result["unfinished"]) == (2, 0, 1)
    assert result["total_output_tokens"] == 6
    assert any("interrupted: 6 of 6" in notice for notice in result["notices"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_a_ramp_is_in_the_result() -> None:
    async with serving_script(good) as server:
        result = await benchmark(settings(server.url, ramp=Ramp("linear", 100.0, 400.0)))
    assert result["completed"] == 6
    assert (result["ramp_up_strategy"], result["ramp_up_end_rps"]) == ("linear", 400.0)


# --- beginning -----------------------------------------------------------------------------------


async def test_nobody_there() -> None:
    with pytest.raises(LoadError, match="connection refused"):
        await benchmark(settings("http://127.0.0.1:1"))


async def test_a_server_that_becomes_ready() -> None:
    async with serving_script(good) as server:
        url = server.url
    with pytest.raises(LoadError, match="connection refused"):
        await benchmark(settings(url, ready_check_timeout_sec=0.1))

    async def later() -> None:
        await asyncio.sleep(0.2)
        listener = await asyncio.start_server(server.serve, "127.0.0.1", int(url.split(":")[-1]))
        await done.wait()
        listener.close()

    done = asyncio.Event()
    task = asyncio.create_task(later())
    result = await benchmark(settings(url, ready_check_timeout_sec=20))
    done.set()
    await task
    assert result["completed"] == 6


async def test_a_server_without_a_list_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("load_servers.MODELS", b'{"data": []}')
    async with serving_script(good) as server:
        with pytest.raises(LoadError, match="give --model"):
            await benchmark(settings(server.url))
        result = await benchmark(settings(server.url, model="a/b", served_model_name="c"))
    assert result["model_id"] == "a/b"
    assert server.generations[0].json["model"] == "c"


async def test_a_model_that_the_server_does_not_serve() -> None:
    async def knows(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        if asked.json["model"] == "m":
            await good(reader, writer, asked)
        else:
            writer.write(whole("404 Not Found", b'{"error":{"message":"no such model"}}'))

    async with serving_script(knows) as server:
        said = r"does not serve --model n, but m \(HTTP 404: no such model\)"
        with pytest.raises(LoadError, match=said):
            await benchmark(settings(server.url, model="n", extra_body={"min_tokens": 3}))
        with pytest.raises(LoadError, match="--served-model-name n, but m"):
            await benchmark(settings(server.url, model="m", served_model_name="n"))
        assert not server.generations[2:]  # nothing but that question
        result = await benchmark(settings(server.url, model="org/m", served_model_name="m"))
        assert result["completed"] == 6
        server.script = good  # which takes any name
        result = await benchmark(settings(server.url, model="n"))
        assert (result["completed"], result["model_id"]) == (6, "n")


async def test_a_server_that_wants_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = whole("401 Unauthorized", b'{"error":{"message":"a key, please"}}')
    monkeypatch.setattr("load_servers.whole", lambda *_: refusal)

    async def refuses(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(refusal)

    async def answers(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        if asked.json.get("stream"):
            await good(reader, writer, asked)
        else:
            writer.write(whole("200 OK", b"{}"))

    async with serving_script(refuses) as server:
        for model in (None, "m"):
            with pytest.raises(LoadError, match=r"401:? a key, please.*OPENAI_API_KEY"):
                await benchmark(settings(server.url, model=model))
        assert len(server.generations) == 1  # the one that asks whether the key will do
        server.script = answers  # it may ask, but not for the list
        with pytest.raises(LoadError, match="may not list the models needs --model"):
            await benchmark(settings(server.url))
        result = await benchmark(settings(server.url, model="m"))
    assert (result["completed"], result["model_id"]) == (6, "m")


async def test_arrivals_that_cannot_be_are_said_before_a_request_leaves() -> None:
    async with serving_script(good) as server:
        with pytest.raises(LoadError, match="--burstiness 1e-300: intervals are beyond"):
            await benchmark(settings(server.url, request_rate=5.0, burstiness=1e-300))
    assert not server.generations[1:]  # but the check that it is ready


async def test_ids_where_the_endpoint_refuses_them_become_text(tokenizer_json: Path) -> None:
    async def texts_only(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        if isinstance(asked.json["prompt"], list):
            writer.write(whole("400 Bad Request", b'{"error":{"message":"text, please"}}'))
        else:
            await good(reader, writer, asked)

    async with serving_script(texts_only) as server:
        result = await benchmark(
            settings(server.url, prompt_format="auto", tokenizer=str(tokenizer_json))
        )
        assert result["completed"] == 6
        assert any("text, please" in notice for notice in result["notices"])
        assert result["tokenizer_id"] == str(tokenizer_json)
        server.script = good
        server.asked.clear()
        await benchmark(settings(server.url, prompt_format="auto", tokenizer=str(tokenizer_json)))
        prompts = [asked.json["prompt"] for asked in server.generations[1:]]
        assert all(isinstance(prompt, list) and len(prompt) == 8 for prompt in prompts)
        with pytest.raises(LoadError, match="no /tokenize"):
            await benchmark(settings(server.url, prompt_format="ids"))


async def test_files_of_prompts(tmp_path: Path, tokenizer_json: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "one two"}\n{"prompt": "three", "output_tokens": 2}\n')
    talks = tmp_path / "talks.json"
    turn = {"value": "bal bal bal bal bal"}
    talks.write_text(json.dumps([{"conversations": [turn, turn]}, {"conversations": []}]))
    async with serving_script(good) as server:
        result = await benchmark(
            settings(
                server.url, dataset_name="custom", dataset_path=lines, custom_output_len=4,
                disable_shuffle=True, max_concurrency=1, num_prompts=5, prompt_format="auto",
            )
        )  # fmt: skip
        prompts = [asked.json["prompt"] for asked in server.generations]
        assert prompts[:2] == ["one two", "three"]
        assert len(prompts) == 5
        assert set(prompts) == {"one two", "three"}
        assert [asked.json["max_tokens"] for asked in server.generations] == [4] * 5
        assert "ignore_eos" not in server.generations[0].json
        assert result["total_output_tokens"] == 20
        server.asked.clear()
        await benchmark(
            settings(
                server.url, dataset_name="sharegpt", dataset_path=talks, no_oversample=True,
                tokenizer=str(tokenizer_json), prompt_format="auto",
            )
        )  # fmt: skip
    (asked,) = server.generations
    assert (asked.json["prompt"], asked.json["max_tokens"]) == ("bal bal bal bal bal", 5)


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    """Words of a few letters, and letters for all others."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [a + b + c for a in "bcdfg" for b in "aeiou" for c in "lmnrst"]
    names = ["<unk>", *letters, *words]
    backend = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"backend": "tgi"}, "openai speaks to any server"),
        ({"dataset_name": "sonnet"}, "none of random"),
        ({"dataset_name": "azure"}, "needs a --dataset-path"),
        ({"dataset_path": Path("x")}, "takes no --dataset-path"),
        ({"dataset_name": "sharegpt", "dataset_path": Path("x")}, "needs --tokenizer"),
        ({"prompt_format": "ids", "backend": "openai-chat"}, "text only"),
        ({"backend": "openai-chat", "sampling": {"logprobs": 1}}, "of completions"),
        (
            {"dataset_name": "azure", "dataset_path": Path("x"), "request_rate": 4.0},
            "its own arrivals",
        ),
        (
            {"dataset_name": "azure", "dataset_path": Path("x"), "burstiness": 0.5},
            "its own arrivals",
        ),
        ({"window": Window(max_input_len=5)}, "are for traces"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], about: str) -> None:
    with pytest.raises(ValueError, match=about):
        settings("http://x", **changes).check()


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h", ("h", 80, "", False)),
        ("https://h/", ("h", 443, "", True)),
        ("http://[::1]:8/a/b/", ("::1", 8, "/a/b", False)),
    ],
)
def test_targets(url: str, target: tuple[str, int, str, bool]) -> None:
    assert Endpoint.of(url) == target


@pytest.mark.parametrize(
    "url",
    ["h:80", "ftp://h", "http://", "http://h?x", "http://u@h", "http://h:99999", "http://h#x"],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"http|[Pp]ort"):
        Endpoint.of(url)


def test_v1_may_stand_in_the_base_url() -> None:
    assert settings("https://h/v1/").url == settings("https://h").url == "https://h"
    assert settings("https://h/proxy/v1").url == "https://h/proxy"


@pytest.mark.parametrize("header", [("a b", "x"), ("", "x"), ("a", "x\r\ny: z"), ("a:", "x")])
def test_what_is_no_header_is_refused(header: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="no HTTP header"):
        Client(Endpoint.of("http://h"), dict([header]))


async def test_tls(tmp_path: Path) -> None:
    if not shutil.which("openssl"):
        pytest.skip("no openssl here to make a certificate with")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -subj /CN=localhost"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    async with serving_script(good) as server:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        with pytest.raises(LoadError, match="TLS failed"):
            await benchmark(settings(url))
        assert (await benchmark(settings(url, insecure=True)))["completed"] == 6
        listener.close()


def test_file_names_are_vllms() -> None:
    result = {"model_id": "org/m", "date": "20260101-000000"}
    assert module.file_name(settings("http://h"), result) == "openai-infqps-m-20260101-000000.json"
    ramped = settings(
        "http://h", ramp=Ramp("linear", 1.0, 4.0), label="l", max_concurrency=3,
        request_rate=math.inf,
    )  # fmt: skip
    assert module.file_name(ramped, result) == (
        "l-ramp-up-linear-1qps-4qps-concurrency3-m-20260101-000000.json"
    )


@pytest.mark.parametrize(
    ("alone", "rate", "requests", "why"),
    [
        (0.0, math.inf, 1000, "the most"), (2.0, math.inf, 30, "what this server answers"),
        (60.0, math.inf, 8, "the fewest"), (2.0, 0.2, 12, "what comes in a minute"),
        (0.0, 0.01, 8, "the fewest"), (math.inf, math.inf, 8, "the fewest"),
    ],
)  # fmt: skip
def test_the_load_fits_the_server(alone: float, rate: float, requests: int, why: str) -> None:
    number, said = module.fitting(alone, rate)
    assert number == requests
    assert said.startswith(why)


async def test_a_load_without_a_number_runs_and_says_how_many() -> None:
    async def slow(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n")

    async with serving_script(slow) as server:
        result = await benchmark(settings(server.url, num_prompts=None))
    assert (result["completed"], result["failed"]) == (0, 8)
    assert any("8 requests: the fewest" in notice for notice in result["notices"])
