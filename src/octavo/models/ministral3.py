"""Ministral 3 (Mistral AI, 2025): Mistral with queries that grow beyond the context of training.

Mistral Small 3 as published is a Mistral 3 that sees, whose language model is a Mistral; GGUF files
of either have the same architecture.
"""

from __future__ import annotations

from typing import Any

from octavo.models import llama
from octavo.models.family import TOWERS, Family
from octavo.models.hf_type import LLAMA_DEFAULTS, HfType, HfWrapper, Rule
from octavo.models.section import Section

_BETA = "llama_4_scaling_beta"


def _rope(values: Section) -> dict[str, Any]:
    return {
        "type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "max_position_embeddings": values.values["max_position_embeddings"],
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        _BETA: 0.1,
    }


FAMILY = Family(
    name="ministral3",
    title="Ministral 3, Mistral Small 3",
    note="text only: a vision tower is passed over; Mistral Small's text part is a `mistral`",
    program=llama.program,
    temperature=True,
    hf=(
        HfType(
            model_type="ministral3",
            classes="Ministral3",
            tokenizer="",
            defaults={
                **LLAMA_DEFAULTS,
                "vocab_size": 131072,
                "intermediate_size": 14336,
                "num_hidden_layers": 34,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 262144,
                "rms_norm_eps": 1e-05,
                "sliding_window": None,
            },
            computed={"rope_parameters": Rule("YaRN from 16,384 tokens", _rope)},
            rope_keys=frozenset(
                {_BETA, "original_max_position_embeddings", "max_position_embeddings"}
            ),
        ),
    ),
    wrappers=(
        HfWrapper(
            model_type="mistral3",
            classes="Mistral3",
            texts=("mistral", "ministral3"),
            passed_over=("layer_types",),
            tokenizer="",
        ),
    ),
    ignored=TOWERS,
    architecture="mistral3",
    interleaved=True,
)
