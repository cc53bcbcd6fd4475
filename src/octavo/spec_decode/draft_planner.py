"""Plans what a drafter that computes is asked for: only what will pay, its own time included."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode import tuning
from octavo.spec_decode.account import TimeAccount
from octavo.spec_decode.draft_length import choose_lengths
from octavo.spec_decode.drafter import ModelDrafter
from octavo.spec_decode.times import SpeculationTimes


class DraftPlanner:
    """Chooses lengths of drafts before they are made, from what they are expected to bring.

    Each token drafted costs a pass, and a text that the drafter has not seen must be read first.
    """

    def __init__(
        self, drafter: ModelDrafter, times: SpeculationTimes, account: TimeAccount
    ) -> None:
        self._read_seconds = 0.0  # of drafting, for texts not seen before, not taken yet
        self.rest = 0  # steps for which it need not be asked
        self._drafter = drafter
        self._times = times
        self._account = account
        self._warm = False  # it has drafted
        self._begun = False  # this step's drafts had been begun before they were asked for …
        self._last = 1, 1  # … with as many sequences and passes as the last ones
        self._untried = 0.0  # seconds since it was asked
        self._unread: list[int] = []  # tokens to read, of this step's sequences
        self._answers = 0  # that have ended, and their tokens
        self._mean_answer = 0.0

    def plan(
        self,
        decoding: Sequence[Seq],
        most: Sequence[int],
        gains: Sequence[Sequence[float]],
        num_tokens: int,
        room: int,
    ) -> list[int]:
        """Return how many tokens to draft for each sequence, at most ``most``. ``gains`` are their
        probabilities to become output.
        """
        none = [0] * len(decoding)
        if self.rest > 0 or not any(most):
            return none
        self._begun = self._drafter.begun
        counts, _ = choose_lengths(self._times, gains, num_tokens, room, price=self._price)
        unread = [self._drafter.unread(seq) for seq in decoding]
        self._unread = [missing if missing > tuning.NEW_TEXT_TOKENS else 0 for missing in unread]
        if any(counts):
            counts = self._worth_reading(decoding, counts, gains, num_tokens)
        if not any(counts) or not self._warm:
            # Acceptance or costs may have changed: now and then a short draft is tried.
            counts = self._trial(most, room)
            missing = self._trial_seconds(counts) / tuning.IDLE_SHARE - self._untried
            if missing > 0:
                self.rest = min(tuning.REST_STEPS, int(missing / self._times.predict(num_tokens)))
                return none
        self._untried = 0.0
        return counts

    def _price(self, num_sequences: int, passes: int) -> float:
        """Return the seconds of drafts made step after step: where each one begins the next, what
        is waited for it.
        """
        begun = self._begun or self._times.knows_begun()
        return self._times.drafting(num_sequences, passes, begun=begun)

    def _trial(self, most: Sequence[int], room: int) -> list[int]:
        """Return short drafts for the sequences that have been read, or else for the one with least
        to read.
        """
        length = tuning.TRIAL_TOKENS if self._warm else 1
        possible = [at for at, count in enumerate(most) if count]
        tried = {at for at in possible if not self._unread[at]}
        tried = tried or {min(possible, key=self._unread.__getitem__)}
        return within(
            [min(length, count) if at in tried else 0 for at, count in enumerate(most)], room
        )

    def _trial_seconds(self, counts: Sequence[int]) -> float:
        """Return what a trial takes. After a pause nothing has been begun."""
        unread = sum(missing for missing, count in zip(self._unread, counts, strict=True) if count)
        drafting = self._times.drafting(len(counts), tuning.TRIAL_TOKENS, begun=False)
        return drafting + self._times.reading(unread)

    def _worth_reading(
        self,
        decoding: Sequence[Seq],
        counts: list[int],
        gains: Sequence[Sequence[float]],
        num_tokens: int,
    ) -> list[int]:
        """Leave out sequences whose texts would take longer to read than their drafts will save."""
        if not any(self._unread):
            return counts
        asking, number = sum(count > 0 for count in counts), len(decoding)
        gained = sum(sum(each[:count]) for each, count in zip(gains, counts, strict=True))
        seconds = self._times.predict(num_tokens + sum(counts)) + self._price(asking, max(counts))
        plain = self._times.predict(num_tokens)
        # Of a step and sequence; divided by its tokens, of a token.
        saved = ((number + gained) * plain / number - seconds) / (asking + gained)
        return [
            count if saved * self._tokens_to_come(seq) >= self._times.reading(missing) else 0
            for seq, count, missing in zip(decoding, counts, self._unread, strict=True)
        ]

    def _tokens_to_come(self, seq: Seq) -> float:
        """Return how many tokens are expected: as many as recent answers had, but no more than may
        come; before any answer has ended, half of these.
        """
        most = seq.num_to_come
        return min(self._mean_answer, most) if self._answers else most / 2

    # What is learned

    def observe(self, decoding: Sequence[Seq], counts: Sequence[int], seconds: float) -> None:
        """Learn from the drafting that was planned, which took ``seconds``."""
        asking, passes = sum(count > 0 for count in counts), max(counts)
        last, self._last = self._last, (asking, passes)
        reading = [
            (seq, missing)
            for seq, missing, count in zip(decoding, self._unread, counts, strict=True)
            if count and missing
        ]
        if not self._warm:
            # The first use touches memory for the first time: it is no measure, and not charged.
            self._warm = True
            self._read_seconds = seconds
        elif reading:
            drafting = self._times.drafting(asking, passes, begun=False)
            self._read_seconds = max(0.0, seconds - drafting)
            done = sum(max(0, missing - self._drafter.unread(seq)) for seq, missing in reading)
            self._times.observe_reading(done, self._read_seconds)
            to_come = sum(self._tokens_to_come(seq) for seq, _ in reading) / len(reading)
            self._account.owe(self._read_seconds, to_come)
        else:
            asked = last if self._begun else self._last
            self._times.observe_drafting(*asked, seconds, begun=self._begun)

    def take_read_seconds(self) -> float:
        """Return the part of the step's drafting that is charged otherwise or not at all."""
        seconds, self._read_seconds = self._read_seconds, 0.0
        return seconds

    def passed(self, steps: int, seconds: float) -> None:
        """Note that ``steps`` have run, of ``seconds`` each."""
        self._untried += steps * seconds
        self.rest = max(0, self.rest - steps)

    def end(self, num_tokens: int) -> None:
        """Note that an answer of so many tokens has ended; 0 if it never began."""
        if num_tokens > 0:
            self._answers = min(tuning.ANSWERS_REMEMBERED, self._answers + 1)
            self._mean_answer += (num_tokens - self._mean_answer) / self._answers


def within(counts: Sequence[int], room: int) -> list[int]:
    """Return the counts cut to ``room`` in total, the last ones first."""
    fitting = []
    for count in counts:
        fitting.append(min(count, room))
        room -= fitting[-1]
    return fitting
