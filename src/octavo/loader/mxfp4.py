"""Matrices in MXFP4 as Hugging Face folders store them (OCP Microscaling Formats, 2023), in ggml's
form: the same numbers in another order.

32 inputs share a scale, a power of two (E8M0). Of a block's 16 bytes, byte j has the numbers 2j and
2j + 1 (low bits first) here, and j and j + 16 in ggml's, where the scale's byte stands before them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.loader.base import MadeRows, Stored, Weight, WeightFormat

BLOCK = 32  # inputs
_HALF = BLOCK // 2

_Bytes = npt.NDArray[np.uint8]


def mxfp4(name: str, blocks: _Bytes, scales: _Bytes) -> Weight:
    """Return the matrix [rows, in] of ``blocks`` [rows, in / 32, 16] and ``scales`` [rows, in /
    32], its rows made when they are read.
    """
    rows, count = scales.shape

    def make(first: int, last: int) -> _Bytes:
        packed = blocks[first:last]
        numbers = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
        numbers = numbers.reshape(*packed.shape[:2], BLOCK)
        codes = numbers[..., :_HALF] | numbers[..., _HALF:] << np.uint8(4)
        return np.concatenate([scales[first:last, :, None], codes], axis=-1).reshape(-1)

    source = MadeRows(rows, count * (1 + _HALF), make)
    stored = Stored("MXFP4", blocks.nbytes + scales.nbytes)
    return Weight(name, WeightFormat.MXFP4, (rows, count * BLOCK), source, stored_as=stored)
