"""Cohere 2 (Command R7B; Cohere, 2024).

Against Llama: layer norm without biases, attention and feed-forward side by side on one normed
input, logits multiplied by a number, and a sliding window on three layers of four, which alone have
rotary positions.
"""

from __future__ import annotations

from octavo.models.build import Builder
from octavo.models.config import ModelConfig
from octavo.models.family import Family, Key, Windows
from octavo.models.hf_type import (
    HEAD_DIM,
    KV_HEADS,
    LLAMA_DEFAULTS,
    HfType,
    Rule,
    layer_types,
)
from octavo.models.program import LayerNorm, Program
from octavo.models.section import Section


def program(c: ModelConfig) -> Program:
    b = Builder(c, LayerNorm)
    b.widths |= {"attended": c.hidden_size, "fed": c.hidden_size}
    b.embed(c.embedding_scale)
    for layer in b.layers():
        b.norm("x", "attn_norm", "h")
        b.project_qkv("h", layer)
        b.attend(layer, "attended")
        b.add("attended")
        b.feed_forward("h", out="fed")
        b.add("fed")
    return b.head()


def _types(values: Section) -> list[str]:
    period = values.count("sliding_window_pattern", 4)
    return layer_types(values, lambda index: (index + 1) % period != 0)


_LLAMA = {key: value for key, value in LLAMA_DEFAULTS.items() if key != "rms_norm_eps"}
FAMILY = Family(
    name="cohere2",
    title="Command R7B (Cohere 2)",
    program=program,
    eps=Key("norm_eps", "layer_norm_eps", "attention.layer_norm_epsilon"),
    keys=(Key("logits_scale", "logit_scale", "logit_scale"),),
    rotates_windows=True,
    hf=(
        HfType(
            model_type="cohere2",
            classes="Cohere2",
            tokenizer="CohereTokenizer",
            defaults={
                **_LLAMA,
                "vocab_size": 256000,
                "hidden_size": 8192,
                "intermediate_size": 22528,
                "logit_scale": 0.0625,
                "num_hidden_layers": 40,
                "num_attention_heads": 64,
                "max_position_embeddings": 8192,
                "layer_norm_eps": 1e-05,
                "eos_token_id": 255001,
                "tie_word_embeddings": True,
                "attention_bias": False,
                "sliding_window": 4096,
                "layer_types": None,
            },
            computed={
                "num_key_value_heads": KV_HEADS,
                "head_dim": HEAD_DIM,
                "layer_types": Rule("sliding but every sliding_window_pattern-th", _types),
            },
        ),
    ),
    hf_interleaved=True,
    interleaved=True,
    windows=Windows(period=4),
)
