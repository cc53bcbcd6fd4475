"""A model without some of its layers: a Program over the same weights and the same cache."""

from __future__ import annotations

from collections.abc import Collection

from octavo.models.program import Op, Program


def keep_layers(program: Program, layers: Collection[int]) -> Program:
    """Return the Program of these layers alone, with what stands before and after them all.

    The layers keep their numbers, so that they have their own places in the cache. Raises
    `ValueError` for a number that no layer has, or one given twice.
    """
    count = len(program.config.layers)
    kept = set(layers)
    if outside := [layer for layer in layers if not 0 <= layer < count]:
        raise ValueError(f"layer {outside[0]} is outside 0 to {count - 1}")
    if len(kept) < len(layers):
        raise ValueError(f"a layer is named twice in {sorted(layers)}")
    ops: list[Op] = []
    layer: int | None = None  # that the op belongs to
    for op in program.ops:
        # An op that has no weights belongs with the one before it.
        for role in op.weight_shapes(program.widths, program.config):
            layer = _layer(role)
        if layer is None or layer in kept:
            ops.append(op)
    used = {
        role: shape
        for role, shape in program.weights.items()
        if (layer := _layer(role)) is None or layer in kept
    }
    return Program(program.config, tuple(ops), program.widths, used)


def _layer(role: str) -> int | None:
    """Return the layer that a weight is of; None: of none."""
    room, _, rest = role.partition(".")
    return int(rest.partition(".")[0]) if room == "layers" else None
