"""gpt-oss (OpenAI, 2025): sparse experts in every layer, and attention with a sink a head.

Against Mixtral: windows in every other layer, biases in every projection, the router and the
experts, SwiGLU with clamped inputs, and experts stored in MXFP4, gate and up row by row in turn.
"""

from __future__ import annotations

from octavo.models.build import Builder
from octavo.models.config import Activation, ModelConfig
from octavo.models.family import Family, Key, Windows
from octavo.models.hf_type import HfType, Rule, layer_types
from octavo.models.program import Program
from octavo.models.section import Section


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    for layer in b.layers():
        b.norm("x", "attn_norm", "h")
        b.project_qkv("h", layer)
        b.attend(layer)
        b.add()
        b.norm("x", "post_attention_norm", "h")
        b.feed_forward("h", layer.experts)
        b.add()
    return b.head()


_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _rope(values: Section) -> dict[str, object] | None:
    return None if values.values.get("rope_scaling") else dict(_YARN)


FAMILY = Family(
    name="gpt-oss",
    title="gpt-oss",
    note="MXFP4 experts as they are, or in floats; GGUF files round the range that YaRN blends "
    "over to whole pairs, as llama.cpp does",
    program=program,
    keys=(Key("swiglu_alpha", "swiglu_alpha"), Key("swiglu_limit", "swiglu_limit")),
    modules={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    bare={"attn_sinks": "self_attn.sinks"},
    hf=(
        HfType(
            model_type="gpt_oss",
            classes="GptOss",
            tokenizer="",
            defaults={
                "vocab_size": 201088,
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_hidden_layers": 36,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "hidden_act": "silu",
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-05,
                "eos_token_id": None,
                "tie_word_embeddings": False,
                "attention_bias": True,
                "sliding_window": 128,
                "layer_types": None,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "swiglu_alpha": 1.702,
                "swiglu_limit": 7.0,
                "rope_parameters": None,
            },
            computed={
                "layer_types": Rule(
                    "sliding but every 2nd",
                    lambda values: layer_types(values, lambda index: index % 2 == 0),
                ),
                "rope_parameters": Rule("YaRN of 4096 tokens times 32", _rope),
            },
            aliases={"num_experts": "num_local_experts"},
            rope_theta={"": 150000.0},
        ),
    ),
    biases=frozenset({"ffn_gate_inp"}),
    experts={"biases": True},
    interleaved_experts=True,
    sinks=True,
    activation=Activation.SWIGLU_CLAMPED,
    windows=Windows(period=2),
    expert_size="expert_feed_forward_length",
)
