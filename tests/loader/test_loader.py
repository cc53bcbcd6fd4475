"""Whole checkpoints: tensors bound to roles, on tiny files and on the real models."""

from pathlib import Path

import numpy as np
import pytest
from gguf_writer import F16, F32, Q8_0, STRING, UINT32, Tensor, tiny_gemma3, tiny_llama

from octavo.kv_cache.layout import KvLayout
from octavo.loader import load
from octavo.loader.base import CheckpointError, WeightFormat
from octavo.loader.chat_template import problem
from octavo.models.families import program


def test_weights_by_role(tmp_path: Path) -> None:
    file = tiny_llama()
    file.tensors.append(Tensor("output.weight", (263, 32), F16))
    file.tensors.extend(Tensor(f"blk.{i}.attn_v.bias", (16,), F32) for i in range(2))
    checkpoint = load(file.write(tmp_path / "model.gguf"))
    assert checkpoint.path == tmp_path / "model.gguf"
    shapes = {role: weight.shape for role, weight in checkpoint.weights.items()}
    assert shapes == program(checkpoint.config).weights
    weight = checkpoint.weights["layers.1.ffn_down"]
    assert (weight.name, weight.format) == ("blk.1.ffn_down.weight", WeightFormat.Q8_0)
    assert weight.data.tobytes() == file.tensor("blk.1.ffn_down.weight").data
    assert checkpoint.weights["layers.0.attn_v.bias"].name == "blk.0.attn_v.bias"
    assert checkpoint.chat_template.render([{"role": "user", "content": "hi"}]) == "hi"
    checkpoint.release()
    assert weight.data.tobytes() == file.tensor("blk.1.ffn_down.weight").data


def test_vectors_are_widened_exactly(tmp_path: Path) -> None:
    values = np.array([1.5, -0.0, 65504, 6e-8] * 8, "<f2")
    brain = (np.arange(32, dtype="<u4") << 23).astype("<u4")  # a spread of exponents
    file = tiny_llama(1)
    norm = file.tensor("output_norm.weight")
    norm.type, norm.data = F16, values.tobytes()
    norm = file.tensor("blk.0.attn_norm.weight")
    norm.type, norm.data = 30, (brain >> 16).astype("<u2").tobytes()
    weights = load(file.write(tmp_path / "model.gguf")).weights
    wide = weights["output_norm"]
    assert wide.format is WeightFormat.F32
    assert wide.data.tobytes() == values.astype("<f4").tobytes()
    assert weights["layers.0.attn_norm"].data.tobytes() == brain.tobytes()


def test_a_model_without_chat_template(tmp_path: Path) -> None:
    assert load(tiny_gemma3().write(tmp_path / "model.gguf")).chat_template is None


def test_templates_of_which_none_is_the_default(tmp_path: Path) -> None:
    file = tiny_llama().drop("tokenizer.chat_template")
    file.set("tokenizer.chat_template.tool_use", STRING, "x")
    template = load(file.write(tmp_path / "model.gguf")).chat_template
    assert "several chat templates (tool_use) and none called default" in str(problem(template))


def test_what_does_not_fit_the_program_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    file = tiny_llama()
    file.tensors.remove(file.tensor("blk.1.ffn_up.weight"))
    with pytest.raises(CheckpointError, match=r"has no tensor for layers\.1\.ffn_up$"):
        load(file.write(path))

    file = tiny_llama()
    file.tensors.append(Tensor("blk.0.attn_q_norm.weight", (8,), F32))
    with pytest.raises(CheckpointError, match=r"does not use: layers\.0\.attn_q_norm$"):
        load(file.write(path))

    file = tiny_llama(2).set("llama.block_count", UINT32, 3)
    with pytest.raises(CheckpointError, match=r"no tensor for layers\.2\.attn_k, .* and 1 more$"):
        load(file.write(path))

    file = tiny_llama()
    file.tensor("blk.0.attn_q.weight").shape = (64, 32)
    file.tensor("blk.0.attn_q.weight").data = None
    with pytest.raises(CheckpointError, match=r"attn_q\.weight' has shape \[64, 32\].*\[32, 32\]"):
        load(file.write(path))

    file = tiny_llama()
    norm = file.tensor("output_norm.weight")
    norm.type, norm.data = Q8_0, None
    with pytest.raises(CheckpointError, match=r"'output_norm\.weight' is a vector of type Q8_0"):
        load(file.write(path))

    for name, shape in ("blk.0.attn_qkv.weight", (64, 32)), ("layers.0.attn_q.weight", (32, 32)):
        file = tiny_llama()
        file.tensors.append(Tensor(name, shape, F16))
        with pytest.raises(
            CheckpointError, match=rf"has layers\.0\.attn_.* twice: tensor '{name}'"
        ):
            load(file.write(path))

    file = tiny_llama()
    file.tensors.append(Tensor("blk.0.attn_q.bias", (32,), F32))
    with pytest.raises(CheckpointError, match=r"has no tensor for layers\.1\.attn_q\.bias"):
        load(file.write(path))


def test_smollm2(smollm2_path: Path) -> None:
    checkpoint = load(smollm2_path)
    assert len(checkpoint.config.layers) == 30
    assert KvLayout.of(checkpoint.config).bytes_per_token == 23_040
    assert checkpoint.weights["layers.29.ffn_down"].format is WeightFormat.Q4_1
    assert checkpoint.weights["token_embd"].format is WeightFormat.Q8_0
    assert checkpoint.tokenizer.eos_token_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert checkpoint.chat_template is not None


def test_gemma3(gemma3_path: Path) -> None:
    checkpoint = load(gemma3_path)
    windows = [layer.window for layer in checkpoint.config.layers]
    assert windows == [512, 512, 512, 512, 512, None] * 3
    formats = {weight.format.name for weight in checkpoint.weights.values()}
    assert formats == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    assert checkpoint.tokenizer.eos_token_ids == {1, 106}  # <eos>, <end_of_turn>
