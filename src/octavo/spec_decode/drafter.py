"""The interfaces of drafters, and what a draft is.

A user's own drafter is one class with the four methods of `Drafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from octavo.executor.base import Executor, StepResult
from octavo.loader.base import Checkpoint
from octavo.models.program import Program
from octavo.sampling.sampler import Sampler
from octavo.scheduler.batching import Distributions, Scheduled
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence as Seq

NUM_CLASSES = 16  # of evidence


class Draft(NamedTuple):
    """A guess at a sequence's next tokens.

    ``evidence``, from 0 to 15, is a class that the drafter chooses by how much supports the guess,
    for example by the length of a match: acceptance is learned for each class separately.
    ``alternatives`` are other guesses at the same tokens, the best first; each starts at the first
    token. They are verified in the same pass, as branches of a tree. ``probabilities``
    [len(token_ids), vocabulary], an array or a sequence of rows, are the distributions that the
    tokens were drawn from; rejection sampling compares them with the target's. None means that the
    drafter is certain of its tokens. With ``probabilities``, whether a token is in the draft may
    depend on the tokens before it but not on what was drawn for it; otherwise such tokens would
    come too often or too rarely. Without them a drafter is free to choose.
    """

    token_ids: Sequence[int]
    evidence: int = 0
    alternatives: Sequence[Sequence[int]] = ()
    probabilities: Distributions | None = None


NO_DRAFT = Draft(())


class Drafter(Protocol):
    """Drafts from the text alone, for all decoding sequences of a step at once.

    Sequences are identified by a number. What a drafter returns changes only how soon the output
    comes, never the output (under rejection, never its distribution). A drafter that raises, or
    that returns invalid tokens, is not asked again. It is called on the engine's thread between
    steps, so it must be quick.
    """

    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        """Begin a sequence with its prompt and first tokens, or with the beginning of a long text,
        whose rest comes by `extend`. What is learned from one sequence may be used for another only
        if both have the same ``cache_salt``.
        """
        ...

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Append the tokens that have come since the last call."""
        ...

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> Sequence[Draft]:
        """Return a draft for each sequence, of at most the given number of tokens; it may be
        shorter or empty. A count is 0 while the sequence's text has not been given completely.
        """
        ...

    def end(self, sequence: int) -> None:
        """Forget the sequence. Its number is not used again."""
        ...


class Target(NamedTuple):
    """The loaded model that verifies the drafts, which a `ModelDrafter` is made for."""

    checkpoint: Checkpoint
    program: Program
    executor: Executor
    scheduler: Scheduler  # with its ``kv`` and ``config``
    sampler: Sampler
    rejection: bool = False  # drafts are verified by rejection, and come with probabilities


class ModelDrafter:
    """Base class of drafters that see the scheduler's own sequences; most of them run a model.

    A drafter may read a sequence's ``token_ids`` (the last of which the target has not computed
    yet), ``slot`` (in the target's cache; a preemption changes it) and ``output.sampler`` (the
    `SamplerState` behind the last token), and changes none of them. To draw tokens as the target
    will, with the same random numbers and penalties, it forks the sampler's state. As with a
    `Drafter`, nothing it does changes an output, and it is not asked again after an exception.
    """

    @property
    def begun(self) -> bool:
        """Whether the next drafts are being made already, at most as many and as long as the last
        ones.
        """
        return False

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> Sequence[Draft]:
        """Return a draft for each sequence, of at most the given number of tokens; it may be
        shorter or empty. Where the count is 0 it must be empty.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define propose")

    def observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        """Take note of a step whose samples drew ``runs``, before these are committed."""

    def begin(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        """As `observe`, after a step with drafts that will probably be followed by another: the
        drafter may start on the next drafts.
        """
        self.observe(scheduled, result, runs)

    def cancel(self) -> None:
        """Give up the drafts that were begun."""

    def unread(self, seq: Seq) -> int:
        """Return about how many tokens of the sequence must be read before it is drafted for."""
        return 0

    def end(self, seq: Seq) -> None:
        """Forget the sequence, known or not."""

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless all memory is free or held for a live sequence."""

    def close(self) -> None:
        """Release memory and threads."""
