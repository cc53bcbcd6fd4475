"""Drafts by some of the target's own layers.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding", 2023, and, with the target's cache, Elhoushi et al., "LayerSkip: Enabling Early Exit
Inference and Self-Speculative Decoding", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.kv_cache.cache import NO_COPIES
from octavo.models.program import Program
from octavo.models.subset import keep_layers
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.drafter import NO_DRAFT, Draft, ModelDrafter, Target
from octavo.spec_decode.partial_draft import PartialDraft, extend, next_batch


class LayerSkipDrafter(ModelDrafter):
    """Runs a pass of some layers for every token, all sequences at once.

    It needs no memory: weights and cache are the target's. A pass reads what the target has written
    for these layers, and writes behind it, where the target will write when it verifies the draft.
    The places are reserved only while drafting, and so are pages for states of recurrent layers.
    """

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        """Raises as `subset` does."""
        self._executor = target.executor
        self._program = target.executor.add_program(subset(target.program, layers))
        self._kv = target.scheduler.kv
        self._sampler = target.sampler
        self._rejection = target.rejection

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        """As `ModelDrafter` says."""
        kv = self._kv
        drafts: dict[Seq, PartialDraft] = {}
        held: dict[int, int] = {}  # blocks, by slot
        copies = NO_COPIES
        try:
            for seq, count in zip(decoding, counts, strict=True):
                # The token behind the draft needs a place, too, when it is verified.
                most = min(count, kv.capacity(seq.slot) - 1)
                if most < 1 or len(drafts) == self._executor.max_logits_rows:
                    continue
                held[seq.slot] = int(kv.num_blocks[seq.slot])
                kv.reserve(seq.slot, most)
                if kv.state is not None and not kv.state.lend(seq.slot):
                    continue
                drafts[seq] = PartialDraft(seq, most, probabilities=self._rejection)
            going, passes = [*drafts.values()], 0
            if going:
                # Blocks that this step still has to copy or load may be read and written.
                if kv.connectors is not None:
                    kv.connectors.transfer()
                copies = kv.take_copies()
            while going:
                slots = np.array([draft.seq.slot for draft in going], np.int32)
                batch = next_batch(going, slots, passes, kv, copies)
                result = self._executor.execute(batch, self._program)
                copies = NO_COPIES
                going = extend(self._sampler, result, going)
                passes += 1
        finally:
            # Where nothing has run, the copies are still to be made.
            kv.copies[:0] = [(source, to) for source, to in copies.tolist()]
            for slot, num_blocks in held.items():
                if kv.state is not None:
                    kv.state.give_back(slot)
                if kv.num_blocks[slot] != num_blocks:
                    kv.trim(slot)
                    kv.reserve(slot, 1)  # the next token's place, as it was
        return [drafts[seq].draft() if seq in drafts else NO_DRAFT for seq in decoding]


def subset(target: Program, layers: Sequence[int]) -> Program:
    """Return the Program of the drafting layers. Raises `ValueError` for layers that the target
    does not have, or if they are all that it has.
    """
    count = len(target.config.layers)
    try:
        program = keep_layers(target, layers)
    except ValueError as error:
        raise ValueError(f"speculative_config: layers: {error}") from None
    if len(layers) == count:
        raise ValueError(f"speculative_config: layers are all {count} of the model")
    return program
