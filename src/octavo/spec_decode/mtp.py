"""Drafts by multi-token prediction (MTP): by a layer of the target's own, or by an assistant.

Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction", 2024, in the
form of DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024: a token and the hidden row that it was
drawn from go through one layer; its own hidden row and the token guessed go through it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octavo.executor.base import Batch, Float32, StepResult, check_weights
from octavo.kv_cache.cache import NO_COPIES
from octavo.loader.base import Checkpoint, CheckpointError, Weight
from octavo.loader.hf_assistant import load_assistant
from octavo.loader.rounding import rounded
from octavo.models.families import mtp_program
from octavo.models.program import Program
from octavo.scheduler.batching import Scheduled
from octavo.scheduler.sequence import Sequence as Seq
from octavo.scheduler.sequence import Status
from octavo.spec_decode.cache_drafter import CacheDrafter
from octavo.spec_decode.drafter import Target


class MtpModule(NamedTuple):
    """What drafts, that was read and is not in memory yet."""

    program: Program
    weights: dict[str, Weight]  # that the target does not have
    own: bool  # it is a layer of the target's own


def read(
    checkpoint: Checkpoint, model: str | None, quantization: str | None, threads: int
) -> MtpModule:
    """Return the layer of a model, or the assistant in the folder ``model``, rounded as the model
    is. Raises `CheckpointError`, and `ValueError` for a model that has no such layer or another
    assistant.
    """
    try:
        if model is None:
            program, weights = mtp_program(checkpoint.config), checkpoint.mtp_weights()
        else:
            program, weights = load_assistant(Path(model), checkpoint.config)
    except CheckpointError:
        raise
    except ValueError as error:
        raise ValueError(f"speculative_config: method 'mtp': {error}") from None
    if quantization is not None:
        weights = rounded(replace(checkpoint, weights=weights), quantization, threads).weights
    source = str(checkpoint.path) if model is None else model
    check_weights(program, {**checkpoint.weights, **weights}, source)
    return MtpModule(program, weights, model is None)


def work_bytes(
    module: MtpModule, target: Program, max_tokens: int, max_seqs: int, max_logits_rows: int
) -> int:
    """Return the bytes that drafting holds in the largest step beside the target's own: wider
    activations, hidden rows of all tokens or of those that want logits, twice, and one of each
    sequence.
    """
    beyond = max(0, sum(module.program.widths.values()) - sum(target.widths.values()))
    rows = 2 * (max_tokens if module.own else max_logits_rows) + max_seqs
    return 4 * (beyond * max_tokens + rows * target.config.hidden_size)


class HiddenDrafter(CacheDrafter):
    """Base class of drafters that begin with the hidden row that a token was drawn from."""

    def __init__(self, target: Target, program: Program, weights: Mapping[str, Weight]) -> None:
        super().__init__(target, program, weights)
        # The position and the hidden row of the last token that the target has computed.
        self._last: dict[Seq, tuple[int, Float32]] = {}

    def row_of(self, seq: Seq) -> Float32 | None:
        return self.row_before(seq, int(self._kv.num_tokens[seq.slot]))

    def row_before(self, seq: Seq, position: int) -> Float32 | None:
        """Return the hidden row of the token before that position, if it is the last one."""
        known, row = self._last.get(seq, (-1, None))
        return row if known == position - 1 else None

    def remember(self, scheduled: Scheduled, rows: Float32, runs: Sequence[list[int]]) -> None:
        """Keep what last tokens were drawn from, of the ``rows`` that wanted logits."""
        batch = scheduled.batch
        for index, seq in enumerate(scheduled.samples):
            if seq.status is not Status.FINISHED and runs[index]:
                row = scheduled.last_row(index, runs[index])
                position = batch.positions[batch.logits_rows[row]]
                self._last[seq] = int(position), rows[row].copy()

    def end(self, seq: Seq) -> None:
        self._last.pop(seq, None)

    def close(self) -> None:
        self._last.clear()


class MtpDrafter(HiddenDrafter):
    """Drafts for a target whose executor keeps the hidden rows of all tokens, and whose cache has
    room for the layer's keys and values.

    What a token leaves in the cache is made of it and of the hidden row of the token before, so it
    depends on the same text as what the target's own layers leave, and is shared, copied and given
    up with it. Behind a restored prefix there is no such row. The first token is then read with
    zeros, as the first of a text is: drafts may be worse for it.
    """

    def __init__(self, target: Target, layer: MtpModule) -> None:
        config = target.program.config  # which has the rotary positions of the longest sequence
        super().__init__(target, mtp_program(config), layer.weights)
        self._zeros: Float32 = np.zeros(config.hidden_size, np.float32)

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
        picks = np.concatenate([np.arange(begin, end) for _, begin, end in spans])
        rows = hidden[picks - 1]
        starts = np.cumsum([0, *(end - begin for _, begin, end in spans)], dtype=np.int32)
        for (seq, begin, end), start in zip(spans, starts.tolist(), strict=False):
            before = self.row_before(seq, int(batch.positions[begin]))
            rows[start] = self._zeros if before is None else before
            self._last[seq] = int(batch.positions[end - 1]), hidden[end - 1].copy()
        self.remember(scheduled, hidden[batch.logits_rows], runs)
        slots = np.array([seq.slot for seq, _, _ in spans], np.int32)
        tokens, positions = batch.token_ids[picks], batch.positions[picks]
        none = np.empty(0, np.int32)
        step = Batch(tokens, positions, starts, slots, batch.block_tables, none, NO_COPIES)
        self._executor.execute(step, self._program, rows)


class AssistantDrafter(HiddenDrafter):
    """Drafts by an assistant (loader/hf_assistant.py), for a target whose executor keeps hidden
    rows. It reads the target's keys and values and writes none.

    Where the target's windows have just given a block back that the last token still saw, there is
    no draft: once in a block, in texts longer than a window.
    """

    def __init__(self, target: Target, assistant: MtpModule) -> None:
        super().__init__(target, assistant.program, assistant.weights)

    def row_of(self, seq: Seq) -> Float32 | None:
        kv, last = self._kv, int(self._kv.num_tokens[seq.slot]) - 1
        for table, group in zip(kv.tables, kv.layout.groups, strict=True):
            if group.window is not None:
                first = max(0, last - group.window + 1)
                if table[seq.slot, first // kv.block_size] < 0:
                    return None
        return super().row_of(seq)

    def observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        assert result.hidden is not None  # as the executor was asked
        self.remember(scheduled, result.hidden, runs)
