"""Shapes of common open models, by name: what their config.json says, without a download.

Of each what decides its computation and its context; where base and instruct models differ in
context, the instruct model's. Parameters are tested against the totals that are published.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.loader.hf_folder import CONFIG, HfFolder

Config = dict[str, Any]


def _shape(
    model_type: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int],
    vocab: int,
    context: int,
    eps: float,
    tied: bool,
    theta: float,
    **more: Any,
) -> Config:
    """``heads``: of queries, and of keys and values."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": eps,
        "tie_word_embeddings": tied,
        "rope_theta": theta,
        **more,
    }


def _llama2(hidden: int, ffn: int, layers: int, heads: tuple[int, int]) -> Config:
    return _shape("llama", hidden, ffn, layers, heads, 32000, 4096, 1e-5, False, 1e4)


def _llama3(hidden: int, ffn: int, layers: int, heads: tuple[int, int]) -> Config:
    return _shape("llama", hidden, ffn, layers, heads, 128256, 8192, 1e-5, False, 5e5)


def _llama31(
    hidden: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int],
    *,
    factor: float = 8.0,
    tied: bool = False,
) -> Config:
    """Return a shape of 3.1 to 3.3, whose rotary positions are stretched from the context of 3."""
    return _llama3(hidden, ffn, layers, heads) | {
        "max_position_embeddings": 131072,
        "tie_word_embeddings": tied,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def _smollm2(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], theta: float = 1e5
) -> Config:
    return _shape("llama", hidden, ffn, layers, heads, 49152, 8192, 1e-5, True, theta)


def _mistral(
    hidden: int,
    ffn: int,
    layers: int,
    vocab: int,
    context: int,
    theta: float,
    window: int | None = None,
) -> Config:
    return _shape(
        *("mistral", hidden, ffn, layers, (32, 8), vocab, context, 1e-5, False, theta),
        head_dim=128,
        sliding_window=window,
    )


def _mixtral(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], vocab: int, context: int
) -> Config:
    return _shape(
        *("mixtral", hidden, ffn, layers, heads, vocab, context, 1e-5, False, 1e6),
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    )


def _qwen25(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], eps: float = 1e-6
) -> Config:
    tied = hidden <= 2048
    vocab = 151936 if tied else 152064
    return _shape(
        *("qwen2", hidden, ffn, layers, heads, vocab, 32768, eps, tied, 1e6),
        use_sliding_window=False,
    )


def _qwen3(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], *, tied: bool = False
) -> Config:
    return _shape(
        *("qwen3", hidden, ffn, layers, heads, 151936, 40960, 1e-6, tied, 1e6),
        head_dim=128,
        use_sliding_window=False,
    )


def _qwen3_moe(hidden: int, ffn: int, layers: int, heads: tuple[int, int], experts: int) -> Config:
    return _qwen3(hidden, ffn, layers, heads) | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": experts,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }


def _gemma2(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], head_dim: int, scalar: int
) -> Config:
    return _shape(
        *("gemma2", hidden, ffn, layers, heads, 256000, 8192, 1e-6, True, 1e4),
        head_dim=head_dim,
        query_pre_attn_scalar=scalar,
        sliding_window=4096,
        hidden_activation="gelu_pytorch_tanh",
    )


def _gemma3(hidden: int, ffn: int, layers: int) -> Config:
    return _shape(
        *("gemma3_text", hidden, ffn, layers, (4, 1), 262144, 32768, 1e-6, True, 1e6),
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        sliding_window_pattern=6,
        rope_local_base_freq=1e4,
        hidden_activation="gelu_pytorch_tanh",
    )


def _phi3(
    hidden: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int],
    vocab: int = 32064,
    context: int = 4096,
    theta: float = 1e4,
    window: int | None = 2047,
) -> Config:
    return _shape(
        *("phi3", hidden, ffn, layers, heads, vocab, context, 1e-5, False, theta),
        sliding_window=window,
    )


def _granite(hidden: int, ffn: int, attention: float, logits: float) -> Config:
    return _shape(
        *("granite", hidden, ffn, 40, (32, 8), 49159, 131072, 1e-5, True, 1e7),
        attention_multiplier=attention,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=logits,
    )


def _olmo2(hidden: int, ffn: int, layers: int, heads: tuple[int, int]) -> Config:
    return _shape("olmo2", hidden, ffn, layers, heads, 100352, 4096, 1e-6, False, 5e5)


def _olmo3(hidden: int, ffn: int, layers: int, heads: tuple[int, int]) -> Config:
    return _shape(
        *("olmo3", hidden, ffn, layers, heads, 100278, 65536, 1e-6, False, 5e5),
        sliding_window=4096,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )


