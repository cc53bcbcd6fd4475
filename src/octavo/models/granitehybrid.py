"""Granite 4 (Granite Team, 2025): Granite 3 with Mamba-2 (Dao and Gu, 2024) in place of most
attention, and with sparse experts beside a shared one, or dense.

A Mamba layer's matrix gives z, the inputs of a convolution, and a time step for each head. What the
recurrence finds is gated by z, and normalised in groups. For the residual stream see `granite`.
"""

from __future__ import annotations

from math import inf
from typing import Any

from octavo.models import granite
from octavo.models.build import Builder
from octavo.models.config import Activation, Layer, ModelConfig
from octavo.models.family import ATTENTION, LOG_OF_NEGATIVE, Family, Fused, RecurrentLayers
from octavo.models.hf_type import KV_HEADS, LINEAR, LLAMA_DEFAULTS, HfType, Rule, layers
from octavo.models.program import GatedActivation, Program, RmsNorm
from octavo.models.recurrence import Mamba2, Softplus
from octavo.models.recurrence_shape import MambaShape
from octavo.models.section import Section


def program(c: ModelConfig) -> Program:
    return granite.program(c, mix)


def mix(b: Builder, layer: Layer) -> None:
    """Write down a layer's recurrence or attention, from h to h."""
    if isinstance(layer.recurrence, MambaShape):
        mamba(b, layer.recurrence)
    else:
        granite.attention(b, layer)


def mamba(b: Builder, shape: MambaShape) -> None:
    """Write down a Mamba-2 layer, from h to h."""
    wide = shape.heads * shape.head_dim
    b.widths |= {"z": wide, "mixed": shape.channels, "step": shape.heads, "found": wide}
    for part, value in zip(PROJECTED, ("z", "mixed", "step"), strict=True):
        b.linear("h", part, value)
    b.append(Softplus("step", b.role("ssm_dt.bias"), "step"))
    weight, a, d = map(b.role, ("ssm_conv1d", "ssm_a", "ssm_d"))
    bias = f"{weight}.bias" if "ssm_conv1d" in b.config.biases else None
    b.append(Mamba2("mixed", "step", weight, a, d, "found", b.index, shape, bias))
    b.append(GatedActivation("z", "found", "found", Activation.SILU))
    eps, group = b.config.norm_eps, wide // shape.groups
    b.append(RmsNorm("found", b.role("ssm_norm"), "found", eps, group, wide=True))
    b.linear("found", "ssm_out", "h")


PROJECTED = ("ssm_in_z", "ssm_in_x", "ssm_in_dt")
# Of time steps; the latter is how `transformers` writes it.
NO_LIMIT, NO_LIMIT_IN_JSON = (0.0, inf), [0.0, {"__float__": "Infinity"}]


def _types(values: Section) -> list[str]:
    return [LINEAR for _ in layers(values)]


def _head_dim(values: Section) -> int:
    """Return the width of a Mamba head, which "auto" makes of the others."""
    wide = values.count("mamba_expand") * values.count("hidden_size")
    heads = values.count("mamba_n_heads")
    head_dim = wide // heads
    if values.get("mamba_d_head", None) != "auto":
        head_dim = values.count("mamba_d_head")
    if head_dim * heads != wide:
        values.fail(
            f"mamba_n_heads {heads} of mamba_d_head {values.values['mamba_d_head']} are not "
            f"mamba_expand times hidden_size, {wide}"
        )
    return head_dim


def _shape(values: Section) -> MambaShape:
    if values.text("hidden_act") not in ("silu", "swish"):
        values.fail("recurrent layers with another hidden_act than silu are not supported")
    limit = values.get("time_step_limit", None)
    if limit not in (NO_LIMIT, NO_LIMIT_IN_JSON):
        values.fail(f"time_step_limit {limit!r} is not supported, only 0 to infinity")
    return MambaShape(
        heads=values.count("mamba_n_heads"),
        head_dim=values.count("mamba_d_head"),
        state=values.count("mamba_d_state"),
        groups=values.count("mamba_n_groups"),
        taps=values.count("mamba_d_conv"),
    )


