"""From a Program to what the native runtime runs: regions between which all threads meet.

Some kinds of op cross the rows or columns that a thread works on, and need a meeting before and
after: linear layers, attention, logits and experts. All others are row-wise, and neighbours among
them run as one region, row by row. On the way:

- linear layers that share an input become one region, and share its prepared form;
- a linear layer whose output is only added to the residual stream accumulates into it;
- with many rows, threads share them out instead of a layer's columns, and each takes its own
  through the regions between one attention and the next without meeting the others: values that
  live there only are kept for a few rows a thread, in its cache;
- after the last attention, only the rows that want logits are computed;
- the experts' inputs are sorted by expert first, so that each runs over rows that lie side by side;
- values whose lifetimes do not overlap share memory, and element-wise ops work in place.

None of it changes the order of operations within an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from octavo.loader.base import CheckpointError, WeightFormat
from octavo.models import program as model
from octavo.models.config import Activation, Experts, Rope

ALIGNMENT = 64  # bytes
FLOAT_BYTES = 4


class Formats(Protocol):
    """What lowering must know about a tier's linear kernels (kernels/linear.h)."""

    def activation_bytes(self, format: int, k: int) -> int: ...

    def same_activations(self, a: int, b: int) -> bool: ...

    def slots_row_bytes(self, experts: int, chosen: int, slot_bytes: int) -> int:
        """Of a value of experts' slots (kernels/experts.h), for each row of the arena."""
        ...


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

    With ``experts`` its rows are the slots of their choices.
    """

    buffer: Buffer
    width: int
    stride: int
    experts: Experts | None = None


class Embed(NamedTuple):
    weight: str
    out: View
    scale: float


class Input(NamedTuple):
    out: View


class Norm(NamedTuple):
    x: View
    weight: str
    out: View
    group: int
    eps: float
    scale: float  # of the weight


class Add(NamedTuple):
    x: View
    y: View
    out: View


class Gate(NamedTuple):
    gate: View
    up: View
    out: View
    activation: Activation


class Activate(NamedTuple):
    x: View
    out: View
    activation: Activation


class Prepare(NamedTuple):
    """Brings rows into the form that linear layers of ``format`` take, their elements in the order
    of that number (-1: as they are).
    """

    x: View
    format: WeightFormat
    out: Buffer
    order: int = -1


class Angles(NamedTuple):
    """The cosines and sines of each token's position."""

    rope: Rope
    out: View


class RopeStore(NamedTuple):
    q: View
    k: View
    v: View
    angles: View
    rope: Rope
    layer: int


class Gather(NamedTuple):
    """The rows that want logits."""

    x: View
    out: View


class Keep(NamedTuple):
    """Puts rows by for whoever asked for the step."""

    x: View


class Route(NamedTuple):
    logits: View
    experts: Experts


class Spread(NamedTuple):
    """Copies prepared rows to the slots of their choices."""

    rows: Buffer
    format: WeightFormat
    width: int
    experts: Experts
    slots: Buffer


class PrepareEach(NamedTuple):
    """Brings the rows of tokens, or slots, into the form and the order that their experts take."""

    x: View
    format: WeightFormat
    experts: Experts
    orders: tuple[int, ...]  # of each expert, as in `Prepare`
    slots: Buffer


class Combine(NamedTuple):
    slots: View
    experts: Experts
    out: View


RowStep = (
    Embed
    | Input
    | Norm
    | Add
    | Gate
    | Activate
    | Prepare
    | Angles
    | RopeStore
    | Gather
    | Keep
    | Route
    | Spread
    | PrepareEach
    | Combine
)


@dataclass(slots=True)
class Rows:
    steps: list[RowStep] = field(default_factory=list)


class LinearPart(NamedTuple):
    weight: str
    activations: Buffer
    out: View
    bias: str | None


class Linears(NamedTuple):
    parts: list[LinearPart]
    accumulate: bool


class Attention(NamedTuple):
    q: View
    out: View
    layer: int
    scale: float
    softcap: float


class Logits(NamedTuple):
    weight: str
    activations: Buffer
    softcap: float


