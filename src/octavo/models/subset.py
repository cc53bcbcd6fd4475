"""A model without some of its layers: a Program over the same weights and the same cache."""

from __future__ import annotations

from collections.abc import Collection

from octavo.models.program import Op, Program


def keep_layers(program: Program, layers: Collection[int]) -> Program:
    """Return the Program of these layers alone, with what stands before and after them all.

    The layers keep their numbers, so that they have their own places in the cache. Raises
    `ValueError` for a number that no layer has, one given twice, or a layer that reads the keys and
    values of one that is left out.
    """
    count = len(program.config.layers)
    kept = set(layers)
    if outside := [layer for layer in layers if not 0 <= layer < count]:
        raise ValueError(f"layer {outside[0]} is outside 0 to {count - 1}")
    if len(kept) < len(layers):
        raise ValueError(f"a layer is named twice in {sorted(layers)}")
    for layer in sorted(kept):
        shares = program.config.layers[layer].shares
        if shares is not None and shares not in kept:
            raise ValueError(f"layer {layer} needs the keys and values of layer {shares}")
    ops: list[Op] = []
    of: int | None = None  # the layer that the op belongs to
    for op in program.ops:
        # An op that has no weights belongs with the one before it.
        for role in program.roles(op):
            of = _layer(role)
        if of is None or of in kept:
            ops.append(op)
    used = {
        role: shape
        for role, shape in program.weights.items()
        if (of := _layer(role)) is None or of in kept
    }
    return Program(program.config, tuple(ops), program.widths, used)


def _layer(role: str) -> int | None:
    """Return the layer that a weight is of; None: of none."""
    room, _, rest = role.partition(".")
    return int(rest.partition(".")[0]) if room == "layers" else None
