"""Drafts in the making: tokens drawn from a drafter's logits as the target would draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from octavo.executor.base import Float32, StepResult
from octavo.sampling.params import MIN_TEMPERATURE
from octavo.sampling.sampler import Sampler, SamplerState
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.drafter import NO_DRAFT, Draft

_DISTRIBUTIONS = 64 << 20  # bytes, of all that a step's drafts were drawn from


def most_drawn(vocab_size: int) -> int:
    """Tokens of a step's drafts whose distributions may be kept."""
    return max(1, _DISTRIBUTIONS // (4 * vocab_size))


@dataclass(slots=True, eq=False)
class Guess:
    """Up to ``most`` tokens behind a sequence's, drawn with its own random numbers and penalties.

    Where the distributions that they are drawn from are wanted, ``drawn_from`` has them: they are
    the draft's own, not copied.
    """

    seq: Seq
    most: int
    state: SamplerState
    drawn_from: list[Float32] | None
    token_ids: list[int] = field(default_factory=list)
    evidence: int = 0  # as of `Draft`
    chance: float = 1.0  # that all of it is right, as a drafter may see it
    row: Float32 | None = None  # hidden, that a drafter may go on from

    @classmethod
    def begin(cls, seq: Seq, most: int, *, probabilities: bool, row: Float32 | None = None) -> Self:
        state: SamplerState = seq.output.sampler
        # A greedy draw is certain.
        drawn = probabilities and seq.owner.params.temperature >= MIN_TEMPERATURE
        return cls(seq, most, state.fork(seq.choice), [] if drawn else None, row=row)

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.seq.token_ids[-1]

    def draft(self) -> Draft:
        if not self.token_ids:
            return NO_DRAFT
        return Draft(self.token_ids, self.evidence, probabilities=self.drawn_from)


def drawn(sampler: Sampler, logits: Float32 | None, guesses: Sequence[Guess]) -> list[int]:
    """A token for each by the row of logits that is as far down; -1: none can be drawn."""
    drawing = [row for row, guess in enumerate(guesses) if guess.drawn_from is not None]
    if drawing:
        states = [guesses[row].state for row in drawing]
        rows = sampler.probabilities(logits, drawing, states)
        for row, distribution in zip(drawing, rows, strict=True):
            guesses[row].drawn_from.append(distribution)  # type: ignore[union-attr]
    states = [guess.state for guess in guesses]
    tokens = sampler.sample(logits, range(len(guesses)), states).token_ids
    for guess, token in zip(guesses, tokens, strict=True):
        if token < 0 and guess.drawn_from is not None:
            guess.drawn_from.pop()
    return tokens


def draw_next(
    sampler: Sampler,
    result: StepResult,
    guesses: Sequence[Guess],
    draw: Callable[[Sampler, Float32 | None, Sequence[Guess]], list[int]] = drawn,
) -> list[Guess]:
    """Another token for each, from the row of logits that is as far down, some rows at a time as
    they are held. Returns those that are to have more; one for which no token can be drawn ends.
    ``draw`` does as `drawn`, for logits that are not of the whole vocabulary.
    """
    further: list[Guess] = []
    logits, first = result.logits, 0
    while True:
        here = guesses[first:] if logits is None else guesses[first : first + len(logits)]
        for guess, token in zip(here, draw(sampler, logits, here), strict=True):
            if token < 0:
                continue
            guess.token_ids.append(token)
            if len(guess.token_ids) < guess.most:
                further.append(guess)
        first += len(here)
        if first == len(guesses):
            return further
        assert result.logits_from is not None
        logits = result.logits_from(first)
