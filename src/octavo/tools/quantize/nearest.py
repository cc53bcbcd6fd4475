"""Matrices rounded to the nearest numbers of a scheme, each weight by itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.loader.base import Weight
from octavo.loader.dequantize import dequantize
from octavo.tools.quantize.ggml_rounding import ggml_round
from octavo.tools.quantize.grid import Float32, Quantized, Scheme, round_to_nearest

_CHUNK = 1 << 24  # weights that are in fp32 at a time


def nearest(scheme: Scheme, weights: Float32) -> Quantized:
    """A matrix [out, in]. GGUF's blocks are ggml's own, to the last bit."""
    if scheme.kind.of_gguf:
        return ggml_round(scheme, weights)
    return round_to_nearest(scheme, weights)


def nearest_stored(scheme: Scheme, weight: Weight) -> Quantized:
    """The same of a stored matrix."""
    return stacked([nearest(scheme, rows) for rows in in_pieces(weight)])


def in_pieces(weight: Weight) -> Iterator[Float32]:
    """A stored matrix, some rows at a time: an embedding may be most of a model."""
    rows, inputs = weight.shape
    step = max(1, _CHUNK // inputs)
    for first in range(0, rows, step):
        yield dequantize(weight, first, min(first + step, rows))


def stacked(parts: list[Quantized]) -> Quantized:
    """Matrices of one input and scheme, one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    zeros = [part.zero for part in parts if part.zero is not None]
    lows = [part.low for part in parts if part.low is not None]
    return Quantized(
        first.scheme,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.step for part in parts]),
        np.concatenate(zeros) if zeros else None,
        np.concatenate(lows) if lows else None,
        first.group_of,
    )
