"""Phi-3 and Phi-4 (Abdin et al., 2024): Llama with matrices that are stored fused."""

from __future__ import annotations

from octavo.models import llama
from octavo.models.family import FUSED, Family, Windows
from octavo.models.hf_type import KV_HEADS, LLAMA_DEFAULTS, HfType

FAMILY = Family(
    name="phi3",
    title="Phi-3, Phi-4",
    note="fused matrices are split as views; the window applies in GGUF too",
    program=llama.program,
    fused=FUSED,
    hf=(
        HfType(
            model_type="phi3",
            classes="Phi3",
            tokenizer="",
            tokenizer_overrules=True,
            defaults={
                **LLAMA_DEFAULTS,
                "vocab_size": 32064,
                "hidden_size": 3072,
                "intermediate_size": 8192,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "rms_norm_eps": 1e-05,
                "eos_token_id": 32000,
                "sliding_window": None,
            },
            computed={"num_key_value_heads": KV_HEADS},
            rope_types={
                "default": "default",
                "yarn": "longrope",
                "longrope": "longrope",
                "su": "longrope",
            },
            partial_rotary=1.0,
        ),
    ),
    written={"pad_token_id": None},  # the class's own is beyond small vocabularies
    windows=Windows(),
    greedy_tokens=True,
)
