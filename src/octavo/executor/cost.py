"""What a step costs in bytes, operations and seconds.

`CostModel` counts the bytes and operations of a Program for a Batch, op by op. It is the one place
where anything is counted that is called a limit, a share of a limit, or a prediction.

The duration is a roofline for each op: the longer of its memory time and its arithmetic time
(Williams, Waterman and Patterson, 2009), summed over the ops, plus a fixed overhead. Where a
machine has been calibrated for a model (engine/calibration.py), the knee between the two is
soft, attention has rates of its own, and rows and prompts have overheads, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache
from itertools import count
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.executor.base import Batch, Int32
from octavo.kv_cache.layout import KvLayout
from octavo.models.config import Experts
from octavo.models.program import PagedAttention, Program


class Arithmetic(StrEnum):
    """The units that an op's multiplications run on, each with its own peak."""

    INT8 = "int8"
    FP8 = "fp8"
    BF16 = "bf16"
    FP32 = "fp32"


SHARPEST = 16.0  # knee but the infinite
KNEES = ("knee", "attention_knee")
PANEL_ROWS = 8  # that weights are unpacked for at a time (kernels/linear.h, kPanel)
# With more than so many rows a thread, the threads share out panels of rows and not columns of
# weights (kernels/runtime.cpp, kChunkRows).
CHUNK_ROWS = 32


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second. The default is infinitely fast.

    ``knee`` is how far reading and arithmetic overlap: of an op's two times a and b,
    (a^knee + b^knee)^(1/knee) passes. Infinite, it is the longer (a roofline); 1, their sum. What
    is given for attention holds there instead. ``threads`` are those that share out an op's rows as
    the kernels do, so that others wait for the one with a panel more; 0: all end together.
    """

    bytes_per_second: float = inf  # memory, read or written
    ops_per_second: float = inf  # in fp32; a multiply-add is two
    step_overhead: float = 0.0  # seconds
    int8_ops_per_second: float | None = None  # None: as fp32
    bf16_ops_per_second: float | None = None
    knee: float = inf
    kv_bytes_per_second: float | None = None  # None: as other bytes
    attention_ops_per_second: float | None = None  # None: as its arithmetic's
    attention_knee: float = inf
    threads: int = 0
    unpacking: float = 0.0  # of weights for a panel of rows, in rows' arithmetic
    batch_overhead: float = 0.0  # seconds of a step with more than one token
    row_overhead: float = 0.0  # seconds a row that wants logits: sampling, text, delivery
    chunk_overhead: float = 0.0  # seconds a chunk of a prompt, of two tokens or more
    fp8_ops_per_second: float | None = None  # None: as bf16

    def __post_init__(self) -> None:
        rates = [self.bytes_per_second, *(self.peak(arithmetic) for arithmetic in Arithmetic)]
        of_attention = self.kv_bytes_per_second, self.attention_ops_per_second
        rates += [rate for rate in of_attention if rate is not None]
        overheads = (
            self.step_overhead, self.batch_overhead, self.row_overhead, self.chunk_overhead,
            self.unpacking, self.threads,
        )  # fmt: skip
        if not (all(rate > 0 for rate in rates) and all(each >= 0 for each in overheads)):
            raise ValueError(f"rates must be positive and overheads not negative: {self}")
        if not all(
            knee == inf or 1 <= knee <= SHARPEST for knee in (self.knee, self.attention_knee)
        ):
            raise ValueError(f"a knee is neither infinite nor from 1 to {SHARPEST}: {self}")

    @property
    def units(self) -> tuple[Arithmetic, ...]:
        """The units to show: CPUs have no fp8."""
        fp8 = self.fp8_ops_per_second is not None
        return tuple(unit for unit in Arithmetic if fp8 or unit is not Arithmetic.FP8)

    def peak(self, arithmetic: Arithmetic) -> float:
        """Return a unit's operations a second."""
        own = None
        if arithmetic is Arithmetic.INT8:
            own = self.int8_ops_per_second
        elif arithmetic is Arithmetic.FP8 and self.fp8_ops_per_second is not None:
            own = self.fp8_ops_per_second
        elif arithmetic in (Arithmetic.BF16, Arithmetic.FP8):
            own = self.bf16_ops_per_second
        return self.ops_per_second if own is None else own

    def seconds(self, moved: int, computed: int, arithmetic: Arithmetic, rows: int = 1) -> float:
        """Return the seconds of an op with operations on ``rows`` rows; not of attention."""
        computing = computed / self.peak(arithmetic)
        if self.threads or self.unpacking:
            computing *= self._work(rows) / rows
        return _overlapped(moved / self.bytes_per_second, computing, self.knee)

    def _work(self, rows: int) -> float:
        """Return, in rows, the work that all threads could do while the last one does its part."""
        panels = -(-rows // PANEL_ROWS)
        if self.threads:
            by_rows = rows > CHUNK_ROWS * self.threads
            together = -(-panels // self.threads) * self.threads
            panels = panels + by_rows * (together - panels)
            rows = rows + by_rows * (PANEL_ROWS * panels - rows)
        return rows + self.unpacking * panels

    def attention_seconds(self, moved: int, computed: int, arithmetic: Arithmetic) -> float:
        """Return the seconds of attention."""
        bandwidth, peak = self.kv_bytes_per_second, self.attention_ops_per_second
        return _overlapped(
            moved / (self.bytes_per_second if bandwidth is None else bandwidth),
            computed / (self.peak(arithmetic) if peak is None else peak),
            self.attention_knee,
        )

    def as_dict(self) -> dict[str, float | None]:
        """Return the fields for JSON, which has no infinity: an infinite knee is null."""
        values = asdict(self)
        return values | {name: None for name in KNEES if values[name] == inf}

    def slowed(self, memory: float, processor: float | None = None) -> Rates:
        """Return the rates of a machine whose memory takes ``memory`` times as long and whose
        processor takes ``processor`` times as long (None: all as the memory).
        """
        slower: dict[str, Any] = {}
        if processor is None:
            processor = memory
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if value is None:
                continue
            if name.endswith("per_second"):
                slower[name] = value / (memory if "bytes" in name else processor)
            elif name.endswith("overhead"):
                slower[name] = value * processor
        return replace(self, **slower)

    def overhead(self, tokens: int, rows: int, chunks: int) -> float:
        """Return the seconds of a step that no op takes. Arguments may be arrays."""
        of_step = self.step_overhead + (tokens > 1) * self.batch_overhead
        return of_step + rows * self.row_overhead + chunks * self.chunk_overhead


def _overlapped(reading: float, computing: float, knee: float) -> float:
    """Return what passes of two times; with a finite knee they may be arrays."""
    if knee == inf:
        return max(reading, computing)
    if knee == 1.0:
        return reading + computing
    total: float = (reading**knee + computing**knee) ** (1 / knee)
    return total


class OpCost(NamedTuple):
    """What one op moves and computes in a step."""

    weight_bytes: int
    kv_bytes: int  # of keys and values, or of a recurrent layer's states
    ops: int
    arithmetic: Arithmetic
    rows: int = 1  # that the operations are on, at least one
    attention: bool = False

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def seconds(self, rates: Rates) -> float:
        if self.attention:
            return rates.attention_seconds(self.bytes, self.ops, self.arithmetic)
        return rates.seconds(self.bytes, self.ops, self.arithmetic, self.rows)


class StepSize(NamedTuple):
    """What a batch's seconds depend on, as `CostModel` counts it."""

    tokens: int
    rows: int  # that want logits
    chunks: int  # spans of two tokens or more
    attention: tuple[tuple[int, int], ...]  # of a layer of each window: keys seen, by all queries
    # together, and tokens read and written
    states: int = 0  # sequences whose recurrent state is read and written; 0 if they have none


class _Term(NamedTuple):
    """An op whose cost is the same in any context: ``fixed_bytes`` a step, then bytes and
    operations for each token (or row that wants logits), and bytes for each sequence with a state.
    Of experts' bytes, only those of the experts that the tokens are expected to hit
    (`Experts.expected`) count.
    """

    fixed_bytes: int
    row_bytes: int
    row_ops: int
    selected: bool  # only for rows that want logits
    arithmetic: Arithmetic
    experts: Experts | None = None
    state_bytes: int = 0  # read and written

    def cost(self, n: int, states: int) -> OpCost:
        """Return the cost for ``n`` tokens, or rows that want logits, of so many states."""
        moved, ops, arithmetic, together = self.of(n, states)
        of_states = states * self.state_bytes
        return OpCost(moved - of_states, of_states, ops, arithmetic, together)

    def of(self, n: int, states: int) -> tuple[int, int, Arithmetic, int]:
        """Return the arguments of `Rates.seconds`, more quickly than `cost`."""
        fixed, together = self.fixed_bytes, n
        if n and self.experts is not None:
            hit = self.experts.expected(n)
            fixed = round(fixed * hit / self.experts.count)
            together = round(n * self.experts.chosen / hit)
        moved = fixed + n * self.row_bytes if n else 0
        moved += states * self.state_bytes
        return moved, n * self.row_ops, self.arithmetic, max(together, 1)


class _Attention(NamedTuple):
    """Attention of one kind, which depends on the context. A layer that reads another layer's keys
    counts as if it wrote its tokens' keys, too: next to what it reads that is little.
    """

    window: int | None
    token_bytes: int  # of keys and values in a layer
    ops: int  # of a key, for one query


class CostModel:
    """Count a Program's bytes and operations for a batch.

    ``weight_bytes`` maps weight roles to stored bytes; a role left out counts two bytes an
    element. ``arithmetic`` maps matrices' roles to what multiplies them (fp32 when left out), and
    ``attention`` is the same for attention. Activations are taken to stay in the processor's
    caches, and after the last attention or recurrence only rows that want logits are computed. A
    step reads and writes the recurrent state of each of its sequences once, whatever their tokens.
    A step of n tokens that go to k of E experts each reads E (1 - (1 - k/E)^n) of them: what is
    expected where every choice is equally likely; a skewed router hits fewer.
    """

    def __init__(
        self,
        program: Program,
        layout: KvLayout,
        *,
        weight_bytes: Mapping[str, int] | None = None,
        arithmetic: Mapping[str, Arithmetic] | None = None,
        attention: Arithmetic = Arithmetic.FP32,
    ) -> None:
        self.program = program
        self._stored = weight_bytes or {}
        self._arithmetic = arithmetic or {}
        self._attention = attention
        self._kv_dtype = layout.dtype
        self._terms = self._count()  # of each op
        self._alike = Counter(term for term in self._terms if isinstance(term, _Term))
        self._kinds = Counter(term for term in self._terms if isinstance(term, _Attention))
        self._recurrent = any(term.state_bytes for term in self._alike)
        self._windows = tuple(dict.fromkeys(kind.window for kind in self._kinds))
        self._layers = tuple(
            (self._windows.index(kind.window), kind.token_bytes, kind.ops, count)
            for kind, count in self._kinds.items()
        )
        # Steps are of like sizes, and so are those that are tried on the way to one.
        self._dense = lru_cache(maxsize=65536)(self._dense_seconds)
        self._each = lru_cache(maxsize=4096)(self._each_seconds)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights, each once."""
        return sum(map(self._size, self.program.weights))

    def by_op(self, batch: Batch) -> list[OpCost]:
        """Return the cost of each op, in the program's order; block copies belong to none."""
        costs = self._costs(batch)
        return [costs[term] for term in self._terms]

    def parts(self, batch: Batch) -> list[tuple[OpCost, int]]:
        """Return the cost of each different op and how many there are of it, in the same order for
        every batch.
        """
        costs = self._costs(batch)
        alike = [(costs[term], n) for term, n in self._alike.items()]
        return alike + [(costs[kind], n) for kind, n in self._kinds.items()]

    def _costs(self, batch: Batch) -> dict[_Term | _Attention, OpCost]:
        """Return the cost of each different op, by its entry in ``_terms``."""
        tokens, rows, spans = batch.num_tokens, len(batch.logits_rows), _spans(batch)
        states = self._states(len(spans[0]))
        costs: dict[_Term | _Attention, OpCost] = {
            term: term.cost(rows if term.selected else tokens, states) for term in self._alike
        }
        for kind in self._kinds:
            keys, moved = self._seen(spans, kind.window)
            moved *= kind.token_bytes
            costs[kind] = OpCost(0, moved, keys * kind.ops, self._attention, attention=True)
        return costs

    def seconds(self, batch: Batch, rates: Rates) -> float:
        """Return the seconds of a step, with the overhead of ``rates``: quick for steps of like
        sizes.
        """
        size = self.size(batch)
        return self.dense_seconds(size, rates) + (
            self.attention_seconds(size.attention, rates)
            + rates.overhead(size.tokens, size.rows, size.chunks)
        )

    def decode_seconds(self, positions: Int32, rates: Rates) -> Iterator[float]:
        """Yield, without an end, the seconds of successive steps in which each of some sequences,
        at first at ``positions`` [sequences], decodes a token. They equal `seconds` to the last
        digit.
        """
        sequences = len(positions)
        dense = self._dense(sequences, sequences, self._states(sequences), rates)
        overhead = rates.overhead(sequences, sequences, 0)
        for seen in zip(*(_keys_seen(positions, window) for window in self._windows), strict=True):
            # Every span is one token: it reads what it sees and writes itself.
            attention = [(keys, keys + sequences) for keys in seen]
            yield dense + (self.attention_seconds(attention, rates) + overhead)

    # A step in the making

    def decode_size(self, positions: Int32) -> StepSize:
        """Return the size of a step in which sequences at ``positions`` decode a token each."""
        sequences = len(positions)
        seen = [next(_keys_seen(positions, window)) for window in self._windows]
        attention = tuple((keys, keys + sequences) for keys in seen)
        return StepSize(sequences, sequences, 0, attention, self._states(sequences))

    def with_span(self, size: StepSize, start: int, tokens: int, rows: int) -> StepSize:
        """Return the size with ``tokens`` more, of a sequence from position ``start`` on, of which
        ``rows`` want logits.
        """
        end = start + tokens
        attention = []
        for (keys, moved), window in zip(size.attention, self._windows, strict=True):
            if window is None:
                keys += (end * (end + 1) - start * (start + 1)) // 2
                moved += end + tokens
            else:
                keys += _keys_before(end, window) - _keys_before(start, window)
                moved += end + tokens - max(0, start - window + 1)
            attention.append((keys, moved))
        chunks = size.chunks + (tokens > 1)
        states = size.states + self._states(1)
        return StepSize(size.tokens + tokens, size.rows + rows, chunks, tuple(attention), states)

    def size(self, batch: Batch) -> StepSize:
        """Return the size of a batch, without its block copies."""
        starts, ends = spans = _spans(batch)
        chunks = int(np.count_nonzero(ends - starts > 1))
        seen = [self._seen(spans, window) for window in self._windows]
        states = self._states(len(starts))
        return StepSize(batch.num_tokens, len(batch.logits_rows), chunks, tuple(seen), states)

    def dense_seconds(self, size: StepSize, rates: Rates) -> float:
        """Return the seconds of all ops but attention."""
        return self._dense(size.tokens, size.rows, size.states, rates)

    def attention_seconds(self, attention: Iterable[tuple[int, int]], rates: Rates) -> float:
        """Return the seconds of `StepSize.attention`."""
        total, seconds, seen = 0.0, rates.attention_seconds, tuple(attention)
        for window, size, ops, layers in self._layers:
            keys, moved = seen[window]
            total += layers * seconds(moved * size, keys * ops, self._attention)
        return total

    def _states(self, sequences: int) -> int:
        """Return `StepSize.states` of so many sequences."""
        return sequences if self._recurrent else 0

    def _dense_seconds(self, tokens: int, rows: int, states: int, rates: Rates) -> float:
        return sum((*self._each(tokens, states, False, rates), *self._each(rows, 0, True, rates)))

    def _each_seconds(self, n: int, states: int, selected: bool, rates: Rates) -> tuple[float, ...]:
        """Return the seconds of each different op, times how often the program has it, for ``n``
        tokens of so many states or, for ops that are ``selected``, ``n`` rows that want logits.
        """
        return tuple(
            [
                count * rates.seconds(*term.of(n, states))
                for term, count in self._alike.items()
                if term.selected is selected
            ]
        )

    @staticmethod
    def _seen(spans: _Spans, window: int | None) -> tuple[int, int]:
        """Return an entry of `StepSize.attention`."""
        starts, ends = spans
        last, first = int(ends.sum()), int(starts.sum())
        if window is None:  # the same of all at once: of each the sum is even
            return int(ends @ ends + last - starts @ starts - first) // 2, 2 * last - first
        keys = _visible(ends, window) - _visible(starts, window)
        unseen = np.maximum(0, starts - window + 1)
        # What is seen is read once, and the new is written.
        return int(keys.sum()), 2 * last - first - int(unseen.sum())

    def _size(self, role: str) -> int:
        return self._stored.get(role, 2 * self.program.elements(role))

    def _count(self) -> list[_Term | _Attention]:
        """Return a term for each op."""
        program, terms = self.program, list[_Term | _Attention]()
        # Of 8 bits, two products a number, as queries have 16.
        products = 2 if self._attention is Arithmetic.INT8 else 1
        last_crossing = program.last_crossing
        for i, op in enumerate(program.ops):
            if isinstance(op, PagedAttention):
                size = op.kv_heads * self._kv_dtype.token_bytes(op.head_dim, op.latent)
                ops = op.key_ops(program.config.num_heads) * products
                terms.append(_Attention(op.window, size, ops))
                continue
            work = op.work(program)
            assert work is not None
            of = work.row_of
            terms.append(
                _Term(
                    sum(map(self._size, work.weights)),
                    0 if of is None else self._size(of) // program.weights[of][0],
                    work.ops,
                    i > last_crossing,
                    self._arithmetic.get(work.matrix or "", Arithmetic.FP32),
                    work.experts,
                    2 * work.state_bytes,
                )
            )
        return terms


_Spans = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _spans(batch: Batch) -> _Spans:
    """Return the first position of each sequence's tokens, and the one after its last."""
    offsets = batch.seq_offsets
    starts = batch.positions[offsets[:-1]].astype(np.int64)
    return starts, starts + (offsets[1:] - offsets[:-1])


def _keys_seen(positions: Int32, window: int | None) -> Iterator[int]:
    """Yield how many keys queries at the positions see together; then at the positions after."""
    ends = positions.astype(np.int64) + 1
    if window is None:
        return count(int(ends.sum()), len(ends))
    return (int(np.minimum(ends + step, window).sum()) for step in count())


def _keys_before(position: int, window: int) -> int:
    """Return `_visible` of one number, which is much quicker."""
    inside = min(position, window)
    return inside * (inside + 1) // 2 + (position - inside) * window


def _visible(position: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
    """Return how many keys the queries at positions 0 … position - 1 see together."""
    inside = np.minimum(position, window)
    seen: npt.NDArray[np.int64] = inside * (inside + 1) // 2 + (position - inside) * window
    return seen
