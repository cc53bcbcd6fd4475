"""A Hugging Face folder's model in GGUF's terms: its keys, and where each of its weights belongs.

The inverse of loader/metadata.py and loader/loader.py, of the same record (`Family`): the keys of
each architecture, its tensors' names, rows of q and k in the order in which GGUF's llama rotates
them, all experts of a layer in one tensor, matrices that an architecture has fused. Before any work
the file's header is read back by that reader: a model that would not come out the same is refused,
and so is a tokenizer that would cut a text otherwise.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from octavo.loader.base import Checkpoint, CheckpointError, Weight, WeightFormat
from octavo.loader.bind import STACKS
from octavo.loader.chat_template import JinjaChatTemplate
from octavo.loader.dequantize import dequantize
from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.loader.loader import load_gguf
from octavo.models.config import LongRope, ModelConfig, Rope
from octavo.models.families import FAMILIES
from octavo.models.rope import yarn_magnitude
from octavo.tools.quantize.gguf_vocabulary import compare_tokenizers, vocabulary
from octavo.tools.quantize.gguf_writer import (
    Bytes,
    Content,
    GgufTensor,
    UnencodableKey,
    Value,
    changed,
    key,
    matrix,
    of_storage,
    rounded,
)
from octavo.tools.quantize.grid import bf16_bits
from octavo.tools.quantize.quantizer import Recipe
from octavo.tools.quantize.row_order import row_order
from octavo.tools.quantize.same_model import difference
from octavo.tools.quantize.state import LayerResult, QuantizeError

ALIGNMENT = 32
_FLOATS = (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16)


def modelled(checkpoint: Checkpoint, recipe: Recipe) -> tuple[Content, list[str]]:
    """The file of a folder's checkpoint, and what a reader of it should know.

    Raises `QuantizeError` for a model or a tokenizer that GGUF cannot express.
    """
    config, path = checkpoint.config, checkpoint.path
    architecture = FAMILIES[config.family].gguf
    section = HfFolder(path).json(CONFIG)
    scaling = section.get("rope_scaling") or section.get("rope_parameters") or {}
    named, notes = vocabulary(checkpoint)
    keys: dict[str, Value] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": _written(config.name or path.resolve().name),
    }
    keys |= {f"{architecture}.{name}": v for name, v in _shape(config, scaling).items()}
    keys |= named
    if isinstance(checkpoint.chat_template, JinjaChatTemplate):
        keys["tokenizer.chat_template"] = checkpoint.chat_template.source
    keys |= of_storage(recipe.scheme.kind)
    tensors = [*_rope_tensors(config, scaling), *_tensors(checkpoint, recipe)]
    try:
        written = [key(name, value) for name, value in keys.items()]
    except UnencodableKey as error:
        raise QuantizeError(f"{path}: {error}: no GGUF file can hold that") from None
    content = Content(written, tensors, ALIGNMENT)
    return content, notes + _read_back(content, checkpoint)


def _written(name: str) -> str:
    """A file's name as text: bytes that are not UTF-8 as \\xff."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# ── Keys ────────────────────────────────────────────────────────────────────────────────────────


def _shape(c: ModelConfig, scaling: dict[str, Any]) -> dict[str, Value]:
    """Keys of the architecture, without its name."""
    rope, family = _far(c), FAMILIES[c.family]
    found: dict[str, Value] = {
        "block_count": len(c.layers),
        "context_length": c.context_length,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        family.eps.gguf: c.norm_eps,
        "vocab_size": c.vocab_size,
        "rope.dimension_count": rope.rotated,
        "rope.freq_base": rope.theta,
    }
    found |= _rope_keys(rope, scaling)
    windows = [layer.window for layer in c.layers]
    window = next((each for each in windows if each is not None), None)
    # Without the key readers guess Phi-3's, which all its layers have.
    if family.windows is not None and (window is not None or not family.windows.period):
        found["attention.sliding_window"] = window or 0
    if family.windows is not None and (theta := family.windows.theta) is not None:
        local = next((each.rope.theta for each in c.layers if each.window is not None), theta)
        if local != theta:
            found["rope.freq_base_swa"] = local
        found["attention.sliding_window_pattern"] = _pattern([w is not None for w in windows])
    for number in family.gguf_keys:
        if (x := getattr(c, number.field)) or number.default:
            found[number.gguf] = number.form.write(float(x))
    if c.experts is not None:
        found |= {"expert_count": c.experts.count, "expert_used_count": c.experts.chosen}
        found[family.expert_size] = c.experts.intermediate_size
    return found


def _far(config: ModelConfig) -> Rope:
    """Return that of the layers without a window, which alone are ever scaled."""
    layers = config.layers
    return next((layer.rope for layer in layers if layer.window is None), layers[0].rope)


def _pattern(windowed: list[bool]) -> Value:
    """One layer in how many sees everything; a flag for each where they are no such pattern."""
    for period in range(1, len(windowed) + 2):
        if windowed == [(index + 1) % period != 0 for index in range(len(windowed))]:
            return period
    return np.array(windowed, np.bool_)


