"""Qwen3 (Yang et al., 2025): Llama with q and k normalised head by head.

Qwen3-MoE has sparse experts in place of some feed-forward layers.
"""

from __future__ import annotations

from octavo.models import qwen2
from octavo.models.build import Builder
from octavo.models.config import ModelConfig
from octavo.models.family import Family
from octavo.models.hf_type import HfType
from octavo.models.program import Program


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    for layer in b.layers():
        b.norm("x", "attn_norm", "h")
        b.project_qkv("h", layer)
        b.norm_qk(layer, by_head=True)
        b.attend(layer)
        b.add()
        b.norm("x", "ffn_norm", "h")
        b.feed_forward("h", layer.experts)
        b.add()
    return b.head()


FAMILY = Family(
    name="qwen3",
    title="Qwen3",
    note="dense",
    program=program,
    hf=(
        HfType(
            model_type="qwen3",
            classes="Qwen3",
            tokenizer="Qwen2Tokenizer",
            defaults={**qwen2.FAMILY.hf[0].defaults, "head_dim": 128, "attention_bias": False},
            computed=qwen2.FAMILY.hf[0].computed,
        ),
    ),
)
