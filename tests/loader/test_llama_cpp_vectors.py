"""The texts and tokens that llama.cpp publishes for its vocabularies (MIT, recorded by
benchmarks/llama_cpp_vectors.py), on vocabularies of the tokens that occur in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from gguf_writer import (
    ARRAY,
    INT32,
    NORMAL,
    STRING,
    USER_DEFINED,
    all_that_merges,
    byte_characters,
    tiny_llama,
)

from octavo.loader.gguf import GgufFile
from octavo.loader.gguf_tokenizer import gguf_tokenizer
from octavo.loader.pre_tokenizers import CUTS
from octavo.loader.tokenizer import BpeTokenizer

RECORDED = json.loads(
    (Path(__file__).parent.parent / "oracle" / "llama_cpp_vectors.json").read_text()
)
VOCABULARIES = RECORDED["vocabularies"]


def vocabulary(
    pre: str, tokens: list[str], merges: list[str], path: Path, added: Sequence[int] = ()
) -> BpeTokenizer:
    made = [merge.replace(" ", "") for merge in merges]
    tokens = list(dict.fromkeys([*tokens, *made, *byte_characters()]))
    file = tiny_llama().set("tokenizer.ggml.pre", STRING, pre)
    file.set("tokenizer.ggml.tokens", ARRAY, STRING, tokens)
    types = [USER_DEFINED if i in added else NORMAL for i in range(len(tokens))]
    file.set("tokenizer.ggml.token_type", ARRAY, INT32, types)
    file.set("tokenizer.ggml.merges", ARRAY, STRING, merges)
    file.drop("tokenizer.ggml.bos_token_id").drop("tokenizer.ggml.eos_token_id")
    return gguf_tokenizer(GgufFile(file.write(path / "model.gguf")), len(tokens))


@pytest.mark.parametrize("name", VOCABULARIES)
def test_equals_the_published_vectors(name: str, tmp_path: Path) -> None:
    recorded = VOCABULARIES[name]
    pre, tokens, merges, added = (recorded[key] for key in ("pre", "tokens", "merges", "added"))
    tokenizer = vocabulary(pre, tokens, merges, tmp_path, added)
    assert len(recorded["cases"]) >= 46
    for number, ids in zip(recorded["texts"], recorded["cases"], strict=True):
        text = RECORDED["texts"][number]
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize("pre", CUTS)
def test_every_name_cuts_and_loses_nothing(pre: str, tmp_path: Path) -> None:
    tokenizer = vocabulary(pre, [], [], tmp_path)
    for text in RECORDED["texts"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # As the expressions of the models' own files say it.
        ("gpt-4o", "HelloWorld's 1234 a/\n", ["Hello", "World's", " ", "123", "4", " a", "/\n"]),
        ("llama4", "it's  x", ["it's", " ", " x"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("dbrx", "it's 12345", ["it", "'s", " ", "123", "45"]),
        ("refact", "a1 b 23", ["a", "1", " b", " ", "2", "3"]),
        ("smaug-bpe", "x 1234", ["x", " ", "123", "4"]),
        ("deepseek-llm", "ab 12\n  ", ["ab", " ", "12", "\n", "  "]),
        ("exaone", "a12", ["a", "1", "2"]),
        ("olmo", "a12 3", ["a", "12", " 3"]),
        ("default", "a12345, b", ["a", "123", "45", ",", " b"]),
        ("superbpe", "12345 a b", ["12", "345", " a b"]),
    ],
)  # fmt: skip
def test_where_texts_are_cut(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    """Seen through a vocabulary in which everything within a piece merges."""
    spelled = dict(zip(range(256), byte_characters(), strict=True))
    whole = "".join(spelled[byte] for byte in text.encode())
    tokens, merges = all_that_merges(whole)
    tokenizer = vocabulary(pre, tokens, merges, tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == pieces
