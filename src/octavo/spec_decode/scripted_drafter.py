"""A drafter for a scripted sampler, right with a given probability (simulation)."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.sampling.scripted import ScriptedSampler, ScriptedState, mix
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.drafter import NO_DRAFT, Draft, ModelDrafter

_STREAM = 0x5D8A7F6B3C2E1D09  # its random numbers are not the sampler's


class ScriptedDrafter(ModelDrafter):
    """Each guess is right with probability ``acceptance``, whatever came before it.

    The first i of k tokens are all right with acceptance^i, so a pass yields on average
    (1 - acceptance^(k+1)) / (1 - acceptance) tokens (Leviathan, Kalman and Matias, "Fast inference
    from transformers via speculative decoding", 2023, equation 1). Drafting takes no time. Whether
    a guess is right depends only on the sequence and its position.
    """

    def __init__(self, sampler: ScriptedSampler, acceptance: float) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"an acceptance rate is from 0 to 1, not {acceptance:g}")
        self._sampler = sampler
        self._right_below = int(acceptance * 2**32)

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> Sequence[Draft]:
        """As `ModelDrafter` says."""
        return [
            self._draft(seq.output.sampler, count) if count else NO_DRAFT
            for seq, count in zip(decoding, counts, strict=True)
        ]

    def _draft(self, state: ScriptedState, count: int) -> Draft:
        tokens = self._sampler.coming(state, count)
        for at in range(count):
            random = mix((state.stream ^ _STREAM) + state.num_generated + at)
            if random >> 32 >= self._right_below:
                tokens[at] = (tokens[at] + 1) % self._sampler.vocab_size
        return Draft(tokens)
