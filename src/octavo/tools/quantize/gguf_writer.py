"""A quantized model as a GGUF file: keys, tensors, and matrices in Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0.

Layout, from the GGUF specification (ggml repository, docs/gguf.md): magic, version, counts, keys
with typed values, a line a tensor, padding, the tensors' bytes. Blocks are ggml's (32 values): Q4_0
an fp16 scale d and 4-bit codes q, w = d (q - 8), code j in the low and code j + 16 in the high half
of byte j; Q4_1 the same after d and an fp16 minimum m, w = d q + m; Q5_0 and Q5_1 have the codes'
fifth bits in 4 bytes before that, w = d (q - 16) and d q + m; Q8_0 d and signed bytes, w = d q.
What a file holds is made of a GGUF file (gguf_copy.py) or of a folder (gguf_model.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from struct import pack
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Weight, WeightFormat
from octavo.loader.dequantize import dequantize
from octavo.loader.gguf import BLOCKS
from octavo.tools.quantize.grid import CodeKind, Float32, Quantized
from octavo.tools.quantize.k_quants import GgmlBlocks
from octavo.tools.quantize.nearest import in_pieces
from octavo.tools.quantize.quantizer import Recipe, round_each
from octavo.tools.quantize.state import LayerResult, State

Bytes = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.intp]
Value = int | float | str | Sequence[str] | npt.NDArray[np.generic]  # bool is an int

BLOCK = 32
_FILE_TYPES = {
    CodeKind.Q4_0: 2,
    CodeKind.Q4_1: 3,
    CodeKind.Q8_0: 7,
}  # general.file_type: "mostly …"
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_ARRAYS = {"i4": 5, "f4": _FLOAT32, "b1": _BOOL}


class GgufTensor(NamedTuple):
    """``data`` makes its bytes, of what its layer's matrices and vectors have become."""

    name: str
    shape: tuple[int, ...]  # outermost first
    format: WeightFormat
    layer: int | None  # None: of no layer; it gets an empty result
    data: Callable[[LayerResult], Bytes]

    @property
    def nbytes(self) -> int:
        count, size = BLOCKS[self.format]
        return prod(self.shape) // count * size


class Content(NamedTuple):
    keys: list[bytes]  # each with its value
    tensors: list[GgufTensor]
    alignment: int

    def header(self) -> bytes:
        """All before the tensors' bytes."""
        infos, at = bytearray(), 0
        for tensor in self.tensors:
            dims = tensor.shape[::-1]
            infos += _string(tensor.name) + pack(f"<I{len(dims)}Q", len(dims), *dims)
            infos += pack("<IQ", tensor.format, at)
            at += self.padded(tensor.nbytes)
        start = b"GGUF" + pack("<IQQ", 3, len(self.tensors), len(self.keys))
        header = start + b"".join(self.keys) + bytes(infos)
        return header.ljust(self.padded(len(header)), b"\0")

    def padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment


class GgufTarget:
    """Where a checkpoint's quantized form goes, if it is one file."""

    def __init__(self, content: Content) -> None:
        self.content = content

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
        out.write(self.content.header())
        loaded, none = -1, LayerResult.empty()
        result, size = none, 0
        for tensor in self.content.tensors:
            if tensor.layer is not None and tensor.layer != loaded:
                loaded = tensor.layer
                result = state.load(loaded)
            data = tensor.data(none if tensor.layer is None else result)
            assert data.nbytes == tensor.nbytes, tensor.name
            out.write(data.data)
            size += self.content.padded(data.nbytes)
            out.write(bytes(self.content.padded(data.nbytes) - data.nbytes))
        return size


def layer_of(role: str) -> int | None:
    prefix, _, rest = role.partition(".")
    return int(rest.partition(".")[0]) if prefix == "layers" else None


