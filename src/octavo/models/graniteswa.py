"""Granite with windows (Granite Team, 2026): Granite 3 with a sliding window on three layers of
four, a sink a head, and a rotary base of each layer's own, or none.
"""

from __future__ import annotations

from octavo.models import granite
from octavo.models.family import Family
from octavo.models.hf_type import HfType, Rule, layer_types

FAMILY = Family(
    name="granite_swa",
    title="Granite with windows",
    note="GGUF files are not read: llama.cpp's converter leaves out the layers' rotary bases",
    program=granite.program,
    keys=granite.FAMILY.keys,
    bare={"attn_sinks": "self_attn.sinks"},
    hf=(
        HfType(
            model_type="granite_swa",
            classes="GraniteSWA",
            tokenizer="",
            defaults={
                **granite.FAMILY.hf[0].defaults,
                "vocab_size": 100352,
                "hidden_size": 2560,
                "intermediate_size": 8192,
                "num_hidden_layers": 24,
                "num_attention_heads": 20,
                "num_key_value_heads": 4,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-05,
                "eos_token_id": 100257,
                "tie_word_embeddings": True,
                "sliding_window": 128,
                "layer_types": None,
                "layer_rope_theta": None,
            },
            computed={
                **granite.FAMILY.hf[0].computed,
                "layer_types": Rule(
                    "sliding but every 4th, from the first on",
                    lambda values: layer_types(values, lambda index: index % 4 != 0),
                ),
            },
        ),
    ),
    sinks=True,
    architecture=None,
)
