"""Some of the target's own layers guess what all of them will say.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding", 2023, and, with the target's cache, Elhoushi et al., "LayerSkip: Enabling Early Exit
Inference and Self-Speculative Decoding", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from octavo.execute.batch import Batch, Float32, Int32, StepResult
from octavo.kv.cache import NO_COPIES, KvCache
from octavo.model.subset import keep_layers
from octavo.sample.sampler import Sampler, SamplerState
from octavo.schedule.batching import Scheduled
from octavo.schedule.sequence import Sequence as Seq
from octavo.speculate.drafter import NO_DRAFT, Draft, Target
from octavo.speculate.guess import draw_guesses

if TYPE_CHECKING:  # the compiled module is not needed to name its types
    from octavo.execute.native import NativeExecutor


@dataclass(slots=True, eq=False)
class _Going:
    """A sequence that is being drafted for."""

    seq: Seq
    index: int  # among those asked for
    most: int  # tokens
    state: SamplerState
    num_blocks: int  # that its slot had before
    tokens: list[int] = field(default_factory=list)
    probabilities: list[Float32] = field(default_factory=list)

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.seq.token_ids[-1]


class LayerSkipDrafter:
    """Implements `ModelDrafter`: a pass of ``layers`` for every token, all sequences at once.

    It needs no memory: its weights are the target's, and so is its cache. A pass reads what the
    target has written for the layers that are kept, and writes behind it, where the target will
    write when it checks the draft. The places are reserved for the time of drafting only. With
    ``probabilities`` drafts say what they were drawn by.
    """

    def __init__(
        self,
        executor: NativeExecutor,
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
        drafts = [NO_DRAFT] * len(decoding)
        started: list[_Going] = []
        try:
            for index, (seq, count) in enumerate(zip(decoding, counts, strict=True)):
                # The token behind the draft needs a place, too, when it is checked.
                most = min(count, self._kv.room(seq.slot) - 1)
                if most < 1 or len(started) == self._executor.max_logits_rows:
                    continue
                state: SamplerState = seq.output.sampler
                held = int(self._kv.num_blocks[seq.slot])
                started.append(_Going(seq, index, most, state.fork(seq.choice), held))
                self._kv.reserve(seq.slot, most)
            going = started
            step = 0
            while going:
                going = self._pass(going, step)
                step += 1
        finally:
            self._give_back(started)
        for each in started:
            q = np.stack(each.probabilities) if each.probabilities else None
            drafts[each.index] = Draft(each.tokens, probabilities=q)
        return drafts

    def _pass(self, going: list[_Going], step: int) -> list[_Going]:
        """Another token for each; those that are to have more."""
        states = [each.state for each in going]
        result = self._execute(self._batch(going, step))
        tokens, drawn_by = draw_guesses(
            self._sampler, result, states, probabilities=self._probabilities
        )
        further: list[_Going] = []
        for row, (each, token) in enumerate(zip(going, tokens, strict=True)):
            if token < 0:
                continue  # none can be drawn: the draft ends here
            each.tokens.append(token)
            if drawn_by is not None:
                each.probabilities.append(drawn_by[row])
            if len(each.tokens) < each.most:
                further.append(each)
        return further

    def _batch(self, going: list[_Going], step: int) -> Batch:
        kv = self._kv
        slots = np.array([each.seq.slot for each in going], np.int32)
        counting = np.arange(len(going) + 1, dtype=np.int32)
        # Blocks that are still to be copied for this step may be those that are read and written.
        copies: Int32 = NO_COPIES if step else kv.take_copies()
        return Batch(
            np.array([each.last_token for each in going], np.int32),
            kv.num_tokens[slots] + np.int32(step),
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

    def _give_back(self, started: list[_Going]) -> None:
        """What was reserved for drafting; the next token's place stays."""
        kv = self._kv
        for each in started:
            slot = each.seq.slot
            if kv.num_blocks[slot] != each.num_blocks:
                kv.settle(slot)
                kv.reserve(slot, 1)

    def observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        """Nothing: the target's pass has written over what was drafted."""

    def end(self, seq: Seq) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


def make(target: Target, layers: Sequence[int], *, probabilities: bool) -> LayerSkipDrafter:
    """Raises `ValueError` for layers that the target has not, or that are all it has."""
    count = len(target.program.config.layers)
    try:
        program = keep_layers(target.program, layers)
    except ValueError as error:
        raise ValueError(f"speculative_config: layers: {error}") from None
    if len(layers) == count:
        raise ValueError(f"speculative_config: layers are all {count} of the model")
    number = target.executor.add_program(program)
    kv = target.scheduler.kv
    return LayerSkipDrafter(
        target.executor, number, kv, target.sampler, probabilities=probabilities
    )
