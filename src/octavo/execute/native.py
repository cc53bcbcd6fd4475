"""The executor that computes: a Program on packed weights and a paged KV cache, in C++."""

from __future__ import annotations

import logging
import os
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.checkpoint.base import Checkpoint, CheckpointError, Weight, WeightFormat
from octavo.execute import lower
from octavo.execute.batch import Batch, Int32, StepResult, slice_rows
from octavo.execute.cost import Arithmetic, CostModel
from octavo.execute.cpu import usable_cpus
from octavo.kv.layout import KvDtype, KvLayout
from octavo.model.config import Activation, Experts, Rope
from octavo.model.program import Embed, Program

logger = logging.getLogger(__name__)

_READ_BYTES = 4 << 20  # of the file, that loading holds beside the packed weights
_INPUTS = 32  # of a grouped format's matrix: a multiple (kernels/linear.h)
# KvKind of kernels/kernels.h.
_KV_KINDS = {KvDtype.FP16: 0, KvDtype.BF16: 1, KvDtype.INT8: 2, KvDtype.INT4: 3}


def held_bytes(weight: Weight, isa: str | None = None) -> int:
    """Bytes of the executor's own copy of a weight, packed for an instruction-set tier.

    Raises `CheckpointError`, naming the tensor, for a matrix that no kernel takes, and `ValueError`
    for an unknown tier.
    """
    if len(weight.shape) != 2:
        return weight.nbytes
    if weight.format.grouped and weight.shape[1] % _INPUTS:
        raise CheckpointError(
            f"tensor {weight.name!r} has {weight.shape[1]} inputs; "
            f"kernels take multiples of {_INPUTS} in {weight.format.name}"
        )
    return _native.packed_bytes(int(weight.format), *weight.shape, _tier_name(isa), weight.group)


def arithmetic_of(format: WeightFormat, isa: str) -> Arithmetic:
    """What a tier multiplies a matrix of this format with."""
    if format not in (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16):
        return Arithmetic.INT8
    bf16 = format is WeightFormat.BF16 and isa == "avx512_bf16"
    return Arithmetic.BF16 if bf16 else Arithmetic.FP32


def attention_arithmetic(dtype: KvDtype, isa: str) -> Arithmetic:
    """What a tier multiplies keys and values with."""
    if dtype is KvDtype.BF16 and isa == "avx512_bf16":
        return Arithmetic.BF16
    codes = dtype in (KvDtype.INT8, KvDtype.INT4)
    return Arithmetic.INT8 if codes and isa.startswith("avx512") else Arithmetic.FP32


def _tier_name(isa: str | None) -> str:
    return os.environ.get("OCTAVO_ISA", "") if isa is None else isa


class RegionTime(NamedTuple):
    """What the threads do between two meetings, or what one does in turn for some of the rows."""

    name: str
    ops: tuple[int, ...]  # of the program, that it computes: indices
    seconds: float


