"""gpt-oss's experts from folders: MXFP4 without loss, the same as the same numbers in floats."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from octavo.loader import load
from octavo.loader.base import CheckpointError, Weight, WeightFormat
from octavo.loader.dequantize import dequantize
from octavo.loader.mxfp4 import mxfp4
from oracle.tiny_folders import folder

# E2M1 (OCP Microscaling Formats, 2023, section 5.3.3).
NUMBERS = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
LAYER = "model.layers.0.mlp.experts"

Bytes = npt.NDArray[np.uint8]


def values_of(blocks: Bytes, scales: Bytes) -> npt.NDArray[np.float32]:
    """[..., blocks * 32], by the definition: the low half of a byte comes first."""
    numbers = np.concatenate([NUMBERS, -NUMBERS])
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    powers = np.ldexp(np.float32(1.0), scales.astype(int) - 127)
    return (numbers[codes] * powers[..., None]).reshape(*blocks.shape[:-2], -1)


def drawn(rng: np.random.Generator, *shape: int) -> tuple[Bytes, Bytes]:
    """Blocks and scales, these around one half."""
    blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
    return blocks, rng.integers(122, 127, shape, np.uint8)


def test_numbers_are_those_of_the_definition() -> None:
    blocks, scales = drawn(np.random.default_rng(1), 7, 3)
    scales[0] = 0, 1, 252  # subnormal, and large
    weight = mxfp4("w", blocks, scales)
    assert (weight.format, weight.shape) == (WeightFormat.MXFP4, (7, 96))
    assert weight.stored.nbytes == weight.nbytes == 7 * 3 * 17
    assert np.array_equal(dequantize(weight), values_of(blocks, scales))
    assert np.array_equal(dequantize(weight, 2, 5), values_of(blocks, scales)[2:5])


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize(("first", "step", "count"), [(0, 2, 4), (1, 2, 3), (2, 3, 2), (6, 9, 1)])
def test_every_few_rows(first: int, step: int, count: int, made: bool) -> None:
    blocks, scales = drawn(np.random.default_rng(2), 7, 2)
    weight = mxfp4("w", blocks, scales)
    if not made:
        weight = weight._replace(source=weight.data, stored_as=None)
    part, rows = weight.take(np.arange(first, 7, step)), values_of(blocks, scales)[first::step]
    assert part.shape == (count, 64)
    assert np.array_equal(dequantize(part), rows)
    for begin in range(count):
        for end in range(begin + 1, count + 1):
            assert np.array_equal(dequantize(part, begin, end), rows[begin:end])


def folders(path: Path) -> tuple[Path, Path]:
    """The same model with its experts in MXFP4, and in bfloat16."""
    floats, small = folder("gpt_oss", path / "floats", bf16=True), path / "small"
    tensors = load_file(floats / "model.safetensors")
    rng = np.random.default_rng(3)
    blocked = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        count, inputs, rows = tensors[name].shape
        blocks, scales = drawn(rng, count, rows, inputs // 32)
        tensors[name] = np.ascontiguousarray(
            values_of(blocks, scales).swapaxes(1, 2).astype(ml_dtypes.bfloat16)
        )
        del blocked[name]
        blocked |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, floats / "model.safetensors", {"format": "pt"})
    small.mkdir()
    for file in floats.iterdir():
        (small / file.name).write_bytes(file.read_bytes())
    config = json.loads((floats / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (small / "config.json").write_text(json.dumps(config))
    save_file(blocked, small / "model.safetensors", {"format": "pt"})
    return floats, small


def expert_matrices(weights: dict[str, Weight]) -> dict[str, Weight]:
    return {role: w for role, w in weights.items() if "_exps." in role and len(w.shape) == 2}


def test_mxfp4_folders_have_the_numbers_of_their_float_twins(tmp_path: Path) -> None:
    floats, small = (load(path).weights for path in folders(tmp_path))
    assert floats.keys() == small.keys()
    for role, weight in expert_matrices(small).items():
        assert weight.format is WeightFormat.MXFP4
        assert np.array_equal(dequantize(weight), dequantize(floats[role])), role
    for role in small.keys() - expert_matrices(small).keys():
        assert np.array_equal(small[role].data, floats[role].data), role


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("gate_up_proj_blocks", (4, 64, 2, 16), r"asks for \[4, 64, 1, 16\]"),
        ("gate_up_proj_scales", (4, 63, 1), r"_scales' has shape \[4, 63, 1\]"),
        ("gate_up_proj_scales", None, "no tensor 'model.layers.0.mlp.experts.gate_up_proj_scales'"),
        ("down_proj_blocks", None, "no tensor 'model.layers.0.mlp.experts.down_proj_blocks'"),
        ("down_proj_bias", (4, 31), r"asks for \[4, 32\]"),
        ("down_proj_bias", None, "layers.0.ffn_down_exps.0.bias"),
    ],
)
def test_faults_are_named(
    name: str, shape: tuple[int, ...] | None, reason: str, tmp_path: Path
) -> None:
    _, path = folders(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensor = tensors.pop(f"{LAYER}.{name}")
    if shape is not None:
        tensors[f"{LAYER}.{name}"] = np.zeros(shape, tensor.dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=reason):
        load(path)
