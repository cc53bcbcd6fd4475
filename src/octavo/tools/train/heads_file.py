"""Heads on disk, as spec_decode/heads.py reads them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from octavo.loader.base import Checkpoint
from octavo.spec_decode.heads import CONFIG, fingerprint
from octavo.tools.quantize.layouts import HfTensor
from octavo.tools.quantize.safetensors_writer import SafetensorsWriter
from octavo.tools.quantize.state import write_whole
from octavo.tools.train.medusa_training import HeadRecipe, Learned


def write(folder: Path, checkpoint: Checkpoint, learned: Learned, recipe: HeadRecipe) -> int:
    """Writes a folder of heads for the checkpoint's model; returns the bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = SafetensorsWriter(folder, len(learned.tensors) + 1)
    try:
        for name, values in learned.tensors.items():
            writer.add(name, HfTensor("F16", values.astype(np.float16)))
        writer.add("token_map", HfTensor("I64", learned.token_map))
        size = writer.finish()
    except BaseException:
        writer.discard()
        raise
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": checkpoint.config.hidden_size,
        "vocab_size": checkpoint.config.vocab_size,
        "truncated_vocab_size": len(learned.token_map),
        "medusa_num_heads": recipe.heads,
        "original_lm_head": True,
        **(
            {"recurrent": True, "intermediate_size": recipe.width}
            if recipe.recurrent
            else {"medusa_num_layers": recipe.layers, "medusa_fc_bias": True}
        ),
        "target": fingerprint(checkpoint),
        "training": {"recipe": asdict(recipe), "held_out": learned.report},
    }
    write_whole(folder / CONFIG, json.dumps(config, indent=2).encode())
    return size
