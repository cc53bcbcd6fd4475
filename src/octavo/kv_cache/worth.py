"""Loading must beat computing, or is not done: both are predicted from what they took lately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from octavo.kv_cache.measured import Measured

_HOST_BANDWIDTH = 2e9  # bytes a second, until it has been measured
_DISK_BANDWIDTH = 200e6
_SLOW_BANDWIDTH = 100e6  # so that the first step that loads something loads too little


class Computing(Protocol):
    """What it takes to compute instead, in seconds."""

    @property
    def per_token(self) -> float:
        """Of a prompt, in large steps."""
        ...

    def seconds(self, start: int, tokens: int) -> float:
        """Of so many tokens of a prompt from position ``start`` on."""
        ...


class Worth:
    """``tokens_per_block``: how many tokens need not be computed for one block of one group, where
    all groups are loaded.
    """

    def __init__(
        self,
        block_bytes: int,
        tokens_per_block: float,
        computing: Computing,
        now: Callable[[], float],
    ) -> None:
        self.loading = Measured(block_bytes / _HOST_BANDWIDTH, now)  # a block, into the pool
        self.spilling = Measured(block_bytes / _HOST_BANDWIDTH, now)  # a block, out of the pool
        self.reading = Measured(block_bytes / _DISK_BANDWIDTH, now)  # a block, from disk
        # A block loaded in the last step that did, with the one spilled for it: a mean is slow to
        # follow when it takes longer.
        self._copying = Measured(block_bytes / _SLOW_BANDWIDTH, now, recent=1.0)
        self.left_alone = 0  # hits, because computing was predicted to be quicker
        self._tokens_per_block = tokens_per_block
        self._computing = computing

    def copied(self, spilled: int, spilling: float, loaded: int, loading: float) -> None:
        """Before a step so many blocks were copied out of the pool, and so many into it, in so
        many seconds.
        """
        each = spilling / spilled if spilled else 0.0
        if spilled:
            self.spilling.took(each)
        if loaded:
            self.loading.took(loading / loaded)
            self._copying.took((loading + each * min(spilled, loaded)) / loaded)

    def seconds_to_load(self, *, overwriting: bool) -> float:
        """A block, with the one that is overwritten for it if so: no less than in the last step."""
        mean = self.loading.seconds + (self.spilling.seconds if overwriting else 0.0)
        return max(mean, self._copying.seconds)

    def keeping(self) -> bool:
        """Whether loading a block could ever pay."""
        return self.loading.seconds < self._tokens_per_block * self._computing.per_token

    def saved(self, num_blocks: int, start: int, num_tokens: int) -> float:
        """Seconds by which so many blocks from host memory are had sooner than the tokens from
        ``start`` on are computed.
        """
        computing = self._computing.seconds(start, num_tokens)
        return computing - num_blocks * self.loading.seconds
