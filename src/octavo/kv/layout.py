"""How the layers of a model share the block pool.

All blocks have one size, so that one pool serves every layer kind. A block holds ``block_size``
tokens of keys and values for the layers of one group. Layers of one kind (same window) are split
into groups of equal length; each sequence has one block table a group. A Llama has one group of
all layers; Gemma 3 270M (15 window layers, 3 global) has six groups of three layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from octavo.model.config import ModelConfig


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
    element_bytes: int  # 2 for f16 and bf16

    @property
    def layers_per_group(self) -> int:
        return len(self.groups[0].layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of ``block_size`` tokens of one group."""
        return (
            2
            * self.layers_per_group
            * self.num_kv_heads
            * self.head_dim
            * self.block_size
            * self.element_bytes
        )

    @property
    def bytes_per_token(self) -> int:
        """KV bytes a token costs while it is inside every window."""
        return self.block_bytes * len(self.groups) // self.block_size

    def place(self, layer: int) -> tuple[int, int]:
        """(group, index within the group) of a layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(layer)

    @staticmethod
    def of(config: ModelConfig, block_size: int = 16, element_bytes: int = 2) -> KvLayout:
        kinds: dict[int | None, list[int]] = {}
        for index, layer in enumerate(config.layers):
            kinds.setdefault(layer.window, []).append(index)
        size = gcd(*(len(layers) for layers in kinds.values()))
        groups = tuple(
            KvGroup(tuple(layers[start : start + size]), window)
            for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
            for start in range(0, len(layers), size)
        )
        return KvLayout(groups, block_size, config.num_kv_heads, config.head_dim, element_bytes)
