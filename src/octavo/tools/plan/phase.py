"""A step and what bounds it: bytes and operations of its parts, and their time on the roofline.

Everything is counted by `CostModel`, op by op; here its numbers are only divided up and added
(Williams, Waterman and Patterson, 2009; Pope et al., 2023, section 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import NamedTuple

import numpy as np

from octavo.executor.base import Batch
from octavo.executor.cost import Arithmetic, CostModel, OpCost, Rates
from octavo.models.program import ExpertLinear, Linear, Logits, Op, PagedAttention

MOST_SEQUENCES = 1 << 14  # up to where a crossing is looked for


class PartCost(NamedTuple):
    """What some of a step's ops move and compute, and their time on the roofline, op by op."""

    name: str
    weight_bytes: int
    kv_bytes: int
    ops: int
    arithmetic: Arithmetic
    memory_seconds: float
    arithmetic_seconds: float
    seconds: float

    @property
    def label(self) -> str:
        return f"{self.name} ({self.arithmetic})"

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.ops / self.bytes if self.bytes else inf

    @property
    def bound(self) -> str:
        """What takes longer; single ops may differ (a last layer computes fewer rows)."""
        return "bytes" if self.memory_seconds >= self.arithmetic_seconds else "operations"


@dataclass(frozen=True, slots=True)
class Phase:
    """A step, or several, and what bounds it."""

    tokens: int
    parts: tuple[PartCost, ...]
    rates: Rates

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def ops(self) -> int:
        return sum(part.ops for part in self.parts)

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.ops / self.bytes

    @property
    def memory_seconds(self) -> float:
        return sum(part.memory_seconds for part in self.parts)

    @property
    def arithmetic_seconds(self) -> float:
        return sum(part.arithmetic_seconds for part in self.parts)

    @property
    def bound(self) -> str:
        return "bytes" if self.memory_seconds >= self.arithmetic_seconds else "operations"


def crossing(model: CostModel, context: int, rates: Rates) -> int | None:
    """The fewest sequences whose decode step takes longer to compute than to read.

    None when no number up to `MOST_SEQUENCES` does: each brings its own KV cache to read, and from
    some context on that takes longer than its arithmetic.
    """

    def computes(sequences: int) -> bool:
        return phase(model, [decode_batch(sequences, context)], rates).bound == "operations"

    if not computes(MOST_SEQUENCES):
        return None
    low, high = 0, MOST_SEQUENCES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if computes(middle) else (middle, high)
    return high


def decode_batch(sequences: int, context: int) -> Batch:
    """A token each of sequences that have ``context`` tokens in the cache."""
    return mixed_batch(sequences, context, 0)


def prefill_batch(tokens: int, prompts: int = 1) -> Batch:
    """Prompts of so many tokens each, of which the last rows want logits."""
    positions = np.tile(np.arange(tokens), prompts)
    offsets = tokens * np.arange(prompts + 1)
    return _batch(positions, offsets, offsets[1:] - 1)


def mixed_batch(sequences: int, context: int, tokens: int, start: int = 0) -> Batch:
    """Sequences that decode with ``context`` tokens in the cache, and ``tokens`` of a prompt after
    its first ``start``.
    """
    positions = np.concatenate([np.full(sequences, context), np.arange(start, start + tokens)])
    count = sequences + (tokens > 0)
    offsets = np.arange(count + 1)
    offsets[sequences + 1 :] += tokens - 1
    return _batch(positions, offsets, offsets[1:] - 1)


def chunked(prompt: int, most: int) -> list[Batch]:
    """The steps of a prompt of which each takes ``most`` tokens; only the last wants logits."""
    steps = []
    for start in range(0, prompt, most):
        size = min(most, prompt - start)
        rows = np.array([size - 1] if start + size == prompt else [])
        steps.append(_batch(np.arange(start, start + size), np.array([0, size]), rows))
    return steps


def _batch(positions: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> Batch:
    count = len(offsets) - 1
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions.astype(np.int32),
        seq_offsets=offsets.astype(np.int32),
        seq_slots=np.arange(count, dtype=np.int32),
        block_tables=np.zeros((1, count, 0), np.int32),
        logits_rows=rows.astype(np.int32),
        copies=np.zeros((0, 2), np.int32),
    )


def phase(model: CostModel, batches: Sequence[Batch], rates: Rates) -> Phase:
    """The ops of a step, or of some steps together, those of a kind and of one arithmetic as one
    part.
    """
    order = ("layers", "head", "attention", "rest")
    found = [
        (_kind(op), cost.arithmetic, cost)
        for batch in batches
        for op, cost in zip(model.program.ops, model.by_op(batch), strict=True)
    ]
    found.sort(key=lambda item: (order.index(item[0]), item[1]))
    parts = [
        _part(kind, unit, [cost for _, _, cost in group], rates)
        for (kind, unit), group in groupby(found, key=lambda item: item[:2])
    ]
    return Phase(sum(batch.num_tokens for batch in batches), tuple(parts), rates)


def _kind(op: Op) -> str:
    match op:
        case Logits():
            return "head"
        case PagedAttention():
            return "attention"
        case Linear() | ExpertLinear():
            return "layers"
    return "rest"


def _part(name: str, unit: Arithmetic, costs: list[OpCost], rates: Rates) -> PartCost:
    alike = Counter(costs).items()
    bandwidth, peak = rates.bytes_per_second, rates.peak(unit)
    if name == "attention":  # of a calibrated machine, on rates of its own
        bandwidth = rates.kv_bytes_per_second or bandwidth
        peak = rates.attention_ops_per_second or peak
    return PartCost(
        name,
        sum(n * cost.weight_bytes for cost, n in alike),
        sum(n * cost.kv_bytes for cost, n in alike),
        sum(n * cost.ops for cost, n in alike),
        unit,
        sum(n * (cost.bytes / bandwidth) for cost, n in alike),
        sum(n * (cost.ops / peak) for cost, n in alike),
        sum(n * cost.seconds(rates) for cost, n in alike),
    )
