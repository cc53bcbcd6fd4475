"""An executor in numpy, in fp32: slow, and plain enough to be read as the definition of a step.

It serves what the native executor serves, from the same paged cache. Its logits differ from the
native ones by rounding only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import Unpack

import numpy as np
import numpy.typing as npt

from octavo.executor.base import (
    Batch,
    Bytes,
    Capabilities,
    Executor,
    ExecutorSizes,
    Float32,
    Int32,
    LoadOptions,
    StepResult,
    check_added,
    check_weights,
    slice_rows,
)
from octavo.executor.cost import CostModel
from octavo.executor.reference import evaluate
from octavo.kv_cache.exchange_form import state_arrays, state_pages
from octavo.kv_cache.layout import KvDtype, KvGroup, KvLayout
from octavo.loader.base import Checkpoint, Weight
from octavo.loader.dequantize import dequantize
from octavo.models.program import Input, PagedAttention, Program, Values, attend
from octavo.models.recurrence import Recurrence, RecurrentState
from octavo.sampling.native import NativeSampler


class ReferenceExecutor(Executor):
    """Implements `Executor`; arguments as those of `NativeExecutor`."""

    capabilities = Capabilities(
        "reference",
        (KvDtype.BF16, KvDtype.FP16),
        numerics=1,
        tier=f"numpy {np.__version__}",
        hidden_rows=True,
        added_programs=True,
    )

    def __init__(
        self,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
        *,
        keep_hidden: bool = False,
        all_hidden: bool = False,
        digest: bool = False,
        state_log_rows: int = 0,
        **sizes: Unpack[ExecutorSizes],
    ) -> None:
        self.layout = layout
        self.num_blocks = sizes["num_blocks"]
        self.max_tokens = sizes["max_tokens"]
        self.max_logits_rows = sizes["max_logits_rows"]
        self.threads = 1
        self._num_heads = program.config.num_heads
        self._slice = slice_rows(self.max_logits_rows, program.config.vocab_size)
        self._arena = np.zeros((self.num_blocks, layout.block_bytes), np.uint8)
        self._log = StateLog(state_log_rows)
        self._weights: dict[str, Float32] = {}
        self._programs: list[tuple[Program, bool, CostModel]] = []
        given = checkpoint.weights
        weights = {role: given[role] for role in program.weights if role in given}
        self._load(program, weights, str(checkpoint.path), keep_hidden or all_hidden)
        self._all_hidden = all_hidden
        self.costs = self.costs_of(0)
        self.digest = self._digest() if digest else b""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
        **options: Unpack[LoadOptions],
    ) -> ReferenceExecutor:
        for other in ("threads", "isa", "rates"):
            options.pop(other, None)  # type: ignore[misc]
        return cls(checkpoint, program, layout, **options)  # type: ignore[misc]

    @classmethod
    def held_bytes(
        cls, weights: Iterable[Weight], program: Program, source: str, isa: str | None
    ) -> int:
        return sum(4 * prod(weight.shape) for weight in weights)

    def _load(
        self, program: Program, weights: Mapping[str, Weight], source: str, keep_hidden: bool
    ) -> None:
        check_weights(program, {**self._weights, **weights}, source)
        self._weights |= {role: dequantize(weight) for role, weight in weights.items()}
        sizes = {role: self._weights[role].nbytes for role in program.weights}
        costs = CostModel(program, self.layout, weight_bytes=sizes)
        self._programs.append((program, keep_hidden, costs))

    def _digest(self) -> bytes:
        digest = sha256(repr(self.capabilities).encode())
        for role, values in self._weights.items():
            digest.update(f"{role} {values.shape} ".encode())
            digest.update(values.tobytes())
        return digest.digest()

    def costs_of(self, program: int) -> CostModel:
        return self._programs[program][2]

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        return sum(values.nbytes for values in self._weights.values())

    def add_program(
        self,
        program: Program,
        weights: Mapping[str, Weight] | None = None,
        *,
        keep_hidden: bool = False,
        ids: Sequence[int] = (),
    ) -> int:
        weights = weights or {}
        check_added(program, weights, self._weights, self.layout, self._num_heads)
        self._load(program, weights, "an added program", keep_hidden)
        return len(self._programs) - 1

    def drop_program(self) -> None:
        if len(self._programs) == 1:
            raise ValueError("no program was added")
        self._programs.pop()

    def companion(
        self,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
        **sizes: Unpack[ExecutorSizes],
    ) -> ReferenceExecutor:
        return ReferenceExecutor(checkpoint, program, layout, **sizes)

    def new_sampler(self, vocab_size: int) -> NativeSampler:
        return NativeSampler(vocab_size)

    def execute(self, batch: Batch, program: int = 0, rows: Float32 | None = None) -> StepResult:
        start = time.perf_counter()
        compute, keep_hidden, _ = self._programs[program]
        *ops, head = compute.ops
        for source, destination in batch.copies.tolist():  # in order: copies may be chained
            self._arena[destination] = self._arena[source]
        values: Values = {}
        if rows is not None:
            values = {op.out: rows[None] for op in ops if isinstance(op, Input)}
        kv = PagedSequences(self._arena, self.layout, batch, self._log)
        config, tokens = compute.config, batch.token_ids[None]
        evaluate.run(ops, config, self._weights, values, tokens, kv)
        kv.store_states()
        x, hidden = (values[value][0] for value in (head.reads[0], head.reads[-1]))
        wanted: Float32 = x[batch.logits_rows]

        def logits_from(row: int) -> Float32:
            some = {head.reads[0]: wanted[row : row + self._slice]}
            evaluate.run([head], config, self._weights, some)
            return some["logits"]

        logits = logits_from(0)
        kept = hidden if self._all_hidden and program == 0 else hidden[batch.logits_rows]
        took = time.perf_counter() - start
        return StepResult(logits, took, logits_from, kept if keep_hidden else None)

    def export_blocks(self, blocks: Int32, into: Bytes | None = None) -> Bytes:
        data = self._arena[blocks]
        if into is None:
            return data
        into[:] = data
        return into

    def import_blocks(self, blocks: Int32, data: Bytes) -> None:
        self._arena[blocks] = data

    def close(self) -> None:
        self._weights.clear()


class StateLog:
    """The inputs of recurrent layers that a later step may apply again."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._layers: dict[int, Float32] = {}

    def of(self, layer: int, width: int) -> Float32:
        """Return a layer's inputs [rows, width]."""
        return self._layers.setdefault(layer, np.zeros((self._rows, width), np.float32))


