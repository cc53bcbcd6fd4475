"""Gemma 4 (Google DeepMind, 2026), the language model.

Against Gemma 3: layers that see everything have wider heads, and rotate some of their pairs, with
the frequencies of all (`proportional`). Scores are not scaled, and values are normalised head by
head, without a weight. By size:

- the larger ones take the keys' projection for values in layers that see everything;
- with experts, these stand beside the dense feed-forward layer, and their router reads the residual
  stream through a norm of its own;
- in the E models the last layers read the keys and values of the last one before them that sees as
  much, and every layer gets a part of a second embedding of the token.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from octavo.models import gemma2
from octavo.models.build import Builder
from octavo.models.config import Activation, Layer, ModelConfig
from octavo.models.family import COUNT, TOWERS, Family, Key, Windows
from octavo.models.hf_type import (
    FULL,
    PROPORTIONAL,
    ROPE_TYPES,
    SLIDING,
    HfType,
    HfWrapper,
    Rule,
    layer_types,
)
from octavo.models.program import (
    Add,
    Concat,
    Embed,
    GatedActivation,
    Input,
    Linear,
    Logits,
    Program,
    RmsNorm,
    Scale,
    Slice,
)
from octavo.models.section import Section

ASSISTANT = "assistant."  # what the roles of an assistant's weights begin with


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    if c.per_layer_input:
        _per_layer_inputs(b)
    for index, layer in enumerate(b.layers()):
        _attention(b, layer)
        b.norm("x", "ffn_norm", "h")
        b.feed_forward("h")
        if layer.experts is not None:
            _add_experts(b, layer)
        b.norm("h", "post_ffw_norm", "h")
        b.add()
        if c.per_layer_input:
            _add_layer_input(b, index)
        b.append(Scale("x", b.role("layer_output_scale"), "x"))
    return b.head()


def assistant_program(c: ModelConfig, target: ModelConfig) -> Program:
    """Return the Program of an assistant: a small model for multi-token prediction, which reads the
    keys and values of its target.

    It makes logits, and a row to go on from, of a token's embedding in the target and of the hidden
    row that the token was drawn from. The token's position is the first that the cache does not
    have; that of the tokens guessed is the same. Raises `ValueError` where the two do not fit
    together.
    """
    b, within = Builder(c), ASSISTANT
    b.widths |= dict.fromkeys(("token", "hidden"), target.hidden_size)
    b.widths["both"] = 2 * target.hidden_size
    b.append(Input("hidden"))
    b.append(Embed("token_embd", "token", target.embedding_scale))
    b.append(Concat("token", "hidden", "both"))
    b.append(Linear("both", f"{within}nextn.pre_projection", "x"))
    for index, layer in enumerate(c.layers):
        b.enter(index, layer, within)
        _attention(b, replace(layer, shares=_owner(layer, c, target)), ahead=1)
        b.norm("x", "ffn_norm", "h")
        b.feed_forward("h")
        b.norm("h", "post_ffw_norm", "h")
        b.add()
        b.append(Scale("x", b.role("layer_output_scale"), "x"))
    b.append(RmsNorm("x", f"{within}output_norm", "x", b.eps))
    b.append(Linear("x", f"{within}nextn.post_projection", "hidden"))
    b.append(Logits("x", f"{within}token_embd", hidden="hidden"))
    return b.program()


def _owner(layer: Layer, c: ModelConfig, target: ModelConfig) -> int:
    """Return the target's layer whose keys and values an assistant's layer reads: the last one that
    has any and sees as much.
    """
    own_caches = (
        index
        for index, other in enumerate(target.layers)
        if other.shares is None and (other.window is None) == (layer.window is None)
    )
    index = max(own_caches, default=-1)
    if index < 0:
        raise ValueError("the model has no layer that sees as much as one of the assistant's")
    other = target.layers[index]
    own = layer.window, layer.rope, c.heads_of(layer)
    if own != (other.window, other.rope, target.heads_of(other)):
        raise ValueError(
            f"the assistant's window, rotary positions, KV heads or widths are not those of the "
            f"model's layer {index}, whose keys it is to read"
        )
    return index


def _attention(b: Builder, layer: Layer, ahead: int = 0) -> None:
    b.norm("x", "attn_norm", "h")
    b.project_qkv("h", layer)
    if layer.shares is None:  # values are of keys that have no norm yet
        values, head_dim = b.value("v"), b.config.heads_of(layer)[1]
        source = b.value("k") if layer.keys_as_values else values
        b.append(RmsNorm(source, None, values, b.eps, head_dim))
    b.norm_qk(layer, by_head=True)
    b.attend(layer, ahead=ahead)
    b.norm("h", "post_attention_norm", "h")
    b.add()


def _per_layer_inputs(b: Builder) -> None:
    """Write down what all layers get beside the residual stream, side by side: the token's second
    embedding plus a normalised projection of its first, over sqrt(2).
    """
    c, width = b.config, b.config.per_layer_input
    b.widths |= dict.fromkeys(("inputs", "projected"), len(c.layers) * width)
    b.widths |= dict.fromkeys(("input", "input_gate"), width)
    b.append(Embed("per_layer_token_embd", "inputs", sqrt(width / 2.0)))
    b.linear("x", "per_layer_model_proj", "projected")
    # The projection counts over sqrt(hidden_size), which a norm undoes but for its epsilon.
    eps = b.eps * c.hidden_size
    b.append(RmsNorm("projected", "per_layer_proj_norm", "projected", eps, width, sqrt(0.5)))
    b.append(Add("inputs", "projected", "inputs"))


def _add_layer_input(b: Builder, index: int) -> None:
    """Write down how a layer adds its input to the residual stream: gated by the stream."""
    width = b.config.per_layer_input
    b.linear("x", "inp_gate", "input_gate")
    b.append(Slice("inputs", "input", index * width, width))
    b.append(GatedActivation("input_gate", "input", "input_gate", b.config.activation))
    b.linear("input_gate", "proj", "h")
    b.norm("h", "post_norm", "h")
    b.add()


def _add_experts(b: Builder, layer: Layer) -> None:
    """Write down the experts beside the dense feed-forward layer, whose output is in ``h``."""
    assert layer.experts is not None
    hidden = b.config.hidden_size
    b.widths |= dict.fromkeys(("routed", "sparse"), hidden)
    b.norm("h", "post_ffw_norm_1", "h")
    b.norm("x", "ffn_gate_inp.scale", "routed", scale=hidden**-0.5)
    b.norm("x", "pre_ffw_norm_2", "sparse")
    b.sparse_feed_forward(
        "sparse", layer.experts, "sparse", router="routed", factors="ffn_down_exps.scale"
    )
    b.norm("sparse", "post_ffw_norm_2", "sparse")
    b.append(Add("h", "sparse", "h"))


# ── config.json ─────────────────────────────────────────────────────────────────────────────────


def _types(values: Section) -> list[Any]:
    """The last layer sees everything, whatever a file says."""
    types = values.values.get("layer_types")
    if types is None:
        types = layer_types(values, lambda index: (index + 1) % 6 != 0)
    if not isinstance(types, list):
        values.fail("layer_types is not a list")
    return [*types[:-1], FULL] if types[-1:] == [SLIDING] else types


def _of_global_layers(values: Section, key: str, otherwise: Any) -> Any:
    """What ``per_layer_config`` says of layers that see everything: the same of all of them, and
    nothing of others. Without it, what config.json says ``otherwise``.
    """
    by_layer = values.values["per_layer_config"]
    if by_layer is None:
        return otherwise
    types = values.values["layer_types"]
    far = [str(index) for index, kind in enumerate(types) if kind == FULL]
    if not isinstance(by_layer, dict) or not by_layer.keys() <= {*far}:
        values.fail("per_layer_config is not an object of layers that see everything")
    sections = [by_layer.get(index, {}) for index in far]
    first = sections[0] if sections else {}
    known = {"head_dim", "num_key_value_heads"}
    if not isinstance(first, dict) or not first.keys() <= known:
        values.fail(f"per_layer_config has other keys than {' and '.join(sorted(known))}")
    if any(section != first for section in sections):
        values.fail("per_layer_config differs from layer to layer")
    return first.get(key, values.values[key])


def _head_dim(values: Section) -> Any:
    return _of_global_layers(values, "head_dim", values.values["global_head_dim"])


def _kv_heads(values: Section) -> Any:
    given = values.values["num_global_key_value_heads"]
    own = given if values.flag("attention_k_eq_v") else None
    return _of_global_layers(values, "num_key_value_heads", own)


def _ropes(values: Section) -> dict[str, dict[str, Any]]:
    return {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": PROPORTIONAL, "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }


_UNIFIED: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "attention_bias": False,
    "sliding_window": 1024,
    "layer_types": None,
    "final_logit_softcapping": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "per_layer_config": None,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
}
_DEFAULTS: dict[str, Any] = {
    **_UNIFIED,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}
_RULES = {
    "layer_types": Rule("sliding but every 6th and the last", _types, always=True),
    "global_head_dim": Rule("as per_layer_config has it", _head_dim, always=True),
    "num_global_key_value_heads": Rule(
        "as per_layer_config has it, else only with attention_k_eq_v", _kv_heads, always=True
    ),
    "rope_parameters": Rule("proportional in a quarter where all is seen", _ropes),
}
_CAP = "final_logit_softcapping"
FAMILY = Family(
    name="gemma4",
    title="Gemma 4",
    note="dense, with experts, and E models; text only: what sees or hears is passed over",
    program=program,
    keys=(
        Key("logits_softcap", _CAP, _CAP, default=30.0, null=0.0),
        Key("per_layer_input", gguf="embedding_length_per_layer_input", default=0.0, form=COUNT),
    ),
    embedding_root=True,
    attention_scale=1.0,
    modules={
        **gemma2.MODULES,
        "ffn_gate_inp": "router.proj",
        "ffn_gate_exps": "experts.{}.gate_proj",
        "ffn_up_exps": "experts.{}.up_proj",
        "ffn_down_exps": "experts.{}.down_proj",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "per_layer_token_embd": "embed_tokens_per_layer",
        "per_layer_model_proj": "per_layer_model_projection",
        "per_layer_proj_norm": "per_layer_projection_norm",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "nextn.pre_projection": "pre_projection",
        "nextn.post_projection": "post_projection",
    },
    bare={
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "layer_output_scale": "layer_scalar",
    },
    hf=(
        HfType(
            model_type="gemma4_text",
            classes="Gemma4Text",
            causal_lm="Gemma4ForCausalLM",
            defaults=_DEFAULTS,
            computed=_RULES,
            aliases={"num_experts": "num_local_experts", "top_k_experts": "num_experts_per_tok"},
            rope_types={name: name for name in (*ROPE_TYPES, PROPORTIONAL)},
            rope_theta={FULL: 1e6, SLIDING: 1e4},
        ),
        HfType(
            model_type="gemma4_unified_text",
            classes="Gemma4UnifiedText",
            causal_lm="Gemma4UnifiedForCausalLM",
            defaults=_UNIFIED,
            computed=_RULES,
            rope_types={name: name for name in (*ROPE_TYPES, PROPORTIONAL)},
            rope_theta={FULL: 1e6, SLIDING: 1e4},
        ),
    ),
    wrappers=(
        HfWrapper(
            model_type="gemma4",
            classes="Gemma4",
            texts=("gemma4_text",),
        ),
        HfWrapper(
            model_type="gemma4_unified",
            classes="Gemma4Unified",
            texts=("gemma4_unified_text",),
        ),
    ),
    ignored=(*TOWERS, "audio_tower.", "vision_embedder.", "embed_vision.", "embed_audio."),
    activation=Activation.GELU_TANH,
    windows=Windows(period=6, theta=1e4, scaled=False, flags=True),
    expert_size="expert_feed_forward_length",
    also_dense=True,
    keys_as_values=True,
    merged_spaces=True,
)
