"""From a Program to what the native runtime runs: regions between which all threads meet.

Some kinds of op cross the rows or columns that a thread works on, and need a meeting before and
after: linear layers, attention, recurrences, logits and experts. All others are row-wise, and
neighbours among them run as one region, row by row. On the way:

- linear layers that share an input become one region, and share its prepared form;
- a linear layer whose output is only added to the residual stream accumulates into it;
- with many rows, threads share them out instead of a layer's columns, and each takes its own
  through the regions between one attention and the next without meeting the others: values that
  live there only are kept for a few rows a thread, in its cache;
- after the last attention or recurrence, only the rows that want logits are computed;
- the experts' inputs are sorted by expert first, so that each runs over rows that lie side by side;
- values whose lifetimes do not overlap share memory, and element-wise ops work in place.

None of it changes the order of operations within an element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from octavo import _native
from octavo.loader.base import CheckpointError, WeightFormat
from octavo.models import program as model
from octavo.models.config import Experts, Rope
from octavo.models.recurrence import GatedDelta, Mamba2, Recurrence, ShortConv

ALIGNMENT = 64  # bytes
FLOAT_BYTES = 4


@dataclass(slots=True, eq=False)
class Buffer:
    """A span of every row's bytes in an activation arena, used by regions ``first`` … ``last``.

    A local one is used within one stretch only, so each thread has its own, of a few rows.
    """

    row_bytes: int
    first: int
    last: int
    local: bool = False
    offset: int = -1


class View(NamedTuple):
    """A [rows, width] matrix of floats in a buffer; its rows are ``stride`` floats apart.

    With ``experts`` its rows are the slots of their choices. A ``slice`` of a wider matrix begins
    at element ``first`` of each of its rows; nothing is written to it.
    """

    buffer: Buffer
    width: int
    stride: int
    experts: Experts | None = None
    slice: bool = False
    first: int = 0


class WeightRef(NamedTuple):
    """A weight that the runtime knows by a number; of a vector, its copy times ``factor``."""

    role: str
    factor: float = 1.0


class Place(NamedTuple):
    """A layer, which the runtime knows by its group of KV blocks and its index there."""

    layer: int


class StatePlace(NamedTuple):
    """A recurrent layer, which the runtime knows by the parts of its state."""

    layer: int


class LoweredStep(NamedTuple):
    """An object of the runtime (kernels/runtime.h) before all buffers have their offsets.

    ``args`` are those of its constructor. In place of a value it has a `View`, of prepared rows a
    `Buffer`, and of the runtime's numbers a `WeightRef`, `Place`, `StatePlace`, `Rope` or
    `Experts`.
    """

    kind: Callable[..., Any]
    args: tuple[Any, ...]


def _buffers(of: Any) -> Iterator[Buffer]:
    """Yield the buffers that a step reads or writes."""
    match of:
        case Buffer():
            yield of
        case View():
            yield of.buffer
        case LoweredStep():
            yield from _buffers(list(of.args))
        case list():
            for part in of:
                yield from _buffers(part)


class Region(NamedTuple):
    name: str
    selected: bool  # over the rows that want logits only
    work: LoweredStep
    ops: tuple[int, ...] = ()  # of the program, that it computes

    @property
    def row_wise(self) -> bool:
        """Return whether a thread can take some rows through it without meeting the others."""
        return self.work.kind in (_native.RowsRegion, _native.LinearRegion)


class Plan(NamedTuple):
    """``row_bytes`` and ``local_row_bytes``: what a row takes in either kind of arena."""

    regions: list[Region]
    row_bytes: int
    local_row_bytes: int


@dataclass(frozen=True, slots=True)
class _Use:
    """An op with the values it reads and writes, each written once (static single assignment)."""

    op: model.Op
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def _single_assignment(program: model.Program) -> tuple[list[_Use], list[int]]:
    """Return the ops over numbered values, and each value's width."""
    current: dict[str, int] = {}
    widths: list[int] = []
    uses: list[_Use] = []
    for op in program.ops:
        for name in op.reads:
            if name not in current:
                raise ValueError(f"the program reads {name} before anything writes it: {op}")
        reads = tuple(current[name] for name in op.reads)
        for name in op.writes:
            current[name] = len(widths)
            widths.append(program.widths[name])
        uses.append(_Use(op, reads, tuple(current[name] for name in op.writes)))
    return uses, widths


