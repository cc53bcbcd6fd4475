"""OLMo 2 (Team OLMo, 2024).

Against Llama: no norm before attention and feed-forward but one after each, on its way into the
residual stream; q and k are normalised over their whole width.
"""

from __future__ import annotations

from octavo.models.build import Builder
from octavo.models.config import ModelConfig
from octavo.models.family import Family
from octavo.models.hf_type import KV_HEADS, LLAMA_DEFAULTS, HfType
from octavo.models.program import Program


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    for layer in b.layers():
        b.project_qkv("x", layer)
        b.norm_qk(layer, by_head=False)
        b.attend(layer)
        b.norm("h", "post_attention_norm", "h")
        b.add()
        b.feed_forward("x")
        b.norm("h", "post_ffw_norm", "h")
        b.add()
    return b.head()


FAMILY = Family(
    name="olmo2",
    title="OLMo 2",
    program=program,
    modules={"post_attention_norm": "post_attention_layernorm"},
    hf=(
        HfType(
            model_type="olmo2",
            classes="Olmo2",
            tokenizer="",
            defaults={
                **LLAMA_DEFAULTS,
                "vocab_size": 50304,
                "eos_token_id": 50279,
                "attention_bias": False,
                "rms_norm_eps": 1e-05,
            },
            computed={"num_key_value_heads": KV_HEADS},
        ),
    ),
)