class Sort(NamedTuple):
    """Gives the choices of all rows their slots."""

    experts: Experts


@dataclass(slots=True)
class Slots:
    """Row-wise steps of slots."""

    experts: Experts
    steps: list[RowStep] = field(default_factory=list)


class ExpertsPart(NamedTuple):
    weights: tuple[str, ...]  # of each expert
    activations: Buffer
    out: View


class ExpertLinears(NamedTuple):
    experts: Experts
    parts: list[ExpertsPart]


Work = Rows | Linears | Attention | Logits | Sort | Slots | ExpertLinears


class Region(NamedTuple):
    name: str
    selected: bool  # over the rows that want logits only
    work: Work
    ops: tuple[int, ...] = ()  # of the program, that it computes


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


def names(op: model.Op) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names an op reads and writes."""
    match op:
        case model.Embed(out=out) | model.Input(out=out):
            return (), (out,)
        case model.RmsNorm(x=x, out=out) | model.Linear(x=x, out=out):
            return (x,), (out,)
        case model.Activate(x=x, out=out):
            return (x,), (out,)
        case model.RopeAndStoreKv(q=q, k=k, v=v):
            return (q, k, v), (q,)
        case model.PagedAttention(q=q, out=out):
            return (q,), (out,)
        case model.GatedActivation(gate=gate, up=up, out=out):
            return (gate, up), (out,)
        case model.Route(logits=logits, out=out):
            return (logits,), (out,)
        case model.ExpertLinear(x=x, route=route, out=out):
            return (x, route), (out,)
        case model.Combine(x=x, route=route, out=out):
            return (x, route), (out,)
        case model.Add(x=x, y=y, out=out):
            return (x, y), (out,)
        case model.Logits(x=x):
            return (x,), ()


def _single_assignment(program: model.Program) -> tuple[list[_Use], list[int]]:
    """The ops over numbered values, and each value's width."""
    current: dict[str, int] = {}
    widths: list[int] = []
    uses: list[_Use] = []
    for op in program.ops:
        read_names, write_names = names(op)
        for name in read_names:
            if name not in current:
                raise ValueError(f"the program reads {name} before anything writes it: {op}")
        reads = tuple(current[name] for name in read_names)
        for name in write_names:
            current[name] = len(widths)
            widths.append(program.widths[name])
        uses.append(_Use(op, reads, tuple(current[name] for name in write_names)))
    return uses, widths


def lower(
    program: model.Program,
    formats: Mapping[str, WeightFormat],
    kernels: Formats,
    orders: Mapping[str, int] | None = None,
    *,
    keep_hidden: bool = False,
) -> Plan:
    """``formats`` gives every matrix weight's format, ``orders`` numbers the order of the inputs of
    those that have one (`Weight.order`). ``keep_hidden``: the rows that logits are made of are put
    by.
    """
    return _Lowering(program, formats, kernels, orders or {}, keep_hidden).run()


