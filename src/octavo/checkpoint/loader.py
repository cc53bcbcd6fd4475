"""Opens a model file and binds its tensors to the roles its Program names."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np

from octavo.checkpoint.base import (
    ChatTemplate,
    Checkpoint,
    Weight,
    WeightFormat,
)
from octavo.checkpoint.chat_template import JinjaChatTemplate
from octavo.checkpoint.gguf import GgufFile
from octavo.checkpoint.gguf_tokenizer import gguf_tokenizer
from octavo.checkpoint.metadata import model_config
from octavo.checkpoint.tokenizer import BpeTokenizer
from octavo.model.families import program

# Tensors that are read into the ModelConfig and are no weights of the Program.
_CONFIG_TENSORS = {"rope_freqs.weight"}
_SHOWN = 8  # most names an error lists


def load(path: Path) -> Checkpoint:
    """Reads a model file. Raises `CheckpointError` naming the file and what is wrong with it."""
    file = GgufFile(path)
    config = model_config(file)
    weights = bind(file, program(config).weights)
    tokenizer = gguf_tokenizer(file, config.vocab_size)
    template = _chat_template(file, tokenizer)
    return Checkpoint(path, config, weights, tokenizer, template, lambda: _release(file))


def _chat_template(file: GgufFile, tokenizer: BpeTokenizer) -> ChatTemplate | None:
    source = file.get("tokenizer.chat_template", str, None)
    if source is None:
        return None

    def text(key: str) -> str:
        token_id = file.get(key, int, None)
        return "" if token_id is None else tokenizer.token_text(token_id)

    return JinjaChatTemplate(
        source,
        bos_token=text("tokenizer.ggml.bos_token_id"),
        eos_token=text("tokenizer.ggml.eos_token_id"),
    )


def _release(file: GgufFile) -> None:
    file.release()
    # Building a tokenizer leaves tens of megabytes that the C library keeps for later.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def role(tensor: str) -> str:
    """``blk.3.attn_q.weight`` → ``layers.3.attn_q``; biases keep their ending."""
    name = re.sub(r"^blk\.", "layers.", tensor)
    return name.removesuffix(".weight")


def bind(file: GgufFile, shapes: dict[str, tuple[int, ...]]) -> dict[str, Weight]:
    """The file's tensors by role: exactly those of the Program, in exactly its shapes."""
    names = {role(name): name for name in file.tensors if name not in _CONFIG_TENSORS}
    if missing := sorted(shapes.keys() - names.keys()):
        file.fail(f"has no tensor for {_listed(missing)}")
    if unused := sorted(names.keys() - shapes.keys()):
        file.fail(f"has tensors that this model family does not use: {_listed(unused)}")
    weights = {}
    for key, shape in shapes.items():
        weight = file.weight(names[key])
        if weight.shape != shape:
            file.fail(
                f"tensor {weight.name!r} has shape {list(weight.shape)}; "
                f"the model's metadata asks for {list(shape)}"
            )
        weights[key] = _vector(file, weight) if len(shape) == 1 else weight
    return weights


def _vector(file: GgufFile, weight: Weight) -> Weight:
    """Norm weights and biases, widened to F32 (exactly) so that executors read one format."""
    if weight.format is WeightFormat.F32:
        return weight
    if weight.format is WeightFormat.F16:
        wide = weight.data.view("<f2").astype("<f4")
    elif weight.format is WeightFormat.BF16:
        wide = (weight.data.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    else:
        file.fail(f"tensor {weight.name!r} is a vector of type {weight.format.name}, not a float's")
    wide.flags.writeable = False
    return weight._replace(format=WeightFormat.F32, data=wide.view(np.uint8))


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
