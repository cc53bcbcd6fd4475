"""The check of the kernels: it passes what is right and names what is not."""

from dataclasses import replace

import numpy as np
import pytest

from executor import tiny
from octavo.loader import load
from octavo.loader.base import CheckpointError, Weight, WeightFormat
from octavo.tools.quantize.kernel_check import (
    Float32,
    Native,
    check,
    outlier_columns,
    product_error,
)
from paths import ORACLE

GROUPED = (WeightFormat.I3, WeightFormat.I4, WeightFormat.I8)
FILES = ("tiny-llama", "tiny-llama-legacy", "tiny-llama-k", "tiny-gemma3")


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512", "avx512_bf16"])
@pytest.mark.parametrize("name", FILES)
def test_the_kernels_are_faithful(name: str, isa: str) -> None:
    from octavo import _native

    try:
        _native.packed_bytes(WeightFormat.F32, 1, 1, isa)
    except ValueError as error:
        pytest.skip(str(error))
    checkpoint = load(ORACLE / f"{name}.gguf")
    found = check(checkpoint, isa)
    assert found.faults == []
    found.raise_if_faulty(checkpoint)
    assert found.matrices == sum(len(w.shape) == 2 for w in checkpoint.weights.values())
    assert found.max_deviation == 0.0
    assert 0.0 < found.max_product_error < 1.0


@pytest.mark.parametrize("format", GROUPED, ids=lambda format: format.name)
def test_grouped_formats_too(format: WeightFormat) -> None:
    """In an order of their own; scales of 11 bits are held as they are, others rounded to that."""
    checkpoint = tiny.checkpoint(tiny.config(), format)
    found = check(checkpoint)
    assert found.faults == []
    assert found.max_deviation == 0.0
    assert 0.0 < found.max_product_error < 1.0
    assert (found.columns > 0) is (format is not WeightFormat.I8)
    weight = checkpoint.weights["layers.0.ffn_down"]
    data = weight.data.copy().reshape(weight.shape[0], -1)
    data[:, :4] = np.full((len(data), 1), 0.0123456789, np.float32).view(np.uint8)
    role = {"layers.0.ffn_down": weight._replace(source=data.reshape(-1))}
    finer = check(replace(checkpoint, weights=checkpoint.weights | role))
    assert finer.faults == []
    assert 0.0 < finer.max_deviation < 2.0**-11


class Broken(Native):
    """Kernels that misread one tensor."""

    def __init__(self, what: str, tensor: str) -> None:
        super().__init__("")
        self.what, self.tensor = what, tensor

    def weights(self, weight: Weight, first: int, last: int) -> Float32:
        values = super().weights(weight, first, last)
        if self.what == "weights" and weight.name == self.tensor:
            values[5, 7] += 0.01 * np.abs(values).max()
        return values

    def product(self, weight: Weight, first: int, last: int, x: Float32) -> Float32:
        result = super().product(weight, first, last, x)
        if self.what == "product" and weight.name == self.tensor:
            result[1, 3] += 0.5 * np.abs(result).max()
        return result


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", r"off by 0\.\d+ of the largest in row 5"),
        ("product", "a product of output 3 is off by"),
    ],
)
def test_a_fault_names_the_tensor(what: str, message: str) -> None:
    checkpoint = load(ORACLE / "tiny-llama-legacy.gguf")
    tensor = checkpoint.weights["layers.1.ffn_down"].name
    found = check(checkpoint, native=Broken(what, tensor))
    assert len(found.faults) == 1
    assert tensor in found.faults[0]
    with pytest.raises(CheckpointError, match=f"tiny-llama-legacy.gguf: tensor .*{message}"):
        found.raise_if_faulty(checkpoint)


def q4_0(scales: np.ndarray) -> Weight:
    """A matrix whose groups have these scales [rows, groups]."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (*scales.shape, 18), dtype=np.uint8)
    blocks[..., :2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return Weight("w", WeightFormat.Q4_0, (len(scales), 32 * scales.shape[1]), blocks.reshape(-1))


def test_columns_that_lose_precision_are_counted() -> None:
    scales = np.full((20, 12), 0.01)
    scales[3, 4] = 0.01 * 128
    scales[7, 0] = -0.01 * 1000  # a scale may be negative
    scales[9, 1] = 0.01 * 60  # not enough to matter
    scales[11] = 0.0
    scales[12, 1:] = 0.0  # one group only: nothing beside it loses
    ratios = outlier_columns(q4_0(scales))
    assert np.flatnonzero(ratios > 100).tolist() == [3, 7]
    assert ratios[3] == pytest.approx(128, rel=1e-2)
    eight = Weight("w", WeightFormat.Q8_0, (1, 32), np.zeros(34, np.uint8))
    assert outlier_columns(eight) is None  # scaled in float, group by group


def test_and_they_do_lose_it() -> None:
    """Where the large group meets no activations, the others' errors show."""
    scales = np.full((16, 16), 0.01)
    scales[:, 0] = 0.01 * 1024
    weight = q4_0(scales)
    x = np.random.default_rng(2).standard_normal((4, 512)).astype(np.float32)
    x[:, :32] = 0
    kernels = Native("")
    got, w = kernels.product(weight, 0, 16, x), kernels.weights(weight, 0, 16)
    true = x.astype(np.float64) @ w.astype(np.float64).T
    # 2 % of a column of equal scales, which 8-bit activations alone would be off by.
    assert np.abs(got - true).max() / np.abs(true).max() > 0.05
    largest = scales.max(axis=1).astype(np.float32)
    assert product_error(WeightFormat.Q4_0, w, x, got, largest).max() < 1.0  # as its bound says
