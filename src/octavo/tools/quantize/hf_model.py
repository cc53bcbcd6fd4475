"""A model in Hugging Face's terms: its config.json, and where each of its weights belongs.

The inverse of loader/hf_config.py and loader/hf.py, of the same record (`Family`). What is proposed
is read back by that reader: a model that would not come out the same is refused, and so is one
whose ``model_type`` has no place for something of it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.loader.base import CheckpointError
from octavo.loader.bind import ROUTER
from octavo.loader.hf_config import ORIGINAL, activation_key, model_config
from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.models.config import Activation, Experts, LongRope, ModelConfig, Rope
from octavo.models.families import FAMILIES
from octavo.models.family import MODULES, Family
from octavo.models.hf_type import FULL, SLIDING, HfType
from octavo.tools.quantize.grid import Scheme
from octavo.tools.quantize.same_model import difference
from octavo.tools.quantize.state import QuantizeError

_ACTIVATIONS = {Activation.SILU: "silu", Activation.GELU_TANH: "gelu_pytorch_tanh"}
_LLAMA3_CONTEXTS = (8192, 4096, 16384, 2048)  # of training, of which config.json asks


class HfModule(NamedTuple):
    """A tensor or module of the folder, and the roles of which it is made, one below the other."""

    name: str  # without ".weight" and the like
    ending: str  # "weight" or "bias"
    roles: tuple[str, ...]


def places(config: ModelConfig, roles: list[str]) -> Iterator[HfModule]:
    """Yield the place of every role, in their order; fused ones once."""
    family = FAMILIES[config.family]
    fused = {part: each for each in family.fused for part in each.parts}
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
        if part in fused:
            module, _, parts = fused[part]
        else:
            module = module_of(family, part)
        members = tuple(prefix + each + bias for each in parts)
        seen.update(members)
        base = "" if part == "output" else "model."
        yield HfModule(base + prefix + module, bias[1:] or "weight", members)


def module_of(family: Family, part: str) -> str:
    """What a folder calls a role of a layer: ``ffn_up_exps.3`` → ``mlp.experts.3.up_proj``."""
    name, _, expert = part.partition(".")
    return {**MODULES, **family.modules}[name].format(expert)


def routers(config: ModelConfig) -> list[str]:
    """The modules that say which experts a token goes to: quantizing leaves them alone."""
    sparse = (index for index, layer in enumerate(config.layers) if layer.experts is not None)
    router = module_of(FAMILIES[config.family], ROUTER)
    return [f"model.layers.{index}.{router}" for index in sparse]


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
        activation_key(kind): _ACTIVATIONS[c.activation],
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
    if "use_sliding_window" in kind.defaults:
        values |= {"use_sliding_window": False, "sliding_window": None}
        values["max_window_layers"] = len(c.layers)
    elif "sliding_window" in kind.defaults:
        values["sliding_window"] = next((w for w in windows if w is not None), None)
        if "layer_types" in kind.defaults:
            values["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    for number in family.keys:
        if number.hf:
            x = getattr(c, number.field)
            values[number.hf] = None if x == number.null else number.form.write(x)
    values |= {switch.hf: switch.value for switch in family.fixed if switch.hf}
    if kind.partial_rotary:
        values["partial_rotary_factor"] = c.layers[0].rope.rotated / c.head_dim
    if ORIGINAL in kind.defaults:
        values.setdefault(ORIGINAL, c.context_length)
    return {**values, **dict.fromkeys(family.passed_over), **family.written}


def _experts(c: ModelConfig, experts: Experts, kind: HfType) -> dict[str, Any]:
    own = {
        "num_experts": experts.count,
        "num_local_experts": experts.count,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(c.layers) if layer.experts is None],
    }
    return {
        "num_experts_per_tok": experts.chosen,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    } | {key: value for key, value in own.items() if key in kind.defaults}


def _rope_sections(config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Ways to say the rotary positions; where parameters are lost, likely ones."""
    # The base of layers with a window is one of their own, or that of all.
    local_base = len(FAMILIES[config.family].hf[0].rope_theta) > 1
    ropes = dict.fromkeys(
        (layer.window is not None and local_base, layer.rope) for layer in config.layers
    )
    far = [rope for local, rope in ropes if not local]
    near = [rope for local, rope in ropes if local]
    if len(far) > 1 or len(near) > 1:
        raise _refusal(config, "layers of one kind have different rotary positions")
    base: dict[str, Any] = {"rope_theta": (far or near)[0].theta}
    if local_base:
        base["rope_local_base_freq"] = near[0].theta if near else 10000.0
    rope = (far or near)[0]
    for scaling in _scalings(config, rope):
        section: dict[str, Any] = {"rope_scaling": scaling}
        if scaling is not None and scaling["rope_type"] == "longrope":
            section["original_max_position_embeddings"] = scaling.pop("original")
        yield base | section


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
        yield None
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
