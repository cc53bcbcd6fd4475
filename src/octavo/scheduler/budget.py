"""What a step may hold: tokens, rows of logits and, with a target for it, seconds.

The rules, all in this place:

- Who decodes is in every step. Prompts get what is left of the tokens and, by prediction and less a
  margin for its error (`Timing.margin`), of the target.
- Where the decodes leave less than `LEAST` tokens' time, prompts get the time of `LEAST` tokens all
  the same: the target is missed, by little, and nobody waits for ever.
- Where nobody decodes, a step may take `ALONE` times the target: nobody is stalled, and whoever
  comes meanwhile waits no longer than that.
- The prompt whose turn it is, by the policy, is served first, then the shortest of the others. One
  that does not get through in the step, while a shorter one is behind it, takes half of what is
  left (``half``), and what is left in the end goes to the first that has a chunk: so a long prompt
  has at least half of every step until it is through, and a short one does not wait for that.
- What is cached of a prompt in another tier is copied into the pool before a step, in the step's
  time: no more of it than there is time for (`Budget.blocks`); for the first at least what the
  time of `LEAST` tokens is enough for, and one block in any case. The prompt goes on when all of
  it is there.
- Drafts get what is left when prompts have been served, and nothing beyond the target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from octavo.kv_cache.cache import Int32
from octavo.scheduler.config import SchedulerConfig

LEAST = 16  # tokens of prompts in a step, however long its decodes take
ALONE = 4.0  # times the target that a step may take in which nobody decodes
_FEWEST = 4  # tokens in time for which another prompt joins a step


class Timing(Protocol):
    """Predicts the step in the making."""

    def begin(self, positions: Int32) -> None:
        """So far sequences at ``positions`` [sequences] decode a token each."""
        ...

    def seconds(self, start: int, tokens: int, rows: int) -> float:
        """Of the step, if it also had so many tokens of a sequence from position ``start`` on, of
        which ``rows`` want logits. With more tokens it is never shorter.
        """
        ...

    def add(self, start: int, tokens: int, rows: int) -> None:
        """Now it has."""
        ...

    @property
    def margin(self) -> float:
        """What share of a target steps are to take by prediction, so that most of them keep it."""
        ...


class Budget:
    """What is left of one step."""

    def __init__(
        self, config: SchedulerConfig, positions: Int32, timing: Timing | None = None
    ) -> None:
        """``positions`` [sequences]: of those who decode. ``timing``: where there is a target."""
        self.tokens = config.max_num_batched_tokens - len(positions)
        self.rows = config.logits_rows - len(positions)
        self._target = config.itl_target or 0.0
        self._timing = timing if self._target else None
        self._positions = positions
        self._limit: float | None = None  # seconds; None: nobody has asked yet
        self._most = self.tokens  # of prompts
        self._served = False  # whether any prompt has been

    @property
    def spent(self) -> bool:
        """Whether nothing more has room, or not enough for a chunk to be worth it."""
        if min(self.tokens, self._most, self.rows) < 1:
            return True
        if self._timing is None or self._limit is None:
            return False
        return self._timing.seconds(0, _FEWEST, 0) > self._limit

    def fit(self, start: int, missing: int, *, scored: bool = False, half: bool = False) -> int:
        """How many of a prompt's ``missing`` tokens, from position ``start`` on, have room: in all
        that is left, or in ``half`` of it. ``scored``: they all want logits, not only the last.

        Who is served first gets at least a token.
        """
        most = min(missing, self.tokens, self._most, self.rows if scored else missing)
        if half:
            most = min(most, max(1, min(self.tokens, self._most) // 2))
        timing = self._timing
        if timing is None or most < 1:
            return most

        def seconds(tokens: int) -> float:
            return timing.seconds(start, tokens, tokens if scored else tokens == missing)

        limit = self._begin(timing)
        if not self._served:
            least = min(most, LEAST)  # and two prompts may be through with them
            floor = timing.seconds(start, least, least if scored else 2)
            if floor > limit:
                limit = self._limit = floor
                self._most = min(self._most, LEAST)
                most = least
        if half:
            limit -= (limit - timing.seconds(0, 0, 0)) / 2
        if seconds(most) <= limit:
            return most
        return _last(most, seconds, limit) or int(not self._served)

    def take(self, start: int, tokens: int, rows: int) -> None:
        """So many tokens of a sequence, and rows of logits, are in the step."""
        self.tokens -= tokens
        self._most -= tokens
        self.rows -= rows
        self._served = True
        if self._timing is not None:
            self._timing.add(start, tokens, rows)

    def blocks(self, most: int, seconds: float) -> int:
        """How many blocks, ``most`` at most, there is time to copy into the pool before the step,
        at ``seconds`` each. Who is served first gets at least one.
        """
        timing = self._timing
        if timing is None:
            return most
        left = self._begin(timing) - timing.seconds(0, 0, 0)
        if not self._served:
            left = max(left, timing.seconds(0, LEAST, 0) - timing.seconds(0, 0, 0))
        if most * seconds <= left:
            return most
        return max(int(left / seconds) if left > 0 else 0, int(not self._served))

    def copy(self, seconds: float) -> None:
        """So long the step's copies into the pool take, of who is served now."""
        if not seconds:
            return
        self._served = True
        if self._limit is not None:
            self._limit -= seconds

    def drafts(self) -> int:
        """How many tokens of drafts have room."""
        most = min(self.tokens, self.rows)
        timing = self._timing
        if timing is None or most < 1 or not len(self._positions):
            return most
        limit, at = self._begin(timing), int(self._positions.mean())

        def seconds(tokens: int) -> float:
            return timing.seconds(at, tokens, tokens)

        return most if seconds(most) <= limit else _last(most, seconds, limit)

    def _begin(self, timing: Timing) -> float:
        """The seconds that the step may take."""
        if self._limit is None:
            timing.begin(self._positions)
            alone = not len(self._positions)
            self._limit = self._target * timing.margin * (ALONE if alone else 1.0)
        return self._limit


def _last(beyond: int, seconds: Callable[[int], float], limit: float) -> int:
    """The most tokens, below ``beyond``, that take no longer than ``limit``; 0 if not one does.

    Kernels take tokens by panels: seconds are stairs, and this is the end of one.
    """
    low, high = 0, beyond
    while high - low > 1:
        middle = (low + high) // 2
        if seconds(middle) <= limit:
            low = middle
        else:
            high = middle
    return low
