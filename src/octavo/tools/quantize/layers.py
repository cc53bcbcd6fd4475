"""A Program taken apart for quantizers: its layers, and the matrices that share an input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from octavo.loader.bind import ROUTERS
from octavo.models.config import Activation, ModelConfig
from octavo.models.program import (
    ExpertLinear,
    GatedActivation,
    LayerNorm,
    Linear,
    Op,
    PagedAttention,
    Program,
    RmsNorm,
    RopeAndStoreKv,
)


class Maker(NamedTuple):
    """What can be scaled output by output: a norm's weight, or the rows and bias of a matrix."""

    weight: str
    bias: str | None
    norm: bool


class SharedInput(NamedTuple):
    """Matrices that read one value, the first of them at ``first`` in the layer's ops.

    ``maker`` is what can be scaled, output by output, with nothing but these inputs being scaled by
    it: a norm before, the up projection before a gate, or v before attention. None if there is no
    such thing.

    An ``expert``'s matrices read the rows of the tokens that are routed to it. A ``router`` is not
    quantized; it is here for the rows of all tokens, and for the norm before it, which scales the
    inputs of ``along``, all experts' matrices and the shared one's, too.
    """

    linears: tuple[Linear | ExpertLinear, ...]
    first: int
    maker: Maker | None
    expert: int | None = None
    router: bool = False
    along: tuple[str, ...] = ()

    @property
    def x(self) -> str:
        return self.linears[0].x

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(
            op.weight if isinstance(op, Linear) else op.weights[self.expert or 0]
            for op in self.linears
        )

    @property
    def route(self) -> str:
        """The value that says which rows are the expert's."""
        (op, *_) = self.linears
        assert isinstance(op, ExpertLinear)
        return op.route


class LayerOps(NamedTuple):
    ops: tuple[Op, ...]
    inputs: tuple[SharedInput, ...]  # in the order of the ops, then of the experts
    weights: tuple[str, ...]  # roles of all

    @property
    def matrices(self) -> tuple[str, ...]:
        """Roles of the matrices that are quantized."""
        return tuple(role for each in self.inputs if not each.router for role in each.roles)


def split(program: Program) -> tuple[tuple[Op, ...], list[LayerOps]]:
    """The ops before the first layer, and each layer's."""
    starts: list[int] = []
    end = len(program.ops)
    for index, op in enumerate(program.ops):
        for role in program.roles(op):
            if role.startswith(f"layers.{len(starts)}."):
                starts.append(index)
            elif starts and not role.startswith("layers."):
                end = min(end, index)
    layers = []
    for ops in (program.ops[a:b] for a, b in pairwise([*starts, end])):
        weights = dict.fromkeys(role for op in ops for role in program.roles(op))
        layers.append(LayerOps(ops, _inputs(ops, program.config), tuple(weights)))
    return program.ops[: starts[0]], layers


def live(ops: Sequence[Op], after: frozenset[str] = frozenset()) -> frozenset[str]:
    """Values that ``ops`` read before they write them, with those wanted ``after`` them."""
    wanted = set(after)
    for op in reversed(ops):
        reads, writes = op.reads, op.writes
        wanted -= set(writes)
        wanted |= set(reads)
    return frozenset(wanted)


def _inputs(ops: Sequence[Op], config: ModelConfig) -> tuple[SharedInput, ...]:
    made: dict[str, int] = {}  # of each value, the op that has written it last
    readers: dict[int, int] = {}  # and how often what an op wrote is read
    groups: dict[tuple[str, int], list[int]] = {}
    sources: dict[int, tuple[int, ...]] = {}  # the ops that made what an op reads
    for index, op in enumerate(ops):
        reads, writes = op.reads, op.writes
        sources[index] = tuple(made.get(name, -1) for name in reads)
        for source in sources[index]:
            readers[source] = readers.get(source, 0) + 1
        if isinstance(op, Linear | ExpertLinear):
            groups.setdefault((op.x, sources[index][0]), []).append(index)
        for name in writes:
            made[name] = index
    found: list[SharedInput] = []
    for (_, source), members in groups.items():
        maker = None
        if readers.get(source) == len(members):
            maker = _maker(ops, source, sources, readers, config)
        linears = [op for index in members if isinstance(op := ops[index], Linear)]
        routers = tuple(op for op in linears if op.weight.endswith(ROUTERS))
        dense = tuple(op for op in linears if op not in routers)
        sparse = tuple(op for index in members if isinstance(op := ops[index], ExpertLinear))

        def first(of: Sequence[Op], members: Sequence[int] = members) -> int:
            return next(index for index in members if ops[index] is of[0])

        if routers:
            along = (*(op.weight for op in dense), *(role for op in sparse for role in op.weights))
            scaled = _made(maker) if along else None
            found.append(SharedInput(routers, members[0], scaled, router=True, along=along))
        if routers or (sparse and isinstance(maker, RmsNorm | LayerNorm)):
            maker = None  # what reads it is not scaled alone
        if dense:
            found.append(SharedInput(dense, first(dense), _made(maker)))
        if sparse:
            at = first(sparse)
            for expert in range(sparse[0].experts.count):
                found.append(SharedInput(sparse, at, _made(maker, expert), expert))
    return tuple(sorted(found, key=lambda each: each.first))


def _made(op: RmsNorm | LayerNorm | Linear | ExpertLinear | None, expert: int = 0) -> Maker | None:
    match op:
        case RmsNorm(weight=str(weight)) | LayerNorm(weight=weight):
            return Maker(weight, None, norm=True)
        case Linear(weight=weight, bias=bias):
            return Maker(weight, bias, norm=False)
        case ExpertLinear():
            bias = op.biases[expert] if op.biases else None
            return Maker(op.weights[expert], bias, norm=False)
    return None


def _maker(
    ops: Sequence[Op],
    source: int,
    sources: dict[int, tuple[int, ...]],
    readers: dict[int, int],
    config: ModelConfig,
) -> RmsNorm | LayerNorm | Linear | ExpertLinear | None:
    """What scales each output of the op at ``source`` by itself. See `SharedInput`."""
    if source < 0:
        return None
    before = -1
    match ops[source]:
        case (RmsNorm(group=0) | LayerNorm(group=0)) as norm:
            return norm
        case GatedActivation(activation=how) if how is not Activation.SWIGLU_CLAMPED:
            before = sources[source][1]  # up
        case PagedAttention() as attention if attention.kv_heads == config.num_heads:
            # With fewer KV heads, or layers that share them, a value serves several inputs.
            if not any(layer.shares == attention.layer for layer in config.layers):
                store = next(
                    index for index, op in enumerate(ops) if isinstance(op, RopeAndStoreKv)
                )
                before = sources[store][2]  # v
    maker = ops[before] if before >= 0 else None
    if isinstance(maker, Linear | ExpertLinear) and readers.get(before) == 1:
        return maker
    return None
