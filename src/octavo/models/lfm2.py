"""LFM2 (Liquid AI, 2025): gated short convolutions in place of most layers' attention.

Such a layer's matrix gives B, C and x of a token; a causal convolution goes over B x, channel by
channel, and C times its result goes through a second matrix. The other layers are Qwen3's.
"""

from __future__ import annotations

from octavo.models.build import Builder
from octavo.models.config import ModelConfig
from octavo.models.family import Family, Fused, Key, RecurrentLayers
from octavo.models.hf_type import FULL, HfType, Rule, layers
from octavo.models.program import Multiply, Program
from octavo.models.recurrence import ShortConv
from octavo.models.recurrence_shape import ShortConvShape
from octavo.models.section import Section

CONV = "conv"  # the layer type


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    for layer in b.layers():
        b.norm("x", "attn_norm", "h")
        if isinstance(layer.recurrence, ShortConvShape):
            short_convolution(b, layer.recurrence)
        else:
            b.project_qkv("h", layer)
            if c.head_gates:
                b.widths["head_gate"] = c.num_heads
                b.linear("h", "attn_head_gate", "head_gate")
            b.norm_qk(layer, by_head=True)
            b.attend(layer, gate="head_gate" if c.head_gates else None)
        if c.sandwich_norms:
            b.norm("h", "post_attention_norm", "h")
        b.add()
        b.norm("x", "ffn_norm", "h")
        b.feed_forward("h", layer.experts)
        if c.sandwich_norms:
            b.norm("h", "post_ffw_norm", "h")
        b.add()
    return b.head()


def short_convolution(b: Builder, shape: ShortConvShape) -> None:
    """Write down a gated short convolution, from h to h."""
    for part in PROJECTED:
        b.widths[part] = shape.channels
        b.linear("h", part, part)
    before, after, x = PROJECTED
    b.append(Multiply(before, x, x))
    b.widths["convolved"] = shape.channels
    role = b.role("shortconv.conv")
    bias = f"{role}.bias" if "shortconv.conv" in b.config.biases else None
    b.append(ShortConv(x, role, "convolved", b.index, shape, bias))
    b.append(Multiply(after, "convolved", "convolved"))
    b.linear("convolved", "shortconv.out_proj", "h")


PROJECTED = ("shortconv_b", "shortconv_c", "shortconv_x")


def _full_attention(values: Section) -> list[int] | None:
    if values.values["layer_types"] is not None:
        return None
    return list(layers(values))


def _types(values: Section) -> list[str]:
    full = values.get("full_attn_idxs", None)
    if not isinstance(full, list):
        values.fail("full_attn_idxs is not a list")
    return [FULL if index in full else CONV for index in layers(values)]


def _feed_forward(values: Section) -> int:
    """Return the width of the feed-forward layers, which the model takes from four keys."""
    width = values.count("intermediate_size")
    if not values.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(values.positive("block_ffn_dim_multiplier") * (2 * width // 3))
    unit = values.count("block_multiple_of")
    return -(-width // unit) * unit


FAMILY = Family(
    name="lfm2",
    title="LFM2",
    note="dense; GGUF cannot express `conv_bias`",
    program=program,
    eps=Key("norm_eps", "norm_eps", "attention.layer_norm_rms_epsilon"),
    recurrent=RecurrentLayers(
        layer_type=CONV,
        hf=lambda values: ShortConvShape(values.count("hidden_size"), values.count("conv_L_cache")),
        gguf=lambda count: ShortConvShape(count("embedding_length"), count("shortconv.l_cache")),
        hf_keys=lambda shape, _: {"conv_L_cache": shape.taps},
        gguf_keys=lambda shape: {"shortconv.l_cache": shape.taps},
    ),
    modules={
        "output_norm": "embedding_norm",
        "attn_norm": "operator_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_output": "self_attn.out_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    fused=(Fused("conv.in_proj", "shortconv.in_proj", PROJECTED),),
    gguf_names={"output_norm": "token_embd_norm"},
    hf=(
        HfType(
            model_type="lfm2",
            classes="Lfm2",
            defaults={
                "vocab_size": 65536,
                "hidden_size": 2560,
                "intermediate_size": 12288,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 128000,
                "norm_eps": 1e-05,
                "eos_token_id": 2,
                "tie_word_embeddings": True,
                "conv_bias": False,
                "conv_L_cache": 3,
                "block_multiple_of": 256,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": True,
                "full_attn_idxs": None,
                "layer_types": None,
            },
            computed={
                "full_attn_idxs": Rule("all layers, if there are no layer_types", _full_attention),
                "layer_types": Rule("attention in full_attn_idxs", _types),
            },
            renamed={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
            feed_forward=_feed_forward,
            rope_theta={"": 1e6},
        ),
    ),
    bias_keys={"conv_bias": frozenset({*PROJECTED, "shortconv.conv", "shortconv.out_proj"})},
    written={"block_auto_adjust_ff_dim": False},
)
