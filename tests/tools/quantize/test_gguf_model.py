"""GGUF files made of folders: the same model and the same tokens, or a refusal that says why."""

import json
import os
import shutil
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor import tiny
from octavo.executor.reference import evaluate
from octavo.loader import load
from octavo.loader.bind import ROUTERS
from octavo.loader.gguf import GgufFile
from octavo.loader.tokenizer import SPACE
from octavo.models import families
from octavo.models.config import UNROTATED
from octavo.tools.quantize.ggml_rounding import ggml_round
from octavo.tools.quantize.layouts import Format, scheme_of
from octavo.tools.quantize.same_model import difference
from octavo.tools.quantize.state import QuantizeError
from octavo.tools.quantize.value_heads import in_gguf_order
from oracle.tiny_folders import BASE, FAMILIES, gguf_file
from tools.quantize.quantizing import (
    SAMPLES,
    logits_of,
    make,
    random_folder,
    speaking,
    weights_of,
)

TOKENIZERS = FAMILIES.parent / "tokenizers"
# What GGUF has no keys for, and says so.
REFUSED = {
    "granite_swa": "there is no architecture of it",
    "lfm3": "there is no architecture of it",
    "gpt_oss": "the rotary positions of layer 0 would differ",
    "mistral": "the window of layer 0 would differ",
    "qwen3moe-dense": r"has no tensor for layers\.0\.ffn_down_exps\.0",
}

EIGHT_BITS: dict[str, Any] = {"format": "gguf", "bits": 8, "symmetric": True}
NAMES = sorted(path.name for path in FAMILIES.iterdir())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_every_family(name: str, tmp_path: Path) -> None:
    changes = {"hidden_size_per_layer_input": 32} if name == "gemma4-e" else {}  # whole blocks
    assert_written(speaking(random_folder(name, tmp_path / "source", **changes)), tmp_path)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_delta_nets_are_as_llama_cpp_s_converter_has_them(name: str, tmp_path: Path) -> None:
    make(speaking(random_folder(name, tmp_path / "source")), tmp_path / "out.gguf", format="gguf")
    ours = GgufFile(tmp_path / "out.gguf")
    theirs = GgufFile(gguf_file(name, BASE, tmp_path / "theirs.gguf"))
    assert ours.tensors.keys() == theirs.tensors.keys()
    # `attention.recurrent_layers` says which layers these are; the interval is for older readers.
    asked = theirs.metadata.keys() - {"general.size_label"}
    asked -= {f"{theirs.get('general.architecture', str)}.full_attention_interval"}
    asked = {key for key in asked if not key.startswith("tokenizer.")}
    assert asked <= ours.metadata.keys()


def test_interleaved_matrices_of_a_gguf_file(tmp_path: Path) -> None:
    """AWQ scales what lies between them, too."""
    make(speaking(random_folder("qwen3_next", tmp_path / "source")), tmp_path / "8", **EIGHT_BITS)
    expected = logits_of(load(tmp_path / "8"))
    losses = {}
    for method in ("rtn", "awq"):
        make(tmp_path / "8", tmp_path / method, format="gguf", method=method)
        losses[method] = np.square(logits_of(load(tmp_path / method)) - expected).mean()
    assert losses["awq"] < 0.9 * losses["rtn"] < 0.9 * expected.var()
    before, after = (weights_of(load(tmp_path / name)) for name in ("8", "awq"))
    norm = "layers.0.attn_norm"
    assert not np.allclose(before[norm], after[norm])
    for gate in ("layers.0.ssm_beta", "layers.0.ssm_alpha"):  # which stay in full precision
        assert np.allclose(after[norm] * after[gate], before[norm] * before[gate], atol=1e-5)


