"""What a quantized GGUF file takes over from the GGUF file that it is made of.

Keys are copied byte for byte but for those that say how weights are stored, and so are all tensors
that are not quantized and cannot have changed.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from struct import unpack_from

import numpy as np

from octavo.loader.base import Checkpoint
from octavo.loader.bind import STACKS, gathered
from octavo.loader.files import map_file
from octavo.loader.gguf_split import open_gguf
from octavo.loader.loader import parts_of
from octavo.loader.loader import role as role_of
from octavo.models.families import FAMILIES
from octavo.tools.quantize.gguf_writer import (
    Bytes,
    Content,
    GgufTensor,
    changed,
    key,
    matrix,
    of_storage,
    rounded,
)
from octavo.tools.quantize.quantizer import Recipe
from octavo.tools.quantize.state import LayerResult

_OF_SPLITS = ("split.no", "split.count", "split.tensors.count")
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_HEADER = 24  # bytes: magic, version, tensors, keys


def copied(checkpoint: Checkpoint, recipe: Recipe) -> Content:
    """``checkpoint`` is of a GGUF file, split or whole."""
    file, family = open_gguf(checkpoint.path), FAMILIES[checkpoint.config.family]
    weights, tensors, matrices = checkpoint.weights, [], 0
    for name, info in file.tensors.items():
        role = role_of(name, family)
        weight = weights.get(role)
        prefix, part = parts_of(role)
        called = part.removesuffix(".bias")
        ending = part.removeprefix(called)
        places = gathered(prefix, called, ending, weights, checkpoint.config, gguf=True)
        if places and not places.keys() & recipe.kept:
            roles, order = tuple(places), np.argsort(np.concatenate([*places.values()]))
            scheme = recipe.of(roles[0], weights[roles[0]].shape)
            if scheme is None:
                tensors.append(changed(name, info.shape, roles, weights, order))
            else:
                tensors.append(matrix(name, info.shape, scheme.kind.format, roles, order=order))
                matrices += 1
        elif roles := _quantized(checkpoint, recipe, name, info.shape):
            scheme = recipe.of(roles[0], weights[roles[0]].shape)
            assert scheme is not None
            tensors.append(matrix(name, info.shape, scheme.kind.format, roles))
            matrices += 1
        elif role in recipe.ends and weight is not None:
            tensors.append(rounded(name, role, weight, recipe))
        elif (
            role.startswith("layers.")
            and role not in recipe.kept
            and weight is not None
            and weight.name == name
        ):
            tensors.append(changed(name, weight.shape, [role], weights))
        else:

            def data(_: LayerResult, name: str = name) -> Bytes:
                return file.weight(name).data

            tensors.append(GgufTensor(name, info.shape, info.format, None, data))
    own = of_storage(recipe) if matrices else {}
    dropped = {*own, *_OF_SPLITS}
    keys = [span for name, span in spans(file.path) if name not in dropped]
    keys += [key(name, value) for name, value in own.items()]
    return Content(keys, tensors, file.alignment)


def _quantized(
    checkpoint: Checkpoint, recipe: Recipe, name: str, shape: tuple[int, ...]
) -> tuple[str, ...]:
    """The roles of the layers' quantized matrices that a tensor is made of, or none."""
    family, weights = FAMILIES[checkpoint.config.family], checkpoint.weights
    role = role_of(name, family)
    prefix, part = parts_of(role)
    members = tuple(prefix + each for each in family.gguf_fusions.get(part, ()))
    rows = [weights[member].shape[0] for member in members if member in weights]
    if part in STACKS and len(shape) == 3:
        members = tuple(f"{prefix}{each}.{e}" for e in range(shape[0]) for each in STACKS[part])
    elif not members or len(rows) != len(members) or sum(rows) != shape[0]:
        members = (role,) if role.startswith("layers.") and role in weights else ()
    return members if all(recipe.of(each, weights[each].shape) for each in members) else ()


# ── Keys ────────────────────────────────────────────────────────────────────────────────────────


def spans(path: Path) -> list[tuple[str, bytes]]:
    """Each key of a file that has been checked already, with its bytes."""
    view = map_file(path, _HEADER, "GGUF")
    (count,) = unpack_from("<Q", view, _HEADER - 8)
    at, found = _HEADER, []
    for _ in range(count):
        start = at
        (length,) = unpack_from("<Q", view, at)
        name = bytes(view[at + 8 : at + 8 + length]).decode()
        at += 8 + length
        (kind,) = unpack_from("<I", view, at)
        at = _skip(view, at + 4, kind)
        found.append((name, bytes(view[start:at])))
    return found


def _skip(view: mmap.mmap, at: int, kind: int) -> int:
    """Where the value ends that begins there."""
    if kind == _STRING:
        return at + 8 + int(unpack_from("<Q", view, at)[0])
    if kind != _ARRAY:
        return at + _SIZES[kind]
    inner, count = unpack_from("<IQ", view, at)
    at += 12
    if inner in _SIZES:
        return at + int(count) * _SIZES[inner]
    for _ in range(count):
        at = _skip(view, at, inner)
    return at