def _ministral3(hidden: int, ffn: int, layers: int, *, tied: bool = False) -> Config:
    return _shape(
        *("ministral3", hidden, ffn, layers, (32, 8), 131072, 262144, 1e-5, tied, 1e6),
        head_dim=128,
    )


def _qwen35(
    hidden: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int],
    value_heads: int,
    *,
    tied: bool = False,
    model_type: str = "qwen3_5_text",
    vocab: int = 248320,
    **more: Any,
) -> Config:
    """``value_heads``: of the delta nets, which three layers of four are."""
    return _shape(
        *(model_type, hidden, ffn, layers, heads, vocab, 262144, 1e-6, tied, 1e7),
        head_dim=256,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=value_heads,
        **more,
    )


def _types(layers: int, full: Sequence[int], others: str) -> list[str]:
    """Return the type of each layer: attention to everything in those of ``full``."""
    return ["full_attention" if index in full else others for index in range(layers)]


def _lfm2(
    hidden: int,
    ffn: int,
    heads: int,
    layers: int = 16,
    full: Sequence[int] = (2, 5, 8, 10, 12, 14),
    model_type: str = "lfm2",
    **more: Any,
) -> Config:
    """``full``: the layers with attention."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "layer_types": _types(layers, full, "conv"),
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "conv_bias": False,
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        **more,
    }


# A third of the feed-forward layer is left out; what remains is rounded up.
_TWO_THIRDS: Config = {
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
}


def _granite4(
    hidden: int, ffn: int, shared: int, heads: tuple[int, int], experts: tuple[int, int]
) -> Config:
    """``experts``: how many, and how many are chosen, beside a ``shared`` one."""
    return _shape(
        *("granitemoehybrid", hidden, ffn, 40, heads, 100352, 131072, 1e-5, True, 1e4),
        layer_types=_types(40, (5, 15, 25, 35), "linear_attention"),
        num_local_experts=experts[0],
        num_experts_per_tok=experts[1],
        shared_intermediate_size=shared,
        mamba_n_heads=hidden // 32,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
    )


def _gemma4(
    hidden: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int],
    context: int,
    window: int,
    *,
    period: int = 6,
    **more: Any,
) -> Config:
    """``period``: one layer in so many sees everything."""
    return _shape(
        *("gemma4_text", hidden, ffn, layers, heads, 262144, context, 1e-6, True, 1e6),
        layer_types=_types(layers, range(period - 1, layers, period), "sliding_attention"),
        sliding_window=window,
        head_dim=256,
        global_head_dim=512,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
        **more,
    )


def _gemma4_e(hidden: int, ffn: int, layers: int, kv_heads: int, **more: Any) -> Config:
    """Return a shape of the models whose layers have inputs of their own."""
    return _gemma4(
        *(hidden, ffn, layers, (8, kv_heads), 131072, 512),
        hidden_size_per_layer_input=256,
        **more,
    )


def _gemma4_large(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], wide: int, **more: Any
) -> Config:
    """``wide``: the KV heads of layers that see everything, whose keys are their values."""
    return _gemma4(
        *(hidden, ffn, layers, heads, 262144, 1024),
        num_global_key_value_heads=wide,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        **more,
    )


def _gpt_oss(layers: int, experts: int) -> Config:
    """Return a shape of gpt-oss, with the rotary positions that its class has by default."""
    return {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": False,
    }


def _latent(
    model_type: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    vocab: int,
    context: int,
    *,
    experts: tuple[int, int, int],
    dense: int,
    ranks: tuple[int, int | None],
    widths: tuple[int, int, int],
    eps: float = 1e-6,
    shared: int = 1,
) -> Config:
    """``experts``: how many, chosen, and their width; ``dense``: layers without; ``ranks``: of keys
    and values, and of queries; ``widths``: of a head's key without and with positions, and value.
    """
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        "n_routed_experts": experts[0],
        "num_experts_per_tok": experts[1],
        "moe_intermediate_size": experts[2],
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        "kv_lora_rank": ranks[0],
        "q_lora_rank": ranks[1],
        "qk_nope_head_dim": widths[0],
        "qk_rope_head_dim": widths[1],
        "v_head_dim": widths[2],
    }


_PHI4_MINI_FACTORS = (
    *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817),
    *(2.187582649, 2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023),
    *(4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372),
    *(10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807),
    *(22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66),
    *(32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
)

PRESETS: dict[str, Config] = {
    "llama-2-7b": _llama2(4096, 11008, 32, (32, 32)),
    "llama-2-13b": _llama2(5120, 13824, 40, (40, 40)),
    "llama-2-70b": _llama2(8192, 28672, 80, (64, 8)),
    "llama-3-8b": _llama3(4096, 14336, 32, (32, 8)),
    "llama-3-70b": _llama3(8192, 28672, 80, (64, 8)),
    "llama-3.1-8b": _llama31(4096, 14336, 32, (32, 8)),
    "llama-3.1-70b": _llama31(8192, 28672, 80, (64, 8)),
    "llama-3.1-405b": _llama31(16384, 53248, 126, (128, 8)),
    "llama-3.2-1b": _llama31(2048, 8192, 16, (32, 8), factor=32.0, tied=True),
    "llama-3.2-3b": _llama31(3072, 8192, 28, (24, 8), factor=32.0, tied=True),
    "llama-3.3-70b": _llama31(8192, 28672, 80, (64, 8)),
    "smollm2-135m": _smollm2(576, 1536, 30, (9, 3)),
    "smollm2-360m": _smollm2(960, 2560, 32, (15, 5)),
    "smollm2-1.7b": _smollm2(2048, 8192, 24, (32, 32), theta=130000.0),
    "smollm3-3b": _shape(
        *("smollm3", 2048, 11008, 36, (16, 4), 128256, 65536, 1e-6, True, 5e6),
        no_rope_layer_interval=4,
    ),
    "mistral-7b-v0.1": _mistral(4096, 14336, 32, 32000, 32768, 1e4, window=4096),
    "mistral-7b-v0.3": _mistral(4096, 14336, 32, 32768, 32768, 1e6),
    "mistral-nemo-12b": _mistral(5120, 14336, 40, 131072, 131072, 1e6),
    "mistral-small-24b": _mistral(5120, 32768, 40, 131072, 32768, 1e8),
    "mistral-small-3.2-24b": _mistral(5120, 32768, 40, 131072, 131072, 1e9),
    "ministral-3-3b": _ministral3(3072, 9216, 26, tied=True),
    "ministral-3-8b": _ministral3(4096, 14336, 34),
    "ministral-3-14b": _ministral3(5120, 16384, 40),
    "mixtral-8x7b": _mixtral(4096, 14336, 32, (32, 8), 32000, 32768),
    "mixtral-8x22b": _mixtral(6144, 16384, 56, (48, 8), 32768, 65536),
    "qwen2.5-0.5b": _qwen25(896, 4864, 24, (14, 2)),
    "qwen2.5-1.5b": _qwen25(1536, 8960, 28, (12, 2)),
    "qwen2.5-3b": _qwen25(2048, 11008, 36, (16, 2)),
    "qwen2.5-7b": _qwen25(3584, 18944, 28, (28, 4)),
    "qwen2.5-14b": _qwen25(5120, 13824, 48, (40, 8), eps=1e-5),
    "qwen2.5-32b": _qwen25(5120, 27648, 64, (40, 8), eps=1e-5),
    "qwen2.5-72b": _qwen25(8192, 29568, 80, (64, 8), eps=1e-5),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, (16, 8), tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, (16, 8), tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, (32, 8), tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, (32, 8)),
    "qwen3-14b": _qwen3(5120, 17408, 40, (40, 8)),
    "qwen3-32b": _qwen3(5120, 25600, 64, (64, 8)),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, (32, 4), experts=768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 94, (64, 4), experts=1536),
    "qwen3.5-0.8b": _qwen35(1024, 3584, 24, (8, 2), 16, tied=True),
    "qwen3.5-4b": _qwen35(2560, 9216, 32, (16, 4), 32, tied=True),
    "qwen3.5-9b": _qwen35(4096, 12288, 32, (16, 4), 32),
    "qwen3.5-27b": _qwen35(5120, 17408, 64, (24, 4), 48),
    "qwen3.5-35b-a3b": _qwen35(
        *(2048, 512, 40, (16, 2), 32),
        model_type="qwen3_5_moe_text",
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "qwen3-next-80b-a3b": _qwen35(
        *(2048, 5120, 48, (16, 2), 32),
        model_type="qwen3_next",
        vocab=151936,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "gemma-2-2b": _gemma2(2304, 9216, 26, (8, 4), 256, 256),
    "gemma-2-9b": _gemma2(3584, 14336, 42, (16, 8), 256, 256),
    "gemma-2-27b": _gemma2(4608, 36864, 46, (32, 16), 128, 144),
    "gemma-3-270m": _gemma3(640, 2048, 18),
    "gemma-3-1b": _gemma3(1152, 6912, 26),
    "gemma-4-e2b": _gemma4_e(
        *(1536, 6144, 35, 1), period=5, num_kv_shared_layers=20, use_double_wide_mlp=True
    ),
    "gemma-4-e4b": _gemma4_e(2560, 10240, 42, 2, num_kv_shared_layers=18),
    "gemma-4-12b": _gemma4_large(3840, 15360, 48, (16, 8), 1),
    "gemma-4-26b-a4b": _gemma4_large(
        *(2816, 2112, 30, (16, 8), 2),
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma-4-31b": _gemma4_large(5376, 21504, 60, (32, 16), 4),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "phi-3-mini": _phi3(3072, 8192, 32, (32, 32)),
    "phi-3-medium": _phi3(5120, 17920, 40, (40, 10)),
    "phi-4": _phi3(5120, 17920, 40, (40, 10), 100352, 16384, 250000.0, window=None),
    "phi-4-mini": _phi3(3072, 8192, 32, (24, 8), 200064, 131072, window=None)
    | {
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * len(_PHI4_MINI_FACTORS),
            "long_factor": [*_PHI4_MINI_FACTORS],
        },
    },
    "granite-3.3-2b": _granite(2048, 8192, 0.015625, 8.0),
    "granite-3.3-8b": _granite(4096, 12800, 0.0078125, 16.0),
    "granite-4.0-h-micro": _granite4(2048, 8192, 8192, (32, 8), (0, 0)),
    "granite-4.0-h-tiny": _granite4(1536, 512, 1024, (12, 4), (64, 6)),
    "granite-4.0-h-small": _granite4(4096, 768, 1536, (32, 8), (72, 10)),
    "olmo-2-7b": _olmo2(4096, 11008, 32, (32, 32)),
    "olmo-2-13b": _olmo2(5120, 13824, 40, (40, 40)),
    "olmo-2-32b": _olmo2(5120, 27648, 64, (40, 8)),
    "olmo-3-7b": _olmo3(4096, 11008, 32, (32, 32)),
    "olmo-3-32b": _olmo3(5120, 27648, 64, (40, 8)),
    "command-r7b": {
        "model_type": "cohere2",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 256000,
        "max_position_embeddings": 132096,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "rope_theta": 5e4,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "lfm2-350m": _lfm2(1024, 6656, 16, **_TWO_THIRDS),
    "lfm2-700m": _lfm2(1536, 10240, 24, **_TWO_THIRDS),
    "lfm2-1.2b": _lfm2(2048, 12288, 32, **_TWO_THIRDS),
    "lfm2-2.6b": _lfm2(
        *(2048, 10752, 32, 30, (2, 6, 9, 12, 15, 18, 21, 24, 27)),
        block_auto_adjust_ff_dim=False,
    ),
    "lfm2-8b-a1b": _lfm2(
        *(2048, 7168, 32, 24, (2, 6, 10, 14, 18, 21), "lfm2_moe"),
        moe_intermediate_size=1792,
        num_experts=32,
        num_experts_per_tok=4,
        num_dense_layers=2,
    ),
    "deepseek-v2-lite": _latent(
        *("deepseek_v2", 2048, 10944, 27, 16, 102400, 163840),
        experts=(64, 6, 1408),
        dense=1,
        ranks=(512, None),
        widths=(128, 64, 128),
        shared=2,
    ),
    "deepseek-v3": _latent(
        *("deepseek_v3", 7168, 18432, 61, 128, 129280, 163840),
        experts=(256, 8, 2048),
        dense=3,
        ranks=(512, 1536),
        widths=(128, 64, 128),
    ),
    "kimi-k2": _latent(
        *("kimi_k2", 7168, 18432, 61, 64, 163840, 131072),
        experts=(384, 8, 2048),
        dense=1,
        ranks=(512, 1536),
        widths=(128, 64, 128),
    ),
    "mistral-small-4": _latent(
        *("mistral4", 4096, 12288, 36, 32, 131072, 1048576),
        experts=(128, 4, 2048),
        dense=0,
        ranks=(256, 1024),
        widths=(64, 64, 128),
    ),
    "glm-4.7-flash": _latent(
        *("glm4_moe_lite", 2048, 10240, 47, 20, 154880, 202752),
        experts=(64, 4, 1536),
        dense=1,
        ranks=(512, 768),
        widths=(192, 64, 256),
        eps=1e-5,
    ),
}


class Preset(HfFolder):
    """Reads like the folder of a model that is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(Path(name))
        self._config = PRESETS[name]

    def has(self, name: str) -> bool:
        return name == CONFIG

    def json(self, name: str, most: int = 0) -> dict[str, Any]:
        return self._config if name == CONFIG else {}
