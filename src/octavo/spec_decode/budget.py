"""How much time speculation may lose: whatever its estimates promise, its account is kept."""

from __future__ import annotations

_MOST_LOST = 0.005  # of the time; behind that it rests until so much time has passed
_MOST_SAVED = 0.01  # of the time, that what was gained before counts for
_MEMORY = 256  # steps
_FADING = 1 - 1 / _MEMORY


class Budget:
    """An account in seconds: steps with drafts, or with guesses that came to nothing, against what
    their tokens would have taken without. Both sides fade, and of what was lost no more than may
    be: a large loss at once is paid off step by step. It begins as after ``credit`` steps, so
    that something can be tried.
    """

    def __init__(self, credit: int = 128) -> None:
        self._credit = credit
        self._seconds = 0.0
        self._gained = 0.0

    def spend(self, seconds: float, worth: float, steps: int = 1) -> None:
        """A step took ``seconds``; without drafts its tokens would have taken ``worth``. ``steps``
        alike may be told of at once.
        """
        if not self._seconds:
            self._seconds = self._credit * seconds
        kept = _FADING**steps
        self._seconds = kept * self._seconds + steps * seconds
        fading = (kept - 1) * self._gained
        gained = self._gained + min(fading, steps * _MOST_LOST * seconds)
        gained += steps * (worth - seconds)
        self._gained = min(gained, _MOST_SAVED * self._seconds)

    @property
    def spent(self) -> bool:
        """Whether more has been lost than may be."""
        return self._gained < -_MOST_LOST * self._seconds
