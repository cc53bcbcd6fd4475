"""AWQ folders in the layout that AutoAWQ calls GEMM, of 4 bits.

A linear layer of k inputs and n outputs (https://github.com/casper-hansen/AutoAWQ): ``qweight``
int32 [k, n/8], words along outputs; ``qzeros`` int32 [groups, n/8], likewise, the true zeros;
``scales`` [groups, n]. Nibble i of a word, from the lowest, is output 8·word + (0, 2, 4, 6, 1, 3,
5, 7)[i]. w = scale · (number - zero).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Bytes, Quantization, Weight
from octavo.loader.grouped import Parts
from octavo.loader.hf_folder import HfWeights
from octavo.loader.quantized_layout import (
    FLOATS,
    Layout,
    Module,
    QuantizationArgs,
    bits_of,
    sized,
    wide,
)
from octavo.models.section import Section

# Outputs of the low and the high nibbles of a word's four bytes.
_LOW, _HIGH = (0, 4, 1, 5), (2, 6, 3, 7)


class Awq(Layout):
    markers = frozenset({"qweight", "qzeros"})
    parts = frozenset({"qweight", "qzeros", "scales"})
    scales = "scales"

    def __init__(self, stored: HfWeights, keys: Section) -> None:
        layout = keys.text("version", keys.text("checkpoint_format", "gemm")).lower()
        if layout != "gemm":
            keys.fail(f"version {layout!r} is not supported, only gemm")
        old = keys.values.get("bits") is None  # AutoAWQ's own names
        bits = bits_of(keys, "w_bit" if old else "bits", (4,))
        old = keys.values.get("group_size") is None
        self.group = sized(keys, "q_group_size" if old else "group_size")
        symmetric = not keys.flag("zero_point", True)
        super().__init__(
            stored,
            Quantization(
                keys.text("quant_method", "awq"), layout, (bits,), (self.group,), symmetric, False
            ),
        )

    def weight(self, module: Module, n: int, k: int) -> Weight:
        qweight = self.array(module, "qweight", "I32")
        if n % 8 or k % 2 or qweight.shape != (k, n // 8):
            self.refuse_shape(module, "qweight", f"[inputs, outputs/8] of [{n}, {k}]")
        group = self.group_of(module, "qweight", self.group, k)
        groups = -(-k // group)
        scales = self.shaped(module, "scales", (groups, n), *FLOATS)
        qzeros = self.shaped(module, "qzeros", (groups, n // 8), "I32")

        def parts(first: int, last: int) -> Parts:
            begin, end = first // 8, -(-last // 8)
            zeros = _outputs(qzeros[:, begin:end])[first - 8 * begin :]
            words = np.ascontiguousarray(qweight[:, begin:end])
            octets = words.view(np.uint8).reshape(k, end - begin, 4)
            even, odd = octets[0::2], octets[1::2]  # inputs, which share the bytes of a stream
            streams = np.empty((end - begin, 8, k // 2), np.uint8)
            streams[:, _LOW] = (even & 15 | odd << 4).transpose(1, 2, 0)
            streams[:, _HIGH] = (even >> 4 | odd & 240).transpose(1, 2, 0)
            chosen = streams.reshape(-1, k // 2)[first - 8 * begin : last - 8 * begin]
            return wide(scales[:, first:last]).T, zeros[: last - first], chosen

        return self.grouped(module, "qweight", (n, k), QuantizationArgs(4, group), parts)


def _outputs(words: npt.NDArray[Any]) -> Bytes:
    """[outputs, rows] nibbles of [rows, outputs/8] words."""
    rows, count = words.shape
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(rows, count, 4)
    numbers = np.empty((count, 8, rows), np.uint8)
    numbers[:, _LOW] = (octets & 15).transpose(1, 2, 0)
    numbers[:, _HIGH] = (octets >> 4).transpose(1, 2, 0)
    return numbers.reshape(-1, rows)
