"""The recorded tiny models (families/) as the folders and files that Octavo loads."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from oracle.drawn_configs import make_weights
from oracle.tiny_tokenizer import write_tokenizer
from paths import ORACLE

Float32 = npt.NDArray[np.float32]
FAMILIES = ORACLE / "families"
QUANTIZED = sorted(path.name for path in (FAMILIES.parent / "quantized").iterdir())
TEXT = "text_config"
BASE = "base"
LLAMA_CPP = "llama_cpp.npz"  # of a family: logits by label


@dataclass(frozen=True)
class Recorded:
    """What `transformers` makes of a family's cases. See README.md here."""

    ids: npt.NDArray[np.int32]  # of the longest sequence; others are its beginning
    columns: npt.NDArray[np.int32]  # [positions, some], whose logits are kept
    logits: dict[str, Float32]  # by label (and BASE.bfloat16) [positions, some]
    cases: dict[str, dict[str, Any]]  # by label
    prompt: int  # tokens before the greedy ones

    def off(self, label: str, got: Float32) -> Float32:
        """How far logits [positions, vocab] are from a case's, in shares of its deviation."""
        expected = self.logits[label]
        kept = np.take_along_axis(got, self.columns[: len(got)], axis=1)
        assert kept.shape == expected.shape
        found: Float32 = np.abs(kept - expected) / expected.std()
        return found

    def tokens(self, label: str) -> list[int]:
        ids: list[int] = self.ids[: self.cases[label]["tokens"]].tolist()
        return ids


def recorded(name: str) -> Recorded:
    with np.load(FAMILIES / name / "logits.npz") as data:
        arrays = dict(data)
    file = json.loads((FAMILIES / name / "cases.json").read_text())
    ids, columns = arrays.pop("ids"), arrays.pop("columns")
    return Recorded(ids, columns, arrays, file["cases"], file["prompt"])


def labels(name: str) -> list[str]:
    return list(json.loads((FAMILIES / name / "cases.json").read_text())["cases"])


def gguf_labels(name: str) -> list[str]:
    """The cases of which there is a GGUF file, too."""
    if not (path := FAMILIES / name / "gguf.npz").exists():
        return []
    with np.load(path) as data:
        return [label for label in data if label != "meta"]


def changed(
    config: Mapping[str, Any], changes: Mapping[str, Any], without: Sequence[str] = ()
) -> dict[str, Any]:
    """A config.json with other values, those of text_config inside of it, and without some keys."""
    values = {**config, **changes}
    if TEXT in changes and TEXT in config:
        values[TEXT] = config[TEXT] | changes[TEXT]
    if TEXT in values:
        values[TEXT] = {key: v for key, v in values[TEXT].items() if key not in without}
    return {key: v for key, v in values.items() if key not in without or key == "model_type"}


def weights(name: str, label: str = BASE) -> dict[str, Float32]:
    """The tensors of a case's folder, by the names that `save_pretrained` gives them."""
    file = json.loads((FAMILIES / name / "cases.json").read_text())
    case = file["cases"][label]
    return make_weights(case.get("shapes", file["shapes"]), file["seed"], file["around"])


def folder(
    name: str,
    path: Path,
    changes: dict[str, Any] | None = None,
    *,
    label: str = BASE,
    bf16: bool = False,
) -> Path:
    """A family's folder, with a tokenizer of the model's size. ``changes``: to its config.json."""
    path.mkdir()
    case = json.loads((FAMILIES / name / "cases.json").read_text())["cases"][label]
    config = json.loads((FAMILIES / name / "config.json").read_text())
    config = changed(config, case.get("changes", {}), case.get("without", ()))
    config = changed(config, changes or {})
    tensors: dict[str, Any] = dict(weights(name, label))
    if bf16:
        config["dtype"] = "bfloat16"
        tensors = {key: value.astype(ml_dtypes.bfloat16) for key, value in tensors.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path, config.get(TEXT, config)["vocab_size"])
    if config["model_type"] == "cohere2":  # whose own class adds tokens beyond the vocabulary
        plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (path / "tokenizer_config.json").write_text(json.dumps(plain))
    return path


def quantized_folder(name: str, path: Path) -> Path:
    """A copy of a recorded quantized folder."""
    shutil.copytree(FAMILIES.parent / "quantized" / name, path)
    write_tokenizer(path, json.loads((path / "config.json").read_text())["vocab_size"])
    return path


def transformed(values: Float32, how: int | str | list[Any], shift: int) -> Float32:
    """A folder's tensor as GGUF has it: rows of so many heads in pairs, or a stack of experts'
    matrices turned, of which gate and up are the rows in turn, or one half of the rows, or
    [axis, indices], rows or columns in another order.
    """
    if isinstance(how, list):
        axis, indices = how
        values = values.reshape(len(values), -1).take(indices, axis)
    elif how in ("first", "second"):
        values = np.split(values, 2, axis=-2)[how == "second"]
    elif isinstance(how, str):
        turned = values.swapaxes(1, 2) if values.ndim == 3 else values
        first = {"gate": 0, "up": 1}
        values = np.ascontiguousarray(turned[:, first[how] :: 2] if how in first else turned)
    elif how and len(values) % (2 * how) == 0:
        halves = values.reshape(how, 2, -1, *values.shape[1:])
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values + np.float32(shift) if shift else values


def gguf_file(name: str, label: str, path: Path) -> Path:
    """The file that llama.cpp's converter made, from its header and the folder's tensors."""
    with np.load(FAMILIES / name / "gguf.npz") as data:
        tensors, header = json.loads(str(data["meta"]))[label], data[label].tobytes()
    return rebuilt_gguf(path, header, tensors, weights(name, label))


def rebuilt_gguf(
    path: Path, header: bytes, tensors: Sequence[Any], made: Mapping[str, Float32]
) -> Path:
    """A file from its header and, of each tensor, the offset and how it is made of others."""
    content = bytearray(header)
    for offset, source, *how in tensors:
        if how:
            values = transformed(made[source], *how)
        elif isinstance(source[0], str):
            values = np.stack([made[each] for each in source])
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
