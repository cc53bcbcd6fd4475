"""The order in which GGUF files have the value heads of a delta net.

A folder has those of a key head one after the other. GGUF files of Qwen 3.5 have the first of every
key head, then the second of every one, and so on, which is how ggml repeats key heads (llama.cpp,
conversion/qwen.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.loader.base import Bytes, Checkpoint, MadeRows, Weight, WeightFormat
from octavo.loader.dequantize import dequantize
from octavo.loader.loader import parts_of
from octavo.models.config import Layer
from octavo.models.families import FAMILIES
from octavo.models.family import IntArray, RecurrentLayers
from octavo.models.recurrence_shape import DeltaShape


def in_gguf_order(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same model with its value heads in the order of its family's GGUF files.

    Weights are made when they are read. Those that read the heads have their inputs moved, out of
    the blocks of any quantized format: they are fp32.
    """
    config, recurrent = checkpoint.config, FAMILIES[checkpoint.config.family].recurrent
    if recurrent is None:
        return checkpoint
    layers = tuple(_reordered(layer, recurrent) for layer in config.layers)
    if layers == config.layers:
        return checkpoint
    shape = next(s for layer in layers if isinstance(s := layer.recurrence, DeltaShape))
    rows, columns = _rows(shape), _values(shape)
    weights = dict[str, Weight]()
    for role, weight in checkpoint.weights.items():
        part = parts_of(role)[1]
        if part == "ssm_out":
            weight = _with_columns(weight, columns)
        elif part in rows:
            weight = weight.take(rows[part])
        weights[role] = weight
    return replace(checkpoint, config=replace(config, layers=layers), weights=weights)


def _reordered(layer: Layer, recurrent: RecurrentLayers) -> Layer:
    """The layer with the shape that a reader of a GGUF file finds."""
    if not isinstance(layer.recurrence, DeltaShape):
        return layer
    keys = recurrent.gguf_keys(layer.recurrence)
    return replace(layer, recurrence=recurrent.gguf(keys.__getitem__))


def _heads(shape: DeltaShape) -> IntArray:
    """Which head comes at each place."""
    return np.arange(shape.value_heads).reshape(shape.key_heads, -1).T.reshape(-1)


def _values(shape: DeltaShape) -> IntArray:
    """Which element of all heads comes at each place."""
    return np.add.outer(_heads(shape) * shape.value_dim, np.arange(shape.value_dim)).reshape(-1)


def _rows(shape: DeltaShape) -> dict[str, IntArray]:
    """Which row comes at each place, by role without the layer's number."""
    heads, values = _heads(shape), _values(shape)
    first = 2 * shape.key_heads * shape.key_dim  # behind queries and keys
    mixed = np.concatenate([np.arange(first), first + values])
    return {
        **dict.fromkeys(("attn_qkv", "ssm_conv1d"), mixed),
        **dict.fromkeys(("ssm_beta", "ssm_alpha", "ssm_dt.bias", "ssm_a"), heads),
        "attn_gate": values,
    }


def _with_columns(weight: Weight, columns: IntArray) -> Weight:
    def make(first: int, last: int) -> Bytes:
        values = dequantize(weight, first, last)[:, columns]
        return np.ascontiguousarray(values).view(np.uint8).reshape(-1)

    outputs, inputs = weight.shape
    return Weight(
        weight.name,
        WeightFormat.F32,
        weight.shape,
        MadeRows(outputs, 4 * inputs, make),
        stored_as=weight.stored,
    )
