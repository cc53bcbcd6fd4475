"""GPTQ folders, as AutoGPTQ, GPTQModel and AutoRound write them.

A linear layer of k inputs and n outputs, b bits (https://github.com/ModelCloud/GPTQModel):
``qweight`` int32 [k·b/32, n], words along inputs; ``qzeros`` int32 [groups, n·b/32], words along
outputs; ``scales`` [groups, n]; ``g_idx`` int32 [k], the group of each input, missing in old files.
Numbers run on from one word into the next, lowest bits first. w = scale · (number - zero).

Zeros: the format "gptq" stores them less one, "gptq_v2" as they are. Less one is taken within the
b bits of a zero; but GPTQModel and AutoRound subtract from whole words, so that a zero of 0 borrows
from its neighbour (not for 3 bits, of which GPTQModel shifts each). And some files that say "gptq"
have the symmetric zero itself, 2^(b-1), rather than one less (vLLM pull request 38966), or one less
under "gptq_v2": in a file that says it is symmetric both mean it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Bytes, Quantization, Weight
from octavo.loader.grouped import Parts, input_order, reorder, stream_bytes
from octavo.loader.hf_folder import HfWeights
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

BITS = (3, 4, 8)
_WHOLE_WORDS = ("gptqmodel", "auto-round")  # writers that subtract from them


class Gptq(Layout):
    markers = frozenset({"qweight", "qzeros", "g_idx"})
    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    scales = "scales"

    def __init__(self, stored: HfWeights, keys: Section, layout: str | None = None) -> None:
        """``layout``: "gptq" or "gptq_v2" if the configuration says it in other words."""
        layout = layout or keys.text("checkpoint_format", keys.text("format", "gptq"))
        if layout not in ("gptq", "gptq_v2"):
            keys.fail(f"checkpoint_format {layout!r} is not supported; gptq and gptq_v2 are")
        if keys.flag("is_marlin_format", False):
            keys.fail("is_marlin_format is set: tensors laid out for Marlin are not supported")
        if keys.text("pack_dtype", "int32") != "int32":
            keys.fail(f"pack_dtype {keys.values['pack_dtype']!r} is not supported, only int32")
        for key in ("rotation", "rotation_config", "adapter", "activation", "lora"):
            if keys.values.get(key):
                keys.fail(f"{key} {keys.values[key]!r} is not supported")
        base = QuantizationArgs(bits_of(keys, "bits", BITS), sized(keys))
        self.settings = distinct(keys, [base, *_overrides(keys, base)])
        self.symmetric = keys.flag("sym", False)
        self.minus_one = layout == "gptq"
        self.whole_words = _writer(keys).startswith(_WHOLE_WORDS)
        super().__init__(
            stored,
            Quantization(
                keys.text("quant_method", "gptq"),
                layout,
                tuple(sorted({setting.bits for setting in self.settings})),
                tuple(sorted({setting.group for setting in self.settings})),
                keys.flag("sym", True),
                keys.flag("desc_act", False),
            ),
        )

    def weight(self, module: Module, n: int, k: int) -> Weight:
        qweight = self.array(module, "qweight", "I32")
        sizes = {s.bits: -(-k * s.bits // 32) for s in self.settings}
        matching = [s for s in self.settings if qweight.shape == (sizes[s.bits], n)]
        if not matching:
            needed = " or ".join(
                f"{[size, n]} of {bits}-bit numbers" for bits, size in sizes.items()
            )
            self.refuse_shape(module, "qweight", needed)
        bits = matching[0].bits
        scales = self.array(module, "scales", *FLOATS)
        by_groups = {
            -(-k // group): group
            for group in (self.group_of(module, "scales", s.group, k) for s in matching[::-1])
        }
        shapes = [(groups, n) for groups in by_groups]
        if scales.shape not in shapes:
            self.refuse_shape(module, "scales", " or ".join(str(list(s)) for s in shapes))
        groups = len(scales)
        group = by_groups[groups]
        qzeros = self.shaped(module, "qzeros", (groups, -(-n * bits // 32)), "I32")
        order = self._order(module, groups, group, k)
        size = stream_bytes(bits, k)

        def parts(first: int, last: int) -> Parts:
            words = np.ascontiguousarray(qweight[:, first:last].T)
            streams = words.view(np.uint8)[:, :size]
            if order is not None:
                streams = reorder(streams, bits, order)
            zeros = self._zeros(qzeros, bits, first, last)
            return wide(scales[:, first:last]).T, zeros.T, streams

        return self.grouped(module, "qweight", (n, k), QuantizationArgs(bits, group), parts, order)

    def _zeros(self, qzeros: npt.NDArray[Any], bits: int, first: int, last: int) -> Bytes:
        """[groups, last - first]"""
        half, mask = np.uint8(1 << (bits - 1)), np.uint8((1 << bits) - 1)
        if self.minus_one and self.whole_words and bits != 3:
            ones = np.uint32(0xFFFFFFFF // int(mask))  # in every field
            zeros = words_columns(qzeros.view("<u4") + ones, bits, first, last)
        else:
            zeros = words_columns(qzeros, bits, first, last) + np.uint8(self.minus_one) & mask
        other = half + 1 if self.minus_one else half - 1  # half, stored as the other format does
        return np.where(zeros == other, half, zeros) if self.symmetric else zeros

    def _order(
        self, module: Module, groups: int, group: int, k: int
    ) -> npt.NDArray[np.int32] | None:
        """None also of old files, which have no g_idx; but inputs in the order of their activations
        are of groups that only g_idx tells.
        """
        if groups == 1 or (
            "g_idx" not in module.tensors and not self.quantization.activation_order
        ):
            return None
        g_idx = self.shaped(module, "g_idx", (k,), "I32", "I64")
        try:
            return input_order(g_idx.astype(np.int64), group)
        except ValueError as error:
            self.stored.refuse(self.name(module, "g_idx"), str(error))


def _overrides(keys: Section, base: QuantizationArgs) -> list[QuantizationArgs]:
    """What GPTQModel's ``dynamic`` and AutoRound's ``extra_config`` say of single modules. Those of
    which they say that they stay as they are show it by their tensors.
    """
    found = []
    for key in ("dynamic", "extra_config"):
        if not keys.values.get(key):
            continue
        rules = keys.object(key)
        for pattern in rules.values:
            if pattern.startswith("-"):
                continue
            rule = rules.object(pattern)
            bits, group = base
            if rule.values.get("bits") is not None:
                if rule.values["bits"] == 16:
                    continue
                bits = bits_of(rule, "bits", BITS)
            if rule.values.get("group_size") is not None:
                group = sized(rule)
            found.append(QuantizationArgs(bits, group))
    return found


def _writer(keys: Section) -> str:
    """The package that wrote the tensors, "" if it is not said."""
    meta = keys.values.get("meta")
    writers = meta.get("quantizer") if isinstance(meta, dict) else None
    named = [w for w in (writers if isinstance(writers, list) else [writers]) if type(w) is str]
    provider = keys.values.get("provider", keys.values.get("quant_method"))
    named += [provider] if isinstance(provider, str) else []
    return next((w for w in named if w.startswith(_WHOLE_WORDS)), "")
