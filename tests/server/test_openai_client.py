"""The official client, over a real connection."""

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from serve_fakes import MODEL, FakeEngine
from serving import listening

from patience import until


@pytest_asyncio.fixture
async def ai(engine: FakeEngine) -> AsyncIterator[AsyncOpenAI]:
    async with (
        listening(engine, api_key=("secret",)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client


async def test_models(ai: AsyncOpenAI) -> None:
    assert [model.id async for model in ai.models.list()] == ["tiny", "alias"]
    assert (await ai.models.retrieve("tiny")).id == "tiny"


async def test_chat(ai: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = await ai.chat.completions.create(
        model=MODEL, messages=messages, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id
    stream = await ai.chat.completions.create(
        model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world"
    assert chunks[-1].usage == answer.usage


async def test_the_stream_helper(ai: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with ai.chat.completions.stream(model=MODEL, messages=messages) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello, world"
    assert final.choices[0].finish_reason == "stop"
    # and the answer goes back as it came
    messages += [final.choices[0].message.model_dump(), *messages]
    await ai.chat.completions.create(model=MODEL, messages=messages)


async def test_completions(ai: AsyncOpenAI) -> None:
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 5, "logprobs": 1, "echo": True}
    answer = await ai.completions.create(**body)
    assert [choice.text for choice in answer.choices] == ["aHello", "bHello"]
    texts = ["", ""]
    async for chunk in await ai.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["aHello", "bHello"]


async def test_exceptions(ai: AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await ai.completions.create(model="gpt-4", prompt="a")
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        await ai.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as bad:
        await ai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "a"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert bad.value.param == "tools"
    with pytest.raises(openai.AuthenticationError):
        await ai.with_options(api_key="wrong").models.list()
    engine.queue_full = 0
    with pytest.raises(openai.RateLimitError) as full:
        await ai.completions.create(model=MODEL, prompt="a")
    assert full.value.response.headers["retry-after-ms"] == "2500"


async def test_an_error_in_a_stream(ai: AsyncOpenAI, engine: FakeEngine) -> None:
    engine.pause = 0.01
    stream = await ai.completions.create(model=MODEL, prompt="a", max_tokens=400, stream=True)
    seen = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk)
            if len(seen) == 3:
                engine.die()

    with pytest.raises(openai.APIError, match="engine has stopped"):
        await read()
    assert len(seen) >= 3


async def test_leaving_a_stream(ai: AsyncOpenAI, engine: FakeEngine) -> None:
    engine.pause = 0.005
    stream = await ai.completions.create(model=MODEL, prompt="a", max_tokens=400, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: not engine.streams)
    assert len(engine.aborted) == 1
