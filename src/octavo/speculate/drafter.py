"""What guesses. A user's own drafter is one class with these four methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    """A guess at a sequence's next tokens.

    ``evidence`` is a class of the drafter's own, from 0 to 15, that says how much speaks for the
    guess (say, how long a match it rests on): how often guesses are right is learned for each class
    apart.
    """

    token_ids: Sequence[int]
    evidence: int = 0


NO_DRAFT = Draft(())


class Drafter(Protocol):
    """Guesses for sequences that decode, all those of a step at once.

    Sequences go by a number. What a drafter returns never changes the output, only how soon it
    comes. One that raises, or returns what are no tokens, is not asked again. Called on the
    engine's thread, between steps: it must be quick.
    """

    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        """A sequence begins to decode: its prompt and first tokens, or, of a long text, the
        beginning; the rest comes with `extend`. What one sequence teaches may serve another only if
        both have the same ``cache_salt``.
        """
        ...

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        """The tokens that have come since."""
        ...

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> Sequence[Draft]:
        """A draft for each of the sequences, of at most so many tokens; shorter or none is fine.
        A count of 0: its text has not all been told.
        """
        ...

    def end(self, sequence: int) -> None:
        """The sequence is over; its number does not come again."""
        ...
