"""The loop that ties the rooms together: schedule → execute → sample → commit → deliver."""

from __future__ import annotations

import gc
import logging
import random
from array import array
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from octavo.engine.clock import Clock
from octavo.engine.draw import Drawn, draw
from octavo.engine.leap import Leap, leap, takes_leaps
from octavo.engine.outputs import Delta
from octavo.engine.pace import Pace
from octavo.engine.stats import EngineStats
from octavo.engine.text import NoText, Text, TextFactory
from octavo.executor.base import Executor, StepResult
from octavo.sampling.params import InvalidParameter, SamplingParams
from octavo.sampling.sampler import Sampler, SamplerState, TokenLogprobs
from octavo.scheduler.batching import Scheduled
from octavo.scheduler.request import (
    AdmissionError,
    FinishReason,
    Outcome,
    Request,
    RequestRecord,
)
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence, Status
from octavo.spec_decode.speculator import Speculator

logger = logging.getLogger(__name__)


_FETCHING_WAIT = 0.005  # seconds at most, for the disk, when there is nothing else to do


class Step(NamedTuple):
    """What an observer sees of a step: after sampling, before anything is committed."""

    scheduled: Scheduled
    result: StepResult
    drawn: Drawn
    started: float  # clock seconds; later by what copying blocks took before computing
    ended: float


class Observer(Protocol):
    """Told of every step and every outcome, on the engine's thread. Must not block. What it raises
    goes to the log, the first time, and changes nothing for anybody else.
    """

    def on_step(self, step: Step) -> None: ...

    def on_end(self, record: RequestRecord) -> None:
        """``record.outcome`` has just been set. Rejected requests are told too, on the thread
        that submitted them.
        """
        ...


_OUTCOMES = {
    FinishReason.STOP: Outcome.FINISHED,
    FinishReason.LENGTH: Outcome.FINISHED,
    FinishReason.ABORT: Outcome.ABORTED,
    FinishReason.ERROR: Outcome.FAILED,
    FinishReason.REPLACED: Outcome.REJECTED,
    FinishReason.SHED: Outcome.REJECTED,
}


def _last_reason(record: RequestRecord) -> FinishReason:
    """Why a request is over whose sequences are: whoever was cut off was cut off together."""
    reasons = [reason for reason in record.finish_reasons if reason is not None]
    return next((each for each in reasons if _OUTCOMES[each] is not Outcome.FINISHED), reasons[0])


@dataclass(slots=True)
class _Output:
    """What the engine keeps of a sequence."""

    sampler: SamplerState
    text: Text
    max_tokens: int
    wants_logprobs: bool
    num_tokens: int = 0  # delivered
    num_pushed: int = 0  # that ``text`` has seen: as many, but for the time of a delivery
    reason: FinishReason | None = None  # said with the last delta
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # until the first delta takes it