def lower(
    program: model.Program,
    formats: Mapping[str, WeightFormat],
    kernels: _native.Runtime,
    orders: Mapping[str, int] | None = None,
    *,
    keep_hidden: bool = False,
    all_hidden: bool = False,
) -> Plan:
    """Lower a program. ``formats`` gives every matrix weight's format, ``kernels`` knows what a
    tier's linear kernels take (kernels/linear.h). ``orders`` numbers the order of the inputs of
    those that have one (`Weight.order`). ``keep_hidden``: the rows that logits are made of are put
    by; ``all_hidden``: and those that they could be made of.
    """
    keep = keep_hidden or all_hidden
    return _Lowering(program, formats, kernels, orders or {}, keep, all_hidden).run()


class _Lowering:
    def __init__(
        self,
        program: model.Program,
        formats: Mapping[str, WeightFormat],
        kernels: _native.Runtime,
        orders: Mapping[str, int],
        keep_hidden: bool,
        all_hidden: bool,
    ) -> None:
        self.keep_hidden = keep_hidden
        # The op behind which only rows that want logits are computed.
        self.last_of_all = len(program.ops) if all_hidden else program.last_crossing
        self.formats = formats
        self.kernels = kernels
        self.orders = orders
        self.uses, self.widths = _single_assignment(program)
        self.last_use = {value: i for i, use in enumerate(self.uses) for value in use.reads}
        self.views: dict[int, View] = {}
        self.prepared: list[tuple[int, WeightFormat, int, Buffer]] = []
        self.spread: list[tuple[int, WeightFormat, tuple[int, ...], Buffer]] = []
        self.angles: dict[tuple[Rope, int], View] = {}
        self.buffers: list[Buffer] = []
        self.regions: list[Region] = []
        self.selected = False

    def run(self) -> Plan:
        i = 0
        while i < len(self.uses):
            op = self.uses[i].op
            if isinstance(op, model.RowOp):
                i += self._row_function(i, op)
            else:
                i += LOWERINGS[type(op)](self, i, op)
            if not self.selected and i > self.last_of_all:
                self._select(i)
        stretches = _stretches(self.regions)
        for buffer in self.buffers:
            begin, end = stretches[buffer.first], stretches[buffer.last]
            buffer.local = begin == end and self.regions[buffer.first].row_wise
            if not buffer.local:
                # Threads are at different places of a stretch at the same time.
                buffer.first, buffer.last = begin[0], end[-1]
        sizes = [_place([b for b in self.buffers if b.local is local]) for local in (False, True)]
        return Plan(self.regions, *sizes)

    # Regions

    def _rows(self, experts: Experts | None = None) -> list[LoweredStep]:
        """Return the steps of the region that row-wise ops join: the last, or a new one.

        With ``experts`` the rows are their slots.
        """
        kind = _native.RowsRegion if experts is None else _native.SlotsRegion
        if self.regions:
            last = self.regions[-1]
            if last.work.kind is kind and last.selected == self.selected:
                steps: list[LoweredStep] = last.work.args[-1]
                return steps
        steps = []
        work = LoweredStep(kind, (steps,) if experts is None else (experts, steps))
        self.regions.append(Region("", self.selected, work))
        return steps

    def _step(
        self,
        name: str,
        kind: Callable[..., Any],
        *args: Any,
        op: int | None = None,
        experts: Experts | None = None,
    ) -> None:
        """Add a row-wise step, which computes the ``op`` of that index."""
        steps = self._rows(experts)
        region, step = self.regions[-1], LoweredStep(kind, args)
        self.regions[-1] = region._replace(
            name=f"{region.name} {name}".strip(),
            ops=region.ops if op is None else (*region.ops, op),
        )
        steps.append(step)
        for buffer in _buffers(step):
            buffer.last = len(self.regions) - 1

    def _region(self, name: str, ops: Iterable[int], kind: Callable[..., Any], *args: Any) -> None:
        region = Region(name, self.selected, LoweredStep(kind, args), tuple(ops))
        self.regions.append(region)
        for buffer in _buffers(region.work):
            buffer.last = len(self.regions) - 1

    # Values

    def _new_buffer(self, size: int, experts: Experts | None = None) -> Buffer:
        """Return a buffer born in the region that comes next or that row-wise ops now join. With
        ``experts`` it is of their slots (kernels/experts.h), each of ``size`` bytes.
        """
        if experts is not None:
            size = self.kernels.slots_row_bytes(experts.count, experts.chosen, size)
        buffer = Buffer(size, len(self.regions), len(self.regions))
        if self.regions and self.regions[-1].work.kind in (_native.RowsRegion, _native.SlotsRegion):
            buffer.first -= 1
        self.buffers.append(buffer)
        return buffer

    def _new_view(self, width: int, experts: Experts | None = None) -> View:
        stride = -(-width // 16) * 16
        return View(self._new_buffer(stride * FLOAT_BYTES, experts), width, stride, experts)

    def _read(self, index: int) -> View:
        """Return the first value that an op reads."""
        return self.views[self.uses[index].reads[0]]

    def _dies(self, value: int, index: int) -> bool:
        return self.last_use.get(value, -1) <= index

    def _in_place(self, index: int) -> View:
        """Return where an op of rows writes: over an input that nobody reads later, or anew."""
        (out,) = self.uses[index].writes
        for value in self.uses[index].reads:
            view = self.views[value]
            same = self.widths[value] == self.widths[out] and not view.slice
            if same and self._dies(value, index):
                self.views[out] = view
                return view
        return self._new_value(index)

    def _new_value(self, index: int, experts: Experts | None = None) -> View:
        (out,) = self.uses[index].writes
        width = self.widths[out] if experts is None else self.widths[out] // experts.chosen
        self.views[out] = self._new_view(width, experts)
        return self.views[out]

    def _new_after_rows(self, index: int, experts: Experts | None = None) -> View:
        """Return a value born in a region of its own, not in the row-wise one that is last."""
        view = self._new_value(index, experts)
        view.buffer.first = len(self.regions)
        return view

    def _prepare(self, value: int, weight: str) -> Buffer:
        """Return the value in the form and the order that a matrix takes it."""
        format, order = self.formats[weight], self.orders.get(weight, -1)
        for prepared, other, other_order, buffer in self.prepared:
            same = prepared == value and order == other_order
            if same and self.kernels.same_activations(format, other):
                return buffer
        view = self.views[value]
        self._rows(view.experts)
        row_bytes = self.kernels.activation_bytes(format, view.width)
        buffer = self._new_buffer(row_bytes, view.experts)
        args = view, format, view.width, buffer, order
        self._step("prepare", _native.PrepareStep, *args, experts=view.experts)
        self.prepared.append((value, format, order, buffer))
        return buffer

    def _select(self, index: int) -> None:
        """From here on, compute only the rows that want logits; ``index`` is the next op's."""
        live = sorted(
            {value for use in self.uses[index:] for value in use.reads if value in self.views}
        )
        self.selected = True
        self.prepared.clear()
        for value in live:
            self._rows()
            out = self._new_view(self.widths[value])
            self._step("gather", _native.GatherStep, self.views[value], out, out.width)
            self.views[value] = out

    # Ops: each lowers the one at i, and perhaps some after it; it returns how many.

    def _row_function(self, i: int, op: model.RowOp) -> int:
        function = op.row_function()
        inputs = [self.views[value] for value in self.uses[i].reads]
        experts, width = inputs[0].experts, inputs[0].width
        self._rows(experts)
        args = (
            function.kernel,
            inputs,
            [WeightRef(role, factor) for role, factor in function.weights],
            list(function.numbers),
            self._in_place(i),
            width,
            function.group or width,
        )
        self._step(op.label, _native.FunctionStep, *args, op=i, experts=experts)
        return 1

    def _gate_row(self, i: int, op: model.GateRow) -> int:
        self._rows()
        x, gate = (self.views[value] for value in self.uses[i].reads)
        args = x, gate, self._in_place(i), x.width, op.group or x.width
        self._step("gate", _native.GateStep, *args, op=i)
        return 1

    def _embed(self, i: int, op: model.Embed) -> int:
        self._rows()
        args = WeightRef(op.weight), self._new_value(i), op.scale
        self._step("embed", _native.EmbedStep, *args, op=i)
        return 1

    def _input(self, i: int, op: model.Input) -> int:
        self._rows()
        out = self._new_value(i)
        self._step("input", _native.InputStep, out, out.width, op=i)
        return 1

    def _slice(self, i: int, op: model.Slice) -> int:
        whole = self._read(i)
        self.views[self.uses[i].writes[0]] = whole._replace(
            width=op.width, slice=True, first=whole.first + op.first
        )
        return 1

    def _concat(self, i: int, op: model.Concat) -> int:
        self._rows()
        x, y = (self.views[value] for value in self.uses[i].reads)
        self._step("concat", _native.ConcatStep, x, y, self._new_value(i), x.width, op=i)
        return 1

    def _rope(self, i: int, op: model.RopeAndStoreKv) -> int:
        angles = self._angles(op.rope, 0)
        q, k, v = (self.views[value] for value in self.uses[i].reads)
        args = q, k, v, angles, op.rope, Place(op.layer)
        self._step("rope", _native.RopeStoreStep, *args, op=i)
        self.views[self.uses[i].writes[0]] = q
        return 1

    def _rotate(self, i: int, op: model.RotateQueries) -> int:
        q, angles = self._read(i), self._angles(op.rope, op.ahead)
        heads = q.width // op.head_dim
        self._step("rope", _native.RotateStep, q, angles, op.rope, heads, op.head_dim, op=i)
        self.views[self.uses[i].writes[0]] = q
        return 1

    def _scale_by_position(self, i: int, op: model.ScaleByPosition) -> int:
        self._rows()
        x = self._read(i)
        args = x, self._in_place(i), x.width, op.beta, op.original
        self._step("scale", _native.ScaleByPositionStep, *args, op=i)
        return 1

    def _angles(self, rope: Rope, ahead: int) -> View:
        """Return the rows of a rotation's cosines and sines, in the region of rows that is last."""
        self._rows()
        if (rope, ahead) not in self.angles:
            view = self.angles[rope, ahead] = self._new_view(2 * rope.dim)
            self._step("angles", _native.AngleStep, rope, view, ahead)
        return self.angles[rope, ahead]

    def _attention(self, i: int, op: model.PagedAttention) -> int:
        sinks = -1 if op.sinks is None else WeightRef(op.sinks)
        q, out, heads = self._read(i), self._new_after_rows(i), self._read(i).width // op.head_dim
        args = q, out, Place(op.layer), op.scale, op.softcap, sinks, heads
        name = "attention" if op.window is None else "attention (window)"
        self._region(name, (i,), _native.AttentionRegion, *args)
        return 1

    def _recurrence(self, i: int, op: Recurrence) -> int:
        """Emit a region for the op, and one that stores what its convolution has read, when nobody
        needs the old inputs any more.
        """
        x, *gates = (self.views[value] for value in self.uses[i].reads)
        bias = -1 if op.bias is None else WeightRef(op.bias)
        args = _shape(op), StatePlace(op.layer), x, gates, WeightRef(op.weight), bias
        layer = LoweredStep(_native.RecurrentLayer, args)
        out = self._new_after_rows(i)
        self._region(op.label, (i,), _native.RecurrentRegion, layer, out)
        self._region(f"{op.label}'s inputs", (), _native.HistoryRegion, layer)
        return 1

    def _route(self, i: int, op: model.Route) -> int:
        self._rows()
        bias, factors = (-1 if role is None else WeightRef(role) for role in (op.bias, op.factors))
        args = self._read(i), op.experts, bias, factors
        self._step("route", _native.RouteStep, *args, op=i)
        self._region("sort", (), _native.SortRegion, op.experts)
        return 1

    def _combine(self, i: int, op: model.Combine) -> int:
        self._rows()
        out = self._new_value(i)
        args = self._read(i), op.experts, out, out.width
        self._step("combine", _native.CombineStep, *args, op=i)
        return 1

    def _logits(self, i: int, op: model.Logits) -> int:
        if self.keep_hidden:
            self._rows()
            kept = self.views[self.uses[i].reads[-1]]
            self._step("keep", _native.KeepStep, kept, kept.width)
        if not self.selected:
            self._select(i)
        buffer = self._prepare(self.uses[i].reads[0], op.weight)
        args = WeightRef(op.weight), buffer, op.softcap
        self._region("logits", (i,), _native.LogitsRegion, *args)
        return 1

    def _linears(self, i: int, _: model.Linear) -> int:
        """Emit a region for the linear ops from i that share an input, or one that accumulates."""
        residual = self._residual(i)
        ops: list[model.Linear] = []
        for j, op in enumerate(self._sharing(i), start=i):
            if ops and (residual is not None or self._residual(j) is not None):
                break
            ops.append(op)
        inputs = [self._prepare(self.uses[i].reads[0], op.weight) for op in ops]
        parts = []
        for j, (op, activations) in enumerate(zip(ops, inputs, strict=True), start=i):
            if residual is None:
                out = self._new_after_rows(j)
            else:
                out = self.views[self.uses[i + 1].writes[0]] = self.views[residual]
            bias = -1 if op.bias is None else WeightRef(op.bias)
            parts.append(
                LoweredStep(_native.LinearPart, (WeightRef(op.weight), activations, out, bias))
            )
        count = len(ops) + (residual is not None)  # the addition
        name, accumulate = _names(ops), residual is not None
        self._region(name, range(i, i + count), _native.LinearRegion, parts, accumulate)
        return count

    def _residual(self, i: int) -> int | None:
        """Return the value that a linear op's output is added to, if both end in the next op."""
        if i + 1 >= len(self.uses) or not isinstance(self.uses[i + 1].op, model.Add):
            return None
        (out,) = self.uses[i].writes
        others = [value for value in self.uses[i + 1].reads if value != out]
        if len(others) != 1 or not self._dies(out, i + 1) or not self._dies(others[0], i + 1):
            return None
        return others[0] if others[0] != self.uses[i].reads[0] else None

    def _expert_linears(self, i: int, op: model.ExpertLinear) -> int:
        """Emit one region for the experts' linear ops from i on that share an input."""
        ops, experts = self._sharing(i), op.experts
        inputs = [self._prepare_experts(self.uses[i].reads[0], each) for each in ops]
        parts = []
        for j, (each, buffer) in enumerate(zip(ops, inputs, strict=True), start=i):
            out = self._new_after_rows(j, experts)
            matrices, biases = (
                list(map(WeightRef, roles)) for roles in (each.weights, each.biases)
            )
            parts.append(LoweredStep(_native.ExpertsPart, (matrices, buffer, out, biases)))
        self._region(_names(ops), range(i, i + len(ops)), _native.ExpertsRegion, experts, parts)
        return len(ops)

    def _sharing(self, i: int) -> list[Any]:
        """Return the ops of the kind of op i from there on that read what it reads."""
        first, rest = self.uses[i], self.uses[i:]
        alike = takewhile(
            lambda use: type(use.op) is type(first.op) and use.reads == first.reads, rest
        )
        return [use.op for use in alike]

    def _prepare_experts(self, value: int, op: model.ExpertLinear) -> Buffer:
        """Return the prepared slots of a value that is of tokens, or of slots already."""
        first, view = op.weights[0], self.views[value]
        format = self.formats[first]
        orders = tuple(self.orders.get(role, -1) for role in op.weights)
        for role in op.weights:
            if not self.kernels.same_activations(self.formats[role], format):
                raise CheckpointError(
                    f"experts of mixed formats: {first} is {format.name}, "
                    f"{role} is {self.formats[role].name}"
                )
        alike = len(set(orders)) == 1
        if alike and view.experts is not None:
            return self._prepare(value, first)
        for spread, other, other_orders, buffer in self.spread:
            same = spread == value and orders == other_orders
            if same and self.kernels.same_activations(format, other):
                return buffer
        rows = self._prepare(value, first) if alike else None
        self._rows(view.experts)
        slots = self._new_buffer(self.kernels.activation_bytes(format, view.width), op.experts)
        if rows is not None:
            # Rows that are prepared once are copied to the slots of their choices.
            args: tuple[Any, ...] = (rows, format, view.width, op.experts, slots)
            self._step("spread", _native.SpreadStep, *args)
        else:
            of_slots = view.experts is not None
            args = (view, of_slots, format, view.width, op.experts, list(orders), slots)
            self._step("prepare", _native.PrepareEachStep, *args, experts=view.experts)
        self.spread.append((value, format, orders, slots))
        return slots


def _names(ops: Iterable[model.Linear | model.ExpertLinear]) -> str:
    return "+".join(op.weight.rpartition(".")[2] for op in ops)


def _shape(op: Recurrence) -> LoweredStep:
    """Return a recurrence's shape as the runtime has it."""
    match op:
        case GatedDelta(shape=s):
            sizes = s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.tiled
            return LoweredStep(_native.DeltaShape, sizes)
        case Mamba2(shape=m):
            vectors = WeightRef(op.a), WeightRef(op.d)
            return LoweredStep(
                _native.MambaShape, (m.heads, m.head_dim, m.state, m.groups, *vectors)
            )
    return LoweredStep(_native.ShortConvShape, ())


# How the ops are lowered that are no `RowOp`.
LOWERINGS: dict[type[model.Op], Callable[[_Lowering, int, Any], int]] = {
    model.Embed: _Lowering._embed,
    model.Slice: _Lowering._slice,
    model.Concat: _Lowering._concat,
    model.Input: _Lowering._input,
    model.Linear: _Lowering._linears,
    model.GateRow: _Lowering._gate_row,
    model.RopeAndStoreKv: _Lowering._rope,
    model.RotateQueries: _Lowering._rotate,
    model.ScaleByPosition: _Lowering._scale_by_position,
    model.PagedAttention: _Lowering._attention,
    ShortConv: _Lowering._recurrence,
    GatedDelta: _Lowering._recurrence,
    Mamba2: _Lowering._recurrence,
    model.Route: _Lowering._route,
    model.ExpertLinear: _Lowering._expert_linears,
    model.Combine: _Lowering._combine,
    model.Logits: _Lowering._logits,
}


def _stretches(regions: list[Region]) -> list[range]:
    """Return for each region the stretch that it belongs to.

    A stretch is consecutive row-wise and linear regions over the same rows: a thread can take some
    rows through all of it without meeting the others. Any other region is one by itself.
    """
    stretches: list[range] = []
    for i, region in enumerate(regions):
        joins = i > 0 and regions[i - 1].selected == region.selected
        joins &= all(each.row_wise for each in regions[max(0, i - 1) : i + 1])
        first = stretches[-1].start if joins else i
        stretches.append(range(first, i + 1))
    for i in reversed(range(len(stretches) - 1)):
        if stretches[i + 1].start == stretches[i].start:
            stretches[i] = stretches[i + 1]
    return stretches


def _place(buffers: list[Buffer]) -> int:
    """Give every buffer an offset at which no other lives at the same time; return the total.

    Largest first, each at the lowest offset that is free over its whole lifetime.
    """
    placed: list[Buffer] = []

    def size(buffer: Buffer) -> int:
        return -(-buffer.row_bytes // ALIGNMENT) * ALIGNMENT

    for buffer in sorted(buffers, key=lambda buffer: -buffer.row_bytes):
        offset = 0
        for other in sorted(placed, key=lambda other: other.offset):
            if other.last < buffer.first or buffer.last < other.first:
                continue
            if offset + size(buffer) <= other.offset:
                break
            offset = max(offset, other.offset + size(other))
        buffer.offset = offset
        placed.append(buffer)
    return max((buffer.offset + size(buffer) for buffer in buffers), default=0)