class PagedSequences:
    """Implements `KeyValues` for a step's sequences, by their block tables."""

    def __init__(self, arena: Bytes, layout: KvLayout, batch: Batch, log: StateLog) -> None:
        self._layout = layout
        self._batch = batch
        self._arena = arena
        self._log = log
        # The states that are read and those to be stored, by their row of the tables.
        self._old: dict[int, list[Float32]] = {}
        self._new: dict[int, list[Float32]] = {}
        self._groups = [_of_group(arena, layout, group) for group in layout.groups]

    def positions(self, tokens: int) -> Int32:
        return self._batch.positions

    def store(self, layer: int, keys: Float32, values: Float32) -> None:
        for slot, begin, end in self._spans():
            arena, blocks, offsets = self._places(layer, slot, self._batch.positions[begin:end])
            for which, rows in enumerate((keys, values)):
                heads = rows[0, begin:end].reshape(end - begin, *arena.shape[-2:])
                arena[blocks, which, offsets] = _packed(heads, self._layout.dtype)
            group, at = self._layout.place(layer)
            of = self._layout.groups[group]
            if at + 1 == len(of.layers):  # what is left over may hold what another had there
                self._arena[blocks[offsets == 0], self._layout.group_bytes(of) :] = 0

    def attend(self, queries: Float32, op: PagedAttention, sinks: Float32 | None = None) -> Float32:
        out = np.empty_like(queries)
        for slot, begin, end in self._spans():
            start = int(self._batch.positions[begin])
            first = 0 if op.window is None else max(0, start - op.window + 1)
            positions = np.arange(first, start + end - begin)
            arena, blocks, offsets = self._places(op.layer, slot, positions)
            keys, values = (
                _unpacked(arena[blocks, which, offsets], self._layout.dtype).reshape(
                    1, len(positions), -1
                )
                for which in (0, 1)
            )
            own = queries[:, begin:end]
            out[:, begin:end] = attend(own, keys, values, op, start, first, sinks)
        return out

    def recur(self, op: Recurrence, weights: Mapping[str, Float32], rows: Float32) -> Float32:
        state, (inputs,) = self._batch.state, rows
        if state is None:
            raise ValueError("the program has recurrent layers, and the batch no states")
        log = self._log.of(op.layer, rows.shape[-1])
        found = []
        for span, (_, begin, end) in enumerate(self._spans()):
            pending = state.pending[state.pending_offsets[span] : state.pending_offsets[span + 1]]
            own = np.concatenate([log[pending], inputs[begin:end]])
            source = int(state.reads[span])
            current, at, results = self._read(op, source), 0, []
            for _, applied, place in state.stores[state.stores[:, 0] == span].tolist():
                out, current = op.advance(weights, own[at:applied], current)
                self._write(op, place, source, current)
                results.append(out)
                at = applied
            results.append(op.advance(weights, own[at:], current)[0])
            found.append(np.concatenate(results)[len(pending) :])
        logged = state.log >= 0
        log[state.log[logged]] = inputs[logged]
        return np.concatenate(found)[np.newaxis]

    def store_states(self) -> None:
        """Write the states to their pages, now that every layer has read the old ones."""
        state, layout = self._batch.state, self._layout.state
        if state is None or layout is None:
            return
        for place, arrays in self._new.items():
            pages = state_pages(layout, arrays, self._arena.shape[1])
            self._arena[state.tables[place]] = pages

    def _read(self, op: Recurrence, place: int) -> RecurrentState:
        """Return a layer's part of a state that the step begins with."""
        if place < 0:
            return op.initial
        inputs, *matrix = (self._arrays(place)[index] for index in self._parts_of(op.layer))
        return RecurrentState(inputs[0], matrix[0] if matrix else None)

    def _write(self, op: Recurrence, place: int, source: int, state: RecurrentState) -> None:
        """Put a layer's part into the state that is stored in ``place``, which begins as that in
        ``source``.
        """
        arrays = self._new.setdefault(place, [array.copy() for array in self._arrays(source)])
        values = state.inputs[np.newaxis], state.matrix
        for index, value in zip(self._parts_of(op.layer), values, strict=False):
            assert value is not None  # of a layer with matrices
            arrays[index] = value

    def _arrays(self, place: int) -> list[Float32]:
        """Return all parts of a state that the step begins with; of -1, zeros."""
        state, layout = self._batch.state, self._layout.state
        assert state is not None
        if layout is None:
            raise ValueError("the cache has no states")
        if place < 0:
            return [
                np.zeros((part.heads, part.depth, part.width), np.float32) for part in layout.parts
            ]
        if place not in self._old:
            self._old[place] = state_arrays(layout, self._arena[state.tables[place]])
        return self._old[place]

    def _parts_of(self, layer: int) -> list[int]:
        """Return the numbers of a layer's parts: of the inputs, then of the matrices."""
        parts = () if self._layout.state is None else self._layout.state.parts
        return [index for index, part in enumerate(parts) if part.layer == layer]

    def _spans(self) -> Iterable[tuple[int, int, int]]:
        """Yield each sequence's slot and the range of its tokens in the batch."""
        offsets = self._batch.seq_offsets.tolist()
        return zip(self._batch.seq_slots.tolist(), offsets[:-1], offsets[1:], strict=True)

    def _places(
        self, layer: int, slot: int, positions: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.uint16], Int32, npt.NDArray[np.integer]]:
        """Return where positions of a layer are: its arena [blocks, 2 (keys, values), tokens, KV
        heads, head_dim], then the blocks and the tokens in them.
        """
        group, at = self._layout.place(layer)
        size = self._layout.block_size
        blocks = self._batch.block_tables[group, slot, positions // size]
        return self._groups[group][:, at], blocks, positions % size


def _of_group(arena: Bytes, layout: KvLayout, group: KvGroup) -> npt.NDArray[np.uint16]:
    """Return the arena [blocks, block_bytes] as blocks of a group have it: [blocks, layers, 2
    (keys, values), tokens, KV heads, head_dim], in the same memory.
    """
    numbers = arena[:, : layout.group_bytes(group)].view(np.uint16)
    shape = len(group.layers), 2, layout.block_size, group.kv_heads, group.head_dim
    return numbers.reshape(len(arena), *shape)


def _packed(values: Float32, dtype: KvDtype) -> npt.NDArray[np.uint16]:
    """Round to the cache's numbers, half to even."""
    if dtype is KvDtype.FP16:
        return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def _unpacked(packed: npt.NDArray[np.uint16], dtype: KvDtype) -> Float32:
    if dtype is KvDtype.FP16:
        return packed.view(np.float16).astype(np.float32)
    return (packed.astype(np.uint32) << 16).view(np.float32)
