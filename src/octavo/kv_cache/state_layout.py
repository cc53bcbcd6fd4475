"""How the state of a sequence's recurrent layers lies in blocks of the pool.

The state is ``pages`` blocks, divided into units of ``unit_bytes``. It has parts: for each
recurrent layer the last inputs of its convolution, and for those that have one, its matrices. A
part is fp32 tiles [depth][16 lanes], in order of heads and lanes, as many as fit into each unit; it
begins with a new unit. For inputs of a convolution, depth is time, the oldest first, and lanes are
channels; a matrix is [heads, depth, width], and its lanes are its columns. Lanes beyond the width,
and bytes that belong to no tile, are zero, so that equal states have equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models.recurrence_shape import RecurrenceShape

LANES = 16  # of a tile
_ROW_BYTES = 4 * LANES
_SMALL_UNIT = 4096  # bytes of a unit, at most, if no layer has matrices


@dataclass(frozen=True, slots=True)
class StatePart:
    """One array [heads, depth, width] of a layer; the last inputs of its convolution have one
    head.
    """

    layer: int
    heads: int
    depth: int
    width: int
    is_matrix: bool
    first_unit: int
    tiles_per_unit: int

    @property
    def head_tiles(self) -> int:
        return -(-self.width // LANES)

    @property
    def num_tiles(self) -> int:
        return self.heads * self.head_tiles

    @property
    def num_units(self) -> int:
        return -(-self.num_tiles // self.tiles_per_unit)

    @property
    def used_bytes(self) -> int:
        """Bytes of a unit, from its beginning on, that are tiles."""
        return self.tiles_per_unit * self.depth * _ROW_BYTES


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Unit u is in page u // units_per_page, at (u % units_per_page) * unit_bytes."""

    parts: tuple[StatePart, ...]
    unit_bytes: int
    units_per_page: int
    row_bytes: int  # of the inputs that a token has in all recurrent layers: a row of the log

    @property
    def pages(self) -> int:
        """Blocks of the pool that hold one state."""
        last = self.parts[-1]
        return -(-(last.first_unit + last.num_units) // self.units_per_page)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a state without padding."""
        return sum(4 * part.heads * part.depth * part.width for part in self.parts)

    def page_bytes(self, kv_bytes: int) -> int:
        """Return the bytes of a block that has ``kv_bytes`` of keys and values, and the state's
        pages.
        """
        return _page_bytes(kv_bytes, self.unit_bytes)

    def parts_of(self, layer: int) -> tuple[StatePart, ...]:
        """Return a layer's parts: inputs of its convolution, then, if it has any, its matrices."""
        return tuple(part for part in self.parts if part.layer == layer)

    @staticmethod
    def of(recurrences: Mapping[int, RecurrenceShape], kv_bytes: int) -> StateLayout:
        """Return the layout for these layers, in blocks of at least ``kv_bytes``."""
        arrays = [
            (layer, *array)
            for layer, shape in recurrences.items()
            for array in (
                (1, shape.taps - 1, shape.channels, False),
                *(() if shape.matrix is None else ((*shape.matrix, True),)),
            )
        ]
        unit_bytes = max(_ROW_BYTES * depth for _, _, depth, _, _ in arrays)
        if not any(is_matrix for *_, is_matrix in arrays):
            unit_bytes *= max(1, min(_SMALL_UNIT, kv_bytes) // unit_bytes)
        parts: list[StatePart] = []
        first = 0
        for layer, heads, depth, width, is_matrix in arrays:
            tiles = unit_bytes // (_ROW_BYTES * depth)
            parts.append(StatePart(layer, heads, depth, width, is_matrix, first, tiles))
            first += parts[-1].num_units
        units_per_page = _page_bytes(kv_bytes, unit_bytes) // unit_bytes
        row_bytes = 4 * sum(shape.channels + shape.gates for shape in recurrences.values())
        return StateLayout(tuple(parts), unit_bytes, units_per_page, row_bytes)


def _page_bytes(kv_bytes: int, unit_bytes: int) -> int:
    return -(-max(kv_bytes, unit_bytes) // _ROW_BYTES) * _ROW_BYTES
