"""A text's samples on their way through a model, a stretch of ops at a time, and one layer's
weights in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.executor.reference import evaluate
from octavo.loader.base import Weight
from octavo.loader.dequantize import dequantize
from octavo.models.config import ModelConfig
from octavo.models.program import Op, Values, slots
from octavo.tools.quantize.grid import Float32
from octavo.tools.quantize.layers import LayerOps, SharedInput, live, roles
from octavo.tools.quantize.state import LayerResult, QuantizeError

CHUNK = 4096  # tokens that go through a layer at a time


class HiddenStates:
    """What the ops to come read, of all samples; nothing of a model without samples."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._chunks: list[Values] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def begin(
        self,
        ops: tuple[Op, ...],
        samples: npt.NDArray[np.int32],
        rows_of: Callable[[str, npt.NDArray[np.int32]], Float32],
    ) -> None:
        """The samples [sequences, tokens], embedded, some sequences at a time. ``rows_of`` gives
        rows of a matrix of ``ops``."""
        count = max(1, CHUNK // samples.shape[1])
        used, places = np.unique(samples, return_inverse=True)
        weights = {role: rows_of(role, used) for op in ops for role in roles(op)}
        places = places.reshape(samples.shape)
        for start in range(0, len(samples), count):
            values: Values = {}
            evaluate.run(ops, self.config, weights, values, places[start : start + count])
            self._chunks.append(values)

    def advance(
        self, layer: LayerOps, weights: Mapping[str, Float32], start: int, end: int
    ) -> None:
        """Through the layer's ops from ``start`` to ``end``. Kept is what the rest of the layer, or
        the next one, reads."""
        if start == end:
            return
        wanted = live(layer.ops[end:], frozenset({"x"}))
        for values in self._chunks:
            evaluate.run(layer.ops[start:end], self.config, weights, values)
            for name in values.keys() - wanted:
                del values[name]

    def follow(self, layer: LayerOps, weights: Mapping[str, Float32]) -> None:
        """Through a finished layer, stopping where work on it stops: the same products in the same
        pieces give the same bits after an interruption."""
        for a, b in pairwise([0, *(shared.first for shared in layer.inputs), len(layer.ops)]):
            self.advance(layer, weights, a, b)

    def inputs(self, shared: SharedInput, width: int) -> Iterator[Float32]:
        """The rows [..., width] that its matrices read, where the samples have come to them: an
        expert's those of the tokens that are routed to it."""
        for values in self._chunks:
            x = values[shared.x]
            if shared.expert is not None:
                experts = self.config.experts
                assert experts is not None
                chosen, rows = slots(x, values[shared.route], experts, width)
                x = rows[chosen == shared.expert]
            yield x

    def outputs(
        self, ops: tuple[Op, ...], weights: Mapping[str, Float32], name: str
    ) -> Iterator[Float32]:
        """What ``ops`` make of them under a name."""
        for values in self._chunks:
            evaluate.run(ops, self.config, weights, values)
            yield values[name]


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
