"""What a drafter that computes is asked for: only what will pay, all its time included.

Each token that it drafts costs a pass, and a text that it has not seen must be read before. What
that will bring is estimated ahead; how long both take is learned as it happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.draft_times import DraftTimes
from octavo.spec_decode.drafter import Eager, ModelDrafter, Reading
from octavo.spec_decode.length import choose
from octavo.spec_decode.step_times import StepTimes

LONGEST_REST = 32  # steps
IDLE_SHARE = 0.01  # of the time, for drafting that does not seem to pay …
_LEAST_SHARE = 0.003  # … down to this, where it has been tried again and again …
_IN_VAIN = 0.99  # … as each draft that was leaves so much of it
_TRIAL = 3  # tokens drafted now and then where it does not
_UNREAD = 64  # tokens that a drafter has not seen, above which it has to read
_CONVINCING = 8  # drafts that have been checked before much is read
_RESERVE = 2  # texts, whose reading gains beyond may stand for
_MEMORY = 32  # answers whose length is remembered


class Ahead:
    """Plans for a `ModelDrafter`. ``times`` are those of the engine's steps."""

    def __init__(self, drafter: ModelDrafter, times: StepTimes) -> None:
        self.times = DraftTimes()  # of drafts that nothing had been done for …
        self.waits = DraftTimes()  # … and the time waited for those that had been begun
        self.read = 0.0  # seconds of the last drafting that went into texts not seen before
        self._steps = times
        self._reading = drafter if isinstance(drafter, Reading) else None
        self._eager = drafter if isinstance(drafter, Eager) else None
        self._begun = False  # whether this step's drafts had been, before it was asked
        self._last = 1, 1  # sequences and passes of the last drafts: of those begun, too
        self._warm = False  # whether it has drafted
        self._tried = 0  # drafts that have been checked …
        self._in_vain = 0  # … since it last seemed to pay
        self._untried = 0.0  # seconds since it was asked
        self._unread: list[int] = []  # of this step's sequences
        self._answers = 0  # that have ended …
        self._mean_answer = 0.0  # … and how many tokens they had, of late
        self._debts: dict[Seq, _Debt] = {}  # what was read of texts, until it has paid
        self._overdue = 0.0  # seconds of it that did not
        self._reserve = 0.0  # seconds gained beyond it …
        self._largest = 0.0  # … up to twice what a text took of late

    def plan(
        self,
        decoding: Sequence[Seq],
        most: Sequence[int],
        gains: Sequence[Sequence[float]],
        num_tokens: int,
        room: int,
    ) -> tuple[list[int], int]:
        """How many tokens to draft for each sequence, of at most ``most``, with ``gains`` their
        probabilities to become output; if none, for how many steps it need not be asked.
        """
        self._begun = self._eager is not None and self._eager.begun
        counts = choose(self._steps, gains, num_tokens, room, self._price)
        if any(counts):
            self._in_vain = 0
        self._unread = [self._missing(seq) for seq in decoding]
        if self._tried < _CONVINCING:
            counts = [min(count, _TRIAL if self._warm else 1) for count in counts]
            if any(self._unread):
                counts = self._least_to_read(counts)
        elif any(counts):
            counts = self._worth_reading(decoding, counts, gains, num_tokens)
        if not any(counts):
            # Acceptance may have changed since: now and then it is looked at.
            counts = self._least_to_read(within([min(longest, _TRIAL) for longest in most], room))
            share = max(_LEAST_SHARE, IDLE_SHARE * _IN_VAIN**self._in_vain)
            missing = self._seconds(counts) / share - self._untried
            if missing > 0 and not (self._tried < _CONVINCING and self._hopeful(most, num_tokens)):
                rest = int(missing / self._steps.predict(num_tokens))
                return [0] * len(decoding), min(LONGEST_REST, rest)
        self._untried = 0.0
        return counts, 0

    @property
    def _price(self) -> DraftTimes:
        """Of drafts in step after step: where one begins the next, what is waited for it."""
        return self.waits if self._begun or self.waits.known else self.times

    def _seconds(self, counts: list[int]) -> float:
        """What a trial takes: after a pause nothing has been begun."""
        unread = sum(missing for missing, count in zip(self._unread, counts, strict=True) if count)
        return self.times.predict(len(counts), _TRIAL) + self.times.reading(unread)

    def _hopeful(self, most: Sequence[int], num_tokens: int) -> bool:
        """Whether drafting would pay if it were always right."""
        gains = [[1.0] * longest for longest in most]
        return any(choose(self._steps, gains, num_tokens, sum(most), self._price))

    # Texts to read

    def _missing(self, seq: Seq) -> int:
        """Tokens of a text that the drafter has to read before it drafts; 0 for a few."""
        missing = 0 if self._reading is None else self._reading.unread(seq)
        return missing if missing > _UNREAD else 0

    def _least_to_read(self, counts: list[int]) -> list[int]:
        """Only those whose texts have been read; if there are none, the one with least to read."""
        unread = [missing for missing, count in zip(self._unread, counts, strict=True) if count]
        least = min(unread, default=0)
        if not least:
            return [
                0 if missing else count for missing, count in zip(self._unread, counts, strict=True)
            ]
        first = next(
            at for at, missing in enumerate(self._unread) if counts[at] and missing == least
        )
        return [count if at == first else 0 for at, count in enumerate(counts)]

    def _worth_reading(
        self,
        decoding: Sequence[Seq],
        counts: list[int],
        gains: Sequence[Sequence[float]],
        num_tokens: int,
    ) -> list[int]:
        """Without those whose texts would take longer to be read than their drafts will save."""
        asking = sum(count > 0 for count in counts)
        number = len(decoding)
        gained = sum(sum(each[:count]) for each, count in zip(gains, counts, strict=True))
        if not any(self._unread):
            return counts
        pace = 1 + gained / asking  # tokens a step
        seconds = self._steps.predict(num_tokens + sum(counts))
        seconds += self._price.predict(asking, max(counts))
        plain = self._steps.predict(num_tokens)
        saved = ((number + gained) * plain / number - seconds) / asking  # a step and sequence
        return [
            count if saved * self._to_come(seq) / pace >= self.times.reading(missing) else 0
            for seq, count, missing in zip(decoding, counts, self._unread, strict=True)
        ]

    def _to_come(self, seq: Seq) -> float:
        """Tokens: as many as answers had of late, or as many as there may be; at first, half."""
        most = seq.num_to_come
        return min(self._mean_answer, most) if self._answers else most / 2

    # What is learned

    def observe(self, decoding: Sequence[Seq], counts: Sequence[int], seconds: float) -> None:
        """What was planned has been drafted, in so many seconds."""
        self.read = 0.0
        asking, passes = sum(count > 0 for count in counts), max(counts)
        begun, self._last = self._last, (asking, passes)
        reading = [
            (seq, missing)
            for seq, missing, count in zip(decoding, self._unread, counts, strict=True)
            if count and missing
        ]
        if not self._warm:
            # The first time, pages are touched that never were. It is no measure.
            self._warm = True
            self.read = seconds
        elif reading:
            self.read = max(0.0, seconds - self.times.predict(asking, passes))
            done = sum(max(0, missing - self._missing(seq)) for seq, missing in reading)
            self.times.observe_reading(self.read, done)
            for seq, _ in reading:
                seconds = self.read / len(reading)
                if seq in self._debts:
                    seconds += self._debts[seq].seconds
                self._largest = max(seconds, 0.9 * self._largest)
                self._debts[seq] = _Debt(seconds, len(seq.token_ids) + int(2 * self._to_come(seq)))
        elif self._begun:
            self.waits.observe(*begun, seconds)  # as many were begun as the last time
        else:
            self.times.observe(asking, passes, seconds)

    def checked(self) -> None:
        """A draft has been."""
        self._tried += 1
        self._in_vain += 1

    def passed(self, steps: int, seconds: float) -> None:
        """Steps have run, of so many seconds each."""
        self._untried += steps * seconds

    def charged(self, gained: float) -> float:
        """Seconds of reading to be charged to the last step, which gained so many. It pays over a
        whole answer: what is gained goes there first. What has not been gained when the answer
        ends, or is twice as long as expected, is charged at once, but for what others gained
        beyond.
        """
        left = max(0.0, gained)
        for seq, debt in list(self._debts.items()):
            paid = min(left, debt.seconds)
            left -= paid
            if len(seq.token_ids) >= debt.due:
                self._overdue += debt.seconds - paid
            elif paid < debt.seconds:
                self._debts[seq] = debt._replace(seconds=debt.seconds - paid)
                continue
            del self._debts[seq]
        charged = max(0.0, gained) - left
        self._reserve = min(self._reserve + left, _RESERVE * self._largest)
        covered = min(self._overdue, self._reserve)
        self._reserve -= covered
        charged += self._overdue - covered
        self._overdue = 0.0
        return charged

    def end(self, seq: Seq, num_tokens: int) -> None:
        """An answer has ended, of so many tokens; none: it never began."""
        debt = self._debts.pop(seq, None)
        if debt is not None:
            self._overdue += debt.seconds
        if num_tokens > 0:
            self._answers = min(_MEMORY, self._answers + 1)
            self._mean_answer += (num_tokens - self._mean_answer) / self._answers


class _Debt(NamedTuple):
    """Seconds that reading took, to be gained before the sequence has ``due`` tokens."""

    seconds: float
    due: int


def within(counts: Sequence[int], room: int) -> list[int]:
    """The counts, cut to ``room`` in all."""
    fitting = []
    for count in counts:
        fitting.append(min(count, room))
        room -= fitting[-1]
    return fitting
