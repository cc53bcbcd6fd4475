"""A machine as they are: its speed drifts, its memory is quick at times and slow at others, others
disturb it. Beside each step's time stands what the step would have taken just then without drafts,
so that a run tells what speculation cost or saved without another run to compare with.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt
from types import SimpleNamespace
from typing import Any, cast

from octavo.executor.base import StepResult
from octavo.scheduler.request import SchedulingParams
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.drafter import NO_DRAFT, Draft, ModelDrafter
from octavo.spec_decode.speculator import Speculator

VOCAB = 1000
PROMPT = 40  # tokens
UNSEEN = 40e-6  # seconds between a step's end and the next one's begin …
UPKEEP = 10e-6  # … and more, where a drafter is told of the step


@dataclass(frozen=True)
class Rows:
    """Milliseconds: reading, with quick memory, and the rows' arithmetic beside it."""

    reading: float = 2.4
    first: tuple[float, ...] = (0.34, 1.02, 1.20, 1.68)  # for so many rows, as measured
    further: float = 0.35  # each

    def seconds(self, rows: int, memory: float) -> float:
        first = self.first[min(rows, len(self.first)) - 1]
        more = max(0, rows - len(self.first)) * self.further
        return 1e-3 * (self.reading * memory + first + more)


MEASURED = Rows()
CHEAP = Rows(reading=3.0, first=(0.2, 0.39, 0.58, 0.77), further=0.19)  # a second row: 1.06


class Machine:
    """Seconds of steps, one after another; the same ones for the same seed and sizes."""

    def __init__(self, rows: Rows, seed: int) -> None:
        self.now = 0.0
        self.busy = 0.0  # its cores are until then, with what was begun in the background
        self.rows = rows
        self._random = random.Random(seed)
        self._memory = 1.0  # times the seconds of reading with quick memory
        self._until = 0.0  # its regime lasts
        self._drift = 0.0  # logarithms: of the speed of everything
        self._burst = 0.0

    def wait(self) -> None:
        """Until what was begun in the background is done."""
        self.now = max(self.now, self.busy)

    def step(self, rows: int, plain_rows: int) -> tuple[float, float]:
        """The step's seconds, and those that it would have taken with so many rows."""
        rng = self._random
        if self.now >= self._until:
            self._memory = rng.choice((1.0, 1.0, 1.15, 1.4))
            self._until = self.now + exp(rng.uniform(-1.6, 1.6))  # 0.2 to 5 s
        taken = self.rows.seconds(rows, self._memory)
        # An Ornstein-Uhlenbeck process of 2 s, in which 0.1 is usual, and noise of some 6 %, of
        # which half is forgotten from one step to the next.
        share = min(1.0, taken / 2.0)
        self._drift += -share * self._drift + 0.1 * sqrt(2 * share) * rng.gauss(0, 1)
        self._burst = 0.7 * self._burst + 0.035 * rng.gauss(0, 1)
        factor = exp(self._drift + self._burst + 0.03 * rng.gauss(0, 1))
        if rng.random() < 0.004:
            factor *= 3
        self.now += taken * factor
        return taken * factor, self.rows.seconds(plain_rows, self._memory) * factor


@dataclass
class Text:
    """How often guesses are right: ``rate`` of a text, but for passages, of which one begins at a
    token with probability ``begins`` and that are copied. ``rates`` are drawn from for each text;
    every ``turns`` texts the other half of them.
    """

    rates: Sequence[float]
    found: float = 1.0  # how often there is a guess, outside of passages
    begins: float = 0.0
    turns: int = 0
    passage: int = 40  # tokens

    def rate(self, rng: random.Random, number: int) -> float:
        rates = self.rates
        if self.turns:
            half = len(rates) // 2
            rates = rates[half:] if number // self.turns % 2 else rates[:half]
        return rng.choice(rates)


class _State:
    __slots__ = ("copying", "drawn", "passages", "rate")

    def __init__(self, rate: float, begins: float, passage: int, rng: random.Random) -> None:
        self.rate = rate
        self.drawn = 0
        self.copying: list[bool] = []
        left = 0
        for _ in range(1024):
            if not left and rng.random() < begins:
                left = passage
            self.copying.append(left > 0)
            left = max(0, left - 1)


class Finder:
    """A `Drafter` that looks things up; what a copied passage's guesses rest on is more, mostly."""

    each = 4e-6  # seconds

    def __init__(self, text: Text, machine: Machine, seed: int) -> None:
        self.text = text
        self._machine = machine
        self._seed = seed
        self._random = random.Random(seed)
        self._states: dict[int, _State] = {}
        self._texts = 0

    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        text = self.text
        rng = random.Random(f"{self._seed}, {self._texts}")  # whatever was guessed before
        state = _State(text.rate(rng, self._texts), text.begins, text.passage, rng)
        self._texts += 1
        state.drawn = len(token_ids) - PROMPT
        self._states[sequence] = state

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        self._states[sequence].drawn += len(token_ids)

    def end(self, sequence: int) -> None:
        del self._states[sequence]

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        self._machine.now += 5e-6 + self.each * len(sequences)
        return [
            self._draft(self._states[sequence], count)
            for sequence, count in zip(sequences, counts, strict=True)
        ]

    def _draft(self, state: _State, count: int) -> Draft:
        rng = self._random
        copying = state.copying[state.drawn]
        if not count or (not copying and rng.random() >= self.text.found):
            return NO_DRAFT
        tokens = []
        for at in range(state.drawn, state.drawn + count):
            rate = 0.95 if copying and state.copying[at] else state.rate
            tokens.append(at % VOCAB if rng.random() < rate else (at + 1) % VOCAB)
        return Draft(tokens, 5 if copying and rng.random() < 0.8 else 2)


