"""Bytes a weight: by hand, and against the blocks of real files."""

import pytest

from octavo.loader.base import WeightFormat
from octavo.loader.gguf import BLOCKS
from octavo.tools.plan.schemes import BITS, GGUF, NAMES, StorageScheme, scheme, survey


@pytest.mark.parametrize("format", BLOCKS, ids=lambda format: format.name)
def test_a_gguf_formats_sum_is_its_block(format: WeightFormat) -> None:
    values, size = BLOCKS[format]
    assert GGUF[format].matrix_bytes(1, values) == size
    assert GGUF[format].matrix_bytes(3, 4 * values) == 12 * size


# (bits, group, scale bytes, zero bytes) by hand, for rows of 4096.
@pytest.mark.parametrize(
    ("name", "bits", "group", "expected"),
    [
        ("gptq", 4, 128, 0.5 + 2 / 128 + 0.5 / 128 + 4 / 11008),
        ("gptq", 4, 64, 0.5390625 + 4 / 11008),
        ("gptq", 4, 32, 0.578125 + 4 / 11008),
        ("gptq", 4, -1, 0.5 + 2.5 / 4096 + 4 / 11008),
        ("gptq", 8, 128, 1.0234375 + 4 / 11008),
        ("gptq", 3, 128, 0.375 + 2 / 128 + 0.375 / 128 + 4 / 11008),
        ("awq", 4, 128, 0.51953125),
        ("compressed-tensors", 4, 32, 0.5625),
        ("compressed-tensors", 8, -1, 1 + 2 / 4096),
    ],
)
def test_groups(name: str, bits: int, group: int, expected: float) -> None:
    found = scheme(name, bits, group)
    assert found.bytes_per_weight(11008, 4096) == pytest.approx(expected, rel=1e-12)
    assert found.matrix_bytes(11008, 4096) == round(11008 * 4096 * expected)


def test_zeros_of_compressed_tensors_only_where_asked_for() -> None:
    plain, zeros = (scheme("compressed-tensors", 4, 64, symmetric=sym) for sym in (True, False))
    assert zeros.bytes_per_weight(9, 256) - plain.bytes_per_weight(9, 256) == 0.5 / 64


def test_the_sum_is_shown() -> None:
    assert scheme("awq", 4, 64).sum(512, 4096) == (
        "4 bits/8 + 2 bytes scale/64 + 0.5 bytes zero/64 = 0.5 + 0.03125 + 0.0078125 = 0.5390625"
    )
    assert scheme("gptq", 4, 64).sum(512, 4096) == (
        "4 bits/8 + 2 bytes scale/64 + 0.5 bytes zero/64 + 4 bytes g_idx/512 outputs "
        "= 0.5 + 0.03125 + 0.0078125 + 0.0078125 = 0.546875"
    )
    assert scheme("bf16").sum(4096, 4096) == "16 bits/8 = 2"
    assert scheme("compressed-tensors", 8, -1).sum(9, 1024) == (
        "8 bits/8 + 2 bytes scale/1024 = 1 + 0.001953125 = 1.00195312"
    )
    # A last group may be shorter; it costs what the others do.
    assert scheme("gptq", 4, 128).sum(128, 576) == (
        "4 bits/8 + 5 × 2 bytes scale/576 + 5 × 0.5 bytes zero/576 "
        "+ 4 bytes g_idx/128 outputs = 0.5 + 0.0173611111 + 0.00434027778 + 0.03125 = 0.552951389"
    )


@pytest.mark.parametrize("found", survey(), ids=lambda found: found.name)
def test_a_sums_result_is_what_rows_take(found: StorageScheme) -> None:
    for inputs in (256, 4096, 11008):
        result = float(found.sum(128, inputs).rpartition(" = ")[2])
        assert result == pytest.approx(found.bytes_per_weight(128, inputs), rel=1e-8)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'q9_k' is not one of f32, f16, .*, awq"):
        scheme("q9_k")
    with pytest.raises(ValueError, match="Q4_0 has bits and groups of its own: 4 bits/8"):
        scheme("q4_0", 4)
    with pytest.raises(ValueError, match="awq has 4 bits, not 3"):
        scheme("awq", 3)
    for group in (0, -2, 16, 48, 2**31 + 32, 10**21 + 64):
        with pytest.raises(ValueError, match=f"--group-size {group} is neither"):
            scheme("gptq", 4, group)
    with pytest.raises(ValueError, match="Q4_K: rows of 576 are no whole groups of 256"):
        scheme("q4_k").matrix_bytes(576, 576)
    assert scheme("gptq", 4, 128).problem(576) is None  # the last group is shorter


def test_every_name_is_a_scheme() -> None:
    assert {scheme(name).format for name in NAMES} >= set(GGUF)
    assert set(BITS) < set(NAMES)
