"""Reads GGUF files (versions 2 and 3, little-endian) without trusting a byte of them.

Layout, from the GGUF specification (ggml repository, docs/gguf.md): magic, version, tensor count,
metadata count, metadata key/value pairs, tensor infos, padding to the alignment, tensor data. Each
count, length, offset and product is compared with the file's size before it is used, so that a
small file can cost neither memory nor time. The file is mapped, not read: opening costs the
metadata only, and tensors are views.
"""

from __future__ import annotations

import mmap
from array import array
from itertools import pairwise
from math import prod
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import NamedTuple, NoReturn, TypeVar, overload

import numpy as np
import numpy.typing as npt

from octavo.loader.base import CheckpointError, Weight, WeightFormat
from octavo.loader.files import map_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 had 32-bit counts and was gone within weeks
DEFAULT_ALIGNMENT = 32
MAX_KEY = 65535  # bytes, from the specification
MAX_TENSOR_NAME = 64  # bytes, from the specification
MAX_DIMENSIONS = 4
MAX_ENTRIES = 1 << 16  # keys, tensors, arrays in arrays: far above any known file
MAX_ARRAY_DEPTH = 4  # known keys have no arrays in arrays at all

# Elements and bytes of a block of each format that can be served.
BLOCKS: dict[WeightFormat, tuple[int, int]] = {
    WeightFormat.F32: (1, 4),
    WeightFormat.F16: (1, 2),
    WeightFormat.BF16: (1, 2),
    WeightFormat.Q4_0: (32, 18),
    WeightFormat.Q4_1: (32, 20),
    WeightFormat.Q5_0: (32, 22),
    WeightFormat.Q5_1: (32, 24),
    WeightFormat.Q8_0: (32, 34),
    WeightFormat.Q4_K: (256, 144),
    WeightFormat.Q5_K: (256, 176),
    WeightFormat.Q6_K: (256, 210),
    WeightFormat.Q2_K: (256, 84),
    WeightFormat.Q3_K: (256, 110),
    WeightFormat.IQ4_NL: (32, 18),
    WeightFormat.IQ4_XS: (256, 136),
    WeightFormat.MXFP4: (32, 17),
    WeightFormat.IQ1_S: (256, 50),
    WeightFormat.IQ1_M: (256, 56),
    WeightFormat.IQ2_XXS: (256, 66),
    WeightFormat.IQ2_XS: (256, 74),
    WeightFormat.IQ2_S: (256, 82),
    WeightFormat.IQ3_XXS: (256, 98),
    WeightFormat.IQ3_S: (256, 110),
    WeightFormat.TQ1_0: (256, 54),
    WeightFormat.TQ2_0: (256, 66),
}

# ggml type numbers that exist but cannot be served, so that the refusal can name them.
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip

_U32 = Struct("<I")
_U64 = Struct("<Q")
_HEADER = Struct("<4sIQQ")
_UINT8, _INT8, _UINT16, _INT16, _UINT32, _INT32, _FLOAT32, _BOOL = range(8)
_STRING, _ARRAY, _UINT64, _INT64, _FLOAT64 = range(8, 13)
_DTYPES: dict[int, np.dtype[np.generic]] = {
    code: np.dtype(name)
    for code, name in (
        (_UINT8, "<u1"),
        (_INT8, "<i1"),
        (_UINT16, "<u2"),
        (_INT16, "<i2"),
        (_UINT32, "<u4"),
        (_INT32, "<i4"),
        (_FLOAT32, "<f4"),
        (_BOOL, "<u1"),
        (_UINT64, "<u8"),
        (_INT64, "<i8"),
        (_FLOAT64, "<f8"),
    )
}
_SCALARS = {code: Struct("<" + dtype.char) for code, dtype in _DTYPES.items()} | {
    _UINT64: _U64,
    _INT64: Struct("<q"),
}
# The fewest bytes an array element of a type can take, to bound counts before a loop.
_LEAST = {code: dtype.itemsize for code, dtype in _DTYPES.items()} | {_STRING: 8, _ARRAY: 12}


class StringArray:
    """An array of strings inside the mapped file, decoded only when asked for."""

    def __init__(self, path: Path, key: str, data: mmap.mmap, edges: array[int]) -> None:
        """String i is what follows the 8 bytes of length at edges[i], up to edges[i + 1]."""
        self._path, self._key, self._data, self._edges = path, key, data, edges

    def __len__(self) -> int:
        return len(self._edges) - 1

    def text(self) -> list[str]:
        """All strings. Raises `CheckpointError` if one is not UTF-8."""
        data, edges = self._data, self._edges
        try:
            return [data[a + 8 : b].decode() for a, b in pairwise(edges)]
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self._path}: {self._key} holds a string that is not UTF-8"
            ) from None


Array = npt.NDArray[np.generic] | StringArray | list[object]
Value = int | float | bool | str | Array
T = TypeVar("T", int, float, bool, str)


