import asyncio
import random
import threading
from typing import Any

import httpx
import pytest
from serve_fakes import EOS, VOCAB, ByteTokenizer, FakeEngine, events, served_model
from serving import serving

from octavo.engine.outputs import TokenLogprobs
from octavo.scheduler.request import FinishReason, Outcome
from octavo.server.completions import CompletionReply
from octavo.server.logprobs import CompletionLogprobsWriter, TokenDisplay
from octavo.server.protocol import CompletionLogprobs, Usage
from patience import until


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={"prompt": "hi"} | body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post("/v1/completions", json={"prompt": "hi", "stream": True} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


async def test_whole(client: httpx.AsyncClient) -> None:
    answer = await complete(client, max_tokens=5, model="alias")
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "Hello",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_what_a_request_leaves_out_is_as_the_model_says(
    make_client: Any, engine: FakeEngine
) -> None:
    client = make_client(
        model=served_model(sampling_defaults={"temperature": 0.6, "top_k": 20, "max_tokens": 7})
    )
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat)):
        for asked in ({}, {"temperature": None, "top_k": None}):
            assert (await client.post(path, json=body | asked)).status_code == 200
            params = engine.submitted[-1].params
            assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 20, 7)
        asked = {"temperature": 0, "top_k": 0, "max_tokens": 9}
        assert (await client.post(path, json=body | asked)).status_code == 200
        params = engine.submitted[-1].params
        assert (params.temperature, params.top_k, params.max_tokens) == (0, 0, 9)
    # A default is no wish: it gives way to the context.
    long = {"messages": [{"role": "user", "content": "x" * 490}]}
    assert (await client.post("/v1/chat/completions", json=long)).status_code == 200
    assert engine.submitted[-1].params.max_tokens == 512 - len(
        engine.submitted[-1].prompt_token_ids
    )


async def test_stream_equals_whole(client: httpx.AsyncClient) -> None:
    for body in ({}, {"n": 3}, {"prompt": ["a", "bc"], "n": 2}, {"echo": True}, {"logprobs": 2}):
        whole = await complete(client, max_tokens=5, **body)
        chunks = await stream(client, max_tokens=5, **body)
        for choice in whole["choices"]:
            mine = [c for e in chunks for c in e["choices"] if c["index"] == choice["index"]]
            assert "".join(c["text"] for c in mine) == choice["text"]
            assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
            if choice["logprobs"]:
                for name, values in choice["logprobs"].items():
                    assert [v for c in mine for v in c["logprobs"][name]] == values
        assert len({(e["id"], e["created"], e["model"], e["object"]) for e in chunks}) == 1


