"""Qwen3-Next (Qwen Team, 2025): Qwen 3.5 with experts, which it came before. A delta net's matrices
are interleaved, one key head's rows after another's.
"""

from __future__ import annotations

import numpy as np

from octavo.models import qwen35, qwen35moe
from octavo.models.config import ModelConfig
from octavo.models.family import Family, Gather, IntArray
from octavo.models.hf_type import HfType, Rule
from octavo.models.recurrence_shape import DeltaShape


def _shape(c: ModelConfig) -> DeltaShape:
    return next(s for layer in c.layers if isinstance(s := layer.recurrence, DeltaShape))


def _mixed(c: ModelConfig) -> dict[str, IntArray]:
    """Return the rows of queries, keys and values, and of the gates of what is found."""
    s = _shape(c)
    values = s.value_heads // s.key_heads * s.value_dim
    rows = np.arange(2 * s.key_heads * (s.key_dim + values)).reshape(s.key_heads, -1)
    cuts = np.cumsum([s.key_dim, s.key_dim, values])
    q, k, v, z = (part.reshape(-1) for part in np.split(rows, cuts, axis=1))
    return {"attn_qkv": np.concatenate([q, k, v]), "attn_gate": z}


def _beta_and_alpha(c: ModelConfig) -> dict[str, IntArray]:
    s = _shape(c)
    rows = np.arange(2 * s.value_heads).reshape(s.key_heads, 2, -1)
    return {"ssm_beta": rows[:, 0].reshape(-1), "ssm_alpha": rows[:, 1].reshape(-1)}


FAMILY = Family(
    name="qwen3next",
    title="Qwen3-Next",
    note="sparse experts and a shared one; a layer for multi-token prediction drafts",
    program=qwen35.program,
    mtp=qwen35.mtp_program,
    recurrent=qwen35.DELTA_NET._replace(
        gguf=lambda count: qwen35.delta_shape(count, tiled=False),
    ),
    modules=qwen35moe.FAMILY.modules,
    bare=qwen35.BARE,
    forms=qwen35.FAMILY.forms,
    gathers=(
        qwen35.QUERIES_AND_GATES,
        Gather("linear_attn.in_proj_qkvz", "", ("attn_qkv", "attn_gate"), _mixed),
        Gather("linear_attn.in_proj_ba", "ssm_ba", ("ssm_beta", "ssm_alpha"), _beta_and_alpha),
    ),
    hf=(
        HfType(
            model_type="qwen3_next",
            classes="Qwen3Next",
            tokenizer="Qwen2Tokenizer",
            defaults=qwen35.DEFAULTS
            | {
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 48,
                "num_key_value_heads": 2,
                "decoder_sparse_step": 1,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "num_experts_per_tok": 10,
                "num_experts": 512,
                "norm_topk_prob": True,
                "mlp_only_layers": None,
            },
            computed=qwen35.COMPUTED | {"mlp_only_layers": Rule("[]", lambda _: [])},
            partial_rotary=0.25,
        ),
    ),
    bias_keys=qwen35.BIAS_KEYS,
    norm_offset=1.0,
    whole_norms=qwen35.FAMILY.whole_norms,
    expert_size="expert_feed_forward_length",
    shared_expert_size="expert_shared_feed_forward_length",
)
