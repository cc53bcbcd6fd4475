"""Mixtral (Jiang et al., 2024): Llama with sparse experts in place of every feed-forward layer."""

from __future__ import annotations

from octavo.model.build import Builder
from octavo.model.config import ModelConfig
from octavo.model.program import Program


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
