"""A step as flat arrays, which are written in place from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.executor.base import Batch, Float32
from octavo.kv_cache.cache import KvCache
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.sequence import Sequence

Int32 = npt.NDArray[np.int32]
Distributions = Float32 | Items[Float32]  # rows of the vocabulary, in one array or each its own


class Chunk(NamedTuple):
    """``size`` known tokens of a sequence from position ``start`` on."""

    seq: Sequence
    start: int
    size: int

    @property
    def is_last(self) -> bool:
        """Whether the sequence draws a token after this chunk."""
        return self.start + self.size == len(self.seq.token_ids)

    @property
    def logits_rows(self) -> int:
        """How many of its tokens want logits: the last ones."""
        return self.size if self.seq.owner.scores_prompt else int(self.is_last)


class PromptRows(NamedTuple):
    """``size`` rows of logits from ``row`` on, which predict the prompt from ``position`` on."""

    seq: Sequence
    row: int
    position: int
    size: int


Branches = dict[int, list[tuple[int, list[int]]]]  # rows of the block tables, tokens guessed


class Branch(NamedTuple):
    """A second guess at a decoding sequence's next tokens. The sequence's last token and these go
    through the model in a row of the block tables of their own.
    """

    slot: int  # the row of the block tables
    token_ids: list[int]
    row: int  # of logits behind the first of them; those behind the last token are the draft's


@dataclass(slots=True, eq=False)
class Scheduled:
    """One step: the batch, and whose logits it gives. Valid until the next `schedule`."""

    batch: Batch
    decodes: list[Sequence]  # first in the batch: a token each, and their drafts
    chunks: list[Chunk]  # of prompts, behind them
    samples: list[Sequence]  # those that draw tokens, the decodes first
    sample_rows: list[int]  # the row of logits each draws from first (n > 1: they share a row)
    prompt_rows: list[PromptRows]
    drafts: list[list[int]] | None = None  # of each of the decodes; None: there are none
    # What each draft was drawn from, a row for each of its tokens or more; None: not at random
    probabilities: list[Distributions | None] | None = None
    branches: dict[int, list[Branch]] = field(default_factory=dict)  # by index of the decode
    stale: bool = False  # a sequence in it has ended since

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *(chunk.seq for chunk in self.chunks)]

    def taken(self, index: int, run: Items[int]) -> Branch | None:
        """Return the branch that a decode followed which drew ``run``; None: its draft."""
        known = list(run[:-1])
        if index not in self.branches:
            return None
        assert self.drafts is not None
        if self.drafts[index][: len(known)] == known:
            return None
        for branch in self.branches[index]:
            if branch.token_ids[: len(known)] == known:
                return branch
        raise ValueError(f"nothing in the step led to the run {run}")

    def last_row(self, index: int, run: Items[int]) -> int:
        """Return the row of logits that the last token of a decode's ``run`` was drawn from."""
        branch = self.taken(index, run)
        if branch is None:
            return self.sample_rows[index] + len(run) - 1
        return branch.row + len(run) - 2


