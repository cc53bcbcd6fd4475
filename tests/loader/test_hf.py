"""Hugging Face folders: tensors bound to roles, configs read or refused, contradictions named."""

import json
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loader.quantized_writer import refused
from octavo.loader import load
from octavo.loader.base import Checkpoint, CheckpointError, WeightFormat
from octavo.models.config import Activation, DynamicNtk, LongRope
from octavo.models.families import program
from oracle.tiny_folders import folder

INDEX = "model.safetensors.index.json"


def shard(path: Path, parts: int = 3) -> dict[str, str]:
    """Cuts model.safetensors into shards with an index, as save_pretrained does."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for number in range(parts):
        name = f"model-{number + 1:05}-of-{parts:05}.safetensors"
        part = {key: weights[key] for key in sorted(weights)[number::parts]}
        save_file(part, path / name)
        places |= dict.fromkeys(part, name)
    total = sum(values.nbytes for values in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (path / INDEX).write_text(json.dumps(index))
    return places


def change_weights(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")


def change_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


# ── Weights ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_keep_their_bytes(bf16: bool, tmp_path: Path) -> None:
    path = folder("qwen2", tmp_path / "m", bf16=bf16)
    stored = load_file(path / "model.safetensors")
    checkpoint = load(path)
    shapes = {role: weight.shape for role, weight in checkpoint.weights.items()}
    assert shapes == program(checkpoint.config).weights
    weight = checkpoint.weights["layers.1.ffn_down"]
    assert weight.name == "model.layers.1.mlp.down_proj.weight"
    assert weight.format is (WeightFormat.BF16 if bf16 else WeightFormat.F32)
    assert weight.data.tobytes() == stored[weight.name].tobytes()
    norm = checkpoint.weights["layers.0.attn_norm"]
    assert norm.format is WeightFormat.F32
    expected = stored["model.layers.0.input_layernorm.weight"].astype(np.float32)
    assert norm.data.tobytes() == expected.tobytes()
    assert checkpoint.path == path
    assert checkpoint.file_bytes == (path / "model.safetensors").stat().st_size
    checkpoint.release()
    assert weight.data.tobytes() == stored[weight.name].tobytes()


def same(a: Checkpoint, b: Checkpoint) -> bool:
    return (
        replace(a.config, name="") == replace(b.config, name="")
        and a.weights.keys() == b.weights.keys()
        and all(w.data.tobytes() == b.weights[role].data.tobytes() for role, w in a.weights.items())
    )


def test_shards_are_one_model(tmp_path: Path) -> None:
    whole = load(folder("llama", tmp_path / "whole"))
    path = folder("llama", tmp_path / "shards")
    shard(path)
    assert same(load(path), whole)
    assert load(path).file_bytes > 0


def test_fused_matrices_are_views_of_rows(tmp_path: Path) -> None:
    path = folder("phi3", tmp_path / "m")
    weights = load(path).weights
    stored = load_file(path / "model.safetensors")
    for fused, parts in {
        "self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
        "mlp.gate_up_proj": ("ffn_gate", "ffn_up"),
    }.items():
        joined = b"".join(weights[f"layers.1.{part}"].data.tobytes() for part in parts)
        assert joined == stored[f"model.layers.1.{fused}.weight"].tobytes()
        assert not any(weights[f"layers.1.{part}"].data.flags.owndata for part in parts)


def test_gemma_norms_get_their_one(tmp_path: Path) -> None:
    path = folder("gemma3", tmp_path / "m")
    stored = load_file(path / "model.safetensors")["model.layers.0.self_attn.q_norm.weight"]
    norm = load(path).weights["layers.0.attn_q_norm"]
    assert np.array_equal(norm.data.view(np.float32), stored + np.float32(1))


def test_a_head_that_is_stored_though_tied(tmp_path: Path) -> None:
    path = folder("qwen3", tmp_path / "m")
    change_weights(
        path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].copy()})
    )
    checkpoint = load(path)
    assert checkpoint.config.tied_embeddings
    assert "output" not in checkpoint.weights
    # Values that differ are no tied head, whatever config.json says: so does transformers.
    change_weights(path, lambda w: w["lm_head.weight"].__setitem__((3, 4), 7.0))
    checkpoint = load(path)
    assert not checkpoint.config.tied_embeddings
    assert checkpoint.weights["output"].name == "lm_head.weight"
    assert "tie_word_embeddings is true, but 'lm_head.weight' is not" in checkpoint.notes[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "other"])
def test_a_tied_head_is_compared_by_value(dtype: str, tmp_path: Path) -> None:
    path = folder("qwen3", tmp_path / "m", bf16=True)
    wide = load_file(path / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)
    head = wide + np.float32(2**-20) if dtype == "other" else wide.astype(np.dtype(dtype))
    if dtype == "float16":  # holds fewer large numbers, and bfloat16 fewer small ones
        assert np.array_equal(head.astype(np.float32), wide)
    change_weights(path, lambda w: w.update({"lm_head.weight": head}))
    assert load(path).config.tied_embeddings == (dtype != "other")


def test_a_tied_embedding_may_be_stored_as_the_head(tmp_path: Path) -> None:
    path = folder("qwen3", tmp_path / "m")
    whole = load(path)
    change_weights(path, lambda w: w.update({"lm_head.weight": w.pop("model.embed_tokens.weight")}))
    assert same(load(path), whole)


def test_without_the_key_the_family_decides_about_the_head(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "llama")
    change_config(path, lambda c: c.pop("tie_word_embeddings"))
    assert not load(path).config.tied_embeddings
    change_weights(path, lambda w: w.pop("lm_head.weight"))
    assert "tie_word_embeddings is left out, which means false, but there is no" in refused(path)
    change_config(path, lambda c: c.update(tie_word_embeddings=False))
    assert "tie_word_embeddings is false, but there is no tensor 'lm_head.weight'" in refused(path)
    prefixed = folder("llama", tmp_path / "prefixed")
    change_weights(prefixed, lambda w: w.update({f"module.{key}": w.pop(key) for key in list(w)}))
    assert "no tensor 'lm_head.weight': only 'module.lm_head.weight', a name" in refused(prefixed)
    path = folder("gemma2", tmp_path / "gemma2")
    change_config(path, lambda c: c.pop("tie_word_embeddings", None))
    assert load(path).config.tied_embeddings


@pytest.mark.parametrize("name", ["qwen3", "phi3", "mixtral", "gemma3", "qwen3moe"])
def test_names_with_and_without_the_models_prefix(name: str, tmp_path: Path) -> None:
    """transformers adds and takes off the prefix of any tensor as it is needed."""
    whole = load(folder(name, tmp_path / "whole"))
    for prefix in ("", "model."):
        path = folder(name, tmp_path / f"m{prefix}")
        change_weights(
            path,
            lambda w, prefix=prefix: [  # type: ignore[misc]
                w.update({prefix + key.removeprefix("model."): w.pop(key)}) for key in list(w)
            ],
        )
        base = {"Gemma3ForCausalLM": "Gemma3TextModel"}
        change_config(
            path,
            lambda c, base=base: c.update(  # type: ignore[misc]
                architectures=[
                    base.get(a, a.replace("ForCausalLM", "Model")) for a in c["architectures"]
                ]
            ),
        )
        assert same(load(path), whole)
    change_weights(path, lambda w: w.update({"norm.weight": w["model.norm.weight"]}))
    assert "has output_norm twice: 'norm.weight' is not the first" in refused(path)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "a")
    change_weights(path, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    assert refused(path).endswith("has no tensor for layers.1.ffn_up")

    path = folder("llama", tmp_path / "b")
    extra = np.zeros(8, np.float32)
    change_weights(path, lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": extra}))
    assert refused(path).endswith("does not use: layers.0.attn_q_norm")

    path = folder("granite", tmp_path / "c")
    change_weights(path, lambda w: w.update({"vision_tower.x": extra}))
    assert refused(path).endswith("does not use: vision_tower.x")

    path = folder("llama", tmp_path / "d", {"intermediate_size": 40})
    assert "has shape [48, 32]; the model's metadata asks for [40, 32]" in refused(path)

    path = folder("phi3", tmp_path / "e", {"intermediate_size": 40})
    assert "gate_up_proj.weight' has shape [96, 48]; config.json asks for [40, 40]" in refused(path)

    path = folder("phi3", tmp_path / "f")
    change_weights(path, lambda w: w.update({"model.layers.0.mlp.up_proj.weight": extra}))
    assert "has layers.0.ffn_up twice" in refused(path)

    path = folder("llama", tmp_path / "g")
    change_weights(
        path, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": extra})
    )
    assert load(path).weights  # old files carry it, and it follows from the config

    path = folder("llama", tmp_path / "h")
    change_weights(
        path, lambda w: w.update({"model.norm.weight": w["model.norm.weight"].astype(np.float64)})
    )
    assert "'model.norm.weight' is of type F64, which is not supported" in refused(path)


def test_an_index_and_its_shards_must_agree(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m")
    places = shard(path)
    first, other = "lm_head.weight", "model.norm.weight"
    assert places[first] != places[other]

    def index(changed: object) -> str:
        (path / INDEX).write_text(json.dumps({"weight_map": changed}))
        return refused(path)

    assert f"which {INDEX} says is in" in index(places | {first: places[other]})
    assert "lists tensors that no file has: extra" in index(places | {"extra": places[first]})
    without = {key: value for key, value in places.items() if key != first}
    assert f"'{first}' is not listed by {INDEX}" in index(without)
    for name in ("../m.safetensors", "/etc/m.safetensors", "a/b.safetensors", "x.bin", "", 3, None):
        assert "names no safetensors file here" in index(places | {first: name})
    message = index(places | {first: "none.safetensors"})
    assert message.endswith("some of them are not in the folder: none.safetensors")
    message = index(dict.fromkeys(places, "none.safetensors"))
    assert message.endswith("none of them is in the folder: none.safetensors")
    for nothing in ({}, [], None, 3):
        assert "has no weight_map" in index(nothing)
    extra = {first: np.zeros(1, np.float32)}
    save_file(extra, path / "z.safetensors")
    assert f"'{first}' is in {places[first]} as well" in index(places | {"y": "z.safetensors"})


def test_a_folder_without_weights(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m")
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"")
    message = refused(path)
    assert "has neither model.safetensors nor" in message
    assert "only pytorch_model.bin; pickled weights are not read" in message
    (path / "tokenizer.json").unlink()
    shutil.copy(folder("llama", tmp_path / "n") / "model.safetensors", path)
    assert "tokenizer.json: is missing" in refused(path)
    (path / "config.json").unlink()
    assert "config.json: cannot be opened" in refused(path)


def test_a_link_to_nothing_is_no_missing_file(tmp_path: Path) -> None:
    for name in ("generation_config.json", "chat_template.jinja", "model.safetensors"):
        path = folder("llama", tmp_path / name)
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to("blobs/gone")
        assert refused(path).startswith(f"{path}/{name}: cannot be opened")


# ── config.json ─────────────────────────────────────────────────────────────────────────────────


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "model type": ("llama", {"model_type": "mamba"}, "model_type 'mamba' is not supported; "),
    "no model type": ("llama", {"model_type": None}, "model_type is null"),
    "a picture's": ("gemma3", {"model_type": "gemma3"}, "text_config is missing"),
    "architecture": (
        "llama",
        {"architectures": ["LlamaForSequenceClassification"]},
        "['LlamaForSequenceClassification'] is not supported, only LlamaForCausalLM",
    ),
    "quantized": (
        "llama",
        {"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}},
        "quantization_config: quant_method 'bitsandbytes' is not supported; supported are gptq",
    ),
    "activation": ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    "gemma activation": ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
    "bidirectional": ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_att"),
    "layers of their own": ("llama", {"per_layer_config": {"0": {}}}, "per_layer_config {'0': {}}"),
    "no cause": ("llama", {"is_causal": False}, "is_causal False is not supported"),
    "no layers": ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0, not an integer"),
    "many layers": ("llama", {"num_hidden_layers": 513}, "num_hidden_layers is 513, above 512"),
    "many recurrent layers": (
        "lfm2",
        {"num_hidden_layers": (1 << 31) - 1, "layer_types": None, "full_attn_idxs": [1]},
        "num_hidden_layers is 2147483647, above 512",
    ),
    "recurrent layers alone": ("lfm2", {"layer_types": ["conv"] * 4}, "no layer has attention"),
    "no taps": ("lfm2", {"conv_L_cache": 0}, "conv_L_cache is 0, not an integer from 1"),
    "many taps": ("lfm2", {"conv_L_cache": 1 << 30}, "taps 1073741824, outside 2 to 16"),
    "experts by nothing": (
        "lfm2moe",
        {"routed_scaling_factor": 0.0},
        "routed_scaling_factor is 0, not a positive number",
    ),
    "dense layers": ("lfm2moe", {"num_dense_layers": -1}, "num_dense_layers is -1, not an integer"),
    "choice": ("lfm2moe", {"use_expert_bias": 1}, "use_expert_bias is 1, not a boolean"),
    "time steps": (
        "granitehybrid",
        {"time_step_limit": [0.0, 0.1]},
        "time_step_limit [0.0, 0.1] is not supported, only 0 to infinity",
    ),
    "no time steps": ("granitehybrid", {"time_step_limit": None}, "time_step_limit is null"),
    "mamba heads": (
        "granitehybrid",
        {"mamba_n_heads": 5},
        "mamba_n_heads 5 of mamba_d_head 16 are not mamba_expand times hidden_size, 64",
    ),
    "mamba heads of nothing": ("granitehybrid", {"mamba_d_head": None}, "mamba_d_head is null"),
    "mamba groups": ("granitehybrid", {"mamba_n_groups": 3}, "not a multiple of 3 groups"),
    "mamba states": ("granitehybrid", {"mamba_d_state": 1 << 30}, "state 1073741824, outside"),
    "mamba alone": (
        "granitehybrid",
        {"layer_types": None},
        "no layer has attention: models of recurrent layers only are not supported",
    ),
    "activation of mamba": (
        "granitehybrid",
        {"hidden_act": "gelu_new"},
        "recurrent layers with another hidden_act than silu are not supported",
    ),
    "no shared expert": (
        "granitehybrid",
        {"shared_intermediate_size": 0},
        "shared_intermediate_size is 0, not an integer from 1",
    ),
    "a wide feed-forward layer": (
        "lfm2",
        {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1e30},
        "outside 1 to 1048576",
    ),
    "head size": ("llama", {"head_dim": 1 << 30}, "head_dim is 1073741824, above 1024"),
    "true layers": ("llama", {"num_hidden_layers": True}, "num_hidden_layers is True, not"),
    "heads": ("llama", {"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv"),
    "null": ("llama", {"intermediate_size": None}, "intermediate_size is null"),
    "null that is a default": ("qwen3", {"head_dim": None}, "head_dim is null"),
    "null base": ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta is null"),
    "epsilon": ("llama", {"rms_norm_eps": 2}, "norm_eps is 2.0"),
    "text": ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', not a number"),
    "huge number": ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
    "flag": ("llama", {"attention_bias": 1}, "attention_bias is 1, not a boolean"),
    "granite": ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0, not a positive"),
    "scaling by nothing": ("granite", {"logits_scaling": 0.0}, "logits_scaling is 0, not a pos"),
    "tiny": ("granite", {"residual_multiplier": 1e-300}, "residual_scale is 1e-300, outside 1e-18"),
    "layer types": ("qwen3", {"layer_types": ["full_attention"]}, "not a list of 2 types"),
    "layer type": (
        "qwen3",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layer type 'chunked_attention' is not supported",
    ),
    "windows off": (
        "qwen2",
        {"layer_types": ["sliding_attention"] * 2},
        "has sliding_attention, but use_sliding_window is false",
    ),
    "window": ("mistral", {"sliding_window": 0}, "sliding_window is 0, not an integer from 1"),
    "rope type": (
        "llama",
        {"rope_scaling": {"rope_type": "mrope"}},
        "rope type 'mrope' is not supported for LlamaConfig; supported are default, linear, dyn",
    ),
    "rope of numbers": ("llama", {"rope_scaling": [1]}, "rope_scaling is not an object"),
    "rope type list": ("llama", {"rope_scaling": {"type": ["yarn"]}}, "rope type ['yarn'] is not"),
    "no factor": ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "small factor": ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "0.5, below 1"),
    "partial": (
        "llama",
        {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "partial_rotary_factor 0.5 is not supported for LlamaConfig",
    ),
    "layer types of one rope": (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters has full_attention, and a section for each layer type is not supported",
    ),
    "phi3 is not linear": (
        "phi3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "rope type 'linear' is not supported for Phi3Config",
    ),
    "llama3 range": (
        "llama",
        {
            "rope_scaling": {
                "type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 1,
            }
        },
        "low_freq_factor 4 and high_freq_factor 1 are no range",
    ),
    "yarn of base one": (
        "llama",
        {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0, "rope_theta": 1.0}},
        "rope type 'yarn' cannot be computed",
    ),
    "negative base": ("llama", {"rope_parameters": {"rope_theta": -1.0}}, "rope theta -1.0"),
    "short list": (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            "original_max_position_embeddings": 64,
        },
        "short_factor is not a list of 8 numbers",
    ),
    "list of text": (
        "phi3",
        {
            "rope_scaling": {"type": "su", "short_factor": ["a"] * 8, "long_factor": [1.0] * 8},
            "original_max_position_embeddings": 64,
        },
        "short_factor[0] is 'a', not a number",
    ),
    "stop token": ("llama", {"eos_token_id": 96}, "eos_token_id is 96, outside 0 to 95"),
    "stop text": ("llama", {"eos_token_id": ["a"]}, "eos_token_id is 'a', outside 0 to 95"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_config_refused_by_name(name: str, tmp_path: Path) -> None:
    family, changes, reason = REFUSED[name]
    message = refused(folder(family, tmp_path / "m", changes))
    assert message.startswith(f"{tmp_path}/m/config.json: ")
    assert reason in message


def test_rope_of_changing_length_is_fixed_by_the_longest(tmp_path: Path) -> None:
    scaled = {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
    config = load(folder("llama", tmp_path / "a", scaled)).config
    assert config.context_length == 512
    assert config.layers[0].rope.by_length == DynamicNtk(128, 4.0)
    short, long = (program(config, n).config.layers[0].rope for n in (128, 512))
    assert short.theta == 10000.0
    assert long.theta == pytest.approx(10000.0 * 13.0 ** (8 / 6))
    # Unless longer sequences are asked for, all are as in training.
    assert config.default_length == 128
    assert program(config).config.layers[0].rope == short

    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    changes = {
        "rope_scaling": {"type": "su"} | factors,
        "original_max_position_embeddings": 64,
        "rope_parameters": None,
    }
    config = load(folder("phi3", tmp_path / "b", changes)).config
    assert config.context_length == 128
    rope = config.layers[0].rope
    assert rope.by_length == LongRope(64, (2.0,) * 8)
    assert rope.magnitude == pytest.approx((1 + np.log(2) / np.log(64)) ** 0.5)
    assert program(config, 64).config.layers[0].rope.factors == (1.0,) * 8
    assert program(config, 65).config.layers[0].rope.factors == (2.0,) * 8
    assert program(config).config.layers[0].rope.factors == (1.0,) * 8


def test_each_rope_is_scaled_from_the_context_of_training(tmp_path: Path) -> None:
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    both = {"rope_parameters": {"full_attention": scaled, "sliding_attention": scaled}}
    plain = load(folder("gemma3", tmp_path / "plain")).config
    config = load(folder("gemma3", tmp_path / "m", both)).config
    rules = {layer.rope.by_length for layer in config.layers}
    assert rules == {DynamicNtk(plain.context_length, 4.0)}
    assert config.context_length == 4 * plain.context_length


def test_an_odd_part_of_a_head_turns_one_dimension_more(tmp_path: Path) -> None:
    """As transformers: of 3 dimensions two pairs, whose frequencies are those of 3."""
    part = {"rope_parameters": {"partial_rotary_factor": 0.2, "rope_theta": 100.0}}
    rope = load(folder("phi3", tmp_path / "m", part)).config.layers[0].rope
    assert rope.dim == 4
    assert rope.theta ** (-2 / 4) == pytest.approx(100.0 ** (-2 / 3))


def test_yarn_lengthens_the_context(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    config = load(folder("llama", tmp_path / "m", {"rope_scaling": yarn})).config
    assert config.context_length == 400
    assert config.layers[0].rope.magnitude == pytest.approx(1 + 0.1 * np.log(4))


def test_gemma_and_granite_numbers(tmp_path: Path) -> None:
    gemma = load(folder("gemma2", tmp_path / "a")).config
    assert [layer.window for layer in gemma.layers] == [24, None, 24, None]
    assert gemma.activation is Activation.GELU_TANH
    assert (gemma.attention_softcap, gemma.logits_softcap) == (50.0, 30.0)
    assert gemma.embedding_scale == pytest.approx(32**0.5)
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    gemma = load(folder("gemma2", tmp_path / "b", uncapped)).config
    assert (gemma.attention_softcap, gemma.logits_softcap) == (0.0, 0.0)
    granite = load(folder("granite", tmp_path / "c")).config
    assert (granite.residual_scale, granite.logits_scale) == (0.22, 1 / 6)
    gemma3 = load(folder("gemma3", tmp_path / "d")).config
    assert [layer.window for layer in gemma3.layers] == [24] * 5 + [None]
    assert {layer.rope.theta for layer in gemma3.layers if layer.window} == {10000.0}
    assert gemma3.layers[5].rope.theta == 1e6


WEIRD = [None, True, False, 0, 1, -1, 3, 1 << 40, 1.5, -0.0, 1e308, "", "x", [], [1], {}, {"a": 1}]


def mutate(count: int, path: Path) -> None:
    """Values of the JSON files replaced by others: loaded, or refused naming the folder."""
    sources = [folder(name, path / name) for name in ("llama", "phi3", "gemma3", "granite")]
    shard(sources[0])
    for source in sources:
        (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
        (source / "tokenizer_config.json").write_text('{"eos_token": "a", "chat_template": "x"}')
    rng = random.Random(count)
    loaded = 0
    for number in range(count):
        source = rng.choice(sources)
        if number % 200 == 0:  # the tokenizer takes longest, and is what it was
            victims = sorted(source.glob("*.json"))
        else:
            victims = [source / "config.json", *source.glob("*.index.json")]
        victim = rng.choice(victims)
        good = victim.read_bytes()
        values = json.loads(good)
        for _ in range(rng.choice((1, 1, 2, 3))):
            place: Any = values
            while True:
                keys = list(place) if isinstance(place, dict) else range(len(place))
                if not keys:
                    break
                key = rng.choice(list(keys))
                inner = place[key]
                if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
                    place = inner
                    continue
                if isinstance(place, dict) and rng.random() < 0.2:
                    del place[key]
                else:
                    place[key] = deepcopy(rng.choice(WEIRD))
                break
        victim.write_text(json.dumps(values))
        try:
            loaded += bool(load(source).weights)
        except CheckpointError as error:
            if not str(error).startswith(str(source)):
                raise
        finally:
            victim.write_bytes(good)
    assert 0 < loaded < count


@pytest.mark.parametrize("count", [600, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_files(count: int, tmp_path: Path) -> None:
    mutate(count, tmp_path)


def test_without_any_word_of_a_stop_token_the_class_decides(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m")
    assert load(path).tokenizer.eos_token_ids == {1}
    change_config(path, lambda c: c.pop("eos_token_id"))
    assert load(path).tokenizer.eos_token_ids == {2}  # of LlamaConfig
    change_config(path, lambda c: c.update(eos_token_id=None))
    assert not load(path).tokenizer.eos_token_ids
    change_config(path, lambda c: c.pop("eos_token_id"))
    (path / "generation_config.json").write_text("{}")
    assert not load(path).tokenizer.eos_token_ids
    path = folder("phi3", tmp_path / "phi3")
    change_config(path, lambda c: c.pop("eos_token_id"))
    assert not load(path).tokenizer.eos_token_ids  # 32000, beyond this vocabulary


def notes_of(path: Path) -> str:
    return "\n".join(load(path).notes)


def test_what_transformers_passes_over_is_noted(tmp_path: Path) -> None:
    changes: dict[str, tuple[str, dict[str, Any], str]] = {
        "a": ("llama", {"sliding_window": 16}, "sliding_window is passed over"),
        "b": ("granite", {"layer_types": ["sliding_attention"] * 2}, "layer_types is passed over"),
        "c": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is passed over"),
        "d": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is passed over"),
        "e": (
            "llama",
            {"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 1000.0},
            "rope_theta 1000.0 is passed over, since rope_parameters has 500.0",
        ),
        "f": (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_parameters is passed over, since there is rope_scaling",
        ),
        "g": (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 4}},
            "rope_parameters: beta_fast is passed over by rope type 'linear'",
        ),
        "h": (
            "gemma3",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}},
            "rope_scaling's type 'linear' is passed over, as transformers does",
        ),
        "i": (
            "gemma3",
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            "rope_parameters: rope_type is passed over, being of no layer type",
        ),
    }
    for name, (family, change, reason) in changes.items():
        assert reason in notes_of(folder(family, tmp_path / name, change))
    # Falsy values mean nothing anywhere, and empty objects are absent ones.
    quiet = {"sliding_window": None, "num_experts": 0, "rope_scaling": {}, "layer_types": []}
    assert not notes_of(folder("llama", tmp_path / "quiet", quiet))


def test_a_mistral_with_types_of_layers_is_a_ministral(tmp_path: Path) -> None:
    """As transformers' AutoConfig has it, whatever the types are."""
    types = ["full_attention", "sliding_attention"]
    config = load(folder("mistral", tmp_path / "a", {"layer_types": types})).config
    assert [layer.window for layer in config.layers] == [None, 24]
    for name in ("mistral", "ministral"):
        nothing = {"layer_types": None, "model_type": name, "architectures": None}
        config = load(folder("mistral", tmp_path / name, nothing)).config
        assert [layer.window for layer in config.layers] == [24, 24]
    everywhere = {"layer_types": types, "sliding_window": None}
    # A key that the class does not have says nothing.
    for name, change in (("b", {}), ("c", {"use_sliding_window": False})):
        message = refused(folder("mistral", tmp_path / name, everywhere | change))
        assert "layer_types has sliding_attention, but sliding_window is null" in message


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_gemma_without_a_size_of_windows_has_none(family: str, tmp_path: Path) -> None:
    config = load(folder(family, tmp_path / "m", {"sliding_window": None})).config
    assert not any(layer.window for layer in config.layers)


def test_an_error_names_the_sizes_that_were_left_out(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m")
    change_config(path, lambda c: [c.pop(k) for k in ("intermediate_size", "num_key_value_heads")])
    message = refused(path)
    assert "intermediate_size: 11008 in LlamaConfig" in message
    assert "num_key_value_heads: num_attention_heads in LlamaConfig" in message
    assert "vocab_size" not in message
