"""Qwen3-MoE (Yang et al., 2025): Qwen3 with sparse experts in place of some feed-forward layers."""

from __future__ import annotations

from octavo.models import qwen3
from octavo.models.family import Family
from octavo.models.hf_type import LLAMA_DEFAULTS, USED_WINDOW, HfType, Rule

FAMILY = Family(
    name="qwen3moe",
    title="Qwen3-MoE",
    note="also with dense layers among the sparse ones (`decoder_sparse_step`, "
    "`mlp_only_layers`); GGUF can express neither these nor `norm_topk_prob` false",
    program=qwen3.program,
    hf=(
        HfType(
            model_type="qwen3_moe",
            classes="Qwen3Moe",
            tokenizer="Qwen2Tokenizer",
            defaults={
                **LLAMA_DEFAULTS,
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 24,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "attention_bias": False,
                "use_sliding_window": False,
                "sliding_window": 4096,
                "decoder_sparse_step": 1,
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "num_experts": 128,
                "norm_topk_prob": False,
                "mlp_only_layers": None,
                "eos_token_id": None,
            },
            computed={"sliding_window": USED_WINDOW, "mlp_only_layers": Rule("[]", lambda _: [])},
            aliases={"num_experts": "num_local_experts"},
        ),
    ),
    expert_size="expert_feed_forward_length",
)
