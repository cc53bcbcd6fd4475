"""Records how the gguf package reads blocks of every format: random bytes and their numbers.

Run by hand, in an environment with gguf (0.19), when a format is added:

    python tests/kernels/record_blocks.py

Writes gguf_blocks.npz beside this file: for each format ``NAME_bytes`` uint8 [3, bytes of a row]
and ``NAME_values`` float32 [3, 512].
"""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

ROWS, K = 3, 512
FORMATS = [
    *(Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q4_K, Q.Q5_K, Q.Q6_K),
    *(Q.Q2_K, Q.Q3_K, Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4),
    *(Q.IQ1_S, Q.IQ1_M, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S, Q.TQ1_0, Q.TQ2_0),
]
# Byte offsets of the fp16 factors within a block: random bits there would often be NaN.
HALVES = {Q.Q4_1: [0, 2], Q.Q5_1: [0, 2], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208]}
HALVES |= {Q.Q2_K: [80, 82], Q.Q3_K: [108], Q.TQ1_0: [52], Q.TQ2_0: [64]}


def blocks(format: Q, rng: np.random.Generator) -> np.ndarray:
    values, size = gguf.GGML_QUANT_SIZES[format]
    if format in (Q.F32, Q.F16):
        dtype = np.float32 if format == Q.F32 else np.float16
        return rng.standard_normal((ROWS, K)).astype(dtype).view(np.uint8)
    if format == Q.BF16:
        high = rng.standard_normal((ROWS, K)).astype(np.float32).view(np.uint32) >> 16
        return high.astype(np.uint16).view(np.uint8)
    out = rng.integers(0, 256, (ROWS, K // values, size), dtype=np.uint8)
    if format == Q.MXFP4:  # a power of two: of every size, though some sums would overflow
        out[:, :, 0] = rng.integers(100, 128, out.shape[:2])
        out[0, :4, 0] = 0, 1, 2, 200
        return out.reshape(ROWS, -1)
    for at in HALVES.get(format, [0]):
        half = rng.standard_normal((ROWS, K // values, 1)).astype(np.float16) / 64
        half[0, 0] = 3e-7  # subnormal
        out[:, :, at : at + 2] = half.astype(np.float16).view(np.uint8)
    if format == Q.IQ1_M:  # the factor's nibbles lie above the scales
        factor = out[:, :, :2].copy().view(np.uint16)
        scales = out[:, :, 48:56].view(np.uint16)
        scales[...] = (scales & 0xFFF) | (factor >> np.arange(0, 16, 4, dtype=np.uint16) & 15) << 12
    return out.reshape(ROWS, -1)


def main() -> None:
    rng = np.random.default_rng(20261129)
    arrays: dict[str, np.ndarray] = {}
    for format in FORMATS:
        data = blocks(format, rng)
        arrays[f"{format.name}_bytes"] = data
        arrays[f"{format.name}_values"] = gguf.quants.dequantize(data, format).astype(np.float32)
    np.savez_compressed(Path(__file__).with_name("gguf_blocks.npz"), **arrays)


if __name__ == "__main__":
    main()