class NativeExecutor:
    """Implements `Executor` (execute/batch.py). Not for use by several threads at once.

    ``threads`` None: as many as the process may use. ``logits_slice``: rows of logits held at a
    time, a multiple of 8 or ``max_logits_rows`` (None: `slice_rows`). ``isa`` forces an
    instruction-set tier ("generic", "avx2", "avx512", "avx512_bf16"); None: ``OCTAVO_ISA``, else
    the best this CPU has. Weights are copied, so the checkpoint's file may be unmapped afterwards.
    Raises `CheckpointError` for weights that do not fit the program and `ValueError` for settings
    that cannot be honoured.
    """

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
        isa: str | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        self.max_logits_rows = max_logits_rows
        self.threads, source = usable_cpus() if threads is None else (threads, "as asked")
        config = program.config
        runtime = _native.Runtime(
            isa=_tier_name(isa),
            threads=self.threads,
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
        self.isa: str = runtime.isa
        logger.info("%d threads (%s), instruction set %s", self.threads, source, self.isa)
        self._regions = _Loading(runtime, checkpoint, program, layout).load()
        self.weight_bytes: int = runtime.weight_bytes
        weights = {role: checkpoint.weights[role] for role in program.weights}
        self.costs = CostModel(
            program,
            layout,
            weight_bytes={role: held_bytes(weight, isa) for role, weight in weights.items()},
            arithmetic={
                role: arithmetic_of(weight.format, self.isa) for role, weight in weights.items()
            },
            attention=attention_arithmetic(layout.dtype, self.isa),
        )
        self._runtime: _native.Runtime | None = runtime

    @property
    def pool(self) -> _native.ThreadPool:
        """The threads of a step, for others to use between steps."""
        return self._open.pool

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    @property
    def _open(self) -> _native.Runtime:
        if self._runtime is None:
            raise RuntimeError("the executor is closed")
        return self._runtime

    def execute(self, batch: Batch) -> StepResult:
        """Raises `ValueError` naming what is wrong with the batch, before anything is computed."""
        start = time.perf_counter()
        logits = self._open.step(
            batch.token_ids,
            batch.positions,
            batch.seq_offsets,
            batch.seq_slots,
            batch.block_tables,
            batch.logits_rows,
            batch.copies,
        )
        return StepResult(logits, time.perf_counter() - start, self._open.logits)

    def export_blocks(self, blocks: Int32) -> npt.NDArray[np.uint8]:
        data = np.empty((len(blocks), self.layout.block_bytes), np.uint8)
        self._open.transfer(blocks, data, False)
        return data

    def import_blocks(self, blocks: Int32, data: npt.NDArray[np.uint8]) -> None:
        self._open.transfer(blocks, np.require(data, np.uint8, ["C", "W"]), True)

    def start_profile(self) -> None:
        """From here on, every region of a step is timed (some 30 ns each)."""
        self._open.reset_profile()
        self._open.set_profiling(True)

    def profile(self) -> list[RegionTime]:
        """The seconds since `start_profile` of every region, in the order they run in."""
        return [
            RegionTime(name, region.ops, seconds)
            for region, (name, seconds) in zip(self._regions, self._open.profile(), strict=True)
        ]

    @property
    def num_meetings(self) -> int:
        """How many times the threads met in the last step."""
        return self._open.num_jobs

    @property
    def last_meeting(self) -> float:
        """When they met last, if the step was profiled: seconds of `time.perf_counter`, which on
        Linux is the steady clock.
        """
        return self._open.last_meeting

    def close(self) -> None:
        """Gives back threads and memory. Logits handed out before keep theirs until they go."""
        self._runtime = None


class _Loading:
    """Hands weights and the lowered program to the runtime."""

    def __init__(
        self,
        runtime: _native.Runtime,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
    ) -> None:
        self.runtime = runtime
        self.checkpoint = checkpoint
        self.program = program
        self.layout = layout
        self.weights = {role: self._weight(role) for role in program.weights}
        self.read = 0  # bytes since the file's pages were given back
        self.matrices: dict[str, int] = {}
        self.vectors: dict[str, int] = {}
        self.orders: dict[bytes, int] = {}
        self.ropes: dict[Rope, int] = {}
        self.routings: dict[tuple[int, int, bool], int] = {}

    def _weight(self, role: str) -> Weight:
        weight = self.checkpoint.weights.get(role)
        if weight is None:
            raise CheckpointError(f"{self.checkpoint.path}: the model has no weight {role}")
        shape = self.program.weights[role]
        if weight.shape != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: {weight.name} has shape {weight.shape}, not {shape}"
            )
        return weight

    def load(self) -> list[lower.Region]:
        """Returns the regions, in the order they run in."""
        formats: dict[str, WeightFormat] = {}
        orders: dict[str, int] = {}
        matrices = [weight for weight in self.weights.values() if len(weight.shape) == 2]
        self.runtime.allocate_weights(
            sum(
                self.runtime.packed_bytes(weight.format, rows, columns, weight.group)
                for weight in matrices
                for rows, columns in [weight.shape]
            )
        )
        for role, weight in self.weights.items():
            if len(weight.shape) == 2:
                formats[role] = weight.format
                self.matrices[role] = self._matrix(weight)
                if weight.order is not None:
                    orders[role] = self._order(role, weight.order)
            else:
                self.vectors[role] = self.runtime.add_vector(_floats(weight).tolist())
        plan = lower.lower(self.program, formats, self.runtime, orders)
        self.runtime.allocate_activations(plan.row_bytes, plan.local_row_bytes)
        for region in plan.regions:
            self.runtime.add_region(region.name, region.selected, self._work(region.work))
        return plan.regions

    def _order(self, role: str, order: npt.NDArray[np.int32]) -> int:
        """The runtime's number for an order; equal ones have the same."""
        name = self.weights[role].name
        if any(isinstance(op, Embed) and op.weight == role for op in self.program.ops):
            raise CheckpointError(
                f"{self.checkpoint.path}: {name} is an embedding, whose inputs cannot be reordered"
            )
        key = np.ascontiguousarray(order, np.int32).tobytes()
        if key not in self.orders:
            columns = self.weights[role].shape[1]
            if not np.array_equal(np.sort(order), np.arange(columns)):
                raise CheckpointError(
                    f"{self.checkpoint.path}: the order of {name}'s inputs is not one of {columns}"
                )
            self.orders[key] = self.runtime.add_order(order.tolist())
        return self.orders[key]

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
                    f"{self.checkpoint.path}: tensor {weight.name!r}, from row {first} on: {error}"
                ) from None
            self.read += data.nbytes
            if self.read >= _READ_BYTES:
                del data
                self.checkpoint.release()
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
                            self.matrices[part.weight],
                            _prepared(part.activations),
                            _value(part.out),
                            -1 if part.bias is None else self.vectors[part.bias],
                        )
                        for part in parts
                    ],
                    accumulate,
                )
            case lower.Attention(q, out, layer, scale, softcap):
                place = self.layout.place(layer)
                return _native.AttentionRegion(_value(q), _value(out), *place, scale, softcap)
            case lower.Logits(weight, activations, softcap):
                return _native.LogitsRegion(self.matrices[weight], _prepared(activations), softcap)
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
                            [self.matrices[role] for role in part.weights],
                            _prepared(part.activations),
                            _value(part.out),
                        )
                        for part in parts
                    ],
                )

    def _step(self, step: lower.RowStep) -> _native.RowStep:
        match step:
            case lower.Embed(weight, out, scale):
                return _native.EmbedStep(self.matrices[weight], _value(out), scale)
            case lower.Norm(x, weight, out, group, eps, scale):
                vector = self.vectors[weight]
                if scale != 1.0:
                    scaled = _floats(self.weights[weight]) * np.float32(scale)
                    vector = self.runtime.add_vector(scaled.tolist())
                return _native.NormStep(_value(x), vector, _value(out), x.width, group, eps)
            case lower.Add(x, y, out):
                return _native.AddStep(_value(x), _value(y), _value(out), x.width)
            case lower.Gate(gate, up, out, activation):
                gelu = activation is Activation.GELU_TANH
                return _native.GateStep(_value(gate), _value(up), _value(out), gate.width, gelu)
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
