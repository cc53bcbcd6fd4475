"""OLMo 2 (Team OLMo, 2024).

Against Llama: no norm before attention and feed-forward but one after each, on its way into the
residual stream; q and k are normalised over their whole width.
"""

from __future__ import annotations

from octavo.models.build import Builder
from octavo.models.config import ModelConfig
from octavo.models.program import Program


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    for layer in b.layers():
        b.project_qkv("x")
        b.norm("q", "attn_q_norm", "q")
        b.norm("k", "attn_k_norm", "k")
        b.attend(layer)
        b.norm("h", "post_attention_norm", "h")
        b.add()
        b.feed_forward("x")
        b.norm("h", "post_ffw_norm", "h")
        b.add()
    return b.head()
