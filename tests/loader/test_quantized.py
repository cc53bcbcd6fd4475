"""Quantized folders: every number, scale and zero of every layout."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from loader import quantized_writer as writer
from loader.quantized_writer import (
    Quantized,
    gptq_config,
    is_linear,
    quantize_all,
    quantized,
    refused,
    rewrite,
)
from octavo.loader import load
from octavo.loader.base import Checkpoint, Quantization, WeightFormat
from octavo.loader.grouped import input_order, pack, reorder, unpack
from oracle.tiny_folders import folder

ROLES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def role(name: str) -> str:
    if name == "lm_head.weight":
        return "output"
    _, _, layer, rest = name.split(".", 3)
    return f"layers.{layer}.{ROLES[rest.removesuffix('.weight')]}"


def assert_same(checkpoint: Checkpoint, matrices: dict[str, Quantized]) -> None:
    for name, expected in matrices.items():
        weight = checkpoint.weights[role(name)]
        got = writer.numbers(weight)
        assert np.array_equal(got.values, expected.values), name
        assert np.array_equal(got.q, expected.q)
        # Rows by themselves, as views of a fused matrix ask for them.
        size = weight.nbytes // weight.shape[0]
        assert weight.rows(3, 8).tobytes() == weight.data[3 * size : 8 * size].tobytes()
        assert writer.BITS[weight.format] == expected.bits


# ── Streams of bits ─────────────────────────────────────────────────────────────────────────────


@given(st.sampled_from((3, 4, 8)), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_streams(bits: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 1 << bits, (3, count)).astype(np.uint8)
    streams = pack(numbers, bits)
    expected = writer.words(numbers.astype(np.int64), bits).view(np.uint8)
    assert np.array_equal(streams, expected[:, : (count * bits + 7) // 8])
    assert np.array_equal(unpack(streams, bits, count), numbers)
    order = rng.permutation(count).astype(np.int32)
    assert np.array_equal(reorder(streams, bits, order), pack(numbers[:, order], bits))


@given(st.integers(1, 200), st.sampled_from((32, 64, 128)), st.integers(0, 2**32 - 1))
def test_input_order(k: int, group: int, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(k)
    g_idx = np.empty(k, np.int64)
    g_idx[order] = np.arange(k) // group
    found = input_order(g_idx, group)
    if found is None:
        assert np.array_equal(g_idx, np.arange(k) // group)
    else:
        assert sorted(found) == list(range(k))
        assert np.array_equal(g_idx[found], np.arange(k) // group)
    if k > group:
        with pytest.raises(ValueError, match=f"every group {group} inputs"):
            input_order(np.where(g_idx == g_idx.max(), 0, g_idx), group)
    for outside in (-1, (k - 1) // group + 1):
        with pytest.raises(ValueError, match=f"puts input {k // 2} in group {outside}, but has"):
            input_order(np.where(np.arange(k) == k // 2, outside, g_idx), group)


# ── GPTQ ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize(("bits", "dtype"), [(3, "F16"), (4, "BF16"), (8, "F32")])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("v1", [False, True])
def test_gptq(bits: int, group: int, ordered: bool, v1: bool, dtype: str, tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m", bf16=True)
    rng = np.random.default_rng(bits)

    def change(name: str, values: Any) -> Any:
        if not is_linear(name):
            return None
        order = rng.permutation(values.shape[1]) if ordered else None
        made = quantized(values, bits, group, order=order, dtype=dtype)
        made.zeros[0] = 0  # which one less is the highest number
        return made, writer.gptq(made, v1=v1)

    config = gptq_config(bits, group, checkpoint_format="gptq" if v1 else "gptq_v2")
    matrices = rewrite(path, change, config | {"desc_act": ordered})
    checkpoint = load(path)
    assert_same(checkpoint, matrices)
    down = checkpoint.weights["layers.0.ffn_down"]  # of 48 inputs
    assert down.group == (48 if group != 32 else 32)
    assert (down.order is not None) == (ordered and group == 32)
    assert checkpoint.weights["output"].format is WeightFormat.BF16
    layout = "gptq" if v1 else "gptq_v2"
    expected = Quantization("gptq", layout, (bits,), (group,), False, ordered)
    assert checkpoint.quantization == expected


def test_gptq_zeros_that_borrow(tmp_path: Path) -> None:
    """GPTQModel and AutoRound take one off whole words, where a zero of 0 borrows."""
    for number, said in enumerate(
        ({"meta": {"quantizer": ["optimum:1.24", "gptqmodel:5.0"]}}, {"provider": "auto-round"}, {})
    ):
        path = folder("llama", tmp_path / str(number))
        rng = np.random.default_rng(0)

        def make(values: Any, rng: Any = rng, borrows: bool = bool(said)) -> Any:
            made = quantized(values, 4, 32)
            made.zeros[:] = rng.integers(0, 4, made.zeros.shape)
            tensors = writer.gptq(made, v1=not borrows)
            if borrows:
                tensors["qzeros"] = (tensors["qzeros"].view("<u4") - 0x11111111).view("<i4")
            return made, tensors

        matrices = quantize_all(path, gptq_config(4, 32) | said, make)
        assert_same(load(path), matrices)


def test_gptq_symmetric_zeros_of_either_format(tmp_path: Path) -> None:
    """Files that say "gptq" and have the zeros themselves, or "gptq_v2" and have one less."""
    for said, v1, bits in itertools.product(("gptq", "gptq_v2"), (True, False), (3, 4, 8)):
        path = folder("llama", tmp_path / f"{said}-{v1}-{bits}")

        def make(values: Any, v1: bool = v1, bits: int = bits) -> Any:
            made = quantized(values, bits, 32, symmetric=True)
            return made, writer.gptq(made, v1=v1)

        config = gptq_config(bits, 32, sym=True, checkpoint_format=said)
        matrices = quantize_all(path, config, make)
        assert_same(load(path), matrices)


def test_gptq_without_g_idx_and_with_a_config_of_its_own(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m")

    def make(values: Any) -> Any:
        made = quantized(values, 4, 32)
        return made, writer.gptq(made, g_idx=False)

    matrices = quantize_all(path, None, make)
    assert "is of a quantized module, but config.json has no quantization_config" in refused(path)
    config = gptq_config(4, 32)
    del config["quant_method"], config["checkpoint_format"]
    (path / "quantize_config.json").write_text(json.dumps(config))
    assert_same(load(path), matrices)
    (path / "model.safetensors").rename(path / "gptq_model-4bit-32g.safetensors")
    assert_same(load(path), matrices)
    (path / "gptq_model-4bit-32g.safetensors").rename(path / "other.safetensors")
    assert "has neither model.safetensors nor" in refused(path)
    (path / "other.safetensors").rename(path / "model.safetensors")
    config["bits"] = 2
    (path / "quantize_config.json").write_text(json.dumps(config))
    assert refused(path).startswith(f"{path}/quantize_config.json: bits is 2, which is not supp")


def test_a_configuration_that_was_left_over(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m")
    (path / "quantize_config.json").write_text(json.dumps(gptq_config(4, 32)))
    assert load(path).quantization is None


def test_gptq_modules_may_differ(tmp_path: Path) -> None:
    """GPTQModel's ``dynamic``: other bits and groups, and modules left as they are."""
    path = folder("llama", tmp_path / "m")

    def change(name: str, values: Any) -> Any:
        if not is_linear(name) or "layers.1.self_attn.v" in name:
            return None
        bits, group = (8, -1) if "down_proj" in name else (4, 32)
        made = quantized(values, bits, group)
        return made, writer.gptq(made)

    rules = {
        r"+:.*\.down_proj": {"bits": 8, "group_size": -1},
        r"-:model\.layers\.1\.self_attn\.v_proj": {},
        "(a+)+$": {"bits": 4},  # a pattern that would never end is not run
    }
    matrices = rewrite(path, change, gptq_config(4, 32, dynamic=rules))
    checkpoint = load(path)
    assert_same(checkpoint, matrices)
    assert checkpoint.quantization.bits == (4, 8)
    assert checkpoint.quantization.group_sizes == (-1, 32)
    assert checkpoint.weights["layers.1.attn_v"].format is WeightFormat.F32


