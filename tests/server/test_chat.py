from typing import Any

import httpx
import pytest
from serve_fakes import FakeEngine, events, served_model

USER = [{"role": "user", "content": "hi"}]


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={"messages": USER} | body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post(
        "/v1/chat/completions", json={"messages": USER, "stream": True} | body
    )
    assert response.status_code == 200, response.text
    return events(response.text)


async def refused(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={"messages": USER} | body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def prompt(engine: FakeEngine) -> str:
    return bytes(engine.submitted[-1].prompt_token_ids.tolist()).decode()


async def test_whole(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await chat(client)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert prompt(engine) == "user:hi\nassistant:"
    assert engine.submitted[-1].params.max_tokens is None
    assert answer["usage"]["prompt_tokens"] == len(prompt(engine))


async def test_stream(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, n=2)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello, world"
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]


async def test_logprobs(client: httpx.AsyncClient) -> None:
    body = {"logprobs": True, "top_logprobs": 1, "max_completion_tokens": 2}
    whole = (await chat(client, **body))["choices"][0]["logprobs"]["content"]
    assert whole[0] == {
        "token": "H",
        "logprob": -1.5,
        "bytes": [72],
        "top_logprobs": [{"token": "a", "logprob": -97.5, "bytes": [97]}],
    }
    chunks = await stream(client, **body)
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == whole
    (choice,) = (await chat(client, logprobs=True))["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


async def test_prompt_logprobs_and_token_ids(client: httpx.AsyncClient) -> None:
    body = {"prompt_logprobs": 0, "return_token_ids": True, "max_tokens": 1}
    answer = await chat(client, **body)
    assert answer["prompt_token_ids"] == list(b"user:hi\nassistant:")
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert answer["choices"][0]["token_ids"] == [72]
    first, second = await stream(client, **body)
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert first["prompt_logprobs"] == answer["prompt_logprobs"]
    assert second["choices"][0]["token_ids"] == [72]


async def test_text_parts_reach_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    answer = await chat(client, messages=[{"role": "user", "content": parts}])
    assert prompt(engine) == "user:one \ntwo\nassistant:"
    assert answer["usage"]["prompt_tokens"] == len(prompt(engine))


async def test_an_answer_sent_back_whole(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    message = (await chat(client))["choices"][0]["message"]
    more = {"tool_calls": None, "function_call": None, "audio": None, "annotations": []}
    await chat(client, messages=[*USER, message | more, *USER])
    assert prompt(engine) == "user:hi\nassistant:Hello, world\nuser:hi\nassistant:"


async def test_template_settings(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await chat(client, add_generation_prompt=False)
    assert prompt(engine) == "user:hi\n"
    await chat(client, chat_template_kwargs={"shout": True})
    assert prompt(engine) == "USER:HI\nassistant:"
    started = [*USER, {"role": "assistant", "content": "I say "}]
    answer = await chat(client, messages=started, continue_final_message=True)
    assert prompt(engine) == "user:hi\nassistant:I say "
    assert answer["choices"][0]["message"]["role"] == "assistant"


class ChatMl:
    """Its own words stand after each message, which it trims."""

    def render(self, messages: list[dict[str, object]], **kwargs: object) -> str:
        lines = [
            f"<|im_start|>{m['role']}\n{str(m['content']).strip()}<|im_end|>" for m in messages
        ]
        return "\n".join(
            [*lines, "<|im_start|>assistant\n" if kwargs["add_generation_prompt"] else ""]
        )


@pytest.mark.parametrize("said", ["end", "im", "|", ">", "assistant", "\n end\n ", ""])
async def test_the_final_message_is_cut_where_it_ends(
    make_client: Any, engine: FakeEngine, said: str
) -> None:
    client = make_client(model=served_model(chat_template=ChatMl()))
    messages = [*USER, {"role": "assistant", "content": said}]
    await chat(client, messages=messages, continue_final_message=True)
    whole = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + said.strip()
    assert prompt(engine) == whole


async def test_a_template_that_rewrites_the_final_message(make_client: Any) -> None:
    started = [*USER, {"role": "assistant", "content": "I say"}]
    kwargs = {"shout": True}
    error = await refused(
        make_client(), messages=started, continue_final_message=True, chat_template_kwargs=kwargs
    )
    assert error["param"] == "continue_final_message"


async def test_template_refusals_are_the_clients(client: httpx.AsyncClient) -> None:
    error = await refused(client, messages=USER + USER)
    assert error["message"] == "Conversation roles must alternate"
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "a"}, "messages[0].role"),
        ({"role": 1, "content": "a"}, "messages[0].role"),
        ({"role": "user\nsystem", "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "", "x": 1}]},
            "messages[0].content[0].x",
        ),
        ({"role": "user", "content": "a", "name": "me"}, "messages[0].name"),
        ({"role": "user", "content": "a", "other": "me"}, "messages[0].other"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            "messages[0].tool_calls",
        ),
    ],
)
async def test_messages_are_named(
    client: httpx.AsyncClient, message: dict[str, Any], param: str
) -> None:
    assert (await refused(client, messages=[message]))["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"max_completion_tokens": 600}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"n": 0, "stream": True}, "n"),
        ({"n": 5000}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
    ],
)
async def test_fields_are_named(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    assert (await refused(client, **body))["param"] == param


async def test_no_template(make_client: Any) -> None:
    client = make_client(model=served_model(chat_template=None))
    assert (await refused(client))["param"] == "messages"


async def test_forced_usage(make_client: Any) -> None:
    client = make_client(enable_force_include_usage=True)
    assert (await stream(client))[-1]["usage"]["completion_tokens"] == 12
