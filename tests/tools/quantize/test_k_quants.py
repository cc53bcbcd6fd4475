"""Blocks hold the numbers that were meant, and the scales that lose little of the weights."""

import numpy as np
import numpy.typing as npt
import pytest

from octavo.loader.base import Weight, WeightFormat
from octavo.loader.dequantize import dequantize
from octavo.tools.quantize.block_search import Fit
from octavo.tools.quantize.k_quants import k_quantize, pack
from paths import TESTS
from tools.quantize.block_cases import SHAPES, case, error, fits

Float32 = npt.NDArray[np.float32]
RECORDED = TESTS / "tools/quantize/k_quants.npz"


def meant(found: Fit) -> Float32:
    """The weights [blocks, weights] of a fit, as its description says."""
    if found.scales is None:
        values = found.scale * found.codes
        values = values if found.low is None else values + found.low
    else:
        values = found.scale * found.scales * found.codes
        if found.low is not None and found.lows is not None:
            values = values - found.low * found.lows
    return values.transpose(2, 1, 0).reshape(values.shape[2], -1)


def nearest(name: str, weights: Float32) -> Float32:
    """Round to nearest: every group from its least weight (or 0) to its largest; integer scales
    and minimums from the largest of the block."""
    groups, size, least, most, scales = SHAPES[name]
    x = weights.reshape(-1, groups, size)
    if least == 0:
        low = x.min(axis=2) if scales is None else np.minimum(x.min(axis=2), 0.0)
        step = (x.max(axis=2) - low) / most
    else:
        low = np.zeros(x.shape[:2], np.float32)
        step = np.abs(x).max(axis=2) / min(-least, most)
    if scales is not None:
        for values in (step, low):
            whole = np.abs(values).max(axis=1, keepdims=True) / scales[1]
            values[:] = np.rint(values / np.maximum(whole, 1e-9)) * whole
    step = np.where(step == 0.0, 1.0, step)[..., None]
    codes = np.clip(np.rint((x - low[..., None]) / step), least, most)
    return (step * codes + low[..., None]).reshape(weights.shape)


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_are_read_as_they_were_meant(name: str) -> None:
    """By Octavo's reader and by gguf's, whose numbers are recorded."""
    found = fits(name)
    with np.load(RECORDED) as recorded:
        expected, bytes_read = recorded[f"{name}_values"], recorded[f"{name}_bytes"]
    data = pack(WeightFormat[name], found)
    assert np.array_equal(data, bytes_read)
    read = dequantize(Weight("w", WeightFormat[name], expected.shape, data.reshape(-1)))
    assert np.array_equal(read, expected)
    assert np.allclose(read, meant(found), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_the_error_is_below_that_of_rounding_to_nearest_and_of_ggml(
    name: str, weighted: bool
) -> None:
    weights, importance = case()
    used = importance if weighted else None
    found = error(weights, k_quantize(WeightFormat[name], weights, used).values(), used)
    with np.load(RECORDED) as recorded:
        ggml = recorded[f"{name}_errors"][int(weighted)]
    assert found <= ggml
    assert found < error(weights, nearest(name, weights), used)


@pytest.mark.parametrize("name", SHAPES)
def test_important_inputs_lose_less(name: str) -> None:
    weights, _ = case()
    importance = np.ones(weights.shape[1], np.float32)
    importance[::8] = 100.0
    plain, aware = (
        np.abs(k_quantize(WeightFormat[name], weights, each).values() - weights)
        for each in (None, importance)
    )
    assert aware[:, ::8].mean() < plain[:, ::8].mean()
    assert aware.mean() > plain.mean()


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_is_its_own(name: str) -> None:
    """Neither the rows beside it nor the size of the importances change its bytes."""
    weights, importance = case()
    format = WeightFormat[name]
    whole = k_quantize(format, weights, importance).data
    for rows in (slice(0, 1), slice(5, 12)):
        part = k_quantize(format, weights[rows], importance * np.float32(2.0**40))
        assert np.array_equal(part.data, whole[rows])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("value", [0.0, 0.3, -0.3, 1e-30, -1e-6, 100.0])
def test_equal_weights(name: str, value: float) -> None:
    weights = np.full((2, 256), value, np.float32)
    for importance in (None, np.zeros(256, np.float32)):
        values = k_quantize(WeightFormat[name], weights, importance).values()
        assert np.abs(values - weights).max() <= 0.01 * abs(value) + 2e-6  # of fp16


@pytest.mark.parametrize("name", SHAPES)
def test_one_sided_and_lone_weights(name: str) -> None:
    rng = np.random.default_rng(2)
    weights = np.zeros((4, 256), np.float32)
    weights[0] = np.abs(rng.normal(size=256)) + 1.0
    weights[1] = -weights[0]
    weights[2, 7] = 5.0
    weights[3, ::3] = rng.normal(size=86)
    found = k_quantize(WeightFormat[name], weights).values()
    assert np.isfinite(found).all()
    assert np.square(found - weights).sum() <= np.square(nearest(name, weights) - weights).sum()


@pytest.mark.parametrize("name", SHAPES)
def test_weights_beyond_fp16_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="too large"):
        k_quantize(WeightFormat[name], np.full((1, 256), 1e30, np.float32))


def test_rows_and_shape() -> None:
    weights, _ = case()
    found = k_quantize(WeightFormat.Q4_K, weights)
    assert found.shape == weights.shape
    order = np.arange(len(weights))[::-1]
    assert np.array_equal(found.rows(order).values(), found.values()[order])