class BatchBuilder:
    """Owns the arrays. Decodes come first, so that a batch is three gathers as long as the same
    sequences decode without drafts; chunks are appended behind them.
    """

    def __init__(self, config: SchedulerConfig, kv: KvCache) -> None:
        self._kv = kv
        self.last_token: Int32 = np.zeros(config.max_num_seqs, dtype=np.int32)  # by slot
        self._token_ids: Int32 = np.empty(config.max_num_batched_tokens, dtype=np.int32)
        self._positions: Int32 = np.empty(config.max_num_batched_tokens, dtype=np.int32)
        most_spans = config.max_num_seqs + config.max_branches
        self._seq_slots: Int32 = np.empty(most_spans, dtype=np.int32)
        # 0, 1, 2, …: offsets, rows and positions are slices of it.
        longest = max(config.max_num_batched_tokens, config.max_model_len, most_spans)
        self._counting: Int32 = np.arange(longest + 1, dtype=np.int32)
        self._row_list = list(range(config.max_num_seqs))

    def build(
        self,
        decodes: list[Sequence],
        slots: Int32,
        chunks: list[Chunk],
        drafts: list[list[int]] | None,
        branches: Branches,
    ) -> Scheduled:
        """Return the step of ``decodes``, which have the ``slots``, with their ``drafts`` and, by
        index, their ``branches``.
        """
        count = len(slots)
        if drafts is None:
            np.take(self.last_token, slots, out=self._token_ids[:count])
            np.take(self._kv.num_tokens, slots, out=self._positions[:count])
            total, offsets, sample_rows = count, self._counting, self._row_list[:count]
        else:
            total, offsets, sample_rows = self._write_spans(decodes, slots, drafts)
        samples = decodes[:]
        if not chunks and not branches:
            batch = self._batch(total, offsets[: count + 1], slots, self._counting[:total], count)
            return Scheduled(batch, decodes[:], [], samples, sample_rows, [], drafts)
        # (slot, tokens, first position, rows of logits) of what follows the decodes. Branches come
        # last, so that they have the last rows of logits, whichever part is held.
        spans: list[tuple[int, Items[int], int, int]] = []
        prompt_rows: list[PromptRows] = []
        num_rows = total
        for chunk in chunks:
            seq, start, size = chunk
            wanted = chunk.logits_rows
            spans.append((seq.slot, seq.token_ids[start : start + size], start, wanted))
            if seq.owner.scores_prompt:
                first = max(start, seq.num_scored)
                scored = min(start + size, seq.owner.prompt_tokens - 1) - first
                if scored > 0:
                    row = num_rows + first - start
                    prompt_rows.append(PromptRows(seq, row, first + 1, scored))
            num_rows += wanted
            if chunk.is_last:
                drawing = [seq, *seq.followers]
                samples += drawing
                sample_rows += [num_rows - 1] * len(drawing)
        placed: dict[int, list[Branch]] = {}
        for index, guesses in branches.items():
            seq = decodes[index]
            start = int(self._kv.num_tokens[seq.slot])
            placed[index] = []
            for slot, token_ids in guesses:
                spans.append((slot, [seq.token_ids[-1], *token_ids], start, len(token_ids)))
                placed[index].append(Branch(slot, token_ids, num_rows))
                num_rows += len(token_ids)
        seq_slots = self._seq_slots[: count + len(spans)]
        seq_slots[:count] = slots
        offsets = np.concatenate((offsets[: count + 1], self._counting[: len(spans)]))
        rows = [self._counting[:total]]
        for index, (slot, tokens, start, wanted) in enumerate(spans, count):
            end = total + len(tokens)
            self._token_ids[total:end] = tokens
            self._positions[total:end] = self._counting[start : start + len(tokens)]
            seq_slots[index], offsets[index + 1] = slot, end
            rows.append(self._counting[end - wanted : end])
            total = end
        batch = self._batch(total, offsets, seq_slots, np.concatenate(rows), count, chunks)
        return Scheduled(
            batch, decodes[:], chunks, samples, sample_rows, prompt_rows, drafts, branches=placed
        )

    def _write_spans(
        self, decodes: list[Sequence], slots: Int32, drafts: list[list[int]]
    ) -> tuple[int, Int32, list[int]]:
        """Write each sequence's last token and its draft. Return the number of tokens, the spans'
        offsets and their first rows.
        """
        token_ids: list[int] = []
        firsts: list[int] = []
        for seq, draft in zip(decodes, drafts, strict=True):
            firsts.append(len(token_ids))
            token_ids.append(seq.token_ids[-1])
            token_ids += draft
        total = len(token_ids)
        offsets = np.array([*firsts, total], dtype=np.int32)
        starts = self._kv.num_tokens[slots] - offsets[:-1]
        self._token_ids[:total] = token_ids
        np.add(
            np.repeat(starts, np.diff(offsets)),
            self._counting[:total],
            out=self._positions[:total],
        )
        return total, offsets, firsts

    def _batch(
        self,
        total: int,
        offsets: Int32,
        seq_slots: Int32,
        rows: Int32,
        num_decodes: int,
        chunks: Items[Chunk] = (),
    ) -> Batch:
        state = None
        if self._kv.state is not None:
            totals = [len(chunk.seq.token_ids) for chunk in chunks]
            state = self._kv.state.plan(seq_slots, offsets, num_decodes, totals)
        return Batch(
            self._token_ids[:total],
            self._positions[:total],
            offsets,
            seq_slots,
            self._kv.tables,
            rows,
            self._kv.take_copies(),
            state,
        )
