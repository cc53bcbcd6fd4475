"""Records gguf_rounded.npz: rows of floats and what the gguf package rounds them to.

    python tests/kernels/record_rounded.py        (needs the gguf package)

Among the rows: ties, zeros, one number of a block far larger than the rest, all of one sign, and
magnitudes from the smallest normal fp16 scale to the largest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

FORMATS = ("Q4_0", "Q4_1", "Q8_0")


def rows() -> np.ndarray:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((48, 128)).astype(np.float32)
    x[8:16] = rng.integers(-8, 9, (8, 128)) / 2
    x[16:20, ::32] *= 100
    x[20:24] = np.abs(x[20:24])
    x[24:28] = -np.abs(x[24:28])
    x[28, :64] = 0
    x[32:40] *= np.logspace(-3, 4, 8)[:, None]
    return x


if __name__ == "__main__":
    x = rows()
    rounded = {name: quantize(x, getattr(GGMLQuantizationType, name)) for name in FORMATS}
    np.savez_compressed(Path(__file__).with_name("gguf_rounded.npz"), x=x, **rounded)
