"""The shapes of recurrent layers: what such a layer remembers of the tokens before.

Every recurrence begins with a causal convolution over time, so its state has the last ``taps - 1``
inputs of it. A delta net and a Mamba-2 layer keep a matrix for each head as well.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

_SIZES = {"taps": (2, 16)}  # least and most; others:
_SIZE = 1, 1 << 16


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """A convolution and nothing else (LFM2)."""

    channels: int
    taps: int

    @property
    def matrix(self) -> None:
        return None

    @property
    def gates(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """A gated delta net (Yang et al., 2025): a matrix [key_dim, value_dim] for each value head."""

    key_heads: int
    value_heads: int  # a multiple of the key heads
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool  # value head h belongs to key head h % key_heads, else to h // ratio

    @property
    def channels(self) -> int:
        """Inputs of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def matrix(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def gates(self) -> int:
        """A decay and a beta for each value head."""
        return 2 * self.value_heads


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Mamba-2 (Dao and Gu, 2024): a matrix [state, head_dim] for each head."""

    heads: int  # a multiple of the groups
    head_dim: int
    state: int
    groups: int  # of heads that share B and C
    taps: int

    @property
    def channels(self) -> int:
        """Inputs of the convolution: x, B, C."""
        return self.heads * self.head_dim + 2 * self.groups * self.state

    @property
    def matrix(self) -> tuple[int, int, int]:
        return self.heads, self.state, self.head_dim

    @property
    def gates(self) -> int:
        """A time step for each head."""
        return self.heads


# Each has ``channels`` and ``taps`` of its convolution, ``matrix`` (heads, depth, width) or None,
# and ``gates``, how many numbers a token has beside the convolution's inputs.
RecurrenceShape = ShortConvShape | DeltaShape | MambaShape


def recurrence_fault(shape: RecurrenceShape) -> str | None:
    """Return what is wrong with a shape."""
    for name in (field.name for field in fields(shape) if field.name != "tiled"):
        value = getattr(shape, name)
        low, high = _SIZES.get(name, _SIZE)
        if not low <= value <= high:
            return f"its recurrence has {name} {value}, outside {low} to {high}"
    match shape:
        case DeltaShape(key_heads, value_heads) if value_heads % key_heads:
            return f"{value_heads} value heads are not a multiple of {key_heads} key heads"
        case MambaShape(heads=heads, groups=groups) if heads % groups:
            return f"{heads} heads are not a multiple of {groups} groups"
    if shape.channels > 1 << 20:
        return f"its convolution has {shape.channels} channels, more than {1 << 20}"
    if shape.matrix is not None:
        heads, depth, width = shape.matrix
        if heads * depth * width > 1 << 28:
            return f"its state of {heads} x {depth} x {width} numbers is larger than {1 << 28}"
    return None
