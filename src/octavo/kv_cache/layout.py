"""How the layers of a model share the block pool.

All blocks have one size, so that one pool serves every layer kind. A block holds ``block_size``
tokens of keys and values for the layers of one group. Layers of one kind (same window, KV heads and
head width) are split into groups of equal length; each sequence has one block table a group. A
Llama has one group of all layers; Gemma 3 270M (15 window layers, 3 global) has six groups of three
layers. Where kinds have keys of other sizes, so have their groups' lengths, and what is left at the
end of a shorter group's block is padding; kinds that keep the most blocks get the least of it. A
layer that reads another layer's keys and values has none of its own, and is in no group. Nor is a
recurrent layer: its state is in blocks of the same pool (`StateLayout`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from octavo.kv_cache.state_layout import StateLayout
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

    def token_bytes(self, head_dim: int, latent: bool = False) -> int:
        """Return the bytes of a token's key and value on one head, with their scales; of a latent,
        which is both at once, those of the key.
        """
        match self:
            case KvDtype.INT8:  # keys in whole words of four; a scale each, of two bytes
                key, value = -(-head_dim // 4) * 4 + 2, head_dim + 2
            case KvDtype.INT4:  # keys in whole words of eight; a scale and a least value each
                key, value = -(-head_dim // 8) * 4 + 4, head_dim // 2 + 4
            case KvDtype.FP8:
                key = value = head_dim
            case _:
                key = value = 2 * head_dim
        return key if latent else key + value


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
    latent: bool = False  # as of `Layer`


@dataclass(frozen=True, slots=True)
class KvGroup:
    layers: tuple[int, ...]
    window: int | None  # None: every block of the sequence is kept
    kv_heads: int
    head_dim: int
    latent: bool = False


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes in bytes unless they say tokens."""

    groups: tuple[KvGroup, ...]
    block_size: int  # tokens a block
    dtype: KvDtype
    state: StateLayout | None = None  # of the recurrent layers, if there are any

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, which has room for ``block_size`` tokens of any group, and for a
        page of the state.
        """
        size = max(map(self.group_bytes, self.groups))
        return size if self.state is None else self.state.page_bytes(size)

    @property
    def state_blocks(self) -> int:
        """Blocks that the state of one sequence takes."""
        return 0 if self.state is None else self.state.pages

    def group_bytes(self, group: KvGroup) -> int:
        """Return the bytes that keys and values of ``block_size`` tokens of a group take: those
        that its blocks begin with.
        """
        return len(group.layers) * self.block_size * self.token_bytes(group)

    def token_bytes(self, group: KvGroup) -> int:
        """Return the bytes of a token's keys and values in one layer of a group."""
        return group.kv_heads * self.dtype.token_bytes(group.head_dim, group.latent)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of a token while it is inside every window, without padding."""
        return sum(len(group.layers) * self.token_bytes(group) for group in self.groups)

    @property
    def held_bytes_per_token(self) -> int:
        """The same with the padding of its blocks."""
        return self.block_bytes * len(self.groups) // self.block_size

    def place(self, layer: int) -> tuple[int, int]:
        """Return (group, index within the group) of a layer. Raise `KeyError`."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(layer)

    @staticmethod
    def of(
        config: ModelConfig,
        block_size: int = 16,
        dtype: KvDtype = KvDtype.BF16,
        *,
        mtp: bool = False,
    ) -> KvLayout:
        """Return the layout for a model: groups of layers of one kind, with which a sequence of its
        whole context takes the least memory. ``mtp``: with its layer for multi-token prediction,
        which comes behind the others.
        """
        if mtp:
            config = replace(config, layers=(*config.layers, config.mtp_layer))
        layers = layers_by_kind(config)
        counts = {kind: len(each) for kind, each in layers.items()}
        lengths = lengths_by_kind(counts, dtype, config.context_length, block_size)
        groups = tuple(
            KvGroup(tuple(layers[kind][start : start + length]), *kind)
            for kind, length in lengths.items()
            for start in range(0, len(layers[kind]), length)
        )
        layout = KvLayout(groups, block_size, dtype)
        recurrences = {
            index: layer.recurrence
            for index, layer in enumerate(config.layers)
            if layer.recurrence is not None
        }
        if not recurrences:
            return layout
        return replace(layout, state=StateLayout.of(recurrences, layout.block_bytes))


def layers_by_kind(config: ModelConfig) -> dict[KvKind, list[int]]:
    """Return the layers of each kind; recurrent ones and those that read another layer's cache have
    none.
    """
    layers: dict[KvKind, list[int]] = {}
    for index, layer in enumerate(config.layers):
        if layer.shares is None and layer.recurrence is None:
            kind = KvKind(layer.window, *config.heads_of(layer), layer.latent)
            layers.setdefault(kind, []).append(index)
    return layers


def lengths_by_kind(
    counts: Mapping[KvKind, int], dtype: KvDtype, context: int, block_size: int
) -> dict[KvKind, int]:
    """Return the layers a group of each kind, of which there are ``counts`` layers, in the order of
    the groups: for sequences of ``context`` tokens in blocks of ``block_size``.
    """
    kinds = sorted(counts, key=lambda kind: (kind.window or 0, kind.kv_heads, kind.head_dim))
    sizes = [
        (
            counts[kind],
            kind.kv_heads * dtype.token_bytes(kind.head_dim, kind.latent),
            peak_of_window(kind.window, context, block_size),
        )
        for kind in kinds
    ]
    return dict(zip(kinds, group_lengths(sizes), strict=True))


def group_lengths(kinds: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the layers a group of each kind, of which there are so many layers with so many bytes
    a token, and of whose groups a sequence holds so many blocks: divisors of their numbers, with
    which all blocks together take the fewest bytes, then the fewest groups. Kinds of equal bytes
    have the greatest common divisor of their numbers.
    """
    divisors = [
        [length for length in range(count, 0, -1) if count % length == 0] for count, *_ in kinds
    ]
    best: tuple[tuple[int, int], list[int]] | None = None
    for block in {
        length * size for each, (_, size, _) in zip(divisors, kinds, strict=True) for length in each
    }:
        lengths = [
            next((length for length in each if length * size <= block), 0)
            for each, (_, size, _) in zip(divisors, kinds, strict=True)
        ]
        if not all(lengths):
            continue
        groups = [count // length for length, (count, *_) in zip(lengths, kinds, strict=True)]
        held = sum(number * blocks for number, (*_, blocks) in zip(groups, kinds, strict=True))
        rank = block * held, sum(groups)
        if best is None or rank < best[0]:
            best = rank, lengths
    assert best is not None  # a block of the largest layer holds one of any kind
    return best[1]


def peak_of_window(window: int | None, num_tokens: int, block_size: int) -> int:
    """Return the most blocks of one group that a sequence of ``num_tokens`` positions ever holds if
    they are written one by one. A window of w tokens spans at most ceil((w - 1) / block_size) + 1
    blocks; None: all are kept.
    """
    total = -(-num_tokens // block_size)
    return total if window is None else min(total, -(-(window - 1) // block_size) + 1)
