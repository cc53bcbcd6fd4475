"""Granite (Granite Team, 2024): Llama with four multipliers.

Those of the embedding, of attention and of the logits have a place in the ops. The fourth scales
what each half of a layer adds to the residual stream: x + r h. With y = x / r that is y + h, and a
norm of y equals the norm of x when its epsilon is divided by r²: so the stream is kept as y, and
nothing is multiplied at all.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.models.build import Builder
from octavo.models.config import Layer, ModelConfig
from octavo.models.family import INVERSE, Family, Fixed, Key
from octavo.models.hf_type import KV_HEADS, LLAMA_DEFAULTS, HfType
from octavo.models.program import Program


def attention(b: Builder, layer: Layer) -> None:
    """Write down a layer's attention, from h to h."""
    b.project_qkv("h", layer)
    b.attend(layer)


def program(c: ModelConfig, mix: Callable[[Builder, Layer], None] = attention) -> Program:
    """``mix`` writes down what a layer has before its feed-forward half."""
    b = Builder(c)
    b.eps = c.norm_eps / c.residual_scale**2
    b.embed(c.embedding_scale / c.residual_scale)
    for layer in b.layers():
        b.norm("x", "attn_norm", "h")
        mix(b, layer)
        b.add()
        b.norm("x", "ffn_norm", "h")
        b.add_feed_forward(layer, shared_gate=False)
    return b.head()


FAMILY = Family(
    name="granite",
    title="Granite 3",
    program=program,
    keys=(
        Key("attention_scale", "attention_multiplier", "attention.scale", default=0.0),
        Key("embedding_scale", "embedding_multiplier", "embedding_scale"),
        Key("residual_scale", "residual_multiplier", "residual_scale"),
        Key("logits_scale", "logits_scaling", "logit_scale", form=INVERSE),
    ),
    fixed=(
        Fixed(True, gguf="rope.scaling.finetuned", otherwise="means no rotary positions, and "),
    ),
    hf=(
        HfType(
            model_type="granite",
            classes="Granite",
            tokenizer="",
            defaults={
                **LLAMA_DEFAULTS,
                "attention_bias": False,
                "mlp_bias": False,
                "embedding_multiplier": 1.0,
                "logits_scaling": 1.0,
                "residual_multiplier": 1.0,
                "attention_multiplier": 1.0,
            },
            computed={"num_key_value_heads": KV_HEADS},
        ),
    ),
    interleaved=True,
)
