"""A model in Hugging Face's terms: its config.json, and where each of its weights belongs.

The inverse of loader/hf_config.py and loader/hf.py, of the same record (`Family`). What is proposed
is read back by that reader: a model that would not come out the same is refused, and so is one
whose ``model_type`` has no place for something of it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from octavo.loader.base import CheckpointError
from octavo.loader.bind import ROUTERS
from octavo.loader.hf_config import ORIGINAL, SHARED_EXPERT, activation_key, model_config
from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.models.config import Activation, Experts, LongRope, ModelConfig, Rope, Temperature
from octavo.models.families import FAMILIES, program
from octavo.models.family import MODULES, Family, IntArray
from octavo.models.hf_type import FULL, PROPORTIONAL, SLIDING, HfType
from octavo.tools.quantize.grid import Scheme
from octavo.tools.quantize.same_model import difference
from octavo.tools.quantize.state import QuantizeError

_ACTIVATIONS = {
    Activation.SILU: "silu",
    Activation.GELU_TANH: "gelu_pytorch_tanh",
    Activation.SWIGLU_CLAMPED: "silu",  # gpt-oss's files say so
}
_LLAMA3_CONTEXTS = (8192, 4096, 16384, 2048)  # of training, of which config.json asks


class HfModule(NamedTuple):
    """A tensor or module of the folder, and the roles of which it is made, one below the other."""

    name: str  # without ".weight" and the like
    ending: str  # "weight", "bias", or "": the name is all
    roles: tuple[str, ...]
    order: IntArray | None = None  # which row of all of them comes at each place


def places(config: ModelConfig, roles: list[str]) -> Iterator[HfModule]:
    """Yield the place of every role, in their order; fused ones once."""
    family = FAMILIES[config.family]
    fused = {part: each for each in family.fused for part in each.parts}
    gathers = {part: each for each in family.gathers if each.hf for part in each.parts}
    seen: set[str] = set()
    for role in roles:
        if role in seen:
            continue
        plain = role.removesuffix(".bias")
        bias = role.removeprefix(plain)
        prefix, part = "", plain
        if plain.startswith("layers."):
            _, layer, part = plain.split(".", 2)
            prefix = f"layers.{layer}."
        parts: tuple[str, ...] = (part,)
        order = None
        if part + bias in family.bare:
            yield HfModule("model." + prefix + family.bare[part + bias], "", (role,))
            continue
        if part in gathers:
            module, _, parts, _ = gathers[part]
            order = gathers[part].order(config)
        elif part in fused:
            module, _, parts = fused[part]
        else:
            module = module_of(family, part)
        members = tuple(prefix + each + bias for each in parts)
        seen.update(members)
        base = "" if part == "output" else "model."
        yield HfModule(base + prefix + module, bias[1:] or "weight", members, order)


def module_of(family: Family, part: str) -> str:
    """What a folder calls a role of a layer: ``ffn_up_exps.3`` → ``mlp.experts.3.up_proj``."""
    name, _, expert = part.rpartition(".")
    if not expert.isdecimal():
        name, expert = part, ""
    return {**MODULES, **family.modules}[name].format(expert)


def routers(config: ModelConfig) -> list[str]:
    """The modules that say which experts a token goes to: quantizing leaves them alone."""
    roles = [role for role in program(config).weights if role.endswith(ROUTERS)]
    return [place.name for place in places(config, roles)]


def modules(ends: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """The same by the last part of the module's name."""
    return {MODULES[role]: scheme for role, scheme in ends.items()}


