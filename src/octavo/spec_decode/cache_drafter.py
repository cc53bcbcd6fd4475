"""Drafts by passes over the target's own cache, token by token, for all sequences at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from octavo.executor.base import Float32
from octavo.kv_cache.cache import NO_COPIES
from octavo.loader.base import Weight
from octavo.models.program import Input, Program, RopeAndStoreKv
from octavo.models.recurrence import Recurrence
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.drafter import NO_DRAFT, Draft, ModelDrafter, Target
from octavo.spec_decode.partial_draft import PartialDraft, extend, next_batch


class CacheDrafter(ModelDrafter):
    """Base class of drafters that run a pass of an added program for every token.

    A pass reads what was written for its layers, and writes behind it, where the target will write
    when it verifies the draft. The places are reserved only while drafting, and so are pages for
    states of recurrent layers. A program that writes nothing stays at the last token that the cache
    has. One that takes rows goes on from those that it puts by.
    """

    def __init__(
        self, target: Target, program: Program, weights: Mapping[str, Weight] | None = None
    ) -> None:
        """``weights``: those of the program that the target does not have."""
        self._executor = target.executor
        self._takes_rows = any(isinstance(op, Input) for op in program.ops)
        self._program = target.executor.add_program(program, weights, keep_hidden=self._takes_rows)
        self._kv = target.scheduler.kv
        self._writes = any(isinstance(op, RopeAndStoreKv) for op in program.ops)
        recurrent = any(isinstance(op, Recurrence) for op in program.ops)
        self._state = self._kv.state if recurrent else None
        self._sampler = target.sampler
        self._rejection = target.rejection

    def row_of(self, seq: Seq) -> Float32 | None:
        """Return the row that goes into a sequence's first pass, if it is known."""
        return None

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        """As `ModelDrafter` says."""
        kv, state = self._kv, self._state
        drafts: dict[Seq, PartialDraft] = {}
        held: dict[int, int] = {}  # blocks, by slot
        copies = NO_COPIES
        try:
            for seq, count in zip(decoding, counts, strict=True):
                # The token behind the draft needs a place, too, when it is verified.
                most = min(count, kv.capacity(seq.slot) - 1)
                if most < 1 or len(drafts) == self._executor.max_logits_rows:
                    continue
                row = self.row_of(seq)
                if self._takes_rows and row is None:
                    continue
                if self._writes:
                    held[seq.slot] = int(kv.num_blocks[seq.slot])
                    kv.reserve(seq.slot, most)
                if state is not None and not state.lend(seq.slot):
                    continue
                drafts[seq] = PartialDraft(seq, most, probabilities=self._rejection, row=row)
            going, passes = [*drafts.values()], 0
            if going:
                # Blocks that this step still has to copy or load may be read and written.
                if kv.connectors is not None:
                    kv.connectors.transfer()
                copies = kv.take_copies()
            while going:
                slots = np.array([draft.seq.slot for draft in going], np.int32)
                written = passes if self._writes else -1
                batch = next_batch(going, slots, written, kv, copies, state)
                rows = [draft.row for draft in going if draft.row is not None]
                given = np.stack(rows) if rows else None
                result = self._executor.execute(batch, self._program, given)
                copies = NO_COPIES
                if result.hidden is not None:
                    for draft, row in zip(going, result.hidden.copy(), strict=True):
                        draft.row = row
                going = extend(self._sampler, result, going)
                passes += 1
        finally:
            # Where nothing has run, the copies are still to be made.
            kv.copies[:0] = [(source, to) for source, to in copies.tolist()]
            for slot, num_blocks in held.items():
                if state is not None:
                    state.give_back(slot)
                if kv.num_blocks[slot] != num_blocks:
                    kv.trim(slot)
                    kv.reserve(slot, 1)  # the next token's place, as it was
        return [drafts[seq].draft() if seq in drafts else NO_DRAFT for seq in decoding]
