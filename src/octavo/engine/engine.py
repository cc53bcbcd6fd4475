"""The engine's loop: schedule → execute → sample → commit → deliver."""

from __future__ import annotations

import gc
import logging
import random
from array import array
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from octavo.engine.clock import Clock
from octavo.engine.draw import Drawn, draw
from octavo.engine.fault_isolation import OUTCOMES, retry_alone, rewind, start_over
from octavo.engine.leap import Leap, foresees, leap
from octavo.engine.outputs import Delta, SequenceOutput
from octavo.engine.stats import EngineStats
from octavo.engine.step_time import StepTimePredictor
from octavo.executor.base import Executor, StepResult
from octavo.loader.base import Tokenizer
from octavo.sampling.params import InvalidParameter, SamplingParams
from octavo.sampling.sampler import Sampler
from octavo.scheduler.batching import Scheduled
from octavo.scheduler.request import AdmissionError, FinishReason, Outcome, Request, RequestRecord
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence
from octavo.spec_decode.speculator import Speculator

logger = logging.getLogger(__name__)

_FETCHING_WAIT = 0.005  # seconds at most to wait for the disk when there is nothing else to do


class Step(NamedTuple):
    """What an observer is told of a step, after sampling and before anything is committed."""

    scheduled: Scheduled
    result: StepResult
    drawn: Drawn
    started: float  # clock seconds; copying blocks before computing is left out
    ended: float


class Observer(Protocol):
    """Is told of every step and every outcome, on the engine's thread, and must not block. What it
    raises is logged, the first time, and changes nothing else.
    """

    def on_step(self, step: Step) -> None: ...

    def on_end(self, record: RequestRecord) -> None:
        """Called when ``record.outcome`` has just been set; for rejected requests on the thread
        that submitted them.
        """
        ...


