"""Records how the gguf package reads blocks that are packed here, and how well ggml quantizes.

    PYTHONPATH=src:tests python tests/tools/quantize/record_k_quants.py LIBGGML

In an environment with gguf (0.19, https://pypi.org/project/gguf) and the numpy of Octavo, LIBGGML
being llama.cpp's libggml-base.so. Writes k_quants.npz beside this file: for each format
``NAME_bytes`` uint8 [blocks, bytes] of `fits`, what gguf reads there, ``NAME_values`` [blocks,
weights], and ``NAME_errors`` [2], the weighted squared errors of ggml's quantizer on `case`,
without and with importances.
"""

import ctypes
import sys
from pathlib import Path

import gguf
import numpy as np

from octavo.loader.base import WeightFormat
from octavo.tools.quantize.k_quants import pack
from tools.quantize.block_cases import SHAPES, case, error, fits


def main() -> None:
    ggml = ctypes.CDLL(sys.argv[1])
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, *[count] * 3, pointer]
    arrays = {}
    weights, importance = case()
    for name in SHAPES:
        kind = gguf.GGMLQuantizationType[name]
        data = pack(WeightFormat[name], fits(name))
        arrays[f"{name}_bytes"] = data
        arrays[f"{name}_values"] = gguf.quants.dequantize(data, kind).astype(np.float32)
        errors = []
        for each in (None, importance):
            per, size = gguf.GGML_QUANT_SIZES[kind]
            out = np.zeros((len(weights), weights.shape[1] // per * size), np.uint8)
            own = None if each is None else each.ctypes.data
            ggml.ggml_quantize_chunk(
                int(kind), weights.ctypes.data, out.ctypes.data, 0, *weights.shape, own
            )
            errors.append(error(weights, gguf.quants.dequantize(out, kind), each))
        arrays[f"{name}_errors"] = np.array(errors)
    np.savez_compressed(Path(__file__).with_name("k_quants.npz"), **arrays)


if __name__ == "__main__":
    main()
