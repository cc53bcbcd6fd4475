"""What bytes mean: the recorded readings of the gguf package, and integers by groups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.loader.base import Weight, WeightFormat
from octavo.loader.dequantize import dequantize, group_scales
from paths import TESTS

BLOCKS = np.load(TESTS / "kernels/gguf_blocks.npz")
FORMATS = [format for format in WeightFormat if format.in_gguf]


def recorded(format: WeightFormat) -> tuple[Weight, np.ndarray]:
    data, values = BLOCKS[f"{format.name}_bytes"], BLOCKS[f"{format.name}_values"]
    return Weight("w", format, values.shape, data.reshape(-1)), values


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_as_the_gguf_package_reads_it(format: WeightFormat) -> None:
    weight, values = recorded(format)
    found = dequantize(weight)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(dequantize(weight, 1, 2), values[1:2])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_groups_scale_is_the_step_of_its_numbers(format: WeightFormat) -> None:
    weight, values = recorded(format)
    scales = group_scales(weight)
    if format in (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16):
        assert scales is None
        return
    groups = values.astype(np.float64).reshape(*scales.shape, -1)
    for numbers, scale in zip(groups.reshape(-1, groups.shape[2]), scales.ravel(), strict=True):
        steps = np.diff(np.unique(numbers)) / (scale or 1.0)
        np.testing.assert_allclose(steps, np.rint(steps), atol=2e-3)


@given(st.sampled_from([2, 3, 4, 8]), st.sampled_from([32, 64, 0]), st.integers(0, 2**32 - 1))
def test_integers_by_groups(bits: int, group: int, seed: int) -> None:
    """Rows put together a bit at a time, as `Weight` says."""
    rng = np.random.default_rng(seed)
    inputs, out = 160, 3
    width = group or inputs
    groups = -(-inputs // width)
    scales = rng.standard_normal((out, groups)).astype(np.float32)
    zeros = rng.integers(0, 2**bits, (out, groups), dtype=np.uint8)
    numbers = rng.integers(0, 2**bits, (out, inputs))
    rows = []
    for row in range(out):
        stream = sum(int(number) << bits * i for i, number in enumerate(numbers[row]))
        rows.append(
            scales[row].tobytes()
            + zeros[row].tobytes()
            + stream.to_bytes(bits * inputs // 8, "little")
        )
    data = np.frombuffer(b"".join(rows), np.uint8)
    order = rng.permutation(inputs).astype(np.int32)
    format = WeightFormat(1000 + bits)
    weight = Weight("w", format, (out, inputs), data, group, order)
    expected = np.empty((out, inputs), np.float32)
    for i in range(inputs):
        g = i // width
        expected[:, order[i]] = scales[:, g] * (numbers[:, i] - zeros[:, g]).astype(np.float32)
    np.testing.assert_array_equal(dequantize(weight), expected)
    np.testing.assert_array_equal(dequantize(weight, 2, 3), expected[2:])
    np.testing.assert_array_equal(group_scales(weight), scales)