class Guesser(ModelDrafter):
    """Drafts like heads: each guess takes 0.15 ms, and 0.03 more for each sequence.
    ``ahead``: who drafted is expected to draft again, and the next guesses are begun in the
    background; where they are not wanted after all, the next step waits for them nevertheless.
    """

    def __init__(self, text: Text, machine: Machine, seed: int, *, ahead: bool = False) -> None:
        self.text = text
        self._machine = machine
        self._seed = seed
        self._random = random.Random(seed)
        self._rates: dict[Seq, float] = {}
        self._texts = 0
        self._ahead = ahead
        self._counts: dict[Seq, int] = {}  # of the last guesses
        self._begun: dict[Seq, int] = {}

    @property
    def begun(self) -> bool:
        return bool(self._begun)

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        if self._begun:
            self._machine.wait()
            most = [self._begun.get(seq, 0) for seq in decoding]
            counts = [min(each) for each in zip(counts, most, strict=True)]
            self._begun = {}
        else:
            self._machine.now += self._seconds(counts)
        self._counts = {seq: count for seq, count in zip(decoding, counts, strict=True) if count}
        return [self._draft(*each) for each in zip(decoding, counts, strict=True)]

    @staticmethod
    def _seconds(counts: Sequence[int]) -> float:
        return max(counts) * (0.12e-3 + 0.03e-3 * sum(map(bool, counts)))

    def _draft(self, seq: Seq, count: int) -> Draft:
        rate = self._rates.get(seq)
        if rate is None:
            rng = random.Random(f"{self._seed}, {self._texts}")
            rate = self._rates[seq] = self.text.rate(rng, self._texts)
            self._texts += 1
        drawn = len(seq.token_ids) - PROMPT
        return Draft(
            [
                at % VOCAB if self._random.random() < rate * 0.93 ** (at - drawn) else -1 % VOCAB
                for at in range(drawn, drawn + count)
            ]
        )

    def observe(self, scheduled: Any, result: StepResult, runs: Sequence[list[int]]) -> None:
        self._machine.now += UPKEEP
        self._counts, self._begun = {}, {}

    def begin(self, scheduled: Any, result: StepResult, runs: Sequence[list[int]]) -> None:
        counts = self._counts
        self.observe(scheduled, result, runs)
        if self._ahead and counts and counts.keys() >= {*scheduled.decodes, *scheduled.chunks}:
            self._begun = counts
            self._machine.busy = self._machine.now + self._seconds([*counts.values()])

    def cancel(self) -> None:
        self._machine.wait()
        self._begun = {}

    def end(self, seq: Seq) -> None:
        self._rates.pop(seq, None)
        self._counts.pop(seq, None)
        self._begun.pop(seq, None)


@dataclass
class Outcome:
    """Seconds in all, and those that the same tokens would have taken, just then, without."""

    taken: float = 0.0
    plain: float = 0.0

    @property
    def ratio(self) -> float:
        """Times as fast as without speculation."""
        return self.plain / self.taken


def run(
    machine: Machine, speculator: Speculator, batch: int, answers: int, length: int = 128
) -> Outcome:
    """Answers one after another, always ``batch`` at a time. Steps that read prompts are in no
    sum.
    """
    outcome = Outcome()
    result = StepResult(None, 0.0)
    started = 0
    decoding: list[Seq] = []
    while started < answers or len(decoding) == batch:
        chunk = 0
        joining: list[Seq] = []
        while len(decoding) + len(joining) < batch and started < answers:
            owner = SimpleNamespace(scheduling=SchedulingParams(), prompt_tokens=PROMPT)
            most = length if started >= batch else length * (started + 1) // batch + 2
            order = (started, 0)
            joining.append(Seq(cast(Any, owner), 0, order, array("i", [1] * PROMPT), PROMPT + most))
            started += 1
            chunk += PROMPT
        count = len(decoding)
        before = machine.now
        drafts: list[list[int]] | None = None
        if decoding:
            drafts = speculator.propose(decoding, count + chunk, 512)
            drafts = drafts if any(drafts) else None
        added = sum(map(len, drafts or ()))
        rows = count + added + chunk
        machine.wait()
        waiting = machine.now - before  # drafting included
        seconds, plain = machine.step(rows, count or 1)
        runs = []
        for seq, draft in zip(decoding, drafts or [[]] * count, strict=True):
            at = len(seq.token_ids) - PROMPT
            run = []
            for guess in draft:
                run.append(at % VOCAB)
                at += 1
                if guess != run[-1]:
                    break
            else:
                run.append(at % VOCAB)
            runs.append(run)
        scheduled = SimpleNamespace(
            batch=SimpleNamespace(num_tokens=rows),
            chunks=joining,
            decodes=list(decoding),
            samples=decoding + joining,
            drafts=drafts,
            branches={},
        )
        learned = machine.now
        speculator.learn(
            cast(Any, scheduled), result, runs + [[0]] * len(joining), machine.now - before
        )
        upkeep = machine.now - learned
        machine.now += UNSEEN
        if not chunk:
            drawn = sum(map(len, runs))
            taken = waiting + seconds + upkeep + UNSEEN
            worth = drawn * (plain + UNSEEN) / count
            outcome.taken += taken
            outcome.plain += worth
        for seq, run in zip(decoding, runs, strict=True):
            seq.token_ids.extend(run)
        for seq in joining:
            seq.token_ids.append(0)
        ended = [seq for seq in decoding if seq.num_to_come <= 0]
        decoding = [seq for seq in decoding if seq.num_to_come > 0] + joining
        for seq in ended:
            speculator.end(seq)
    return outcome
