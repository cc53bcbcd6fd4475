"""Estimates how often draft tokens are accepted: by position, class of draft, and sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode import tuning
from octavo.spec_decode.drafter import Draft
from octavo.spec_decode.replay import agreement

# A class of draft: from where it comes, and the drafter's evidence. "model": made by a model,
# "planned": the same before it is made, "lookup": found in the text, "alternative": beside a draft.
Class = tuple[str, int]
PLANNED: Class = ("planned", 0)


class Offer(NamedTuple):
    """An alternative that may be verified beside its draft."""

    sequence: int  # its index in the step
    rank: int  # of the alternative among the draft's
    start: int  # tokens in common with the draft, which must be computed again
    gains: list[float]  # the probabilities that its tokens behind those become output

    @property
    def best(self) -> tuple[float, int]:
        """The highest gain per row, and the number of tokens, common ones included, that gives it.

        An alternative of n tokens takes n + 1 rows: the sequence's last token comes first.
        """
        best, length, total = 0.0, 0, 0.0
        for size, gain in enumerate(self.gains, self.start + 1):
            total += gain
            if total > best * (1 + size):
                best, length = total / (1 + size), size
        return best, length


class Acceptance:
    """Running means of P(the draft token at a position is accepted | all before it were)."""

    def __init__(self) -> None:
        # By class: the rate at each position tried so far, and the number of trials.
        self._rates: dict[Class, list[float]] = {}
        self._trials: dict[Class, list[float]] = {}
        self._own: dict[Seq, dict[Class, list[float]]] = {}  # accepted and tried, by sequence

    def gains(self, kind: Class, seq: Seq | None, length: int) -> list[float]:
        """Return for each draft token the probability that it becomes output, up to the first one
        that is negligible. The probabilities do not rise.
        """
        rates = self._rates.get(kind, [])
        accepted, tried = self._own.get(seq, {}).get(kind, (0.0, 0.0)) if seq else (0.0, 0.0)
        rate = _first_guess(kind)
        gains: list[float] = []
        so_far = 1.0
        for at in range(length):
            if at < len(rates):
                rate = rates[at]
            blended = (tuning.SEQUENCE_WEIGHT * rate + accepted) / (tuning.SEQUENCE_WEIGHT + tried)
            so_far *= min(tuning.HIGHEST_ACCEPTANCE, blended)
            if so_far < tuning.NEGLIGIBLE_GAIN:
                break
            gains.append(so_far)
        return gains

    def learn(self, kind: Class, seq: Seq | None, draft: Sequence[int], run: Sequence[int]) -> None:
        """Compare a draft with the ``run`` that the sequence went on with, verified or not. Nothing
        is known of tokens behind the first wrong one or behind the run.
        """
        rates, trials = self._rates.setdefault(kind, []), self._trials.setdefault(kind, [])
        accepted = agreement(draft, run)
        tried = min(accepted + 1, len(draft), len(run))
        for at in range(tried):
            if at == len(rates):  # a new position begins with the rate of the one before
                rates.append(rates[-1] if rates else _first_guess(kind))
                trials.append(tuning.ACCEPTANCE_PRIOR_WEIGHT)
            trials[at] = min(trials[at] + 1, tuning.ACCEPTANCE_MEMORY)
            rates[at] += ((at < accepted) - rates[at]) / trials[at]
        if seq is not None:
            own = self._own.setdefault(seq, {}).setdefault(kind, [0.0, 0.0])
            own[0] += accepted
            own[1] += tried
            if own[1] > tuning.SEQUENCE_MEMORY:
                own[:] = own[0] / 2, own[1] / 2

    @property
    def num_known(self) -> int:
        """Return the number of sequences that something is remembered of."""
        return len(self._own)

    def end(self, seq: Seq) -> None:
        """Forget a sequence."""
        self._own.pop(seq, None)

    def offers(self, sequence: int, draft: Draft, gains: Sequence[float]) -> list[Offer]:
        """Return the alternatives worth considering beside a draft with the given gains."""
        offers = []
        for rank, path in enumerate(draft.alternatives):
            start = agreement(draft.token_ids, path)
            if start >= len(gains):  # the draft itself is not worth a row there
                continue
            wrong = (gains[start - 1] if start else 1.0) - gains[start]
            own = self.gains(("alternative", rank), None, len(path) - start)
            if own and wrong * own[0] >= tuning.NEGLIGIBLE_GAIN:
                offers.append(Offer(sequence, rank, start, [wrong * gain for gain in own]))
        return offers

    def learn_alternatives(
        self, draft: Draft, token_ids: Sequence[int], run: Sequence[int]
    ) -> None:
        """Learn from the alternatives that leave the draft ``token_ids`` where it was wrong."""
        wrong = agreement(token_ids, run)
        if wrong < min(len(token_ids), len(run)):
            for rank, path in enumerate(draft.alternatives):
                if agreement(token_ids, path) == wrong < len(path):
                    self.learn(("alternative", rank), None, path[wrong:], run[wrong:])


def _first_guess(kind: Class) -> float:
    return tuning.FIRST_GUESS_ALTERNATIVE if kind[0] == "alternative" else tuning.FIRST_GUESS
