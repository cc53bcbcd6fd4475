"""Medusa heads as files: `config.json` and `model.safetensors` in a folder.

Names are those that vLLM reads (`MedusaConfig`; its model's ``blocks.I.layers.J`` and
``token_map``); ``medusa_num_heads`` and ``medusa_num_layers`` are Cai et al.'s. There are no logits
matrices of their own: the target's serves, of its rows those that ``token_map`` lists. ``target``
says what the heads are for (`fingerprint`).

With ``recurrent``, which is Octavo's, there is one head that goes on from itself (`Recurrent`),
``medusa_num_heads`` times at most; ``intermediate_size`` is its width.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Checkpoint, CheckpointError, Weight, WeightFormat
from octavo.loader.bind import vector
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
_MOST_CONFIG = 1 << 20  # bytes

Int32 = npt.NDArray[np.int32]


class Layer(NamedTuple):
    """x + SiLU(x @ weight.T + bias)."""

    weight: Weight  # [hidden, hidden]
    bias: Weight | None  # [hidden]


class Recurrent(NamedTuple):
    """From the hidden row x that a token was drawn from and the token's embedding e, a guess at the
    hidden row that the token behind it is drawn from:

        (SiLU(gate (x, e)) * up (x, e)) @ down.T + skip (x, e) + bias

    where gate (x, e) is x @ gate.T + e @ gate_token.T, and the others likewise. Zhang et al.,
    "Recurrent Drafter for Fast Speculative Decoding in Large Language Models", 2024, have one such
    head; Li et al., "EAGLE", 2024, have hidden rows guess hidden rows.
    """

    gate: Weight  # [intermediate, hidden]
    gate_token: Weight
    up: Weight
    up_token: Weight
    down: Weight  # [hidden, intermediate]
    skip: Weight  # [hidden, hidden]
    skip_token: Weight
    bias: Weight  # [hidden]


class Heads(NamedTuple):
    """``blocks``: of each head its layers, the first guessing the token behind the one drawn; none
    of a ``recurrent`` head. ``num_heads``: tokens guessed, one behind the other.
    """

    path: Path
    num_heads: int
    blocks: list[list[Layer]]
    recurrent: Recurrent | None
    token_map: Int32  # the tokens that are guessed, ascending
    target: str


def fingerprint(checkpoint: Checkpoint) -> str:
    """What says that a model is the one that heads were trained for: its vocabulary, and its norms
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
    """The folder of heads that a setting names: one that is there, or by its name one that comes
    with Octavo."""
    folder = Path(name).expanduser()
    if folder.exists() or name not in own_heads():
        return folder
    return OWN / name


def own_heads() -> list[str]:
    """Names of the heads that come with Octavo."""
    return sorted(path.parent.name for path in OWN.glob(f"*/{CONFIG}"))


