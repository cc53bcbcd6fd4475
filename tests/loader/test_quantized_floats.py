"""Folders of fp8 and fp4 numbers: faults in their tensors are refused by name. What the numbers are
is in tests/oracle/test_quantized_folders.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from executor.driving import Driver
from loader.quantized_writer import refused
from octavo.loader import load
from octavo.loader.base import CheckpointError, Weight, WeightFormat
from octavo.loader.dequantize import dequantize
from oracle.tiny_folders import quantized_folder

Q = "model.layers.0.self_attn.q_proj"
WEIGHTS = "model.safetensors"


class Stored(NamedTuple):
    dtype: str
    shape: list[int]
    data: bytes


Tensors = dict[str, Stored]


def rewritten(name: str, path: Path, change: Callable[[Tensors], None]) -> Path:
    """A recorded folder with other tensors. (safetensors' numpy half knows no fp8.)"""
    folder = quantized_folder(name, path)
    raw = (folder / WEIGHTS).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    tensors = {
        key: Stored(entry["dtype"], entry["shape"], raw[start:][slice(*entry["data_offsets"])])
        for key, entry in header.items()
    }
    change(tensors)
    header, data = {}, b""
    for key, stored in tensors.items():
        offsets = [len(data), len(data) + len(stored.data)]
        header[key] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": offsets}
        data += stored.data
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def replaced(part: str, **fields: Any) -> Callable[[Tensors], None]:
    """Changes a tensor of Q."""

    def change(tensors: Tensors) -> None:
        tensors[f"{Q}.{part}"] = tensors[f"{Q}.{part}"]._replace(**fields)

    return change


def dropped(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[f"{Q}.{part}"]

    return change


FLOAT = {"dtype": "F32", "data": np.float32(0.5).tobytes()}
FAULTS: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "e5m2": ("fp8-blocks", replaced("weight", dtype="F8_E5M2"), "is of type F8_E5M2, not F8_E4M3"),
    "other blocks": (
        "fp8-blocks",
        replaced("weight_scale_inv", shape=[4, 1]),
        "has shape [4, 1], not [1] or [64, 1] or [2, 2]",
    ),
    "blocks of a tensor": (
        "fp8-tensors",
        replaced("weight_scale_inv", shape=[1, 2], data=bytes(8)),
        "has shape [1, 2], not [1] or [64, 1]",
    ),
    "no numbers": ("fp8-blocks", dropped("weight"), f"has no {Q}.weight beside it"),
    "no scales": (
        "compressed-tensors-fp8", dropped("weight_scale"), "is of type F8_E4M3, which is not",
    ),
    "fp4 without the whole's": (
        "modelopt-nvfp4", dropped("weight_scale_2"), "is of type U8, not F8_E4M3",
    ),
    "two scales of the whole": (
        "modelopt-nvfp4",
        replaced("weight_scale_2", shape=[2], data=bytes(8)),
        "has shape [2], not [1]",
    ),
    "fp4's groups": (
        "compressed-tensors-nvfp4",
        replaced("weight_scale", shape=[32, 8]),
        "has shape [32, 8], not [64, 4]",
    ),
    "scales of integers": (
        "modelopt-fp8", replaced("weight_scale", dtype="I32"), "is of type I32, not F16 or BF16 or",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    name, change, reason = FAULTS[fault]
    message = refused(rewritten(name, tmp_path / "m", change))
    assert message.startswith(f"{tmp_path}/m/{WEIGHTS}: tensor '{Q}.")
    assert reason in message


@pytest.mark.parametrize(
    ("name", "part", "data"),
    [
        ("fp8-tensors", "weight_scale_inv", np.float32(np.inf).tobytes()),
        ("modelopt-nvfp4", "weight_scale_2", np.float32(np.nan).tobytes()),
        ("compressed-tensors-nvfp4", "weight_global_scale", bytes(4)),  # divided by
    ],
)
def test_a_scale_that_is_no_number(name: str, part: str, data: bytes, tmp_path: Path) -> None:
    checkpoint = load(rewritten(name, tmp_path / "m", replaced(part, data=data)))
    with pytest.raises(CheckpointError, match=f"'{Q}.{part}' has a scale that is not finite"):
        Driver(checkpoint)


@pytest.mark.parametrize(
    ("name", "part", "reason"),
    [
        ("fp8-blocks", "weight", "a number of row 3 is NaN"),
        ("modelopt-nvfp4", "weight_scale", "a scale of row 3 is NaN"),
    ],
)
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_numbers_that_are_none(name: str, part: str, reason: str, nan: int, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        stored = tensors[f"{Q}.{part}"]
        data = bytearray(stored.data)
        data[3 * stored.shape[1] + 1] = nan
        tensors[f"{Q}.{part}"] = stored._replace(data=bytes(data))

    checkpoint = load(rewritten(name, tmp_path / "m", change))
    with pytest.raises(CheckpointError, match=f"tensor '{Q}.weight', from row 0 on: {reason}"):
        Driver(checkpoint)


def test_activations_are_said_to_stay(tmp_path: Path) -> None:
    for name, said in (
        ("fp8-blocks", "fp8 asked for, kept in 32 bits"),
        ("compressed-tensors-fp8", "fp8 asked for, kept in 32 bits"),
        ("modelopt-nvfp4", "fp4 asked for, 8 bits here"),
        ("compressed-tensors-nvfp4", "fp4 asked for, 8 bits here"),
    ):
        quantization = load(quantized_folder(name, tmp_path / name)).quantization
        assert quantization is not None
        assert quantization.activations == said


def test_every_fp8_number() -> None:
    """By the format's definition: sign, four bits of exponent, three of fraction, bias 7."""
    scale = np.float32(0.75)
    row = np.concatenate([scale.reshape(1).view(np.uint8), np.arange(256, dtype=np.uint8)])
    values = dequantize(Weight("w", WeightFormat.E4M3, (1, 256), row, group=256))[0]
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        value = (
            2.0**-6 * fraction / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + fraction / 8)
        )
        if code & 0x7F == 0x7F:
            assert np.isnan(values[code])
        else:
            assert values[code] == scale * np.float32(-value if code & 0x80 else value)
