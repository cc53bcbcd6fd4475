"""One answer, pass by pass: what was drafted, what the target thought of it, and what became of it.

The answer is drawn twice by the same engine, without drafts and with them, so that what speculation
saves is measured beside what its parts let expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, cast

from octavo.engine.engine import Step
from octavo.engine.load import LoadedEngine
from octavo.executor.base import Executor
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Outcome, Request, RequestRecord
from octavo.spec_decode.replay import agreement
from octavo.spec_decode.speculator import Speculator
from octavo.tools.verify.running import VerificationError, Watched


class Fate(Enum):
    """What became of a guess."""

    ACCEPTED = "accepted"
    REPLACED = "replaced"  # by the target's own token
    DISCARDED = "discarded"  # behind one that was replaced, or behind the answer's end


@dataclass(frozen=True, slots=True)
class Guess:
    token_id: int
    q: float  # the drafter's probability; 1 where it was certain
    p: float  # the target's, after all sampling parameters
    fate: Fate


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of the target. Times in seconds."""

    draft: list[Guess]
    alternatives: list[list[int]]  # guesses beside the draft
    run: list[int]  # the tokens that came of it; the last is the target's own
    own_p: float | None  # its probability; None in an alternative
    rows: int  # that the pass computed
    seconds: float  # in all
    computing: float  # of these, in the executor
    drafting: float  # and in the drafter

    @property
    def accepted(self) -> int:
        return sum(guess.fate is Fate.ACCEPTED for guess in self.draft)

    def cut(self, end: int) -> Pass:
        """Cut the pass at the run's token ``end``, counted from 1, which ended the answer: neither
        the guesses nor the target's own token behind it are part of the answer.
        """
        if end >= len(self.run):
            return self
        behind = [replace(guess, fate=Fate.DISCARDED) for guess in self.draft[end:]]
        return replace(self, draft=self.draft[:end] + behind, run=self.run[:end], own_p=None)

    def as_dict(self) -> dict[str, Any]:
        draft = [asdict(guess) | {"fate": guess.fate.value} for guess in self.draft]
        return asdict(self) | {"draft": draft}


@dataclass(slots=True)
class Passes:
    """An answer's passes behind its first token, which comes of reading the prompt."""

    first_token: int | None = None
    passes: list[Pass] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        first = [] if self.first_token is None else [self.first_token]
        return first + [token for each in self.passes for token in each.run]

    @property
    def tokens(self) -> int:
        return sum(len(each.run) for each in self.passes)

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.passes)


def summary(plain: Passes, guessed: Passes) -> dict[str, Any]:
    """Where the time went, and what was to be expected. Times in seconds."""
    passes = guessed.passes
    count = max(1, len(passes))
    drafted = sum(len(each.draft) for each in passes)
    accepted = sum(each.accepted for each in passes)
    longest = max((len(each.draft) for each in passes), default=0)
    tried = [sum(len(each.draft) > at for each in passes) for at in range(longest)]
    right = [sum(each.accepted > at for each in passes) for at in range(longest)]
    per_pass = guessed.tokens / count
    result: dict[str, Any] = {
        "tokens": guessed.tokens,
        "passes": len(passes),
        "tokens_per_pass": per_pass,
        "proposed": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_per_position": [n / of for n, of in zip(right, tried, strict=True)],
        "seconds": guessed.seconds,
        "drafting_seconds": sum(each.drafting for each in passes),
        "same_output": plain.token_ids == guessed.token_ids,
    }
    if not plain.tokens or not guessed.tokens:
        return result
    step = plain.seconds / plain.tokens  # of one row
    computing = sum(each.computing for each in plain.passes) / plain.tokens
    cost = sum(each.computing for each in passes) / count / computing
    extra = sum(each.seconds - each.drafting - step for each in passes)
    return result | {
        "plain_seconds_per_token": step,
        "passes_saved": guessed.tokens - len(passes),
        "saved_by_passes_seconds": (guessed.tokens - len(passes)) * step,
        "extra_rows_seconds": extra,
        "time_saved_seconds": guessed.tokens * step - guessed.seconds,
        "relative_cost_of_a_pass": cost,
        "theoretical_speed_up": per_pass / cost,
        "measured_speed_up": guessed.tokens * step / guessed.seconds,
    }


