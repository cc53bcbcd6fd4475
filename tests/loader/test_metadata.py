"""Metadata to `ModelConfig`: what each key means, and what is refused."""

from collections.abc import Callable
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import (
    ARRAY,
    BOOL,
    F16,
    F32,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    UINT64,
    Gguf,
    Tensor,
    tiny_gemma3,
    tiny_llama,
)

from octavo.loader.base import CheckpointError
from octavo.loader.gguf import GgufFile
from octavo.loader.metadata import model_config
from octavo.models.config import Activation, ModelConfig, Rope
from oracle.tiny_folders import gguf_file


def config(file: Gguf, tmp_path: Path) -> ModelConfig:
    return model_config(GgufFile(file.write(tmp_path / "model.gguf")))


def test_llama(tmp_path: Path) -> None:
    c = config(tiny_llama(), tmp_path)
    assert (c.family, c.name, c.vocab_size, c.hidden_size) == ("llama", "tiny", 263, 32)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size) == (4, 2, 8, 64)
    assert (c.context_length, c.norm_eps) == (128, np.float32(1e-5))
    assert c.activation is Activation.SILU
    assert c.attention_scale == 1 / sqrt(8)
    assert c.tied_embeddings
    assert c.embedding_scale == 1.0
    assert [layer.window for layer in c.layers] == [None, None]
    assert c.layers[0].rope == Rope(10000.0, 8, interleaved=True)
    assert not c.biases


def test_llama_without_the_optional_keys(tmp_path: Path) -> None:
    file = tiny_llama(kv_heads=4)
    for key in ("attention.head_count_kv", "rope.dimension_count", "vocab_size", "rope.freq_base"):
        file.drop(f"llama.{key}")
    file.drop("general.name")
    c = config(file, tmp_path)
    assert (c.num_kv_heads, c.vocab_size, c.name) == (4, 263, "")
    assert c.layers[0].rope == Rope(10000.0, 8, interleaved=True)


def test_head_dim_apart_from_hidden_size(tmp_path: Path) -> None:
    file = tiny_llama()
    file.set("llama.attention.key_length", UINT32, 16)
    file.set("llama.attention.value_length", UINT32, 16)
    file.drop("llama.rope.dimension_count")
    c = config(file, tmp_path)
    assert (c.head_dim, c.attention_scale, c.layers[0].rope.dim) == (16, 0.25, 16)


def test_untied_head_and_biases(tmp_path: Path) -> None:
    file = tiny_llama()
    file.tensors.append(Tensor("output.weight", (263, 32), F16))
    for name, size in (("attn_q", 32), ("attn_k", 16)):
        for layer in range(2):
            file.tensors.append(Tensor(f"blk.{layer}.{name}.bias", (size,), F32))
    c = config(file, tmp_path)
    assert not c.tied_embeddings
    assert c.biases == {"attn_q", "attn_k"}


def test_llama3_rope_factors(tmp_path: Path) -> None:
    file = tiny_llama()
    factors = np.array([1, 1.5, 4, 8], "<f4")
    file.tensors.append(Tensor("rope_freqs.weight", (4,), F32, factors.tobytes()))
    assert config(file, tmp_path).layers[0].rope.factors == (1.0, 1.5, 4.0, 8.0)


@pytest.mark.parametrize("typed", [True, False])
def test_linear_rope_scaling(tmp_path: Path, typed: bool) -> None:
    file = tiny_llama().set("llama.rope.scaling.factor", FLOAT32, 4.0)
    if typed:
        file.set("llama.rope.scaling.type", STRING, "linear")
    assert config(file, tmp_path).layers[0].rope.scale == 0.25


