"""The budget that is left after a part of it was taken."""

import numpy as np
import pytest

from octavo.kv_cache.cache import Int32
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.prompt_rates import PromptRates, StepRates
from octavo.scheduler.token_budget import LEAST, TokenBudget


class OnePerToken(StepRates):
    """Predicts a millisecond for the decodes, and one for each token."""

    margin = 1.0  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def begin(self, positions: Int32) -> None:
        self.tokens = 0

    def seconds(self, start: int, tokens: int, rows: int) -> float:
        return 0.001 * (1 + self.tokens + tokens)

    def add(self, start: int, tokens: int, rows: int) -> None:
        self.tokens += tokens


def budget(target: float) -> TokenBudget:
    config = SchedulerConfig(max_model_len=1000, max_num_seqs=4, itl_target=1000 * target)
    return TokenBudget(config, np.zeros(2, np.int32), OnePerToken())


def test_the_first_prompt_gets_its_least_although_the_target_is_missed() -> None:
    left = budget(0.002)
    assert left.fit(0, 100) == LEAST
    left.take(0, LEAST, 0)
    assert left.fit(0, 100) == 0


def test_a_prompt_that_got_no_block_was_not_served() -> None:
    """Because the pool was full, or others had loaded them: the next prompt gets what it would."""
    left = budget(0.002)
    assert left.blocks(50, 0.004) == 4
    left.copy(0.0)
    assert left.fit(0, 100) == LEAST
    left = budget(0.002)
    left.copy(0.004 * left.blocks(50, 0.004))
    assert left.fit(0, 100) == 0
    assert left.blocks(50, 0.004) == 0


def test_a_target_without_predictions_of_steps_is_refused() -> None:
    config = SchedulerConfig(max_model_len=1000, max_num_seqs=4, itl_target=2.0)
    with pytest.raises(ValueError, match="itl_target needs rates that predict single steps"):
        TokenBudget(config, np.zeros(2, np.int32), PromptRates())
