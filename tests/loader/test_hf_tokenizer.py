"""Tokenizers of Hugging Face folders: equal to transformers' own, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.loader.base import ChatTemplateError, CheckpointError
from octavo.loader.chat_template import JinjaChatTemplate, problem
from octavo.loader.hf import _chat_template
from octavo.loader.hf_folder import HfFolder
from octavo.loader.hf_tokenizer import hf_tokenizer
from octavo.loader.tokenizer import BpeTokenizer
from oracle import odd_folders
from paths import ORACLE

RECORDED = ORACLE / "tokenizers"
KINDS = sorted(path.name for path in RECORDED.iterdir())


def cases(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / kind / "cases.json").read_text())
    return found


def copy(kind: str, path: Path, config: dict[str, Any] | None = None) -> Path:
    shutil.copytree(RECORDED / kind, path, dirs_exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {}))
    return path


def load(path: Path, vocab_size: int) -> BpeTokenizer:
    return hf_tokenizer(HfFolder(path), vocab_size)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str, tmp_path: Path) -> None:
    recorded = cases(kind)
    tokenizer = load(copy(kind, tmp_path), recorded["chat"]["size"])
    assert len(recorded["cases"]) > 250
    for case in recorded["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
        assert tokenizer.decode(case["ids"]) == case["skipped"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_chat_template_is_the_folders(kind: str, tmp_path: Path) -> None:
    chat = cases(kind)["chat"]
    path = copy(kind, tmp_path)
    names = load(path, chat["size"]).special_tokens_map
    template = _chat_template(HfFolder(path), names)
    if chat["text"] is None:
        assert template is None
    else:
        assert template.render(chat["messages"]) == chat["text"]


def test_stop_tokens_are_those_of_all_files(tmp_path: Path) -> None:
    size = cases("qwen2")["chat"]["size"]
    path = copy("qwen2", tmp_path, {"eos_token_id": 7})
    ids = {text: load(path, size).encode(text)[0] for text in ("<|im_end|>", "<|endoftext|>")}
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    tokenizer = load(path, size)
    assert tokenizer.eos_token_ids == {5, 6, 7, *ids.values()}
    assert tokenizer.bos_token_id is None
    assert tokenizer.kind == "byte-level BPE"
    (path / "generation_config.json").write_text('{"eos_token_id": 4}')
    assert load(path, size).eos_token_ids == {4, 7, *ids.values()}


def test_names_of_tokens_come_from_either_file(tmp_path: Path) -> None:
    path = copy("llama2", tmp_path, {"bos_token_id": 2})
    size = cases("llama2")["chat"]["size"]
    assert load(path, size).bos_token_id == 1
    (path / "tokenizer_config.json").write_text("{}")
    assert load(path, size).bos_token_id == 2
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (path / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer = load(path, size)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    assert tokenizer.kind == "SentencePiece-style BPE"


def test_special_tokens_are_no_text(tmp_path: Path) -> None:
    tokenizer = load(copy("qwen2", tmp_path), 600)
    ids = tokenizer.encode("<|im_end|><tool_call>é")
    assert [tokenizer.is_special(token_id) for token_id in ids[:2]] == [True, False]
    assert [tokenizer.token_bytes(token_id) for token_id in ids[:2]] == [b"", b"<tool_call>"]
    assert tokenizer.token_text(ids[0]) == "<|im_end|>"
    # Rows of the embedding that no token has.
    assert (tokenizer.token_bytes(599), tokenizer.token_text(599)) == (b"", "")
    assert tokenizer.decode([599, *ids]) == "<tool_call>é"
    with pytest.raises(IndexError):
        tokenizer.token_bytes(600)


def test_a_token_that_the_model_has_no_row_for(tmp_path: Path) -> None:
    tokenizer = load(copy("gemma", tmp_path), cases("gemma")["chat"]["size"] - 1)
    with pytest.raises(ValueError, match="not in the model's vocabulary of 722"):
        tokenizer.encode("▁▁")
    assert tokenizer.encode("a")


def test_settings_of_training_do_not_cut_or_fill(tmp_path: Path) -> None:
    path = copy("gpt2", tmp_path)

    def change(values: dict[str, Any]) -> None:
        values["truncation"] = {
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        values["padding"] = {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        }

    expected = load(path, 600).encode("a text of some more tokens")
    edit(path, change)
    assert load(path, 600).encode("a text of some more tokens") == expected


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((path / "tokenizer.json").read_text())
    change(values)
    (path / "tokenizer.json").write_text(json.dumps(values))


def framed(*single: dict[str, dict[str, Any]], ids: int = 1) -> dict[str, Any]:
    """A post-processor whose template for one text is ``single``."""
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    special = {"<s>": {"id": "<s>", "ids": [ids], "tokens": ["<s>"]}}
    return {
        "type": "TemplateProcessing",
        "single": list(single),
        "pair": texts,
        "special_tokens": special,
    }


TEXT: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
SECOND: dict[str, Any] = {"Sequence": {"id": "B", "type_id": 0}}


def token(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "not BPE": (
        lambda v: v.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
        "model type 'WordLevel' is not supported",
    ),
    "unreadable": (lambda v: v.update(model=3), "cannot be read"),
    "merges": (lambda v: v["model"].update(merges=[["zz", "qq"]]), "cannot be read"),
    "decoder": (lambda v: v.update(decoder=None), "decoder null is not supported"),
    "another decoder": (
        lambda v: v.update(decoder={"type": "BPEDecoder", "suffix": "</w>"}),
        'decoder {"type": "BPEDecoder"',
    ),
    "post-processor": (
        lambda v: v.update(
            post_processor={"type": "BertProcessing", "sep": ["a", 1], "cls": ["a", 1]}
        ),
        "post_processor 'BertProcessing' is not supported",
    ),
    "arrays for objects": (lambda v: v.update(decoder=["x"]), 'decoder ["x"] is not supported'),
    "second text": (
        lambda v: v.update(post_processor=framed(SECOND)),
        "post_processor has a second text in its template for one",
    ),
    "three texts": (
        lambda v: v.update(post_processor=framed(TEXT, TEXT, token("<s>"))),
        "post_processor has 2 texts in its template for one",
    ),
    "unknown special token": (
        lambda v: v.update(post_processor=framed(token("<x>"), TEXT)),
        "post_processor's template has '<x>', no special token of it",
    ),
    "special token beyond the model": (
        lambda v: v.update(post_processor=framed(token("<s>"), TEXT, ids=600)),
        "post_processor has token 600, outside 0 to 599",
    ),
    "prefix": (  # the library would abort the process
        lambda v: v["model"].update(continuing_subword_prefix="x"),
        "continuing_subword_prefix 'x' is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    change, reason = REFUSED[name]
    path = copy("gpt2", tmp_path)
    edit(path, change)
    with pytest.raises(CheckpointError) as caught:
        load(path, 600)
    assert str(caught.value).startswith(f"{tmp_path}/tokenizer.json: ")
    assert reason in str(caught.value)


def test_special_tokens_that_cannot_be(tmp_path: Path) -> None:
    path = copy("gpt2", tmp_path)
    names = path / "tokenizer_config.json"
    names.write_text(r'{"bos_token": "\ud800"}')
    with pytest.raises(CheckpointError, match=r"bos_token '.*' has a lone surrogate"):
        load(path, 600)
    size = cases("gpt2")["chat"]["size"]
    beyond = {"id": size, "content": "<big>", "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    edit(path, lambda values: values["added_tokens"].append(beyond))
    names.write_text('{"bos_token": "<big>"}')
    assert load(path, size + 1).bos_token_id == size
    with pytest.raises(CheckpointError, match=f"bos_token has token {size}, outside"):
        load(path, size)


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    path = copy("qwen2", tmp_path)
    config = path / "tokenizer_config.json"
    several = [{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}]
    config.write_text(json.dumps({"chat_template": several}))
    template = _chat_template(HfFolder(path), {})
    with pytest.raises(
        ChatTemplateError, match=r"several chat templates \(rag, tool_use\) and none"
    ):
        template.render([{"role": "user", "content": "hi"}])
    assert "none called default" in str(problem(template))
    several.append({"name": "default", "template": "d"})
    config.write_text(json.dumps({"chat_template": several}))
    assert source(path) == "d"
    # Files of their own go before, all of them.
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    template = _chat_template(HfFolder(path), {})
    assert template is not None
    assert "(tool_use)" in str(problem(template))
    (path / "chat_template.jinja").write_text("D")
    assert source(path) == "D"


def source(path: Path) -> str:
    template = _chat_template(HfFolder(path), {})
    assert isinstance(template, JinjaChatTemplate)
    return template.source


def test_templates_that_are_none(tmp_path: Path) -> None:
    path = copy("qwen2", tmp_path)
    (path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(CheckpointError, match="chat_template is a int, not a string"):
        _chat_template(HfFolder(path), {})
    (path / "tokenizer_config.json").write_text('{"chat_template": []}')
    assert _chat_template(HfFolder(path), {}) is None
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: is not UTF-8"):
        _chat_template(HfFolder(path), {})


ODD = json.loads((RECORDED.parent / "odd_folders.json").read_text())


@pytest.mark.parametrize("recorded", ODD, ids=lambda each: f"{each['seed']}-{each['class']}")
def test_unusual_added_tokens(recorded: dict[str, Any], tmp_path: Path) -> None:
    """Added by one file or several, with flags, classes and names at random; see odd_folders.py."""
    texts = odd_folders.build(tmp_path, recorded["seed"])
    tokenizer = load(tmp_path, 4096)
    assert tokenizer.special_tokens_map == recorded["names"]
    for text, (ids, decoded, skipped) in zip(texts, recorded["cases"], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == decoded
        assert tokenizer.decode(ids) == (decoded if skipped is None else skipped)
