"""Small random models of every shape that the executor must get right."""

from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.loader.base import Checkpoint, Tokenizer, Weight, WeightFormat
from octavo.loader.dequantize import dequantize as dequantize_blocks
from octavo.loader.gguf import BLOCKS
from octavo.models import families
from octavo.models.build import Builder
from octavo.models.config import (
    UNROTATED,
    Activation,
    Experts,
    Layer,
    ModelConfig,
    Rope,
    share_caches,
)
from octavo.models.gemma4 import assistant_program
from octavo.models.program import Program, Shapes
from octavo.models.recurrence_shape import DeltaShape, MambaShape, ShortConvShape

Floats = npt.NDArray[np.float64]


BLOCKS_OF_256 = [format for format, (numbers, _) in BLOCKS.items() if numbers == 256]
# Compared with other implementations in tests/loader and tests/oracle.
READ_ELSEWHERE = [*BLOCKS_OF_256, WeightFormat.E4M3, WeightFormat.NVFP4]
FP8_GROUP = 48  # inputs
EXPERTS = Experts(6, 2, 64, True)
SPARSE = ("mixtral", "qwen3moe")


def config(family: str = "llama", experts: Experts = EXPERTS, **changes: Any) -> ModelConfig:
    """Two query heads a KV head, three layers; gemma3 has a window of 20 on two of them, lfm2 and
    granitehybrid recurrences in place of attention, and qwen35 delta nets and a layer for
    multi-token prediction. Sparse families have ``experts`` in all.
    """
    rope = Rope(theta=10000.0, dim=changes.get("head_dim", 16), interleaved=family == "llama")
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": 70,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "context_length": 512,
        "norm_eps": 1e-5,
        "activation": Activation.SILU,
        "attention_scale": values_scale(changes.get("head_dim", 16)),
        "tied_embeddings": True,
        "layers": (Layer(rope),) * 3,
    }
    if family in SPARSE:
        values["layers"] = (Layer(rope, experts=experts),) * 3
    if family in ("lfm2", "lfm2moe"):  # a state of two pages of 16 tokens
        conv = Layer(UNROTATED, recurrence=ShortConvShape(64, 7))
        values["layers"] = (conv, Layer(rope), conv)
    if family in ("qwen35", "qwen35moe"):  # a state of five pages of 16 tokens
        net = Layer(rope, recurrence=DeltaShape(2, 4, 16, 16, 4, tiled=False))
        values |= {"layers": (net, Layer(rope), net), "mtp_layers": 1}
    if family == "qwen35moe":
        layers = (replace(each, experts=experts, shared_expert=80) for each in values["layers"])
        values["layers"] = tuple(layers)
    if family == "lfm2moe":  # all but the first
        own = Experts(6, 2, 64, True, "sigmoid", normalize_eps=1e-6, selection_bias=True)
        dense, *sparse = values["layers"]
        values["layers"] = dense, *(replace(layer, experts=own) for layer in sparse)
    if family == "granitehybrid":  # a state of five pages of 16 tokens
        mamba = Layer(UNROTATED, recurrence=MambaShape(4, 12, 16, 2, 4))
        layers = (mamba, Layer(UNROTATED), mamba)
        values["residual_scale"] = 0.22
        own = {"experts": experts, "shared_expert": 96}
        values["layers"] = tuple(replace(each, **own) for each in layers)
    if family == "gemma3":
        far = Rope(theta=1e6, dim=rope.dim, interleaved=False, scale=0.125)
        values |= {
            "activation": Activation.GELU_TANH,
            "embedding_scale": 8.0,
            "layers": (Layer(rope, 20), Layer(rope, 20), Layer(far)),
        }
    return ModelConfig(**(values | changes))


def broad(family: str = "llama") -> ModelConfig:
    """Every matrix has whole blocks of 256 inputs."""
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
    return config(family, Experts(6, 2, 256, True), **sizes)


def shared(experts: Experts = EXPERTS, family: str = "shared") -> ModelConfig:
    """Experts beside one that every token goes to."""
    layers = tuple(replace(layer, shared_expert=96) for layer in config("mixtral", experts).layers)
    return config(family, layers=layers)


