"""The recorded tiny models with a layer for multi-token prediction (mtp/), as the folders and files
that Octavo loads.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from oracle.drawn_configs import Around, make_weights
from oracle.tiny_folders import Float32, folder, rebuilt_gguf, weights
from paths import ORACLE

MTP = ORACLE / "mtp"
NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # of families
LIKE = "model.layers.1."  # the layer with attention
SEED = 7
KEYS: dict[str, Any] = {
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],  # llama.cpp cannot do without
    },
}
AROUND: Around = {
    "norm.weight": (0.0, 0.2),
    "norm_embedding.weight": (0.0, 0.2),
    "norm_hidden.weight": (0.0, 0.2),
}


class RecordedMtp(NamedTuple):
    """What llama.cpp makes of a model's layer. See README.md here."""

    ids: npt.NDArray[np.int32]
    logits: Float32  # behind each of the ids, and of each draft but the last [passes, vocab]


def mtp_recorded(name: str) -> RecordedMtp:
    with np.load(MTP / f"{name}.npz") as data:
        return RecordedMtp(data["ids"], data["logits"])


def mtp_weights(name: str) -> dict[str, Float32]:
    """The tensors that the layer adds to a family's base."""
    base = weights(name)
    shapes = {
        f"mtp.layers.0.{key.removeprefix(LIKE)}": list(values.shape)
        for key, values in base.items()
        if key.startswith(LIKE)
    }
    (width,) = base["model.norm.weight"].shape
    shapes["mtp.fc.weight"] = [width, 2 * width]
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"mtp.{norm}.weight"] = [width]
    return make_weights(shapes, SEED, AROUND)


def mtp_folder(name: str, path: Path, changes: dict[str, Any] | None = None) -> Path:
    """``changes``: to its config.json."""
    known = {} if name == "qwen3_next" else KEYS  # whose files have neither
    folder(name, path, known | (changes or {}))
    file = path / "model.safetensors"
    save_file(load_file(file) | mtp_weights(name), file, {"format": "pt"})
    return path


def mtp_gguf(name: str, path: Path) -> Path:
    """The file that llama.cpp's converter made of it."""
    with np.load(MTP / f"{name}.npz") as data:
        tensors, header = json.loads(str(data["meta"])), data["header"].tobytes()
    return rebuilt_gguf(path, header, tensors, weights(name) | mtp_weights(name))
