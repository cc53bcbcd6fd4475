"""A text's samples on their way through a model, a stretch of ops at a time, and one layer's
weights in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.executor.reference import evaluate
from octavo.executor.reference.evaluate import WholeSequences
from octavo.loader.base import Weight
from octavo.loader.dequantize import dequantize
from octavo.models.program import Embed, Op, Program, Values, slots
from octavo.tools.quantize.grid import Float32
from octavo.tools.quantize.layers import LayerOps, SharedInput, live
from octavo.tools.quantize.state import LayerResult, QuantizeError

CHUNK = 4096  # tokens that go through a layer at a time


class HiddenStates:
    """What the layers to come read, of all samples; empty before these begin."""

    def __init__(self, program: Program, layers: Sequence[LayerOps]) -> None:
        self.program = program
        # What layers read of those before them: values, and other layers' keys and values.
        self._handed_on = live([op for layer in layers for op in layer.ops])
        shared = (layer.shares for layer in program.config.layers)
        self._owners = {owner for owner in shared if owner is not None}
        self._chunks: list[_Chunk] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def begin(
        self,
        ops: tuple[Op, ...],
        samples: npt.NDArray[np.int32],
        rows_of: Callable[[str, npt.NDArray[np.int32]], Float32],
    ) -> None:
        """The samples [sequences, tokens], embedded, some sequences at a time. ``rows_of`` gives
        rows of a weight of ``ops``: of an embedding those of the samples' tokens, else all."""
        count = max(1, CHUNK // samples.shape[1])
        used, places = np.unique(samples, return_inverse=True)
        weights = {
            role: rows_of(
                role, used if isinstance(op, Embed) else np.arange(shape[0], dtype=np.int32)
            )
            for op in ops
            for role, shape in op.weight_shapes(self.program.widths, self.program.config).items()
        }
        places = places.reshape(samples.shape)
        for start in range(0, len(samples), count):
            values: Values = {}
            ids = places[start : start + count]
            evaluate.run(ops, self.program.config, weights, values, ids)
            self._chunks.append(_Chunk(values, WholeSequences()))

    def advance(
        self, layer: LayerOps, weights: Mapping[str, Float32], start: int, end: int
    ) -> None:
        """Through the layer's ops from ``start`` to ``end``. Kept is what the rest of the layer, or
        later ones, read."""
        if start == end:
            return
        wanted = live(layer.ops[end:], self._handed_on)
        for values, kv in self._chunks:
            evaluate.run(layer.ops[start:end], self.program.config, weights, values, kv=kv)
            for name in values.keys() - wanted:
                del values[name]
            kv.keep(self._owners)

    def follow(self, layer: LayerOps, weights: Mapping[str, Float32]) -> None:
        """Through a finished layer, stopping where work on it stops: the same products in the same
        pieces give the same bits after an interruption."""
        for a, b in pairwise([0, *(shared.first for shared in layer.inputs), len(layer.ops)]):
            self.advance(layer, weights, a, b)

    def inputs(self, shared: SharedInput, width: int) -> Iterator[Float32]:
        """The rows [..., width] that its matrices read, where the samples have come to them: an
        expert's those of the tokens that are routed to it."""
        for values, _ in self._chunks:
            x = values[shared.x]
            if shared.expert is not None:
                experts = self.program.config.experts
                assert experts is not None
                chosen, rows = slots(x, values[shared.route], experts, width)
                x = rows[chosen == shared.expert]
            yield x

    def outputs(
        self, ops: tuple[Op, ...], weights: Mapping[str, Float32], name: str
    ) -> Iterator[Float32]:
        """What ``ops`` make of them under a name."""
        for values, _ in self._chunks:
            evaluate.run(ops, self.program.config, weights, values)
            yield values[name]


class _Chunk(NamedTuple):
    values: Values
    kv: WholeSequences  # keys and values that later layers read


class LayerWeights(Mapping[str, Float32]):
    """A layer's weights in fp32, made when asked for and kept; ``changed`` ones instead.

    Raises `QuantizeError` for weights that are no finite numbers.
    """

    def __init__(self, path: Path, stored: Mapping[str, Weight], layer: LayerOps) -> None:
        self._path = path
        self._stored = stored
        self._layer = layer
        self._kept: dict[str, Float32] = {}
        self.changed: dict[str, Float32] = {}

    def __getitem__(self, role: str) -> Float32:
        if role in self.changed:
            return self.changed[role]
        if role not in self._kept:
            weight = self._stored[role]
            values = dequantize(weight)
            if not np.isfinite(values).all():
                raise QuantizeError(f"{self._path}: {weight.name}: has weights that are no numbers")
            self._kept[role] = values
        return self._kept[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layer.weights)

    def __len__(self) -> int:
        return len(self._layer.weights)

    def become(self, result: LayerResult) -> None:
        """What the layer has been rounded to."""
        self.changed |= {role: matrix.values() for role, matrix in result.matrices.items()}
        self.changed |= result.vectors


def some_rows(weight: Weight, rows: npt.NDArray[np.int32]) -> Float32:
    """Some rows of a stored matrix."""
    data = np.concatenate([weight.rows(row, row + 1) for row in rows.tolist()])
    return dequantize(weight._replace(shape=(len(rows), *weight.shape[1:]), source=data))
