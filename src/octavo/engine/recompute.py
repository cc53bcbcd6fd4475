"""What computing a part of a prompt would take: what loading it from another tier must beat."""

from __future__ import annotations

import numpy as np

from octavo.engine.step_time import StepTimePredictor
from octavo.executor.base import Batch


class Recomputing:
    """What is predicted for steps of nothing else, less what it may be off by, so that nothing is
    loaded that would be computed in less. Is the tiers' `Computing`.
    """

    def __init__(self, pace: StepTimePredictor, max_tokens: int) -> None:
        """``max_tokens``: of a step."""
        self._pace = pace
        self._max_tokens = max_tokens
        self._per_token = 0.0
        self._learned = -1  # steps, when that was reckoned

    @property
    def per_token(self) -> float:
        """Seconds, in the longest step."""
        if self._learned != self._pace.learned:  # asked for every block that is overwritten
            self._learned = self._pace.learned
            self._per_token = self.seconds(0, self._max_tokens) / self._max_tokens
        return self._per_token

    def seconds(self, start: int, tokens: int) -> float:
        """Of so many tokens of a prompt from position ``start`` on, in steps of their own."""
        total = 0.0
        for first in range(start, start + tokens, self._max_tokens):
            size = min(self._max_tokens, start + tokens - first)
            total += self._pace.predict(_chunk(first, size))
        return total * self._pace.margin


def _chunk(start: int, size: int) -> Batch:
    """A step with a part of one prompt."""
    none = np.empty(0, np.int32)
    return Batch(
        token_ids=np.zeros(size, np.int32),
        positions=np.arange(start, start + size, dtype=np.int32),
        seq_offsets=np.array((0, size), np.int32),
        seq_slots=np.zeros(1, np.int32),
        block_tables=none.reshape(0, 0, 0),
        logits_rows=none,
        copies=none.reshape(0, 2),
    )