def matrix(
    name: str,
    shape: tuple[int, ...],
    format: WeightFormat,
    roles: Sequence[str],
    orders: Sequence[IntArray | None] | None = None,
    order: IntArray | None = None,
) -> GgufTensor:
    """Quantized matrices one below the other, the rows of each in an order of its own, or all rows
    in one."""

    def data(result: LayerResult) -> Bytes:
        parts = []
        for role, own in zip(roles, orders or [None] * len(roles), strict=True):
            part = result.matrices[role]
            parts.append(blocks(part if own is None else part.rows(own)))
        rows = np.concatenate(parts)
        return rows if order is None else rows.reshape(len(order), -1)[order].reshape(-1)

    return GgufTensor(name, shape, format, layer_of(roles[0]), data)


def rounded(name: str, role: str, weight: Weight, recipe: Recipe) -> GgufTensor:
    """A matrix of no layer."""

    def data(_: LayerResult) -> Bytes:
        pieces = [blocks(round_each(recipe, role, piece)) for piece in in_pieces(weight)]
        return np.concatenate(pieces)

    return GgufTensor(name, weight.shape, recipe.ends[role].kind.format, None, data)


def changed(
    name: str,
    shape: tuple[int, ...],
    roles: Sequence[str],
    weights: Mapping[str, Weight],
    order: IntArray | None = None,
) -> GgufTensor:
    """Vectors or routers of a layer, one below the other, all rows in an order: the method may have
    changed them, and they are fp32 then; that is also what llama.cpp wants of both."""

    def data(result: LayerResult) -> Bytes:
        found = (result.vectors.get(role) for role in roles)
        parts = [
            dequantize(weights[role]) if part is None else part
            for role, part in zip(roles, found, strict=True)
        ]
        values = np.concatenate(parts)
        values = values if order is None else values[order]
        return np.ascontiguousarray(values, "<f4").view(np.uint8).reshape(-1)

    return GgufTensor(name, shape, WeightFormat.F32, layer_of(roles[0]), data)


def blocks(matrix: Quantized | GgmlBlocks) -> Bytes:
    """A matrix's bytes, row after row."""
    if isinstance(matrix, GgmlBlocks):
        return matrix.data.reshape(-1)
    codes = matrix.codes.reshape(-1, BLOCK)
    scale = matrix.step.reshape(-1, 1).astype("<f2").view(np.uint8)
    if matrix.scheme.kind is CodeKind.Q8_0:
        return np.concatenate([scale, codes ^ np.uint8(128)], axis=1).reshape(-1)
    half = BLOCK // 2
    low = codes & np.uint8(15)
    parts = [scale, low[:, :half] | low[:, half:] << np.uint8(4)]
    if matrix.scheme.bits == 5:
        parts.insert(1, np.packbits(codes >> np.uint8(4), axis=1, bitorder="little"))
    if matrix.low is not None:
        parts.insert(1, matrix.low.reshape(-1, 1).astype("<f2").view(np.uint8))
    return np.concatenate(parts, axis=1).reshape(-1)


# ── Keys ────────────────────────────────────────────────────────────────────────────────────────


def of_storage(recipe: Recipe) -> dict[str, Value]:
    """What says how the weights are stored."""
    file_type = _FILE_TYPES[recipe.scheme.kind] if recipe.mix is None else recipe.mix.value
    return {"general.file_type": file_type, "general.quantization_version": 2}


class UnencodableKey(ValueError):
    """A key whose text has no UTF-8."""


def key(name: str, value: Value) -> bytes:
    """A key with its value: integers as uint32, numbers as float32; arrays of strings, or of int32,
    float32 or bool. Raises `UnencodableKey`."""
    try:
        return _string(name) + _typed(value)
    except UnicodeEncodeError as error:
        odd = error.object[error.start]
        raise UnencodableKey(
            f"{name} has a lone surrogate ({odd!r} at character {error.start})"
        ) from None


def _typed(value: Value) -> bytes:
    if isinstance(value, bool):
        return pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return pack("<II", _UINT32, value)
    if isinstance(value, float):
        return pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return pack("<I", _STRING) + _string(value)
    if isinstance(value, np.ndarray):
        kind = _ARRAYS[value.dtype.str[1:]]
        return pack("<IIQ", _ARRAY, kind, len(value)) + value.tobytes()
    return pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))


def _string(text: str) -> bytes:
    data = text.encode()
    return pack("<Q", len(data)) + data
