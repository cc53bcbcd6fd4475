"""Qwen 3.5 (Qwen Team, 2026): gated delta nets (Yang et al., 2025) in place of most attention.

In such a layer a short convolution goes over queries, keys and values; the result of each value
head is normalised and gated. The other layers are Qwen3's with rotary positions on a part of each
head, and with a gate on what attention finds. Norms' weights are stored less one, but for those of
the delta net.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.models.build import Builder
from octavo.models.config import Activation, Layer, ModelConfig
from octavo.models.family import (
    ATTENTION,
    FFN,
    LOG_OF_NEGATIVE,
    Family,
    Gather,
    IntArray,
    RecurrentLayers,
)
from octavo.models.hf_type import FULL, LINEAR, HfType, HfWrapper, Rule, layers
from octavo.models.program import Activate, Concat, GatedActivation, Input, Program
from octavo.models.recurrence import DecayGate, GatedDelta
from octavo.models.recurrence_shape import DeltaShape
from octavo.models.section import Section


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    for layer in b.layers():
        _layer(b, layer)
    return b.head()


def mtp_program(c: ModelConfig) -> Program:
    """Return the Program that guesses the token behind the next one: from a token and the hidden
    row that it was drawn from, through a layer of its own. The row that it goes on from is the one
    its logits are made of.
    """
    b = Builder(c)
    b.widths |= {"hidden": c.hidden_size, "both": 2 * c.hidden_size}
    b.enter(len(c.layers), c.mtp_layer)
    b.append(Input("hidden"))
    b.embed(c.embedding_scale)
    b.norm("x", "nextn.enorm", "x")
    b.norm("hidden", "nextn.hnorm", "hidden")
    b.append(Concat("x", "hidden", "both"))
    b.linear("both", "nextn.eh_proj", "x")
    _layer(b, c.mtp_layer)
    return b.head("nextn.shared_head_norm")


def _layer(b: Builder, layer: Layer) -> None:
    b.norm("x", "attn_norm", "h")
    if isinstance(layer.recurrence, DeltaShape):
        delta_net(b, layer.recurrence)
    else:
        gated_attention(b, layer)
    b.add()
    b.norm("x", "post_attention_norm", "h")
    b.add_feed_forward(layer, shared_gate=True)


def delta_net(b: Builder, shape: DeltaShape) -> None:
    """Write down a gated delta net, from h to h."""
    wide = shape.value_heads * shape.value_dim
    b.widths |= {"mixed": shape.channels, "z": wide, "delta": wide}
    b.widths |= dict.fromkeys(("beta", "decay"), shape.value_heads)
    b.linear("h", "attn_qkv", "mixed")
    b.linear("h", "attn_gate", "z")
    b.linear("h", "ssm_beta", "beta")
    b.linear("h", "ssm_alpha", "decay")
    b.append(Activate("beta", "beta", Activation.SIGMOID))
    b.append(DecayGate("decay", b.role("ssm_dt.bias"), b.role("ssm_a"), "decay"))
    weight = b.role("ssm_conv1d")
    b.append(GatedDelta("mixed", "decay", "beta", weight, "delta", b.index, shape))
    b.norm("delta", "ssm_norm", "delta", shape.value_dim)
    b.append(GatedActivation("z", "delta", "delta", Activation.SILU))
    b.linear("delta", "ssm_out", "h")


def gated_attention(b: Builder, layer: Layer) -> None:
    """Write down attention with a gate on its result, from h to h."""
    b.widths["q_gate"] = b.widths["q"]
    b.project_qkv("h", layer)
    b.linear("h", "attn_q_gate", "q_gate")
    b.norm_qk(layer, by_head=True)
    b.attend(layer, gate="q_gate")


def _queries_and_gates(c: ModelConfig) -> dict[str, IntArray]:
    """Return the rows of queries and gates, which alternate head by head."""
    rows = np.arange(2 * c.num_heads * c.head_dim).reshape(c.num_heads, 2, c.head_dim)
    return {"attn_q": rows[:, 0].reshape(-1), "attn_q_gate": rows[:, 1].reshape(-1)}


def layer_types(values: Section) -> list[str]:
    period = values.count("full_attention_interval", 4)
    return [FULL if (index + 1) % period == 0 else LINEAR for index in layers(values)]


def delta_shape(count: Callable[[str], int], *, tiled: bool) -> DeltaShape:
    """Return the shape that a GGUF file states."""
    value_heads = count("ssm.time_step_rank")
    return DeltaShape(
        key_heads=count("ssm.group_count"),
        value_heads=value_heads,
        key_dim=count("ssm.state_size"),
        value_dim=count("ssm.inner_size") // value_heads,
        taps=count("ssm.conv_kernel"),
        tiled=tiled,
    )


DELTA_NET = RecurrentLayers(
    layer_type=LINEAR,
    hf=lambda values: DeltaShape(
        key_heads=values.count("linear_num_key_heads"),
        value_heads=values.count("linear_num_value_heads"),
        key_dim=values.count("linear_key_head_dim"),
        value_dim=values.count("linear_value_head_dim"),
        taps=values.count("linear_conv_kernel_dim"),
        tiled=False,
    ),
    gguf=lambda count: delta_shape(
        count, tiled=count("ssm.time_step_rank") > count("ssm.group_count")
    ),
    hf_keys=lambda shape, _: {
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.key_dim,
        "linear_value_head_dim": shape.value_dim,
        "linear_conv_kernel_dim": shape.taps,
    },
    gguf_keys=lambda shape: {
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.state_size": shape.key_dim,
        "ssm.inner_size": shape.value_heads * shape.value_dim,
        "ssm.conv_kernel": shape.taps,
    },
    period=4,
)
QUERIES_AND_GATES = Gather(
    "self_attn.q_proj", "attn_q", ("attn_q", "attn_q_gate"), _queries_and_gates
)
MODULES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
BARE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
BIAS_KEYS = {"attention_bias": ATTENTION | {"attn_q_gate"}, "mlp_bias": FFN}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "eos_token_id": None,
}
COMPUTED = {"layer_types": Rule("attention in every full_attention_interval-th", layer_types)}
FAMILY = Family(
    name="qwen35",
    title="Qwen 3.5",
    note="dense, text only: no vision tower is loaded; a layer for multi-token prediction drafts",
    program=program,
    mtp=mtp_program,
    recurrent=DELTA_NET,
    modules=MODULES,
    bare=BARE,
    forms={"ssm_a": LOG_OF_NEGATIVE},
    gathers=(QUERIES_AND_GATES,),
    hf=(
        HfType(
            model_type="qwen3_5_text",
            classes="Qwen3_5Text",
            causal_lm="Qwen3_5ForCausalLM",
            tokenizer="Qwen3_5Tokenizer",
            defaults=DEFAULTS,
            computed=COMPUTED,
            partial_rotary=0.25,
        ),
    ),
    wrappers=(
        HfWrapper(
            model_type="qwen3_5",
            classes="Qwen3_5",
            texts=("qwen3_5_text",),
            tied=False,
            tokenizer="Qwen3_5Tokenizer",
        ),
    ),
    ignored=("visual.",),
    bias_keys=BIAS_KEYS,
    norm_offset=1.0,
    whole_norms=frozenset({"ssm_norm"}),
    rotary_sections=(11, 11, 10, 0),
)
