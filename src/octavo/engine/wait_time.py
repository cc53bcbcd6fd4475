"""Predict how long a new request would wait, from what is queued and from how long steps take.

A request waits for a slot and for prompts. A slot becomes free when its sequence has drawn its last
token, which takes so many steps. Each prompt token that is computed before the request's own adds
to the time of the steps that run meanwhile. With steps that take a + b × decoding sequences + c ×
prompt tokens (`StepTimePredictor.linear`), waiting for n steps while p prompt tokens are computed
takes n (a + b × sequences) + c p. Nothing tells how long answers will be: they are taken to be as
long as recent ones, and no longer than was asked for.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice

from octavo.engine.engine import Engine, Step
from octavo.scheduler.admission import Forecast
from octavo.scheduler.request import Outcome, RequestRecord
from octavo.scheduler.sequence import Sequence

_OUTPUT, _OUTPUT_WEIGHT = 256.0, 1.0  # tokens of an answer before any has ended, and in answers
_REMEMBERED = 64  # answers
LONGEST = 3600.0  # seconds; no prediction is longer


class WaitTimePredictor:
    """Observes an engine and predicts how a new request would fare.

    `forecast` may be called from any thread: it reads what the engine's thread changes, so that a
    figure may be a step old. Running sequences are looked at once a step, however many callers ask.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step_times = engine.step_times
        self._outputs = _OUTPUT * _OUTPUT_WEIGHT  # tokens, of `_ends` answers
        self._ends = _OUTPUT_WEIGHT
        self.prompt_tokens = 0.0  # computed for an answer, by recent ones
        self._run = 1.0  # tokens that a sequence draws in a step
        self._steps = 0
        # Steps, decoding and prefilling sequences when it was made, and what `_running` returned
        self._seen: tuple[tuple[int, int, int], tuple[list[float], int]] | None = None

    # Observer, on the engine's thread

    def on_step(self, step: Step) -> None:
        scheduled = step.scheduled
        decoding = len(scheduled.decodes)
        prompt = sum(chunk.size for chunk in scheduled.chunks)
        self._step_times.on_step(decoding, prompt, step.ended - step.started)
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
        """Tokens of an answer, by recent ones."""
        return self._outputs / self._ends

    def forecast(
        self, asks: RequestRecord | None = None, pending: int = 0, pending_tokens: int = 0
    ) -> Forecast:
        """Predict for a request that comes now; None: one that is behind all others. ``pending``:
        sequences on their way to the queue, and their prompt tokens. No figure is above `LONGEST`.
        """
        scheduler = self._engine.scheduler
        waiting, tokens = len(scheduler.waiting), scheduler.waiting.tokens
        if asks is not None and waiting:
            with suppress(RuntimeError, IndexError):  # the queue may change meanwhile
                before = scheduler.policy.ahead_of(asks)
                if before is not None:
                    waiting, tokens = len(before), sum(len(seq.token_ids) for seq in before)
        expected = self.expected_output
        ends, running_tokens = self._running(asks, expected)
        running = len(ends)
        waiting += pending
        tokens += pending_tokens + running_tokens
        slots = self._slots(running, waiting, tokens)
        steps = 0.0
        needed = running + waiting + 1 - slots  # ends, before it has a slot
        if needed > 0:
            rounds, ended = divmod(needed - 1, slots)
            end = ends[ended] if ended < running else expected
            steps = (end + rounds * expected) / self._run
        each, sequence, token = self._step_times.linear
        of_decodes = each + sequence * min(slots, running + waiting)
        a_step = scheduler.config.max_num_batched_tokens

        def seconds(prompt_tokens: int) -> float:
            """Return the seconds of these steps, or of as many as so many prompt tokens take."""
            return max(steps, prompt_tokens / a_step) * of_decodes + token * prompt_tokens

        wait, ttft = seconds(tokens), seconds(tokens + (asks.prompt_tokens if asks else 0))
        beside = min(slots - 1, running + waiting)
        # As many prompts are computed as answers end: their tokens are in the steps of all others.
        prompts = beside * self.prompt_tokens / max(expected, 1.0)
        step = each + (beside + 1) * sequence + prompts * token
        return Forecast(
            min(wait, LONGEST) if each or sequence or token else None,
            min(ttft, LONGEST),
            min(step / self._run, LONGEST),
        )

    def _running(self, asks: RequestRecord | None, expected: float) -> tuple[list[float], int]:
        """Return how many tokens each running sequence will still draw, in ascending order, and
        the prompt tokens of all that are to be computed.
        """
        scheduler = self._engine.scheduler
        decoding, prefilling = list(scheduler.decoding), list(scheduler.prefilling)
        now = self._steps, len(decoding), len(prefilling)
        of_all = asks is None or "priority" not in scheduler.policy.request_fields
        if of_all and self._seen is not None and self._seen[0] == now:
            return self._seen[1]
        if asks is not None and not of_all:  # less urgent sequences will be preempted
            least = asks.scheduling.priority
            decoding = [seq for seq in decoding if seq.owner.scheduling.priority <= least]
            prefilling = [seq for seq in prefilling if seq.owner.scheduling.priority <= least]
        computed = scheduler.kv.num_tokens
        running = (
            sorted(_to_come(seq, expected) for seq in (*decoding, *prefilling)),
            sum(max(0, len(seq.token_ids) - int(computed[seq.slot])) for seq in prefilling),
        )
        if of_all:
            self._seen = now, running
        return running

    def _slots(self, running: int, waiting: int, tokens: int) -> int:
        """Return how many sequences run at a time: the limit, or as many as the cache holds to
        their end.
        """
        scheduler = self._engine.scheduler
        most = scheduler.config.max_num_seqs
        if waiting:
            each = int(tokens / (waiting + running) + self.expected_output) + 1
            blocks = scheduler.kv.peak_blocks(min(each, scheduler.config.max_model_len))
            most = min(most, max(1, scheduler.kv.pool.num_blocks // blocks))
        return max(most, 1)


def _to_come(seq: Sequence, expected: float) -> float:
    """Return the tokens that a sequence will still draw. One that is already longer than expected
    goes on for a while.
    """
    drawn = len(seq.token_ids) - seq.owner.prompt_tokens
    return min(seq.num_to_come, max(expected - drawn, expected / 4))
