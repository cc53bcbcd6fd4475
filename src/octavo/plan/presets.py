"""Shapes of common open models, by name: what their config.json says, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.checkpoint.hf_folder import CONFIG, HfFolder

PRESETS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}


class Preset(HfFolder):
    """Reads like the folder of a model that is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(Path(name))
        self._config = PRESETS[name]

    def json(self, name: str, most: int = 0) -> dict[str, Any]:
        return self._config if name == CONFIG else {}