class _Lowering:
    def __init__(
        self,
        program: model.Program,
        formats: Mapping[str, WeightFormat],
        kernels: Formats,
        orders: Mapping[str, int],
        keep_hidden: bool,
    ) -> None:
        self.keep_hidden = keep_hidden
        self.formats = formats
        self.kernels = kernels
        self.orders = orders
        self.head_dim = program.config.head_dim
        self.uses, self.widths = _single_assignment(program)
        self.last_use = {value: i for i, use in enumerate(self.uses) for value in use.reads}
        self.views: dict[int, View] = {}
        self.prepared: list[tuple[int, WeightFormat, int, Buffer]] = []
        self.spread: list[tuple[int, WeightFormat, tuple[int, ...], Buffer]] = []
        self.angles: dict[Rope, View] = {}
        self.buffers: list[Buffer] = []
        self.regions: list[Region] = []
        self.selected = False

    def run(self) -> Plan:
        attention = (
            i for i, use in enumerate(self.uses) if isinstance(use.op, model.PagedAttention)
        )
        last_attention = max(attention, default=0)
        i = 0
        while i < len(self.uses):
            i += self._lower(i)
            if not self.selected and i > last_attention:
                self._select(i)
        stretches = _stretches(self.regions)
        for buffer in self.buffers:
            begin, end = stretches[buffer.first], stretches[buffer.last]
            row_wise = isinstance(self.regions[buffer.first].work, Rows | Linears)
            buffer.local = begin == end and row_wise
            if not buffer.local:
                # Threads are at different places of a stretch at the same time.
                buffer.first, buffer.last = begin[0], end[-1]
        sizes = [_place([b for b in self.buffers if b.local is local]) for local in (False, True)]
        return Plan(self.regions, *sizes)

    # Regions

    def _rows(self, experts: Experts | None = None) -> list[RowStep]:
        """The steps of the region that row-wise ops join: the last, or a new one.

        With ``experts`` the rows are their slots.
        """
        if self.regions:
            last = self.regions[-1]
            kind = Rows if experts is None else Slots
            if isinstance(last.work, kind) and last.selected == self.selected:
                return last.work.steps
        work = Rows() if experts is None else Slots(experts)
        self.regions.append(Region("", self.selected, work))
        return work.steps

    def _step(self, name: str, step: RowStep, *ops: int, experts: Experts | None = None) -> None:
        steps = self._rows(experts)
        region = self.regions[-1]
        self.regions[-1] = region._replace(
            name=f"{region.name} {name}".strip(), ops=region.ops + ops
        )
        steps.append(step)
        for part in step:
            if isinstance(part, View):
                part.buffer.last = len(self.regions) - 1
            elif isinstance(part, Buffer):
                part.last = len(self.regions) - 1

    def _region(
        self,
        name: str,
        work: Linears | Attention | Logits | Sort | ExpertLinears,
        used: Iterable[Buffer],
        ops: Iterable[int],
    ) -> None:
        self.regions.append(Region(name, self.selected, work, tuple(ops)))
        for buffer in used:
            buffer.last = len(self.regions) - 1

    # Values

    def _new_buffer(self, size: int) -> Buffer:
        """Born in the region that comes next or that row-wise ops now join."""
        buffer = Buffer(size, len(self.regions), len(self.regions))
        if self.regions and isinstance(self.regions[-1].work, Rows | Slots):
            buffer.first -= 1
        self.buffers.append(buffer)
        return buffer

    def _new_view(self, width: int) -> View:
        stride = -(-width // 16) * 16
        return View(self._new_buffer(stride * FLOAT_BYTES), width, stride)

    def _new_slots(self, slot_bytes: int, experts: Experts) -> Buffer:
        return self._new_buffer(
            self.kernels.slots_row_bytes(experts.count, experts.chosen, slot_bytes)
        )

    def _dies(self, value: int, index: int) -> bool:
        return self.last_use.get(value, -1) <= index

    def _in_place(self, index: int, *candidates: int) -> View:
        """Where an element-wise op writes: over an input that nobody reads later, or anew."""
        (out,) = self.uses[index].writes
        for value in candidates:
            if self._dies(value, index) and self.widths[value] == self.widths[out]:
                self.views[out] = self.views[value]
                return self.views[out]
        self.views[out] = self._new_view(self.widths[out])
        return self.views[out]

    def _new_value(self, index: int) -> View:
        (out,) = self.uses[index].writes
        self.views[out] = self._new_view(self.widths[out])
        return self.views[out]

    def _prepare(self, value: int, weight: str) -> Buffer:
        """The value in the form and the order that a matrix takes it."""
        format, order = self.formats[weight], self.orders.get(weight, -1)
        for prepared, other, other_order, buffer in self.prepared:
            same = prepared == value and order == other_order
            if same and self.kernels.same_activations(format, other):
                return buffer
        view = self.views[value]
        self._rows(view.experts)
        row_bytes = self.kernels.activation_bytes(format, view.width)
        buffer = (
            self._new_slots(row_bytes, view.experts)
            if view.experts
            else self._new_buffer(row_bytes)
        )
        self._step("prepare", Prepare(view, format, buffer, order), experts=view.experts)
        self.prepared.append((value, format, order, buffer))
        return buffer

    def _select(self, index: int) -> None:
        """From here on, only the rows that want logits; ``index`` is the next op's."""
        live = sorted(
            {value for use in self.uses[index:] for value in use.reads if value in self.views}
        )
        self.selected = True
        self.prepared.clear()
        for value in live:
            self._rows()
            out = self._new_view(self.widths[value])
            self._step("gather", Gather(self.views[value], out))
            self.views[value] = out

    # Ops

    def _lower(self, i: int) -> int:
        """Lowers the op at i, and perhaps some after it; returns how many."""
        op, reads = self.uses[i].op, self.uses[i].reads
        match op:
            case model.Embed():
                self._rows()
                self._step("embed", Embed(op.weight, self._new_value(i), op.scale), i)
            case model.Input():
                self._rows()
                self._step("input", Input(self._new_value(i)), i)
            case model.RmsNorm():
                self._rows()
                x = self.views[reads[0]]
                out = self._in_place(i, reads[0])
                step = Norm(x, op.weight, out, op.group or x.width, op.eps, op.scale)
                self._step("norm", step, i)
            case model.Add():
                self._rows()
                x, y = self.views[reads[0]], self.views[reads[1]]
                self._step("add", Add(x, y, self._in_place(i, *reads)), i)
            case model.Activate():
                self._rows()
                x = self.views[reads[0]]
                self._step("activate", Activate(x, self._in_place(i, *reads), op.activation), i)
            case model.GatedActivation():
                gate, up = self.views[reads[0]], self.views[reads[1]]
                self._rows(gate.experts)
                gated = Gate(gate, up, self._in_place(i, *reads), op.activation)
                self._step("gate", gated, i, experts=gate.experts)
            case model.Route():
                self._rows()
                self._step("route", Route(self.views[reads[0]], op.experts), i)
                self._region("sort", Sort(op.experts), (), ())
            case model.ExpertLinear():
                return self._expert_linears(i)
            case model.Combine():
                self._rows()
                slots = self.views[reads[0]]
                self._step("combine", Combine(slots, op.experts, self._new_value(i)), i)
            case model.RopeAndStoreKv():
                self._rope(i, op)
            case model.PagedAttention():
                q, out = self.views[reads[0]], self._new_after_rows(i)
                work = Attention(q, out, op.layer, op.scale, op.softcap)
                name = "attention" if op.window is None else "attention (window)"
                self._region(name, work, (q.buffer, out.buffer), (i,))
            case model.Linear():
                return self._linears(i)
            case model.Logits():
                if self.keep_hidden:
                    self._rows()
                    self._step("keep", Keep(self.views[reads[0]]))
                buffer = self._prepare(reads[0], op.weight)
                self._region("logits", Logits(op.weight, buffer, op.softcap), (buffer,), (i,))
        return 1

    def _rope(self, i: int, op: model.RopeAndStoreKv) -> None:
        self._rows()
        if op.rope not in self.angles:
            self.angles[op.rope] = self._new_view(2 * op.rope.dim)
            self._step("angles", Angles(op.rope, self.angles[op.rope]))
        q, k, v = (self.views[value] for value in self.uses[i].reads)
        self._step("rope", RopeStore(q, k, v, self.angles[op.rope], op.rope, op.layer), i)
        self.views[self.uses[i].writes[0]] = q

    def _new_after_rows(self, i: int) -> View:
        """A value born in a region of its own, not in the row-wise one that is last."""
        view = self._new_value(i)
        view.buffer.first = len(self.regions)
        return view

    def _linears(self, i: int) -> int:
        """One region for the linear ops from i on that share an input, or one that accumulates."""
        if i + 1 < len(self.uses) and (residual := self._residual(i)) is not None:
            view = self.views[residual]
            self.views[self.uses[i + 1].writes[0]] = view
            self._emit_linears([(i, view)], accumulate=True)
            return 2
        end = i + 1
        while (
            end < len(self.uses)
            and isinstance(self.uses[end].op, model.Linear)
            and self.uses[end].reads == self.uses[i].reads
            and self._residual(end) is None
        ):
            end += 1
        self._emit_linears([(j, None) for j in range(i, end)], accumulate=False)
        return end - i

    def _residual(self, i: int) -> int | None:
        """The value that a linear op's output is added to, if both end in the op that follows."""
        if i + 1 >= len(self.uses) or not isinstance(self.uses[i + 1].op, model.Add):
            return None
        (out,) = self.uses[i].writes
        others = [value for value in self.uses[i + 1].reads if value != out]
        if len(others) != 1 or not self._dies(out, i + 1) or not self._dies(others[0], i + 1):
            return None
        return others[0] if others[0] != self.uses[i].reads[0] else None

    def _emit_linears(self, ops: list[tuple[int, View | None]], *, accumulate: bool) -> None:
        linears = [(j, self.uses[j].op, view) for j, view in ops]
        parts: list[LinearPart] = []
        activations = [
            self._prepare(self.uses[j].reads[0], op.weight)
            for j, op, _ in linears
            if isinstance(op, model.Linear)
        ]
        for (j, op, view), buffer in zip(linears, activations, strict=True):
            assert isinstance(op, model.Linear)
            out = view if view is not None else self._new_after_rows(j)
            parts.append(LinearPart(op.weight, buffer, out, op.bias))
        name = "+".join(part.weight.rpartition(".")[2] for part in parts)
        used = [part.activations for part in parts] + [part.out.buffer for part in parts]
        indices = [j for j, _ in ops]
        if accumulate:
            indices.append(indices[-1] + 1)  # the addition
        self._region(name, Linears(parts, accumulate), used, indices)

    def _expert_linears(self, i: int) -> int:
        """One region for the experts' linear ops from i on that share an input."""
        ops: list[model.ExpertLinear] = []
        for use in self.uses[i:]:
            if not isinstance(use.op, model.ExpertLinear) or use.reads != self.uses[i].reads:
                break
            ops.append(use.op)
        value, experts = self.uses[i].reads[0], ops[0].experts
        inputs = [self._prepare_experts(value, op) for op in ops]
        parts: list[ExpertsPart] = []
        for j, (op, buffer) in enumerate(zip(ops, inputs, strict=True), start=i):
            (out,) = self.uses[j].writes
            width = self.widths[out] // experts.chosen
            stride = -(-width // 16) * 16
            slots = self._new_slots(stride * FLOAT_BYTES, experts)
            slots.first = len(self.regions)
            self.views[out] = View(slots, width, stride, experts)
            parts.append(ExpertsPart(op.weights, buffer, self.views[out]))
        name = "+".join(op.weight.rpartition(".")[2] for op in ops)
        used = [part.activations for part in parts] + [part.out.buffer for part in parts]
        self._region(name, ExpertLinears(experts, parts), used, range(i, i + len(ops)))
        return len(ops)

    def _prepare_experts(self, value: int, op: model.ExpertLinear) -> Buffer:
        """The prepared slots of a value that is of tokens, or of slots already."""
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
        slots = self._new_slots(self.kernels.activation_bytes(format, view.width), op.experts)
        if rows is not None:
            self._step("spread", Spread(rows, format, view.width, op.experts, slots))
        else:
            step = PrepareEach(view, format, op.experts, orders, slots)
            self._step("prepare", step, experts=view.experts)
        self.spread.append((value, format, orders, slots))
        return slots


def _stretches(regions: list[Region]) -> list[range]:
    """For each region the stretch that it belongs to.

    A stretch is consecutive row-wise and linear regions over the same rows: a thread can take some
    rows through all of it without meeting the others. Any other region is one by itself.
    """
    stretches: list[range] = []
    for i, region in enumerate(regions):
        joins = i > 0 and regions[i - 1].selected == region.selected
        joins &= all(
            isinstance(each.work, Rows | Linears) for each in regions[max(0, i - 1) : i + 1]
        )
        first = stretches[-1].start if joins else i
        stretches.append(range(first, i + 1))
    for i in reversed(range(len(stretches) - 1)):
        if stretches[i + 1].start == stretches[i].start:
            stretches[i] = stretches[i + 1]
    return stretches


def _place(buffers: list[Buffer]) -> int:
    """Gives every buffer an offset at which no other lives at the same time; returns the total.

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