def read_heads(folder: Path, checkpoint: Checkpoint) -> Heads:
    """Raises `CheckpointError`, naming file and reason, for heads that are damaged, of a kind that
    is not supported, or for another model than ``checkpoint``.
    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder: heads are trained by octavo train medusa, and "
            f"{' and '.join(own_heads())} come with Octavo"
        )
    config = _Config(path)
    model = checkpoint.config
    if config.values.get("model_type") != "medusa":
        config.fail(f"model_type is {config.values.get('model_type')!r}, not 'medusa'")
    for name, ours in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
        theirs = config.count(name, 1, 1 << 31)
        if theirs != ours:
            config.fail(
                f"the heads are for another model: {name} is {theirs}, and {ours} in "
                f"{checkpoint.path}"
            )
    num_heads = config.count("medusa_num_heads", 1, MOST_HEADS, "num_heads")
    size = config.count("truncated_vocab_size", 2, model.vocab_size)
    target = config.values.get("target")
    if not isinstance(target, str):
        config.fail("target does not say which model the heads are for")
    if target != fingerprint(checkpoint):
        config.fail(
            f"the heads are for another model than {checkpoint.path}: its vocabulary, norms or "
            "biases differ"
        )
    tensors = _Tensors(SafetensorsFile(folder / TENSORS))
    blocks: list[list[Layer]] = []
    recurrent = None
    if config.flag("recurrent"):
        inner = config.count("intermediate_size", 1, MOST_WIDTH)
        recurrent = tensors.recurrent(model.hidden_size, inner)
    else:
        num_layers = config.count("medusa_num_layers", 1, MOST_LAYERS, "num_hidden_layers")
        bias = config.flag("medusa_fc_bias")
        for head in range(num_heads):
            names = [f"blocks.{head}.layers.{layer}" for layer in range(num_layers)]
            blocks.append([tensors.layer(name, model.hidden_size, bias) for name in names])
    token_map = tensors.token_map(size, model.vocab_size)
    tensors.finish()
    return Heads(folder, num_heads, blocks, recurrent, token_map, target)


class _Config:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = json_object(path, read_file(path, _MOST_CONFIG))

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {reason}")

    def count(self, name: str, low: int, high: int, other: str = "") -> int:
        """``other``: a second name of it."""
        value = self.values.get(name, self.values.get(other))
        if type(value) is not int or not low <= value <= high:
            self.fail(f"{name} is {value!r}; it must be an integer from {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            self.fail(f"{name} is {value!r}, neither true nor false")
        return value


class _Tensors:
    def __init__(self, file: SafetensorsFile) -> None:
        self._file = file
        self._left = set(file.tensors)

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        info = self._file.tensors.get(name)
        if info is None:
            self._file.fail(f"there is no tensor {name!r}")
        if info.shape != shape:
            self._file.fail(f"tensor {name!r} has the shape {info.shape}, not {shape}")
        self._left.discard(name)

    def layer(self, name: str, size: int, bias: bool) -> Layer:
        weight = self.matrix(f"{name}.weight", size, size)
        return Layer(weight, self.vector(f"{name}.bias", size) if bias else None)

    def recurrent(self, size: int, inner: int) -> Recurrent:
        shapes = {"down": (size, inner), "skip": (size, size), "skip_token": (size, size)}
        return Recurrent(
            bias=self.vector("skip.bias", size),
            **{
                name: self.matrix(f"{name}.weight", *shapes.get(name, (inner, size)))
                for name in RECURRENT
            },
        )

    def matrix(self, name: str, rows: int, columns: int) -> Weight:
        self._take(name, (rows, columns))
        weight = self._file.weight(name)
        self._check_finite(weight)
        return weight

    def vector(self, name: str, size: int) -> Weight:
        self._take(name, (size,))
        weight = vector(self._file.weight(name))
        self._check_finite(weight)
        return weight

    def _check_finite(self, weight: Weight) -> None:
        if not np.isfinite(floats(weight)).all():
            self._file.fail(f"tensor {weight.name!r} has an element that is no number")

    def token_map(self, size: int, vocab_size: int) -> Int32:
        name = "token_map"
        self._take(name, (size,))
        tokens = self._file.array(name, ("I32", "I64"))
        if tokens[0] < 0 or tokens[-1] >= vocab_size or (np.diff(tokens) <= 0).any():
            self._file.fail(
                f"tensor {name!r} is not an ascending list of tokens from 0 to {vocab_size - 1}"
            )
        return tokens.astype(np.int32)

    def finish(self) -> None:
        if self._left:
            self._file.fail(
                f"tensor {min(self._left)!r} has no part in the heads that {CONFIG} describes"
            )


def floats(weight: Weight) -> npt.NDArray[np.float32]:
    """The numbers of a weight in F32, F16 or BF16."""
    if weight.format is WeightFormat.BF16:
        bits = weight.data.view("<u2").astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    kind = "<f4" if weight.format is WeightFormat.F32 else "<f2"
    return weight.data.view(kind).astype(np.float32)
