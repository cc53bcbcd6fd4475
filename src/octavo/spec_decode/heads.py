"""Medusa heads as files: `config.json` and `model.safetensors` in a folder.

Names are those that vLLM reads (`MedusaConfig`; its model's ``blocks.I.layers.J`` and
``token_map``); ``medusa_num_heads`` and ``medusa_num_layers`` are Cai et al.'s. Heads have no
logits matrices of their own: they share the rows of the target's that ``token_map`` lists.
``target`` identifies the model that they are for (`fingerprint`).

``recurrent``, which is Octavo's own field, means that one head goes on from itself
(`Heads`), at most ``medusa_num_heads`` times; ``intermediate_size`` is its width.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Checkpoint, CheckpointError, Weight
from octavo.loader.bind import vector
from octavo.loader.dequantize import dequantize
from octavo.loader.files import json_object, read_file
from octavo.loader.safetensors import SafetensorsFile

CONFIG = "config.json"
TENSORS = "model.safetensors"
OWN = Path(__file__).parent / "trained"  # folders of heads that come with Octavo
MOST_HEADS = 16
MOST_LAYERS = 8
MOST_WIDTH = 1 << 16
# A recurrent head's matrices, in the order of its fields.
RECURRENT = ("gate", "gate_token", "up", "up_token", "down", "skip", "skip_token")
_MAX_CONFIG_BYTES = 1 << 20

Int32 = npt.NDArray[np.int32]


class Heads(NamedTuple):
    """``weights`` by the names of the tensors: of each head its layers, x + SiLU(x @ weight.T +
    bias), the first head guessing the token behind the one drawn.

    Or of one ``recurrent`` head, which guesses the hidden row that the next token will be drawn
    from, given the hidden row x that the last token was drawn from and that token's embedding e:

        (SiLU(gate (x, e)) * up (x, e)) @ down.T + skip (x, e) + bias

    where gate (x, e) is x @ gate.T + e @ gate_token.T, and the others likewise. Zhang et al.,
    "Recurrent Drafter for Fast Speculative Decoding in Large Language Models", 2024, have one such
    head; in Li et al., "EAGLE", 2024, hidden rows guess hidden rows.
    """

    path: Path
    num_heads: int  # tokens guessed, one behind the other
    num_layers: int  # of each head; 0: one recurrent head
    weights: dict[str, Weight]
    token_map: Int32  # the tokens that are guessed, ascending
    target: str

    @property
    def recurrent(self) -> bool:
        """Return whether one head goes on from itself."""
        return not self.num_layers


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return what identifies the model that heads were trained for: a hash of its vocabulary, norms
    and biases, which stay the same when its matrices are quantized.
    """
    found = hashlib.blake2b(digest_size=16)
    tokenizer = checkpoint.tokenizer
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id)
        found.update(len(text).to_bytes(4, "little") + text)
    for role, weight in sorted(checkpoint.weights.items()):
        if len(weight.shape) == 1:
            found.update(role.encode() + b"\0" + weight.data.tobytes())
    return found.hexdigest()


def heads_folder(name: str) -> Path:
    """Return the folder that a setting names: an existing one, or that of the heads of this name
    that come with Octavo.
    """
    folder = Path(name).expanduser()
    return folder if folder.exists() or name not in own_heads() else OWN / name


def own_heads() -> list[str]:
    """Return the names of the heads that come with Octavo."""
    return sorted(path.parent.name for path in OWN.glob(f"*/{CONFIG}"))


def read_heads(folder: Path, checkpoint: Checkpoint) -> Heads:
    """Read and check a folder of heads.

    Raises `CheckpointError`, naming file and reason, for heads that are damaged, of a kind that is
    not supported, or for another model than ``checkpoint``.
    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder: heads are trained by octavo train medusa, and "
            f"{' and '.join(own_heads())} come with Octavo"
        )
    values: dict[str, Any] = json_object(path, read_file(path, _MAX_CONFIG_BYTES))

    def fail(reason: str) -> NoReturn:
        raise CheckpointError(f"{path}: {reason}")

    def count(name: str, high: int, other: str = "", low: int = 1) -> int:
        value = values.get(name, values.get(other))
        if type(value) is not int or not low <= value <= high:
            fail(f"{name} is {value!r}; it must be an integer from {low} to {high}")
        return value

    def flag(name: str) -> bool:
        value = values.get(name, False)
        if not isinstance(value, bool):
            fail(f"{name} is {value!r}, neither true nor false")
        return value

    model = checkpoint.config
    if values.get("model_type") != "medusa":
        fail(f"model_type is {values.get('model_type')!r}, not 'medusa'")
    for name, ours in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
        theirs = count(name, 1 << 31)
        if theirs != ours:
            fail(
                f"the heads are for another model: {name} is {theirs}, and {ours} in "
                f"{checkpoint.path}"
            )
    num_heads = count("medusa_num_heads", MOST_HEADS, "num_heads")
    map_size = count("truncated_vocab_size", model.vocab_size, low=2)
    target = values.get("target")
    if not isinstance(target, str):
        fail("target does not say which model the heads are for")
    if target != fingerprint(checkpoint):
        fail(
            f"the heads are for another model than {checkpoint.path}: its vocabulary, norms or "
            "biases differ"
        )
    size, num_layers = model.hidden_size, 0
    shapes: dict[str, tuple[int, ...]] = {"token_map": (map_size,)}
    if flag("recurrent"):
        inner = count("intermediate_size", MOST_WIDTH)
        own = {"down": (size, inner), "skip": (size, size), "skip_token": (size, size)}
        shapes |= {f"{name}.weight": own.get(name, (inner, size)) for name in RECURRENT}
        shapes["skip.bias"] = (size,)
    else:
        num_layers = count("medusa_num_layers", MOST_LAYERS, "num_hidden_layers")
        for head in range(num_heads):
            for layer in range(num_layers):
                shapes[f"blocks.{head}.layers.{layer}.weight"] = (size, size)
                if flag("medusa_fc_bias"):
                    shapes[f"blocks.{head}.layers.{layer}.bias"] = (size,)
    weights, token_map = _read_tensors(SafetensorsFile(folder / TENSORS), shapes, model.vocab_size)
    return Heads(folder, num_heads, num_layers, weights, token_map, target)


def _read_tensors(
    file: SafetensorsFile, shapes: dict[str, tuple[int, ...]], vocab_size: int
) -> tuple[dict[str, Weight], Int32]:
    """Return the weights and the token map of a file that has exactly the tensors of ``shapes``."""
    for name, shape in shapes.items():
        info = file.tensors.get(name)
        if info is None:
            file.fail(f"there is no tensor {name!r}")
        if info.shape != shape:
            file.fail(f"tensor {name!r} has the shape {info.shape}, not {shape}")
    if unused := file.tensors.keys() - shapes.keys():
        file.fail(f"tensor {min(unused)!r} has no part in the heads that {CONFIG} describes")
    weights = {}
    for name, shape in shapes.items():
        if name == "token_map":
            continue
        weight = file.weight(name)
        weights[name] = weight if len(shape) > 1 else vector(weight)
        if not np.isfinite(dequantize(weights[name])).all():
            file.fail(f"tensor {name!r} has an element that is no number")
    tokens = file.array("token_map", ("I32", "I64"))
    if tokens[0] < 0 or tokens[-1] >= vocab_size or (np.diff(tokens) <= 0).any():
        file.fail(
            f"tensor 'token_map' is not an ascending list of tokens from 0 to {vocab_size - 1}"
        )
    return weights, tokens.astype(np.int32)
