"""Llama (Touvron et al., 2023) and what shares its architecture.

Pre-norm decoder: RMS norm, grouped-query attention with rotary positions, RMS norm, SwiGLU. So are
Llama 2 and 3, SmolLM and Mistral (with a window); Qwen2 (Yang et al., 2024) has biases on q, k and
v, Phi-3 (Abdin et al., 2024) stores fused matrices, which its checkpoints' readers split, and
Mixtral (Jiang et al., 2024) has sparse experts in place of every feed-forward layer.
"""

from __future__ import annotations

from octavo.models.build import Builder
from octavo.models.config import ModelConfig
from octavo.models.family import TOWERS, Family
from octavo.models.hf_type import HEAD_DIM, KV_HEADS, LLAMA_DEFAULTS, HfType, Rule, layer_types
from octavo.models.program import Program


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    for layer in b.layers():
        b.norm("x", "attn_norm", "h")
        b.project_qkv("h", layer)
        b.attend(layer)
        b.add()
        b.norm("x", "ffn_norm", "h")
        b.feed_forward("h", layer.experts)
        b.add()
    return b.head()


_MISTRAL = LLAMA_DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_MINISTRAL_TYPES = Rule(
    "sliding if sliding_window",
    lambda values: layer_types(values, lambda _: values.values["sliding_window"] is not None),
)
FAMILY = Family(
    name="llama",
    title="Llama 2 and 3, SmolLM, Mistral",
    note="also with biases; Mistral's sliding window is not in GGUF files",
    program=program,
    hf=(
        HfType(
            model_type="llama",
            classes="Llama",
            defaults=LLAMA_DEFAULTS
            | {"attention_bias": False, "mlp_bias": False, "head_dim": None},
            computed={"num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM},
        ),
        HfType(
            model_type="mistral",
            classes="Mistral",
            tokenizer="",
            defaults=_MISTRAL,
            computed={"head_dim": HEAD_DIM},
        ),
        HfType(
            model_type="ministral",
            classes="Ministral",
            defaults=_MISTRAL | {"layer_types": None},
            computed={"layer_types": _MINISTRAL_TYPES},
        ),
    ),
    ignored=TOWERS,
    interleaved=True,
)
