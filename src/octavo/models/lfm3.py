"""LFM3 (Liquid AI, 2026): LFM2 with windows in half of its attention, and a norm behind each half
of a layer. What a head of attention finds is multiplied by a gate of its own.
"""

from __future__ import annotations

from typing import Any

from octavo.models import lfm2
from octavo.models.family import ATTENTION, Family
from octavo.models.hf_type import FULL, PROPORTIONAL, ROPE_TYPES, SLIDING, HfType, Rule, layers
from octavo.models.section import Section


def _types(values: Section) -> list[str]:
    period = [SLIDING, lfm2.CONV, FULL, lfm2.CONV]
    return [period[index % 4] if index else lfm2.CONV for index in layers(values)]


def _ropes(values: Section) -> dict[str, dict[str, Any]]:
    return {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": PROPORTIONAL, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    }


FAMILY = Family(
    name="lfm3",
    title="LFM3",
    note="llama.cpp has no such architecture yet",
    program=lfm2.program,
    eps=lfm2.FAMILY.eps,
    recurrent=lfm2.FAMILY.recurrent,
    switches={"sandwich_norms": "use_sandwich_norm", "head_gates": "use_attention_gate"},
    modules={
        **lfm2.FAMILY.modules,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "attn_head_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_operator_norm",
        "post_ffw_norm": "post_ffn_norm",
    },
    fused=lfm2.FAMILY.fused,
    hf=(
        HfType(
            model_type="lfm3",
            classes="Lfm3",
            defaults={
                "vocab_size": 128000,
                "hidden_size": 2048,
                "intermediate_size": 7680,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "max_position_embeddings": 128000,
                "norm_eps": 1e-05,
                "eos_token_id": 124900,
                "tie_word_embeddings": True,
                "rope_parameters": None,
                "conv_bias": False,
                "conv_L_cache": 7,
                "layer_types": None,
                "sliding_window": 256,
                "use_sandwich_norm": True,
                "use_attention_gate": True,
                "attention_bias": False,
            },
            computed={
                "layer_types": Rule("of four, two convolutions, a window and attention", _types),
                "rope_parameters": Rule("proportional in a half where all is seen", _ropes),
            },
            aliases={"rms_norm_eps": "norm_eps"},
            rope_types={name: name for name in (*ROPE_TYPES, PROPORTIONAL)},
            rope_theta={FULL: 1e6, SLIDING: 1e4},
            local_theta="",
        ),
    ),
    bias_keys={**lfm2.FAMILY.bias_keys, "attention_bias": ATTENTION},
    architecture=None,
)
