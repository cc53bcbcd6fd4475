"""What the bytes of a weight mean, in numpy: the definition that kernels are checked against.

Each format is written down from its specification (ggml's block structures; the grouped formats as
`Weight` says), apart from the C++ that serves it. Products are rounded to fp32 in the order of
ggml's reference, so that both sides agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Weight, WeightFormat
from octavo.loader.grid_formats import GRID_FORMATS

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

# The 16 levels of IQ4_NL and IQ4_XS, and those of MXFP4 (E2M1), doubled.
_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_BITS = {WeightFormat.I2: 2, WeightFormat.I3: 3, WeightFormat.I4: 4, WeightFormat.I8: 8}


def dequantize(weight: Weight, first: int = 0, last: int | None = None) -> Float32:
    """Rows ``first`` to ``last`` of a matrix, [rows, inputs], or of a convolution's weight; or a
    whole vector.

    Inputs of a matrix with an order of its own (`Weight.order`) stand in the activations' order.
    """
    if len(weight.shape) == 1:
        return _floats(weight.format, weight.data)
    last = weight.shape[0] if last is None else last
    inputs = weight.shape[-1]
    data = weight.rows(first, last).reshape(last - first, -1)
    if weight.format.grouped:
        values = _grouped(data, _BITS[weight.format], inputs, weight.group or inputs)
    elif weight.format is WeightFormat.E4M3:
        values = _e4m3(data, inputs, weight.group)
    elif weight.format is WeightFormat.NVFP4:
        values = _nvfp4(data)
    elif weight.format in _FORMATS:
        size, read = _FORMATS[weight.format]
        blocks = np.ascontiguousarray(data).reshape(-1, size)
        values = read(blocks).reshape(len(data), inputs)
    else:
        values = _floats(weight.format, data).reshape(len(data), *weight.shape[1:])
    if weight.order is None:
        return values
    ordered = np.empty_like(values)
    ordered[:, weight.order] = values
    return ordered


def group_scales(weight: Weight, first: int = 0, last: int | None = None) -> Float32 | None:
    """[rows, groups]: how far a step of each group's numbers goes; None for a float format.

    Where a group has a min of its own, or its zero, that is not in it.
    """
    last = weight.shape[0] if last is None else last
    data = np.ascontiguousarray(weight.rows(first, last).reshape(last - first, -1))
    if weight.format.grouped:
        groups = -(-weight.shape[-1] // (weight.group or weight.shape[-1]))
        return np.ascontiguousarray(data[:, : 4 * groups]).view("<f4")
    if weight.format is WeightFormat.NVFP4:
        scale, scales, _ = _nvfp4_parts(data)
        return np.abs(scale * scales / 2)  # steps of E2M1 are halves
    if weight.format not in _FORMATS:
        return None
    blocks = data.reshape(-1, _FORMATS[weight.format][0])
    return np.abs(_SCALES[weight.format](blocks)).reshape(len(data), -1)


# --- floats --------------------------------------------------------------------------------------


def _floats(format: WeightFormat, data: Bytes) -> Float32:
    data = np.ascontiguousarray(data).reshape(-1)
    match format:
        case WeightFormat.F32:
            return data.view("<f4")
        case WeightFormat.F16:
            return data.view("<f2").astype(np.float32)
        case WeightFormat.BF16:
            return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    raise ValueError(f"{format.name} is no format of floats")


def _half(blocks: Bytes, at: int) -> Float32:
    """[blocks, 1]: the fp16 at a byte."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


# --- integers by groups --------------------------------------------------------------------------


