"""An engine that answers trials, watched: its answers, and the bits of every row of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine, Step
from octavo.engine.load import LoadedEngine, load_engine
from octavo.engine.outputs import Delta, TokenLogprobs
from octavo.engine.stats import EngineStats
from octavo.executor.base import Batch, Executor, StepResult
from octavo.loader.base import Checkpoint
from octavo.scheduler.request import RequestRecord
from octavo.tools.verify.trials import Trial

Float32 = npt.NDArray[np.float32]
Key = tuple[str, int]  # a trial's name, and which of its n answers
Row = Callable[[Key, int, Float32], None]  # takes the row that a trial's token at a place is from


class VerificationError(RuntimeError):
    """A trial could not be run to its end."""


@dataclass
class Answer:
    """What a trial got, for each of its n answers."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def take(self, delta: Delta) -> None:
        choice = delta.choice
        self.token_ids.setdefault(choice, []).extend(delta.token_ids)
        self.logprobs.setdefault(choice, []).extend(delta.logprobs or [])
        self.text[choice] = self.text.get(choice, "") + delta.text
        if delta.finish_reason is not None:
            self.ends[choice] = delta.finish_reason.value
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


Answers = dict[str, Answer]


class Watched:
    """Implements `Executor`: another one, of whose logits it keeps a step's.

    ``change`` may alter what comes back before anybody sees it: that is how a fault is planted.
    """

    def __init__(
        self, inner: Executor, change: Callable[[Batch, StepResult], StepResult] | None
    ) -> None:
        self._inner = inner
        self._change = change
        self._parts: dict[int, Float32] = {}  # by their first row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, batch: Batch, program: int = 0, rows: Float32 | None = None) -> StepResult:
        result = self._inner.execute(batch, program, rows)
        if self._change is not None:
            result = self._change(batch, result)
        if result.logits is None:
            return result
        self._parts = {0: result.logits.copy()}
        more = result.logits_from
        if more is None:
            return result

        def seen(row: int) -> Float32:
            part = more(row)
            self._parts[row] = part.copy()
            return part

        return result._replace(logits_from=seen)

    def row(self, index: int) -> Float32:
        first = max(first for first in self._parts if first <= index)
        row: Float32 = self._parts[first][index - first]
        return row


class Running:
    """A loaded engine that answers trials."""

    def __init__(
        self,
        loaded: LoadedEngine,
        row: Row | None,
        change: Callable[[Batch, StepResult], StepResult] | None,
    ) -> None:
        self.loaded = loaded
        self.engine: Engine = loaded.engine
        self._row = row
        self.watched = Watched(self.engine.executor, change)
        self.engine.executor = cast(Executor, self.watched)
        self.engine.observers.append(self)

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()

    def on_step(self, step: Step) -> None:
        if self._row is None:
            return
        scheduled = step.scheduled
        for index, (seq, run) in enumerate(zip(scheduled.samples, step.drawn.runs, strict=True)):
            key = seq.owner.request_id, seq.choice
            for at in range(len(run)):
                row = scheduled.last_row(index, run[: at + 1])
                self._row(key, seq.output.num_tokens + at, self.watched.row(row))

    def on_end(self, record: RequestRecord) -> None:
        pass

    def answers(self, trials: Sequence[Trial], batch: int) -> Answers:
        """All answered, at most ``batch`` requests at a time. Raises `VerificationError`."""
        waiting = list(reversed(trials))
        answers: Answers = {trial.name: Answer() for trial in trials}
        running = 0
        while waiting or running:
            while waiting and running < batch:
                self.engine.add_request(waiting.pop().request())
                running += 1
            for delta in self.engine.step():
                answers[delta.request_id].take(delta)
                if delta.record is not None:
                    running -= 1
                    if delta.record.error is not None:
                        raise VerificationError(f"{delta.request_id}: {delta.record.error}")
        return answers


@contextmanager
def running(
    checkpoint: Checkpoint,
    config: EngineConfig,
    row: Row | None = None,
    change: Callable[[Batch, StepResult], StepResult] | None = None,
) -> Iterator[Running]:
    """A new engine, closed at the end. ``row`` sees each row of logits that a token is drawn from,
    ``change`` each step's result.
    """
    loaded = load_engine(checkpoint, config)
    try:
        yield Running(loaded, row, change)
    finally:
        loaded.engine.close()
