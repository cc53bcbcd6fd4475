"""What the scheduler hands to an executor for one step, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.layout import KvLayout

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(slots=True)
class Batch:
    """One step as flat arrays: T tokens of S sequences, decode rows and prefill chunks alike.

    The tokens of a sequence are contiguous and at consecutive positions; those of a decoding one
    are its last and the drafts after it. A position may come again with another token, when a draft
    was rejected: what the cache held there is written over. ``block_tables`` is the
    scheduler's own persistent array, updated in place; entry [g, slot, p // block_size] is the
    block of position p in group g, -1 where a window has given it back or nothing is allocated.
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    seq_offsets: Int32  # [S + 1]; sequence s owns tokens seq_offsets[s] … seq_offsets[s + 1] - 1
    seq_slots: Int32  # [S], the row of each sequence in block_tables
    block_tables: Int32  # [groups, max sequences, max blocks a sequence]
    logits_rows: Int32  # [L], ascending indices into the T tokens
    copies: Int32  # [C, 2] (source block, destination block), done before anything else

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def kept(self) -> Batch:
        """Its sizes and positions, for later: the next step writes over the arrays."""
        return replace(
            self,
            positions=self.positions.copy(),
            seq_offsets=self.seq_offsets.copy(),
            logits_rows=self.logits_rows.copy(),
        )


def slice_rows(max_logits_rows: int, vocab_size: int) -> int:
    """Rows of logits that are held at a time: 32 MiB of them, no fewer than 32, in eights.

    The head's weights are read once a slice, which for so many rows is hidden by the arithmetic.
    """
    return min(max_logits_rows, max(32, (32 << 20) // (4 * vocab_size) // 8 * 8))


class StepResult(NamedTuple):
    """``logits`` is [rows, vocab] and belongs to the executor: valid until it computes again.

    None from the cost executor, which computes no numbers. A large vocabulary times many sequences
    is more memory than an executor may want to hold: then these are the first of the L rows only,
    and ``logits_from(row)`` computes as many from that row on, in the same memory; ``row`` is a
    multiple of their number. ``hidden`` [L, width] are the rows that all the logits are made of,
    behind the last norm, from an executor that was asked to keep them; valid as long.
    """

    logits: Float32 | None
    duration: float  # seconds: measured (native) or predicted (cost)
    logits_from: Callable[[int], Float32] | None = None
    hidden: Float32 | None = None


class Executor(Protocol):
    """Computes steps over an arena of KV blocks that it owns."""

    layout: KvLayout
    num_blocks: int
    max_tokens: int  # most tokens a batch may have
    max_logits_rows: int  # most rows a batch may want logits of

    def execute(self, batch: Batch) -> StepResult: ...

    def export_blocks(
        self, blocks: Int32, into: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """[len(blocks), block_bytes]: a copy of the blocks' bytes, in ``into`` (contiguous) or else
        in memory of its own.
        """
        ...

    def import_blocks(self, blocks: Int32, data: npt.NDArray[np.uint8]) -> None: ...

    def close(self) -> None: ...