def test_gpt_oss_of_a_rounded_range(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    changes = {"rope_parameters": yarn | {"truncate": True}, "swiglu_limit": 7.0}
    assert_written(speaking(random_folder("gpt_oss", tmp_path / "source", **changes)), tmp_path)


def assert_written(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "out.gguf", **EIGHT_BITS)
    before, after = load(source), load(tmp_path / "out.gguf")
    assert difference(in_gguf_order(before).config, after.config) is None
    # The source with its matrices rounded where they lie is the same function.
    weights = {
        role: ggml_round(scheme_of(Format.GGUF, 8, 32, True), value).values()
        if role.startswith("layers.") and value.ndim == 2 and not role.endswith(ROUTERS)
        else value
        for role, value in weights_of(before).items()
    }
    expected = evaluate.logits(families.program(before.config), weights, SAMPLES[:2])
    got = logits_of(after)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_what_gguf_cannot_say_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    source = speaking(random_folder(name, tmp_path / "source"))
    with pytest.raises(QuantizeError, match=f"GGUF has no way to say the same.*{reason}"):
        make(source, tmp_path / "out.gguf", format="gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "attention_factor": 1.25,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope['rope_type']} {len(rope)}")
def test_rotary_positions(rope: dict[str, Any], tmp_path: Path) -> None:
    scaled = {"rope_parameters": None, "rope_scaling": rope, "max_position_embeddings": 128}
    source = speaking(random_folder("llama", tmp_path / "source", **scaled))
    make(source, tmp_path / "out.gguf", format="gguf")
    found = load(tmp_path / "out.gguf").config
    assert difference(load(source).config, found) is None
    assert found.layers[0].rope.factors or found.layers[0].rope.scale == 0.25


def test_heads_of_a_layer_are_compared() -> None:
    config = tiny.mixed()
    layers = config.layers
    assert difference(config, config) is None
    for index, change in ((0, {"num_kv_heads": 4}), (1, {"head_dim": 58}), (3, {"shares": None})):
        other = list(layers)
        other[index] = replace(layers[index], **change)
        found = replace(config, layers=tuple(other[: index + 1]))
        wanted = replace(config, layers=layers[: index + 1])
        assert difference(wanted, found) == f"the KV cache of layer {index} would differ"


def test_long_rope(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5] * 2, "long_factor": [2.0, 3.0, 4.0, 5.0] * 2}
    scaled = {"rope_parameters": None, "rope_scaling": {"rope_type": "longrope", **factors}}
    scaled |= {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    source = speaking(random_folder("phi3", tmp_path / "source", **scaled))
    make(source, tmp_path / "out.gguf", format="gguf")
    found = load(tmp_path / "out.gguf").config
    assert difference(load(source).config, found) is None
    assert found.layers[0].rope.by_length is not None


def test_no_rotary_positions(tmp_path: Path) -> None:
    """In both formats, where a family's class takes a part of 0."""
    part = {"rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": 0.0}
    source = speaking(random_folder("phi3", tmp_path / "source", **part))
    make(source, tmp_path / "out.gguf", format="gguf")
    make(tmp_path / "out.gguf", tmp_path / "folder")
    for path in (source, tmp_path / "out.gguf", tmp_path / "folder"):
        assert {layer.rope for layer in load(path).config.layers} == {UNROTATED}


def test_rotary_positions_without_a_key_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0}
    source = speaking(
        random_folder("llama", tmp_path / "source", rope_parameters=None, rope_scaling=rope)
    )
    with pytest.raises(QuantizeError, match="the rotary positions of layer 0 would differ"):
        make(source, tmp_path / "out.gguf", format="gguf")


# ── Tokenizers ──────────────────────────────────────────────────────────────────────────────────


def recorded(kind: str, path: Path, family: str | None = None) -> Path:
    """A small model with a recorded tokenizer."""
    cases = json.loads((TOKENIZERS / kind / "cases.json").read_text())
    size = cases["chat"]["size"] + 5  # embeddings are often padded
    family = family or ("gemma3" if kind == "gemma" else "llama")
    random_folder(family, path, vocab_size=size)
    for file in (TOKENIZERS / kind).iterdir():
        if file.name != "cases.json":
            shutil.copyfile(file, path / file.name)
    if kind == "gemma":  # whose runs of spaces are reached by merging, too
        spec = json.loads((path / "tokenizer.json").read_text())
        spec["model"]["vocab"][SPACE * 2] = spec["added_tokens"][-1]["id"]
        spec["model"]["merges"].append([SPACE, SPACE])
        (path / "tokenizer.json").write_text(json.dumps(spec))
    return path


