"""Shapes of common open models, by name: what their config.json says, without a download.

Of each what decides its computation and its context; where base and instruct models differ in
context, the instruct model's. Parameters are tested against the totals that are published.
"""

from __future__ import annotations

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
    "mistral-7b-v0.1": _mistral(4096, 14336, 32, 32000, 32768, 1e4, window=4096),
    "mistral-7b-v0.3": _mistral(4096, 14336, 32, 32768, 32768, 1e6),
    "mistral-nemo-12b": _mistral(5120, 14336, 40, 131072, 131072, 1e6),
    "mistral-small-24b": _mistral(5120, 32768, 40, 131072, 32768, 1e8),
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
    "gemma-2-2b": _gemma2(2304, 9216, 26, (8, 4), 256, 256),
    "gemma-2-9b": _gemma2(3584, 14336, 42, (16, 8), 256, 256),
    "gemma-2-27b": _gemma2(4608, 36864, 46, (32, 16), 128, 144),
    "gemma-3-270m": _gemma3(640, 2048, 18),
    "gemma-3-1b": _gemma3(1152, 6912, 26),
    "phi-3-mini": _phi3(3072, 8192, 32, (32, 32)),
    "phi-3-medium": _phi3(5120, 17920, 40, (40, 10)),
    "phi-4": _phi3(5120, 17920, 40, (40, 10), 100352, 16384, 250000.0, window=None),
    "granite-3.3-2b": _granite(2048, 8192, 0.015625, 8.0),
    "granite-3.3-8b": _granite(4096, 12800, 0.0078125, 16.0),
    "olmo-2-7b": _olmo2(4096, 11008, 32, (32, 32)),
    "olmo-2-13b": _olmo2(5120, 13824, 40, (40, 40)),
    "olmo-2-32b": _olmo2(5120, 27648, 64, (40, 8)),
}


class Preset(HfFolder):
    """Reads like the folder of a model that is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(Path(name))
        self._config = PRESETS[name]

    def json(self, name: str, most: int = 0) -> dict[str, Any]:
        return self._config if name == CONFIG else {}
