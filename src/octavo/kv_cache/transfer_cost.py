"""What it takes to load a block and to compute it instead, predicted from recent measurements."""

from __future__ import annotations

from collections.abc import Callable

_HOST_BANDWIDTH = 2e9  # bytes a second, until it has been measured
_SLOW_BANDWIDTH = 100e6  # low, so that the first step that loads blocks loads too few of them
_RECENT = 0.2  # weight of the newest measurement, unless another is given
_MOST = 4.0  # a measurement counts as at most this many times the expected value
_HALF_LIFE = 30.0  # seconds after which half of what was measured is forgotten


class Measured:
    """Seconds that one transfer takes: ``expected`` at first, then a mean of recent measurements.

    Transfers that this estimate prevents are never measured again. So measurements are forgotten
    with time and the transfer is tried again, and one very long measurement counts for less.
    """

    def __init__(self, expected: float, now: Callable[[], float], recent: float = _RECENT) -> None:
        """``recent``: the weight of the newest measurement; 1: only that one counts."""
        self._recent = recent
        self._expected = expected
        self._now = now
        self._mean = expected
        self._at = now()

    @property
    def seconds(self) -> float:
        return self._mean_at(self._now())

    def took(self, seconds: float) -> None:
        """Add a measurement that ends now."""
        now = self._now()
        mean = self._mean_at(now - seconds)
        self._mean = mean + self._recent * (min(seconds, _MOST * mean) - mean)
        self._at = now

    def _mean_at(self, now: float) -> float:
        kept: float = 0.5 ** (max(0.0, now - self._at) / _HALF_LIFE)
        return self._expected + (self._mean - self._expected) * kept


class TransferCost:
    """Compares loading from host memory with computing.

    ``tokens_per_block``: tokens that need not be computed for one block of one group, where all
    groups are loaded. ``compute_seconds(start, tokens)``: what computing ``tokens`` of a prompt
    from position ``start`` on takes. ``step_tokens``: tokens of the largest step.
    """

    def __init__(
        self,
        block_bytes: int,
        tokens_per_block: float,
        compute_seconds: Callable[[int, int], float],
        step_tokens: int,
        now: Callable[[], float],
    ) -> None:
        self.loading = Measured(block_bytes / _HOST_BANDWIDTH, now)  # a block, into the pool
        self.saving = Measured(block_bytes / _HOST_BANDWIDTH, now)  # a block, out of the pool
        # A block loaded in the last step that did, with the one saved before it is overwritten: a
        # mean is slow to follow when it takes longer.
        self._last_step = Measured(block_bytes / _SLOW_BANDWIDTH, now, recent=1.0)
        self._tokens_per_block = tokens_per_block
        self._compute_seconds = compute_seconds
        self._step_tokens = step_tokens

    def copied(self, saved: int, saving: float, loaded: int, loading: float) -> None:
        """Learn from a step: ``saved`` blocks took ``saving`` seconds, ``loaded`` ``loading``."""
        each = saving / saved if saved else 0.0
        if saved:
            self.saving.took(each)
        if loaded:
            self.loading.took(loading / loaded)
            self._last_step.took((loading + each * min(saved, loaded)) / loaded)

    def seconds_to_load(self, *, overwriting: bool) -> float:
        """Return the seconds for one block, and for the block that it overwrites if
        ``overwriting``; no less than in the last step.
        """
        mean = self.loading.seconds + (self.saving.seconds if overwriting else 0.0)
        return max(mean, self._last_step.seconds)

    def worth_keeping(self, blocks: int = 1, tokens: float | None = None) -> bool:
        """Return whether loading ``blocks`` could ever take less time than computing the ``tokens``
        that they stand for, by default those of a block of keys and values.
        """
        per_token = self._compute_seconds(0, self._step_tokens) / self._step_tokens
        computing = per_token * (self._tokens_per_block if tokens is None else tokens)
        return blocks * self.loading.seconds < computing

    def seconds_saved(self, num_blocks: int, start: int, num_tokens: int) -> float:
        """Return the seconds by which loading ``num_blocks`` from host memory is faster than
        computing ``num_tokens`` from position ``start`` on.
        """
        return self._compute_seconds(start, num_tokens) - num_blocks * self.loading.seconds
