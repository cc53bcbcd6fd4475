"""An executor that computes nothing and says how long it would have taken.

It counts the bytes and operations of a Program for a Batch. The engine on top of it, with a
virtual clock, is the simulator: the scheduler and the cache are the real ones.

The duration is a roofline an op: the longer of its memory time and its arithmetic time
(Williams, Waterman and Patterson, 2009), summed over the ops, plus a fixed overhead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.execute.batch import Batch, Int32, StepResult
from octavo.kv.layout import KvLayout
from octavo.model.program import (
    Add,
    Embed,
    GatedActivation,
    Linear,
    Logits,
    PagedAttention,
    Program,
    RmsNorm,
    RopeAndStoreKv,
)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second. The default is infinitely fast."""

    bytes_per_second: float = inf  # memory, read or written
    ops_per_second: float = inf  # a multiply-add is two
    step_overhead: float = 0.0  # seconds

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.ops_per_second <= 0 or self.step_overhead < 0:
            raise ValueError(f"rates must be positive and the overhead not negative: {self}")


class StepCost(NamedTuple):
    """What a step moves and computes, and how long that takes."""

    weight_bytes: int
    kv_bytes: int
    ops: int
    seconds: float


class _Term(NamedTuple):
    """Ops alike: ``fixed`` bytes a step, then bytes and operations a token (or a logits row)."""

    fixed_bytes: int
    row_bytes: int
    row_ops: int
    of_logits: bool


class CostExecutor:
    """Implements Executor without memory or arithmetic.

    ``weight_bytes`` maps weight roles to stored bytes; a role left out counts two bytes an
    element. Activations are taken to stay in the processor's caches.
    """

    def __init__(
        self,
        program: Program,
        layout: KvLayout,
        *,
        num_blocks: int,
        rates: Rates = Rates(),
        max_tokens: int = 512,
        max_logits_rows: int = 256,
        weight_bytes: Mapping[str, int] | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        self.max_logits_rows = max_logits_rows
        self.rates = rates
        self._free = rates == Rates()
        config = program.config
        self._kv_token_bytes = 2 * config.num_kv_heads * config.head_dim * layout.element_bytes
        self._attention_ops = 4 * config.num_heads * config.head_dim  # a key, for one query
        self._windows = Counter(op.window for op in program.ops if isinstance(op, PagedAttention))
        self._terms = _terms(program, weight_bytes or {})
        self._dense = lru_cache(maxsize=65536)(self._dense_cost)

    def cost(self, batch: Batch) -> StepCost:
        """Bytes, operations and seconds of one step."""
        weight_bytes, ops, seconds = self._dense(batch.num_tokens, len(batch.logits_rows))
        offsets = batch.seq_offsets
        sizes = np.diff(offsets).astype(np.int64)
        starts = batch.positions[offsets[:-1]].astype(np.int64)
        ends = starts + sizes
        kv_bytes = 0
        for window, layers in self._windows.items():
            keys = _visible(ends, window) - _visible(starts, window)
            first = 0 if window is None else np.maximum(0, starts - window + 1)
            moved = int((ends - first + sizes).sum()) * self._kv_token_bytes
            computed = int(keys.sum()) * self._attention_ops
            seconds += layers * self._time(moved, computed)
            kv_bytes += layers * moved
            ops += layers * computed
        kv_bytes += 2 * len(batch.copies) * self.layout.block_bytes
        return StepCost(weight_bytes, kv_bytes, ops, seconds + self.rates.step_overhead)

    def execute(self, batch: Batch) -> StepResult:
        return StepResult(None, 0.0 if self._free else self.cost(batch).seconds)

    def export_blocks(self, blocks: Int32) -> npt.NDArray[np.uint8]:
        return np.zeros((len(blocks), self.layout.block_bytes), dtype=np.uint8)

    def import_blocks(self, blocks: Int32, data: npt.NDArray[np.uint8]) -> None:
        pass

    def close(self) -> None:
        pass

    def _time(self, moved: int, computed: int) -> float:
        return max(moved / self.rates.bytes_per_second, computed / self.rates.ops_per_second)

    def _dense_cost(self, tokens: int, rows: int) -> tuple[int, int, float]:
        """Weight bytes, operations and seconds of all ops but attention."""
        total_bytes, total_ops, seconds = 0, 0, 0.0
        for term, count in self._terms.items():
            n = rows if term.of_logits else tokens
            if n:
                moved, computed = term.fixed_bytes + n * term.row_bytes, n * term.row_ops
                total_bytes += count * moved
                total_ops += count * computed
                seconds += count * self._time(moved, computed)
        return total_bytes, total_ops, seconds


def _visible(position: npt.NDArray[np.int64], window: int | None) -> npt.NDArray[np.int64]:
    """Keys that the queries at positions 0 … position - 1 see, added up."""
    inside = position if window is None else np.minimum(position, window)
    beyond = position - inside
    return inside * (inside + 1) // 2 + beyond * (window or 0)


def _terms(program: Program, stored: Mapping[str, int]) -> Counter[_Term]:
    def elements(role: str) -> int:
        return int(np.prod(program.weights[role], dtype=np.int64))

    def size(role: str) -> int:
        return stored.get(role, 2 * elements(role))

    terms: Counter[_Term] = Counter()
    for op in program.ops:
        match op:
            case Embed(weight):
                rows = program.weights[weight][0]
                terms[_Term(0, size(weight) // rows, 0, False)] += 1
            case Linear(_, weight, _, bias):
                extra = size(bias) if bias else 0
                terms[_Term(size(weight) + extra, 0, 2 * elements(weight), False)] += 1
            case Logits(_, weight):
                terms[_Term(size(weight), 0, 2 * elements(weight), True)] += 1
            case RmsNorm(x, weight):
                terms[_Term(size(weight), 0, 4 * program.widths[x], False)] += 1
            case GatedActivation(gate):
                terms[_Term(0, 0, 10 * program.widths[gate], False)] += 1
            case Add(x):
                terms[_Term(0, 0, program.widths[x], False)] += 1
            case RopeAndStoreKv(q, k):
                terms[_Term(0, 0, 6 * (program.widths[q] + program.widths[k]), False)] += 1
            case PagedAttention():
                pass  # depends on the context: counted from the batch
    return terms
