"""Texts of exactly so many tokens, by the tokenizers of real models and of the server."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from load_servers import Asked, serving_script, whole

from octavo.tools.bench.load.client import Client, Endpoint
from octavo.tools.bench.load.vocabulary import COMMON, Ids, LocalTokenizer, ServerTokenizer, Words
from octavo.tools.workload.datasets import Sample, prefix_repetition, random_prompts


@pytest.fixture(params=["smollm2_path", "gemma3_path"])
def tokenizer(request: pytest.FixtureRequest) -> LocalTokenizer:
    """Byte-level without BOS; SentencePiece-style with one."""
    return LocalTokenizer(request.getfixturevalue(request.param))


def samples() -> list[Sample]:
    return [
        *random_prompts(
            20, input_len=60, output_len=1, range_ratio=0.9, prefix_len=5, seed=0
        ),
        *prefix_repetition(
            6, prefix_len=32, suffix_len=9, num_prefixes=2, output_len=1, seed=0, shuffle=False
        ),
    ]  # fmt: skip


def test_texts_have_exactly_the_tokens_asked_for(tokenizer: LocalTokenizer) -> None:
    tokens = tokenizer.tokens("model")
    words = tokens.words()
    assert len(words) > 1000
    vocabulary = Words(words, tokens.special)
    texts = [vocabulary.prompt(sample, 4) for sample in samples()]
    for text, sample in zip(texts, samples(), strict=True):
        assert isinstance(text, str)
        assert tokens.count(text) == sample.prompt_len
    # Shared words are shared tokens.
    first, second = (tokenizer.encode(str(text)) for text in texts[-6:-4])
    shared = 32 - tokens.special
    assert first[:shared] == second[:shared]
    assert first != second


def test_ids_are_of_tokens_that_stand_for_text(tokenizer: LocalTokenizer) -> None:
    ids = Ids(tokenizer.ids).prompt(samples()[0], 0)
    assert len(ids) == samples()[0].prompt_len
    assert set(ids) <= set(tokenizer.ids)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="not a tokenizer"):
        LocalTokenizer(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        LocalTokenizer(tmp_path)


@pytest.mark.parametrize("form", ["prompt", "content"])  # vLLM's and llama.cpp's
async def test_the_servers_tokenizer(form: str) -> None:
    """It splits words with a y in two, and puts one token before a text."""

    async def tokenize(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        text = asked.json.get(form)
        special = asked.json.get("add_special_tokens") or asked.json.get("add_special")
        if text is None:
            writer.write(whole("200 OK", b'{"tokens": []}'))
            return
        ids = [1] if special else []
        for word in text.split():
            ids += [2 + COMMON.index(word)] * (2 if "y" in word else 1)
        writer.write(whole("200 OK", msgspec.json.encode({"tokens": ids})))

    async with serving_script(tokenize) as server:
        client = Client(Endpoint.of(server.url), {})
        tokens = await ServerTokenizer(client, "/tok", "m").tokens()
        await client.close()
    assert tokens.name == "/tok"
    assert tokens.special == 1
    assert list(tokens.words()) == [word for word in COMMON if "y" not in word]
    assert list(tokens.ids) == [2 + index for index in range(len(COMMON))]


async def test_a_server_without_a_tokenizer_and_one_that_is_gone() -> None:
    async def none(reader: Any, writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(whole("200 OK", b"<html>"))

    async with serving_script(none) as server:
        client = Client(Endpoint.of(server.url), {})
        with pytest.raises(ValueError, match="has no /tok"):
            await ServerTokenizer(client, "/tok", "m").tokens()
        await client.close()
    with pytest.raises(OSError, match="connection refused"):
        await ServerTokenizer(Client(Endpoint.of("http://127.0.0.1:1"), {}), "/tok", "m").tokens()
