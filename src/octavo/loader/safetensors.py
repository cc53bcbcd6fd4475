"""Reads safetensors files without trusting a byte of them, and without copying any.

Layout, from the format's specification (safetensors repository, README): 8 bytes of header length
(little-endian), a JSON object that gives every tensor's dtype, shape and ``data_offsets`` into the
bytes that follow, then those bytes, which the tensors cover without gap or overlap. The file is
mapped and tensors are views: opening costs the header only. (The `safetensors` package hands numpy
callers copies, and bfloat16 to nobody without a framework.)
"""

from __future__ import annotations

import mmap
from collections.abc import Collection
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from octavo.loader.base import CheckpointError, Weight, WeightFormat
from octavo.loader.files import json_object, map_file

MAX_HEADER = 32 << 20  # bytes; the largest known, of tens of thousands of tensors, has a few
MAX_DIMENSIONS = 8
FORMATS = {"F32": WeightFormat.F32, "F16": WeightFormat.F16, "BF16": WeightFormat.BF16}

# What else is read as an array: the parts of quantized matrices.
_NUMPY = {
    "I8": "<i1",
    "U8": "<u1",
    "I32": "<i4",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F8_E4M3": "<u1",
}

# Bits an element takes, of every dtype of the specification.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

_LENGTH = Struct("<Q")


class TensorInfo(NamedTuple):
    """Where a tensor lies: ``begin`` and ``end`` are bytes from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A checked and mapped file. Any fault raises `CheckpointError` with file and reason."""

    path: Path
    tensors: dict[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path, _LENGTH.size + len("{}"), "safetensors")
        self._size = len(self._data)
        self._bytes = np.frombuffer(self._data, dtype=np.uint8)
        self._parse()

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {reason}")

    def weight(self, name: str) -> Weight:
        """Raises `CheckpointError` for a dtype that is not a float's of 16 or 32 bits."""
        info = self.tensors[name]
        if info.dtype not in FORMATS:
            self.fail(
                f"tensor {name!r} is of type {info.dtype}, which is not supported; "
                f"supported are {', '.join(FORMATS)}"
            )
        return Weight(name, FORMATS[info.dtype], info.shape, self._data_of(info))

    def array(self, name: str, dtypes: Collection[str]) -> npt.NDArray[Any]:
        """A read-only view. BF16 comes as its bits, "<u2", F8_E4M3 as its bytes. Raises
        `CheckpointError` for a dtype that is none of ``dtypes``.
        """
        info = self.tensors[name]
        if info.dtype not in dtypes:
            self.fail(f"tensor {name!r} is of type {info.dtype}, not {' or '.join(dtypes)}")
        return self._data_of(info).view(_NUMPY.get(info.dtype, "<u2")).reshape(info.shape)

    def _data_of(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        data = self._bytes[info.begin : info.end]
        if info.begin % (_BITS[info.dtype] // 8):
            data = data.copy()  # the specification does not ask for alignment; old files have none
            data.flags.writeable = False
        return data

    def release(self) -> None:
        """Takes the file's pages out of this process's memory; they are read again when used."""
        self._data.madvise(mmap.MADV_DONTNEED)

    def _parse(self) -> None:
        (length,) = _LENGTH.unpack_from(self._data)
        if length > MAX_HEADER:
            self.fail(
                f"declares a header of {length} bytes, more than {MAX_HEADER}: "
                "not a safetensors file, or a damaged one"
            )
        if length > self._size - _LENGTH.size:
            self.fail(
                f"declares a header of {length} bytes; only {self._size - _LENGTH.size} follow: "
                "truncated download?"
            )
        start = _LENGTH.size + length
        header = json_object(self.path, self._data[_LENGTH.size : start], "the header ")
        metadata = header.pop("__metadata__", None)
        if metadata is not None and not (
            isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
        ):
            self.fail("the header's __metadata__ is not an object of strings")
        self.tensors = {name: self._tensor(name, value, start) for name, value in header.items()}
        end, last = start, "the header"
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1][2:]):
            if info.begin < end:
                self.fail(f"tensor {name!r} overlaps {last}")
            if info.begin > end:
                self.fail(f"{info.begin - end} bytes before tensor {name!r} belong to no tensor")
            end, last = info.end, f"tensor {name!r}"
        if end != self._size:
            self.fail(f"{self._size - end} bytes after {last} belong to no tensor")

    def _tensor(self, name: str, entry: Any, start: int) -> TensorInfo:
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            self.fail(f"tensor {name!r} is not described by dtype, shape and data_offsets alone")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            self.fail(f"tensor {name!r} is of the unknown type {dtype!r}")
        if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
            self.fail(f"tensor {name!r} has the shape {_shown(shape)}")
        if not _counts(offsets) or len(offsets) != 2:
            self.fail(f"tensor {name!r} has the data_offsets {_shown(offsets)}")
        begin, end = offsets
        room = self._size - start
        if not begin <= end <= room:
            self.fail(
                f"tensor {name!r} lies at bytes {begin} to {end} of {room}: truncated download?"
            )
        # Bounded before it is multiplied out: a product of huge dimensions costs time.
        bits = 0 if 0 in shape else _BITS[dtype]
        for count in shape:
            if bits > 8 * room:
                break
            bits *= count
        if bits != 8 * (end - begin):
            self.fail(
                f"tensor {name!r} of type {dtype} and shape {_shown(shape)} does not take the "
                f"{end - begin} bytes it is given"
            )
        return TensorInfo(dtype, tuple(shape), start + begin, start + end)


def _counts(value: Any) -> bool:
    """Whether a JSON value is a list of integers from 0."""
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
