"""Llama (Touvron et al., 2023) and what shares its architecture.

Pre-norm decoder: RMS norm, grouped-query attention with rotary positions, RMS norm, SwiGLU. So are
Llama 2 and 3, SmolLM and Mistral (with a window); Qwen2 (Yang et al., 2024) has biases on q, k and
v, Phi-3 (Abdin et al., 2024) stores fused matrices, which its checkpoints' readers split, and
Mixtral (Jiang et al., 2024) has sparse experts in place of every feed-forward layer.
"""

from __future__ import annotations

from octavo.models.build import Builder
from octavo.models.config import ModelConfig
from octavo.models.program import Program


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    for layer in b.layers():
        b.norm("x", "attn_norm", "h")
        b.project_qkv("h")
        b.attend(layer)
        b.add()
        b.norm("x", "ffn_norm", "h")
        b.feed_forward("h", layer.experts)
        b.add()
    return b.head()
