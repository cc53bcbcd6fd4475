"""The executor that computes: a Program on packed weights and a paged KV cache, in C++."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.executor.base import (
    Batch,
    Bytes,
    Capabilities,
    Executor,
    ExecutorSizes,
    Float32,
    Int32,
    RegionTime,
    StepResult,
    check_weights,
    slice_rows,
)
from octavo.executor.cost import CostModel
from octavo.executor.native import lower
from octavo.executor.native.packing import cost_model, held_bytes, tier_name
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader.base import Checkpoint, CheckpointError, Weight, WeightFormat
from octavo.machine.cpu import usable_cpus
from octavo.machine.limits import Limits
from octavo.models.config import Activation, Experts, Rope
from octavo.models.program import Embed, PagedAttention, Program, RopeAndStoreKv
from octavo.sampling.native import NativeSampler
from octavo.words import plural

if TYPE_CHECKING:
    from hashlib import _Hash

logger = logging.getLogger(__name__)

_READ_BYTES = 4 << 20  # of the file, that loading holds beside the packed weights
# KvKind of kernels/kernels.h.
_KV_KINDS = {KvDtype.FP16: 0, KvDtype.BF16: 1, KvDtype.INT8: 2, KvDtype.INT4: 3}


class NativeExecutor(Executor):
    """Implements `Executor`. Not for use by several threads at once.

    ``threads`` None: as many as the process may use; or ``pool``: those of another executor, if no
    two ever compute at the same time. ``keep_hidden``: steps give `StepResult.hidden`, a copy of
    rows dearer. ``logits_slice``: rows of logits held at a time, a multiple of 8 or
    ``max_logits_rows`` (None: `slice_rows`). ``isa`` forces an instruction-set tier ("generic",
    "avx2", "avx512", "avx512_bf16"); None: ``OCTAVO_ISA``, else the best this CPU has. ``digest``:
    have a `digest`, for which all that is loaded is hashed. Weights are copied, so the checkpoint's
    file may be unmapped afterwards.
    Raises `CheckpointError` for weights that do not fit the program and `ValueError` for settings
    that cannot be honoured.
    """

    capabilities = Capabilities(
        "native",
        KvDtype.served(),
        numerics=1,
        hidden_rows=True,
        added_programs=True,
        drafts_rows=True,
        measures=True,
    )

    def __init__(
        self,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
        *,
        num_blocks: int,
        max_tokens: int,
        max_logits_rows: int,
        max_seqs: int,
        max_blocks_per_seq: int,
        logits_slice: int | None = None,
        threads: int | None = None,
        pool: _native.ThreadPool | None = None,
        isa: str | None = None,
        keep_hidden: bool = False,
        digest: bool = False,
    ) -> None:
        layout.dtype.check_served()
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        self.max_logits_rows = max_logits_rows
        if pool is None:
            count, source = usable_cpus() if threads is None else (threads, "as asked")
            usable, why = usable_cpus()
            if count > usable:
                logger.warning(
                    "%d threads, but %d can run at once (%s): steps take longer than with %d",
                    count,
                    usable,
                    why,
                    usable,
                )
            pool = _native.ThreadPool(count)
        elif threads is None:
            source = "shared"
        else:
            raise ValueError("threads are asked for, and a pool that has its own")
        self.threads = pool.size
        config = program.config
        runtime = _native.Runtime(
            isa=tier_name(isa),
            pool=pool,
            max_tokens=max_tokens,
            max_logits_rows=max_logits_rows,
            logits_slice=logits_slice or slice_rows(max_logits_rows, config.vocab_size),
            max_seqs=max_seqs,
            max_blocks_per_seq=max_blocks_per_seq,
            num_blocks=num_blocks,
            vocab_size=config.vocab_size,
            windows=[group.window or 0 for group in layout.groups],
            layers_per_group=layout.layers_per_group,
            block_size=layout.block_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            kv_kind=_KV_KINDS[layout.dtype],
        )
        self.capabilities = replace(self.capabilities, tier=runtime.isa)
        logger.info(
            "%s (%s), instruction set %s", plural(self.threads, "thread"), source, runtime.isa
        )
        self._keep_hidden = [keep_hidden]  # of each program
        self._attention = _attention_shape(program)
        self._loader: _Loader | None = _Loader(runtime, layout, sha256() if digest else None)
        self._costs: list[CostModel] = []
        self._regions = self._loader.load(
            program,
            {role: w for role, w in checkpoint.weights.items() if role in program.weights},
            str(checkpoint.path),
            checkpoint.release,
            keep_hidden=keep_hidden,
        )
        self._costs.append(self._count(program))
        self.digest = self._loader.digest.digest() if self._loader.digest else b""

    def add_program(
        self,
        program: Program,
        weights: Mapping[str, Weight] | None = None,
        *,
        keep_hidden: bool = False,
        ids: Sequence[int] = (),
    ) -> int:
        loader = self._loading
        weights = weights or {}
        if unneeded := [role for role in weights if role not in program.weights]:
            raise ValueError(f"the program has no weight {unneeded[0]}")
        if twice := [role for role in weights if role in loader.held]:
            raise ValueError(f"the weight {twice[0]} is loaded already")
        if _attention_shape(program) not in (None, self._attention):
            raise ValueError("the program's attention has another shape than the cache")
        loader.load(
            program, weights, "an added program", lambda: None, keep_hidden=keep_hidden, ids=ids
        )
        self._keep_hidden.append(keep_hidden)
        self._costs.append(self._count(program))
        return len(self._costs) - 1

    def drop_program(self) -> None:
        self._open.drop_program()
        self._costs.pop()
        self._keep_hidden.pop()

    def _count(self, program: Program) -> CostModel:
        held = {role: (each.format, each.bytes) for role, each in self._loading.held.items()}
        return cost_model(program, self.layout, held, self.capabilities.tier)

    @property
    def costs(self) -> CostModel:  # type: ignore[override]
        return self._costs[0]

    def costs_of(self, program: int) -> CostModel:
        return self._costs[program]

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        return self._open.weight_bytes

    @property
    def pool(self) -> _native.ThreadPool:
        """The threads of a step, for others to use between steps."""
        return self._open.pool

    @property
    def _loading(self) -> _Loader:
        if self._loader is None:
            raise RuntimeError("the executor is closed")
        return self._loader

    @property
    def _open(self) -> _native.Runtime:
        return self._loading.runtime

    def companion(
        self,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
        **sizes: Unpack[ExecutorSizes],
    ) -> NativeExecutor:
        pool, tier = self.pool, self.capabilities.tier
        return NativeExecutor(checkpoint, program, layout, pool=pool, isa=tier, **sizes)

    def new_sampler(self, vocab_size: int) -> NativeSampler:
        return NativeSampler(vocab_size, self.capabilities.tier, self.pool)

    def execute(self, batch: Batch, program: int = 0, rows: Float32 | None = None) -> StepResult:
        start = time.perf_counter()
        runtime = self._open
        logits = runtime.step(
            batch.token_ids,
            batch.positions,
            batch.seq_offsets,
            batch.seq_slots,
            batch.block_tables,
            batch.logits_rows,
            batch.copies,
            program,
            rows,
        )
        hidden = runtime.hidden() if self._keep_hidden[program] else None
        return StepResult(logits, time.perf_counter() - start, runtime.logits, hidden)

    def draft_rows(
        self,
        programs: Sequence[int],
        rows: Float32,
        token_ids: Int32,
        most: Int32,
        least: float,
    ) -> tuple[Int32, Float32]:
        return self._open.draft(programs, rows, token_ids, most, least)

    def start_draft(
        self,
        programs: Sequence[int],
        rows: Float32,
        numbers: list[int],
        token_ids: list[int],
        most: list[int],
        least: float,
    ) -> None:
        self._open.start_draft(programs, rows, numbers, token_ids, most, least)

    def finish_draft(self) -> list[tuple[list[int], float]] | None:
        return self._open.finish_draft()

    def cancel_draft(self) -> None:
        self._open.cancel_draft()

    def export_blocks(self, blocks: Int32, into: Bytes | None = None) -> Bytes:
        shape = len(blocks), self.layout.block_bytes
        data = np.empty(shape, np.uint8) if into is None else into
        self._open.transfer(blocks, data, False)
        return data

    def import_blocks(self, blocks: Int32, data: Bytes) -> None:
        self._open.transfer(blocks, np.require(data, np.uint8, ["C", "W"]), True)

    def measure_limits(self) -> Limits:
        return Limits.measure(quick=True, pool=self.pool)

    def start_profile(self) -> None:
        self._open.set_profiling(True)
        self._open.reset_profile()

    def profile(self) -> list[RegionTime]:
        return [
            RegionTime(name, region.ops, seconds)
            for region, (name, seconds) in zip(self._regions, self._open.profile(0), strict=True)
        ]

    @property
    def num_meetings(self) -> int:
        return self._open.num_jobs

    @property
    def last_meeting(self) -> float:
        return self._open.last_meeting

    def close(self) -> None:
        self._loader = None


class _Held(NamedTuple):
    """A weight that the runtime has."""

    number: int  # of a matrix, or of a vector
    format: WeightFormat
    shape: tuple[int, ...]
    bytes: int


class _Loader:
    """Hands weights and lowered programs to the runtime."""

    def __init__(
        self, runtime: _native.Runtime, layout: KvLayout, digest: _Hash | None = None
    ) -> None:
        self.runtime = runtime
        self.digest = digest  # of what is loaded, as it is read
        self.layout = layout
        self.held: dict[str, _Held] = {}
        self.order_of: dict[str, int] = {}  # a matrix's inputs
        self.orders: dict[bytes, int] = {}
        self.scaled: dict[tuple[int, float], int] = {}
        self.ropes: dict[Rope, int] = {}
        self.routings: dict[tuple[int, int, bool], int] = {}
        self.source = ""
        self.release: Callable[[], None] = lambda: None
        self.read = 0  # bytes since the file's pages were given back

    def load(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        source: str,
        release: Callable[[], None],
        *,
        keep_hidden: bool = False,
        ids: Sequence[int] = (),
    ) -> list[lower.Region]:
        """Returns the regions, in the order they run in. ``source`` is named in errors."""
        self.source, self.release = source, release
        self._load_weights(program, weights)
        formats = {role: self.held[role].format for role in program.weights}
        plan = lower.lower(program, formats, self.runtime, self.order_of, keep_hidden=keep_hidden)
        self.runtime.allocate_activations(plan.row_bytes, plan.local_row_bytes)
        self.runtime.add_program(
            [(region.name, region.selected, self._work(region.work)) for region in plan.regions],
            ids,
        )
        return plan.regions

    def _load_weights(self, program: Program, weights: Mapping[str, Weight]) -> None:
        check_weights(program, {**weights, **self.held}, self.source)
        new = {role: weights[role] for role in program.weights if role not in self.held}
        packed = (
            self.runtime.packed_bytes(weight.format, *weight.shape, weight.group)
            for weight in new.values()
            if len(weight.shape) == 2
        )
        self.runtime.allocate_weights(sum(packed))
        for role, weight in new.items():
            if self.digest is not None:
                order = b"" if weight.order is None else weight.order.tobytes()
                named = (role, weight.format.name, weight.shape, weight.group, order)
                self.digest.update(repr(named).encode())
            if weight.order is not None:
                self._check_reordered(program, role, weight.name)
                self.order_of[role] = self._order(weight, weight.order)
            if len(weight.shape) == 2:
                number = self._matrix(weight)
            else:
                floats = _floats(weight)
                number = self.runtime.add_vector(floats.tolist())
                if self.digest is not None:
                    self.digest.update(floats.data)
            size = held_bytes(weight, self.runtime.isa)
            self.held[role] = _Held(number, weight.format, weight.shape, size)

    def _check_reordered(self, program: Program, role: str, name: str) -> None:
        if any(isinstance(op, Embed) and op.weight == role for op in program.ops):
            raise CheckpointError(
                f"{self.source}: {name} is an embedding, whose inputs cannot be reordered"
            )

    def _order(self, weight: Weight, order: npt.NDArray[np.int32]) -> int:
        """The runtime's number for an order; equal ones have the same."""
        key = np.ascontiguousarray(order, np.int32).tobytes()
        if key not in self.orders:
            columns = weight.shape[1]
            if not np.array_equal(np.sort(order), np.arange(columns)):
                raise CheckpointError(
                    f"{self.source}: the order of {weight.name}'s inputs is not one of {columns}"
                )
            self.orders[key] = self.runtime.add_order(order.tolist())
        return self.orders[key]

    def _scaled(self, vector: int, factor: float) -> int:
        key = (vector, factor)
        if factor == 1.0:
            return vector
        if key not in self.scaled:
            self.scaled[key] = self.runtime.scale_vector(vector, factor)
        return self.scaled[key]

    def _numbers(self, roles: Iterable[str]) -> list[int]:
        return [self.held[role].number for role in roles]

    def _matrix(self, weight: Weight) -> int:
        """Packs it, giving back what has been read as it goes: a matrix may be most of a model."""
        rows, columns = weight.shape
        matrix = self.runtime.add_matrix(weight.format, rows, columns, weight.group)
        step = max(_READ_BYTES * rows // weight.nbytes // 16, 1) * 16  # the kernels' blocks
        for first in range(0, rows, step):
            last = min(first + step, rows)
            data = weight.rows(first, last).reshape(-1)
            try:
                self.runtime.pack_rows(matrix, first, last, data)
            except ValueError as error:
                raise CheckpointError(
                    f"{self.source}: tensor {weight.name!r}, from row {first} on: {error}"
                ) from None
            if self.digest is not None:
                self.digest.update(data.data)
            self.read += data.nbytes
            if self.read >= _READ_BYTES:
                del data
                self.release()
                self.read = 0
        return matrix

    def _rope(self, rope: Rope) -> int:
        if rope not in self.ropes:
            pairs = np.arange(rope.dim // 2)
            frequencies = rope.scale * rope.theta ** (-2.0 * pairs / rope.dim)
            if rope.factors:
                frequencies = frequencies / np.asarray(rope.factors)
            self.ropes[rope] = self.runtime.add_rope(
                rope.dim, rope.interleaved, frequencies.tolist(), rope.magnitude
            )
        return self.ropes[rope]

    def _routing(self, experts: Experts) -> int:
        key = (experts.count, experts.chosen, experts.renormalize)
        if key not in self.routings:
            self.routings[key] = self.runtime.add_routing(*key)
        return self.routings[key]

    def _work(self, work: lower.Work) -> _native.Region:
        match work:
            case lower.Rows(steps):
                return _native.RowsRegion([self._step(step) for step in steps])
            case lower.Linears(parts, accumulate):
                return _native.LinearRegion(
                    [
                        _native.LinearPart(
                            self.held[part.weight].number,
                            _prepared(part.activations),
                            _value(part.out),
                            -1 if part.bias is None else self.held[part.bias].number,
                        )
                        for part in parts
                    ],
                    accumulate,
                )
            case lower.Attention(q, out, layer, scale, softcap):
                place = self.layout.place(layer)
                return _native.AttentionRegion(_value(q), _value(out), *place, scale, softcap)
            case lower.Logits(weight, activations, softcap):
                return _native.LogitsRegion(
                    self.held[weight].number, _prepared(activations), softcap
                )
            case lower.Sort(experts):
                return _native.SortRegion(self._routing(experts))
            case lower.Slots(experts, steps):
                return _native.SlotsRegion(
                    self._routing(experts), [self._step(step) for step in steps]
                )
            case lower.ExpertLinears(experts, parts):
                return _native.ExpertsRegion(
                    self._routing(experts),
                    [
                        _native.ExpertsPart(
                            self._numbers(part.weights),
                            _prepared(part.activations),
                            _value(part.out),
                        )
                        for part in parts
                    ],
                )

    def _step(self, step: lower.RowStep) -> _native.RowStep:
        match step:
            case lower.Embed(weight, out, scale):
                return _native.EmbedStep(self.held[weight].number, _value(out), scale)
            case lower.Input(out):
                return _native.InputStep(_value(out), out.width)
            case lower.Norm(x, weight, out, group, eps, scale):
                vector = self._scaled(self.held[weight].number, scale)
                return _native.NormStep(_value(x), vector, _value(out), x.width, group, eps)
            case lower.Add(x, y, out):
                return _native.AddStep(_value(x), _value(y), _value(out), x.width)
            case lower.Gate(gate, up, out, activation):
                gelu = activation is Activation.GELU_TANH
                return _native.GateStep(_value(gate), _value(up), _value(out), gate.width, gelu)
            case lower.Activate(x, out, activation):
                gelu = activation is Activation.GELU_TANH
                return _native.ActivateStep(_value(x), _value(out), x.width, gelu)
            case lower.Prepare(x, format, buffer, order):
                return _native.PrepareStep(_value(x), format, x.width, _prepared(buffer), order)
            case lower.Angles(rope, out):
                return _native.AngleStep(self._rope(rope), _value(out))
            case lower.RopeStore(q, k, v, angles, rope, layer):
                return _native.RopeStoreStep(
                    _value(q),
                    _value(k),
                    _value(v),
                    _value(angles),
                    self._rope(rope),
                    *self.layout.place(layer),
                )
            case lower.Gather(x, out):
                return _native.GatherStep(_value(x), _value(out), x.width)
            case lower.Keep(x):
                return _native.KeepStep(_value(x), x.width)
            case lower.Route(logits, experts):
                return _native.RouteStep(_value(logits), self._routing(experts))
            case lower.Spread(rows, format, width, experts, slots):
                return _native.SpreadStep(
                    _prepared(rows), format, width, self._routing(experts), _prepared(slots)
                )
            case lower.PrepareEach(x, format, experts, each, slots):
                return _native.PrepareEachStep(
                    _value(x),
                    x.experts is not None,
                    format,
                    x.width,
                    self._routing(experts),
                    each,
                    _prepared(slots),
                )
            case lower.Combine(slots, experts, out):
                return _native.CombineStep(
                    _value(slots), self._routing(experts), _value(out), out.width
                )


def _attention_shape(program: Program) -> tuple[int, int, int] | None:
    """Query heads, KV heads and their size; None where there is no attention."""
    if not any(isinstance(op, PagedAttention | RopeAndStoreKv) for op in program.ops):
        return None
    config = program.config
    return config.num_heads, config.num_kv_heads, config.head_dim


def _value(view: lower.View) -> _native.Value:
    return _native.Value(view.buffer.offset, view.stride, view.buffer.local)


def _prepared(buffer: lower.Buffer) -> _native.Prepared:
    return _native.Prepared(buffer.offset, buffer.local)


def _floats(weight: Weight) -> npt.NDArray[np.float32]:
    """A vector's numbers."""
    data = np.ascontiguousarray(weight.data).reshape(-1)
    match weight.format:
        case WeightFormat.F32:
            return data.view(np.float32)
        case WeightFormat.F16:
            return data.view(np.float16).astype(np.float32)
        case WeightFormat.BF16:
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise CheckpointError(f"{weight.name}: a vector in format {weight.format.name}")