def decomposed(text: str) -> bool:
    return unicodedata.normalize("NFC", text) != text


@pytest.mark.parametrize("kind", sorted(path.name for path in TOKENIZERS.iterdir()))
def test_every_kind_of_tokenizer(kind: str, tmp_path: Path) -> None:
    source = recorded(kind, tmp_path / "source")
    outcome = make(source, tmp_path / "out.gguf", format="gguf")
    before, after = load(source), load(tmp_path / "out.gguf")
    cases = json.loads((TOKENIZERS / kind / "cases.json").read_text())["cases"]
    different = []
    for case in cases:
        ids = after.tokenizer.encode(case["text"])
        if ids != before.tokenizer.encode(case["text"]):
            different.append(case["text"])
        else:
            assert after.tokenizer.decode(ids) == before.tokenizer.decode(ids)
    # Only where a note has said so.
    assert not different or outcome.notes
    known: Callable[[str], bool] = {
        "gemma": lambda text: SPACE in text,
        "llama2-metaspace": lambda text: text.startswith((" ", SPACE)) or "<" in text,
        "qwen2": decomposed,
        "cohere": decomposed,
    }.get(kind, lambda text: False)
    assert all(map(known, different)), different
    assert after.tokenizer.eos_token_ids == before.tokenizer.eos_token_ids
    assert after.tokenizer.bos_token_id == before.tokenizer.bos_token_id
    messages: list[dict[str, object]] = [{"role": "user", "content": "Hello there"}]
    if before.chat_template is not None:
        text = before.chat_template.render(messages, add_generation_prompt=True)
        assert after.chat_template.render(messages, add_generation_prompt=True) == text
        assert outcome.notes or after.tokenizer.encode(text) == before.tokenizer.encode(text)


def test_types_of_tokens(tmp_path: Path) -> None:
    source = recorded("llama2-metaspace", tmp_path / "source")
    make(source, tmp_path / "out.gguf", format="gguf")
    file = GgufFile(tmp_path / "out.gguf")
    types, tokens = file.numbers("tokenizer.ggml.token_type"), file.strings("tokenizer.ggml.tokens")
    texts = tokens.text()
    assert [types[texts.index(text)] for text in ("<s>", "<|user|>", "<0x41>")] == [3, 3, 6]
    assert types[-5:].tolist() == [5] * 5  # ids that the embedding has and the tokenizer has not
    assert texts[-1] == f"[PAD{len(texts) - 1}]"
    assert file.get("tokenizer.ggml.add_space_prefix", bool) is True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pre_tokenizer": None}, "its pre_tokenizer is none that GGUF has a name for"),
        ({"normalizer": {"type": "Lowercase"}}, "its normalizer is none"),
    ],
)
def test_other_ways_of_cutting_are_refused(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = recorded("gpt2", tmp_path / "source")
    spec = json.loads((source / "tokenizer.json").read_text()) | change
    (source / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(QuantizeError, match=reason):
        make(source, tmp_path / "out.gguf", format="gguf")


def test_merges_that_scores_cannot_say_are_refused(tmp_path: Path) -> None:
    """A SentencePiece-style vocabulary merges in another order than its tokens are listed in."""
    source = recorded("llama2", tmp_path / "source")
    spec = json.loads((source / "tokenizer.json").read_text())
    spec["model"]["merges"] = spec["model"]["merges"][:30]
    (source / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(QuantizeError, match="would have other tokens"):
        make(source, tmp_path / "out.gguf", format="gguf")


def test_a_chat_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    source = recorded("gpt2", tmp_path / "source")
    (source / "tokenizer_config.json").write_text('{"chat_template": "hello \\ud800"}')
    reason = r"/source: tokenizer\.chat_template has a lone surrogate \('\\ud800' at character 6\)"
    with pytest.raises(QuantizeError, match=reason):
        make(source, tmp_path / "out.gguf", format="gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"mod\xffel")
    recorded("gpt2", tmp_path / "source").rename(source)
    make(source, tmp_path / "out.gguf", format="gguf")
    assert GgufFile(tmp_path / "out.gguf").get("general.name", str) == r"mod\xffel"
