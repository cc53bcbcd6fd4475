"""A quantized model as a GGUF file: its source with the layers' matrices in Q4_0, Q4_1 or Q8_0.

The source is a GGUF file. Its metadata is copied byte for byte but for what says how weights are
stored, and so are all tensors that are not quantized. Blocks are ggml's (32 values): Q4_0 an fp16
scale d and 4-bit codes q, w = d (q - 8), code j in the low and code j + 16 in the high half of byte
j; Q4_1 the same after d and an fp16 minimum m, w = d q + m; Q8_0 d and signed bytes, w = d q.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from struct import pack, unpack_from
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import Checkpoint, WeightFormat
from octavo.checkpoint.files import map_file
from octavo.checkpoint.gguf_split import open_gguf
from octavo.checkpoint.loader import role as role_of
from octavo.quant.grid import Float32, Kind, Quantized
from octavo.quant.state import LayerResult, QuantizeError, State

Bytes = npt.NDArray[np.uint8]

BLOCK = 32
FORMATS = {
    Kind.Q4_0: WeightFormat.Q4_0,
    Kind.Q4_1: WeightFormat.Q4_1,
    Kind.Q8_0: WeightFormat.Q8_0,
}
BLOCK_BYTES = {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q8_0: 34}
_FILE_TYPES = {Kind.Q4_0: 2, Kind.Q4_1: 3, Kind.Q8_0: 7}  # general.file_type: "mostly …"
_FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_HEADER = 24  # bytes: magic, version, tensors, keys


class GgufTarget:
    """Raises `QuantizeError` when the source is no GGUF file."""

    def __init__(self, checkpoint: Checkpoint, kind: Kind) -> None:
        if checkpoint.path.is_dir():
            raise QuantizeError(
                f"{checkpoint.path}: is a Hugging Face folder; GGUF is written from GGUF files, "
                "whose metadata it takes over: choose --format gptq, awq or compressed-tensors"
            )
        self.checkpoint = checkpoint
        self.kind = kind
        self.file = open_gguf(checkpoint.path)

    def stored(self, role: str, values: Float32) -> Float32:
        """A vector as readers of the file will have it: fp32."""
        return values

    def write(self, state: State, path: Path) -> int:
        """The whole file, under its name when it is complete; returns the tensors' bytes."""
        temporary = path.with_name(path.name + ".part")
        try:
            with open(temporary, "wb") as out:
                size = self._write(state, out)
                out.flush()
                os.fsync(out.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        os.replace(temporary, path)
        return size

    def _write(self, state: State, out: BinaryIO) -> int:
        file = self.file
        tensors = [(name, self._roles(name)) for name in file.tensors]
        infos, at = bytearray(), 0
        for name, roles in tensors:
            info = file.tensors[name]
            format, nbytes = info.format, info.nbytes
            if roles:
                format = FORMATS[self.kind]
                nbytes = info.shape[0] * (info.shape[1] // BLOCK) * BLOCK_BYTES[self.kind]
            elif self._is_vector(name):
                format, nbytes = WeightFormat.F32, 4 * info.shape[0]
            dims = info.shape[::-1]
            infos += _string(name) + pack(f"<I{len(dims)}Q", len(dims), *dims)
            infos += pack("<IQ", format, at)
            at += -(-nbytes // file.alignment) * file.alignment
        keys, count = self._metadata()
        header = b"GGUF" + pack("<IQQ", 3, len(tensors), count) + keys + bytes(infos)
        out.write(header + bytes(-len(header) % file.alignment))
        loaded, result = -1, LayerResult({}, {})
        for name, roles in tensors:
            layer = role_of(name).split(".")
            if layer[0] == "layers" and int(layer[1]) != loaded:
                loaded = int(layer[1])
                result = state.load(loaded)
            data = self._data(name, roles, result)
            out.write(data.data)
            out.write(bytes(-data.nbytes % file.alignment))
        return at

    def _roles(self, name: str) -> tuple[str, ...]:
        """The quantized matrices that a tensor is made of, or none."""
        role = role_of(name)
        prefix, _, part = role.rpartition(".")
        weights = self.checkpoint.weights
        members = tuple(f"{prefix}.{each}" for each in _FUSED.get(part, ()))
        shape = self.file.tensors[name].shape
        rows = [weights[member].shape[0] for member in members if member in weights]
        if members and len(rows) == len(members) and sum(rows) == shape[0]:
            return members
        quantized = role.startswith("layers.") and role in weights and len(shape) == 2
        return (role,) if quantized else ()

    def _is_vector(self, name: str) -> bool:
        """Of a layer: it may have changed, and is fp32 then."""
        weight = self.checkpoint.weights.get(role_of(name))
        return weight is not None and len(weight.shape) == 1 and weight.name == name

    def _data(self, name: str, roles: tuple[str, ...], result: LayerResult) -> Bytes:
        if roles:
            return np.concatenate([blocks(result.matrices[role]) for role in roles])
        if self._is_vector(name):
            role = role_of(name)
            if role in result.vectors:
                return np.ascontiguousarray(result.vectors[role], "<f4").view(np.uint8)
            return self.checkpoint.weights[role].data
        return self.file.weight(name).data

    def _metadata(self) -> tuple[bytes, int]:
        """The source's keys as they are, but for those that say how weights are stored."""
        own = {
            "general.file_type": _FILE_TYPES[self.kind],
            "general.quantization_version": 2,
        }
        dropped = {*own, "split.no", "split.count", "split.tensors.count"}
        kept = [span for key, span in _spans(self.file.path) if key not in dropped]
        new = [_string(key) + pack("<II", _UINT32, value) for key, value in own.items()]
        return b"".join([*kept, *new]), len(kept) + len(new)


def blocks(matrix: Quantized) -> Bytes:
    """A matrix's bytes, row after row."""
    codes = matrix.codes.reshape(-1, BLOCK)
    scale = matrix.step.reshape(-1, 1).astype("<f2").view(np.uint8)
    if matrix.scheme.kind is Kind.Q8_0:
        return np.concatenate([scale, codes ^ np.uint8(128)], axis=1).reshape(-1)
    half = BLOCK // 2
    nibbles = codes[:, :half] | codes[:, half:] << np.uint8(4)
    parts = [scale, nibbles]
    if matrix.low is not None:
        parts.insert(1, matrix.low.reshape(-1, 1).astype("<f2").view(np.uint8))
    return np.concatenate(parts, axis=1).reshape(-1)


def _string(text: str) -> bytes:
    data = text.encode()
    return pack("<Q", len(data)) + data


def _spans(path: Path) -> list[tuple[str, bytes]]:
    """Each key of a file that has been checked already, with its bytes."""
    view = map_file(path, _HEADER, "GGUF")
    (count,) = unpack_from("<Q", view, _HEADER - 8)
    at, found = _HEADER, []
    for _ in range(count):
        start = at
        (length,) = unpack_from("<Q", view, at)
        key = bytes(view[at + 8 : at + 8 + length]).decode()
        at += 8 + length
        (kind,) = unpack_from("<I", view, at)
        at = _skip(view, at + 4, kind)
        found.append((key, bytes(view[start:at])))
    return found


def _skip(view: mmap.mmap, at: int, kind: int) -> int:
    """Where the value ends that begins there."""
    if kind == _STRING:
        return at + 8 + int(unpack_from("<Q", view, at)[0])
    if kind != _ARRAY:
        return at + _SIZES[kind]
    inner, count = unpack_from("<IQ", view, at)
    at += 12
    if inner in _SIZES:
        return at + int(count) * _SIZES[inner]
    for _ in range(count):
        at = _skip(view, at, inner)
    return at
