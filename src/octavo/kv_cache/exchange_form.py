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
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.layout import KvDtype, KvLayout

Bytes = npt.NDArray[np.uint8]

_TILE = 16  # tokens in a tile of the packed form


def exchange_bytes(layout: KvLayout) -> int:
    """Return the bytes of one block in the exchange form."""
    rows = 2 * layout.layers_per_group * layout.block_size * layout.num_kv_heads
    return rows * (_code_bytes(layout) + 2 * _num_scales(layout))


def to_exchange(layout: KvLayout, packed: Bytes) -> Bytes:
    """Convert ``packed`` [blocks, block_bytes], as the native executor exports it, to the exchange
    form [blocks, exchange_bytes]. Padding is dropped.
    """
    blocks, parts = len(packed), _parts(layout, len(packed))
    per_head = packed.reshape(blocks, layout.layers_per_group, layout.num_kv_heads, -1)
    ends = np.cumsum([np.prod(shape[3:]) for shape, _ in parts])
    keys, values, scales = (
        part.reshape(shape).transpose(axes).reshape(_rows(layout, blocks))
        for part, (shape, axes) in zip(np.split(per_head, ends[:-1], -1), parts, strict=True)
    )
    codes = np.stack([_to_codes(layout, keys), _to_codes(layout, values)], 2)
    scales = np.moveaxis(scales.reshape(*scales.shape[:-1], 2, 2 * _num_scales(layout)), -2, 2)
    return np.hstack([codes.reshape(blocks, -1), scales.reshape(blocks, -1)])


def from_exchange(layout: KvLayout, data: Bytes) -> Bytes:
    """Convert ``data`` [blocks, exchange_bytes] to blocks that the native executor can import."""
    blocks, parts = len(data), _parts(layout, len(data))
    outer = _rows(layout, blocks)[:-1]
    num_rows = 2 * layout.layers_per_group * layout.block_size * layout.num_kv_heads
    codes, scales = (
        part.reshape(*outer[:2], 2, *outer[2:], part.size // (blocks * num_rows))
        for part in np.split(data, [num_rows * _code_bytes(layout)], 1)
    )
    keys, values = (
        _from_codes(layout, codes[:, :, index], width)
        for index, width in enumerate(_widths(layout))
    )
    rows = keys, values, np.moveaxis(scales, 2, -2)
    tiled = [
        part.reshape([shape[axis] for axis in axes])
        .transpose(np.argsort(axes))
        .reshape(*shape[:3], np.prod(shape[3:]))
        for part, (shape, axes) in zip(rows, parts, strict=True)
    ]
    return np.concatenate(tiled, -1).reshape(blocks, layout.block_bytes)


def _code_bytes(layout: KvLayout) -> int:
    """Return the bytes of the codes of one token on one head, without scales."""
    match layout.dtype:
        case KvDtype.INT8:
            return layout.head_dim
        case KvDtype.INT4:
            return layout.head_dim // 2
    return 2 * layout.head_dim


def _num_scales(layout: KvLayout) -> int:
    return {KvDtype.INT8: 1, KvDtype.INT4: 2}.get(layout.dtype, 0)


def _widths(layout: KvLayout) -> tuple[int, int]:
    """Return the packed bytes of a row of keys, which has whole words, and of a row of values."""
    width = _code_bytes(layout)
    return -(-width // 4) * 4, width


def _rows(layout: KvLayout, blocks: int) -> tuple[int, int, int, int, int]:
    return blocks, layout.layers_per_group, layout.block_size, layout.num_kv_heads, -1


def _parts(layout: KvLayout, blocks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return, for keys, values and scales, the packed shape and its permutation to rows [blocks,
    layers, tiles, tokens of a tile, heads, …]; tokens may be two axes.
    """
    outer = blocks, layout.layers_per_group, layout.num_kv_heads, layout.block_size // _TILE
    keys, values = _widths(layout)
    # A word of 4 bytes has numbers of ``pack`` tokens, each of ``unit`` bytes.
    pack = 4 if _num_scales(layout) else 2
    unit = 4 // pack
    return [
        ((*outer, keys // 4, _TILE, 4), (0, 1, 3, 5, 2, 4, 6)),
        ((*outer, _TILE // pack, values // unit, pack, unit), (0, 1, 3, 4, 6, 2, 5, 7)),
        ((*outer, 2, _num_scales(layout), _TILE, 2), (0, 1, 3, 6, 2, 4, 5, 7)),
    ]


def _to_codes(layout: KvLayout, rows: Bytes) -> Bytes:
    """Drop the padding of rows. Of int4, which has dimension i and that half a row further in one
    byte, make bytes with neighbouring dimensions.
    """
    if layout.dtype is not KvDtype.INT4:
        return rows[..., : _code_bytes(layout)]
    codes = np.concatenate([rows & 15, rows >> 4], -1)[..., : layout.head_dim]
    packed: Bytes = codes[..., ::2] | codes[..., 1::2] << 4
    return packed


def _from_codes(layout: KvLayout, codes: Bytes, width: int) -> Bytes:
    """Undo `_to_codes`: return rows of ``width`` bytes, padded with zeros."""
    wide = layout.dtype is KvDtype.INT4
    padded = np.zeros((*codes.shape[:-1], 2 * width if wide else width), np.uint8)
    if not wide:
        padded[..., : codes.shape[-1]] = codes
        return padded
    padded[..., : layout.head_dim : 2] = codes & 15
    padded[..., 1 : layout.head_dim : 2] = codes >> 4
    rows: Bytes = padded[..., :width] | padded[..., width:] << 4
    return rows
