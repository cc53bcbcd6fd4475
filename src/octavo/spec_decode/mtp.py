"""Drafts by the target's own layer for multi-token prediction (MTP).

Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction", 2024, in the
form of DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024: a token and the hidden row that it was
drawn from go through one layer; its own hidden row and the token guessed go through it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from octavo.executor.base import Batch, Float32, StepResult, check_weights
from octavo.kv_cache.cache import NO_COPIES
from octavo.loader.base import Checkpoint, Weight
from octavo.loader.rounding import rounded
from octavo.models.families import mtp_program
from octavo.models.program import Program
from octavo.scheduler.batching import Scheduled
from octavo.scheduler.sequence import Sequence as Seq
from octavo.scheduler.sequence import Status
from octavo.spec_decode.cache_drafter import CacheDrafter
from octavo.spec_decode.drafter import Target


class MtpLayer(NamedTuple):
    """A layer that was read and is not in memory yet."""

    program: Program
    weights: dict[str, Weight]  # that the model itself does not have


def read(checkpoint: Checkpoint, quantization: str | None, threads: int) -> MtpLayer:
    """Return the layer of a model, rounded as the model is. Raises `CheckpointError`, and
    `ValueError` for a model that has no such layer.
    """
    try:
        program = mtp_program(checkpoint.config)
    except ValueError as error:
        raise ValueError(f"speculative_config: method 'mtp': {error}") from None
    weights = checkpoint.mtp_weights()
    if quantization is not None:
        weights = rounded(replace(checkpoint, weights=weights), quantization, threads).weights
    check_weights(program, {**checkpoint.weights, **weights}, str(checkpoint.path))
    return MtpLayer(program, weights)


def work_bytes(layer: MtpLayer, target: Program, max_tokens: int, max_seqs: int) -> int:
    """Return the bytes that drafting holds in the largest step beside the target's own: wider
    activations, hidden rows of all tokens, twice, and one of each sequence.
    """
    beyond = max(0, sum(layer.program.widths.values()) - sum(target.widths.values()))
    rows = 2 * max_tokens + max_seqs
    return 4 * (beyond * max_tokens + rows * target.config.hidden_size)


class MtpDrafter(CacheDrafter):
    """Drafts for a target whose executor keeps the hidden rows of all tokens, and whose cache has
    room for the layer's keys and values.

    What a token leaves in the cache is made of it and of the hidden row of the token before, so it
    depends on the same text as what the target's own layers leave, and is shared, copied and given
    up with it. Behind a restored prefix there is no such row. The first token is then read with
    zeros, as the first of a text is: drafts may be worse for it.
    """

    def __init__(self, target: Target, layer: MtpLayer) -> None:
        # With the rotary positions of the target's longest sequence.
        super().__init__(target, mtp_program(target.program.config), layer.weights)
        # The position and the hidden row of the last token that the target has computed.
        self._last: dict[Seq, tuple[int, Float32]] = {}
        self._zeros: Float32 = np.zeros(layer.program.config.hidden_size, np.float32)

    def row_of(self, seq: Seq) -> Float32 | None:
        return self._row_before(seq, int(self._kv.num_tokens[seq.slot]))

    def _row_before(self, seq: Seq, position: int) -> Float32 | None:
        known, row = self._last.get(seq, (-1, None))
        return row if known == position - 1 else None

    def observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        """Have the layer read what the target has computed and will keep."""
        hidden, batch = result.hidden, scheduled.batch
        assert hidden is not None  # as the executor was asked
        offsets = batch.seq_offsets.tolist()
        spans: list[tuple[Seq, int, int]] = []
        for index, seq in enumerate(scheduled.sequences):
            begin, end = offsets[index : index + 2]
            if index < len(scheduled.decodes):
                end = begin + len(runs[index])
            if begin < end and seq.status is not Status.FINISHED:  # whose blocks are given up
                spans.append((seq, begin, end))
        if not spans:
            return
        sizes = [end - begin for _, begin, end in spans]
        picks = np.concatenate([np.arange(begin, end) for _, begin, end in spans])
        rows = hidden[picks - 1]
        starts = np.cumsum([0, *sizes], dtype=np.int32)
        for (seq, begin, _), start in zip(spans, starts.tolist(), strict=False):
            before = self._row_before(seq, int(batch.positions[begin]))
            rows[start] = self._zeros if before is None else before
        for seq, _, end in spans:
            self._last[seq] = int(batch.positions[end - 1]), hidden[end - 1].copy()
        for index, seq in enumerate(scheduled.samples):
            if seq.status is not Status.FINISHED and runs[index]:
                row = batch.logits_rows[scheduled.last_row(index, runs[index])]
                self._last[seq] = int(batch.positions[row]), hidden[row].copy()
        slots = np.array([seq.slot for seq, _, _ in spans], np.int32)
        tokens, positions = batch.token_ids[picks], batch.positions[picks]
        none = np.empty(0, np.int32)
        step = Batch(tokens, positions, starts, slots, batch.block_tables, none, NO_COPIES)
        self._executor.execute(step, self._program, rows)

    def end(self, seq: Seq) -> None:
        self._last.pop(seq, None)

    def close(self) -> None:
        self._last.clear()
