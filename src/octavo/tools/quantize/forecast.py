"""What quantizing will bring, before it begins: bytes, and the least that can be lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from octavo.loader.base import Checkpoint, Weight
from octavo.loader.dequantize import dequantize
from octavo.tools.quantize.folder import stored_as
from octavo.tools.quantize.grid import Float32, bf16, round_to_nearest
from octavo.tools.quantize.hf_model import places
from octavo.tools.quantize.k_quants import k_quantize
from octavo.tools.quantize.layouts import Format, module_bytes
from octavo.tools.quantize.quantizer import Recipe
from octavo.tools.quantize.scope import FLOATS, worth

_SAMPLE = 1 << 15  # weights of a matrix whose error is measured
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class QuantizationForecast(NamedTuple):
    """Bytes by role, and of a sample of each the squares of the weights and of the least error."""

    before: dict[str, int]
    after: dict[str, int]
    squares: dict[str, tuple[float, float]]
    quantized: tuple[str, ...]  # formats of the source's matrices that are no floats

    @property
    def gains(self) -> bool:
        """Whether the result is enough smaller to be worth its loss."""
        before, after = sum(self.before.values()), sum(self.after.values())
        return worth(before, after, quantized=bool(self.quantized))


def forecast(checkpoint: Checkpoint, recipe: Recipe, format: Format) -> QuantizationForecast:
    """The least error is that of rounding to nearest on the best grids that are searched: of the
    weights no method loses less, though of what they do to the inputs it may."""
    weights = checkpoint.weights
    formats = {weight.stored.format for weight in weights.values() if len(weight.shape) == 2}
    return QuantizationForecast(
        {role: weight.stored.nbytes for role, weight in weights.items()},
        sizes(checkpoint, recipe, format),
        {role: _squares(checkpoint, recipe, format, role) for role in weights},
        tuple(sorted(formats - FLOATS)),
    )


def sizes(checkpoint: Checkpoint, recipe: Recipe, format: Format) -> dict[str, int]:
    """Bytes that `run.quantize` would write, by role; of a fused matrix all with the first one."""
    if format is Format.GGUF:
        return {role: _in_gguf(checkpoint, recipe, role) for role in checkpoint.weights}
    return dict(_in_folder(checkpoint, recipe, format))


def _in_gguf(checkpoint: Checkpoint, recipe: Recipe, role: str) -> int:
    weight = checkpoint.weights[role]
    if scheme := recipe.of(role, weight.shape):
        return module_bytes(Format.GGUF, scheme, *weight.shape)
    count = int(np.prod(weight.shape))
    if role.startswith("layers.") and role not in recipe.kept:
        return 4 * count
    if not checkpoint.path.is_dir():
        return weight.stored.nbytes
    return count * _BYTES.get(weight.format.name, 2)


def _in_folder(checkpoint: Checkpoint, recipe: Recipe, format: Format) -> Iterator[tuple[str, int]]:
    for place in places(checkpoint.config, list(checkpoint.weights)):
        members = [checkpoint.weights[role] for role in place.roles]
        first, rows = place.roles[0], sum(weight.shape[0] for weight in members)
        scheme = recipe.of(first, members[0].shape)
        if scheme is None:
            count = sum(int(np.prod(weight.shape)) for weight in members)
            yield first, count * _BYTES[stored_as(checkpoint, members[0])]
            continue
        packed = first in recipe.ends
        yield first, module_bytes(format, scheme, rows, members[0].shape[1], packed=packed)


def _squares(
    checkpoint: Checkpoint, recipe: Recipe, format: Format, role: str
) -> tuple[float, float]:
    """The sums of squares of the weights and of their errors."""
    weight = checkpoint.weights[role]
    values = _sample(weight)
    scheme = recipe.of(role, weight.shape)
    error = np.zeros((), np.float32)
    if scheme is not None:
        error = _rounded(recipe, role, values) - values
    elif format is not Format.GGUF and stored_as(checkpoint, weight) == "BF16":
        error = bf16(values) - values
    return float(np.square(values).mean()), float(np.square(error).mean())


def _rounded(recipe: Recipe, role: str, values: Float32) -> Float32:
    scheme, inputs = recipe.of(role, values.shape), values.shape[1]
    assert scheme is not None
    if recipe.mix is not None:
        return k_quantize(scheme.kind.format, values).values()
    everywhere = np.ones((scheme.groups(inputs), scheme.size(inputs)), np.float32)
    return round_to_nearest(scheme, values, everywhere).values()


def _sample(weight: Weight) -> Float32:
    """Rows from all of a matrix, or everything of what is none."""
    if len(weight.shape) != 2:  # a vector, or a convolution
        return dequantize(weight)
    rows, inputs = weight.shape
    count = min(rows, max(1, _SAMPLE // inputs))
    chosen = np.linspace(0, rows - 1, count).astype(int).tolist()
    return np.concatenate([dequantize(weight, row, row + 1) for row in chosen])
