"""A Hugging Face folder's model in GGUF's terms: its keys, and where each of its weights belongs.

The inverse of loader/metadata.py and loader/loader.py, of the same record (`Family`): the keys of
each architecture, its tensors' names, rows of q and k in the order in which GGUF's llama rotates
them, all experts of a layer in one tensor, matrices that an architecture has fused or interleaved.
Before any work the file's header is read back by that reader: a model that would not come out the
same is refused, and so is a tokenizer that would cut a text otherwise.
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
from octavo.loader.hf_config import text_config
from octavo.loader.hf_folder import HfFolder
from octavo.loader.loader import load_gguf, parts_of, vectors_as_matrices
from octavo.loader.metadata import GATING, KV_HEADS, UNROTATED_FACTOR
from octavo.models.config import Experts, LongRope, ModelConfig, Rope
from octavo.models.families import FAMILIES
from octavo.models.hf_type import FULL
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
from octavo.tools.quantize.hf_model import dense_layers
from octavo.tools.quantize.quantizer import Recipe
from octavo.tools.quantize.row_order import row_order
from octavo.tools.quantize.same_model import difference
from octavo.tools.quantize.state import LayerResult, QuantizeError
from octavo.tools.quantize.tensor_names import tensor_name

ALIGNMENT = 32
_FLOATS = (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16)


def modelled(checkpoint: Checkpoint, recipe: Recipe) -> tuple[Content, list[str]]:
    """The file of a folder's checkpoint, and what a reader of it should know.

    Raises `QuantizeError` for a model or a tokenizer that GGUF cannot express.
    """
    config, path = checkpoint.config, checkpoint.path
    family = FAMILIES[config.family]
    if not family.gguf:
        raise _refusal(checkpoint, "there is no architecture of it")
    if family.recurrent is not None and all(layer.recurrence is None for layer in config.layers):
        raise _refusal(checkpoint, "readers ask for the shape of recurrent layers, and it has none")
    architecture = family.gguf
    section = text_config(HfFolder(path))
    scaling = section.get("rope_scaling") or section.get("rope_parameters") or {}
    scaling = scaling.get(FULL, scaling)
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
    keys |= of_storage(recipe)
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
        "feed_forward_length": _each(
            [layer.intermediate_size or c.intermediate_size for layer in c.layers]
        ),
        "attention.head_count": c.num_heads,
        KV_HEADS: _each([c.heads_of(layer)[0] for layer in c.layers]),
        **_head_dims(c),
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
    if family.windows is not None and family.windows.period:
        theta = rope.theta if family.windows.theta is None else family.windows.theta
        local = next((each.rope.theta for each in c.layers if each.window is not None), theta)
        if local != theta:
            found["rope.freq_base_swa"] = local
        flags = [window is not None for window in windows]
        found["attention.sliding_window_pattern"] = (
            np.array(flags, np.bool_) if family.windows.flags else _pattern(flags)
        )
    if c.temperature is not None:
        found["attention.temperature_scale"] = c.temperature.beta
        found["rope.scaling.original_context_length"] = c.temperature.original
    if shared := sum(layer.shares is not None for layer in c.layers):
        found["attention.shared_kv_layers"] = shared
    for number in family.gguf_keys:
        if (x := getattr(c, number.field)) or number.default:
            found[number.gguf] = number.form.write(float(x))
    if family.recurrent is not None:
        none = np.array([layer.recurrence is not None for layer in c.layers], np.bool_)
        if family.recurrent.period:
            found["attention.recurrent_layers"] = none
        else:
            found[KV_HEADS] = np.where(none, 0, c.num_kv_heads).astype(np.int32)
        shape = next((each.recurrence for each in c.layers if each.recurrence is not None), None)
        found |= {} if shape is None else family.recurrent.gguf_keys(shape)
    if family.rotary_sections:
        found["rope.dimension_sections"] = np.array(family.rotary_sections, np.int32)
    if family.rotary_switch:
        found[family.rotary_switch] = bool(rope.rotated)
        found["rope.dimension_count"] = rope.rotated or c.head_dim  # which readers want in any case
    if c.experts is not None:
        found |= _experts(c, c.experts)
    return found


def _experts(c: ModelConfig, experts: Experts) -> dict[str, Value]:
    found: dict[str, Value] = {
        "expert_count": experts.count,
        "expert_used_count": experts.chosen,
        FAMILIES[c.family].expert_size: experts.intermediate_size,
    }
    if key := FAMILIES[c.family].shared_expert_size:
        found[key] = max(layer.shared_expert for layer in c.layers)
    if FAMILIES[c.family].leading_dense:
        found["leading_dense_block_count"] = dense_layers(c)
    if experts.gating != "softmax":
        found["expert_gating_func"] = GATING[experts.gating]
    return found


def _each(numbers: list[int]) -> Value:
    """One number for all layers; one for each where they differ."""
    return numbers[0] if len(set(numbers)) == 1 else np.array(numbers, np.int32)


def _head_dims(c: ModelConfig) -> dict[str, Value]:
    """The widths of heads; those of layers with a window have keys of their own where they are
    others.
    """
    far = next((layer for layer in c.layers if layer.window is None), c.layers[0])
    wide = c.heads_of(far)[1]
    found: dict[str, Value] = {"attention.key_length": wide, "attention.value_length": wide}
    if FAMILIES[c.family].windows is not None and wide != c.head_dim:
        near = next((layer.rope for layer in c.layers if layer.window is not None), far.rope)
        found |= {"attention.key_length_swa": c.head_dim, "attention.value_length_swa": c.head_dim}
        found["rope.dimension_count_swa"] = near.rotated
    return found


def _far(config: ModelConfig) -> Rope:
    """Return that of the layers without a window, if any are rotated: some alone are scaled."""
    layers = [layer for layer in config.layers if layer.rope.rotated] or config.layers
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
        factors = tuple(min(factor, UNROTATED_FACTOR) for factor in rope.factors)
        return [_floats("rope_freqs.weight", factors)]
    return []


def _floats(name: str, values: tuple[float, ...]) -> GgufTensor:
    data = np.array(values, "<f4").view(np.uint8)
    return GgufTensor(name, (len(values),), WeightFormat.F32, None, lambda _: data)


def _tensors(checkpoint: Checkpoint, recipe: Recipe) -> list[GgufTensor]:
    config, weights = checkpoint.config, checkpoint.weights
    family = FAMILIES[config.family]
    found: list[GgufTensor] = []
    fused = {each.parts[0]: each for each in family.fused if each.gguf}
    gathers = {part: each for each in family.gathers if each.gguf for part in each.parts}
    matrices = vectors_as_matrices(config)
    done: set[str] = set()
    for role, weight in weights.items():
        if role in done:
            continue
        prefix, part = parts_of(role)
        stack = part.partition(".")[0]  # layers.3.ffn_up_exps.0
        roles = [role]
        if not role.startswith("layers."):
            name, ends = f"{family.gguf_names.get(role, role)}.weight", recipe.ends
            found.append(
                rounded(name, role, weight, recipe) if role in ends else _kept(name, weight)
            )
            continue
        scheme = recipe.of(role, weight.shape)
        if stack in STACKS and (scheme is not None or part.endswith(".bias")):
            assert config.experts is not None
            ending = "" if scheme is not None else ".bias"
            roles = [f"{prefix}{stack}.{index}{ending}" for index in range(config.experts.count)]
            name, shape = tensor_name(prefix + stack + ending), (len(roles), *weight.shape)
            if scheme is None:
                found.append(changed(name, shape, roles, weights))
            else:
                found.append(matrix(name, shape, scheme.kind.format, roles))
        elif gather := gathers.get(part.removesuffix(".bias")):
            ending = ".bias" if part.endswith(".bias") else ""
            roles = [prefix + each + ending for each in gather.parts]
            name, order = tensor_name(prefix + gather.gguf + ending), gather.order(config)
            shape = (len(order), *weight.shape[1:])
            if scheme is None:
                found.append(changed(name, shape, roles, weights, order))
            else:
                found.append(matrix(name, shape, scheme.kind.format, roles, order=order))
        elif scheme is None:
            rows = row_order(config, role, interleaved=family.interleaved)
            shape = matrices.get(part, _shape_there(weight))
            found.append(changed(tensor_name(role), shape, roles, weights, rows))
        else:
            if part in fused:
                role = prefix + fused[part].gguf
                roles = [prefix + each for each in fused[part].parts]
            orders = [row_order(config, each, interleaved=family.interleaved) for each in roles]
            shape = (sum(weights[each].shape[0] for each in roles), weight.shape[1])
            found.append(matrix(tensor_name(role), shape, scheme.kind.format, roles, orders))
        done.update(roles)
    return found


def _shape_there(weight: Weight) -> tuple[int, ...]:
    """That of a convolution [channels, 1, taps] is [channels, taps] in GGUF."""
    return weight.shape[::2] if len(weight.shape) == 3 else weight.shape


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
