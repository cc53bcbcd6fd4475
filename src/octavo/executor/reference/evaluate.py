"""A Program in numpy, in fp32: the plain meaning of what the other executors compute.

It computes the ops in the order they are listed, so it is also where a layer can be looked into:
`run` takes any stretch of ops, on the values that it finds. Weights come as fp32 arrays by role.
Values are [sequences, tokens, width]. Every sequence starts at position 0 and is whole, unless a
`KeyValues` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import numpy as np

from octavo.models.config import ModelConfig
from octavo.models.program import (
    Evaluation,
    Float32,
    Ids,
    KeyValues,
    Op,
    PagedAttention,
    Program,
    Values,
    attend,
)
from octavo.models.recurrence import Recurrence


class WholeSequences:
    """Implements `KeyValues` for sequences that start at 0 and end with the values."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Float32, Float32]] = {}

    def keep(self, layers: Set[int]) -> None:
        """Forget the keys and values of all other layers."""
        for layer in self._stored.keys() - layers:
            del self._stored[layer]

    def positions(self, tokens: int) -> Ids:
        return np.arange(tokens)

    def store(self, layer: int, keys: Float32, values: Float32) -> None:
        self._stored[layer] = keys, values

    def attend(self, queries: Float32, op: PagedAttention, sinks: Float32 | None = None) -> Float32:
        return attend(queries, *self._stored[op.layer], op, sinks=sinks)

    def recur(self, op: Recurrence, weights: Mapping[str, Float32], rows: Float32) -> Float32:
        return np.stack([op.advance(weights, each, op.initial)[0] for each in rows])


def logits(program: Program, weights: Mapping[str, Float32], token_ids: Ids) -> Float32:
    """Return the logits [sequences, tokens, vocab] of every position of token_ids [sequences,
    tokens].
    """
    values: Values = {}
    run(program.ops, program.config, weights, values, token_ids)
    return values["logits"]


def run(
    ops: Iterable[Op],
    config: ModelConfig,
    weights: Mapping[str, Float32],
    values: Values,
    token_ids: Ids | None = None,
    kv: KeyValues | None = None,
) -> None:
    """Execute ``ops`` in order, on and into ``values``; `Logits` writes ``values["logits"]``.

    ``token_ids`` [sequences, tokens] are for an `Embed`; the rows for an `Input` are among the
    ``values``, under its name.
    """
    at = Evaluation(config, weights, values, token_ids, kv or WholeSequences())
    for op in ops:
        op.compute(at)
