"""A Program taken apart for quantizers: its layers, and the matrices that share an input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from octavo.loader.base import CheckpointError
from octavo.models.config import ModelConfig
from octavo.models.program import (
    ExpertLinear,
    GatedActivation,
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
    inputs of ``along``, all experts' matrices, too.
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

    @property
    def matrices(self) -> tuple[str, ...]:
        """Roles of the matrices that are quantized."""
        return tuple(role for each in self.inputs if not each.router for role in each.roles)

    @property
    def weights(self) -> tuple[str, ...]:
        """Roles of all weights."""
        return tuple(dict.fromkeys(role for op in self.ops for role in roles(op)))


def roles(op: Op) -> tuple[str, ...]:
    """The weights an op names."""
    if isinstance(op, ExpertLinear):
        return op.weights
    found = (getattr(op, "weight", None), getattr(op, "bias", None))
    return tuple(role for role in found if role is not None)


def split(program: Program) -> tuple[tuple[Op, ...], list[LayerOps]]:
    """The ops before the first layer, and each layer's. Raises `CheckpointError` for layers that
    cannot be computed by themselves.
    """
    for index, layer in enumerate(program.config.layers):
        if layer.shares is not None:
            raise CheckpointError(
                f"layer {index} reads the keys and values of layer {layer.shares}: it cannot be "
                "computed by itself"
            )
    starts: list[int] = []
    end = len(program.ops)
    for index, op in enumerate(program.ops):
        for role in roles(op):
            if role.startswith(f"layers.{len(starts)}."):
                starts.append(index)
            elif starts and not role.startswith("layers."):
                end = min(end, index)
    layers = [program.ops[a:b] for a, b in pairwise([*starts, end])]
    return program.ops[: starts[0]], [LayerOps(ops, _inputs(ops, program.config)) for ops in layers]


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
        linears = tuple(op for index in members if isinstance(op := ops[index], Linear))
        sparse = tuple(op for index in members if isinstance(op := ops[index], ExpertLinear))
        if not sparse:
            found.append(SharedInput(linears, members[0], _made(maker)))
            continue
        if linears:
            along = tuple(role for op in sparse for role in op.weights)
            router = SharedInput(linears, members[0], _made(maker), router=True, along=along)
            found.append(router)
            maker = None  # it is not an expert's alone
        first = next(index for index in members if ops[index] is sparse[0])
        for expert in range(sparse[0].experts.count):
            found.append(SharedInput(sparse, first, _made(maker, expert), expert))
    return tuple(found)


def _made(op: RmsNorm | Linear | ExpertLinear | None, expert: int = 0) -> Maker | None:
    match op:
        case RmsNorm(weight=weight):
            return Maker(weight, None, norm=True)
        case Linear(weight=weight, bias=bias):
            return Maker(weight, bias, norm=False)
        case ExpertLinear():
            return Maker(op.weights[expert], None, norm=False)
    return None


def _maker(
    ops: Sequence[Op],
    source: int,
    sources: dict[int, tuple[int, ...]],
    readers: dict[int, int],
    config: ModelConfig,
) -> RmsNorm | Linear | ExpertLinear | None:
    """What scales each output of the op at ``source`` by itself. See `SharedInput`."""
    if source < 0:
        return None
    before = -1
    match ops[source]:
        case RmsNorm(group=0) as norm:
            return norm
        case GatedActivation():
            before = sources[source][1]  # up
        case PagedAttention() as attention if attention.kv_heads == config.num_heads:
            # With fewer KV heads a value serves several inputs. (As the reference has it.)
            store = next(
                index
                for index, op in enumerate(ops)
                if isinstance(op, RopeAndStoreKv) and op.layer == attention.layer
            )
            before = sources[store][2]  # v
    maker = ops[before] if before >= 0 else None
    if isinstance(maker, Linear | ExpertLinear) and readers.get(before) == 1:
        return maker
    return None
