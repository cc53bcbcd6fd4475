"""Gemma 2 (Gemma Team, 2024).

Against Llama: embeddings scaled by sqrt(hidden), norms after attention and feed-forward as well as
before, GeGLU, soft-caps on attention scores and logits, and a sliding window on every other layer.
The checkpoint's norm weights already include Gemma's "+ 1".
"""

from __future__ import annotations

from octavo.models.build import Builder
from octavo.models.config import Activation, ModelConfig
from octavo.models.family import INVERSE_SQUARE, Family, Key, Windows
from octavo.models.hf_type import HfType, Rule, layer_types
from octavo.models.program import Program


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    for layer in b.layers():
        b.norm("x", "attn_norm", "h")
        b.project_qkv("h", layer)
        b.attend(layer)
        b.norm("h", "post_attention_norm", "h")
        b.add()
        b.norm("x", "ffn_norm", "h")
        b.feed_forward("h")
        b.norm("h", "post_ffw_norm", "h")
        b.add()
    return b.head()


# Each layer has a norm before and after each of its halves.
MODULES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
SCALE = Key("attention_scale", "query_pre_attn_scalar", form=INVERSE_SQUARE)
_TYPES = Rule(
    "sliding but every 2nd",
    lambda values: layer_types(values, lambda index: index % 2 == 0),
)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
FAMILY = Family(
    name="gemma2",
    title="Gemma 2",
    program=program,
    keys=(
        SCALE,
        Key("attention_softcap", _CAPS[0], _CAPS[0], default=50.0, null=0.0),
        Key("logits_softcap", _CAPS[1], _CAPS[1], default=30.0, null=0.0),
    ),
    embedding_root=True,
    modules=MODULES,
    hf=(
        HfType(
            model_type="gemma2",
            classes="Gemma2",
            tokenizer="GemmaTokenizer",
            defaults={
                "vocab_size": 256000,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh",
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-06,
                "eos_token_id": 1,
                "tie_word_embeddings": True,
                "attention_bias": False,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "layer_types": None,
                "final_logit_softcapping": 30.0,
                "attn_logit_softcapping": 50.0,
            },
            computed={"layer_types": _TYPES},
            null_window=True,
        ),
    ),
    norm_offset=1.0,
    activation=Activation.GELU_TANH,
    windows=Windows(default=4096, period=2),
    hidden_scale_layers=46,
    merged_spaces=True,
)