def test_auto_round(tmp_path: Path) -> None:
    for packing, v1 in (("auto_round:auto_gptq", True), ("auto_round", False)):
        path = folder("llama", tmp_path / packing)

        def make(values: Any, v1: bool = v1) -> Any:
            made = quantized(values, 4, 32)
            made.zeros = np.maximum(made.zeros, 1)
            return made, writer.gptq(made, v1=v1)

        config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
        more = {"packing_format": packing, "extra_config": {"lm_head": {"bits": 16}}}
        matrices = quantize_all(path, config | more, make)
        assert_same(load(path), matrices)


def test_a_quantized_head_and_biases(tmp_path: Path) -> None:
    """Biases of the model are kept; those of zeros that some writers add are passed over."""
    path = folder("qwen2", tmp_path / "m")

    def change(name: str, values: Any) -> Any:
        if not is_linear(name) and name != "lm_head.weight":
            return None
        made = quantized(values, 4, 32)
        tensors = writer.gptq(made)
        if "o_proj" in name:
            tensors["bias"] = np.zeros(len(values), np.float16)
        return made, tensors

    matrices = rewrite(path, change, gptq_config(4, 32, lm_head=True))
    checkpoint = load(path)
    assert_same(checkpoint, matrices)
    assert checkpoint.weights["layers.0.attn_q.bias"].data.any()
    assert "layers.0.attn_output.bias" not in checkpoint.weights
    stored = load_file(path / "model.safetensors")
    stored["model.layers.0.self_attn.o_proj.bias"][3] = 1
    save_file(stored, path / "model.safetensors")
    assert "does not use: layers.0.attn_output.bias" in refused(path)