class GgufTensorInfo(NamedTuple):
    """Where a tensor lies. ``shape`` is outermost first; ``offset`` is from the file's start."""

    format: WeightFormat
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufFile:
    """A checked and mapped GGUF file. Any fault raises `CheckpointError` with file and reason."""

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path, _HEADER.size, "GGUF")
        self._size = len(self._data)
        self._bytes = np.frombuffer(self._data, dtype=np.uint8)
        self.notes: list[str] = []  # what loading decided, to be said to whoever loads
        self._arrays = 0  # in arrays, so far
        self._others: list[GgufFile] = []  # of the same model
        self._holders: dict[str, GgufFile] = {}  # of the tensors in those
        try:
            self._parse()
        except StructError:
            self.fail("the header ends in the middle of a field")

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {reason}")

    # ── Access ──────────────────────────────────────────────────────────────────────────────────

    def weight(self, name: str) -> Weight:
        info = self.tensors[name]
        data = self._holders.get(name, self)._bytes[info.offset : info.offset + info.nbytes]
        return Weight(name, info.format, info.shape, data)

    def adopt(self, other: GgufFile) -> None:
        """Takes the tensors of another file of the same model for its own."""
        for name, info in other.tensors.items():
            if name in self.tensors:
                holder = self._holders.get(name, self)
                other.fail(f"tensor {name!r} is in {holder.path.name} already")
            self.tensors[name] = info
            self._holders[name] = other
        self._others.append(other)

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: None) -> T | None: ...
    def get(self, key: str, kind: type[T], default: object = ...) -> object:
        """A scalar of the given kind; any integer width serves as int, an integer as float."""
        if key not in self.metadata:
            if default is ...:
                self.fail(f"metadata key {key} is missing")
            return default
        value = self.metadata[key]
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            self.fail(f"metadata key {key} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def strings(self, key: str) -> StringArray | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, StringArray):
            self.fail(f"metadata key {key} is not an array of strings")
        return value

    def numbers(self, key: str) -> npt.NDArray[np.generic] | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, np.ndarray):
            self.fail(f"metadata key {key} is not an array of numbers")
        return value

    def release(self) -> None:
        """Takes the pages out of this process's memory; they are read again when used."""
        for file in (self, *self._others):
            file._data.madvise(mmap.MADV_DONTNEED)

    @property
    def nbytes(self) -> int:
        """The bytes of this file and of those whose tensors it has taken."""
        return sum(file._size for file in (self, *self._others))

    # ── Parsing ─────────────────────────────────────────────────────────────────────────────────

    def _parse(self) -> None:
        magic, version, num_tensors, num_keys = _HEADER.unpack_from(self._data)
        if magic != MAGIC:
            self.fail(f"starts with {magic!r}, not with the magic {MAGIC!r} of a GGUF file")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
                self.fail("is big-endian, which is not supported")
            self.fail(f"is GGUF version {version}; supported are 2 and 3")
        self.version = version
        pos = self._parse_metadata(_HEADER.size, num_keys)
        self.alignment = self.get("general.alignment", int, DEFAULT_ALIGNMENT)
        if not 8 <= self.alignment <= 1 << 16 or self.alignment & (self.alignment - 1):
            self.fail(
                f"general.alignment is {self.alignment}, not a power of two from 8 to {1 << 16}"
            )
        self._parse_tensors(pos, num_tensors)

    def _check_count(self, count: int, least: int, pos: int, what: str) -> None:
        """Before looping: entries take at least so many bytes, and objects in memory besides."""
        if count * least > self._size - pos:
            self.fail(
                f"declares {count} {what}, more than the file has room for: truncated download?"
            )
        if count > MAX_ENTRIES:
            self.fail(f"declares {count} {what}, more than {MAX_ENTRIES}")

    def _parse_metadata(self, pos: int, count: int) -> int:
        self._check_count(count, 14, pos, "metadata keys")  # a key of one byte and a value of one
        self.metadata = {}
        for index in range(count):
            what = f"metadata key {index}"
            key, pos = self._string(pos, what, MAX_KEY)
            if not key:
                self.fail(f"{what} is empty")
            if key in self.metadata:
                self.fail(f"metadata key {key!r} appears twice")
            (kind,) = _U32.unpack_from(self._data, pos)
            self.metadata[key], pos = self._value(pos + 4, kind, key)
        return pos

    def _value(self, pos: int, kind: int, key: str) -> tuple[Value, int]:
        if kind == _STRING:
            return self._string(pos, f"the value of {key}")
        if kind == _ARRAY:
            return self._array(pos, key, 1)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            self.fail(f"metadata key {key!r} has the unknown value type {kind}")
        (value,) = scalar.unpack_from(self._data, pos)
        if kind == _BOOL:
            if value > 1:
                self.fail(f"metadata key {key!r} is a bool of value {value}")
            value = bool(value)
        return value, pos + scalar.size

    def _string(self, pos: int, what: str, limit: int | None = None) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self._data, pos)
        pos += 8
        if length > self._size - pos:
            self.fail(f"{what} declares {length} bytes; only {self._size - pos} follow")
        if limit is not None and length > limit:
            self.fail(f"{what} has {length} bytes, more than {limit}")
        try:
            return self._data[pos : pos + length].decode(), pos + length
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def _array(self, pos: int, key: str, depth: int) -> tuple[Array, int]:
        (kind,) = _U32.unpack_from(self._data, pos)
        (count,) = _U64.unpack_from(self._data, pos + 4)
        pos += 12
        if kind not in _LEAST:
            self.fail(f"metadata key {key!r} is an array of the unknown type {kind}")
        if count * _LEAST[kind] > self._size - pos:
            self.fail(
                f"metadata key {key!r} declares an array of {count} elements, "
                f"more than the remaining {self._size - pos} bytes can hold: truncated download?"
            )
        if kind == _STRING:
            return self._string_array(pos, key, count)
        if kind == _ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                self.fail(f"metadata key {key!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
            self._arrays += count
            self._check_count(self._arrays, 0, pos, "arrays in arrays")
            nested: list[object] = []
            for _ in range(count):
                inner, pos = self._array(pos, key, depth + 1)
                nested.append(inner)
            return nested, pos
        dtype = _DTYPES[kind]
        end = pos + count * dtype.itemsize
        # A copy: elements in the file need not be aligned, and an array outlives few bytes.
        array = np.frombuffer(self._data, dtype=dtype, count=count, offset=pos).copy()
        if kind == _BOOL:
            if (array > 1).any():
                self.fail(f"metadata key {key!r} is an array of bools with other values in it")
            array = array.astype(np.bool_)
        return array, end

    def _string_array(self, pos: int, key: str, count: int) -> tuple[StringArray, int]:
        data, size = self._data, self._size
        unpack = _U64.unpack_from
        edges = array("q", [pos])  # a quarter of what a list takes, as long as the file is open
        for index in range(count):
            (length,) = unpack(data, pos)
            pos += 8 + length
            if pos > size:
                self.fail(
                    f"element {index} of {key} declares {length} bytes; "
                    f"only {size - pos + length} follow"
                )
            edges.append(pos)
        return StringArray(self.path, key, data, edges), pos

    def _parse_tensors(self, pos: int, count: int) -> None:
        self._check_count(count, 33, pos, "tensors")  # a name of one byte and one dimension
        self.tensors = {}
        for index in range(count):
            name, pos = self._string(pos, f"the name of tensor {index}", MAX_TENSOR_NAME)
            if not name:
                self.fail(f"the name of tensor {index} is empty")
            if name in self.tensors:
                self.fail(f"tensor {name!r} appears twice")
            info, pos = self._tensor(pos, name)
            self.tensors[name] = info
        start = -(-pos // self.alignment) * self.alignment
        end, last = start, "the header"
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            info = info._replace(offset=start + info.offset)
            if info.offset < end:
                self.fail(f"tensor {name!r} overlaps {last}")
            end, last = info.offset + info.nbytes, f"tensor {name!r}"
            if end > self._size:
                self.fail(
                    f"tensor {name!r} ends at byte {end}, past the file's {self._size}: "
                    "truncated download?"
                )
            self.tensors[name] = info

    def _tensor(self, pos: int, name: str) -> tuple[GgufTensorInfo, int]:
        (rank,) = _U32.unpack_from(self._data, pos)
        pos += 4
        if not 1 <= rank <= MAX_DIMENSIONS:
            self.fail(f"tensor {name!r} has {rank} dimensions, not 1 to {MAX_DIMENSIONS}")
        dims = Struct(f"<{rank}Q").unpack_from(self._data, pos)
        pos += 8 * rank
        if 0 in dims:
            self.fail(f"tensor {name!r} has a dimension of zero: {list(dims)}")
        (kind,) = _U32.unpack_from(self._data, pos)
        (offset,) = _U64.unpack_from(self._data, pos + 4)
        pos += 12
        if kind not in BLOCKS:
            supported = ", ".join(format.name for format in BLOCKS)
            named = _OTHER_TYPES.get(kind, f"unknown ({kind})")
            self.fail(
                f"tensor {name!r} is of type {named}, which is not supported; "
                f"supported are {supported}"
            )
        format = WeightFormat(kind)
        elements, block_bytes = BLOCKS[format]
        if dims[0] % elements:
            self.fail(
                f"tensor {name!r} has rows of {dims[0]} elements, not whole blocks of "
                f"{elements} as {format.name} needs"
            )
        nbytes = prod(dims) // elements * block_bytes
        if nbytes > self._size or offset > self._size:
            self.fail(
                f"tensor {name!r} declares {nbytes} bytes at offset {offset}, "
                f"more than the file's {self._size}: truncated download?"
            )
        if offset % self.alignment:
            self.fail(
                f"tensor {name!r} lies at offset {offset}, not a multiple of the alignment "
                f"{self.alignment}"
            )
        return GgufTensorInfo(format, tuple(reversed(dims)), offset, nbytes), pos
