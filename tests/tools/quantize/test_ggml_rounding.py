"""Rounding to nearest in GGUF's formats gives the bytes of ggml's own reference."""

import numpy as np
import pytest

from octavo.loader.base import Weight, WeightFormat
from octavo.loader.dequantize import dequantize
from octavo.tools.quantize.ggml_rounding import ggml_round
from octavo.tools.quantize.gguf_writer import blocks
from octavo.tools.quantize.grid import CodeKind, Scheme, round_to_nearest
from paths import TESTS

RECORDED = TESTS / "tools/quantize/ggml_rounding.npz"
SCHEMES = {
    "Q4_0": Scheme(4, 32, CodeKind.Q4_0),
    "Q4_1": Scheme(4, 32, CodeKind.Q4_1),
    "Q5_0": Scheme(5, 32, CodeKind.Q5_0),
    "Q5_1": Scheme(5, 32, CodeKind.Q5_1),
    "Q8_0": Scheme(8, 32, CodeKind.Q8_0),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_of_the_reference(name: str) -> None:
    with np.load(RECORDED) as data:
        values, expected = data["values"], data[name]
    found = ggml_round(SCHEMES[name], values)
    assert np.array_equal(blocks(found).reshape(len(values), -1), expected)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("rounding", [ggml_round, round_to_nearest])
def test_values_are_what_readers_make_of_the_bytes(name: str, rounding: object) -> None:
    with np.load(RECORDED) as data:
        values = data["values"]
    assert callable(rounding)
    found = rounding(SCHEMES[name], values)
    weight = Weight("w", WeightFormat[name], values.shape, blocks(found))
    assert np.array_equal(dequantize(weight), found.values())


def test_weights_beyond_fp16_are_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        ggml_round(SCHEMES["Q4_0"], np.full((1, 32), 1e7, np.float32))
