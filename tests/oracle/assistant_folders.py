"""The recorded tiny assistants of Gemma 4 (assistants/), as the folders that Octavo loads."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from oracle.drawn_configs import Around, make_weights
from oracle.tiny_folders import TEXT, Float32
from paths import ORACLE

ASSISTANTS = ORACLE / "assistants"
NAMES = ("gemma4", "gemma4-e")  # families whose base they are assistants of
SEED = 11
AROUND: Around = {"q_norm.weight": (0.3, 0.1), "post_attention_layernorm.weight": (0.5, 0.1)}
# Of the base's recorded ids: how many the model has computed before the token that is drafted
# behind. The window is 24.
LENGTHS = (20, 100, 150)


class RecordedAssistant(NamedTuple):
    """What `transformers` makes of an assistant. See README.md here."""

    config: dict[str, Any]
    shapes: dict[str, list[int]]
    logits: Float32  # of each of `LENGTHS`, behind the last token and behind each draft's


def recorded_assistant(name: str) -> RecordedAssistant:
    with np.load(ASSISTANTS / f"{name}.npz") as data:
        meta = json.loads(str(data["meta"]))
        return RecordedAssistant(meta["config"], meta["shapes"], data["logits"])


def assistant_folder(name: str, path: Path, changes: dict[str, Any] | None = None) -> Path:
    """``changes``: to its config.json, those of text_config inside of it."""
    config, shapes, _ = recorded_assistant(name)
    inner = config[TEXT] | (changes or {}).get(TEXT, {})
    return write_assistant(path, config | (changes or {}) | {TEXT: inner}, shapes)


def write_assistant(path: Path, config: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(make_weights(shapes, SEED, AROUND), path / "model.safetensors", {"format": "pt"})
    return path
