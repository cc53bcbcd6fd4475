"""What computing a part of a prompt would take: what loading it from another tier must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.execute.batch import Batch
from octavo.execute.cost import CostModel, Rates
from octavo.schedule.request import RequestRecord

if TYPE_CHECKING:
    from octavo.engine.engine import Step

_TOKENS = 64  # of prompts, that a step has at least which shows how fast they are computed
_DECODES = 8  # of so many tokens of it at most one is a decoding sequence's
_RECENT = 0.2  # weight of the newest step


class Recomputing:
    """The cost model's seconds, at the speed of the last steps with prompts. Is an `Observer`, and
    the tiers' `Computing`.

    It begins at ``rates``: a calibration's, or those of a machine as fast as there may be, so that
    nothing is loaded at first that would be computed in less.
    """

    def __init__(self, costs: CostModel, rates: Rates, max_tokens: int) -> None:
        """``max_tokens``: of a step."""
        self._costs = costs
        self._max_tokens = max_tokens
        self.calibrate(rates)

    def calibrate(self, rates: Rates) -> None:
        """The rates are these; steps to come say how far they hold."""
        self._rates = rates
        self._slower = 1.0  # than by the rates
        self.per_token = self.seconds(0, self._max_tokens) / self._max_tokens

    def seconds(self, start: int, tokens: int) -> float:
        """Of so many tokens of a prompt from position ``start`` on, in steps of their own."""
        total = 0.0
        for first in range(start, start + tokens, self._max_tokens):
            size = min(self._max_tokens, start + tokens - first)
            total += self._costs.step(_chunk(first, size), self._rates).seconds
        return total * self._slower

    def on_step(self, step: Step) -> None:
        batch = step.scheduled.batch
        tokens, seconds = batch.num_tokens, step.ended - step.started
        if tokens < _TOKENS or len(step.scheduled.decodes) * _DECODES > tokens or seconds <= 0:
            return
        predicted = self._costs.step(batch, self._rates).seconds
        if predicted > 0:
            before = self._slower
            self._slower += _RECENT * (seconds / predicted - before)
            self.per_token *= self._slower / before

    def on_end(self, record: RequestRecord) -> None: ...


def fastest(threads: int) -> Rates:
    """Of a machine as fast as there may be."""
    return Rates(
        25e9 * threads,
        120e9 * threads,
        int8_ops_per_second=500e9 * threads,
        bf16_ops_per_second=250e9 * threads,
    )


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