class Engine:
    """A synchronous engine. Not thread-safe: one thread calls it (`AsyncEngine` owns one)."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        sampler: Sampler,
        clock: Clock,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        tokenizer: Tokenizer | None = None,
        max_logprobs: int = 20,
        seed: int | None = None,
        speculator: Speculator | None = None,
        step_times: StepTimePredictor | None = None,
    ) -> None:
        """``tokenizer``: None in simulations, whose tokens are no text. ``step_times`` must predict
        single steps where they have a target (`SchedulerConfig.itl_target_s`).
        """
        target = scheduler.config.itl_target_s
        self.step_times = step_times or StepTimePredictor()
        if target is not None and not self.step_times.predicts_steps:
            raise ValueError("a target for steps takes predictions of them")
        scheduler.set_rates(self.step_times)
        self.executor = executor
        self.scheduler = scheduler
        self.sampler = sampler
        self.clock = clock
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_logprobs = max_logprobs
        self.speculator = speculator
        self.observers: list[Observer] = []
        self.requests: dict[str, RequestRecord] = {}  # admitted and not ended
        self.culprit: RequestRecord | None = None  # the one request that can make the step fail
        self.num_starts = 0  # how often the engine has started over
        self.new_output = partial(SequenceOutput, tokenizer)
        self._has_text = tokenizer is not None
        self._seeds = random.Random(seed)  # for requests that bring none
        self._undelivered: list[Delta] = []  # last deltas of requests that ended between steps
        self._ended: list[RequestRecord] = []  # since the last step
        self._logged: set[int] = set()  # ids of the observers whose failure was logged
        self._stats = EngineStats(kv_blocks=scheduler.kv.pool.num_blocks, itl_target_s=target)
        if scheduler.kv.connectors is not None:
            scheduler.kv.connectors.register_kv_caches(executor)

    # Requests

    def check(self, request: Request) -> Request:
        """Return the request as it will run: parameters validated, seed decided, the prompt an
        array of C ints (the same one, if it is such). Raise `AdmissionError` with the arithmetic or
        `InvalidParameter` if it can never run.

        This reads only what does not change, so any thread may call it.
        """
        policy, priority = self.scheduler.policy, request.scheduling.priority
        if priority != 0 and "priority" not in policy.request_fields:
            raise InvalidParameter(
                "priority", f"priority {priority} has no effect under the policy {policy.name}"
            )
        params = request.params.validated(self.vocab_size, self.max_logprobs)
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        request = replace(request, params=params)
        self._check_minimum(params, self.scheduler.admission.check(request))
        ids = np.asarray(request.prompt_token_ids)  # which may not fit into C ints
        for token_id in int(ids.min()), int(ids.max()):
            if not 0 <= token_id < self.vocab_size:
                raise AdmissionError(
                    f"token id {token_id} in the prompt is outside 0 to {self.vocab_size - 1}",
                    "prompt",
                )
        # Numbers and not objects: the collector need not look at each token of waiting requests.
        prompt = request.prompt_token_ids
        if not (isinstance(prompt, array) and prompt.typecode == "i"):
            request.prompt_token_ids = array("i", prompt)
        return request

    def _check_minimum(self, params: SamplingParams, max_tokens: int) -> None:
        """Raise `InvalidParameter` unless min_tokens leaves a token to draw, and space for all."""
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
        """Queue a request; it joins the next step. Raise as `check` does, and when the queue is
        full (`AdmissionError` with ``retryable``). The record is the live one, filled as it runs.
        """
        record = self.new_record(request, arrival)
        try:
            request = self.check(request)
            replaced = self.scheduler.admission.find_places([record])
            self.admit(request, record)
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
            scheduling=request.scheduling,
            params=request.params,
        )

    def refuse(
        self, record: RequestRecord, error: Exception, outcome: Outcome | None = None
    ) -> Delta:
        """End a request that is not to be queued, or that could not be. ``outcome``: None: REJECTED
        for a `ValueError`, else FAILED.
        """
        record.error = str(error)
        if outcome is None:
            outcome = Outcome.REJECTED if isinstance(error, ValueError) else Outcome.FAILED
        self.close_record(record, outcome)
        return Delta(record.request_id, 0, "", [], finish_reason=FinishReason.ERROR, record=record)

    def admit(self, request: Request, record: RequestRecord) -> None:
        """Queue a request that has passed `check`."""
        if request.request_id in self.requests:
            raise AdmissionError(f"request id {request.request_id!r} is in use", "request_id")
        params = request.params
        max_tokens = self.scheduler.admission.check(request)
        ending_ids = params.ending_ids(self.eos_token_ids)
        outputs = []
        for choice in range(params.n):
            sampler = self.sampler.new_state(params, request.prompt_token_ids, ending_ids, choice)
            outputs.append(self.new_output(params, ending_ids, sampler, request.begun))
        if params.prompt_logprobs is not None:
            outputs[0].prompt_logprobs = [None]
        self.requests[record.request_id] = record  # first: no request runs that is not known here
        try:
            prompt = request.prompt_token_ids
            self.scheduler.add(record, prompt, max_tokens, self.clock.now(), outputs)
        except BaseException:
            del self.requests[record.request_id]
            raise
        self._stats.admitted += 1

    def abort(self, request_id: str) -> bool:
        """End a request now, whatever its state; its blocks are free on return. Its last Delta
        (finish_reason ABORT, with the record) comes out of the next `step`. Return False if it is
        unknown.
        """
        if (record := self.requests.get(request_id)) is None:
            return False
        self._end_between_steps(record, FinishReason.ABORT)
        return True

    def replace(self, request_id: str) -> None:
        """End a request whose place in the queue another has taken, unless it has begun to run."""
        record = self.requests.get(request_id)
        if record is not None and record.scheduled is None:
            why = "the queue is full, and a more urgent request has taken its place"
            self._end_between_steps(record, FinishReason.REPLACED, why)

    def _end_between_steps(
        self, record: RequestRecord, reason: FinishReason, why: str | None = None
    ) -> None:
        try:
            self.end(record, reason, self._undelivered, why)
        except Exception as error:
            start_over(self, error, self._undelivered)
            self.end(record, reason, self._undelivered, why)

    def pause(self, request_id: str) -> None:
        """Keep a request from generating more until `resume`; its blocks go to others meanwhile.
        Its output does not change. Do nothing if it is unknown.
        """
        if (record := self.requests.get(request_id)) is not None:
            self.scheduler.pause(record)
            record.pauses += 1

    def resume(self, request_id: str) -> None:
        """Let a paused request go on. Do nothing if it is unknown."""
        if (record := self.requests.get(request_id)) is None:
            return
        try:
            self.scheduler.resume(record, self.clock.now())
        except Exception as error:
            start_over(self, error, self._undelivered)

    def has_work(self) -> bool:
        """Return whether `step` has anything to run or to deliver."""
        return bool(self._undelivered or self.scheduler.has_work())

    # The loop

    def step(self) -> list[Delta]:
        """Run one step and return what it produced, in batch order. A failing request raises
        nothing: its last Delta has finish_reason ERROR and the record its message.
        """
        deltas, self._undelivered = self._undelivered, []
        self.culprit = None
        try:
            self._step(deltas)
            self.culprit = None  # from here on, no request makes anything fail
            self._release()
        except Exception as error:
            start_over(self, error, deltas, self.culprit)
        self.scheduler.kv.events.deliver()
        return deltas

    def _step(self, deltas: list[Delta]) -> None:
        clock, scheduler, speculator = self.clock, self.scheduler, self.speculator
        started, num_starts = clock.now(), self.num_starts
        step_times = self.step_times if self.step_times.predicts_steps else None
        if step_times is not None:
            step_times.on_begin(started)

        # Schedule
        for record, why in scheduler.shedding.due(started):
            self.end(record, FinishReason.SHED, deltas, why)
        self.culprit = isolated = scheduler.isolated
        scheduled = scheduler.schedule(started, speculator)
        connectors, copying = scheduler.kv.connectors, 0.0
        if connectors is not None:
            before = clock.now()
            self.culprit = None  # no request makes copying fail
            connectors.transfer()
            self.culprit = isolated
            copying = clock.now() - before
        if scheduled is None:
            # There is nothing to compute while a prompt's blocks are being loaded, either.
            prefetcher = None if scheduler.prefilling else scheduler.kv.prefetcher
            if scheduler.waiting.fetching and prefetcher is not None:
                prefetcher.wait(_FETCHING_WAIT)
            return
        if scheduled.drafts is not None and speculator is not None:
            scheduled.probabilities = speculator.probabilities(scheduled.decodes)
        ready = clock.now()

        # Execute and sample
        try:
            result = self.executor.execute(scheduled.batch)
            computed = clock.now()
            states = [seq.output.sampler for seq in scheduled.samples]
            rejection = speculator is not None and speculator.rejection
            drawn = draw(self.sampler, scheduled, states, result, rejection=rejection)
        except Exception as error:
            retry_alone(self, scheduled, error, deltas)
            return
        if self.num_starts != num_starts:  # after an abort meanwhile, nothing is scheduled any more
            rewind(scheduled.samples)
            return
        sampled = clock.now()
        clock.advance(result.duration)
        now = clock.now()
        began = started + copying  # step times are learned without copying
        step = Step(scheduled, result, drawn, began, now)
        for observer in self.observers:
            try:
                observer.on_step(step)
            except Exception:
                self._log_once(observer)

        # Commit and deliver
        for index, why in drawn.errors.items():
            self.end(scheduled.samples[index].owner, FinishReason.ERROR, deltas, why)
        for span, score in drawn.scores.items():
            if isinstance(score, str):
                self.end(span.seq.owner, FinishReason.ERROR, deltas, score)
            else:
                span.seq.output.prompt_logprobs += score
        if speculator is not None:
            speculator.learn(scheduled, result, drawn.runs, now - began)
        scheduler.on_step(scheduled, now - began)
        scheduler.commit(scheduled, drawn.runs)
        self._deliver(scheduled, drawn, now, deltas)
        self.culprit = None
        if connectors is not None:
            connectors.after_step()
        ended = clock.now()
        stats = self._stats
        stats.schedule_seconds += ready - started
        stats.sample_seconds += sampled - computed
        stats.deliver_seconds += ended - now
        stats.add_steps(len(scheduled.decodes), scheduled.batch.num_tokens, (ended - started,))
        if step_times is not None:
            if scheduled.chunks and stats.itl_target_s is not None:
                predicted = step_times.predict(scheduled.batch)
                stats.add_paced(ended - began, predicted, step_times.spread)
            idle = None if self.has_work() else clock.now()
            step_times.on_batch(scheduled.batch, began, idle)

    def _deliver(self, scheduled: Scheduled, drawn: Drawn, now: float, deltas: list[Delta]) -> None:
        """Add a Delta for every run of tokens, cut where a stop ends it; end finished sequences."""
        logprobs, drafts = drawn.logprobs, scheduled.drafts or ()
        generated = 0
        for index, (seq, run) in enumerate(zip(scheduled.samples, drawn.runs, strict=True)):
            record = seq.owner
            if record.finish_reasons[seq.choice] is not None:
                continue
            output: SequenceOutput = seq.output
            output.in_doubt = True
            try:
                text, count, reason, stop_reason = output.push(run)
                num_tokens = output.num_tokens + count
                if reason is None and num_tokens >= record.max_tokens:  # type: ignore[operator]
                    text += output.finish()
                    reason = FinishReason.LENGTH
            except Exception as error:
                logger.exception("request %r: no text", record.request_id)
                self.end(record, FinishReason.ERROR, deltas, f"its tokens are no text: {error!r}")
                continue
            beyond = len(run) - count
            if beyond:
                run = run[:count]
            last = reason is not None and record.num_unfinished == 1
            wants_logprobs = record.params.logprobs is not None
            deltas.append(
                Delta(
                    record.request_id,
                    seq.choice,
                    text,
                    run,
                    logprobs[index][:count] if wants_logprobs else None,  # type: ignore
                    reason,
                    stop_reason,
                    output.prompt_logprobs,
                    record if last else None,
                    now,
                )
            )
            # Delivered: a later failure changes nothing about it.
            output.num_tokens, output.in_doubt = num_tokens, False
            output.prompt_logprobs = None
            record.finish_reasons[seq.choice] = reason
            record.completion_tokens += count
            record.last_token = now
            if record.first_token is None:
                record.first_token = now
            generated += count
            if index < len(drafts) and drafts[index]:
                branches = scheduled.branches.get(index, ())
                guesses = [drafts[index], *(branch.token_ids for branch in branches)]
                self._stats.add_draft(record, guesses, run)
            if reason is not None:
                if self.speculator is not None:
                    self.speculator.end(seq, beyond)
                self.scheduler.finish(seq, reason)
                if last:
                    self.close_record(record, Outcome.FINISHED, now)
                    self.drop(record)
        self._stats.generation_tokens += generated

    def leap(self, until: float) -> Leap | None:
        """Take all steps at once that begin before ``until`` if it is known beforehand that the
        same sequences will draw a token each and nothing else will happen (engine/leap.py). The
        result is as if `step` had taken them, to the last digit, except that no Delta is made.

        Return None if the next step may be different, and always if numbers are computed.
        """
        if self._has_text or self.speculator is not None or self._undelivered:
            return None
        if not all(foresees(observer, "on_leap", "on_step") for observer in self.observers):
            return None
        taken = leap(self.executor, self.scheduler, self.sampler, self.clock, until)
        if taken is not None:
            decodes = len(taken.decodes)
            self._stats.add_steps(decodes, decodes, taken.seconds)
            self._stats.generation_tokens += decodes * taken.steps
            for observer in self.observers:
                observer.on_leap(taken)  # type: ignore[attr-defined]
        return taken

    # The end of a request

    def end(
        self,
        record: RequestRecord,
        reason: FinishReason,
        deltas: list[Delta],
        error: str | None = None,
    ) -> None:
        """End what is left of a request, with a last delta for each unfinished sequence."""
        if record.outcome is not None:
            return
        record.error = error
        unfinished = [seq for seq in record.sequences if record.finish_reasons[seq.choice] is None]
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
            record.finish_reasons[seq.choice] = reason
        self.scheduler.end(record, reason)
        if self.speculator is not None:
            for seq in unfinished:
                self.speculator.end(seq)
        self.close_record(record, OUTCOMES[reason])
        self.drop(record)

    def _held_back(self, seq: Sequence) -> str:
        """Return the text that was held back; "" if it may contain what was not delivered."""
        output: SequenceOutput = seq.output
        if output.in_doubt:
            return ""
        output.in_doubt = True  # until it is delivered
        try:
            return output.finish()
        except Exception:
            logger.exception("request %r: no text", seq.owner.request_id)
            return ""

    def close_record(
        self, record: RequestRecord, outcome: Outcome, now: float | None = None
    ) -> None:
        """Set a request's one outcome."""
        if record.outcome is not None:
            raise RuntimeError(f"request {record.request_id!r} ended twice")
        record.finished = self.clock.now() if now is None else now
        record.outcome = outcome
        for observer in self.observers:
            try:
                observer.on_end(record)
            except Exception:
                self._log_once(observer)

    def _log_once(self, observer: Observer) -> None:
        """Log what an observer has just raised, the first time: it may raise at every step."""
        if id(observer) not in self._logged:
            self._logged.add(id(observer))
            logger.exception("%r must not raise; it is told of what comes", observer)

    def drop(self, record: RequestRecord) -> None:
        """Forget a request that has ended. Until the step ends, it may still be referred to."""
        self._ended.append(self.requests.pop(record.request_id))

    def _release(self) -> None:
        """Break the reference cycles of requests that have ended, so that they are freed at once
        and not when the garbage collector comes.
        """
        for record in self._ended:
            record.sequences.clear()
        self._ended.clear()

    def fail_all(self, error: str) -> None:
        """End all requests, whatever state the engine is in: nothing will run any more."""
        for record in self.requests.values():
            if record.outcome is None:
                record.error = error
                self.close_record(record, Outcome.FAILED)
            record.sequences.clear()
        self.requests.clear()
        self.scheduler.waiting.clear()

    # State

    @property
    def step_seconds(self) -> float:
        """The seconds of all steps that have been delivered."""
        return self._stats.step_seconds

    def stats(self) -> EngineStats:
        return self._stats.now(self.scheduler, self.speculator)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless free + referenced blocks = all blocks, references equal the
        tables, and every request is somewhere. Nearly free when the engine is idle.
        """
        if self.speculator is not None:
            self.speculator.check_integrity()
        if not self.requests:
            self.scheduler.check_idle()
            return
        self.scheduler.check_integrity()

    def close(self) -> None:
        """End every request and give the executor's memory back."""
        for record in list(self.requests.values()):
            self.end(record, FinishReason.ABORT, self._undelivered)
        self._release()
        if self.speculator is not None:
            self.speculator.close()
        self.flush()
        if (connectors := self.scheduler.kv.connectors) is not None:
            connectors.shutdown()
        self.executor.close()
        gc.unfreeze()  # what was loaded (engine/load.py) has cycles, and may be collected now

    def flush(self) -> None:
        """Save what is cached to connectors that outlive the process; it takes a few seconds at
        most.
        """
        if (connectors := self.scheduler.kv.connectors) is not None:
            try:
                connectors.flush(self.scheduler.kv.index)
            except Exception:
                logger.exception("the prefix cache could not be written")
