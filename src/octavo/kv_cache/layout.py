"""How the layers of a model share the block pool.

All blocks have one size, so that one pool serves every layer kind. A block holds ``block_size``
tokens of keys and values for the layers of one group. Layers of one kind (same window, KV heads and
head width) are split into groups of equal length; each sequence has one block table a group. A
Llama has one group of all layers; Gemma 3 270M (15 window layers, 3 global) has six groups of three
layers. Where kinds have keys of other sizes, so have their groups' lengths, and what is left at the
end of a shorter group's block is padding. A layer that reads another layer's keys and values has
none of its own, and is in no group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

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


class KvKind(NamedTuple):
    """What layers of one kind have in common."""

    window: int | None
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KvGroup:
    layers: tuple[int, ...]
    window: int | None  # None: every block of the sequence is kept
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes in bytes unless they say tokens."""

    groups: tuple[KvGroup, ...]
    block_size: int  # tokens a block
    dtype: KvDtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, which has room for ``block_size`` tokens of any group."""
        return max(map(self.group_bytes, self.groups))

    def group_bytes(self, group: KvGroup) -> int:
        """Return the bytes that keys and values of ``block_size`` tokens of a group take: those
        that its blocks begin with.
        """
        return len(group.layers) * self.block_size * self.token_bytes(group)

    def token_bytes(self, group: KvGroup) -> int:
        """Return the bytes of a token's keys and values in one layer of a group."""
        return group.kv_heads * self.dtype.token_bytes(group.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of a token while it is inside every window, without padding."""
        return sum(len(group.layers) * self.token_bytes(group) for group in self.groups)

    def place(self, layer: int) -> tuple[int, int]:
        """Return (group, index within the group) of a layer. Raise `KeyError`."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(layer)

    @staticmethod
    def of(config: ModelConfig, block_size: int = 16, dtype: KvDtype = KvDtype.BF16) -> KvLayout:
        """Return the layout for a model: groups of layers of one kind, with the least padding."""
        layers = layers_by_kind(config)
        lengths = lengths_by_kind({kind: len(each) for kind, each in layers.items()}, dtype)
        groups = tuple(
            KvGroup(tuple(layers[kind][start : start + length]), *kind)
            for kind, length in lengths.items()
            for start in range(0, len(layers[kind]), length)
        )
        return KvLayout(groups, block_size, dtype)


def layers_by_kind(config: ModelConfig) -> dict[KvKind, list[int]]:
    """Return the layers of each kind; those that read another layer's cache have none."""
    layers: dict[KvKind, list[int]] = {}
    for index, layer in enumerate(config.layers):
        if layer.shares is None:
            layers.setdefault(KvKind(layer.window, *config.heads_of(layer)), []).append(index)
    return layers


def lengths_by_kind(counts: Mapping[KvKind, int], dtype: KvDtype) -> dict[KvKind, int]:
    """Return the layers a group of each kind, of which there are ``counts`` layers, in the order of
    the groups.
    """
    kinds = sorted(counts, key=lambda kind: (kind.window or 0, kind.kv_heads, kind.head_dim))
    sizes = [(counts[kind], kind.kv_heads * dtype.token_bytes(kind.head_dim)) for kind in kinds]
    return dict(zip(kinds, group_lengths(sizes), strict=True))


def group_lengths(kinds: Sequence[tuple[int, int]]) -> list[int]:
    """Return the layers a group of each kind, of which there are so many layers with so many bytes
    a token: divisors of their numbers, with the least padding in blocks of one size, then the
    fewest groups. Kinds of equal bytes have the greatest common divisor of their numbers.
    """
    divisors = [
        [length for length in range(count, 0, -1) if count % length == 0] for count, _ in kinds
    ]
    best: tuple[tuple[int, int], list[int]] | None = None
    for block in {
        length * size for each, (_, size) in zip(divisors, kinds, strict=True) for length in each
    }:
        lengths = [
            next((length for length in each if length * size <= block), 0)
            for each, (_, size) in zip(divisors, kinds, strict=True)
        ]
        if not all(lengths):
            continue
        groups = [count // length for length, (count, _) in zip(lengths, kinds, strict=True)]
        padding = block * sum(groups) - sum(count * size for count, size in kinds)
        rank = padding, sum(groups)
        if best is None or rank < best[0]:
            best = rank, lengths
    assert best is not None  # a block of the largest layer holds one of any kind
    return best[1]