def test_gemma3(tmp_path: Path) -> None:
    file = tiny_gemma3(layers=7).set("gemma3.final_logit_softcapping", FLOAT32, 30.0)
    c = config(file, tmp_path)
    assert (c.family, c.head_dim, c.num_kv_heads) == ("gemma3", 16, 1)
    assert c.activation is Activation.GELU_TANH
    assert c.attention_scale == 0.25
    assert c.embedding_scale == sqrt(32)
    assert c.logits_softcap == 30.0
    assert [layer.window for layer in c.layers] == [8, 8, 8, 8, 8, None, 8]
    assert c.layers[0].rope == Rope(10000.0, 16, interleaved=False)
    assert c.layers[5].rope == Rope(1e6, 16, interleaved=False)


def test_gemma3_scaling_is_for_global_layers(tmp_path: Path) -> None:
    file = tiny_gemma3()
    file.set("gemma3.rope.scaling.type", STRING, "linear")
    file.set("gemma3.rope.scaling.factor", FLOAT32, 8.0)
    file.set("gemma3.rope.freq_base_swa", FLOAT32, 5000.0)
    c = config(file, tmp_path)
    assert c.layers[0].rope == Rope(5000.0, 16, interleaved=False)
    assert c.layers[5].rope == Rope(1e6, 16, interleaved=False, scale=0.125)


def test_gemma3_window_pattern(tmp_path: Path) -> None:
    file = tiny_gemma3().set("gemma3.attention.sliding_window_pattern", UINT32, 3)
    windows = [layer.window for layer in config(file, tmp_path).layers]
    assert windows == [8, 8, None, 8, 8, None]
    flags = [False, True, True, True, True, False]
    file.set("gemma3.attention.sliding_window_pattern", ARRAY, BOOL, flags)
    windows = [layer.window for layer in config(file, tmp_path).layers]
    assert windows == [None, 8, 8, 8, 8, None]


def test_what_gguf_files_leave_out_is_as_in_llama_cpp(tmp_path: Path) -> None:
    """Its defaults: hparams of llama.cpp's src/llama-model.cpp and src/models/gemma*.cpp."""
    # Types of scaling without a factor, and a factor without a type or under its old name.
    for kind in ("linear", "yarn", "none"):
        file = tiny_llama().set("llama.rope.scaling.type", STRING, kind)
        rope = config(file, tmp_path).layers[0].rope
        assert (rope.scale, set(rope.factors) <= {1.0}, rope.magnitude) == (1.0, True, 1.0)
    old = tiny_llama().set("llama.rope.scale_linear", FLOAT32, 4.0)
    assert config(old, tmp_path).layers[0].rope.scale == 0.25
    both = old.set("llama.rope.scaling.factor", FLOAT32, 2.0)
    assert config(both, tmp_path).layers[0].rope.scale == 0.5
    none = both.set("llama.rope.scaling.type", STRING, "none")
    assert config(none, tmp_path).layers[0].rope.scale == 1.0
    # A number for each layer, if it is the same.
    file = tiny_llama()
    for key, value in (("attention.head_count", 4), ("attention.head_count_kv", 2),
                       ("feed_forward_length", 64)):  # fmt: skip
        file.set(f"llama.{key}", ARRAY, UINT32, [value, value])
    assert config(file, tmp_path) == config(tiny_llama(), tmp_path)
    # Gemma 3 without windows, and Gemma 2 without their size.
    file = tiny_gemma3().set("gemma3.attention.sliding_window", UINT32, 0)
    assert {layer.window for layer in config(file, tmp_path).layers} == {None}
    assert {layer.rope.theta for layer in config(file, tmp_path).layers} == {1e6}
    file.drop("gemma3.attention.sliding_window")
    assert {layer.window for layer in config(file, tmp_path).layers} == {None}


def test_a_llama3_file_without_its_factors_is_noted(tmp_path: Path) -> None:
    def notes(file: Gguf) -> list[str]:
        opened = GgufFile(file.write(tmp_path / "model.gguf"))
        assert model_config(opened).layers[0].rope.scale == 1.0
        return opened.notes

    file = tiny_llama().set("llama.rope.freq_base", FLOAT32, 500000.0)
    assert not notes(file)
    file.set("llama.context_length", UINT32, 131072)
    (note,) = notes(file)
    assert "positions are not scaled, as in llama.cpp" in note
    assert "131072 tokens, and rope.freq_base 500000 is that of Llama 3.1" in note
    factors = np.array([1, 1.5, 4, 8], "<f4")
    file.tensors.append(Tensor("rope_freqs.weight", (4,), F32, factors.tobytes()))
    assert not notes(file)
    file = tiny_llama().set("llama.rope.scaling.original_context_length", UINT32, 32)
    (note,) = notes(file)
    assert "128 tokens, and training had 32" in note


