"""compressed-tensors folders, as llm-compressor writes them: "pack-quantized" and "int-quantized",
"float-quantized" and "nvfp4-pack-quantized".

A linear layer of k inputs and n outputs (https://github.com/vllm-project/compressed-tensors).
Packed: ``weight_packed`` int32 [n, k·b/32], numbers + 2^(b-1) along inputs, lowest bits first,
running on from one word into the next; ``weight_shape`` [2]. Not packed: ``weight`` int8 [n, k].
``weight_scale`` [n, groups], of channels [n, 1], of a whole tensor [1]. Asymmetric ones have
``weight_zero_point`` too: packed like the weight but along outputs, [n·b/32, groups], or int8
[n, groups]. ``weight_g_idx`` [k] is the group of each input, or all -1.
w = scale · (number - zero).

Floats of 8 bits: ``weight`` F8_E4M3 [n, k], and ``weight_scale`` as above or of blocks of outputs
and inputs. NVFP4: ``weight_packed`` U8 [n, k/2], two E2M1 numbers in a byte, ``weight_scale``
F8_E4M3 [n, k/16], and ``weight_global_scale`` [1], by which the product of both is divided.

Activations of int8 with scales made on the fly are accepted: the kernels quantize the activations
of every quantized matrix so, to 8 bits with a scale for every 32 inputs. Beside floats of 8 bits
activations stay in 32 bits. Neither needs the scales for activations that a file has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Quantization, Weight
from octavo.loader.float_rows import FP4_GROUP, fp4_weight, fp8_weight
from octavo.loader.fp8 import KEPT, block_size
from octavo.loader.grouped import Parts, input_order, reorder, stream_bytes
from octavo.loader.hf_folder import HfWeights
from octavo.loader.modelopt import EIGHT_BITS
from octavo.loader.quantized_layout import (
    FLOATS,
    Layout,
    Module,
    QuantizationArgs,
    bits_of,
    distinct,
    sized,
    wide,
    words_columns,
)
from octavo.models.section import Section

PACKED = ("pack-quantized",)
PLAIN = ("int-quantized", "naive-quantized")
FLOAT8, FLOAT4 = "float-quantized", "nvfp4-pack-quantized"
SUPPORTED = (*PACKED, *PLAIN, FLOAT8, FLOAT4)
BITS = (3, 4, 8)
_DYNAMIC = "int8, quantized when they are used"


class CompressedTensors(Layout):
    markers = frozenset({"weight_packed", "weight_scale"})
    parts = frozenset(
        {"weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"}
        | {"weight_g_idx", "weight_global_scale", "input_scale", "input_global_scale"}
    )
    scales = "weight_scale"

    def __init__(self, stored: HfWeights, keys: Section) -> None:
        for key in ("kv_cache_scheme", "transform_config", "moe_sparsity_config"):
            if keys.values.get(key):
                keys.fail(f"{key} is not supported")
        sparsity = keys.values.get("sparsity_config")
        if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
            keys.fail("sparsity_config is not supported: weights that are stored sparse")
        groups = keys.object("config_groups")
        if not groups.values:
            keys.fail("config_groups is empty")
        whole = keys.text("format", "dense")
        layouts, settings, symmetric, order, activations = set(), [], True, False, None
        packed = []
        self.blocks: list[tuple[int, int]] = []  # of groups of floats
        # Groups, and whether they are packed: those without zero points, and without an order.
        self.symmetric: set[tuple[QuantizationArgs, bool]] = set()
        self.ordered_as_is: set[tuple[QuantizationArgs, bool]] = set()
        for name in groups.values:
            group = groups.object(name)
            layout = group.text("format", whole)
            if layout not in SUPPORTED:
                group.fail(
                    f"format {layout!r} is not supported; supported are {', '.join(SUPPORTED)}"
                )
            layouts.add(layout)
            activations = _activations(group, layout) or activations
            weights = group.object("weights")
            if layout in (FLOAT8, FLOAT4):
                setting, block = _float_setting(weights, layout)
                self.blocks.append(block)
                settings.append(setting)
                continue
            setting = _setting(weights, layout)
            settings.append(setting)
            if layout in PACKED:
                packed.append(setting)
            if weights.flag("symmetric", True):
                self.symmetric.add((setting, layout in PACKED))
            else:
                symmetric = False
            if weights.values.get("actorder") in ("group", "dynamic", True):
                order = True
            else:
                self.ordered_as_is.add((setting, layout in PACKED))
        self.settings = distinct(keys, settings)
        self.packed = list(dict.fromkeys(packed))  # settings of packed groups
        super().__init__(
            stored,
            Quantization(
                "compressed-tensors",
                ", ".join(sorted(layouts)),
                tuple(sorted({setting.bits for setting in self.settings})),
                tuple(sorted({setting.group for setting in self.settings})),
                symmetric,
                order,
                activations,
            ),
        )

    def weight(self, module: Module, n: int, k: int) -> Weight:
        if "weight_global_scale" in module.tensors:
            return fp4_weight(
                self, module, (n, k), "weight_packed", "weight_global_scale", np.reciprocal
            )
        if self.blocks and self.stored.dtype(self.name(module, "weight")) == "F8_E4M3":
            return self._float8(module, n, k)
        if "input_scale" in module.tensors:
            self.stored.refuse(
                module.tensors["input_scale"], "is a scale fixed beforehand, of activations to int8"
            )
        if "weight_packed" in module.tensors:
            return self._packed(module, n, k)
        return self._plain(module, n, k)

    def _float8(self, module: Module, n: int, k: int) -> Weight:
        rows = self.stored.shape(self.name(module, "weight_scale"))[:1]
        fitting = (block for block in self.blocks if block[0] and rows == (-(-n // block[0]),))
        block = next(fitting, next((block for block in self.blocks if block[0]), (0, 0)))
        return fp8_weight(self, module, (n, k), "weight_scale", block)

    def _packed(self, module: Module, n: int, k: int) -> Weight:
        if "weight" in module.tensors:
            self.stored.refuse(module.tensors["weight"], "is there beside its packed form")
        packed = self.array(module, "weight_packed", "I32")
        if not self.packed:
            formats = ", ".join(PACKED)
            self.stored.refuse(
                self.name(module, "weight_packed"), f"is there, but no group's format is {formats}"
            )
        sizes = {s.bits: -(-k * s.bits // 32) for s in self.packed}
        bits = next((b for b, size in sizes.items() if packed.shape == (n, size)), None)
        if bits is None:
            needed = " or ".join(f"{[n, size]} of {b}-bit numbers" for b, size in sizes.items())
            self.refuse_shape(module, "weight_packed", needed)
        if "weight_shape" in module.tensors:
            shape = self.shaped(module, "weight_shape", (2,), "I64", "I32").tolist()
            if shape != [n, k]:
                self.stored.refuse(self.name(module, "weight_shape"), f"is {shape}, not {[n, k]}")
        scales, group = self._scales(module, n, k)
        zeros = self._zeros(module, (n, k), group, bits)
        order = self._order(module, group, k, bits)
        size = stream_bytes(bits, k)

        def parts(first: int, last: int) -> Parts:
            streams = np.ascontiguousarray(packed[first:last]).view(np.uint8)[:, :size]
            if order is not None:
                streams = reorder(streams, bits, order)
            return wide(scales[first:last]), zeros(first, last), streams

        return self.grouped(
            module, "weight_packed", (n, k), QuantizationArgs(bits, group), parts, order
        )

    def _plain(self, module: Module, n: int, k: int) -> Weight:
        weight = self.shaped(module, "weight", (n, k), "I8")
        scales, group = self._scales(module, n, k)
        zeros = self._zeros(module, (n, k), group, 8)
        order = self._order(module, group, k, 8)

        def parts(first: int, last: int) -> Parts:
            numbers = weight[first:last].view(np.uint8) ^ np.uint8(128)
            if order is not None:
                numbers = numbers[:, order]
            return wide(scales[first:last]), zeros(first, last), numbers

        return self.grouped(module, "weight", (n, k), QuantizationArgs(8, group), parts, order)

    def _scales(self, module: Module, n: int, k: int) -> tuple[npt.NDArray[Any], int]:
        """[n, groups] and the inputs of a group."""
        scales = self.array(module, "weight_scale", *FLOATS)
        if scales.shape in ((), (1,), (1, 1)):  # of the whole tensor
            scales = np.broadcast_to(scales.reshape(1, 1), (n, 1))
        elif scales.shape == (n,):
            scales = scales.reshape(n, 1)
        by_groups = {
            -(-k // group): group
            for group in (self.group_of(module, "weight_scale", s.group, k) for s in self.settings)
        }
        if scales.ndim != 2 or len(scales) != n or scales.shape[1] not in by_groups:
            needed = " or ".join(str([n, groups]) for groups in by_groups)
            self.refuse_shape(module, "weight_scale", needed)
        return scales, by_groups[scales.shape[1]]

    def _zeros(self, module: Module, shape: tuple[int, int], group: int, bits: int) -> Any:
        """A function of the first and last row."""
        n, k = shape
        groups = -(-k // group)
        half = np.uint8(1 << (bits - 1))
        if "weight_zero_point" not in module.tensors:
            if not self._among(self.symmetric, module, group, k, bits):
                self.stored.refuse(
                    self.name(module, "weight_scale"),
                    f"has no {module.name}.weight_zero_point beside it, and symmetric is false",
                )
            return lambda first, last: half
        zeros = self.array(module, "weight_zero_point", "I32", "I8")
        packed = (-(-n * bits // 32), groups)
        if zeros.dtype == np.int8:
            if zeros.size == 1:
                zeros = np.broadcast_to(zeros.reshape(1, 1), (n, 1))
            if zeros.shape == (n,):
                zeros = zeros.reshape(n, 1)
            if zeros.shape != (n, groups):
                self.refuse_shape(module, "weight_zero_point", [n, groups])
            if bits < 8 and (zeros < -int(half)).any() | (zeros >= int(half)).any():
                self.stored.refuse(
                    self.name(module, "weight_zero_point"), f"is not of {bits}-bit numbers"
                )
            return lambda first, last: zeros[first:last].view(np.uint8) + half
        if zeros.shape != packed:
            self.refuse_shape(module, "weight_zero_point", list(packed))
        return lambda first, last: words_columns(zeros.T, bits, first, last).T

    def _among(
        self,
        groups: set[tuple[QuantizationArgs, bool]],
        module: Module,
        group: int,
        k: int,
        bits: int,
    ) -> bool:
        """Whether one of these groups of the configuration may be that of a module."""
        packed = "weight_packed" in module.tensors
        return any(
            packed == of_packed
            and (setting.bits == bits or not packed)
            and (setting.group == group or (group == k and not 0 < setting.group < k))
            for setting, of_packed in groups
        )

    def _order(self, module: Module, group: int, k: int, bits: int) -> npt.NDArray[np.int32] | None:
        if group == k:
            return None
        if "weight_g_idx" not in module.tensors:
            if not self._among(self.ordered_as_is, module, group, k, bits):
                self.stored.refuse(
                    self.name(module, "weight_scale"),
                    f"has no {module.name}.weight_g_idx beside it, and actorder asks for one",
                )
            return None
        g_idx = self.shaped(module, "weight_g_idx", (k,), "I32", "I64")
        if (g_idx == -1).all():
            return None
        try:
            return input_order(g_idx.astype(np.int64), group)
        except ValueError as error:
            self.stored.refuse(self.name(module, "weight_g_idx"), str(error))


def _setting(weights: Section, layout: str) -> QuantizationArgs:
    if weights.text("type", "int").lower() != "int":
        weights.fail(f"type {weights.values['type']!r} is not supported, only int")
    if weights.values.get("dynamic"):
        weights.fail("dynamic is not supported for weights")
    bits = bits_of(weights, "num_bits", BITS if layout in PACKED else tuple(range(2, 9)))
    group = -1 if weights.values.get("group_size") is None else sized(weights)
    strategy = weights.text("strategy", "tensor" if group == -1 else "group").lower()
    if strategy not in ("tensor", "channel", "group"):
        weights.fail(f"strategy {strategy!r} is not supported; tensor, channel and group are")
    if (strategy == "group") != (group != -1):
        weights.fail(f"strategy {strategy!r} contradicts group_size {group}")
    return QuantizationArgs(bits, group)


def _float_setting(weights: Section, layout: str) -> tuple[QuantizationArgs, tuple[int, int]]:
    """Bits and group of floats, and the outputs and inputs of a block."""
    bits = 8 if layout == FLOAT8 else 4
    if (weights.text("type", "float").lower(), weights.count("num_bits", bits)) != ("float", bits):
        weights.fail(f"{layout} is of floats of {bits} bits")
    strategy = weights.text("strategy", "tensor").lower()
    if layout == FLOAT4:
        if strategy != "tensor_group" or weights.count("group_size", FP4_GROUP) != FP4_GROUP:
            weights.fail(f"{layout} has strategy tensor_group and groups of {FP4_GROUP}")
        return QuantizationArgs(bits, FP4_GROUP), (0, 0)
    if strategy not in ("tensor", "channel", "block"):
        weights.fail(f"strategy {strategy!r} is not supported; tensor, channel and block are")
    block = block_size(weights, "block_structure") if strategy == "block" else (0, 0)
    return QuantizationArgs(bits, block[1] or -1), block


def _activations(group: Section, layout: str) -> str | None:
    """What is done with activations. Whatever cannot be honoured is refused."""
    if group.values.get("output_activations"):
        group.fail("output_activations are not supported")
    if group.values.get("input_activations") is None:
        return None
    if layout in (FLOAT8, FLOAT4):  # more exact here than asked for, whatever their scales
        return KEPT if layout == FLOAT8 else EIGHT_BITS
    inputs = group.object("input_activations")
    kind, bits = inputs.text("type", "int").lower(), inputs.count("num_bits", 8)
    if (kind, bits) != ("int", 8):
        inputs.fail(f"activations of type {kind} and {bits} bits are not supported")
    if inputs.values.get("dynamic") is not True:
        inputs.fail("activations with scales fixed beforehand are not supported, only dynamic ones")
    return _DYNAMIC
