"""The exchange form of a block: bytes that do not depend on how an executor packs its cache.

Engines whose executors pack blocks differently exchange blocks in this form, under the same hash.
Connectors that only serve engines with the same digest (host memory, disk) keep packed bytes.

All numbers are little-endian. A block of the exchange form is the concatenation of

- codes [layers of the group, 2 (keys, values), tokens, KV heads, code bytes],
- scales [layers of the group, 2, tokens, KV heads, 0, 1 or 2] of 16 bits.

By number format, the code bytes of one token on one head are:

- bf16, fp16: head_dim numbers of 16 bits; there are no scales.
- int8: head_dim bytes; the scale is bf16, and a number is (code - 128) * scale.
- int4: head_dim / 2 bytes, dimension 2i in the low half of byte i and 2i + 1 in its high half; the
  scale and the least value are bf16, and a number is code * scale + least.

Codes are of rotated rows, as kernels/kernels.h says. The packed form of the native executor, which
`from_exchange` makes and `to_exchange` reads, is described there as well.

A page of the state of recurrent layers, page i of which stands behind the groups as group G + i, is
exchanged as its units: fp32 in the tiles that kv_cache/state_layout.py describes. The packed form
only adds padding. `state_arrays` and `state_pages` read and write whole states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.layout import KvDtype, KvGroup, KvLayout
from octavo.kv_cache.state_layout import LANES, StateLayout

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

_TILE = 16  # tokens in a tile of the packed form


def exchange_bytes(layout: KvLayout, group: int) -> int:
    """Return the bytes of one block of a group in the exchange form."""
    if layout.state is not None and group >= len(layout.groups):
        return layout.state.units_per_page * layout.state.unit_bytes
    return _num_rows(layout, layout.groups[group]) * _row_bytes(layout, layout.groups[group])


def to_exchange(layout: KvLayout, group: int, packed: Bytes) -> Bytes:
    """Convert blocks of a group, ``packed`` [blocks, block_bytes] as the native executor exports
    them, to the exchange form [blocks, exchange_bytes]. Padding is dropped.
    """
    blocks = len(packed)
    if packed.shape != (blocks, layout.block_bytes):
        raise ValueError(f"blocks of {packed.shape[1:]} bytes, not {layout.block_bytes}")
    if group >= len(layout.groups):
        return packed[:, : exchange_bytes(layout, group)]
    of = layout.groups[group]
    parts = _parts(layout, of, blocks)
    used = packed[:, : layout.group_bytes(of)]
    per_head = used.reshape(blocks, len(of.layers), of.kv_heads, -1)
    ends = np.cumsum([np.prod(shape[3:]) for shape, _ in parts])
    keys, values, scales = (
        part.reshape(shape).transpose(axes).reshape(_rows(layout, of, blocks))
        for part, (shape, axes) in zip(np.split(per_head, ends[:-1], -1), parts, strict=True)
    )
    codes = np.stack([_to_codes(layout, of, keys), _to_codes(layout, of, values)], 2)
    scales = np.moveaxis(scales.reshape(*scales.shape[:-1], 2, 2 * _num_scales(layout)), -2, 2)
    return np.hstack([codes.reshape(blocks, -1), scales.reshape(blocks, -1)])


def from_exchange(layout: KvLayout, group: int, data: Bytes) -> Bytes:
    """Convert blocks of a group, ``data`` [blocks, exchange_bytes], to blocks that the native
    executor can import.
    """
    blocks = len(data)
    packed = np.zeros((blocks, layout.block_bytes), np.uint8)
    if group >= len(layout.groups):
        packed[:, : exchange_bytes(layout, group)] = data
        return packed
    of = layout.groups[group]
    outer, num_rows = _rows(layout, of, blocks)[:-1], _num_rows(layout, of)
    codes, scales = (
        part.reshape(*outer[:2], 2, *outer[2:], part.size // (blocks * num_rows))
        for part in np.split(data, [num_rows * _code_bytes(layout, of)], 1)
    )
    keys, values = (
        _from_codes(layout, of, codes[:, :, index], width)
        for index, width in enumerate(_widths(layout, of))
    )
    rows = keys, values, np.moveaxis(scales, 2, -2)
    tiled = [
        part.reshape([shape[axis] for axis in axes])
        .transpose(np.argsort(axes))
        .reshape(*shape[:3], np.prod(shape[3:]))
        for part, (shape, axes) in zip(rows, _parts(layout, of, blocks), strict=True)
    ]
    packed[:, : layout.group_bytes(of)] = np.concatenate(tiled, -1).reshape(blocks, -1)
    return packed


def state_arrays(layout: StateLayout, pages: Bytes) -> list[Float32]:
    """Return the parts of a state, ``pages`` [P, block_bytes], as arrays [heads, depth, width]."""
    units = pages[:, : layout.units_per_page * layout.unit_bytes].reshape(-1, layout.unit_bytes)
    arrays = []
    for part in layout.parts:
        of_part = units[part.first_unit : part.first_unit + part.num_units, : part.used_bytes]
        tiles = np.ascontiguousarray(of_part).view("<f4").reshape(-1, part.depth, LANES)
        heads = tiles[: part.num_tiles].reshape(part.heads, part.head_tiles, part.depth, LANES)
        rows = heads.transpose(0, 2, 1, 3).reshape(part.heads, part.depth, -1)
        arrays.append(rows[..., : part.width].astype(np.float32))
    return arrays


def state_pages(layout: StateLayout, arrays: Sequence[Float32], block_bytes: int) -> Bytes:
    """Return the pages [P, block_bytes] of the state whose parts are ``arrays`` [heads, depth,
    width].
    """
    units = np.zeros((layout.pages * layout.units_per_page, layout.unit_bytes), np.uint8)
    for part, array in zip(layout.parts, arrays, strict=True):
        rows = np.zeros((part.heads, part.depth, part.head_tiles * LANES), "<f4")
        rows[..., : part.width] = array
        heads = rows.reshape(part.heads, part.depth, part.head_tiles, LANES)
        tiles = np.zeros((part.num_units * part.tiles_per_unit, part.depth, LANES), "<f4")
        tiles[: part.num_tiles] = heads.transpose(0, 2, 1, 3).reshape(-1, part.depth, LANES)
        of_part = units[part.first_unit : part.first_unit + part.num_units, : part.used_bytes]
        of_part[:] = tiles.reshape(part.num_units, -1).view(np.uint8)
    pages = np.zeros((layout.pages, block_bytes), np.uint8)
    pages[:, : layout.units_per_page * layout.unit_bytes] = units.reshape(layout.pages, -1)
    return pages


def _num_rows(layout: KvLayout, group: KvGroup) -> int:
    """Return the keys and values of a block: of each layer, token and head."""
    return 2 * len(group.layers) * layout.block_size * group.kv_heads


def _row_bytes(layout: KvLayout, group: KvGroup) -> int:
    return _code_bytes(layout, group) + 2 * _num_scales(layout)


def _code_bytes(layout: KvLayout, group: KvGroup) -> int:
    """Return the bytes of the codes of one token on one head, without scales."""
    match layout.dtype:
        case KvDtype.INT8:
            return group.head_dim
        case KvDtype.INT4:
            return group.head_dim // 2
    return 2 * group.head_dim


def _num_scales(layout: KvLayout) -> int:
    return {KvDtype.INT8: 1, KvDtype.INT4: 2}.get(layout.dtype, 0)


def _widths(layout: KvLayout, group: KvGroup) -> tuple[int, int]:
    """Return the packed bytes of a row of keys, which has whole words, and of a row of values."""
    width = _code_bytes(layout, group)
    return -(-width // 4) * 4, width


def _rows(layout: KvLayout, group: KvGroup, blocks: int) -> tuple[int, int, int, int, int]:
    return blocks, len(group.layers), layout.block_size, group.kv_heads, -1


def _parts(
    layout: KvLayout, group: KvGroup, blocks: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return, for keys, values and scales, the packed shape and its permutation to rows [blocks,
    layers, tiles, tokens of a tile, heads, …]; tokens may be two axes.
    """
    outer = blocks, len(group.layers), group.kv_heads, layout.block_size // _TILE
    keys, values = _widths(layout, group)
    # A word of 4 bytes has numbers of ``pack`` tokens, each of ``unit`` bytes.
    pack = 4 if _num_scales(layout) else 2
    unit = 4 // pack
    return [
        ((*outer, keys // 4, _TILE, 4), (0, 1, 3, 5, 2, 4, 6)),
        ((*outer, _TILE // pack, values // unit, pack, unit), (0, 1, 3, 4, 6, 2, 5, 7)),
        ((*outer, 2, _num_scales(layout), _TILE, 2), (0, 1, 3, 6, 2, 4, 5, 7)),
    ]


def _to_codes(layout: KvLayout, group: KvGroup, rows: Bytes) -> Bytes:
    """Drop the padding of rows. Of int4, which has dimension i and that half a row further in one
    byte, make bytes with neighbouring dimensions.
    """
    if layout.dtype is not KvDtype.INT4:
        return rows[..., : _code_bytes(layout, group)]
    codes = np.concatenate([rows & 15, rows >> 4], -1)[..., : group.head_dim]
    packed: Bytes = codes[..., ::2] | codes[..., 1::2] << 4
    return packed


def _from_codes(layout: KvLayout, group: KvGroup, codes: Bytes, width: int) -> Bytes:
    """Undo `_to_codes`: return rows of ``width`` bytes, padded with zeros."""
    wide = layout.dtype is KvDtype.INT4
    padded = np.zeros((*codes.shape[:-1], 2 * width if wide else width), np.uint8)
    if not wide:
        padded[..., : codes.shape[-1]] = codes
        return padded
    padded[..., : group.head_dim : 2] = codes & 15
    padded[..., 1 : group.head_dim : 2] = codes >> 4
    rows: Bytes = padded[..., :width] | padded[..., width:] << 4
    return rows
