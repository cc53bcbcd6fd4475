"""Linear kernels: every format on every tier this CPU has.

kernels/test/linear_test.cpp compares the kernels with scalar references and with themselves
(test_cpp.py runs it); here are comparisons with independent readings.
"""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import _native
from octavo.executor.native.held_form import held_form
from octavo.executor.native.packing import held_bytes
from octavo.loader.base import Weight, WeightFormat
from paths import TESTS

BLOCKS = np.load(TESTS / "kernels/gguf_blocks.npz")
FORMATS = [format for format in WeightFormat if format.in_gguf]  # GGUF's
FLOATS = {WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16}
ALL = slice(None)
# linear_layout.h
FIXED_POINT = {WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q4_K, WeightFormat.I2}


@pytest.fixture(params=["generic", "avx2", "avx512", "avx512_bf16"])
def isa(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    try:
        _native.packed_bytes(WeightFormat.F32, 1, 1, name)
    except ValueError as error:
        pytest.skip(str(error))
    return name


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_dequantize_equals_gguf(format: WeightFormat, isa: str) -> None:
    """Bit for bit what the gguf package reads (recorded by record_blocks.py)."""
    values = BLOCKS[f"{format.name}_values"]
    weight = packed(format)
    read = _native.dequantize(weight.data, weight.format, *values.shape, isa, weight.group)
    np.testing.assert_array_equal(read.view(np.uint32), values.view(np.uint32))


def packed(format: WeightFormat, picks: slice | npt.NDArray[np.int64] = ALL) -> Weight:
    """Recorded rows as they are handed to the kernels."""
    data = np.ascontiguousarray(BLOCKS[f"{format.name}_bytes"][picks])
    shape = BLOCKS[f"{format.name}_values"][picks].shape
    return held_form(Weight("w", format, shape, data.reshape(-1)))


def round_activations(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """To 8 bits a group of 32, as the kernels do."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    scale = (largest / np.float32(127)).astype(np.float64)
    return (np.rint(groups * inverse).astype(np.float64) * scale).reshape(x.shape)


def multiplies_bf16() -> bool:
    try:
        _native.packed_bytes(WeightFormat.BF16, 1, 1, "avx512_bf16")
    except ValueError:
        return False
    return True


@settings(max_examples=60)
@given(st.sampled_from(FORMATS), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_linear_equals_numpy(format: WeightFormat, rows: int, seed: int) -> None:
    """x @ w.T in float64, with the weights that gguf reads and activations rounded alike."""
    rng = np.random.default_rng(seed)
    w = BLOCKS[f"{format.name}_values"].astype(np.float64)
    picks = rng.integers(0, len(w), int(rng.integers(1, 40)))
    x = rng.standard_normal((rows, w.shape[1])).astype(np.float32)
    weight = packed(format, picks)
    data, held, group = weight.data, weight.format, weight.group
    out = _native.linear(data, held, len(picks), x, group=group)
    if format not in FLOATS:
        rounded = round_activations(x)
    elif format is WeightFormat.BF16 and multiplies_bf16():
        rounded = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    else:
        rounded = x.astype(np.float64)
    error = 3e-4 if held in FIXED_POINT else 1e-5
    bound = error * (np.abs(rounded) @ np.abs(w[picks]).T)
    assert (np.abs(out - rounded @ w[picks].T) <= bound).all()
    # Each row alone gives the same bits.
    alone = [_native.linear(data, held, len(picks), row[None], group=group) for row in x]
    np.testing.assert_array_equal(np.concatenate(alone).view(np.uint32), out.view(np.uint32))


def test_packing_keeps_the_file_s_size() -> None:
    for format in FORMATS:
        if packed(format).format is not format:
            continue
        file_bytes = BLOCKS[f"{format.name}_bytes"][0].nbytes / 512
        assert _native.packed_bytes(format, 576, 2048) <= 1.035 * file_bytes * 576 * 2048


@pytest.mark.parametrize(
    ("format", "bits"),
    [("IQ1_S", 3.375), ("IQ2_XXS", 3.375), ("IQ3_XXS", 4.375), ("IQ3_S", 4.375), ("TQ1_0", 2.11)],
)
def test_points_of_a_grid_are_held_as_codes(format: str, bits: float) -> None:
    weight = Weight("w", WeightFormat[format], (576, 2048), np.empty(0, np.uint8))
    assert held_bytes(weight) <= bits / 8 * 576 * 2048


def test_refusals() -> None:
    x = np.zeros((1, 100), np.float32)
    with pytest.raises(ValueError, match="a matrix of Q4_0 cannot be 4 x 100"):
        _native.linear(np.zeros(400, np.uint8), WeightFormat.Q4_0, 4, x)
    with pytest.raises(ValueError, match="no kernels for weight format 9"):
        _native.packed_bytes(9, 4, 256)
    with pytest.raises(ValueError, match="size does not fit"):
        _native.dequantize(np.zeros(17, np.uint8), WeightFormat.Q4_0, 1, 32)
    with pytest.raises(ValueError, match="unknown instruction set 'mmx'"):
        _native.packed_bytes(WeightFormat.F32, 1, 1, "mmx")
