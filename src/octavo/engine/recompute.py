"""How long computing a part of a prompt would take: loading it must take less."""

from __future__ import annotations

import numpy as np

from octavo.engine.step_time import StepTimePredictor
from octavo.executor.base import Batch


class RecomputeCost:
    """What `StepTimePredictor` predicts for steps with nothing else, times its margin of error, so
    that nothing is loaded that would be computed in less time.
    """

    def __init__(self, step_times: StepTimePredictor, max_tokens: int) -> None:
        """``max_tokens``: of a step."""
        self._step_times = step_times
        self._max_tokens = max_tokens
        self._full_step = 0.0
        self._learned = -1  # steps that ``step_times`` had learned from when that was predicted

    def seconds(self, start: int, tokens: int) -> float:
        """Return the seconds for ``tokens`` of a prompt from position ``start`` on, in steps of
        their own.
        """
        if start or tokens != self._max_tokens:
            return self._predict(start, tokens)
        if self._learned != self._step_times.learned:  # asked for every block that is overwritten
            self._learned = self._step_times.learned
            self._full_step = self._predict(start, tokens)
        return self._full_step

    def _predict(self, start: int, tokens: int) -> float:
        total = 0.0
        for first in range(start, start + tokens, self._max_tokens):
            size = min(self._max_tokens, start + tokens - first)
            total += self._step_times.predict(_chunk(first, size))
        return total * self._step_times.margin


def _chunk(start: int, size: int) -> Batch:
    """Return a step with a part of one prompt."""
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
