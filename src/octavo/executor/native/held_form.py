"""What the native executor holds of a matrix that its kernels do not read as the file has it.

GGUF's formats of grid points become codes of 3 or 4 bits into a table of numbers, with the scales
they had (T3 and T4, kernels/linear.h), and ternary numbers become integers of 2 bits. Nothing is
lost; more memory is taken than the file has, which is the price of reading it at the speed of other
formats: looking points up, 8 numbers at a time and 16 outputs side by side, is not.
"""

from __future__ import annotations

import numpy as np

from octavo.loader.base import Bytes, MadeRows, Weight, WeightFormat
from octavo.loader.dequantize import ternary_blocks
from octavo.loader.grid_formats import BLOCK, GRID_FORMATS, Words
from octavo.loader.grouped import Parts, made_rows, pack

_TABLES = {
    WeightFormat.IQ1_S: WeightFormat.T3_IQ1,
    WeightFormat.IQ1_M: WeightFormat.T3_IQ1,
    WeightFormat.IQ2_XXS: WeightFormat.T3_IQ2,
    WeightFormat.IQ2_XS: WeightFormat.T3_IQ2,
    WeightFormat.IQ2_S: WeightFormat.T3_IQ2,
    WeightFormat.IQ3_XXS: WeightFormat.T4_IQ3_XXS,
    WeightFormat.IQ3_S: WeightFormat.T4_IQ3_S,
}
_TERNARY = (WeightFormat.TQ1_0, WeightFormat.TQ2_0)
_T3_BYTES, _T4_BYTES = 106, 138  # a block
_CHUNK_BLOCKS = 2048  # converted at a time: what is made on the way stays in caches


def held_format(format: WeightFormat) -> WeightFormat:
    """Return the format in which kernels read a matrix of this one."""
    return WeightFormat.I2 if format in _TERNARY else _TABLES.get(format, format)


def held_form(weight: Weight) -> Weight:
    """Return the weight as it is packed: itself, or rows that are made of its own when asked for.

    Needs the bytes of the rows that are asked for only.
    """
    if weight.format in _TERNARY:
        return _ternary(weight)
    if weight.format in _TABLES:
        return _coded(weight)
    return weight


def _coded(weight: Weight) -> Weight:
    grid = GRID_FORMATS[weight.format]
    three = grid.code_bits == 3
    rows, columns = weight.shape
    size = _T3_BYTES if three else _T4_BYTES

    def make(first: int, last: int) -> Bytes:
        blocks = weight.rows(first, last).reshape(-1, grid.block_bytes)
        made = np.empty((len(blocks), size), np.uint8)
        for begin in range(0, len(blocks), _CHUNK_BLOCKS):
            chunk = slice(begin, begin + _CHUNK_BLOCKS)
            d, scales, words = grid.read(blocks[chunk])
            made[chunk, :2] = d.astype("<f2").view(np.uint8)
            made[chunk, 2:10] = _nibbles(scales) if three else 2 * scales + 1
            made[chunk, 10:] = _stream(words, grid.code_bits)
        return made.reshape(-1)

    return weight._replace(
        format=held_format(weight.format),
        source=MadeRows(rows, columns // BLOCK * size, make),
        stored_as=weight.stored,
    )


def _nibbles(scales: Bytes) -> Bytes:
    """Two scales of 16 numbers in a byte; one of 32 numbers twice."""
    if scales.shape[1] == 8:
        return scales * np.uint8(17)
    return scales[:, ::2] | scales[:, 1::2] << np.uint8(4)


def _stream(words: Words, code_bits: int) -> Bytes:
    """The bytes of words of 24 bits (8 codes of 3) or 16 (4 of 4)."""
    size = 3 if code_bits == 3 else 2
    bytes_of = words.astype("<u4").view(np.uint8).reshape(len(words), -1, 4)
    return np.ascontiguousarray(bytes_of[:, :, :size]).reshape(len(words), -1)


def _ternary(weight: Weight) -> Weight:
    rows, columns = weight.shape

    def parts(first: int, last: int) -> Parts:
        blocks = weight.rows(first, last)
        d, numbers = ternary_blocks(weight.format, blocks)
        scales = d.reshape(last - first, -1)
        return scales, np.ones(scales.shape, np.uint8), pack(numbers.reshape(last - first, -1), 2)

    return weight._replace(
        format=held_format(weight.format),
        source=made_rows(rows, columns, 2, BLOCK, parts),
        group=BLOCK,
        stored_as=weight.stored,
    )
