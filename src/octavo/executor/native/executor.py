"""The executor that computes: a Program on packed weights and a paged KV cache, in C++."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple, Unpack

import numpy as np

from octavo import _native
from octavo.executor.base import (
    Batch,
    Bytes,
    Capabilities,
    Executor,
    ExecutorSizes,
    Float32,
    Int32,
    LoadOptions,
    Profiled,
    RegionTime,
    StepResult,
    check_added,
    check_weights,
    slice_rows,
)
from octavo.executor.cost import CostModel
from octavo.executor.native import lower
from octavo.executor.native.held_form import held_form
from octavo.executor.native.packing import cost_model, held_bytes, scaled_bytes, tier_name
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.kv_cache.state_batch import StateBatch
from octavo.loader.base import Checkpoint, CheckpointError, Weight, WeightFormat
from octavo.loader.dequantize import dequantize
from octavo.machine.cpu import usable_cpus
from octavo.machine.limits import Limits
from octavo.models.config import Experts, Rope
from octavo.models.program import Embed, Program
from octavo.sampling.native import NativeSampler
from octavo.words import plural

logger = logging.getLogger(__name__)

_READ_BYTES = 4 << 20  # of the file, that loading holds beside the packed weights
_FLOATS = (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16)
# KvKind of kernels/kernels.h.
_KV_KINDS = {KvDtype.FP16: 0, KvDtype.BF16: 1, KvDtype.INT8: 2, KvDtype.INT4: 3}


class NativeExecutor(Executor):
    """Implements `Executor`. Not for use by several threads at once.

    ``threads`` None: as many as the process may use; or ``pool``: those of another executor, if no
    two ever compute at the same time. ``keep_hidden``: steps give `StepResult.hidden`, a copy of
    rows dearer; ``all_hidden``: of all tokens, which then go through the whole last layer.
    ``logits_slice``: rows of logits held at a time, a multiple of 8 or ``max_logits_rows`` (None:
    `slice_rows`). ``isa`` forces an instruction-set tier ("generic",
    "avx2", "avx512", "avx512_bf16"); None: ``OCTAVO_ISA``, else the best this CPU has. ``digest``:
    have a `digest`, for which all that is loaded is hashed. Weights are copied, so the checkpoint's
    file may be unmapped afterwards.
    Raises `CheckpointError` for weights that do not fit the program and `ValueError` for settings
    that cannot be honoured.
    """

    capabilities = Capabilities(
        "native",
        KvDtype.served(),
        # Raise this when a change can alter a bit of a block or of logits for the same weights,
        # tokens and tier: in kernels and compiler flags, in lowering, in what a family's Program
        # computes, in how a loader converts weights, or in how blocks are packed. Files of cached
        # blocks then get other names and are not found any more. Then record the bits again
        # (tests/oracle/record_bits.py). A change that leaves all bits as they are does not raise it
        # (tests/engine/test_same_bits.py).
        numerics=1,
        hidden_rows=True,
        added_programs=True,
        drafts_rows=True,
    )

    def __init__(
        self,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
        *,
        logits_slice: int | None = None,
        threads: int | None = None,
        pool: _native.ThreadPool | None = None,
        isa: str | None = None,
        keep_hidden: bool = False,
        all_hidden: bool = False,
        digest: bool = False,
        state_log_rows: int = 0,
        **sizes: Unpack[ExecutorSizes],
    ) -> None:
        layout.dtype.check_served()
        self.layout = layout
        self.num_blocks = sizes["num_blocks"]
        self.max_tokens = sizes["max_tokens"]
        self.max_logits_rows = sizes["max_logits_rows"]
        if pool is None:
            usable, why = usable_cpus()
            count, source = (usable, why) if threads is None else (threads, "as asked")
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
            logits_slice=logits_slice or slice_rows(self.max_logits_rows, config.vocab_size),
            vocab_size=config.vocab_size,
            groups=[
                (len(group.layers), group.window or 0, group.kv_heads, group.head_dim)
                for group in layout.groups
            ],
            block_size=layout.block_size,
            block_bytes=layout.block_bytes,
            num_heads=config.num_heads,
            kv_kind=_KV_KINDS[layout.dtype],
            state=_state_fields(layout, state_log_rows),
            **sizes,
        )
        self.capabilities = replace(self.capabilities, tier=runtime.isa)
        logger.info(
            "%s (%s), instruction set %s", plural(self.threads, "thread"), source, runtime.isa
        )
        self._num_heads = config.num_heads
        content = sha256()
        hashing = content.update if digest else lambda data: None
        self._loader: _Loader | None = _Loader(runtime, layout, hashing)
        self._regions = self._loader.load(
            program,
            {role: w for role, w in checkpoint.weights.items() if role in program.weights},
            str(checkpoint.path),
            checkpoint.release,
            keep_hidden=keep_hidden,
            all_hidden=all_hidden,
        )
        self.costs = self._count(program)
        self._programs = [(self.costs, keep_hidden or all_hidden)]
        self.digest = content.digest() if digest else b""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
        **options: Unpack[LoadOptions],
    ) -> NativeExecutor:
        options.pop("rates", None)
        return cls(checkpoint, program, layout, **options)  # type: ignore[misc]

    @classmethod
    def held_bytes(
        cls, weights: Iterable[Weight], program: Program, source: str, isa: str | None
    ) -> int:
        try:
            held = sum(held_bytes(weight, isa) for weight in weights)
        except CheckpointError as error:  # which names the tensor
            raise CheckpointError(f"{source}: {error}") from None
        return held + sum(scaled_bytes(program).values())

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
        check_added(program, weights, loader.held, self.layout, self._num_heads)
        loader.load(
            program, weights, "an added program", lambda: None, keep_hidden=keep_hidden, ids=ids
        )
        self._programs.append((self._count(program), keep_hidden))
        return len(self._programs) - 1

    def drop_program(self) -> None:
        self._open.drop_program()
        self._programs.pop()

    def _count(self, program: Program) -> CostModel:
        held = {role: (each.format, each.bytes) for role, each in self._loading.held.items()}
        return cost_model(program, self.layout, held, self.capabilities.tier)

    def costs_of(self, program: int) -> CostModel:
        return self._programs[program][0]

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
            None if batch.state is None else _state_arrays(batch.state),
        )
        hidden = runtime.hidden() if self._programs[program][1] else None
        return StepResult(logits, time.perf_counter() - start, runtime.logits, hidden)

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

    def profile(self) -> Profiled:
        regions = [
            RegionTime(name, region.ops, seconds)
            for region, (name, seconds) in zip(self._regions, self._open.profile(0), strict=True)
        ]
        return Profiled(regions, self._open.num_jobs, self._open.last_meeting)

    def close(self) -> None:
        self._loader = None


def _state_fields(layout: KvLayout, log_rows: int) -> tuple[Any, ...] | None:
    """Return how the runtime is told where states lie (kernels/recurrence.h)."""
    state = layout.state
    if state is None:
        return None
    parts = [
        (part.heads, part.depth, part.width, part.first_unit, part.tiles_per_unit)
        for part in state.parts
    ]
    return state.pages, state.unit_bytes, state.units_per_page, log_rows, parts


def _state_parts(layout: KvLayout, layer: int) -> tuple[int, int]:
    """Return the parts that a layer's state has: inputs of its convolution, and matrices or -1."""
    parts = () if layout.state is None else layout.state.parts
    found = [index for index, part in enumerate(parts) if part.layer == layer]
    if not found:
        raise ValueError(f"the cache has no state of layer {layer}")
    return found[0], found[1] if len(found) > 1 else -1


