"""How the layers of a model share the block pool.

All blocks have one size, so that one pool serves every layer kind. A block holds ``block_size``
tokens of keys and values for the layers of one group. Layers of one kind (same window) are split
into groups of equal length; each sequence has one block table a group. A Llama has one group of
all layers; Gemma 3 270M (15 window layers, 3 global) has six groups of three layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import gcd

from octavo.models.config import ModelConfig


class KvDtype(StrEnum):
    """The number format of keys and values. int8 and int4 are codes with a scale for each token and
    head, in the same block (kernels/kernels.h). fp8 is for plans of GPUs only: no kernel here
    computes with it (`served`).
    """

    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"  # one scale for all: e4m3 and e5m2 take the same bytes

    @classmethod
    def of(cls, name: str) -> KvDtype:
        """Return the format of that name, which may also be "auto" (bf16), or vLLM's "bfloat16",
        "float16", "fp8_e4m3" or "fp8_e5m2". Raise `ValueError`.
        """
        try:
            return cls(_KV_NAMES.get(name, name))
        except ValueError:
            raise ValueError(
                f"kv_cache_dtype {name!r} is not supported; auto, {', '.join(cls.served())} are, "
                "and in plans of GPUs fp8"
            ) from None

    @classmethod
    def served(cls) -> tuple[KvDtype, ...]:
        """Return the formats that the engine's cache can hold."""
        return tuple(dtype for dtype in cls if dtype is not cls.FP8)

    def check_served(self) -> None:
        """Raise `ValueError` for a format that no kernel here computes with."""
        if self not in KvDtype.served():
            raise ValueError(
                f"kv_cache_dtype {self} is for plans of GPUs: CPUs have no fp8 units, and no "
                "kernel here computes with it; int8 takes about as many bytes"
            )

    def token_bytes(self, head_dim: int) -> int:
        """Return the bytes of a token's key and value on one head, with their scales."""
        match self:
            case KvDtype.INT8:  # keys in whole words of four; two scales of two bytes
                return -(-head_dim // 4) * 4 + head_dim + 4
            case KvDtype.INT4:  # keys in whole words of eight; two scales and two least values
                return -(-head_dim // 8) * 4 + head_dim // 2 + 8
            case KvDtype.FP8:
                return 2 * head_dim
        return 4 * head_dim


_KV_NAMES = {
    "auto": "bf16",
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}


@dataclass(frozen=True, slots=True)
class KvGroup:
    layers: tuple[int, ...]
    window: int | None  # None: every block of the sequence is kept


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes in bytes unless they say tokens."""

    groups: tuple[KvGroup, ...]
    block_size: int  # tokens a block
    num_kv_heads: int
    head_dim: int
    dtype: KvDtype

    @property
    def layers_per_group(self) -> int:
        return len(self.groups[0].layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of ``block_size`` tokens of one group."""
        return self.layers_per_group * self.block_size * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return self.num_kv_heads * self.dtype.token_bytes(self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of a token while it is inside every window."""
        return self.block_bytes * len(self.groups) // self.block_size

    def place(self, layer: int) -> tuple[int, int]:
        """Return (group, index within the group) of a layer. Raise `KeyError`."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(layer)

    @staticmethod
    def of(config: ModelConfig, block_size: int = 16, dtype: KvDtype = KvDtype.BF16) -> KvLayout:
        """Return the layout for a model: groups of equal length, each with layers of one window."""
        kinds: dict[int | None, list[int]] = {}
        for index, layer in enumerate(config.layers):
            kinds.setdefault(layer.window, []).append(index)
        size = gcd(*(len(layers) for layers in kinds.values()))
        groups = tuple(
            KvGroup(tuple(layers[start : start + size]), window)
            for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
            for start in range(0, len(layers), size)
        )
        return KvLayout(groups, block_size, config.num_kv_heads, config.head_dim, dtype)
