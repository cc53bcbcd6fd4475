"""Drafts in the making: tokens drawn from a drafter's logits as the target would draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from octavo.executor.base import Batch, Float32, Int32, StepResult
from octavo.kv_cache.cache import KvCache
from octavo.kv_cache.state_cache import StateCache
from octavo.sampling.params import MIN_TEMPERATURE
from octavo.sampling.sampler import Sampler, SamplerState
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.drafter import NO_DRAFT, Draft

_MAX_DISTRIBUTION_BYTES = 64 << 20  # of all distributions that a step's drafts were drawn from


def max_distributions(vocab_size: int) -> int:
    """Return how many draft tokens of a step may keep their distributions."""
    return max(1, _MAX_DISTRIBUTION_BYTES // (4 * vocab_size))


class PartialDraft:
    """Up to ``most`` tokens behind a sequence's, drawn with its own random numbers and penalties.

    If ``probabilities`` are wanted, ``drawn_from`` collects the distributions that tokens are drawn
    from; None where draws are certain. ``row`` is hidden, and a drafter may go on from it.
    """

    __slots__ = ("chance", "drawn_from", "evidence", "most", "row", "seq", "state", "token_ids")

    def __init__(
        self, seq: Seq, most: int, *, probabilities: bool, row: Float32 | None = None
    ) -> None:
        greedy = seq.owner.params.temperature < MIN_TEMPERATURE
        self.seq = seq
        self.most = most
        self.state: SamplerState = seq.output.sampler.fork(seq.choice)
        self.drawn_from: list[Float32] | None = [] if probabilities and not greedy else None
        self.token_ids: list[int] = []
        self.evidence = 0  # as of `Draft`
        self.chance = 1.0  # that all of it is right, as a drafter may estimate it
        self.row = row

    @property
    def last_token(self) -> int:
        """Return the last token of the draft, or of the sequence if the draft has none."""
        return self.token_ids[-1] if self.token_ids else self.seq.token_ids[-1]

    def draft(self) -> Draft:
        """Return the finished draft."""
        if not self.token_ids:
            return NO_DRAFT
        return Draft(self.token_ids, self.evidence, probabilities=self.drawn_from)


def draw(sampler: Sampler, logits: Float32 | None, drafts: Sequence[PartialDraft]) -> list[int]:
    """Draw a token for each draft from the row of logits at its index; -1 if none can be drawn."""
    states = [draft.state for draft in drafts]
    drawing = [row for row, draft in enumerate(drafts) if draft.drawn_from is not None]
    distributions: Sequence[Float32] = ()
    if drawing:
        drawing_states = [states[row] for row in drawing]
        distributions = list(sampler.probabilities(logits, drawing, drawing_states))
    tokens = sampler.sample(logits, range(len(drafts)), states).token_ids
    for row, distribution in zip(drawing, distributions, strict=True):
        if tokens[row] >= 0:
            drafts[row].drawn_from.append(distribution)  # type: ignore[union-attr]
    return tokens


def extend(
    sampler: Sampler,
    result: StepResult,
    drafts: Sequence[PartialDraft],
    draw: Callable[[Sampler, Float32 | None, Sequence[PartialDraft]], list[int]] = draw,
) -> list[PartialDraft]:
    """Append a token to each draft, from the row of ``result``'s logits at its index.

    Returns the drafts that are to have more tokens; one for which no token can be drawn ends.
    ``draw`` replaces the function `draw` for logits that are not of the whole vocabulary.
    """
    further: list[PartialDraft] = []
    logits, first = result.logits, 0
    while True:
        here = drafts[first:] if logits is None else drafts[first : first + len(logits)]
        for draft, token in zip(here, draw(sampler, logits, here), strict=True):
            if token >= 0:
                draft.token_ids.append(token)
                if len(draft.token_ids) < draft.most:
                    further.append(draft)
        first += len(here)
        if first == len(drafts):
            return further
        assert result.logits_from is not None
        logits = result.logits_from(first)  # as many rows as are held at a time


def next_batch(
    drafts: Sequence[PartialDraft],
    slots: Int32,
    written: int,
    kv: KvCache,
    copies: Int32,
    state: StateCache | None,
) -> Batch:
    """Return a pass over the last token of each draft. ``written``: tokens that the passes before
    wrote behind those of ``kv``; -1: the pass is at the last of these. ``state``: has states on
    loan for the pass's recurrent layers.
    """
    count = np.arange(len(drafts) + 1, dtype=np.int32)
    return Batch(
        np.array([draft.last_token for draft in drafts], np.int32),
        kv.num_tokens[slots] + np.int32(written),
        count,
        slots,
        kv.tables,
        count[:-1],
        copies,
        None if state is None else state.draft(slots, first=not written),
    )