async def test_prompt_forms(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for prompt, ids in (
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ):
        engine.submitted.clear()
        answer = await complete(client, prompt=prompt)
        assert [list(request.prompt_token_ids) for request in engine.submitted] == ids
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_usage_chunks(client: httpx.AsyncClient) -> None:
    plain = await stream(client, max_tokens=3)
    assert all("usage" not in chunk for chunk in plain)
    plain = await stream(client, max_tokens=3, stream_options={"include_usage": False})
    assert all("usage" not in chunk for chunk in plain)
    *chunks, last = await stream(client, max_tokens=3, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == (await complete(client, max_tokens=3))["usage"]
    *chunks, last = await stream(
        client,
        max_tokens=3,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert last["usage"]["total_tokens"] == 5


async def test_usage_so_far_of_many_prompts(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows to the whole, and no chunk adds all the prompts up."""
    added_up = 0
    of = Usage.of

    def counted(*args: Any, **kwargs: Any) -> Usage:
        nonlocal added_up
        added_up += bool(args[0])
        return of(*args, **kwargs)

    monkeypatch.setattr(Usage, "of", counted)
    *chunks, last = await stream(
        client,
        prompt=["a", "bc", "def"],
        n=2,
        max_tokens=4,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_prediction_details=True,
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, 25))
    assert chunks[-1]["usage"] == last["usage"]
    assert last["usage"]["prompt_tokens"] == 6
    assert added_up == 1


@pytest.mark.parametrize("large", [False, True])
async def test_a_large_answer_is_written_in_a_thread(
    make_client: Any, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """So that it holds up nobody's tokens."""
    threads = []
    whole = CompletionReply.whole

    def noted(self: CompletionReply, deltas: Any) -> bytes:
        threads.append(threading.current_thread())
        return whole(self, deltas)

    monkeypatch.setattr(CompletionReply, "whole", noted)
    answer = await complete(
        make_client(), max_tokens=50, logprobs=5, n=8 if large else 2, prompt="hi"
    )
    assert len(answer["choices"]) == (8 if large else 2)
    assert (threads[0] is threading.main_thread()) != large


@pytest.mark.parametrize("name", ["slo", "\\u0073lo", "priority", "prio\\u0072ity"])
async def test_a_wish_is_seen_however_it_is_spelled(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Who has one is not judged as if it had none before its body is read."""
    asked = []
    monkeypatch.setattr(engine, "check_room", lambda pending=0, asks=None: asked.append(asks))
    headers = {"content-type": "application/json"}
    for wish in (f'"{name}": null, ', ""):
        body = f'{{{wish}"prompt": "a", "max_tokens": 1}}'
        response = await client.post("/v1/completions", content=body, headers=headers)
        assert response.status_code == 200
        # Before the body, after it, and when it is submitted.
        assert (asked[1] is None) == bool(wish)
        asked.clear()


async def test_echo_and_logprobs(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="né", echo=True, logprobs=1, max_tokens=2)
    (choice,) = answer["choices"]
    assert choice["text"] == "néHe"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["n", r"bytes:\xc3", r"bytes:\xa9", "H", "e"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, -1.5, -1.5, -1.5, -1.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"a": -97.5, "H": -1.5}


async def test_every_choice_has_the_logprobs_of_its_prompt(client: httpx.AsyncClient) -> None:
    """The engine computes them once a prompt."""
    body = {"prompt": ["né", "hi"], "n": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    whole = (await complete(client, max_tokens=2, **body))["choices"]
    for first, second in (whole[:2], whole[2:]):
        assert first | {"index": 0} == second | {"index": 0}
        assert len(first["logprobs"]["tokens"]) == len(first["prompt_logprobs"]) + 2
    chunks = await stream(client, max_tokens=2, **body)
    for choice in whole:
        mine = [c for e in chunks for c in e["choices"] if c["index"] == choice["index"]]
        assert [c.get("prompt_logprobs") for c in mine] == [choice["prompt_logprobs"], None]
        for name, values in choice["logprobs"].items():
            assert [v for c in mine for v in c["logprobs"][name]] == values


async def test_an_answer_that_fails_leaves_nothing_running(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> bytes:
        raise RuntimeError("a fault of the server")

    monkeypatch.setattr(CompletionReply, "chunk", fails)
    engine.auto = False
    for body in ({"prompt": "a"}, {"prompt": ["a", "b"]}):
        task = asyncio.create_task(
            client.post("/v1/completions", json={"stream": True, "max_tokens": 9} | body)
        )
        await until(lambda: engine.streams)
        engine.step()
        failed = await task  # before its first event: with the status of an error
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, 500)
        assert engine.streams == []
    metrics = (await client.get("/metrics")).text
    aborted = 'request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 3.0'
    assert aborted in metrics  # each counted, although nobody read its end


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_cancelled_answer_leaves_nothing_running(
    client: httpx.AsyncClient, engine: FakeEngine, streamed: bool
) -> None:
    """As when the server stops."""
    engine.auto = False
    task = asyncio.create_task(
        client.post("/v1/completions", json={"prompt": "a", "stream": streamed, "max_tokens": 9})
    )
    await until(lambda: engine.streams)
    engine.draining = True
    task.cancel()
    assert (await task).status_code == 503
    assert engine.streams == []


async def test_logprobs_zero_shows_the_chosen_token(client: httpx.AsyncClient) -> None:
    answer = await complete(client, logprobs=0, max_tokens=1)
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"H": -1.5}]


async def test_minus_infinity_is_json(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.text = "b"
    answer = await complete(client, logprobs=0, max_tokens=1)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_echo_of_token_ids(client: httpx.AsyncClient) -> None:
    assert (await complete(client, prompt=[104, 105], echo=True, max_tokens=1))["choices"][0][
        "text"
    ] == "hiH"


async def test_prompt_logprobs_and_token_ids(client: httpx.AsyncClient) -> None:
    body = {"prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 1}
    (choice,) = (await complete(client, **body))["choices"]
    assert choice["token_ids"] == [72]
    assert choice["prompt_token_ids"] == [104, 105]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "105": {"logprob": -1.5, "rank": 2, "decoded_token": "i"},
        "97": {"logprob": -97.5, "rank": 1, "decoded_token": "a"},
    }
    (chunk,) = await stream(client, **body)
    assert chunk["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]
    assert chunk["choices"][0]["prompt_token_ids"] == [104, 105]


async def test_tokens_as_ids(client: httpx.AsyncClient) -> None:
    answer = await complete(client, logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:72"]
    assert logprobs["top_logprobs"] == [{"token_id:97": -97.5, "token_id:72": -1.5}]


async def test_bos(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(model=served_model(tokenizer=ByteTokenizer(add_bos=True)))
    await complete(client, prompt="")
    assert list(engine.submitted[-1].prompt_token_ids) == [256]
    await complete(client, prompt="a", add_special_tokens=False)
    assert list(engine.submitted[-1].prompt_token_ids) == [97]
    answer = await complete(client, prompt="a", echo=True, logprobs=0, max_tokens=1)
    assert answer["choices"][0]["text"] == "aH"
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1]


class Twins(ByteTokenizer):
    """Two tokens for each letter: a byte's, and as many above them."""

    vocab_size = 2 * VOCAB

    def token_bytes(self, token_id: int) -> bytes:
        return super().token_bytes(token_id % VOCAB)

    def token_text(self, token_id: int) -> str:
        return super().token_text(token_id % VOCAB)

    def is_special(self, token_id: int) -> bool:
        return super().is_special(token_id % VOCAB)


def test_alternatives_can_be_told_apart_and_agree_with_the_token() -> None:
    """Also where they are parts of a character, or several stand for the same text."""
    rng = random.Random(19)
    model = served_model(tokenizer=Twins())
    for as_ids in (False, True):
        display = TokenDisplay(model, as_ids=as_ids, specials_in_text=False)
        for _ in range(300):
            texts = rng.choice((range(0x80, 0x88), range(97, 100), range(EOS + 1)))
            ids = rng.sample([token + more for token in texts for more in (0, VOCAB)], 6)
            values = sorted((rng.uniform(-9, 0) for _ in ids), reverse=True)
            own = rng.randrange(len(ids))
            top = tuple(zip(ids, values, strict=True))[: rng.randrange(len(ids) + 1)]
            entry = TokenLogprobs(ids[own], values[own], own + 1, top)
            taken = CompletionLogprobs([], [], [], [])
            CompletionLogprobsWriter(display).write([entry.token_id], [entry], taken)
            (found,), (name,) = taken.top_logprobs, taken.tokens
            assert found[name] == taken.token_logprobs[0] == values[own]
            assert len(found) == len({entry.token_id, *(token for token, _ in top)})
            assert [*found.values()][: len(top)] == [value for _, value in top]
            (chat,) = display.chat_logprobs([entry]).content
            assert (chat.logprob, [each.logprob for each in chat.top_logprobs]) == (
                values[own],
                [value for _, value in top],
            )
            by_value = {each.logprob: (each.token, str(each.bytes)) for each in chat.top_logprobs}
            by_value[chat.logprob] = chat.token, str(chat.bytes)
            assert len({*by_value.values()}) == len(found)


def test_offsets_are_those_of_the_text() -> None:
    """Whatever its bytes are, a token's text begins at its offset."""
    rng = random.Random(20)
    display = TokenDisplay(served_model(), as_ids=False, specials_in_text=False)
    for _ in range(300):
        ids = [rng.choice((97, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, EOS))
               for _ in range(rng.randrange(1, 12))]  # fmt: skip
        start = rng.randrange(len(ids))
        joined = b"".join(map(display.in_text, ids))
        text = joined.decode(errors="replace")
        begun = display.begun(ids[:start])
        before = len(b"".join(map(display.in_text, ids[:start])).decode(errors="replace"))
        writer = CompletionLogprobsWriter(display, before - bool(begun), begun)
        written = CompletionLogprobs([], [], [], [])
        writer.write(ids[start:], [None] * (len(ids) - start), written)
        offsets = written.text_offset
        read = 0
        for place, token in enumerate(ids):
            if place >= start and (data := display.in_text(token)):
                rest = joined[read:].decode(errors="replace")
                own = text[offsets[place - start] :]
                if data[0] & 0xC0 != 0x80:  # what comes before has no part in the text from here
                    assert own == rest, ids
            read += len(display.in_text(token))
        assert offsets == sorted(offsets)


async def test_an_echo_goes_on_in_the_middle_of_a_character() -> None:
    """The text is what prompt and answer decode to together, whole and streamed."""
    rng = random.Random(21)
    pieces = [0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0x98, 97]
    async with serving() as (client, _, _):
        for seed in range(25):
            ids = [rng.choice(pieces) for _ in range(rng.randrange(1, 6))]
            body = {
                "prompt": ids,
                "echo": True,
                "max_tokens": rng.randrange(1, 6),
                "logprobs": 0,
                "n": 2,
                "seed": seed,
                "return_token_ids": True,
                "allowed_token_ids": [0x82, 0x98, 0x80, 0xAC, *rng.sample([97, 0xE2, EOS], 2)],
            }
            whole = await complete(client, **body)
            chunks = await stream(client, **body)
            for choice in whole["choices"]:
                joined = [*ids, *choice["token_ids"]]
                assert choice["text"] == ByteTokenizer().decode(joined)
                offsets = choice["logprobs"]["text_offset"]
                assert offsets == sorted(offsets)
                assert offsets[-1] <= len(choice["text"])
                mine = [c for e in chunks for c in e["choices"] if c["index"] == choice["index"]]
                assert "".join(c["text"] for c in mine) == choice["text"]
                assert [o for c in mine if c["logprobs"] for o in c["logprobs"]["text_offset"]] == (
                    offsets
                )


@pytest.mark.parametrize("skip", [None, False])
@pytest.mark.parametrize("streamed", [False, True])
async def test_offsets_in_an_echo_that_spells_special_tokens(
    make_client: Any, skip: bool | None, streamed: bool
) -> None:
    """The prompt is echoed as it was given: with them, and without what was put before it."""
    client = make_client(model=served_model(tokenizer=ByteTokenizer(add_bos=True)))
    body = {"prompt": "aé<eos>b", "echo": True, "logprobs": 0, "max_tokens": 2}
    body["skip_special_tokens"] = skip
    if streamed:
        choices = [choice for chunk in await stream(client, **body) for choice in chunk["choices"]]
    else:
        choices = (await complete(client, **body))["choices"]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert "".join(choice["text"] for choice in choices) == "aé<eos>bHe"
    assert offsets == [0, 0, 1, 1, 2, 7, 8, 9]


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    wanted = {
        "n": 1,
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "top_n_sigma": 1.5,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 3,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 3,
        "prompt_logprobs": 1,
    }
    lists = {"stop_token_ids": [1], "allowed_token_ids": [1, 2], "banned_token_ids": [2]}
    await complete(
        client,
        **wanted,
        **lists,
        stop=["x", "y"],
        logit_bias={"42": 1.5},
        priority=-3,
        cache_salt="mine",
    )
    request = engine.submitted[-1]
    assert {name: getattr(request.params, name) for name in wanted} == wanted
    assert {name: list(getattr(request.params, name)) for name in lists} == lists
    assert request.params.stop == ("x", "y")
    assert request.params.logit_bias == {42: 1.5}
    assert (request.scheduling.priority, request.scheduling.cache_salt) == (-3, "mine")


async def test_top_n_sigma_of_both_endpoints(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat)):
        for said, meant in ((1.5, 1.5), (2, 2), (0, 0), (-1, 0), (None, 0)):
            asked = body | {"top_n_sigma": said}
            assert (await client.post(path, json=asked)).status_code == 200
            assert engine.submitted[-1].params.validated(1000).top_n_sigma == meant


async def test_default_max_tokens_gives_way_to_the_context(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await complete(client, prompt="x" * 510)
    assert engine.submitted[-1].params.max_tokens == 2


async def test_refused_together(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """One of several prompts does not fit, so nothing has run."""
    engine.auto = False
    response = await client.post(
        "/v1/completions", json={"prompt": ["a", "b", "x" * 600], "max_tokens": 4}
    )
    assert response.status_code == 400
    assert engine.streams == engine.submitted == []


async def test_engine_failures(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.auto = False

    async def answer(streamed: bool) -> httpx.Response:
        task = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "a", "stream": streamed})
        )
        await until(lambda: engine.streams)
        engine.step()
        engine.streams[0].end(FinishReason.ERROR, Outcome.FAILED, "secret 0x1234")
        return await task

    response = await answer(streamed=False)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in response.text
    response = await answer(streamed=True)
    assert response.status_code == 200
    first, error = events(response.text)
    assert first["choices"][0]["text"] == "H"
    assert error["error"]["code"] == 500
    assert "secret" not in response.text


async def test_engine_death(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.auto = False
    tasks = [
        asyncio.create_task(client.post("/v1/completions", json={"prompt": p, "stream": s}))
        for p in ("a", ["b", "c"])
        for s in (False, True)
    ]
    await until(lambda: len(engine.streams) == 6)
    engine.step()
    engine.die()
    whole, streamed, whole_list, streamed_list = [await task for task in tasks]
    for response in (whole, whole_list):
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "InternalServerError"
    for response in (streamed, streamed_list):
        assert events(response.text)[-1]["error"]["code"] == 500
    response = await client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 500
    assert (await client.get("/live")).status_code == 503
    assert (await client.get("/health")).status_code == 503


@pytest.mark.parametrize("streamed", [False, True])
async def test_queue_full(client: httpx.AsyncClient, engine: FakeEngine, streamed: bool) -> None:
    engine.queue_full = 0
    response = await client.post("/v1/completions", json={"prompt": "a", "stream": streamed})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"  # 2.5 s, and whole seconds
    assert response.headers["retry-after-ms"] == "2500"
    assert response.json()["error"]["type"] == "RateLimitError"
