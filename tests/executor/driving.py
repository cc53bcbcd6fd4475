"""Drives an executor as a scheduler would: sequences in chunks, over blocks placed at random."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.executor.base import Batch
from octavo.executor.native.executor import NativeExecutor
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.kv_cache.state_batch import whole
from octavo.loader.base import Checkpoint
from octavo.models import families

Float32 = npt.NDArray[np.float32]


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    slot: int
    done: int = 0
    logits: list[Float32] = field(default_factory=list)  # one row a token that has run

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


class Driver:
    MAX_SEQS = 8
    MAX_BLOCKS = 40
    MAX_TOKENS = 640

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        threads: int | None = 1,
        pool: _native.ThreadPool | None = None,
        isa: str | None = None,
        kv_dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int = 400,
        logits_slice: int = MAX_TOKENS,
        keep_hidden: bool = False,
        all_hidden: bool = False,
        seed: int = 0,
    ) -> None:
        self.layout = KvLayout.of(checkpoint.config, block_size, KvDtype.of(kv_dtype))
        self.executor = NativeExecutor(
            checkpoint,
            families.program(checkpoint.config),
            self.layout,
            num_blocks=num_blocks + self.MAX_SEQS * self.layout.state_blocks,
            max_tokens=self.MAX_TOKENS,
            max_logits_rows=self.MAX_TOKENS,
            logits_slice=logits_slice,
            max_seqs=self.MAX_SEQS,
            max_blocks_per_seq=self.MAX_BLOCKS,
            threads=threads,
            pool=pool,
            isa=isa,
            keep_hidden=keep_hidden,
            all_hidden=all_hidden,
        )
        self.first_page = num_blocks  # of the states, behind the blocks of keys and values
        rng = np.random.default_rng(seed)
        self.free = [int(block) for block in rng.permutation(num_blocks)]
        self.slots = list(range(self.MAX_SEQS))
        shape = (len(self.layout.groups), self.MAX_SEQS, self.MAX_BLOCKS)
        self.tables = np.full(shape, -1, np.int32)

    def start(self, tokens: list[int]) -> Sequence:
        return Sequence(tokens, self.slots.pop())

    def finish(self, sequence: Sequence) -> None:
        for table in self.tables[:, sequence.slot]:
            self.free += [int(block) for block in table if block >= 0]
            table[:] = -1
        self.slots.append(sequence.slot)

    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Runs the next ``count`` tokens of each sequence, all of them with logits."""
        batch = self.batch(work)
        logits = self.executor.execute(batch).logits
        row = 0
        for sequence, count in work:
            sequence.logits += [logits[row + i].copy() for i in range(count)]
            sequence.done += count
            row += count

    def batch(self, work: list[tuple[Sequence, int]]) -> Batch:
        tokens: list[int] = []
        positions: list[int] = []
        offsets = [0]
        for sequence, count in work:
            self._allocate(sequence, count)
            tokens += sequence.tokens[sequence.done : sequence.done + count]
            positions += range(sequence.done, sequence.done + count)
            offsets.append(len(tokens))
        starts = np.array([sequence.done for sequence, _ in work], np.int32)
        slots = np.array([sequence.slot for sequence, _ in work], np.int32)
        seq_offsets = np.array(offsets, np.int32)
        return Batch(
            token_ids=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            seq_offsets=seq_offsets,
            seq_slots=slots,
            block_tables=self.tables,
            logits_rows=np.arange(len(tokens), dtype=np.int32),
            copies=np.zeros((0, 2), np.int32),
            state=whole(self.layout, starts, seq_offsets, slots, self.first_page),
        )

    def _allocate(self, sequence: Sequence, count: int) -> None:
        size = self.layout.block_size
        for group, table in zip(self.layout.groups, self.tables[:, sequence.slot], strict=True):
            if group.window is not None:  # blocks wholly before the window go back
                for index in range(max(0, sequence.done - group.window + 1) // size):
                    if table[index] >= 0:
                        self.free.append(int(table[index]))
                        table[index] = -1
            for index in range(sequence.done // size, (sequence.done + count - 1) // size + 1):
                if table[index] < 0:
                    table[index] = self.free.pop(0)

    def run(self, tokens: list[int], chunks: list[int] | None = None) -> Float32:
        """[tokens, vocab] of one sequence alone, whole or in chunks (the last one repeats)."""
        sequence = self.start(tokens)
        sizes = iter(chunks or [len(tokens)])
        size = 1
        while sequence.left:
            size = next(sizes, size)
            self.step([(sequence, min(size, sequence.left))])
        self.finish(sequence)
        return np.array(sequence.logits)
