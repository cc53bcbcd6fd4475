"""Keeps account of the time that speculation saves, and stops it when it loses too much."""

from __future__ import annotations

from octavo.spec_decode import tuning

_FADING = 1 - 1 / tuning.ACCOUNT_STEPS


class TimeAccount:
    """Seconds that steps took, against what their tokens would have taken without speculation.

    Both sides fade, but a loss fades no faster than it is paid off by steps without one. The
    account begins as after ``credit_steps`` steps, so that something can be tried.
    """

    def __init__(self, credit_steps: int) -> None:
        self.saved = 0.0  # estimated, since the start; negative where drafts cost more
        self._credit_steps = credit_steps
        self._seconds = 0.0
        self._gained = 0.0
        self._debt = 0.0  # time that went into reading texts and has not been charged yet …
        self._share = 0.0  # … of which this is charged with each step

    def add(self, seconds: float, worth: float, steps: int = 1) -> None:
        """Enter ``steps`` equal steps of ``seconds`` each, whose tokens would have taken ``worth``
        without speculation.
        """
        if not self._seconds:
            self._seconds = self._credit_steps * seconds
        self.saved += steps * (worth - seconds)
        payment = self._debt * (1 - (1 - self._share) ** steps)
        self._debt -= payment
        kept = _FADING**steps
        self._seconds = kept * self._seconds + steps * seconds
        fading = (kept - 1) * self._gained
        gained = self._gained + min(fading, steps * tuning.MAX_LOSS * seconds)
        gained += steps * (worth - seconds) - payment
        self._gained = min(gained, tuning.MAX_CREDIT * self._seconds)

    def owe(self, seconds: float, tokens: float) -> None:
        """Charge ``seconds`` of reading a text over the ``tokens`` that are expected of it: drafts
        pay for it over a whole answer.
        """
        if seconds <= 0:
            return
        self.saved -= seconds
        charge = self._debt * self._share + seconds / max(1.0, tokens)
        self._debt += seconds
        self._share = min(1.0, charge / self._debt)

    @property
    def overdrawn(self) -> bool:
        """Whether more than `MAX_LOSS` of the recent time has been lost."""
        return self._gained < -tuning.MAX_LOSS * self._seconds
