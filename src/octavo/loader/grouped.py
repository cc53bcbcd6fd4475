"""Rows of the grouped formats (`Weight`), made of what other layouts store: scales, zeros and
numbers of b bits.

Numbers lie in a row as a stream of bits, lowest first, which is also how the 32-bit words of GPTQ
and compressed-tensors run on along inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Bytes, MadeRows, WeightFormat

FORMATS = {2: WeightFormat.I2, 3: WeightFormat.I3, 4: WeightFormat.I4, 8: WeightFormat.I8}

_CHUNK = 128  # rows converted at a time: what is made on the way stays in the processor's caches

# Scales, zeros and numbers (as streams) of rows first to last:
# fp32 [rows, groups], [rows, groups], [rows, stream_bytes].
Parts = tuple[npt.NDArray[np.float32], Bytes, Bytes]


def stream_bytes(bits: int, k: int) -> int:
    """Return the bytes of ``k`` numbers."""
    return -(-k * bits // 8)


def made_rows(
    n: int, k: int, bits: int, group: int, parts: Callable[[int, int], Parts]
) -> MadeRows:
    """Rows of an [n, k] matrix whose ``parts`` are given for up to a few rows at a time."""
    groups = -(-k // group)
    row_bytes = 5 * groups + stream_bytes(bits, k)

    def make(first: int, last: int) -> Bytes:
        rows = np.empty((last - first, row_bytes), np.uint8)
        for begin in range(first, last, _CHUNK):
            end = min(begin + _CHUNK, last)
            scales, zeros, streams = parts(begin, end)
            chunk = rows[begin - first : end - first]
            chunk[:, : 4 * groups] = np.ascontiguousarray(scales, "<f4").view(np.uint8)
            chunk[:, 4 * groups : 5 * groups] = zeros
            chunk[:, 5 * groups :] = streams
        return rows.reshape(-1)

    return MadeRows(n, row_bytes, make)


def unpack(streams: Bytes, bits: int, count: int) -> Bytes:
    """[rows, count] numbers of [rows, bytes] streams."""
    rows, size = streams.shape
    if bits == 8:
        return streams[:, :count]
    if bits == 4:
        numbers = np.empty((rows, 2 * size), np.uint8)
        np.bitwise_and(streams, 15, out=numbers[:, ::2])
        np.right_shift(streams, 4, out=numbers[:, 1::2])
        return numbers[:, :count]
    if bits == 2:
        fours = streams[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)
        return fours.reshape(rows, -1)[:, :count]
    # Eight numbers of three bits are three bytes.
    octets = -(-count // 8)
    padded = np.zeros((rows, octets, 3), np.uint32)
    padded.reshape(rows, -1)[:, : min(size, 3 * octets)] = streams[:, : 3 * octets]
    words = padded[..., 0] | padded[..., 1] << 8 | padded[..., 2] << 16
    shifts = np.arange(0, 24, 3, dtype=np.uint32)
    return (words[..., None] >> shifts & 7).astype(np.uint8).reshape(rows, -1)[:, :count]


def pack(numbers: Bytes, bits: int) -> Bytes:
    """[rows, bytes] streams of [rows, count] numbers below 2^bits."""
    rows, count = numbers.shape
    if bits == 8:
        return numbers
    if count % 8:
        numbers = np.pad(numbers, ((0, 0), (0, -count % 8)))
    if bits == 4:
        streams = numbers[:, ::2] | numbers[:, 1::2] << np.uint8(4)
    elif bits == 2:
        fours = numbers.reshape(rows, -1, 4) << np.arange(0, 8, 2, dtype=np.uint8)
        streams = np.bitwise_or.reduce(fours, axis=2)
    else:
        octets = numbers.reshape(rows, -1, 8).astype(np.uint32)
        words = (octets << np.arange(0, 24, 3, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
        parts = [(words >> shift).astype(np.uint8) for shift in (0, 8, 16)]
        streams = np.stack(parts, axis=2).reshape(rows, -1)
    size = stream_bytes(bits, count)
    return streams[:, :size]


def reorder(streams: Bytes, bits: int, order: npt.NDArray[np.int32]) -> Bytes:
    """Streams whose number i is the given ones' number order[i]."""
    return pack(np.take(unpack(streams, bits, len(order)), order, axis=1), bits)


def input_order(groups: npt.NDArray[np.int64], group: int) -> npt.NDArray[np.int32] | None:
    """The order that brings the inputs of a group side by side, given each input's group.

    None if they are. Raises `ValueError` unless every group but the last has ``group`` inputs.
    """
    count = -(-len(groups) // group)
    beyond = np.flatnonzero((groups < 0) | (groups >= count))
    if len(beyond):
        where = beyond[0]
        raise ValueError(f"puts input {where} in group {groups[where]}, but has {count} groups")
    expected = np.arange(len(groups)) // group
    if np.array_equal(groups, expected):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], expected):
        raise ValueError(f"does not give every group {group} inputs")
    return order.astype(np.int32)
