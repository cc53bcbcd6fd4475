"""What a step reads and writes of the states of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.layout import KvLayout

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class StateBatch:
    """For each span of a step (the tokens of one sequence), which state it begins with and where
    its states go.

    A span first applies its pending tokens, whose inputs an earlier step has logged, then its own;
    "applied" counts both. A state may be written to the pages that it was read from. No other span
    reads or writes pages that a span writes.
    """

    tables: Int32  # [R, P], blocks of the pool with one state each
    reads: Int32  # [S], rows of ``tables``; -1: the state before the first token, all zeros
    stores: Int32  # [N, 3] (span, applied tokens behind which to store, row of ``tables``), sorted
    pending_offsets: Int32  # [S + 1], each span's part of ``pending``
    pending: Int32  # [M], rows of the log, the oldest token first
    log: Int32  # [T], the row of the log that a token's inputs go to; -1: none


def whole(
    layout: KvLayout, starts: Int32, seq_offsets: Int32, slots: Int32, first_page: int
) -> StateBatch | None:
    """Return the states of a step in which every span stores the one behind its last token where it
    has read it: sequence in slot s has the blocks from ``first_page`` + s * P on. For batches that
    no scheduler makes; None for a model without recurrent layers.

    ``starts`` [S]: positions of the spans' first tokens; ``seq_offsets`` [S + 1]: of the batch.
    """
    if layout.state is None:
        return None
    pages = layout.state.pages
    num_spans = len(slots)
    spans = np.arange(num_spans, dtype=np.int32)
    tables = first_page + slots[:, np.newaxis] * pages + np.arange(pages, dtype=np.int32)
    return StateBatch(
        tables=tables.astype(np.int32),
        reads=np.where(starts > 0, spans, -1).astype(np.int32),
        stores=np.stack([spans, np.diff(seq_offsets).astype(np.int32), spans], axis=1),
        pending_offsets=np.zeros(num_spans + 1, dtype=np.int32),
        pending=np.empty(0, dtype=np.int32),
        log=np.full(seq_offsets[-1], -1, dtype=np.int32),
    )
