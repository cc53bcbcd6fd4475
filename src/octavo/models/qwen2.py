"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases on q, k and v."""

from __future__ import annotations

from octavo.models import llama
from octavo.models.family import QKV, Family
from octavo.models.hf_type import KV_HEADS, LLAMA_DEFAULTS, USED_WINDOW, HfType, Rule, layer_types
from octavo.models.section import Section


def _types(values: Section) -> list[str]:
    first = values.count("max_window_layers", least=0)
    window = values.values["sliding_window"]
    return layer_types(values, lambda index: window is not None and index >= first)


FAMILY = Family(
    name="qwen2",
    title="Qwen2, Qwen2.5",
    note="windows from `max_window_layers` or `layer_types`",
    program=llama.program,
    hf=(
        HfType(
            model_type="qwen2",
            classes="Qwen2",
            tokenizer="Qwen2Tokenizer",
            tokenizer_overrules=True,
            defaults={
                **LLAMA_DEFAULTS,
                "vocab_size": 151936,
                "intermediate_size": 22016,
                "num_key_value_heads": 32,
                "max_position_embeddings": 32768,
                "use_sliding_window": False,
                "sliding_window": 4096,
                "max_window_layers": 28,
                "layer_types": None,
                "eos_token_id": None,
            },
            computed={
                "num_key_value_heads": KV_HEADS,
                "sliding_window": USED_WINDOW,
                "layer_types": Rule("sliding from max_window_layers on", _types),
            },
        ),
    ),
    biases=QKV,
)