class Stepping:
    """Runs a request on an engine with a speculator, without it and with it."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._engine = loaded.engine
        if loaded.engine.speculator is None:
            raise ValueError("the engine has no speculator")
        self._speculator: Speculator = loaded.engine.speculator
        self._watched = Watched(self._engine.executor, None)
        self._engine.executor = cast(Executor, self._watched)
        self._engine.observers.append(self)
        self._found = Passes()
        self._numbers = 0

    def on_step(self, step: Step) -> None:
        scheduled = step.scheduled
        seconds = step.ended - step.started
        if not scheduled.decodes:
            if step.drawn.runs:
                self._found.first_token = step.drawn.runs[0][0]
            return
        run = step.drawn.runs[0]
        draft = scheduled.drafts[0] if scheduled.drafts else []
        others = [branch.token_ids for branch in scheduled.branches.get(0, [])]
        guesses, own_p = self._guesses(step, draft, run)
        drafting = 0.0
        if self._engine.speculator is None:
            # It learns from these steps what a pass of one row takes.
            self._speculator.times.observe(1, seconds, prompts=False)
        else:
            drafting = self._speculator.spent
        self._found.passes.append(
            Pass(
                guesses,
                others,
                list(run),
                own_p,
                scheduled.batch.num_tokens,
                seconds,
                step.result.duration,
                drafting,
            )
        )

    def on_end(self, record: RequestRecord) -> None: ...

    def _guesses(
        self, step: Step, draft: list[int], run: list[int]
    ) -> tuple[list[Guess], float | None]:
        scheduled, sampler = step.scheduled, self._engine.sampler
        seq = scheduled.decodes[0]
        state = seq.output.sampler.fork(seq.choice)
        state.rewind(len(run))
        given = (scheduled.probabilities or [None])[0]
        accepted = agreement(draft, run)
        guesses: list[Guess] = []
        own_p = None
        for at in range(len(draft) + 1):
            row = self._watched.row(scheduled.sample_rows[0] + at)
            p = sampler.probabilities(row.reshape(1, -1), [0], [state])[0]
            if at == len(run) - 1 and at == accepted:
                own_p = float(p[run[at]])
            if at == len(draft):
                break
            token = draft[at]
            fate = Fate.ACCEPTED
            if at >= accepted:
                fate = Fate.REPLACED if at == accepted < len(run) else Fate.DISCARDED
            q = 1.0 if given is None else float(given[at][token])
            guesses.append(Guess(token, q, float(p[token]), fate))
            state.record(token)
        return guesses, own_p

    def plain(self, prompt: list[int], params: SamplingParams) -> Passes:
        """Without drafts."""
        self._engine.speculator = None
        *_, found = self._run(prompt, params)
        return found

    def guessed(self, prompt: list[int], params: SamplingParams) -> Iterator[Passes]:
        """With drafts: what has been found so far, after each pass."""
        self._engine.speculator = self._speculator
        return self._run(prompt, params)

    def _run(self, prompt: list[int], params: SamplingParams) -> Iterator[Passes]:
        self._found = found = Passes()
        self._numbers += 1
        request = Request(
            request_id=f"answer {self._numbers}", prompt_token_ids=prompt, params=params
        )
        record = self._engine.add_request(request)
        yield found
        try:
            while self._engine.has_work():
                before = len(found.passes)
                deltas = self._engine.step()
                for delta in deltas:
                    if len(found.passes) > before:
                        found.passes[-1] = found.passes[-1].cut(len(delta.token_ids))
                if len(found.passes) > before:
                    yield found
            if record.outcome is Outcome.FAILED:
                raise VerificationError(record.error)
        finally:
            self._engine.abort(request.request_id)
            while self._engine.has_work():
                self._engine.step()
