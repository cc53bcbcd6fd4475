"""How long a newcomer would wait, told from what is queued and from what steps take lately.

It waits for seats and for prompts. Every sequence decodes at once, so a seat is free when its
sequence has drawn its last token: so many steps from now. And each prompt token put through before
its own adds to the steps that meanwhile run. With steps that take a + b × decoding sequences + c ×
prompt tokens, waiting n steps while p prompt tokens are read takes n (a + b × sequences) + c p.
The three are fitted to the steps as they come, old ones forgotten. How long answers will be nobody
knows: as long as those that have ended lately were, and no longer than each was asked for.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from octavo.engine.engine import Engine, Step
from octavo.scheduler.admission import Forecast
from octavo.scheduler.request import Outcome, RequestRecord
from octavo.scheduler.sequence import Sequence

_OUTPUT, _OUTPUT_WEIGHT = 256.0, 1.0  # tokens of an answer before any has ended, and in answers
_REMEMBERED = 64  # answers
LONGEST = 3600.0  # seconds; no prediction is longer


class _Running(NamedTuple):
    """What a forecast takes of those who run. The first three tell whether it still holds."""

    step: int
    decoding: int
    prefilling: int
    ends: list[float]  # tokens until each of them ends, the first to end first
    tokens: int  # of their prompts, not read yet


class Waiting:
    """Observes an engine, and says how a newcomer would fare.

    `forecast` may be called from any thread: it reads what the engine's thread changes, so that a
    figure may be a step old. Those who run are looked at once a step, however many ask.
    """

    def __init__(self, engine: Engine) -> None:
        self._times = engine.step_times
        self._engine = engine
        self._outputs = _OUTPUT * _OUTPUT_WEIGHT  # tokens, of `_ends` answers
        self._ends = _OUTPUT_WEIGHT
        self.prompt_tokens = 0.0  # computed for an answer, as of late
        self._run = 1.0  # tokens that a sequence draws in a step
        self._steps = 0
        self._seen: _Running | None = None

    # Observer, on the engine's thread

    def on_step(self, step: Step) -> None:
        scheduled = step.scheduled
        decoding = len(scheduled.decodes)
        prompt = sum(chunk.size for chunk in scheduled.chunks)
        self._times.on_step(decoding, prompt, step.ended - step.started)
        self._steps += 1
        if decoding:
            drawn = sum(map(len, islice(step.drawn.runs, decoding)))
            self._run += 0.05 * (drawn / decoding - self._run)

    def on_end(self, record: RequestRecord) -> None:
        if record.outcome is Outcome.FINISHED:
            keep = 1 - 1 / _REMEMBERED
            self._outputs = keep * self._outputs + record.completion_tokens
            self._ends = keep * self._ends + record.n
            computed = (record.prompt_tokens - record.cached_tokens) / record.n
            self.prompt_tokens += (computed - self.prompt_tokens) / min(self._ends, _REMEMBERED)

    # Predictions

    @property
    def expected_output(self) -> float:
        """Tokens of an answer, as of late."""
        return self._outputs / self._ends

    def forecast(
        self, asks: RequestRecord | None = None, pending: int = 0, pending_tokens: int = 0
    ) -> Forecast:
        """Of a request that came now; None: one that is behind all others. ``pending``: sequences
        on their way to the queue, and their prompt tokens.
        """
        scheduler = self._engine.scheduler
        waiting, tokens = len(scheduler.waiting), scheduler.waiting.tokens
        if asks is not None and waiting:
            waiting, tokens = self._ahead(asks)
        expected = self.expected_output
        runs = self._running(asks, expected)
        running = len(runs.ends)
        waiting += pending
        tokens += pending_tokens + runs.tokens
        seats = self._seats(running, waiting, tokens)
        steps = 0.0
        needed = running + waiting + 1 - seats  # ends, before it has a seat
        if needed > 0:
            rounds, place = divmod(needed - 1, seats)
            end = runs.ends[place] if place < running else expected
            steps = (end + rounds * expected) / self._run
        crowd = min(seats, running + waiting)
        wait = self._seconds(steps, crowd, tokens)
        ttft = self._seconds(steps, crowd, tokens + (asks.prompt_tokens if asks else 0))
        beside = min(seats - 1, running + waiting)
        # As many prompts are read as answers end: their tokens are in the steps of all others.
        each, sequence, token = self._times.linear
        read = beside * self.prompt_tokens / max(expected, 1.0)
        step = each + (beside + 1) * sequence + read * token
        return Forecast(
            min(wait, LONGEST) if each or sequence or token else None,
            min(ttft, LONGEST),
            min(step / self._run, LONGEST),
        )

    def _running(self, asks: RequestRecord | None, expected: float) -> _Running:
        scheduler = self._engine.scheduler
        decoding, prefilling = list(scheduler.decoding), list(scheduler.prefilling)
        now = self._steps, len(decoding), len(prefilling)
        if asks is not None and "priority" in scheduler.policy.request_fields:
            # Who runs and is less urgent gives way.
            decoding = [seq for seq in decoding if seq.owner.priority <= asks.priority]
            prefilling = [seq for seq in prefilling if seq.owner.priority <= asks.priority]
        elif (seen := self._seen) is not None and seen[:3] == now:
            return seen
        read = scheduler.kv.num_tokens
        runs = _Running(
            *now,
            sorted(self._to_come(seq, expected) for seq in (*decoding, *prefilling)),
            sum(max(0, len(seq.token_ids) - int(read[seq.slot])) for seq in prefilling),
        )
        if len(runs.ends) == now[1] + now[2]:  # all of them
            self._seen = runs
        return runs

    def _ahead(self, asks: RequestRecord) -> tuple[int, int]:
        """Sequences that wait and come before a request, by the policy, and their tokens."""
        scheduler = self._engine.scheduler
        before = None
        with suppress(RuntimeError, IndexError):  # the queue may change meanwhile
            before = scheduler.policy.ahead_of(asks)
        if before is None:
            return len(scheduler.waiting), scheduler.waiting.tokens
        return len(before), sum(len(seq.token_ids) for seq in before)

    def _seconds(self, steps: float, decoding: int, prompt_tokens: float) -> float:
        """Of ``steps`` steps, or of as many as it takes to read so many prompt tokens."""
        each, sequence, token = self._times.linear
        reading = prompt_tokens / self._engine.scheduler.config.max_num_batched_tokens
        return max(steps, reading) * (each + sequence * decoding) + token * prompt_tokens

    def _seats(self, running: int, waiting: int, tokens: int) -> int:
        """Sequences that run at a time: the limit, or as many as the cache holds to their end."""
        scheduler = self._engine.scheduler
        most = scheduler.config.max_num_seqs
        if waiting:
            each = int(tokens / (waiting + running) + self.expected_output) + 1
            blocks = scheduler.kv.peak_blocks(min(each, scheduler.config.max_model_len))
            most = min(most, max(1, scheduler.kv.pool.num_blocks // blocks))
        return max(most, 1)

    @staticmethod
    def _to_come(seq: Sequence, expected: float) -> float:
        """Tokens until it ends. One that has outrun what was expected goes on for a while."""
        drawn = len(seq.token_ids) - seq.owner.prompt_tokens
        return min(seq.num_to_come, max(expected - drawn, expected / 4))
