"""Some of the target's own layers guess what all of them will say.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding", 2023, and, with the target's cache, Elhoushi et al., "LayerSkip: Enabling Early Exit
Inference and Self-Speculative Decoding", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.executor.base import Batch, Executor, Int32, StepResult
from octavo.kv_cache.cache import NO_COPIES, KvCache
from octavo.models.program import Program
from octavo.models.subset import keep_layers
from octavo.sampling.sampler import Sampler
from octavo.scheduler.batching import Scheduled
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.drafter import NO_DRAFT, Draft, Target
from octavo.spec_decode.guess import Guess, draw_next


class LayerSkipDrafter:
    """Implements `ModelDrafter`: a pass of ``layers`` for every token, all sequences at once.

    It needs no memory: its weights are the target's, and so is its cache. A pass reads what the
    target has written for the layers that are kept, and writes behind it, where the target will
    write when it checks the draft. The places are reserved for the time of drafting only. With
    ``probabilities`` drafts say what they were drawn by.
    """

    def __init__(
        self,
        executor: Executor,
        program: int,
        kv: KvCache,
        sampler: Sampler,
        *,
        probabilities: bool = False,
    ) -> None:
        self._executor = executor
        self._program = program
        self._kv = kv
        self._sampler = sampler
        self._probabilities = probabilities

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        """As `ModelDrafter` says."""
        kv = self._kv
        guesses: dict[int, Guess] = {}  # by index
        held: dict[int, int] = {}  # blocks, by slot
        try:
            for index, (seq, count) in enumerate(zip(decoding, counts, strict=True)):
                # The token behind the draft needs a place, too, when it is checked.
                most = min(count, kv.capacity(seq.slot) - 1)
                if most < 1 or len(guesses) == self._executor.max_logits_rows:
                    continue
                held[seq.slot] = int(kv.num_blocks[seq.slot])
                kv.reserve(seq.slot, most)
                guesses[index] = Guess.begin(seq, most, probabilities=self._probabilities)
            going = [*guesses.values()]
            passes = 0
            while going:
                result = self._execute(self._batch(going, passes))
                going = draw_next(self._sampler, result, going)
                passes += 1
        finally:
            for slot, num_blocks in held.items():
                if kv.num_blocks[slot] != num_blocks:
                    kv.trim(slot)
                    kv.reserve(slot, 1)  # the next token's place, as it was
        return [
            guesses[index].draft() if index in guesses else NO_DRAFT
            for index in range(len(decoding))
        ]

    def _batch(self, going: list[Guess], passes: int) -> Batch:
        kv = self._kv
        if kv.connectors is not None and not passes:
            kv.connectors.transfer()  # and so may those that go to another tier, or come from there
        slots = np.array([each.seq.slot for each in going], np.int32)
        counting = np.arange(len(going) + 1, dtype=np.int32)
        # Blocks that are still to be copied for this step may be those that are read and written.
        copies: Int32 = NO_COPIES if passes else kv.take_copies()
        return Batch(
            np.array([each.last_token for each in going], np.int32),
            kv.num_tokens[slots] + np.int32(passes),
            counting,
            slots,
            kv.tables,
            counting[:-1],
            copies,
        )

    def _execute(self, batch: Batch) -> StepResult:
        try:
            return self._executor.execute(batch, self._program)
        except Exception:
            # Nothing has run, so what was to be copied still is.
            self._kv.copies[:0] = [(source, to) for source, to in batch.copies.tolist()]
            raise

    def observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        """Nothing: the target's pass has written over what was drafted."""

    def end(self, seq: Seq) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


def subset(target: Program, layers: Sequence[int]) -> Program:
    """The layers that guess. Raises `ValueError` for those that the target has not, or that are all
    it has.
    """
    count = len(target.config.layers)
    try:
        program = keep_layers(target, layers)
    except ValueError as error:
        raise ValueError(f"speculative_config: layers: {error}") from None
    if len(layers) == count:
        raise ValueError(f"speculative_config: layers are all {count} of the model")
    return program


def make(target: Target, layers: Sequence[int]) -> LayerSkipDrafter:
    """The drafter. Raises as `subset` does."""
    return LayerSkipDrafter(
        target.executor,
        target.executor.add_program(subset(target.program, layers)),
        target.scheduler.kv,
        target.sampler,
        probabilities=target.rejection,
    )
