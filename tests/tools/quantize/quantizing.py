"""Small models to quantize, and layouts read back word by word, from their descriptions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.executor.reference import evaluate
from octavo.loader import load
from octavo.loader.base import Checkpoint
from octavo.loader.dequantize import dequantize
from octavo.loader.hf_config import model_config, text_config
from octavo.loader.hf_folder import HfFolder
from octavo.loader.tokenizer import byte_alphabet
from octavo.models import families
from octavo.tools.quantize.gptq_rounding import Order
from octavo.tools.quantize.grid import Scheme
from octavo.tools.quantize.hf_model import places
from octavo.tools.quantize.layouts import Format, scheme_of
from octavo.tools.quantize.quantize_checkpoint import QuantizationResult, quantize
from octavo.tools.quantize.quantizer import Method, Progress, Recipe
from octavo.tools.quantize.scope import ends
from oracle.tiny_folders import FAMILIES, folder

Float32 = npt.NDArray[np.float32]
SAMPLES = np.random.default_rng(11).integers(0, 90, (6, 32)).astype(np.int32)


def random_folder(name: str, path: Path, **changes: Any) -> Path:
    """A family's folder with random bfloat16 weights: 64 wide, 96 in the feed-forward layers (64 in
    experts), two query heads on a KV head, a head of its own."""
    config = text_config(HfFolder(FAMILIES / name))
    config |= {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64}
    config |= {"shared_expert_intermediate_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config |= {"shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_head": 16}
    config |= {"tie_word_embeddings": False, "dtype": "bfloat16"} | changes
    folder(name, path, config)
    shapes = families.program(model_config(HfFolder(path)))
    rng = np.random.default_rng(3)
    tensors = {}
    for place in places(shapes.config, list(shapes.weights)):
        outputs = sum(shapes.weights[role][0] for role in place.roles)
        role, shape = place.roles[0], (outputs, *shapes.weights[place.roles[0]][1:])
        values = rng.normal(size=shape) / np.sqrt(shape[-1]) if len(shape) == 2 else np.ones(shape)
        if ".ssm_" in role and len(shape) != 2:
            values *= rng.uniform(0.5, 1.5, (shape[0], *[1] * (len(shape) - 1)))  # heads differ
        if role.endswith(("attn_norm", "ffn_norm")):
            values[::9] *= 6.0  # inputs that matter more
        tensors[f"{place.name}.{place.ending}".removesuffix(".")] = values.astype(
            ml_dtypes.bfloat16
        )
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def qwen3_folder(path: Path) -> Path:
    return random_folder("qwen3", path, num_hidden_layers=2, layer_types=None, max_window_layers=2)


def speaking(path: Path) -> Path:
    """The folder with a tokenizer that GGUF has words for: of single bytes."""
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    letters = sorted(byte_alphabet().values())
    letters += [f"<{index}>" for index in range(size)]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(letters[:size])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def recipe(
    method: str = "rtn",
    format: str = "gptq",
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = False,
    order: str = "static",
) -> tuple[Recipe, Format]:
    scheme: Scheme = scheme_of(Format(format), bits, group, symmetric)
    return Recipe(Method(method), scheme, Order(order)), Format(format)


def make(
    source: Path,
    out: Path,
    *,
    progress: Progress = lambda report: None,
    embedding: int | None = 16,
    **how: Any,
) -> QuantizationResult:
    """``embedding``: bits of the ends, as of the command."""
    checkpoint, (chosen, format) = load(source), recipe(**how)
    symmetric = bool(how.get("symmetric"))
    small = ends(checkpoint, format, embedding, chosen.scheme.group, symmetric)
    return quantize(checkpoint, replace(chosen, ends=small), format, out, SAMPLES, progress)


def weights_of(checkpoint: Checkpoint) -> dict[str, Float32]:
    return {role: dequantize(weight) for role, weight in checkpoint.weights.items()}


def logits_of(checkpoint: Checkpoint, ids: Any = SAMPLES[:2]) -> Float32:
    program = families.program(checkpoint.config)
    return evaluate.logits(program, weights_of(checkpoint), np.asarray(ids))


def modules(folder: Path) -> dict[str, Float32]:
    """Every quantized module's matrix [out, in] by its name, number for number."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    found: dict[str, dict[str, Any]] = {}
    for name, value in tensors.items():
        module, _, part = name.rpartition(".")
        found.setdefault(module, {})[part] = value
    read = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}[config["quant_method"]]
    return {
        module: read(parts, config)
        for module, parts in found.items()
        if parts.keys() & {"qweight", "weight_packed", "weight_scale"}
    }


def _field(word: Any, place: int, bits: int) -> int:
    return (int(word) & 0xFFFFFFFF) >> (bits * place) & ((1 << bits) - 1)


def _stream(words: Any, bits: int) -> list[int]:
    """The numbers of one stream of bits in 32-bit words, lowest first."""
    whole = int.from_bytes(np.ascontiguousarray(words, "<i4").tobytes(), "little")
    return [whole >> at & ((1 << bits) - 1) for at in range(0, 32 * len(words) - bits + 1, bits)]


def _gptq(t: dict[str, Any], config: dict[str, Any]) -> Float32:
    bits, out = config["bits"], t["qweight"].shape[1]
    zeros = [_stream(row, bits) for row in t["qzeros"]]
    values = np.empty((out, t["qweight"].shape[0] * 32 // bits), np.float32)
    for o in range(out):
        for i, code in enumerate(_stream(t["qweight"][:, o], bits)):
            group = t["g_idx"][i]
            zero = zeros[group][o] + 1
            values[o, i] = np.float32(t["scales"][group, o]) * np.float32(code - zero)
    return values


def _awq(t: dict[str, Any], config: dict[str, Any]) -> Float32:
    place_of = [0, 4, 1, 5, 2, 6, 3, 7]  # of a word's eight outputs, each one's nibble
    inputs, out = t["qweight"].shape[0], t["qweight"].shape[1] * 8
    values = np.empty((out, inputs), np.float32)
    for i in range(inputs):
        group = i // config["group_size"] if config["group_size"] > 0 else 0
        for o in range(out):
            code = _field(t["qweight"][i, o // 8], place_of[o % 8], 4)
            zero = _field(t["qzeros"][group, o // 8], place_of[o % 8], 4)
            values[o, i] = np.float32(t["scales"][group, o]) * np.float32(code - zero)
    return values


def _compressed(t: dict[str, Any], config: dict[str, Any]) -> Float32:
    scheme = config["config_groups"]["group_0"]["weights"]
    bits, scale = scheme["num_bits"], t["weight_scale"].astype(np.float32)
    if "weight" in t:
        return t["weight"].astype(np.float32) * scale
    half = 1 << (bits - 1)
    out, inputs = t["weight_shape"].tolist()
    values = np.empty((out, inputs), np.float32)
    for o in range(out):
        for i, code in enumerate(_stream(t["weight_packed"][o], bits)[:inputs]):
            values[o, i] = scale[o, i * scale.shape[1] // inputs] * np.float32(code - half)
    return values