@pytest.mark.parametrize("ordered", [False, True])
def test_fused_modules_are_split_by_rows(ordered: bool, tmp_path: Path) -> None:
    path = folder("phi3", tmp_path / "m")
    order = np.random.default_rng(0).permutation(48)

    def make(values: Any) -> Any:
        chosen = order if ordered and values.shape[1] == 48 else None
        made = quantized(values, 3, 32, order=chosen)
        return made, writer.gptq(made)

    fused = {"self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v")}
    fused |= {"mlp.gate_up_proj": ("ffn_gate", "ffn_up")}
    matrices = quantize_all(path, gptq_config(3, 32), make)
    weights = load(path).weights
    for name, roles in fused.items():
        expected = matrices[f"model.layers.1.{name}.weight"].values
        parts = [weights[f"layers.1.{each}"] for each in roles]
        assert np.array_equal(np.concatenate([writer.numbers(w).values for w in parts]), expected)
        stored = load_file(path / "model.safetensors")
        names = [f"model.layers.1.{name}.{part}" for part in ("qweight", "qzeros", "scales")]
        total = sum(stored[n].nbytes for n in names) + 4 * 48  # g_idx
        assert sum(part.stored.nbytes for part in parts) == total
        assert {part.stored.format for part in parts} == {"gptq-int3"}


# ── AWQ ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize("old", [False, True])
def test_awq(group: int, old: bool, tmp_path: Path) -> None:
    path = folder("qwen3", tmp_path / "m", bf16=True)

    def make(values: Any) -> Any:
        made = quantized(values, 4, group)
        return made, writer.awq(made)

    config: dict[str, Any] = {"bits": 4, "group_size": group, "zero_point": True}
    if old:  # AutoAWQ's own file and words
        matrices = quantize_all(path, None, make)
        config = {"w_bit": 4, "q_group_size": group, "zero_point": True, "version": "GEMM"}
        (path / "quant_config.json").write_text(json.dumps(config))
    else:
        matrices = quantize_all(path, config | {"quant_method": "awq", "version": "gemm"}, make)
    checkpoint = load(path)
    assert_same(checkpoint, matrices)
    assert checkpoint.quantization == Quantization("awq", "gemm", (4,), (group,), False, False)
    # Rows that begin within a word.
    weight = checkpoint.weights["layers.1.attn_q"]
    rows = weight.data.reshape(weight.shape[0], -1)
    for first, last in ((0, 1), (5, 6), (7, 17), (9, 64)):
        assert weight.rows(first, last).tobytes() == rows[first:last].tobytes()


