"""The recorded tiny models (families/) as the folders and files that Octavo loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from oracle.tiny_tokenizer import write_tokenizer
from paths import ORACLE

FAMILIES = ORACLE / "families"
QUANTIZED = sorted(path.name for path in (FAMILIES.parent / "quantized").iterdir())


def recorded(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with np.load(FAMILIES / name / "logits.npz") as data:
        arrays = dict(data)
    meta: dict[str, Any] = json.loads(str(arrays.pop("meta")))
    return meta, arrays


def folder(
    name: str, path: Path, changes: dict[str, Any] | None = None, *, bf16: bool = False
) -> Path:
    """A copy of a family's folder, with a tokenizer of the model's size."""
    path.mkdir()
    config = json.loads((FAMILIES / name / "config.json").read_text()) | (changes or {})
    weights = load_file(FAMILIES / name / "model.safetensors")
    if bf16:
        config["dtype"] = "bfloat16"
        weights = {key: value.astype(ml_dtypes.bfloat16) for key, value in weights.items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path, config["vocab_size"])
    return path


def quantized_folder(name: str, path: Path) -> Path:
    """A copy of a recorded quantized folder."""
    shutil.copytree(FAMILIES.parent / "quantized" / name, path)
    write_tokenizer(path, json.loads((path / "config.json").read_text())["vocab_size"])
    return path


def gguf_file(name: str, label: str, path: Path) -> Path:
    """The file that llama.cpp's converter made, from its header and the folder's tensors."""
    with np.load(FAMILIES / name / "gguf.npz") as data:
        tensors = json.loads(str(data["meta"]))[label]
        content = bytearray(data[label].tobytes())
    weights = load_file(FAMILIES / name / "model.safetensors")
    for offset, source, *how in tensors:
        if how:
            values = weights[source]
            heads, shift = how
            if heads:
                halves = values.reshape(heads, 2, -1, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape)
            values = values + np.float32(shift)
        elif isinstance(source[0], str):
            values = np.stack([weights[each] for each in source])
        else:
            values = np.array(source, np.float32)
        content = content.ljust(offset, b"\0")
        content[offset:] = values.tobytes()
    path.write_bytes(content)
    return path


def talking_folder(path: Path) -> Path:
    """A bfloat16 Qwen2 with the recorded qwen2 tokenizer and chat template: it talks nonsense."""
    source = FAMILIES.parent / "tokenizers" / "qwen2"
    size = json.loads((source / "cases.json").read_text())["chat"]["size"]
    folder("qwen2", path, {"vocab_size": size, "eos_token_id": None}, bf16=True)
    for file in source.iterdir():
        if file.name != "cases.json":
            (path / file.name).write_bytes(file.read_bytes())
    weights = load_file(path / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = rng.normal(0, 0.3, (size, 32)).astype(ml_dtypes.bfloat16)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path
