"""Folders of Medusa heads that have learned nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from octavo.loader.base import Checkpoint
from octavo.spec_decode.heads import RECURRENT, fingerprint

WIDTH = 96  # of a recurrent head


def tensors(
    width: int,
    vocab: int,
    *,
    heads: int = 3,
    layers: int = 1,
    recurrent: bool = True,
    size: int = 40,
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(heads + 10 * layers)
    found: dict[str, np.ndarray] = {}
    if recurrent:
        for name in RECURRENT:
            rows = width if name in ("down", "skip", "skip_token") else WIDTH
            columns = WIDTH if name == "down" else width
            weight = rng.normal(size=(rows, columns)) / np.sqrt(columns)
            found[f"{name}.weight"] = weight.astype(np.float16)
        found["skip.bias"] = rng.normal(size=width).astype(np.float32)
    for head in range(0 if recurrent else heads):
        for layer in range(layers):
            name = f"blocks.{head}.layers.{layer}"
            weight = rng.normal(size=(width, width)) / np.sqrt(width)
            found[f"{name}.weight"] = weight.astype(np.float16)
            found[f"{name}.bias"] = rng.normal(size=width).astype(np.float32)
    found["token_map"] = np.sort(rng.permutation(vocab)[:size]).astype(np.int64)
    return found


def config(checkpoint: Checkpoint, **changes: Any) -> dict[str, Any]:
    model = checkpoint.config
    return {
        "model_type": "medusa",
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "truncated_vocab_size": 40,
        "medusa_num_heads": 3,
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
        "recurrent": True,
        "intermediate_size": WIDTH,
        "target": fingerprint(checkpoint),
    } | changes


def folder(path: Path, checkpoint: Checkpoint, **shape: Any) -> Path:
    """``shape``: as of `tensors`."""
    path.mkdir()
    model = checkpoint.config
    values = tensors(model.hidden_size, model.vocab_size, **shape)
    save_file(values, path / "model.safetensors", {"format": "pt"})
    changes = {
        "medusa_num_heads": shape.get("heads", 3),
        "medusa_num_layers": shape.get("layers", 1),
        "recurrent": shape.get("recurrent", True),
        "truncated_vocab_size": len(values["token_map"]),
    }
    (path / "config.json").write_text(json.dumps(config(checkpoint, **changes)))
    return path
