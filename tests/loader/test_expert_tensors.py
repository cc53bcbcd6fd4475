"""Sparse experts in files: every way they are stored, and every way these can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from executor.driving import Driver
from loader import quantized_writer as writer
from loader.gguf_writer import (
    F32,
    FLOAT32,
    MIXTRAL_EXPERTS,
    Q8_0,
    STRING,
    UINT32,
    Gguf,
    Tensor,
    tiny_llama,
    tiny_mixtral,
)
from octavo.loader import load
from octavo.loader.base import Checkpoint, WeightFormat
from octavo.models.config import Experts
from oracle.tiny_folders import folder

COUNT = MIXTRAL_EXPERTS


def one_tensor_an_expert(file: Gguf) -> None:
    """As files of early 2024 are."""
    for tensor in [t for t in file.tensors if "_exps" in str(t.name)]:
        file.tensors.remove(tensor)
        size = len(tensor.data) // COUNT
        for index in range(COUNT):
            name = str(tensor.name).replace("_exps.weight", f".{index}.weight")
            data = tensor.data[index * size : (index + 1) * size]
            file.tensors.append(Tensor(name, tensor.shape[1:], tensor.type, data))


def gate_and_up_in_one(file: Gguf) -> None:
    for layer in range(2):
        gate, up = (file.tensor(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        size = len(gate.data or b"") // COUNT
        data = b"".join(
            (each.data or b"")[index * size : (index + 1) * size]
            for index in range(COUNT)
            for each in (gate, up)
        )
        file.tensors.remove(gate)
        up.name, up.shape, up.data = f"blk.{layer}.ffn_gate_up_exps.weight", (COUNT, 64, 32), data


def loaded(file: Gguf, tmp_path: Path, name: str = "model.gguf") -> Checkpoint:
    return load(file.write(tmp_path / name))


def same_weights(a: Checkpoint, b: Checkpoint) -> bool:
    return a.weights.keys() == b.weights.keys() and all(
        weight.format is b.weights[role].format
        and weight.shape == b.weights[role].shape
        and weight.data.tobytes() == b.weights[role].data.tobytes()
        for role, weight in a.weights.items()
    )


@pytest.mark.parametrize("type", [F32, Q8_0])
@pytest.mark.parametrize("change", [one_tensor_an_expert, gate_and_up_in_one])
def test_gguf_ways_to_store_them_are_one(
    change: Callable[[Gguf], None], type: int, tmp_path: Path
) -> None:
    checkpoint = loaded(tiny_mixtral(type=type), tmp_path)
    assert checkpoint.config.family == "mixtral"
    assert checkpoint.config.experts == Experts(COUNT, 2, 32, renormalize=True)
    assert all(layer.rope.interleaved for layer in checkpoint.config.layers)
    dense = tiny_llama(ffn=32 * COUNT, type=type).tensor("blk.1.ffn_up.weight").data
    size = len(dense) // COUNT
    for index in range(COUNT):
        weight = checkpoint.weights[f"layers.1.ffn_up_exps.{index}"]
        assert weight.format == type
        assert weight.data.tobytes() == dense[index * size : (index + 1) * size]
    file = tiny_mixtral(type=type)
    change(file)
    assert same_weights(loaded(file, tmp_path, "other.gguf"), checkpoint)


def test_routers_are_widened_and_say_so(tmp_path: Path) -> None:
    file = tiny_mixtral(type=Q8_0)
    router = file.tensor("blk.0.ffn_gate_inp.weight")
    numbers = np.frombuffer(router.data or b"", "<f4").astype("<f2")
    router.type, router.data = 1, numbers.tobytes()
    weight = loaded(file, tmp_path).weights["layers.0.ffn_gate_inp"]
    assert weight.format is WeightFormat.F32
    assert (weight.data.view("<f4") == numbers.astype("<f4")).all()
    assert (weight.stored.format, weight.stored.nbytes) == ("F16", 2 * COUNT * 32)


def reshape(name: str, shape: tuple[int, ...]) -> Callable[[Gguf], None]:
    def change(file: Gguf) -> None:
        tensor = file.tensor(f"blk.0.{name}.weight")
        tensor.shape, tensor.data = shape, None

    return change


def rename(name: str, other: str) -> Callable[[Gguf], None]:
    def change(file: Gguf) -> None:
        file.tensor(f"blk.0.{name}.weight").name = f"blk.0.{other}.weight"

    return change


def twice(file: Gguf) -> None:
    file.tensors.append(Tensor("blk.0.ffn_up.1.weight", (32, 32)))


REFUSED: dict[str, tuple[Callable[[Gguf], object], str]] = {
    "more than the tensors": (
        lambda f: f.set("llama.expert_count", UINT32, 4),
        "_exps.weight' has shape [3, 32, 32]; the model's metadata asks for 4 experts",
    ),
    "fewer than the tensors": (
        lambda f: f.set("llama.expert_count", UINT32, 2),
        "_exps.weight' has shape [3, 32, 32]; the model's metadata asks for 2 experts",
    ),
    "none": (
        lambda f: f.set("llama.expert_count", UINT32, 0).set("llama.expert_used_count", UINT32, 0),
        "_exps.weight' has shape [3, 32, 32]; the model's metadata asks for 0 experts",
    ),
    "no count": (
        lambda f: f.drop("llama.expert_count").drop("llama.expert_used_count"),
        "asks for 0 experts",
    ),
    "too many": (
        lambda f: f.set("llama.expert_count", UINT32, 1 << 30),
        "1073741824 experts, outside 1 to 1024",
    ),
    "chosen twice": (
        lambda f: f.set("llama.expert_used_count", UINT32, 4),
        "a token goes to 4 of 3 experts",
    ),
    "none chosen": (
        lambda f: f.set("llama.expert_used_count", UINT32, 0),
        "llama.expert_used_count is 0, which is below 1",
    ),
    "nobody says how many": (
        lambda f: f.drop("llama.expert_used_count"),
        "llama.expert_used_count is missing",
    ),
    "a rule of choice": (
        lambda f: f.set("llama.expert_gating_func", UINT32, 2),
        "llama.expert_gating_func is 2, which is not supported",
    ),
    "scaled weights": (
        lambda f: f.set("llama.expert_weights_scale", FLOAT32, 2.5),
        "llama.expert_weights_scale is 2.5, which is not supported",
    ),
    "an architecture of no file": (
        lambda f: f.set("general.architecture", STRING, "mixtral"),
        "architecture 'mixtral' is not supported",
    ),
    "a flat stack": (
        reshape("ffn_up_exps", (3, 1024)),
        "'blk.0.ffn_up_exps.weight' of shape [3, 1024] is no such stack",
    ),
    "a flat stack of gate and up": (
        rename("ffn_up_exps", "ffn_gate_up_exps"),
        "has layers.0.ffn_gate_exps.0, layers.0.ffn_gate_exps.1, layers.0.ffn_gate_exps.2 twice",
    ),
    "a long stack": (
        reshape("ffn_up_exps", (1024, 32, 32)),
        "has shape [1024, 32, 32]; the model's metadata asks for 3 experts",
    ),
    "experts of another width": (
        reshape("ffn_down_exps", (3, 32, 64)),
        "'blk.0.ffn_down_exps.weight' has shape [32, 64]; the model's metadata asks for [32, 32]",
    ),
    "a small router": (
        reshape("ffn_gate_inp", (2, 32)),
        "'blk.0.ffn_gate_inp.weight' has shape [2, 32]; the model's metadata asks for [3, 32]",
    ),
    "no router": (
        rename("ffn_gate_inp", "ffn_gate_inq"),
        "has no tensor for layers.0.ffn_gate_inp",
    ),
    "an expert twice": (twice, "has layers.0.ffn_up_exps.1 twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_gguf_contradictions_are_refused_by_name(name: str, tmp_path: Path) -> None:
    change, reason = REFUSED[name]
    file = tiny_mixtral()
    change(file)
    assert reason in writer.refused(file.write(tmp_path / "model.gguf"))


def stacked(path: Path, family: str) -> None:
    """The folder's experts as transformers 5 has them in memory."""
    weights = load_file(path / "model.safetensors")
    block, names = {
        "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
        "qwen3moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    }[family]
    config = json.loads((path / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.{block}."
        gate, up, down = (
            np.stack(
                [
                    weights.pop(f"{prefix}experts.{index}.{name}.weight")
                    for index in range(config["num_local_experts"])
                ]
            )
            for name in names
        )
        prefix = f"model.layers.{layer}.mlp."
        weights[f"{prefix}experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        weights[f"{prefix}experts.down_proj"] = down
        if block != "mlp":
            weights[f"{prefix}gate.weight"] = weights.pop(
                f"model.layers.{layer}.{block}.gate.weight"
            )
    save_file(weights, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family", ["mixtral", "qwen3moe"])
def test_stacks_of_a_folder_are_its_experts(family: str, tmp_path: Path) -> None:
    path = folder(family, tmp_path / "model")
    apart = load(path)
    assert apart.config.experts is not None
    stacked(path, family)
    assert same_weights(load(path), apart)


def test_the_experts_of_a_folder_are_not_copied(tmp_path: Path) -> None:
    """Views into the file: a Mixtral's take far more memory than there is twice of."""
    path = folder("mixtral", tmp_path / "model", bf16=True)
    for weights in (load(path).weights, load(_stacked(path)).weights):
        owned = [role for role, weight in weights.items() if weight.data.flags.owndata]
        assert not [role for role in owned if "_exps" in role]


def _stacked(path: Path) -> Path:
    stacked(path, "mixtral")
    return path


FOLDERS: dict[str, tuple[str, dict[str, object], str]] = {
    "another number": ("mixtral", {"num_local_experts": 5}, "has no tensor for layers.0.ffn_down_"),
    "fewer": ("mixtral", {"num_local_experts": 3}, "does not use: "),
    "chosen twice": ("mixtral", {"num_experts_per_tok": 5}, "a token goes to 5 of 4 experts"),
    "no number": (
        "qwen3moe",
        {"num_local_experts": "six"},
        "num_local_experts is 'six', not an integer",
    ),
    "zero": ("qwen3moe", {"num_local_experts": 0}, "num_local_experts is 0, not an integer from 1"),
    "a width": ("qwen3moe", {"moe_intermediate_size": 24}, "[20, 32]"),
    "steps": ("qwen3moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    "dense layers": ("qwen3moe", {"mlp_only_layers": [0]}, "has no tensor for layers.0.ffn_down"),
    "no layers": ("qwen3moe", {"mlp_only_layers": "0"}, "mlp_only_layers is not a list"),
    "shares": ("qwen3moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1, not a boolean"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_contradictions_are_refused_by_name(name: str, tmp_path: Path) -> None:
    family, changes, reason = FOLDERS[name]
    assert reason in writer.refused(folder(family, tmp_path / "model", changes))


@pytest.mark.parametrize(
    ("tensor", "shape", "reason"),
    [
        (
            "experts.down_proj",
            (3, 32, 48),
            "has shape [3, 32, 48]; the model's metadata asks for 4",
        ),
        ("experts.down_proj", (), "has shape []; the model's metadata asks for 4"),
        ("experts.gate_up_proj", (4, 95, 32), "of shape [4, 95, 32] is no such stack"),
        ("experts.gate_up_proj", (4, 94, 32), "has shape [47, 32]; the model's metadata asks for"),
    ],
)
def test_stacks_of_other_shapes_are_refused(
    tensor: str, shape: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    path = _stacked(folder("mixtral", tmp_path / "model"))
    weights = load_file(path / "model.safetensors")
    weights[f"model.layers.1.mlp.{tensor}"] = np.zeros(shape, np.float32)
    save_file(weights, path / "model.safetensors")
    message = writer.refused(path)
    assert f"model.layers.1.mlp.{tensor}" in message
    assert reason in message


def wide_folder(path: Path) -> Path:
    """A Qwen3-MoE of random weights whose widths are whole groups, twice over."""
    folder("qwen3moe", path, {"hidden_size": 64, "moe_intermediate_size": 64})
    rng = np.random.default_rng(9)
    wide: dict[str, np.ndarray] = {}
    for name, values in load_file(path / "model.safetensors").items():
        kept = ("q_norm", "k_norm")  # of a head
        shape = values.shape if name.split(".")[-2] in kept else (*values.shape[:-1], 64)
        if ".experts." in name or "o_proj" in name:
            shape = (64, 32 if "o_proj" in name else 64)
        spread = 0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        wide[name] = rng.normal(float(len(shape) == 1), spread, shape).astype(np.float32)
    save_file(wide, path / "model.safetensors", {"format": "pt"})
    return path


LAYOUTS: dict[
    str, tuple[dict[str, object], Callable[[writer.Quantized], dict[str, np.ndarray]]]
] = {
    "gptq": (writer.gptq_config(4, 32, desc_act=True), writer.gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, writer.awq),
    "compressed-tensors": (
        writer.ct_config(4, 32, symmetric=False, layout="pack-quantized"),
        writer.pack_quantized,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_experts_run(layout: str, tmp_path: Path) -> None:
    """Experts that GPTQ has each ordered by itself, and AWQ's and llm-compressor's, against the
    numbers that they stand for.
    """
    path = wide_folder(tmp_path / "model")
    config, pack = LAYOUTS[layout]
    rng = np.random.default_rng(1)
    orders: dict[str, np.ndarray] = {}

    def change(name: str, values: np.ndarray) -> object:
        if not writer.is_linear(name):
            return None
        expert = name.rpartition(".experts.")[2].partition(".")[0] + str("down" in name)
        order = orders.setdefault(expert, rng.permutation(values.shape[1]))
        ordered = layout == "gptq" and ".experts." in name
        made = writer.quantized(values, 4, 32, order=order if ordered else None)
        return made, pack(made)

    matrices = writer.rewrite(path, change, config)
    plain = load(writer.plain_twin(path, tmp_path / "plain", matrices))
    checkpoint = load(path)
    weight = checkpoint.weights["layers.1.ffn_down_exps.5"]
    assert (weight.format, weight.group) == (WeightFormat.I4, 32)
    assert (weight.order is not None) == (layout == "gptq")
    tokens = [int(token) for token in rng.integers(0, 96, 90)]
    driver = Driver(checkpoint, threads=2, kv_dtype="fp16")
    got, exact = driver.run(tokens, [60, 1]), Driver(plain, kv_dtype="fp16").run(tokens)
    spreads = np.sqrt(((got - exact) ** 2).mean(axis=1)) / exact.std()
    assert float(np.median(spreads)) < 4e-2
    assert np.array_equal(driver.run(tokens), got)
