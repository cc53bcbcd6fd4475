"""How fast prompts are computed, for those that look ahead: shedding and the deadline policy; and
what single steps take, for the budget of a step that has a target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from octavo.kv_cache.cache import Int32

_BEST_KEPT = 0.999  # of the best rate with each step, so that it is forgotten in the end
_MEAN_KEPT = 0.98  # of a step's weight in the means with each later one
_STALL = 4.0  # times the predicted seconds: a step that takes longer counts as taking so long


class PromptRates:
    """Learns from the steps that compute prompts."""

    def __init__(self) -> None:
        self._best = 0.0  # tokens per second; 0: unknown
        # Decayed sums over steps:
        self._prompt_steps = self._tokens = self._seconds = 0.0

    def on_prompts(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step of ``num_tokens`` tokens, some of them of prompts."""
        if seconds > 0:
            self._best = max(self._best * _BEST_KEPT, num_tokens / seconds)
        if predicted := self.mean_seconds(num_tokens):
            seconds = min(seconds, _STALL * predicted)
        self._prompt_steps = _MEAN_KEPT * self._prompt_steps + 1
        self._tokens = _MEAN_KEPT * self._tokens + num_tokens
        self._seconds = _MEAN_KEPT * self._seconds + max(0.0, seconds)

    def least_seconds(self, num_tokens: int) -> float:
        """Return the least time in which so many tokens are computed; 0 if nothing is known."""
        return num_tokens / self._best if self._best else 0.0

    def mean_seconds(self, num_tokens: int) -> float:
        """Return the mean time in which so many tokens are computed; 0 if nothing is known."""
        return num_tokens * self._seconds / self._tokens if self._tokens else 0.0

    @property
    def step_seconds(self) -> float:
        """The mean time of a step that computes prompts; 0 if nothing is known."""
        return self._seconds / (self._prompt_steps or 1.0)


class StepRates(PromptRates, ABC):
    """Predicts the step that is being scheduled, too. An engine's step-time predictor is one."""

    @abstractmethod
    def begin(self, positions: Int32) -> None:
        """Begin a step in which sequences at ``positions`` [sequences] decode a token each."""

    @abstractmethod
    def seconds(self, start: int, tokens: int, rows: int) -> float:
        """Return the seconds of the step if it also had so many tokens of a sequence from position
        ``start`` on, of which ``rows`` want logits. More tokens never make it shorter.
        """

    @abstractmethod
    def add(self, start: int, tokens: int, rows: int) -> None:
        """Add these to the step."""

    @property
    @abstractmethod
    def margin(self) -> float:
        """The share of the target that steps may take by prediction: most then keep the target."""