class Engine:
    """Synchronous engine. Not thread-safe: one thread calls it (`AsyncEngine` owns one)."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        sampler: Sampler,
        clock: Clock,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        text: TextFactory = NoText,
        max_logprobs: int = 20,
        seed: int | None = None,
        speculator: Speculator | None = None,
        pace: Pace | None = None,
    ) -> None:
        """``pace`` learns from the steps; it must be there where they have a target
        (`SchedulerConfig.itl_target`).
        """
        target = scheduler.config.itl_target
        if pace is None and target is not None:
            raise ValueError("a target for steps takes predictions of them")
        self.executor = executor
        self.scheduler = scheduler
        self.sampler = sampler
        self.clock = clock
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_logprobs = max_logprobs
        self.speculator = speculator
        self.pace = pace
        self._seeds = random.Random(seed)  # for requests that bring none
        self.observers: list[Observer] = []
        self._text = text
        self._requests: dict[str, RequestRecord] = {}
        self._ended: list[Delta] = []  # last deltas of requests that ended between steps
        self._gone: list[RequestRecord] = []  # of them, and of those that ended in this step
        self._starts = 0  # how often all was started over
        self._alone: RequestRecord | None = None  # who alone could make the step fail
        self._accused: set[int] = set()  # ids of the observers whose failure was logged
        self._stats = EngineStats(kv_blocks=scheduler.kv.pool.num_blocks, itl_target=target)
        if scheduler.kv.tiers is not None:
            scheduler.kv.tiers.arena = executor

    # Requests

    def check(self, request: Request) -> Request:
        """The request as it will run: parameters validated, seed decided, the prompt an array of C
        ints (the same one, if it is such). Raises `AdmissionError` with the arithmetic or
        `InvalidParameter` if it can never run.

        Reads only what does not change, so any thread may call it.
        """
        policy = self.scheduler.policy
        if request.priority != 0 and "priority" not in policy.request_fields:
            raise InvalidParameter(
                "priority",
                f"priority {request.priority} has no effect under the policy {policy.name}",
            )
        params = request.params.validated(self.vocab_size, self.max_logprobs)
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        request = replace(request, params=params)
        self._check_minimum(params, self.scheduler.admission.check(request))
        # Numbers and not objects: the collector need not look at each token of all who wait.
        prompt = request.prompt_token_ids
        numbers = isinstance(prompt, array) and prompt.typecode == "i"
        if numbers:
            ids = np.asarray(prompt)
            edges = int(ids.min()), int(ids.max())
        else:
            edges = min(prompt), max(prompt)
        for token_id in edges:
            if not 0 <= token_id < self.vocab_size:
                raise AdmissionError(
                    f"token id {token_id} in the prompt is outside 0 to {self.vocab_size - 1}",
                    "prompt",
                )
        if not numbers:
            request.prompt_token_ids = array("i", prompt)
        return request

    def _check_minimum(self, params: SamplingParams, max_tokens: int) -> None:
        """min_tokens must leave a token to draw, and room for all of them."""
        minimum = params.min_tokens
        if minimum > max_tokens:
            raise InvalidParameter(
                "min_tokens",
                f"min_tokens is {minimum}; the context has room for {max_tokens} new tokens",
            )
        if minimum == 0:
            return
        ending = params.ending_ids(self.eos_token_ids)
        never = ending.union(params.banned_token_ids)
        allowed = params.allowed_token_ids
        if len(never) >= self.vocab_size if allowed is None else never.issuperset(allowed):
            raise InvalidParameter(
                "min_tokens",
                f"min_tokens is {minimum}, but every token that may be drawn ends the output",
            )

    def add_request(self, request: Request, arrival: float | None = None) -> RequestRecord:
        """Queue a request; it joins the next step. Raises as `check` does, and when the queue is
        full (`AdmissionError` with ``retryable``). The record is the live one, filled as it runs.
        """
        record = self.new_record(request, arrival)
        try:
            request = self.check(request)
            replaced = self.scheduler.admission.find_places([record])
            self.admit(request, record)
        except ValueError as error:
            self.reject(record, error)
            raise
        except Exception as error:
            self.refuse(record, error)
            raise
        self.scheduler.admission.enter([record], replaced)
        for other in replaced:
            self.replace(other.request_id)
        return record

    def new_record(self, request: Request, arrival: float | None = None) -> RequestRecord:
        return RequestRecord(
            request.request_id,
            self.clock.now() if arrival is None else arrival,
            len(request.prompt_token_ids),
            request.params.n,
            request.params.max_tokens,
            client=request.client,
            priority=request.priority,
            weight=request.weight,
            target=request.target,
            cache_salt=request.cache_salt,
            params=request.params,
        )

    def reject(self, record: RequestRecord, error: Exception) -> None:
        record.error = str(error)
        self._close(record, Outcome.REJECTED)

    def refuse(self, record: RequestRecord, error: Exception) -> Delta:
        """End a request that passed `check` and still could not be queued."""
        record.error = str(error)
        self._close(record, Outcome.FAILED)
        return Delta(record.request_id, 0, "", [], finish_reason=FinishReason.ERROR, record=record)

    def admit(self, request: Request, record: RequestRecord) -> None:
        """Queue a request that has passed `check`."""
        if request.request_id in self._requests:
            raise AdmissionError(f"request id {request.request_id!r} is in use", "request_id")
        params = request.params
        max_tokens = self.scheduler.admission.check(request)
        ending_ids = params.ending_ids(self.eos_token_ids)
        outputs = [
            _Output(
                self.sampler.new_state(params, request.prompt_token_ids, ending_ids, choice),
                self._text(params, ending_ids),
                max_tokens,
                params.logprobs is not None,
            )
            for choice in range(params.n)
        ]
        for output in outputs:
            output.text.begin(request.begun)
        if params.prompt_logprobs is not None:
            outputs[0].prompt_logprobs = [None]
        self._requests[request.request_id] = record  # first: nobody runs whom we do not know
        try:
            self.scheduler.add(
                record, request.prompt_token_ids, max_tokens, self.clock.now(), outputs
            )
        except BaseException:
            del self._requests[request.request_id]
            raise
        self._stats.admitted += 1

    def abort(self, request_id: str) -> bool:
        """End a request now, whatever its state; its blocks are free on return. Its last Delta
        (finish_reason ABORT, with the record) comes out of the next `step`. False if unknown.
        """
        if request_id not in self._requests:
            return False
        self._end_between_steps(self._requests[request_id], FinishReason.ABORT)
        return True

    def replace(self, request_id: str) -> None:
        """End a request whose place in the queue another has taken, unless it has begun to run."""
        state = self._requests.get(request_id)
        if state is not None and state.scheduled is None:
            why = "the queue is full, and a more urgent request has taken its place"
            self._end_between_steps(state, FinishReason.REPLACED, why)

    def _end_between_steps(
        self, state: RequestRecord, reason: FinishReason, why: str | None = None
    ) -> None:
        try:
            self._end(state, reason, self._ended, why)
        except Exception as error:
            self._start_over(error, self._ended, guilty=None)
            self._end(state, reason, self._ended, why)

    def pause(self, request_id: str) -> None:
        """Keep a request from generating more until `resume`; its blocks go to others meanwhile.
        What it generates stays the same. No-op if unknown.
        """
        if (state := self._requests.get(request_id)) is not None:
            self.scheduler.pause(state)
            state.pauses += 1

    def resume(self, request_id: str) -> None:
        """It goes on from where it was. No-op if unknown."""
        if (state := self._requests.get(request_id)) is None:
            return
        try:
            self.scheduler.resume(state, self.clock.now())
        except Exception as error:
            self._start_over(error, self._ended, guilty=None)

    def has_work(self) -> bool:
        """Whether `step` has anything to run or to deliver."""
        return bool(self._ended or self.scheduler.has_work())

    # The loop

    def step(self) -> list[Delta]:
        """Run one step and return what it produced, in batch order. Never raises for a request's
        fault: a failed request's last Delta has finish_reason ERROR and the record its message.
        """
        deltas, self._ended = self._ended, []
        self._alone = None
        try:
            self._step(deltas)
            self._alone = None  # of what fails from here on, nobody is guilty
            self._let_go()
        except Exception as error:
            self._start_over(error, deltas, guilty=self._alone)
        return deltas

    def _let_go(self) -> None:
        """Of who has ended nothing is left once nobody refers to it. A state and its sequences
        refer to each other, and the collector may be long in coming.
        """
        for state in self._gone:
            state.sequences.clear()
        self._gone.clear()

    def _drop(self, state: RequestRecord) -> None:
        """The request has ended. Until the step ends, it may still refer to it."""
        self._gone.append(self._requests.pop(state.request_id))

    def _step(self, deltas: list[Delta]) -> None:
        started, starts = self.clock.now(), self._starts
        if self.pace is not None:
            self.pace.settle(started)
        for state, why in self.scheduler.shedding.due(started):
            self._end(state, FinishReason.SHED, deltas, why)
        self._alone = alone = self.scheduler.isolated
        scheduled = self.scheduler.schedule(started, self.speculator, self.pace)
        tiers, copying = self.scheduler.kv.tiers, 0.0
        if tiers is not None:
            before = self.clock.now()
            self._alone = None  # what cannot be copied is nobody's fault
            tiers.transfer()
            self._alone = alone
            copying = self.clock.now() - before
        if scheduled is None:
            # Nothing is computed where something is being loaded, either.
            reading = None if self.scheduler.prefilling else self.scheduler.kv.reading
            if self.scheduler.waiting.fetching and reading is not None:
                reading.wait(_FETCHING_WAIT)
            return
        if scheduled.drafts is not None and self.speculator is not None:
            scheduled.probabilities = self.speculator.probabilities(scheduled.decodes)
        ready = self.clock.now()
        try:
            result = self.executor.execute(scheduled.batch)
            computed = self.clock.now()
            states = [seq.output.sampler for seq in scheduled.samples]
            rejection = self.speculator is not None and self.speculator.rejection
            drawn = draw(self.sampler, scheduled, states, result, rejection=rejection)
        except Exception as error:
            logger.exception("a step of %d tokens failed", scheduled.batch.num_tokens)
            self._recover(scheduled, error, deltas)
            return
        if self._starts != starts:  # an abort meanwhile: what was scheduled is no more
            self._rewind(scheduled.samples)
            return
        sampled = self.clock.now()
        self.clock.advance(result.duration)
        now = self.clock.now()
        # Who learns what computing takes does not learn what copying took.
        began = started + copying
        step = Step(scheduled, result, drawn, began, now)
        for observer in self.observers:
            try:
                observer.on_step(step)
            except Exception:
                self._accuse(observer)
        failures = [(scheduled.samples[index], why) for index, why in drawn.errors.items()]
        for span, score in drawn.scores.items():
            if isinstance(score, str):
                failures.append((span.seq, score))
            else:
                span.seq.output.prompt_logprobs += score
        for seq, why in failures:
            self._end(seq.owner, FinishReason.ERROR, deltas, why)
        if self.speculator is not None:
            self.speculator.learn(scheduled, result, drawn.runs, now - began)
        self.scheduler.on_step(scheduled, now - began)
        self.scheduler.commit(scheduled, drawn.runs)
        self._deliver(scheduled, drawn, now, deltas)
        self._alone = None
        if tiers is not None:
            tiers.after_step()
        stats = self._stats
        ended = self.clock.now()
        stats.schedule_seconds += ready - started
        stats.sample_seconds += sampled - computed
        stats.deliver_seconds += ended - now
        stats.add_step(len(scheduled.decodes), scheduled.batch.num_tokens, ended - started)
        if self.pace is not None:
            if scheduled.chunks and stats.itl_target is not None:
                predicted = self.pace.predict(scheduled.batch)
                stats.add_paced(ended - began, predicted, self.pace.spread)
            self.pace.ran(scheduled.batch, began, None if self.has_work() else self.clock.now())

    def leap(self, until: float) -> Leap | None:
        """Take all steps at once that begin before ``until`` and of which is known before that the
        same sequences will draw a token each and nothing else will happen (engine/leap.py). All is
        then as if `step` had taken them, to the last digit, but that no Delta is made of them.

        None if the next step may be another, and always where numbers are computed.
        """
        if self._text is not NoText or self.speculator is not None or self._ended:
            return None
        observers = [observer for observer in self.observers if takes_leaps(observer)]
        if len(observers) < len(self.observers):
            return None
        taken = leap(self.executor, self.scheduler, self.sampler, self.clock, until)
        if taken is not None:
            self._stats.add_leap(len(taken.decodes), taken.seconds)
            for observer in observers:
                observer.on_leap(taken)
        return taken

    def _recover(self, scheduled: Scheduled, error: Exception, deltas: list[Delta]) -> None:
        """After a failed step: its requests run again, each alone; one that fails alone ends."""
        self._rewind(scheduled.sequences + scheduled.samples)
        if not self.scheduler.isolate(scheduled):
            for seq in scheduled.sequences:
                self._end(seq.owner, FinishReason.ERROR, deltas, f"the step failed: {error}")

    def _rewind(self, sequences: Items[Sequence]) -> None:
        """What was drawn and not delivered was not drawn."""
        for seq in sequences:
            output: _Output = seq.output
            output.sampler.rewind(output.sampler.num_generated - output.num_tokens)

    def _start_over(
        self, error: Exception, deltas: list[Delta], *, guilty: RequestRecord | None
    ) -> None:
        """After a failure outside of the step's computation, which may have left anything half
        done (memory can run out anywhere): what was delivered counts and nothing else. The cache
        is emptied and everything not delivered is computed again, by requests that run alone at
        first, as after a failed step. Failed are those of which it is not certain what was
        delivered, and the one that is ``guilty``, as it was alone in the step that failed.
        """
        logger.exception("the engine starts over", exc_info=error)
        self._starts += 1
        cut_off: dict[str, FinishReason] = {}
        for request_id, state in self._requests.items():
            for seq in state.sequences:
                output: _Output = seq.output
                if output.reason is not None:
                    self._forget(seq)
                    state.finish_reasons[seq.choice] = output.reason
                    seq.status = Status.FINISHED
                    if _OUTCOMES[output.reason] is not Outcome.FINISHED:
                        cut_off[request_id] = output.reason
                    continue
                self._rewind([seq])
                del seq.token_ids[state.prompt_tokens + output.num_tokens :]
                self._forget(seq)
                if output.prompt_logprobs is not None:
                    seq.num_scored = len(output.prompt_logprobs) - 1
                if output.num_pushed != output.num_tokens:
                    cut_off.setdefault(request_id, FinishReason.ERROR)
        self.scheduler.start_over(self._requests.values())
        for request_id, state in [*self._requests.items()]:
            if state.num_unfinished == 0:
                if state.outcome is None:
                    self._close(state, _OUTCOMES[_last_reason(state)])
                self._drop(state)
            elif state is guilty or request_id in cut_off:
                reason = cut_off.get(request_id, FinishReason.ERROR)
                why = f"the step failed: {error!r}" if reason is FinishReason.ERROR else None
                self._end(state, reason, deltas, state.error or why)

    def _deliver(self, scheduled: Scheduled, drawn: Drawn, now: float, deltas: list[Delta]) -> None:
        """One Delta for every run of tokens, cut where a stop ends it; who is done leaves."""
        logprobs = drawn.logprobs
        generated = 0
        for index, (seq, run) in enumerate(zip(scheduled.samples, drawn.runs, strict=True)):
            output: _Output = seq.output
            if output.reason is not None:
                continue
            owner = seq.owner
            record = owner
            reason: FinishReason | None = None
            output.num_pushed += len(run)
            try:
                text, count, finished, stop_reason = output.text.push(run)
                num_tokens = output.num_tokens + count
                if finished:
                    reason = FinishReason.STOP
                elif num_tokens >= output.max_tokens:
                    text += output.text.finish()
                    reason = FinishReason.LENGTH
            except Exception as error:
                logger.exception("request %r: no text", record.request_id)
                self._end(owner, FinishReason.ERROR, deltas, f"its tokens are no text: {error!r}")
                continue
            beyond = len(run) - count
            if beyond:
                run = run[:count]
            last = reason is not None and owner.num_unfinished == 1
            deltas.append(
                Delta(
                    owner.request_id,
                    seq.choice,
                    text,
                    run,
                    logprobs[index][:count] if output.wants_logprobs else None,  # type: ignore
                    reason,
                    stop_reason,
                    output.prompt_logprobs,
                    record if last else None,
                    now,
                )
            )
            # Delivered: what fails from here on changes nothing of it.
            output.num_tokens = output.num_pushed = num_tokens
            output.prompt_logprobs = None
            output.reason = reason
            record.completion_tokens += count
            record.last_token = now
            if record.first_token is None:
                record.first_token = now
            generated += count
            if scheduled.drafts and index < len(scheduled.drafts) and scheduled.drafts[index]:
                branches = scheduled.branches.get(index, ())
                guesses = [scheduled.drafts[index], *(branch.token_ids for branch in branches)]
                self._stats.add_draft(record, guesses, run)
            if reason is not None:
                self._leave(seq, beyond)
                self.scheduler.finish(seq, reason)
                if last:
                    self._close(record, Outcome.FINISHED, now)
                    self._drop(owner)
        self._stats.generation_tokens += generated

    def _leave(self, seq: Sequence, beyond: int = 0) -> None:
        """The sequence has ended, before the last ``beyond`` of its tokens: no more drafts."""
        if self.speculator is not None:
            self.speculator.end(seq, beyond)

    def _forget(self, seq: Sequence) -> None:
        """The sequence has not ended, but nothing of it is computed any more."""
        if self.speculator is not None:
            self.speculator.forget(seq)

    def _end(
        self,
        state: RequestRecord,
        reason: FinishReason,
        deltas: list[Delta],
        error: str | None = None,
    ) -> None:
        """End what is left of a request, with a last delta for each unfinished sequence."""
        record = state
        if record.outcome is not None:
            return
        record.error = error
        unfinished = [seq for seq in state.sequences if seq.output.reason is None]
        for seq in unfinished:
            deltas.append(
                Delta(
                    record.request_id,
                    seq.choice,
                    self._held_back(seq),
                    [],
                    finish_reason=reason,
                    record=record if seq is unfinished[-1] else None,
                )
            )
            seq.output.reason = reason
        self.scheduler.end(state, reason)
        for seq in unfinished:
            self._leave(seq)
        self._close(record, _OUTCOMES[reason])
        self._drop(state)

    def _held_back(self, seq: Sequence) -> str:
        """The text that had waited for more, unless there is none to be had."""
        output: _Output = seq.output
        if output.num_pushed != output.num_tokens:
            return ""  # it contains what was not delivered
        output.num_pushed = -1  # until it is delivered, it is in doubt
        try:
            return output.text.finish()
        except Exception:
            logger.exception("request %r: no text", seq.owner.request_id)
            return ""

    def _close(self, record: RequestRecord, outcome: Outcome, now: float | None = None) -> None:
        """The request's one outcome."""
        if record.outcome is not None:
            raise RuntimeError(f"request {record.request_id!r} ended twice")
        record.finished = self.clock.now() if now is None else now
        record.outcome = outcome
        for observer in self.observers:
            try:
                observer.on_end(record)
            except Exception:
                self._accuse(observer)

    def _accuse(self, observer: Observer) -> None:
        """Log what an observer has just raised, once: it may do so at every step."""
        if id(observer) not in self._accused:
            self._accused.add(id(observer))
            logger.exception("%r must not raise; it is told of what comes", observer)

    def give_up(self, error: str) -> None:
        """Nothing will run any more, whatever state it is in: everybody's one outcome."""
        for state in self._requests.values():
            if state.outcome is None:
                state.error = error
                self._close(state, Outcome.FAILED)
        self._requests.clear()
        self.scheduler.waiting.clear()

    # What is going on

    @property
    def num_requests(self) -> int:
        """Those that have been admitted and have not ended."""
        return len(self._requests)

    @property
    def step_seconds(self) -> float:
        """Of all steps that have been delivered."""
        return self._stats.step_seconds

    def stats(self) -> EngineStats:
        return self._stats.now(self.scheduler, self.speculator)

    def check_integrity(self) -> None:
        """Free + referenced blocks = all blocks, references equal the tables, every request is
        somewhere; `RuntimeError` otherwise. Nearly free when the engine is idle.
        """
        if self.speculator is not None:
            self.speculator.check_integrity()
        if not self._requests:
            self.scheduler.check_idle()
            return
        self.scheduler.check_integrity()

    def close(self) -> None:
        """End every request and give the executor's memory back."""
        for state in list(self._requests.values()):
            self._end(state, FinishReason.ABORT, self._ended)
        self._let_go()
        if self.speculator is not None:
            self.speculator.close()
        self.flush()
        if (tiers := self.scheduler.kv.tiers) is not None:
            tiers.close()
        self.executor.close()
        gc.unfreeze()  # what was loaded (engine/load.py) circles, and may be collected now

    def flush(self) -> None:
        """Write what is cached to the tier on disk, if there is one; it takes a few seconds at
        most.
        """
        if (tiers := self.scheduler.kv.tiers) is not None:
            try:
                tiers.flush(self.scheduler.kv.index)
            except Exception:
                logger.exception("the prefix cache could not be written")