def _state_arrays(state: StateBatch) -> tuple[Int32, ...]:
    """Return the arrays as the runtime takes them."""
    return (
        state.tables,
        state.reads,
        state.stores,
        state.pending_offsets,
        state.pending,
        state.log,
    )


class _Held(NamedTuple):
    """A weight that the runtime has."""

    number: int  # of a matrix, or of a vector
    format: WeightFormat
    shape: tuple[int, ...]
    bytes: int


class _Loader:
    """Hand weights and lowered programs to the runtime."""

    def __init__(
        self, runtime: _native.Runtime, layout: KvLayout, hashing: Callable[[Any], None]
    ) -> None:
        self.runtime = runtime
        self.hashing = hashing  # of what is loaded, as it is read
        self.layout = layout
        self.held: dict[str, _Held] = {}
        self.order_of: dict[str, int] = {}  # a matrix's inputs
        self.numbers: dict[Hashable, int] = {}  # of orders, scaled vectors, ropes and routings
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
        all_hidden: bool = False,
        ids: Sequence[int] = (),
    ) -> list[lower.Region]:
        """Returns the regions, in the order they run in. ``source`` is named in errors."""
        self.source, self.release = source, release
        self._load_weights(program, weights)
        formats = {role: self.held[role].format for role in program.weights}
        plan = lower.lower(
            program,
            formats,
            self.runtime,
            self.order_of,
            keep_hidden=keep_hidden,
            all_hidden=all_hidden,
        )
        self.runtime.allocate_activations(plan.row_bytes, plan.local_row_bytes)
        self.runtime.add_program(
            [(region.name, region.selected, self._built(region.work)) for region in plan.regions],
            ids,
        )
        return plan.regions

    def _load_weights(self, program: Program, weights: Mapping[str, Weight]) -> None:
        check_weights(program, {**weights, **self.held}, self.source)
        new = {role: held_form(weights[role]) for role in program.weights if role not in self.held}
        packed = (
            self.runtime.packed_bytes(weight.format, *weight.shape, weight.group)
            for weight in new.values()
            if len(weight.shape) == 2
        )
        self.runtime.allocate_weights(sum(packed))
        for role, weight in new.items():
            order = b"" if weight.order is None else weight.order.tobytes()
            named = (role, weight.format.name, weight.shape, weight.group, order)
            self.hashing(repr(named).encode())
            if weight.order is not None:
                self.order_of[role] = self._order(program, role, weight, weight.order)
            if len(weight.shape) == 2:
                number = self._matrix(weight)
            else:
                if weight.format not in _FLOATS:
                    raise CheckpointError(f"{weight.name}: a vector in format {weight.format.name}")
                floats = dequantize(weight)
                if floats.ndim > 1:  # of a convolution: tap by tap
                    floats = np.ascontiguousarray(floats.reshape(len(floats), -1).T).reshape(-1)
                number = self.runtime.add_vector(floats.tolist())
                self.hashing(floats.data)
            size = held_bytes(weight, self.runtime.isa)
            self.held[role] = _Held(number, weight.format, weight.shape, size)

    def _order(self, program: Program, role: str, weight: Weight, order: Int32) -> int:
        """Return the runtime's number for the order of a matrix's inputs."""
        if any(isinstance(op, Embed) and op.weight == role for op in program.ops):
            raise CheckpointError(
                f"{self.source}: {weight.name} is an embedding, whose inputs cannot be reordered"
            )
        columns = weight.shape[1]
        if not np.array_equal(np.sort(order), np.arange(columns)):
            raise CheckpointError(
                f"{self.source}: the order of {weight.name}'s inputs is not one of {columns}"
            )
        key = np.ascontiguousarray(order, np.int32).tobytes()
        return self._number(key, lambda: self.runtime.add_order(order.tolist()))

    def _number(self, key: Hashable, add: Callable[[], int]) -> int:
        """Return the runtime's number for something that is added to it once."""
        if key not in self.numbers:
            self.numbers[key] = add()
        return self.numbers[key]

    def _matrix(self, weight: Weight) -> int:
        """Pack a matrix, giving back the pages read as it goes: it may be most of a model."""
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
            self.hashing(data.data)
            self.read += data.nbytes
            if self.read >= _READ_BYTES:
                del data
                self.release()
                self.read = 0
        return matrix

    def _built(self, of: Any) -> Any:
        """Return what the runtime takes in place of a `lower.LoweredStep`, or of a part of one."""
        match of:
            case lower.LoweredStep(kind, args):
                built: list[Any] = []
                for arg in args:
                    if isinstance(arg, lower.Place):
                        built += self.layout.place(arg.layer)
                    elif isinstance(arg, lower.StatePlace):
                        built += _state_parts(self.layout, arg.layer)
                    else:
                        built.append(self._built(arg))
                return kind(*built)
            case list():
                return [self._built(part) for part in of]
            case lower.View(buffer, _, stride, first=first):
                return _native.Value(buffer.offset, stride, buffer.local, first)
            case lower.Buffer(offset=offset, local=local):
                return _native.Prepared(offset, local)
            case lower.WeightRef(role, factor):
                vector = self.held[role].number
                if factor == 1.0:
                    return vector
                scaled = vector, factor
                return self._number(scaled, lambda: self.runtime.scale_vector(*scaled))
            case Rope():
                rope = of.dim, of.interleaved, of.frequencies.tolist(), of.magnitude
                return self._number(of, lambda: self.runtime.add_rope(*rope))
            case Experts():
                gating = of.gating == "sigmoid", of.renormalize, of.normalize_eps, of.scale
                key = of.count, of.chosen, *gating
                return self._number(key, lambda: self.runtime.add_routing(*key))
        return of