# ── config.json ─────────────────────────────────────────────────────────────────────────────────


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model that came without. Raises `QuantizeError` if there is none for it."""
    reasons = []
    for rope in _rope_sections(config):
        values = _values(config, rope)
        try:
            difference = _difference(config, values)
        except CheckpointError as error:
            difference = str(error).partition(": ")[2]
        if difference is None:
            return values
        reasons.append(difference)
    raise _refusal(config, reasons[0])


def _refusal(config: ModelConfig, reason: str) -> QuantizeError:
    return QuantizeError(
        f"a model of family {config.family!r} like this one has no config.json that says the same "
        f"({reason}): write --format gguf, or start from its Hugging Face folder"
    )


def _values(config: ModelConfig, rope: dict[str, Any]) -> dict[str, Any]:
    c, family = config, FAMILIES[config.family]
    windows = [layer.window for layer in c.layers]
    kind = family.hf[0]
    if windows[0] is not None:
        kind = next((each for each in family.hf if "sliding_window" in each.defaults), kind)
    values: dict[str, Any] = {
        "architectures": [kind.model_classes[0]],
        "model_type": kind.model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": len(c.layers),
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        activation_key(kind) or "hidden_act": _ACTIVATIONS[c.activation],
        "max_position_embeddings": c.context_length,
        family.eps.hf: c.norm_eps,
        "tie_word_embeddings": c.tied_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    } | rope
    # A class without the key passes it over.
    values["attention_bias"] = False
    for key, roles in family.bias_keys.items():
        if key in kind.defaults or key == "attention_bias":
            values[key] = bool(roles & (c.biases - family.biases))
    if c.experts is not None:
        values |= _experts(c, c.experts, kind)
    elif family.also_dense and "num_local_experts" in kind.defaults:
        values |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    if "per_layer_config" in kind.defaults:
        values |= _global_layers(c)
    for key in SHARED_EXPERT:
        if key in kind.defaults:
            width = max(layer.shared_expert for layer in c.layers)
            values[key] = width or c.intermediate_size  # of the one that every token goes to
    if "position_embedding_type" in kind.defaults:
        rotated = any(layer.rope.rotated for layer in c.layers)
        values["position_embedding_type"] = "rope" if rotated else None
    if "use_sliding_window" in kind.defaults:
        values |= {"use_sliding_window": False, "sliding_window": None}
        values["max_window_layers"] = len(c.layers)
    elif "sliding_window" in kind.defaults:
        values["sliding_window"] = next((w for w in windows if w is not None), None)
        if "layer_types" in kind.defaults:
            values["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    if (recurrent := family.recurrent) is not None:
        shapes = [layer.recurrence for layer in c.layers]
        values["layer_types"] = [
            recurrent.layer_type if shape is not None else FULL if window is None else SLIDING
            for shape, window in zip(shapes, windows, strict=True)
        ]
        values |= next((recurrent.hf_keys(each, c) for each in shapes if each is not None), {})
    for number in family.keys:
        if number.hf:
            x = getattr(c, number.field)
            values[number.hf] = None if x == number.null else number.form.write(x)
    values |= {switch.hf: switch.value for switch in family.fixed if switch.hf}
    values |= {key: getattr(c, name) for name, key in family.switches.items()}
    if "no_rope_layers" in kind.defaults:
        values["no_rope_layers"] = [int(bool(layer.rope.rotated)) for layer in c.layers]
    if "layer_rope_theta" in kind.defaults:
        ropes = [layer.rope for layer in c.layers]
        values["layer_rope_theta"] = [each.theta if each.rotated else 0.0 for each in ropes]
    if kind.partial_rotary:
        values["partial_rotary_factor"] = c.layers[0].rope.rotated / c.head_dim
    if ORIGINAL in kind.defaults:
        values.setdefault(ORIGINAL, c.context_length)
    return {**values, **dict.fromkeys(family.passed_over), **family.written}


def _global_layers(c: ModelConfig) -> dict[str, Any]:
    """What layers that see everything have of their own, and what the last ones share."""
    far = {str(i): c.heads_of(layer) for i, layer in enumerate(c.layers) if layer.window is None}
    return {
        "per_layer_config": {
            index: {"head_dim": head_dim, "num_key_value_heads": kv_heads}
            for index, (kv_heads, head_dim) in far.items()
        },
        "attention_k_eq_v": any(layer.keys_as_values for layer in c.layers),
        "num_kv_shared_layers": sum(layer.shares is not None for layer in c.layers),
        "use_double_wide_mlp": any(layer.intermediate_size is not None for layer in c.layers),
        "hidden_size_per_layer_input": c.per_layer_input,
        "vocab_size_per_layer_input": c.vocab_size,
    }


def _experts(c: ModelConfig, experts: Experts, kind: HfType) -> dict[str, Any]:
    own = {
        "num_experts": experts.count,
        "num_local_experts": experts.count,
        "enable_moe_block": True,
        "top_k_experts": experts.chosen,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(c.layers) if layer.experts is None],
        "num_dense_layers": dense_layers(c),
        "use_expert_bias": experts.selection_bias,
        "routed_scaling_factor": experts.scale,
    }
    return {
        "num_experts_per_tok": experts.chosen,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    } | {key: value for key, value in own.items() if key in kind.defaults}


def dense_layers(config: ModelConfig) -> int:
    """How many layers come before the first that has experts."""
    return next(i for i, layer in enumerate(config.layers) if layer.experts is not None)


def _rope_sections(config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Ways to say the rotary positions; where parameters are lost, likely ones."""
    kind = FAMILIES[config.family].hf[0]
    # The base of layers with a window is one of their own, or that of all.
    local_base = len(kind.rope_theta) > 1
    rotated = [layer for layer in config.layers if layer.rope.rotated] or config.layers
    ropes = dict.fromkeys(
        (layer.window is not None and local_base, layer.rope) for layer in rotated
    )
    far = [rope for local, rope in ropes if not local]
    near = [rope for local, rope in ropes if local]
    if len(far) > 1 or len(near) > 1:
        raise _refusal(config, "layers of one kind have different rotary positions")
    if PROPORTIONAL in FAMILIES[config.family].hf[0].rope_types:
        yield {"rope_parameters": {FULL: _proportional(far), SLIDING: _plain(near)}}
        return
    base: dict[str, Any] = {"rope_theta": (far or near)[0].theta}
    if local_base and kind.local_theta:
        base[kind.local_theta] = near[0].theta if near else 10000.0
    rope = (far or near)[0]
    for scaling in _scalings(config, rope):
        if local_base and not kind.local_theta:
            local = {"rope_type": "default", "rope_theta": (near or far)[0].theta}
            full = {"rope_type": "default"} | base | (scaling or {})
            yield {"rope_parameters": {FULL: full, SLIDING: local}}
            continue
        if FAMILIES[config.family].temperature:
            grows = config.temperature or Temperature(0.0, config.context_length)
            scaling = {"rope_type": "default"} | (scaling or {})
            scaling |= {"llama_4_scaling_beta": grows.beta}
            scaling.setdefault(ORIGINAL, grows.original)
        section: dict[str, Any] = {"rope_scaling": scaling}
        if scaling is not None and scaling["rope_type"] == "longrope":
            section["original_max_position_embeddings"] = scaling.pop("original")
        yield base | section


