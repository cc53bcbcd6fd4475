"""Gemma 2 (Gemma Team, 2024).

Against Llama: embeddings scaled by sqrt(hidden), norms after attention and feed-forward as well as
before, GeGLU, soft-caps on attention scores and logits, and a sliding window on every other layer.
The checkpoint's norm weights already include Gemma's "+ 1".
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
        b.norm("h", "post_attention_norm", "h")
        b.add()
        b.norm("x", "ffn_norm", "h")
        b.feed_forward("h")
        b.norm("h", "post_ffw_norm", "h")
        b.add()
    return b.head()
