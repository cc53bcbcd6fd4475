"""The budget of a step: tokens, rows of logits and, with a target, seconds.

The rules, all in this place:

- Every decoding sequence is in every step. Prompts get what is left of the tokens and of the
  target, by prediction and less a margin for its error (`StepRates.margin`).
- If the decodes leave less than the time of `LEAST` tokens, prompts get the time of `LEAST` tokens
  all the same: the target is missed by a little, and no prompt waits for ever.
- If no sequence decodes, a step may take `ALONE` times the target: none is delayed, and a newcomer
  waits no longer than that.
- The prompt that the policy ranks first is served first, then the shortest of the others. A prompt
  that does not get through in the step, while a shorter one is behind it, takes half of what is
  left (``half``), and what is left in the end goes to the first prompt with a chunk. So a long
  prompt has at least half of every step until it is through, and a short one does not wait for it.
- Blocks of a prompt's cached prefix that are in another tier are copied into the pool before the
  step, in the step's time: no more than there is time for (`TokenBudget.blocks`). The first prompt
  gets at least the time of `LEAST` tokens for that, and at least one block. A prompt goes on when
  all its blocks are there.
- Drafts get what is left after the prompts, and nothing beyond the target.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from octavo.kv_cache.cache import Int32
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.prompt_rates import PromptRates, StepRates

LEAST = 16  # tokens of prompts in a step, however long its decodes take
ALONE = 4.0  # times the target that a step may take if no sequence decodes
_FEWEST = 4  # tokens: with less time left than for these, no other prompt joins the step


class TokenBudget:
    """What is left of one step."""

    def __init__(self, config: SchedulerConfig, positions: Int32, rates: PromptRates) -> None:
        """``positions`` [sequences]: of the decoding sequences. ``rates``: for a target. Raises
        `ValueError` for rates that cannot predict single steps, if there is a target.
        """
        self.tokens = config.max_num_batched_tokens - len(positions)
        self.rows = config.logits_rows - len(positions)
        self._target = config.itl_target_s or 0.0
        self._predictor: StepRates | None = None
        if self._target:
            if not isinstance(rates, StepRates):
                raise ValueError(
                    "itl_target needs rates that predict single steps: give the scheduler a "
                    "StepTimePredictor by set_rates"
                )
            self._predictor = rates
        self._positions = positions
        self._limit: float | None = None  # seconds; None: not needed so far
        self._prompt_tokens = self.tokens  # left for prompts
        self._served = False  # whether any prompt has got something

    @property
    def spent(self) -> bool:
        """Whether nothing is left, or not enough for a chunk to be worth it."""
        if min(self.tokens, self._prompt_tokens, self.rows) < 1:
            return True
        if self._predictor is None or self._limit is None:
            return False
        return self._predictor.seconds(0, _FEWEST, 0) > self._limit

    def fit(self, start: int, missing: int, *, scored: bool = False, half: bool = False) -> int:
        """Return how many of a prompt's ``missing`` tokens, from position ``start`` on, fit in what
        is left, or in ``half`` of it; at least one for the first prompt. ``scored``: all of them
        want logits, not only the last.
        """
        most = min(missing, self.tokens, self._prompt_tokens, self.rows if scored else missing)
        if half:
            most = min(most, max(1, min(self.tokens, self._prompt_tokens) // 2))
        predictor = self._predictor
        if predictor is None or most < 1:
            return most

        def seconds(tokens: int) -> float:
            return predictor.seconds(start, tokens, tokens if scored else tokens == missing)

        limit = self._begin(predictor)
        if not self._served:
            least = min(most, LEAST)  # and two prompts may be through with them
            floor = predictor.seconds(start, least, least if scored else 2)
            if floor > limit:
                limit = self._limit = floor
                self._prompt_tokens = min(self._prompt_tokens, LEAST)
                most = least
        if half:
            limit -= (limit - predictor.seconds(0, 0, 0)) / 2
        return _most_within(limit, most, seconds) or int(not self._served)

    def take(self, start: int, tokens: int, rows: int) -> None:
        """Take so many tokens of a sequence, and rows of logits, from the budget."""
        self.tokens -= tokens
        self._prompt_tokens -= tokens
        self.rows -= rows
        self._served = True
        if self._predictor is not None:
            self._predictor.add(start, tokens, rows)

    def blocks(self, most: int, seconds: float) -> int:
        """Return how many of ``most`` blocks there is time to copy into the pool before the step,
        at ``seconds`` each; at least one for the first prompt.
        """
        predictor = self._predictor
        if predictor is None:
            return most
        left = self._begin(predictor) - predictor.seconds(0, 0, 0)
        if not self._served:
            left = max(left, predictor.seconds(0, LEAST, 0) - predictor.seconds(0, 0, 0))
        if most * seconds <= left:
            return most
        return max(int(left / seconds) if left > 0 else 0, int(not self._served))

    def copy(self, seconds: float) -> None:
        """Take the seconds of copies into the pool, for the served prompt, from the budget."""
        if not seconds:
            return
        self._served = True
        if self._limit is not None:
            self._limit -= seconds

    def drafts(self) -> int:
        """Return how many tokens of drafts fit."""
        most = min(self.tokens, self.rows)
        predictor = self._predictor
        if predictor is None or most < 1 or not len(self._positions):
            return most
        limit, at = self._begin(predictor), int(self._positions.mean())

        def seconds(tokens: int) -> float:
            return predictor.seconds(at, tokens, tokens)

        return _most_within(limit, most, seconds)

    def _begin(self, predictor: StepRates) -> float:
        """Return the seconds that the step may take."""
        if self._limit is None:
            predictor.begin(self._positions)
            alone = not len(self._positions)
            self._limit = self._target * predictor.margin * (ALONE if alone else 1.0)
        return self._limit


def _most_within(limit: float, most: int, seconds: Callable[[int], float]) -> int:
    """Return how many of ``most`` tokens take at most ``limit``; 0 if even one takes more."""
    if seconds(most) <= limit:
        return most
    return bisect_right(range(1, most), limit, key=seconds)