def _shared_program(c: ModelConfig, *, gate: bool) -> Program:
    """What no family has together: another router's input, factors, a gate."""
    b = Builder(c)
    b.embed(c.embedding_scale)
    for layer in b.layers():
        b.norm("x", "attn_norm", "h")
        b.project_qkv("h", layer)
        b.attend(layer)
        b.add()
        b.norm("x", "ffn_norm", "h")
        b.shared_expert("h", layer.shared_expert, gate=gate)
        assert layer.experts is not None
        router = "h" if gate else "x"
        b.sparse_feed_forward("h", layer.experts, router=router, factors="ffn_down_exps.scale")
        b.add("shared")
        b.add()
    return b.head()


# For tests to put among the families.
SHARED = {
    name: replace(
        families.FAMILIES["mixtral"], name=name, program=partial(_shared_program, gate=gate)
    )
    for name, gate in (("shared", True), ("shared ungated", False))
}


def mixed(family: str = "llama") -> ModelConfig:
    """Heads of two widths, and one KV head or two; the last two layers have no cache of their own.
    A block is wider than what some groups take of it.
    """
    near, far = (Rope(10000.0, dim, interleaved=family == "llama") for dim in (16, 56))
    narrow, wide = Layer(near, 20), Layer(far, num_kv_heads=1, head_dim=56)
    shared = replace(narrow, shares=2), replace(wide, shares=1)
    return config(family, layers=(narrow, wide, narrow, *shared))


WIDTHS = (32, 40, 64, 80, 96, 128, 192, 256, 512)


def widths() -> ModelConfig:
    """A layer for each width of heads, with and without a window, on one KV head or two."""
    return config(
        "qwen3",
        attention_scale=1.0 / 16.0,
        layers=tuple(
            Layer(
                Rope(10000.0, dim, interleaved=False),
                20 if index % 2 else None,
                num_kv_heads=1 + index % 2,
                head_dim=dim,
            )
            for index, dim in enumerate(WIDTHS)
        ),
    )


def gemma4(kind: str) -> ModelConfig:
    """Gemma 4 as the E models are ("e"), with "experts", or with "keys" as values."""
    proportional = Rope(1e6, 40, interleaved=False, factors=(1.0,) * 5 + (inf,) * 15)
    near = Layer(Rope(10000.0, 16, interleaved=False), 20)
    far = Layer(proportional, num_kv_heads=1, head_dim=40, keys_as_values=kind != "e")
    layers: tuple[Layer, ...] = (near, far, near, far)
    if kind == "experts":
        layers = tuple(replace(layer, experts=EXPERTS) for layer in layers)
    if kind == "e":
        wide = [replace(layer, intermediate_size=160) for layer in (near, near, far)]
        layers = share_caches((near, far, near, *wide), 3)
    return config(
        "gemma4",
        activation=Activation.GELU_TANH,
        embedding_scale=8.0,
        attention_scale=1.0,
        logits_softcap=30.0,
        per_layer_input=32 if kind == "e" else 0,
        layers=layers,
    )


def values_scale(head_dim: int) -> float:
    return float(head_dim**-0.5)


def quantize(values: npt.NDArray[np.float32], format: WeightFormat) -> npt.NDArray[np.uint8]:
    """[rows, columns] as bytes of a GGUF format, rounded the plain way."""
    match format:
        case WeightFormat.E4M3:
            return fp8_rows(values)
        case WeightFormat.NVFP4:
            return fp4_rows(values)
        case WeightFormat.F32:
            return values.view(np.uint8).reshape(-1)
        case WeightFormat.F16:
            return values.astype(np.float16).view(np.uint8).reshape(-1)
        case WeightFormat.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    if format.in_gguf and format not in (WeightFormat.Q8_0, WeightFormat.Q4_0):
        return random_blocks(format, values)
    blocks = values.reshape(-1, 32)
    top = np.abs(blocks).max(axis=1, keepdims=True)
    limit = {WeightFormat.Q8_0: 127, WeightFormat.Q4_0: 7}[format]
    scale = (top / limit).astype(np.float16)
    steps = np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-8)).astype(np.int32)
    if format is WeightFormat.Q8_0:
        body = steps.astype(np.int8).view(np.uint8)
    else:
        nibbles = (steps + 8).astype(np.uint8)
        body = nibbles[:, :16] | (nibbles[:, 16:] << 4)
    return np.concatenate([scale.view(np.uint8), body], axis=1).reshape(-1)


