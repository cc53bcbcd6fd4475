"""`octavo inspect` on the real models."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import strict_json
from loader.gguf_writer import IQ4_NL, MXFP4, dynamic_llama, split, tiny_llama, write_split
from octavo.cli import app
from octavo.cli.inspect import part_of
from octavo.engine.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.loader import load
from oracle.tiny_folders import folder, quantized_folder


def inspect(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["inspect", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = strict_json.loads(result.stdout)
    return facts


def test_smollm2(smollm2_path: Path) -> None:
    facts = inspect(str(smollm2_path), "--kv-cache-memory", "64MiB")
    assert facts["layers"] == 30
    assert facts["heads"] == 9
    assert facts["kv_heads"] == 3
    assert facts["vocab_size"] == 49152
    assert facts["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2 == 23_040
    assert facts["parameters"] == 134_515_008
    assert facts["chat_template"] is True
    assert facts["stop_tokens"] == {"0": "<|endoftext|>", "2": "<|im_end|>"}
    assert facts["windows"] == {"global": 30}
    # Nothing is left out, and nothing counted twice.
    weights = load(smollm2_path).weights.values()
    assert facts["stored_bytes"] == sum(weight.data.nbytes for weight in weights)
    assert facts["weights_bytes"] == sum(p["held_bytes"] for p in facts["parts"].values())
    assert facts["parts"]["embedding"]["formats"] == {"Q8_0": 49152 * 576 * 34 // 32}
    assert facts["parts"].keys() == {"embedding", "attention", "ffn", "norms"}
    # 64 MiB hold 182 blocks of 16 tokens.
    assert facts["here"]["tokens"] == (64 << 20) // (23_040 * 16) * 16 == 2912
    assert facts["here"]["max_model_len"] == 2912


def test_the_dtype_asked_for_is_the_one_shown(smollm2_path: Path) -> None:
    assert inspect(str(smollm2_path))["kv_cache_dtype"] == "bf16"
    assert inspect(str(smollm2_path), "--kv-cache-dtype", "fp16")["kv_cache_dtype"] == "fp16"


def test_a_split_model_by_any_of_its_files(tmp_path: Path) -> None:
    file = tiny_llama()
    for name, type in (("blk.0.ffn_up.weight", MXFP4), ("blk.1.ffn_down.weight", IQ4_NL)):
        tensor = file.tensor(name)
        tensor.type, tensor.data = type, None
    paths = write_split(split(file, [4, 8, 0]), tmp_path)
    facts = inspect(str(paths[1]))
    assert facts["path"] == str(paths[0])
    assert facts["file_bytes"] == sum(path.stat().st_size for path in paths)
    formats = facts["parts"]["ffn"]["formats"]
    assert formats["MXFP4"] == 64 * 17
    assert formats["IQ4_NL"] == 64 * 18


def test_what_takes_more_than_in_the_file_shows(tmp_path: Path) -> None:
    facts = inspect(str(dynamic_llama().write(tmp_path / "dynamic.gguf")))
    formats = {each["stored"]: each for each in facts["formats"]}
    assert formats["IQ2_XXS"]["held"] == "T3_IQ2"
    assert formats["IQ2_XXS"]["stored_bytes"] == 256 * 66
    assert formats["IQ2_XXS"]["held_bytes"] == 16 * 1728  # column blocks of a chunk
    assert formats["TQ2_0"]["held"] == "I2"
    assert formats["TQ2_0"]["group_size"] == -1  # as many inputs as there are
    assert formats["IQ4_XS"]["held"] == "IQ4_XS"


def test_codes_hold_more_tokens(smollm2_path: Path) -> None:
    tokens = {
        dtype: inspect(str(smollm2_path), "--kv-cache-memory", "64MiB", "--kv-cache-dtype", dtype)[
            "here"
        ]["tokens"]
        for dtype in ("bf16", "int8", "int4")
    }
    assert tokens["int8"] >= 1.9 * tokens["bf16"]
    assert tokens["int4"] >= 3.5 * tokens["bf16"]


def test_what_does_not_fit_is_said(smollm2_path: Path) -> None:
    arguments = (str(smollm2_path), "--kv-cache-memory", "8MiB", "--max-model-len", "8K")
    assert "needs" in inspect(*arguments)["here"]["does_not_fit"]
    result = CliRunner().invoke(app, ["inspect", *arguments])
    assert "does not fit: a sequence of 8192 tokens" in result.stdout


def test_an_unknown_instruction_set_is_no_internal_error(smollm2_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(smollm2_path), "--isa", "mmx"])
    assert result.exit_code == 2
    assert "mmx" in result.output


def test_gemma(gemma3_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(gemma3_path)])
    for text in (
        "18 layers (15 with a window of 512, 3 global)",
        "4 query on 1 KV, 256 wide",
        "vocabulary 262,144",
        "SentencePiece-style BPE",
        "no chat template",
        "18,432 bytes a token",
        "Q5_0 58 %, Q4_K 34 %, Q8_0 8 %",
    ):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("role", "part"),
    [
        ("token_embd", "embedding"),
        ("output", "head"),
        ("output_norm", "norms"),
        ("layers.3.attn_q", "attention"),
        ("layers.3.attn_q.bias", "attention"),
        ("layers.3.attn_q_norm", "norms"),
        ("layers.3.ffn_down", "ffn"),
        ("layers.3.ffn_down_exps.12", "experts"),
        ("layers.3.ffn_gate_inp", "router"),
        ("layers.3.post_ffw_norm", "norms"),
        ("layers.3.shortconv_b.bias", "recurrence"),
        ("layers.3.shortconv.conv", "recurrence"),
        ("layers.3.ssm_a", "recurrence"),
        ("layers.3.attn_qkv", "recurrence"),
        ("layers.3.exp_probs_b.bias", "router"),
        ("layers.3.ffn_up_shexp", "ffn"),
    ],
)
def test_parts(role: str, part: str) -> None:
    assert part_of(role) == part


# A layer of each keeps (taps - 1) inputs of its convolution, and its matrices, as floats.
STATES = {
    "lfm2moe": ("1 global, 3 recurrent", 3 * 2 * 32 * 4),
    "granitehybrid": ("1 global, 3 recurrent", 3 * (3 * 128 + 4 * 16 * 16) * 4),
}


@pytest.mark.parametrize("family", STATES)
def test_states(family: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(folder(family, tmp_path / "model"))])
    layers, size = STATES[family]
    assert f"model, {family}, " in result.stdout
    assert f"layers ({layers})" in result.stdout
    assert f"state       {size:,} bytes a sequence for " in result.stdout


def test_quantized(tmp_path: Path) -> None:
    path = quantized_folder("gptqmodel-dynamic", tmp_path / "m")
    facts = inspect(str(path))
    assert facts["quantization"] == {
        "method": "gptq",
        "layout": "gptq",
        "bits": [4, 8],
        "group_sizes": [-1, 32],
        "symmetric": True,
        "activation_order": False,
        "activations": None,
    }
    formats = {(each["stored"], each["group_size"]): each for each in facts["formats"]}
    # One matrix of 96 x 64 in four bits with scales of 16 bits and zeros of 4 for 32 inputs, and
    # g_idx; and its rows in memory, where scales have 32 bits and zeros 8.
    gate = formats["gptq-int4", 32]
    assert (gate["tensors"], gate["parameters"], gate["held"]) == (1, 96 * 64, "I4")
    assert gate["stored_bytes"] == 96 * 64 // 2 + 96 * 2 * 5 // 2 + 64 * 4
    assert gate["held_bytes_per_weight"] == gate["held_bytes"] / gate["parameters"]
    assert formats["gptq-int8", -1]["tensors"] == 5
    assert sum(each["stored_bytes"] for each in facts["formats"]) == facts["stored_bytes"]
    assert sum(each["held_bytes"] for each in facts["formats"]) == facts["weights_bytes"]
    ordered = quantized_folder("gptqmodel-order", tmp_path / "n")
    text = CliRunner().invoke(app, ["inspect", str(ordered)]).stdout
    assert "quantized   gptq (gptq), 4 bits, a scale for 32 inputs, symmetric, activation" in text
    assert "I4, a scale for 32 inputs, in activation order" in text
    folder = quantized_folder("llmcompressor-w8a8", tmp_path / "o")
    text = CliRunner().invoke(app, ["inspect", str(folder)]).stdout
    assert "one scale a row, symmetric, activations int8, quantized when they are used" in text
    assert inspect(str(folder))["formats"][0]["stored"] == "compressed-tensors-int8"


def test_predicted_bytes_are_the_allocated_ones(smollm2_path: Path, gemma3_path: Path) -> None:
    """What `inspect` says before loading is what the engine then takes, byte for byte."""
    for path in (smollm2_path, gemma3_path):
        facts = inspect(str(path), "--kv-cache-memory", "48MiB", "--max-num-seqs", "2")
        loaded = load_engine(path, EngineConfig(kv_cache_memory_bytes=48 << 20, max_num_seqs=2))
        executor = loaded.engine.executor
        assert facts["weights_bytes"] == executor.weight_bytes == loaded.weight_bytes
        assert facts["here"]["kv_cache_bytes"] == loaded.kv_cache_bytes
        assert facts["here"]["tokens"] == loaded.capacity_tokens
        assert facts["here"]["max_model_len"] == loaded.max_model_len
        assert loaded.kv_cache_bytes == executor.num_blocks * facts["kv_block_bytes"]
        loaded.engine.close()