def _plain(ropes: list[Rope]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": ropes[0].theta if ropes else 10000.0}


def _proportional(ropes: list[Rope]) -> dict[str, Any]:
    if not ropes or not ropes[0].rotated:
        return {"rope_type": PROPORTIONAL, "rope_theta": 1e6, "partial_rotary_factor": 0.0}
    (rope, *_) = ropes
    pairs = rope.dim // 2
    rotated = sum(factor < inf for factor in rope.factors) if rope.factors else pairs
    return {
        "rope_type": PROPORTIONAL,
        "rope_theta": rope.theta,
        # Rounded down to whole pairs by those who read it.
        "partial_rotary_factor": min((rotated + 0.25) / pairs, 1.0),
        "factor": 1.0 / rope.scale,
    }


def _scalings(config: ModelConfig, rope: Rope) -> Iterator[dict[str, Any] | None]:
    if isinstance(rope.by_length, LongRope):
        yield {
            "rope_type": "longrope",
            "short_factor": list(rope.factors),
            "long_factor": list(rope.by_length.factors),
            "attention_factor": rope.magnitude,
            "original": rope.by_length.original,
        }
        return
    if rope.rotated and rope.scale != 1.0:
        yield {"rope_type": "linear", "factor": 1.0 / rope.scale}
        return
    if not rope.factors:
        scaled = "rope_parameters" in FAMILIES[config.family].hf[0].computed  # by default
        yield {"rope_type": "default"} if scaled else None
        return
    factor = round(max(rope.factors), 4)
    for original in _LLAMA3_CONTEXTS:
        yield {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
    original = round(config.context_length / factor)
    if config.temperature is not None:
        original = config.temperature.original
    yield {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": rope.magnitude,
    }


def _difference(config: ModelConfig, values: dict[str, Any]) -> str | None:
    """What of the model the reader would have otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(values), "utf-8")
        found = model_config(HfFolder(Path(folder)))
    return difference(config, found)