def fp8_rows(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Rows of E4M3 with a scale for `FP8_GROUP` inputs."""
    parts = np.split(values, range(FP8_GROUP, values.shape[1], FP8_GROUP), axis=1)
    scales = np.stack([np.abs(part).max(axis=1) / np.float32(448) for part in parts], axis=1)
    codes = values / np.repeat(scales, FP8_GROUP, axis=1)[:, : values.shape[1]]
    rows = [scales.view(np.uint8), codes.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)]
    return np.concatenate(rows, axis=1).reshape(-1)


def fp4_rows(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Rows of NVFP4: scales that fit the values, and random numbers."""
    rng = np.random.default_rng(values.size)
    rows, inputs = values.shape
    whole = np.abs(values).max(axis=1, keepdims=True) / np.float32(448 * 6)
    largest = np.abs(values).reshape(rows, -1, 16).max(axis=2) / 6
    scales = (largest / whole).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes = rng.integers(0, 256, (rows, inputs // 32, 16), np.uint8)
    blocks = np.concatenate([scales.reshape(rows, -1, 2), codes], axis=2)
    return np.concatenate([whole.view(np.uint8), blocks.reshape(rows, -1)], axis=1).reshape(-1)


def random_blocks(format: WeightFormat, like: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """[rows, columns] as blocks of a format whose d is an fp16 number: random ones, whose numbers
    deviate as the given ones.
    """
    numbers, size = BLOCKS[format]
    rng = np.random.default_rng(like.size)
    blocks = rng.integers(0, 256, (like.size // numbers, size), np.uint8)

    def multiplied(d: float) -> npt.NDArray[np.uint8]:
        half = np.float16(d).view(np.uint16)
        if format is WeightFormat.IQ1_M:
            scales = blocks[:, 48:56].view(np.uint16)
            scales[:] = scales & 0xFFF | (half >> np.arange(0, 16, 4, np.uint16) & 15) << 12
        else:
            at = {WeightFormat.TQ1_0: 52, WeightFormat.TQ2_0: 64}.get(format, 0)
            blocks[:, at : at + 2] = half.reshape(1).view(np.uint8)
        return blocks.reshape(-1)

    deviation = dequantize_blocks(Weight("", format, like.shape, multiplied(1.0))).std()
    return multiplied(float(like.std() / deviation))


def quantize_grouped(
    values: npt.NDArray[np.float32], format: WeightFormat, group: int
) -> npt.NDArray[np.uint8]:
    """[rows, columns] as bytes of a grouped format, asymmetric, the scales fp16's."""
    bits = format - WeightFormat.I8 + 8
    parts = np.split(values, range(group, values.shape[1], group), axis=1)
    low = np.stack([np.minimum(part.min(axis=1), 0) for part in parts], axis=1)
    high = np.stack([np.maximum(part.max(axis=1), 0) for part in parts], axis=1)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    zeros = np.rint(-low / scales).clip(0, 2**bits - 1).astype(np.uint8)
    at = np.arange(values.shape[1]) // group
    steps = np.rint(values / scales[:, at]) + zeros[:, at]
    numbers = steps.clip(0, 2**bits - 1).astype(np.uint8)
    stream = np.unpackbits(numbers[..., None], axis=2, bitorder="little", count=bits)
    packed = np.packbits(stream.reshape(len(values), -1), axis=1, bitorder="little")
    return np.concatenate([scales.view(np.uint8), zeros, packed], axis=1).reshape(-1)


def dequantize_grouped(weight: Weight) -> Floats:
    """The exact numbers, each at the place of the activation that it multiplies."""
    rows, columns = weight.shape
    bits, groups = weight.format - WeightFormat.I8 + 8, -(-columns // weight.group)
    data = weight.data.reshape(rows, -1)
    scales = data[:, : 4 * groups].copy().view(np.float32).astype(np.float64)
    zeros = data[:, 4 * groups : 5 * groups].astype(np.float64)
    stream = np.unpackbits(data[:, 5 * groups :], axis=1, bitorder="little")
    numbers = stream.reshape(rows, columns, bits) @ (1 << np.arange(bits))
    at = np.arange(columns) // weight.group
    values: Floats = scales[:, at] * (numbers - zeros[:, at])
    return values if weight.order is None else values[:, np.argsort(weight.order)]


def dequantize(weight: Weight) -> Floats:
    """The exact numbers that a weight's bytes stand for."""
    if weight.format.grouped:
        return dequantize_grouped(weight)
    data = weight.data
    if weight.format in READ_ELSEWHERE:
        return dequantize_blocks(weight).astype(np.float64)
    match weight.format:
        case WeightFormat.F32:
            return data.view(np.float32).reshape(weight.shape).astype(np.float64)
        case WeightFormat.F16:
            return data.view(np.float16).reshape(weight.shape).astype(np.float64)
        case WeightFormat.BF16:
            wide = data.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(weight.shape).astype(np.float64)
    size = {WeightFormat.Q8_0: 34, WeightFormat.Q4_0: 18}[weight.format]
    blocks = data.reshape(-1, size)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    body = blocks[:, 2:]
    if weight.format is WeightFormat.Q8_0:
        steps = body.copy().view(np.int8).astype(np.float64)
    else:
        steps = np.concatenate([body & 15, body >> 4], axis=1).astype(np.float64) - 8
    return (scale * steps).reshape(weight.shape)


def checkpoint(
    config: ModelConfig, format: WeightFormat = WeightFormat.F32, seed: int = 0
) -> Checkpoint:
    """Random weights that keep activations near one, matrices in ``format``.

    Those of a grouped format have groups of 64 inputs, and their inputs are in an order: one for
    all matrices of a width but V, and none for the embedding.
    """
    weights = _weights(families.program(config).weights, format, seed)
    mtp = (
        partial(_weights, families.mtp_shapes(config), format, seed) if config.mtp_layers else dict
    )
    path, tokenizer = Path("tiny"), cast(Tokenizer, None)
    return Checkpoint(path, config, weights, tokenizer, None, mtp_weights=mtp)


def assistant(target: Checkpoint) -> tuple[Program, dict[str, Weight]]:
    """One of Gemma 4, with more query heads than its target has."""
    kinds = dict.fromkeys(
        replace(layer, experts=None, intermediate_size=None)
        for layer in target.config.layers
        if layer.shares is None
    )
    sizes = {"hidden_size": 48, "num_heads": 6, "per_layer_input": 0, "layers": (*kinds,)}
    own = replace(target.config, **sizes)  # type: ignore[arg-type]
    program = assistant_program(own, target.config)
    shapes = {role: each for role, each in program.weights.items() if role not in target.weights}
    return program, _weights(shapes, WeightFormat.F16, 1)


def _weights(shapes: Shapes, format: WeightFormat, seed: int) -> dict[str, Weight]:
    rng = np.random.default_rng(seed)
    weights: dict[str, Weight] = {}
    for role, shape in shapes.items():
        if len(shape) == 2 and format.grouped:
            values = rng.normal(0.0, 1.5 * shape[1] ** -0.5, shape).astype(np.float32)
            data = quantize_grouped(values, format, 64)
            order = np.random.default_rng(role.endswith("attn_v")).permutation(shape[1])
            weights[role] = Weight(role, format, shape, data, group=64)
            if role.startswith("layers."):
                weights[role] = weights[role]._replace(order=order.astype(np.int32))
            continue
        if len(shape) == 2:
            values = rng.normal(0.0, 1.5 * shape[1] ** -0.5, shape).astype(np.float32)
            stored = format
        else:
            middle = 0.0 if role.endswith(".bias") else -1.0 if role.endswith("ssm_a") else 1.0
            values = rng.normal(middle, 0.2, shape).astype(np.float32)
            stored = WeightFormat.F32
        group = FP8_GROUP if stored is WeightFormat.E4M3 else 0
        weights[role] = Weight(role, stored, shape, quantize(values, stored), group)
    return weights
