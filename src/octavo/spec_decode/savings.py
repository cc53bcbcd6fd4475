"""What speculation saves: the time that steps would have taken without, as others' times tell."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.scheduler.batching import Scheduled
from octavo.spec_decode.step_times import StepTimes


class Savings:
    """Running sums, in seconds."""

    def __init__(self) -> None:
        self.drafting = 0.0  # waiting for the drafter
        self.saved = 0.0  # estimated; less than nothing where drafts came to little
        self._each = 0.0  # seconds that each token of the last step counts for

    def add(
        self,
        times: StepTimes,
        scheduled: Scheduled,
        runs: Sequence[Sequence[int]],
        seconds: float,
        drafting: float,
    ) -> None:
        """A step took ``seconds`` in all, of them ``drafting`` in the drafter, and drew ``runs``.

        Each token beyond one a sequence saves its share of a step of one token each; the rows that
        the drafts added to the step, and drafting, are taken off.
        """
        self.drafting += drafting
        saved = -drafting
        self._each = 0.0
        decodes = len(scheduled.decodes)
        size = scheduled.batch.num_tokens
        added = sum(map(len, scheduled.drafts or ()))
        added += sum(
            1 + len(branch.token_ids) for each in scheduled.branches.values() for branch in each
        )
        if added and times.known:
            gained = sum(map(len, runs[:decodes])) - decodes
            plain = times.predict(size - added)
            # A step that reads prompts too is not compared with one of its size that only decodes.
            took = times.predict(size) if scheduled.chunks else seconds - drafting
            self._each = times.predict(decodes) / decodes
            saved += gained * self._each - (took - plain)
        self.saved += saved

    def take_back(self, beyond: int) -> None:
        """So many tokens that the last step drew did not become output: an end came before them."""
        self.saved -= beyond * self._each
