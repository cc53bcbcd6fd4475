"""Rounding to nearest in C++: against its definition in numpy."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import tiny
from octavo import _native
from octavo.loader.base import Weight, WeightFormat

BITS = {WeightFormat.I4: 4, WeightFormat.I8: 8}
SOURCES = {
    WeightFormat.F32: np.float32,
    WeightFormat.F16: np.float16,
    WeightFormat.BF16: ml_dtypes.bfloat16,
}


def stored(x: npt.NDArray[np.float32], source: WeightFormat) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(x.astype(SOURCES[source])).view(np.uint8).reshape(-1)


def parts(
    data: npt.NDArray[np.uint8], rows: int, k: int, bits: int, group: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    groups = -(-k // group)
    table = data.reshape(rows, -1)
    scales = table[:, : 4 * groups].copy().view(np.float32)
    stream = np.unpackbits(table[:, 5 * groups :], axis=1, bitorder="little")
    numbers = stream.reshape(rows, k, bits) @ (1 << np.arange(bits))
    return scales, table[:, 4 * groups : 5 * groups], numbers


def defined(
    blocks: npt.NDArray[np.float32], bits: int, symmetric: bool
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales, zeros and numbers of [rows, groups, inputs], scales being normal fp16 numbers."""
    levels, one = np.float32(2**bits - 1), (..., np.newaxis)
    low, high = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    spread = np.float32(2) * np.maximum(-low, high) if symmetric else high - low
    scales = spread / levels
    scales = scales.astype(np.float16).astype(np.float32)
    middle = np.full_like(scales, 2 ** (bits - 1))
    zeros = middle if symmetric else np.rint(-low / scales).clip(0, levels)
    return scales, zeros, np.rint(blocks / scales[one] + zeros[one]).clip(0, levels)


@settings(max_examples=80)
@given(st.data())
def test_grouped_formats_are_as_defined(data: st.DataObject) -> None:
    format, source = data.draw(st.sampled_from(list(BITS))), data.draw(st.sampled_from([*SOURCES]))
    rows, group = data.draw(st.integers(1, 9)), 32 * data.draw(st.integers(1, 4))
    groups, symmetric = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((rows, groups, group)) + data.draw(st.sampled_from([-3, 0, 0.5, 9]))
    x *= 10.0 ** rng.integers(-1, 3, (rows, groups, 1))
    blocks = x.astype(SOURCES[source]).astype(np.float32)
    x = blocks.reshape(rows, -1)
    pool = data.draw(st.sampled_from([None, _native.ThreadPool(3)]))
    out = _native.quantize(
        stored(x, source), source, rows, x.shape[1], format, group, symmetric, pool
    )
    found = parts(out, rows, x.shape[1], BITS[format], group)
    for got, expected in zip(found, defined(blocks, BITS[format], symmetric), strict=True):
        np.testing.assert_array_equal(got, expected.reshape(got.shape))


def test_short_groups_zeros_and_scales_that_fp16_has_not() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 160)).astype(np.float32)
    x[1, :64] = 0
    x[2] *= 1e-12
    x[3] *= 1e12
    for format, bits in BITS.items():
        for symmetric in (False, True):
            out = _native.quantize(
                stored(x, WeightFormat.F32), WeightFormat.F32, 4, 160, format, 64, symmetric
            )
            w = tiny.dequantize(Weight("w", format, x.shape, out, group=64))
            size = np.abs(x).reshape(4, 5, 32).max(axis=2).repeat(32, axis=1)
            size = np.maximum(size, np.roll(size, 32, axis=1))  # no group is longer than 64
            assert (np.abs(w - x) <= 2.5 * np.maximum(size, 1e-30) / (2**bits - 1) + 1e-30).all()
            assert (w[1, :64] == 0).all()


def test_refusals() -> None:
    def refusal(*arguments: object, x: npt.NDArray[np.float32] | None = None) -> str:
        given = np.zeros((2, 64), np.float32) if x is None else x
        with pytest.raises(ValueError, match=" ") as error:
            _native.quantize(given.view(np.uint8).reshape(-1), *arguments)  # type: ignore[arg-type]
        return str(error.value)

    f32, i4 = WeightFormat.F32, WeightFormat.I4
    assert "no rounding from weight format 2 to 1004" in refusal(WeightFormat.Q4_0, 2, 64, i4, 32)
    for other in (WeightFormat.Q4_0, WeightFormat.Q8_0, WeightFormat.I3, WeightFormat.BF16):
        assert f"no rounding from weight format 0 to {int(other)}" in refusal(f32, 2, 64, other, 32)
    assert "a matrix of I4 cannot be 4 x 16" in refusal(f32, 4, 16, i4, 32)
    assert "a matrix of I4 cannot have groups of 48" in refusal(f32, 2, 64, i4, 48)
    assert "size does not fit" in refusal(f32, 3, 64, i4, 32)
    for bad in (np.nan, np.inf):
        x = np.zeros((3, 64), np.float32)
        x[1, 40] = bad
        message = "row 1 of 3 has a weight that is not finite or too large"
        assert message in refusal(f32, 3, 64, i4, 32, x=x)
