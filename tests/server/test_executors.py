"""Every executor serves over HTTP, from what `load_engine` makes of a tiny model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_fakes import PlainTemplate, events, served_model
from serving import listening, started

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import load_engine
from octavo.executor.registry import EXECUTORS
from octavo.loader import load
from oracle.tiny_folders import folder

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 4, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder("llama", tmp_path_factory.mktemp("executors") / "llama", bf16=True)


@asynccontextmanager
async def serving(model: Path, executor: str) -> AsyncIterator[httpx.AsyncClient]:
    loaded = load_engine(model, EngineConfig(executor=executor, **SMALL))
    assert loaded.engine.executor.capabilities.name == executor
    engine = AsyncEngine(loaded.engine)
    served = served_model(
        tokenizer=loaded.checkpoint.tokenizer,
        chat_template=PlainTemplate(),
        max_model_len=loaded.max_model_len,
    )
    async with (
        started(engine),
        listening(engine, model=served) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        yield client


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_it_answers_streamed_and_not(model: Path, executor: str) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    async with serving(model, executor) as client:
        for path, body in (
            ("/v1/completions", {"prompt": "hello, world"}),
            ("/v1/chat/completions", chat),
        ):
            body |= {"max_tokens": 12, "seed": 7, "ignore_eos": True}
            whole = (await client.post(path, json=body)).json()
            assert whole["usage"]["completion_tokens"] == 12
            choice = whole["choices"][0]
            said = choice.get("text") or choice["message"]["content"]
            streamed = await client.post(path, json=body | {"stream": True})
            parts = [chunk["choices"][0] for chunk in events(streamed.text)]
            texts = [part.get("text", part.get("delta", {}).get("content")) for part in parts]
            assert "".join(text or "" for text in texts) == said
            assert parts[-1]["finish_reason"] == "length"


async def test_the_reference_says_what_the_native_executor_says(model: Path) -> None:
    """Greedy tokens, as long as the first is clearly ahead; their probabilities nearly."""
    body = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    body |= {"prompt": list(range(3, 40)), "return_token_ids": True}
    answers = []
    for executor in ("native", "reference"):
        async with serving(model, executor) as client:
            answers.append((await client.post("/v1/completions", json=body)).json()["choices"][0])
    native, reference = answers
    agreed = 0
    for index, (one, other) in enumerate(
        zip(native["token_ids"], reference["token_ids"], strict=True)
    ):
        ours, theirs = (each["logprobs"]["token_logprobs"][index] for each in answers)
        assert ours == pytest.approx(theirs, abs=0.06)
        if one != other:
            first, second = sorted(native["logprobs"]["top_logprobs"][index].values())[-2:]
            assert second - first < 0.02
            break
        agreed += 1
    assert agreed >= 4


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"executor": "cuda"}, "executor 'cuda' is none of native, reference, simulated"),
        (
            {"executor": "reference", "kv_cache_dtype": "int8"},
            "kv_cache_dtype int8: the reference executor's cache holds bf16, fp16",
        ),
        (
            {
                "executor": "simulated",
                "speculative_config": {"method": "layer_skip", "layers": [0]},
            },
            "speculative_config: the simulated executor cannot draft by layer_skip",
        ),
        (
            {"executor": "reference", "speculative_config": {"method": "medusa", "model": "x"}},
            "speculative_config: the reference executor cannot draft by medusa",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_at_load(
    model: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises((SettingsError, ValueError), match=reason):
        load_engine(load(model), EngineConfig(**SMALL | settings))
