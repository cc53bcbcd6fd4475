"""LFM2 with experts (Liquid AI, 2025): LFM2 with sparse feed-forward layers behind dense ones.

An expert's share is the sigmoid of the router's logit; a bias moves the choice, not the shares.
"""

from __future__ import annotations

from octavo.models import lfm2
from octavo.models.family import Family
from octavo.models.hf_type import HfType

FAMILY = Family(
    name="lfm2moe",
    title="LFM2 with experts",
    note="GGUF can express neither `conv_bias` nor unusual shares (`norm_topk_prob` or "
    "`use_expert_bias` false, a `routed_scaling_factor`)",
    program=lfm2.program,
    eps=lfm2.FAMILY.eps,
    recurrent=lfm2.FAMILY.recurrent,
    modules={
        **lfm2.FAMILY.modules,
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_gate_exps": "feed_forward.experts.{}.w1",
        "ffn_up_exps": "feed_forward.experts.{}.w3",
        "ffn_down_exps": "feed_forward.experts.{}.w2",
    },
    bare={"exp_probs_b.bias": "feed_forward.expert_bias"},
    fused=lfm2.FAMILY.fused,
    gguf_names=lfm2.FAMILY.gguf_names,
    hf=(
        HfType(
            model_type="lfm2_moe",
            classes="Lfm2Moe",
            defaults={
                "vocab_size": 65536,
                "hidden_size": 2048,
                "intermediate_size": 7168,
                "moe_intermediate_size": 1792,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 128000,
                "norm_eps": 1e-05,
                "eos_token_id": 2,
                "tie_word_embeddings": True,
                "conv_bias": False,
                "conv_L_cache": 3,
                "num_dense_layers": 2,
                "num_experts_per_tok": 4,
                "num_experts": 32,
                "use_expert_bias": True,
                "routed_scaling_factor": 1.0,
                "norm_topk_prob": True,
                "layer_types": None,
            },
            renamed={"tie_embedding": "tie_word_embeddings"},
            rope_theta={"": 1e6},
        ),
    ),
    bias_keys=lfm2.FAMILY.bias_keys,
    experts={"gating": "sigmoid", "normalize_eps": 1e-6, "selection_bias": True},
    expert_size="expert_feed_forward_length",
    leading_dense=True,
)
