"""A model in Hugging Face's terms: its config.json, and where each of its weights belongs.

The inverse of loader/hf_config.py and loader/hf.py. What is proposed is read back by that
reader: a model that would not come out the same is refused, and so is one whose ``model_type`` has
no place for something of it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.loader.base import CheckpointError
from octavo.loader.bind import ROUTER
from octavo.loader.hf_config import model_config
from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.models.config import Activation, Experts, LongRope, ModelConfig, Rope
from octavo.tools.quantize.grid import Scheme
from octavo.tools.quantize.same_model import difference
from octavo.tools.quantize.state import QuantizeError

_TYPES = {  # of each family
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
}
_MISTRAL = ("mistral", "MistralForCausalLM")
_ACTIVATIONS = {Activation.SILU: "silu", Activation.GELU_TANH: "gelu_pytorch_tanh"}
_LLAMA3_CONTEXTS = (8192, 4096, 16384, 2048)  # of training, of which config.json asks

_TOP = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Of sparse layers: the router, and an expert's matrices.
_SPARSE = {
    "mixtral": (
        "block_sparse_moe",
        {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"},
    ),
    "qwen3moe": (
        "mlp",
        {
            "ffn_gate_exps": "gate_proj",
            "ffn_down_exps": "down_proj",
            "ffn_up_exps": "up_proj",
        },
    ),
}
_FUSED = {
    "self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
    "mlp.gate_up_proj": ("ffn_gate", "ffn_up"),
}
# Files of these families hold norms' weights less one.
_LESS_ONE = ("gemma2", "gemma3")


class HfModule(NamedTuple):
    """A tensor or module of the folder, and the roles of which it is made, one below the other."""

    name: str  # without ".weight" and the like
    ending: str  # "weight" or "bias"
    roles: tuple[str, ...]


def places(config: ModelConfig, roles: list[str]) -> Iterator[HfModule]:
    """Yield the place of every role, in their order; fused ones once."""
    seen: set[str] = set()
    for role in roles:
        if role in seen:
            continue
        if role in _TOP:
            name, _, ending = _TOP[role].rpartition(".")
            yield HfModule(name, ending, (role,))
            continue
        _, layer, part = role.split(".", 2)
        part, bias, _ = part.partition(".bias")
        module = _part(config, part)
        parts: tuple[str, ...] = (part,)
        if config.family == "phi3":
            for fused, members in _FUSED.items():
                if part in members:
                    module, parts = fused, members
        ending = "bias" if bias else "weight"
        members = tuple(f"layers.{layer}.{each}{bias}" for each in parts)
        seen.update(members)
        yield HfModule(f"model.layers.{layer}.{module}", ending, members)


def _part(config: ModelConfig, part: str) -> str:
    if part == "ffn_norm" and config.family in _LESS_ONE:
        return "pre_feedforward_layernorm"
    if config.family in _SPARSE:
        block, matrices = _SPARSE[config.family]
        name, _, expert = part.partition(".")
        if name in matrices:
            return f"{block}.experts.{expert}.{matrices[name]}"
        if part == ROUTER:
            return f"{block}.gate"
    return _PARTS[part]


def routers(config: ModelConfig) -> list[str]:
    """The modules that say which experts a token goes to: quantizing leaves them alone."""
    sparse = (index for index, layer in enumerate(config.layers) if layer.experts is not None)
    return [f"model.layers.{index}.{_part(config, ROUTER)}" for index in sparse]


def modules(ends: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """The same by the last part of the module's name."""
    return {_TOP[role].split(".")[-2]: scheme for role, scheme in ends.items()}


def less_one(config: ModelConfig, role: str) -> bool:
    return config.family in _LESS_ONE and role.endswith("norm")


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
    c = config
    if c.family not in _TYPES:
        raise _refusal(c, f"supported are {', '.join(_TYPES)}")
    model_type, architecture = _TYPES[c.family]
    windows = [layer.window for layer in c.layers]
    if c.family == "llama" and windows[0] is not None:
        model_type, architecture = _MISTRAL
    gemma = c.family in _LESS_ONE
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": len(c.layers),
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_activation" if gemma else "hidden_act": _ACTIVATIONS[c.activation],
        "max_position_embeddings": c.context_length,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_embeddings,
        "attention_bias": "attn_output" in c.biases
        or (c.family != "qwen2" and "attn_q" in c.biases),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    } | rope
    if c.family in ("llama", "granite"):
        values["mlp_bias"] = "ffn_up" in c.biases
    if c.experts is not None:
        values |= _experts(c, c.experts)
    if model_type in ("mistral", "mixtral", "phi3"):
        values["sliding_window"] = windows[0]
    if c.family in ("qwen2", "qwen3", "qwen3moe"):
        values |= {"use_sliding_window": False, "sliding_window": None}
        values["max_window_layers"] = len(c.layers)
    if gemma:
        values |= {
            "query_pre_attn_scalar": _near_integer(c.attention_scale**-2.0),
            "sliding_window": next((w for w in windows if w is not None), None),
            "layer_types": [
                "full_attention" if window is None else "sliding_attention" for window in windows
            ],
            "attn_logit_softcapping": c.attention_softcap or None,
            "final_logit_softcapping": c.logits_softcap or None,
        }
    if c.family == "granite":
        values |= {
            "embedding_multiplier": c.embedding_scale,
            "attention_multiplier": c.attention_scale,
            "residual_multiplier": c.residual_scale,
            "logits_scaling": 1.0 / c.logits_scale,
        }
    if c.family == "phi3":
        rope_dim = c.layers[0].rope.dim
        values["partial_rotary_factor"] = rope_dim / c.head_dim
        values["original_max_position_embeddings"] = rope.get(
            "original_max_position_embeddings", c.context_length
        )
        values["pad_token_id"] = None  # the class's own is beyond small vocabularies
    return values


def _experts(c: ModelConfig, experts: Experts) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_experts_per_tok": experts.chosen,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    if c.family == "mixtral":
        return found | {"num_local_experts": experts.count}
    return found | {
        "num_experts": experts.count,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(c.layers) if layer.experts is None],
    }


def _near_integer(value: float) -> float:
    """A square root's square: an integer is written as one, since transformers takes no other."""
    return round(value) if abs(value - round(value)) < 1e-6 * value else value


def _rope_sections(config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Ways to say the rotary positions; where parameters are lost, likely ones."""
    ropes = dict.fromkeys(
        (layer.window is not None and config.family == "gemma3", layer.rope)
        for layer in config.layers
    )
    far = [rope for local, rope in ropes if not local]
    near = [rope for local, rope in ropes if local]
    if len(far) > 1 or len(near) > 1:
        raise _refusal(config, "layers of one kind have different rotary positions")
    base: dict[str, Any] = {"rope_theta": (far or near)[0].theta}
    if config.family == "gemma3":
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
    if rope.scale != 1.0:
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
