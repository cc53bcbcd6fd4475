"""Writes quantized modules in the layouts of GPTQ, AWQ and compressed-tensors, bit by bit, from the
layouts' descriptions; and reads the grouped formats back as plain numbers.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from octavo.loader import load
from octavo.loader.base import CheckpointError, Weight, WeightFormat

Array = npt.NDArray[Any]
BITS = {WeightFormat.I3: 3, WeightFormat.I4: 4, WeightFormat.I8: 8}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
DTYPES = {"F16": np.float16, "F32": np.float32, "BF16": ml_dtypes.bfloat16}


@dataclass
class Quantized:
    """A matrix in numbers: w[i, j] = scales[i, g_idx[j]] * (q[i, j] - zeros[i, g_idx[j]])."""

    bits: int
    q: Array  # [n, k]
    scales: Array  # [n, groups]
    zeros: Array  # [n, groups]
    g_idx: Array  # [k]

    @property
    def values(self) -> npt.NDArray[np.float32]:
        scales = self.scales.astype(np.float32)[:, self.g_idx]
        zeros = self.zeros.astype(np.float32)[:, self.g_idx]
        result: npt.NDArray[np.float32] = scales * (self.q.astype(np.float32) - zeros)
        return result


def quantized(
    values: Array,
    bits: int,
    group: int,
    *,
    symmetric: bool = False,
    order: Array | None = None,
    dtype: str = "F16",
) -> Quantized:
    """Rounds to the nearest, input order[i] as the i-th of the groups."""
    n, k = values.shape
    group = k if group == -1 else group
    groups = -(-k // group)
    g_idx = np.arange(k) // group
    if order is not None:
        g_idx = np.empty(k, np.int64)
        g_idx[order] = np.arange(k) // group
    most = (1 << bits) - 1
    scales, zeros = np.ones((n, groups), DTYPES[dtype]), np.zeros((n, groups), np.int64)
    q = np.zeros((n, k), np.int64)
    for g in range(groups):
        part = values[:, g_idx == g]
        if symmetric:
            scale = np.abs(part).max(axis=1) / ((1 << (bits - 1)) - 0.5)
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scale = (high - low) / most
        scales[:, g] = np.maximum(scale, 1e-4).astype(DTYPES[dtype])
        wide = scales[:, g].astype(np.float64)
        zero = np.full(n, 1 << (bits - 1)) if symmetric else np.round(-low / wide)
        zeros[:, g] = np.clip(zero, 0, most)
        numbers = np.round(part / wide[:, None]) + zeros[:, g, None]
        q[:, g_idx == g] = np.clip(numbers, 0, most)
    return Quantized(bits, q, scales, zeros, g_idx)


def words(numbers: Array, bits: int) -> Array:
    """int32 [rows, words] of [rows, count] numbers: one stream of bits, lowest first."""
    rows, count = numbers.shape
    stream = (numbers[:, :, None] >> np.arange(bits)) & 1
    stream = stream.reshape(rows, count * bits).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


def gptq(m: Quantized, *, v1: bool = True, g_idx: bool = True) -> dict[str, Array]:
    stored = (m.zeros - v1) % (1 << m.bits)
    tensors = {
        "qweight": words(m.q, m.bits).T.copy(),
        "qzeros": words(stored.T, m.bits),
        "scales": m.scales.T.copy(),
    }
    return tensors | ({"g_idx": m.g_idx.astype(np.int32)} if g_idx else {})


def awq(m: Quantized) -> dict[str, Array]:
    def packed(numbers: Array) -> Array:  # [rows, outputs]
        nibbles = numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_ORDER]
        return words(nibbles.reshape(len(numbers), -1), 4)

    return {"qweight": packed(m.q.T), "qzeros": packed(m.zeros.T), "scales": m.scales.T.copy()}


def pack_quantized(
    m: Quantized, *, symmetric: bool = False, g_idx: bool = False
) -> dict[str, Array]:
    """Numbers and zeros are those stored: 2^(b-1) more than compressed-tensors speaks of."""
    tensors = {
        "weight_packed": words(m.q, m.bits),
        "weight_scale": m.scales,
        "weight_shape": np.array(m.q.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(m.zeros.T, m.bits).T.copy()
    return tensors | ({"weight_g_idx": m.g_idx.astype(np.int32)} if g_idx else {})


def int_quantized(m: Quantized, *, symmetric: bool = False) -> dict[str, Array]:
    half = 1 << (m.bits - 1)
    tensors = {"weight": (m.q - half).astype(np.int8), "weight_scale": m.scales}
    return tensors | ({} if symmetric else {"weight_zero_point": (m.zeros - half).astype(np.int8)})


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False}
    return config | {"sym": False, "checkpoint_format": "gptq"} | more


def ct_config(
    bits: int, group: int, *, symmetric: bool, layout: str, **more: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "group_size": None if group == -1 else group,
        "strategy": "channel" if group == -1 else "group",
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def is_linear(name: str) -> bool:
    return ".layers." in name and name.endswith("_proj.weight")


def rewrite(path: Path, change: Any, config: dict[str, Any] | None) -> dict[str, Quantized]:
    """Replaces the folder's layers: ``change(name, values)`` gives a matrix and its tensors, or
    None. Returns the matrices by the names that they had.
    """
    stored = load_file(path / "model.safetensors")
    matrices = {}
    for name in sorted(stored):
        made = change(name, stored[name].astype(np.float32))
        if made is not None:
            matrices[name], tensors = made
            del stored[name]
            stored |= {f"{name.removesuffix('weight')}{part}": x for part, x in tensors.items()}
    save_file(stored, path / "model.safetensors")
    values = json.loads((path / "config.json").read_text())
    if config is not None:
        values["quantization_config"] = config
    (path / "config.json").write_text(json.dumps(values))
    return matrices


def quantize_all(path: Path, config: dict[str, Any] | None, make: Any) -> dict[str, Quantized]:
    return rewrite(path, lambda name, x: make(x) if is_linear(name) else None, config)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


def plain_twin(path: Path, target: Path, matrices: dict[str, Quantized]) -> Path:
    """The same model with dequantized float32 matrices."""
    shutil.copytree(path, target)
    stored = load_file(path / "model.safetensors")
    modules = {name.removesuffix(".weight") for name in matrices}
    kept = {
        name: x.astype(np.float32)
        for name, x in stored.items()
        if name.rpartition(".")[0] not in modules or name.endswith("bias")
    }
    save_file(kept | {name: m.values for name, m in matrices.items()}, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config))
    for name in ("quantize_config.json", "quant_config.json"):
        (target / name).unlink(missing_ok=True)
    return target


def numbers(weight: Weight) -> Quantized:
    """What a weight of a grouped format says, its inputs in their own order."""
    bits, (n, k) = BITS[weight.format], weight.shape
    groups = -(-k // weight.group)
    rows = weight.data.reshape(n, -1)
    assert rows.shape[1] == 5 * groups + (k * bits + 7) // 8
    scales = rows[:, : 4 * groups].copy().view("<f4")
    zeros = rows[:, 4 * groups : 5 * groups].astype(np.int64)
    stream = np.unpackbits(rows[:, 5 * groups :], axis=1, bitorder="little")[:, : k * bits]
    q = (stream.reshape(n, k, bits).astype(np.int64) << np.arange(bits)).sum(axis=2)
    g_idx = np.arange(k) // weight.group
    made = Quantized(bits, q, scales, zeros, g_idx)
    if weight.order is None:
        return made
    back = np.argsort(weight.order)
    return replace(made, q=q[:, back], g_idx=g_idx[back])