def _grouped(rows: Bytes, bits: int, inputs: int, group: int) -> Float32:
    groups = -(-inputs // group)
    scales = np.ascontiguousarray(rows[:, : 4 * groups]).view("<f4")
    zeros = rows[:, 4 * groups : 5 * groups].astype(np.float32)
    stream = rows[:, 5 * groups :]
    if bits == 8:
        numbers = stream[:, :inputs]
    elif bits == 4:
        numbers = np.stack([stream & 15, stream >> 4], axis=2).reshape(len(rows), -1)[:, :inputs]
    else:
        single = np.unpackbits(stream, axis=1, bitorder="little")[:, : bits * inputs]
        numbers = single.reshape(len(rows), inputs, bits) @ (1 << np.arange(bits, dtype=np.uint8))
    of = np.arange(inputs) // group
    values: Float32 = scales[:, of] * (numbers.astype(np.float32) - zeros[:, of])
    return values


# --- fp8 and fp4 ---------------------------------------------------------------------------------

_EXPONENT, _FRACTION = np.divmod(np.arange(128), 8)
_MAGNITUDES = np.where(
    _EXPONENT > 0, np.ldexp(8.0 + _FRACTION, _EXPONENT - 10), np.ldexp(1.0 * _FRACTION, -9)
)
_MAGNITUDES[127] = np.nan
_E4M3: Float32 = np.concatenate([_MAGNITUDES, -_MAGNITUDES]).astype(np.float32)  # by their bytes


def _e4m3(rows: Bytes, inputs: int, group: int) -> Float32:
    groups = -(-inputs // group)
    scales = np.ascontiguousarray(rows[:, : 4 * groups]).view("<f4")
    values: Float32 = scales[:, np.arange(inputs) // group] * _E4M3[rows[:, 4 * groups :]]
    return values


def _nvfp4_parts(rows: Bytes) -> tuple[Float32, Float32, Bytes]:
    """Scale of the row [rows, 1], scales of 16 inputs [rows, groups], codes [rows, inputs]."""
    scale = np.ascontiguousarray(rows[:, :4]).view("<f4")
    blocks = rows[:, 4:].reshape(len(rows), -1, 18)
    pairs = blocks[:, :, 2:]
    codes = np.stack([pairs & 15, pairs >> 4], axis=3).reshape(len(rows), -1)
    return scale, _E4M3[blocks[:, :, :2]].reshape(len(rows), -1), codes


def _nvfp4(rows: Bytes) -> Float32:
    scale, scales, codes = _nvfp4_parts(rows)
    numbers: Float32 = np.repeat(scales, 16, axis=1) * _E2M1[codes] * np.float32(0.5)
    values: Float32 = scale * numbers
    return values


# --- GGUF, blocks of 32 --------------------------------------------------------------------------


def _nibbles(quants: Bytes) -> Bytes:
    """The low nibbles of 16 bytes, then the high ones; any number of such runs."""
    runs = quants.reshape(len(quants), -1, 16)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(quants), -1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """32 bits, each as 0 or 16."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: Bytes) -> Float32:
    return _half(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Float32:
    return _half(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _q5_0(b: Bytes) -> Float32:
    numbers = _nibbles(b[:, 6:]) | _fifth_bits(b, 2)
    return _half(b, 0) * (numbers.astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Float32:
    numbers = _nibbles(b[:, 8:]) | _fifth_bits(b, 4)
    return _half(b, 0) * numbers.astype(np.float32) + _half(b, 2)


def _q8_0(b: Bytes) -> Float32:
    return _half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _iq4_nl(b: Bytes) -> Float32:
    return _half(b, 0) * _IQ4[_nibbles(b[:, 2:])]


def _mxfp4_scale(b: Bytes) -> Float32:
    """2^(e − 128): the levels are doubled."""
    return np.ldexp(np.float32(1.0), b[:, :1].astype(np.int32) - 128).astype(np.float32)


def _mxfp4(b: Bytes) -> Float32:
    return _mxfp4_scale(b) * _E2M1[_nibbles(b[:, 1:])]


# --- GGUF, blocks of 256 -------------------------------------------------------------------------


def _k4_scales(b: Bytes) -> tuple[Float32, Float32]:
    """Scales and mins [blocks, 8] of Q4_K and Q5_K: 6 bits each in bytes 4 to 15."""
    q = b[:, 4:16]
    low, middle, high = q[:, 0:4], q[:, 4:8], q[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    mins = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return _half(b, 0) * scales, _half(b, 2) * mins


def _k4_numbers(quants: Bytes) -> Bytes:
    """[blocks, 8, 32]: 32 bytes hold the low nibbles of one group and the high of the next."""
    runs = quants.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(b: Bytes) -> Float32:
    scales, mins = _k4_scales(b)
    return scales[:, :, None] * _k4_numbers(b[:, 16:]).astype(np.float32) - mins[:, :, None]


def _q5_k(b: Bytes) -> Float32:
    scales, mins = _k4_scales(b)
    fifth = (b[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & 1).transpose(0, 2, 1)
    numbers = _k4_numbers(b[:, 48:]) | (fifth << np.uint8(4))
    return scales[:, :, None] * numbers.astype(np.float32) - mins[:, :, None]


def _q6_k_scales(b: Bytes) -> Float32:
    scales: Float32 = _half(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    return scales


def _q6_k(b: Bytes) -> Float32:
    low = b[:, :128].reshape(-1, 2, 2, 32)  # halves, then runs of 32
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3
    numbers = np.concatenate([low & 15, low >> 4], axis=2) | (high << np.uint8(4))
    steps = numbers.reshape(-1, 16, 16).astype(np.float32) - 32
    values: Float32 = _q6_k_scales(b)[:, :, None] * steps
    return values


def _pairs(quants: Bytes) -> Bytes:
    """[blocks, 256] of two bits each: runs of 128 in 32 bytes, 32 at a time."""
    shifts = (2 * np.arange(4, dtype=np.uint8))[:, None]
    numbers: Bytes = quants.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    return numbers.reshape(len(quants), 256)


def _q2_k_scales(b: Bytes) -> Float32:
    scales: Float32 = _half(b, 80) * (b[:, :16] & 15)
    return scales


def _q2_k(b: Bytes) -> Float32:
    mins = _half(b, 82) * (b[:, :16] >> 4)
    numbers = _pairs(b[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    values: Float32 = _q2_k_scales(b)[:, :, None] * numbers - mins[:, :, None]
    return values


def _q3_k_scales(b: Bytes) -> Float32:
    low = np.concatenate([b[:, 96:104] & 15, b[:, 96:104] >> 4], axis=1)
    high = (b[:, None, 104:108] >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3).reshape(-1, 16)
    scales = (low | (high << np.uint8(4))).astype(np.float32) - 32
    found: Float32 = _half(b, 108) * scales
    return found


def _q3_k(b: Bytes) -> Float32:
    third = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    numbers = (_pairs(b[:, 32:96]) | (third << np.uint8(2))).astype(np.float32) - 4
    return _q3_k_scales(b)[:, :, None] * numbers.reshape(-1, 16, 16)


def _iq4_xs_scales(b: Bytes) -> Float32:
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> (2 * np.arange(8, dtype=np.uint16)) & 3
    scales: Float32 = _half(b, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    return scales


def _iq4_xs(b: Bytes) -> Float32:
    levels = _IQ4[_nibbles(b[:, 8:])].reshape(-1, 8, 32)
    return _iq4_xs_scales(b)[:, :, None] * levels


def ternary_blocks(format: WeightFormat, data: Bytes) -> tuple[Float32, Bytes]:
    """d [blocks, 1] and numbers [blocks, 256] of TQ1_0 and TQ2_0: w = d * (number - 1).

    TQ1_0 has five digits of base 3 in a byte, as a fraction of 256: runs of 32 bytes, of 16, and
    four digits in each of 4.
    """
    size = _FORMATS[format][0]
    b = np.ascontiguousarray(data).reshape(-1, size)
    if format is WeightFormat.TQ2_0:
        return _half(b, 64), _pairs(b[:, :64])
    runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    digits = [_ternary(b[:, begin:end], count) for begin, end, count in runs]
    return _half(b, 52), np.concatenate(digits, axis=1)


def _tq(format: WeightFormat) -> Callable[[Bytes], Float32]:
    def read(b: Bytes) -> Float32:
        d, numbers = ternary_blocks(format, b)
        return d * (numbers.astype(np.float32) - 1)

    return read


def _ternary(fractions: Bytes, digits: int) -> Bytes:
    """[blocks, digits · bytes]: the first digit of each byte, then the second of each, …"""
    powers = (3 ** np.arange(digits)).astype(np.uint8)
    left = fractions[:, None, :] * powers[:, None]  # whole parts are dropped
    found: Bytes = (left.astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return found.reshape(len(fractions), -1)


def _d(blocks: Bytes) -> Float32:
    return _half(blocks, 0)


# Bytes of a block, and its numbers.
_FORMATS: dict[WeightFormat, tuple[int, Callable[[Bytes], Float32]]] = {
    WeightFormat.Q4_0: (18, _q4_0),
    WeightFormat.Q4_1: (20, _q4_1),
    WeightFormat.Q5_0: (22, _q5_0),
    WeightFormat.Q5_1: (24, _q5_1),
    WeightFormat.Q8_0: (34, _q8_0),
    WeightFormat.Q2_K: (84, _q2_k),
    WeightFormat.Q3_K: (110, _q3_k),
    WeightFormat.Q4_K: (144, _q4_k),
    WeightFormat.Q5_K: (176, _q5_k),
    WeightFormat.Q6_K: (210, _q6_k),
    WeightFormat.IQ4_NL: (18, _iq4_nl),
    WeightFormat.IQ4_XS: (136, _iq4_xs),
    WeightFormat.MXFP4: (17, _mxfp4),
    WeightFormat.TQ1_0: (54, _tq(WeightFormat.TQ1_0)),
    WeightFormat.TQ2_0: (66, _tq(WeightFormat.TQ2_0)),
    **{format: (grid.block_bytes, grid.dequantize) for format, grid in GRID_FORMATS.items()},
}
_SCALES: dict[WeightFormat, Callable[[Bytes], Float32]] = {
    **dict.fromkeys(_FORMATS, _d),
    WeightFormat.Q2_K: _q2_k_scales,
    WeightFormat.Q3_K: _q3_k_scales,
    WeightFormat.Q4_K: lambda b: _k4_scales(b)[0],
    WeightFormat.Q5_K: lambda b: _k4_scales(b)[0],
    WeightFormat.Q6_K: _q6_k_scales,
    WeightFormat.IQ4_XS: _iq4_xs_scales,
    WeightFormat.MXFP4: _mxfp4_scale,
    WeightFormat.TQ1_0: lambda b: _half(b, 52),
    WeightFormat.TQ2_0: lambda b: _half(b, 64),
    **{format: grid.steps for format, grid in GRID_FORMATS.items()},
}
