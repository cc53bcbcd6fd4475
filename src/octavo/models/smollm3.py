"""SmolLM3 (Bakouch et al., 2025): Llama, of which every fourth layer has no rotary positions."""

from __future__ import annotations

from octavo.models import llama
from octavo.models.family import Family
from octavo.models.hf_type import KV_HEADS, LLAMA_DEFAULTS, HfType, Rule, layer_types
from octavo.models.section import Section


def _rotated(values: Section) -> list[int]:
    layers, interval = values.count("num_hidden_layers"), values.count("no_rope_layer_interval")
    return [int((index + 1) % interval != 0) for index in range(layers)]


def _types(values: Section) -> list[str]:
    used = values.flag("use_sliding_window") and values.values["sliding_window"] is not None
    rotated = values.values["no_rope_layers"]
    return layer_types(values, lambda index: used and not rotated[index])


FAMILY = Family(
    name="smollm3",
    title="SmolLM3",
    note="layers without rotary positions: in GGUF every fourth",
    program=llama.program,
    hf=(
        HfType(
            model_type="smollm3",
            classes="SmolLM3",
            defaults={
                **LLAMA_DEFAULTS,
                "vocab_size": 128256,
                "hidden_size": 2048,
                "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "eos_token_id": 128001,
                "use_sliding_window": False,
                "sliding_window": None,
                "no_rope_layers": None,
                "no_rope_layer_interval": 4,
                "layer_types": None,
                "attention_bias": False,
                "mlp_bias": False,
                "tie_word_embeddings": True,
            },
            computed={
                "num_key_value_heads": KV_HEADS,
                "no_rope_layers": Rule("0 for every no_rope_layer_interval-th", _rotated),
                "layer_types": Rule("sliding where unrotated, if use_sliding_window", _types),
            },
            rope_theta={"": 2e6},
        ),
    ),
    interleaved=True,
    unrotated_period=4,
)