# ── compressed-tensors ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_pack_quantized(
    bits: int, group: int, symmetric: bool, ordered: bool, tmp_path: Path
) -> None:
    path = folder("llama", tmp_path / "m", bf16=True)
    rng = np.random.default_rng(bits)

    def make(values: Any) -> Any:
        order = rng.permutation(values.shape[1]) if ordered else None
        made = quantized(values, bits, group, symmetric=symmetric, order=order, dtype="BF16")
        return made, writer.pack_quantized(made, symmetric=symmetric, g_idx=ordered)

    config = writer.ct_config(bits, group, symmetric=symmetric, layout="pack-quantized")
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group" if ordered else None
    matrices = quantize_all(path, config, make)
    checkpoint = load(path)
    assert_same(checkpoint, matrices)
    assert checkpoint.quantization == Quantization(
        "compressed-tensors", "pack-quantized", (bits,), (group,), symmetric, ordered
    )


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("symmetric", [False, True])
def test_int_quantized(group: int, symmetric: bool, tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m")

    def make(values: Any) -> Any:
        made = quantized(values, 8, group, symmetric=symmetric, dtype="F32")
        tensors = writer.int_quantized(made, symmetric=symmetric)
        if group == -1 and len(values) == 32:
            tensors["weight_scale"] = tensors["weight_scale"].reshape(-1)  # as some writers do
        return made, tensors

    config = writer.ct_config(8, group, symmetric=symmetric, layout="int-quantized")
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
    }  # fmt: skip
    matrices = quantize_all(path, config, make)
    checkpoint = load(path)
    assert_same(checkpoint, matrices)
    assert checkpoint.quantization.activations == "int8, quantized when they are used"


def test_compressed_tensors_of_a_whole_tensor(tmp_path: Path) -> None:
    """One scale for all; a zero point of zeros beside a symmetric one; no order but a g_idx."""
    path = folder("llama", tmp_path / "m")

    def make(values: Any) -> Any:
        made = quantized(values, 8, -1, symmetric=True, dtype="F32")
        made.scales[:] = made.scales.max()
        tensors = writer.int_quantized(made)
        tensors["weight_scale"] = made.scales[:1, 0].copy()
        tensors["weight_zero_point"] = np.zeros(1, np.int8)
        tensors["weight_g_idx"] = np.full(values.shape[1], -1, np.int32)
        return made, tensors

    config = writer.ct_config(8, -1, symmetric=True, layout="int-quantized")
    config["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    matrices = quantize_all(path, None, make)
    values = json.loads((path / "config.json").read_text()) | {"compression_config": config}
    (path / "config.json").write_text(json.dumps(values))  # as older files call it
    assert_same(load(path), matrices)


def test_compressed_tensors_groups_differ(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m")

    def make(values: Any) -> Any:
        if values.shape[1] == 48:
            made = quantized(values, 8, -1)
            return made, writer.int_quantized(made)
        made = quantized(values, 4, 32)
        tensors = writer.pack_quantized(made)
        zeros = (made.zeros - 8).astype(np.int8)  # unpacked, as old versions wrote them
        return made, tensors | {"weight_zero_point": zeros}

    config = writer.ct_config(4, 32, symmetric=False, layout="mixed-precision")
    other = writer.ct_config(8, -1, symmetric=False, layout="")["config_groups"]["group_0"]
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    config["config_groups"]["down"] = other | {"format": "int-quantized", "targets": ["re:.*down"]}
    config["sparsity_config"] = {"format": "dense", "targets": ["Linear"]}
    matrices = quantize_all(path, config, make)
    checkpoint = load(path)
    assert_same(checkpoint, matrices)
    assert checkpoint.quantization.layout == "int-quantized, pack-quantized"
    assert checkpoint.quantization.bits == (4, 8)


@pytest.mark.parametrize(("family", "ending"), [("mixtral", r"w\d"), ("qwen3moe", r"\w+_proj")])
@pytest.mark.parametrize("ordered", [False, True])
def test_experts(family: str, ending: str, ordered: bool, tmp_path: Path) -> None:
    """Every expert's matrices are modules of their own; routers stay as they are."""
    path = folder(family, tmp_path / "m", bf16=True)
    rng = np.random.default_rng(0)

    def change(name: str, values: Any) -> Any:
        if not re.fullmatch(rf"model\.layers\..*experts\.\d\.{ending}\.weight", name):
            return None
        order = rng.permutation(values.shape[1]) if ordered else None
        made = quantized(values, 4, 32, order=order)
        return made, writer.gptq(made)

    matrices = rewrite(path, change, gptq_config(4, 32))
    weights = load(path).weights
    found = {
        weight.name.replace(".qweight", ".weight"): writer.numbers(weight).values
        for weight in weights.values()
        if weight.format.grouped
    }
    assert found.keys() == matrices.keys()
    assert all(np.array_equal(found[name], made.values) for name, made in matrices.items())
    assert {w.format for r, w in weights.items() if "ffn_gate_inp" in r} == {WeightFormat.F32}
    some = weights["layers.1.ffn_down_exps.3"]
    assert some.format is WeightFormat.I4
    assert some.group == min(32, some.shape[1])
