"""Mixtral (Jiang et al., 2024): Llama with sparse experts in place of every feed-forward layer."""

from __future__ import annotations

from octavo.models import llama
from octavo.models.family import Family
from octavo.models.hf_type import LLAMA_DEFAULTS, HfType

FAMILY = Family(
    name="mixtral",
    title="Mixtral",
    note="sparse experts",
    program=llama.program,
    modules={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    },
    hf=(
        HfType(
            model_type="mixtral",
            classes="Mixtral",
            tokenizer="",
            defaults={
                **LLAMA_DEFAULTS,
                "intermediate_size": 14336,
                "num_key_value_heads": 8,
                "head_dim": None,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-05,
                "sliding_window": None,
                "num_experts_per_tok": 2,
                "num_local_experts": 8,
            },
            aliases={"num_experts": "num_local_experts"},
            rope_theta={"": 1e6},
        ),
    ),
    architecture="llama",
    interleaved=True,
    expert_size="feed_forward_length",
)