def _hf_keys(shape: MambaShape, c: ModelConfig) -> dict[str, Any]:
    return {
        "mamba_n_heads": shape.heads,
        "mamba_d_head": shape.head_dim,
        "mamba_d_state": shape.state,
        "mamba_n_groups": shape.groups,
        "mamba_d_conv": shape.taps,
        "mamba_expand": shape.heads * shape.head_dim // c.hidden_size,
    }


def _feed_forward(values: Section) -> int:
    """Return the width of the only feed-forward layers, or of experts."""
    dense = not values.count("num_local_experts", least=0)
    return values.count("shared_intermediate_size" if dense else "intermediate_size")


FAMILY = Family(
    name="granitehybrid",
    title="Granite 4",
    note="with Mamba-2 layers or without, dense or with experts beside a shared one; GGUF says of "
    "all-attention models that they are `granite`",
    program=program,
    keys=granite.FAMILY.keys,
    recurrent=RecurrentLayers(
        layer_type=LINEAR,
        hf=_shape,
        gguf=lambda count: MambaShape(
            heads=count("ssm.time_step_rank"),
            head_dim=count("ssm.inner_size") // count("ssm.time_step_rank"),
            state=count("ssm.state_size"),
            groups=count("ssm.group_count"),
            taps=count("ssm.conv_kernel"),
        ),
        hf_keys=_hf_keys,
        gguf_keys=lambda shape: {
            "ssm.time_step_rank": shape.heads,
            "ssm.inner_size": shape.heads * shape.head_dim,
            "ssm.state_size": shape.state,
            "ssm.group_count": shape.groups,
            "ssm.conv_kernel": shape.taps,
        },
        gguf_matrices=lambda shape: {
            "ssm_a": (shape.heads, 1),
            "ssm_d": (shape.heads, 1),
            "ssm_norm": (shape.groups, shape.heads * shape.head_dim // shape.groups),
        },
    ),
    modules={
        "ssm_conv1d": "mamba.conv1d",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
        "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
        "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
    },
    bare={"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"},
    forms={"ssm_a": LOG_OF_NEGATIVE},
    fused=(
        Fused("mamba.in_proj", "ssm_in", PROJECTED),
        # The only feed-forward layer, or a shared expert.
        Fused("shared_mlp.input_linear", "", ("ffn_gate", "ffn_up")),
        Fused("shared_mlp.input_linear", "", ("ffn_gate_shexp", "ffn_up_shexp")),
        Fused("shared_mlp.output_linear", "", ("ffn_down",)),
        Fused("shared_mlp.output_linear", "", ("ffn_down_shexp",)),
    ),
    hf=(
        HfType(
            model_type="granitemoehybrid",
            classes="GraniteMoeHybrid",
            tokenizer="",
            defaults={
                **LLAMA_DEFAULTS,
                "attention_bias": False,
                "embedding_multiplier": 1.0,
                "logits_scaling": 1.0,
                "residual_multiplier": 1.0,
                "attention_multiplier": 1.0,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "shared_intermediate_size": 1024,
                "position_embedding_type": None,
                "layer_types": None,
                "mamba_n_heads": 128,
                "mamba_n_groups": 1,
                "mamba_d_state": 256,
                "mamba_d_head": "auto",
                "mamba_d_conv": 4,
                "mamba_expand": 2,
                "mamba_conv_bias": True,
                "mamba_proj_bias": False,
                "time_step_limit": NO_LIMIT,
            },
            computed={
                "num_key_value_heads": KV_HEADS,
                "layer_types": Rule("recurrent in all", _types),
                "mamba_d_head": Rule(
                    "mamba_expand * hidden_size // mamba_n_heads, if auto", _head_dim, always=True
                ),
            },
            aliases={"layers_block_type": "layer_types"},
            feed_forward=_feed_forward,
        ),
    ),
    bias_keys={
        "attention_bias": ATTENTION,
        "mamba_conv_bias": frozenset({"ssm_conv1d"}),
        "mamba_proj_bias": frozenset({*PROJECTED, "ssm_out"}),
    },
    interleaved=True,
    rotary_switch="rope.scaling.finetuned",
    expert_size="feed_forward_length",
    also_dense=True,
    shared_expert_size="expert_shared_feed_forward_length",
)