def test_granite_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    file = tiny_llama()
    file.set("general.architecture", STRING, "granite")
    for key in [key for key in file.metadata if key.startswith("llama.")]:
        file.metadata[key.replace("llama.", "granite.")] = file.metadata.pop(key)
    assert config(file, tmp_path).family == "granite"
    file.set("granite.rope.scaling.finetuned", BOOL, False)
    with pytest.raises(CheckpointError, match="no rotary positions, and is not supported"):
        config(file, tmp_path)


def test_gemma3_27b_scales_attention_by_hidden_size(tmp_path: Path) -> None:
    wide = {"hidden": 64}  # 32 a head, whose keys are 16 wide
    assert config(tiny_gemma3(layers=62, **wide), tmp_path).attention_scale == 1 / sqrt(32)
    assert config(tiny_gemma3(layers=6, **wide), tmp_path).attention_scale == 1 / sqrt(16)


Change = Callable[[Gguf], object]
REFUSED: dict[str, tuple[Change, str]] = {
    "architecture": (
        lambda f: f.set("general.architecture", STRING, "mamba"),
        "architecture 'mamba' is not supported; supported are ",
    ),
    "no architecture": (
        lambda f: f.drop("general.architecture"),
        "key general.architecture is missing",
    ),
    "no layers key": (lambda f: f.drop("llama.block_count"), "llama.block_count is missing"),
    "no layers": (lambda f: f.set("llama.block_count", UINT32, 0), "block_count is 0"),
    "513 layers": (lambda f: f.set("llama.block_count", UINT32, 513), "513, which is above 512"),
    "2^31 layers": (lambda f: f.set("llama.block_count", UINT32, 1 << 31), "above 512"),
    "2^63 layers": (lambda f: f.set("llama.block_count", UINT64, 1 << 63), "above 512"),
    "-1 layers": (lambda f: f.set("llama.block_count", INT32, -1), "is -1, which is below 1"),
    "layers as text": (lambda f: f.set("llama.block_count", STRING, "2"), "is a str, not a int"),
    "no heads": (lambda f: f.set("llama.attention.head_count", UINT32, 0), "head_count is 0"),
    "no KV heads": (lambda f: f.set("llama.attention.head_count_kv", UINT32, 0), "kv is 0"),
    "heads a layer": (
        lambda f: f.set("llama.attention.head_count", ARRAY, UINT32, [4, 2]),
        "head_count differs from layer to layer, which is not supported",
    ),
    "heads of other layers": (
        lambda f: f.set("llama.attention.head_count", ARRAY, UINT32, [4]),
        "head_count is not one integer for each of 2 layers",
    ),
    "widths a layer": (
        lambda f: f.set("llama.feed_forward_length", ARRAY, FLOAT32, [64.0, 64.0]),
        "feed_forward_length is not one integer for each of 2 layers",
    ),
    "uneven heads": (
        lambda f: f.set("llama.attention.head_count_kv", UINT32, 3),
        "num_heads 4 is not a multiple of num_kv_heads 3",
    ),
    "uneven hidden size": (
        lambda f: f.set("llama.attention.head_count", UINT32, 3),
        "embedding_length is 32, which is not a multiple of attention.head_count 3",
    ),
    "value length": (
        lambda f: f.set("llama.attention.value_length", UINT32, 4),
        "differs from the key length 8",
    ),
    "vocabulary": (lambda f: f.set("llama.vocab_size", UINT32, 7), "the embedding's 263 rows"),
    "embedding": (lambda f: f.tensors.pop(0), "'token_embd.weight' is missing"),
    "rope type": (
        lambda f: f.set("llama.rope.scaling.type", STRING, "axial"),
        "is 'axial', which is not supported; supported are none, linear, yarn, longrope",
    ),
    "small factor": (
        lambda f: f.set("llama.rope.scaling.factor", FLOAT32, 0.5),
        "rope.scaling.factor is 0.5, which is below 1",
    ),
    "llama3 as a type": (
        lambda f: f.set("llama.rope.scaling.type", STRING, "llama3"),
        "is 'llama3', which is not supported; supported are none, linear, yarn, longrope",
    ),
    "half of longrope": (
        lambda f: f.tensors.append(Tensor("rope_factors_long.weight", (4,), F32)),
        "does not have rope_factors_short and rope_factors_long alone",
    ),
    "rope factor": (
        lambda f: f.set("llama.rope.scaling.factor", FLOAT32, float("nan")),
        "factor is nan, which is below 1",
    ),
    "rope attention factor": (
        lambda f: f.set("llama.rope.scaling.attn_factor", FLOAT32, -1.5),
        "rope magnitude -1.5 is not a positive number",
    ),
    "rope width": (
        lambda f: f.set("llama.rope.dimension_count", UINT32, 10),
        "is 10, which does not fit heads of 8",
    ),
    "rope base": (lambda f: f.set("llama.rope.freq_base", FLOAT32, float("inf")), "rope theta inf"),
    "rope factors": (
        lambda f: f.tensors.append(Tensor("rope_freqs.weight", (5,), F32)),
        "'rope_freqs.weight' is F32 [5], not F32 [4]",
    ),
    "zero rope factors": (
        lambda f: f.tensors.append(Tensor("rope_freqs.weight", (4,), F32)),
        "rope factor is not a positive number",
    ),
    "epsilon": (
        lambda f: f.set("llama.attention.layer_norm_rms_epsilon", FLOAT32, float("nan")),
        "norm_eps is nan",
    ),
    "context": (lambda f: f.set("llama.context_length", UINT64, 1 << 40), "context_length is"),
    "shared experts": (
        lambda f: f.set("llama.expert_shared_count", UINT32, 1),
        "llama.expert_shared_count is 1, which is not supported",
    ),
    "a key nobody knows": (
        lambda f: f.set("llama.attention.twist", FLOAT32, 0.5),
        "llama.attention.twist is 0.5, which is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path: Path, name: str) -> None:
    change, reason = REFUSED[name]
    file = tiny_llama()
    change(file)
    with pytest.raises(CheckpointError) as caught:
        config(file, tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "model.gguf"))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("sliding_window_pattern", (ARRAY, BOOL, [True]), "one bool for each of 6 layers"),
        ("sliding_window_pattern", (UINT32, 0), "is 0, which is below 1"),
    ],
)
def test_gemma3_windows_refused(
    tmp_path: Path, key: str, value: tuple[object, ...], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        config(tiny_gemma3().set(f"gemma3.attention.{key}", *value), tmp_path)


def test_unused_experts_are_no_experts(tmp_path: Path) -> None:
    file = tiny_llama().set("llama.expert_count", UINT32, 0)
    assert config(file, tmp_path).family == "llama"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1.5])
def test_a_width_is_an_integer(number: float, tmp_path: Path) -> None:
    file = GgufFile(gguf_file("gemma4-e", "base", tmp_path / "model.gguf"))
    file.metadata["gemma4.embedding_length_per_layer_input"] = number
    with pytest.raises(CheckpointError, match="input is a float, not a int"):
        model_config(file)


def test_a_number_for_each_layer_of_a_key_that_is_off_is_refused(tmp_path: Path) -> None:
    file = tiny_gemma3().set("gemma3.expert_used_count", ARRAY, UINT32, [0, 0])
    with pytest.raises(CheckpointError, match="expert_used_count is not supported"):
        config(file, tmp_path)
