"""Records what ggml's own reference rounds matrices to: ggml_rounding.npz.

python tests/tools/quantize/record_ggml_rounding.py      # gguf 0.19 (https://pypi.org/project/gguf)
"""

from pathlib import Path

import gguf
import numpy as np

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def cases() -> np.ndarray:
    """Rows of normal numbers of several sizes, halves, equal ones, one-sided ones and zeros."""
    rng = np.random.default_rng(4)
    normal = rng.normal(size=(24, 96)) * np.exp(rng.normal(size=(24, 3)) * 2).repeat(32, axis=1)
    halves = rng.integers(-30, 31, (8, 96)) / 2.0
    halves[:, ::32] = 8.0
    special = np.zeros((4, 96))
    special[1] = 0.3
    special[2] = np.abs(rng.normal(size=96)) + 1.0
    special[3, 40] = -1e-6
    return np.concatenate([normal, halves, special]).astype(np.float32)


def main() -> None:
    values = cases()
    arrays = {"values": values}
    for name in FORMATS:
        kind = gguf.GGMLQuantizationType[name]
        arrays[name] = gguf.quants.quantize(values, kind)
    np.savez_compressed(Path(__file__).with_name("ggml_rounding.npz"), **arrays)


if __name__ == "__main__":
    main()
