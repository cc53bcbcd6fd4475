"""Grouped integer formats, by way of the kernels of every tier, against numpy."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import tiny
from octavo import _native
from octavo.loader.base import Weight, WeightFormat

FORMATS = [WeightFormat.I2, WeightFormat.I3, WeightFormat.I4, WeightFormat.I8]
ISAS = ["generic", "avx2", "avx512", "avx512_bf16"]


def supported(isa: str) -> bool:
    try:
        _native.packed_bytes(WeightFormat.F32, 1, 1, isa)
    except ValueError:
        return False
    return True


@st.composite
def weights(draw: st.DrawFn) -> Weight:
    rows, blocks = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    format, group = draw(st.sampled_from(FORMATS)), 32 * draw(st.integers(1, blocks + 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.standard_normal((rows, 32 * blocks)).astype(np.float32)
    values += draw(st.sampled_from([-5, 0, 5]))  # zeros at one end, about the middle, at the other
    data = tiny.quantize_grouped(values, format, group)
    return Weight("w", format, values.shape, data, group=group)


def rounded(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """To 8 bits a group of 32, as the kernels do."""
    groups = x.reshape(len(x), -1, 32)
    scale = np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)
    return (np.rint(groups / scale).astype(np.float64) * scale).reshape(x.shape)


@settings(max_examples=60)
@given(weights(), st.integers(1, 12), st.sampled_from([isa for isa in ISAS if supported(isa)]))
def test_kernels_equal_numpy(weight: Weight, rows: int, isa: str) -> None:
    """Held weights exactly; products within the rounding of activations and fixed-point scales."""
    n, k = weight.shape
    data, w = weight.data, tiny.dequantize(weight)
    held = _native.dequantize(data, weight.format, n, k, isa, weight.group)
    np.testing.assert_array_equal(held, w.astype(np.float32))
    x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
    out = _native.linear(data, weight.format, n, x, isa, weight.group)
    exact = rounded(x)
    # Of w = scale * (number - centre) + min the terms, which cancel, are what is rounded.
    scales = data.reshape(n, -1)[:, : 4 * -(-k // weight.group)]
    scale = np.abs(scales.copy().view(np.float32)).max()
    terms = np.abs(exact) @ np.abs(w).T + np.abs(exact).sum(axis=1, keepdims=True) * 8 * scale
    error = 1e-5 if weight.format is WeightFormat.I8 else 5e-4
    assert (np.abs(out - exact @ w.T) <= error * terms + 1e-5).all()
    alone = [_native.linear(data, weight.format, n, row[None], isa, weight.group) for row in x]
    np.testing.assert_array_equal(np.concatenate(alone).view(np.uint32), out.view(np.uint32))


def test_packing_keeps_the_size() -> None:
    """A scale takes two bytes of its four in the row."""
    for format, bits in zip(FORMATS, (2, 3, 4, 8), strict=True):
        for group in (32, 64, 128, 2048):
            stored = 576 * 2048 * (bits + 24 / group) / 8
            packed = _native.packed_bytes(format, 576, 2048, group=group)
            assert stored <= packed <= 1.01 * stored


def test_refusals() -> None:
    for group in (0, 48, -32):
        with pytest.raises(ValueError, match=f"a matrix of I4 cannot have groups of {group}"):
            _native.packed_bytes(WeightFormat.I4, 4, 64, group=group)
    with pytest.raises(ValueError, match="a matrix of Q4_0 cannot have groups of 32"):
        _native.packed_bytes(WeightFormat.Q4_0, 4, 64, group=32)
    with pytest.raises(ValueError, match="a matrix of I8 cannot be 4 x 48"):
        _native.packed_bytes(WeightFormat.I8, 4, 48, group=32)
    bad = np.zeros(4 * (4 + 1 + 16), np.uint8)
    bad[2 * 21 + 4] = 17  # the third row's zero
    with pytest.raises(ValueError, match="zero of a group is 17, outside 0 to 16"):
        _native.dequantize(bad, WeightFormat.I4, 4, 32, group=32)
    with pytest.raises(ValueError, match="zero of a group is 17, outside 0 to 16"):
        _native.linear(bad, WeightFormat.I4, 4, np.zeros((1, 32), np.float32), group=32)
    with pytest.raises(ValueError, match="size does not fit"):
        _native.dequantize(np.zeros(17, np.uint8), WeightFormat.I4, 1, 32, group=32)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_the_scale_of_a_group_of_zeros_costs_the_others_nothing(format: WeightFormat) -> None:
    """Files give such groups any scale, and the largest says how exactly the others are held."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((20, 128)).astype(np.float32)
    data = tiny.quantize_grouped(values, format, 32).reshape(20, -1)
    weight = Weight("w", format, values.shape, data.reshape(-1), group=32)  # the same bytes
    bits, rest = format - WeightFormat.I8 + 8, 20  # scales and zeros of four groups
    zero = np.full((20, 32), 1, np.uint8)
    stream = np.unpackbits(zero[..., None], axis=2, bitorder="little", count=bits).reshape(20, -1)
    data[:, 18] = 1
    data[:, rest + 8 * bits : rest + 12 * bits] = np.packbits(stream, axis=1, bitorder="little")
    x = rng.standard_normal((3, 128)).astype(np.float32)
    outs = []
    for scale in (0.0, 1e6):
        data[:, 8:12] = np.full((20, 1), scale, np.float32).view(np.uint8)
        assert (tiny.dequantize(weight)[:, 64:96] == 0).all()
        held = _native.dequantize(data.reshape(-1), format, 20, 128, group=32)
        np.testing.assert_array_equal(held, tiny.dequantize(weight).astype(np.float32))
        outs.append(_native.linear(data.reshape(-1), format, 20, x, group=32))
    np.testing.assert_array_equal(*outs)