def _rope_keys(rope: Rope, scaling: dict[str, Any]) -> dict[str, Value]:
    if isinstance(rope.by_length, LongRope):
        return {
            "rope.scaling.original_context_length": rope.by_length.original,
            "rope.scaling.attn_factor": rope.magnitude,
        }
    if rope.rotated and rope.scale != 1.0:
        return {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0 / rope.scale}
    if not _is_yarn(scaling):
        return {}
    factor = float(scaling.get("factor") or 1.0)
    found: dict[str, Value] = {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
    if original := scaling.get("original_max_position_embeddings"):
        found["rope.scaling.original_context_length"] = original
    for name, value in (("fast", scaling.get("beta_fast")), ("slow", scaling.get("beta_slow"))):
        if value:
            found[f"rope.scaling.yarn_beta_{name}"] = float(value)
    ours = yarn_magnitude(factor)
    if abs(rope.magnitude - ours) > 1e-6 * ours:
        found["rope.scaling.attn_factor"] = rope.magnitude / ours
    return found


def _is_yarn(scaling: dict[str, Any]) -> bool:
    return scaling.get("rope_type", scaling.get("type")) == "yarn"


# ── Tensors ─────────────────────────────────────────────────────────────────────────────────────


def _rope_tensors(config: ModelConfig, scaling: dict[str, Any]) -> list[GgufTensor]:
    rope = _far(config)
    if isinstance(rope.by_length, LongRope):
        return [
            _floats("rope_factors_long.weight", rope.by_length.factors),
            _floats("rope_factors_short.weight", rope.factors),
        ]
    if rope.factors and not _is_yarn(scaling):
        return [_floats("rope_freqs.weight", rope.factors)]
    return []


def _floats(name: str, values: tuple[float, ...]) -> GgufTensor:
    data = np.array(values, "<f4").view(np.uint8)
    return GgufTensor(name, (len(values),), WeightFormat.F32, None, lambda _: data)


def _tensors(checkpoint: Checkpoint, recipe: Recipe) -> list[GgufTensor]:
    config, weights, kind = checkpoint.config, checkpoint.weights, recipe.scheme.kind
    family = FAMILIES[config.family]
    found: list[GgufTensor] = []
    fused = {each.parts[0]: each for each in family.fused}
    done: set[str] = set()
    for role, weight in weights.items():
        if role in done:
            continue
        prefix, _, part = role.rpartition(".")
        roles = [role]
        if not role.startswith("layers."):
            name, scheme = f"{role}.weight", recipe.of(role, weight.shape)
            found.append(rounded(name, weight, scheme) if scheme else _kept(name, weight))
            continue
        if prefix.partition(".")[2].partition(".")[2] in STACKS:  # layers.3.ffn_up_exps.0
            assert config.experts is not None
            roles = [f"{prefix}.{index}" for index in range(config.experts.count)]
            shape = (len(roles), *weight.shape)
            found.append(matrix(_name(prefix), shape, kind, roles))
        elif recipe.of(role, weight.shape) is None:
            order = row_order(config, role, interleaved=family.interleaved)
            found.append(changed(_name(role), role, weight, order))
        else:
            if part in fused:
                role = f"{prefix}.{fused[part].gguf}"
                roles = [f"{prefix}.{each}" for each in fused[part].parts]
            rows = sum(weights[each].shape[0] for each in roles)
            orders = [row_order(config, each, interleaved=family.interleaved) for each in roles]
            found.append(matrix(_name(role), (rows, weight.shape[1]), kind, roles, orders))
        done.update(roles)
    return found


def _name(role: str) -> str:
    """``layers.3.attn_q`` → ``blk.3.attn_q.weight``; biases keep their ending."""
    ending = "" if role.endswith(".bias") else ".weight"
    return f"blk.{role.removeprefix('layers.')}{ending}"


def _kept(name: str, weight: Weight) -> GgufTensor:
    """Byte for byte if it is of floats, else as bfloat16, as where a folder is made."""
    if weight.format in _FLOATS:
        return GgufTensor(name, weight.shape, weight.format, None, lambda _: weight.data)

    def data(_: LayerResult) -> Bytes:
        return bf16_bits(dequantize(weight)).view(np.uint8).reshape(-1)

    return GgufTensor(name, weight.shape, WeightFormat.BF16, None, data)


# ── Reading back ────────────────────────────────────────────────────────────────────────────────


def _read_back(content: Content, checkpoint: Checkpoint) -> list[str]:
    """What the file would be, of its header and a hole where the tensors' bytes will be."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header.gguf"
        with open(path, "wb") as file:
            file.write(content.header())
            none = LayerResult.empty()
            for tensor in content.tensors:
                if tensor.name.startswith("rope_"):  # part of the shape
                    file.write(tensor.data(none).data)
                    file.seek(content.padded(tensor.nbytes) - tensor.nbytes, os.SEEK_CUR)
                else:
                    file.seek(content.padded(tensor.nbytes), os.SEEK_CUR)
            file.truncate(file.tell())
        try:
            found = load_gguf(path)
        except CheckpointError as error:
            raise _refusal(checkpoint, str(error).partition(": ")[2]) from None
        reason = difference(checkpoint.config, found.config)
        if reason is not None:
            raise _refusal(checkpoint, reason)
        return compare_tokenizers(checkpoint, found)


def _refusal(checkpoint: Checkpoint, reason: str) -> QuantizeError:
    return QuantizeError(
        f"{checkpoint.path}: GGUF has no way to say the same of a model of family "
        f"{checkpoint.config.family!r} like this one ({reason}): choose --format gptq, awq or "
        "compressed-tensors"
    )
