"""What guesses, from the text alone or by computing.

A user's own drafter is one class with the four methods of `Drafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from octavo.executor.base import Executor, StepResult
from octavo.loader.base import Checkpoint
from octavo.models.program import Program
from octavo.sampling.sampler import Sampler
from octavo.scheduler.batching import Distributions, Scheduled
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence as Seq


class Draft(NamedTuple):
    """A guess at a sequence's next tokens.

    ``evidence`` is a class of the drafter's own, from 0 to 15, that says how much speaks for the
    guess (say, how long a match it rests on): how often guesses are right is learned for each class
    apart. ``alternatives`` are other guesses at the same tokens, each from the first on, the best
    first; they are checked in the same pass, as branches of a tree. ``probabilities``
    [len(token_ids), vocabulary], an array or its rows, are those that the tokens were drawn by, for
    the rule that weighs them against the target's (rejection); None: the guess was certain, as far
    as the drafter goes. With ``probabilities``, whether a token is in the draft may depend on the
    tokens before it but not on what was drawn for it, or such tokens come too often or too rarely;
    without, the drafter is free.
    """

    token_ids: Sequence[int]
    evidence: int = 0
    alternatives: Sequence[Sequence[int]] = ()
    probabilities: Distributions | None = None


NO_DRAFT = Draft(())


@runtime_checkable
class Drafter(Protocol):
    """Guesses for sequences that decode, all those of a step at once.

    Sequences go by a number. What a drafter returns never changes the output (where drafts are
    checked by rejection, its distribution), only how soon it comes. One that raises, or returns
    what are no tokens, is not asked again. Called on the engine's thread, between steps: it must be
    quick.
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


class Target(NamedTuple):
    """The model that drafts are checked by, loaded: what a `ModelDrafter` is made for."""

    checkpoint: Checkpoint
    program: Program
    executor: Executor
    scheduler: Scheduler  # its ``kv`` and ``config`` too
    sampler: Sampler
    rejection: bool = False  # whether drafts are checked by rejection: with probabilities


class ModelDrafter(Protocol):
    """Guesses by computing, for all sequences of a step at once.

    It sees the scheduler's own sequences: ``token_ids``, of which the last has not been through the
    target, ``slot`` (of the target's cache; another one after a preemption) and
    ``output.sampler``, the `SamplerState` behind the last token. It changes none of them: to draw
    as the target will draw, with its random numbers and penalties, it draws with a fork of the
    state. As with a `Drafter` nothing it does changes an output, and one that raises is not asked
    again.
    """

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> Sequence[Draft]:
        """A draft for each of the sequences, of at most so many tokens; shorter or none is fine,
        and where the count is 0 it is none.
        """
        ...

    def observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        """A step has been computed and its samples drew ``runs``; nothing is committed yet."""
        ...

    def end(self, seq: Seq) -> None:
        """The sequence is over, known or not."""
        ...

    def close(self) -> None:
        """Gives memory and threads back."""
        ...


@runtime_checkable
class Eager(ModelDrafter, Protocol):
    """A `ModelDrafter` that may begin its next drafts before they are asked for."""

    @property
    def begun(self) -> bool:
        """Whether it has: as many and as long as the last ones that it was asked for, at most."""
        ...

    def begin(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        """As `observe`, in its place where drafts were checked in the step and the next one is to
        have some too: the next drafts may be ``begun``, which `propose` then has the rest of.
        """
        ...

    def give_up(self) -> None:
        """The drafts that are begun will not be asked for."""
        ...


@runtime_checkable
class Holding(Protocol):
    """A `ModelDrafter` with a cache of its own."""

    def check_integrity(self) -> None:
        """Free + referenced blocks = all blocks, and none is held for a sequence that is over;
        `RuntimeError` otherwise. Nearly free when it holds nothing.
        """
        ...


@runtime_checkable
class Reading(Protocol):
    """A `ModelDrafter` that has to read a sequence's text before it can draft for it."""

    def unread(self, seq: Seq) -> int:
        """Tokens that it would have to read, if it were asked now; about."""
        ...
