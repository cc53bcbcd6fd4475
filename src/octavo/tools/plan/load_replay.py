"""A load put through an engine: requests arrive at their times, and records come out.

Real engine and simulated engine run the same loop; their clocks and executors differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any, Protocol

import numpy as np

from octavo.engine.engine import Engine
from octavo.engine.leap import Leap
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import (
    AdmissionError,
    FinishReason,
    LatencyTarget,
    Outcome,
    Request,
    RequestRecord,
    SchedulingParams,
)
from octavo.tools.plan.slo import promised
from octavo.tools.workload.datasets import Sample, draws
from octavo.tools.workload.metrics import Record

_STOP = 0  # a token that ends an answer
# Why a request was refused that might have been served later.
QUEUE_FULL = "queue full"
SHED = "shed"


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a load. Times are seconds from its start, in the engine's clock."""

    records: list[Record]  # by index, as the requests arrived, not as they ended
    duration: float  # to the end of the last request
    idle: float  # of it, without any request


class Watch(Protocol):
    """Looks at the engine now and then. Times are seconds from the start of the load."""

    next: float  # when it wants to look next: at the end of the step under way then

    def observe(self, engine: Engine, now: float, ended: int = 0) -> None:
        """After a step that ended ``now`` and ``ended`` requests with it; of many like ones before
        ``next`` only the first and the last. And after a time without any request, before the
        next is there.
        """
        ...


def prompt_token_ids(sample: Sample, seed: int, vocab_size: int) -> array[int]:
    """The sample's prompt; equal parts are equal tokens. (Thousands of prompts may wait.)"""
    drawn = np.concatenate([draws(seed, part.key, part.length) for part in sample.parts])
    return array("i", (drawn % vocab_size).astype(np.int32).tobytes())


def replay(
    engine: Engine,
    samples: Sequence[Sample],
    *,
    seed: int = 0,
    max_concurrency: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
    watch: Watch | None = None,
    leaps: bool = True,
    target: LatencyTarget | None = None,
) -> Replay:
    """Every sample at its ``arrival`` (in order), until all have ended, each promised ``target`` or
    what its class is, by which a policy may go. A class's priority and weight count under the
    policy that has them. Of the requests at most ``max_concurrency`` are with the engine at a
    time; others wait to be sent. ``progress`` is told how many have ended. ``leaps``: steps that
    are foreseen are taken at once (`Engine.leap`), with the same result.
    """
    clock = engine.clock
    start = clock.now()
    live: dict[str, Record] = {}
    last: dict[str, float] = {}
    records: list[Record] = []
    arrived = 0
    idle = 0.0
    most = max_concurrency or len(samples)
    room_since = 0.0  # for one more to be sent
    while True:
        while len(live) < most and (start + _due(samples, arrived)) <= clock.now():
            sent = max(_arrival(samples[arrived]), room_since)
            record = _begin(engine, samples[arrived], arrived, start, sent, seed, target)
            arrived += 1
            if record.reason:
                records.append(record)
            else:
                live[str(record.index)] = record
        if not engine.has_work():
            if arrived == len(samples):
                break
            began = clock.now()
            clock.sleep_until(start + _arrival(samples[arrived]))
            idle += clock.now() - began
            if watch:
                watch.observe(engine, clock.now() - start)
            continue
        due = _due(samples, arrived) if len(live) < most else inf
        until = start + min(due, watch.next if watch else inf)
        if leaps and (leap := engine.leap(until)):
            _record(leap, start, live, last)
            if watch:
                for time in dict.fromkeys((leap.times[1], leap.times[-1])):
                    watch.observe(engine, time - start)
            continue
        ended = 0
        for delta in engine.step():
            record, now = live[delta.request_id], clock.now() - start
            if delta.token_ids:
                if record.output_tokens:
                    record.itl.append(now - last[delta.request_id])
                record.output_tokens += len(delta.token_ids)
                last[delta.request_id] = now
            if delta.record is not None:
                _end(record, delta.record, start)
                if len(live) == most:
                    room_since = now
                records.append(live.pop(delta.request_id))
                ended += 1
                progress(len(records))
        if watch:
            watch.observe(engine, clock.now() - start, ended)
    records.sort(key=lambda record: record.index)
    return Replay(records, clock.now() - start, idle)


def _due(samples: Sequence[Sample], index: int) -> float:
    """When the sample of that index arrives; never, behind the last."""
    return _arrival(samples[index]) if index < len(samples) else inf


def _record(leap: Leap, start: float, live: dict[str, Record], last: dict[str, float]) -> None:
    """What the loop does with the deltas of steps, for many steps."""
    ends = [time - start for time in leap.times[1:]]
    between = array("d", [end - before for before, end in pairwise(ends)])
    steps, first, final = len(ends), ends[0], ends[-1]
    for seq in leap.decodes:
        name = seq.owner.request_id
        record = live[name]
        record.itl.append(first - last[name])
        record.itl.extend(between)
        record.output_tokens += steps
        last[name] = final


def _arrival(sample: Sample) -> float:
    return sample.arrival or 0.0


def _begin(
    engine: Engine,
    sample: Sample,
    index: int,
    start: float,
    sent: float,
    seed: int,
    target: LatencyTarget | None,
) -> Record:
    record = Record(index, False, sent, sample.prompt_len, 0, queue_time=sent - _arrival(sample))
    terms: dict[str, Any] = {"target": target}
    if (kind := sample.kind) is not None:
        record.kind, record.limits = kind.name, kind.limits
        terms["client"] = f"{kind.name} {sample.client}"
        if kind.limits is not None:
            terms["target"] = promised(kind.limits) if kind.limits else None
        for name in engine.scheduler.policy.request_fields:
            terms[name] = getattr(kind, name)
    params = SamplingParams(temperature=0.0, max_tokens=sample.output_len, ignore_eos=True)
    if sample.max_tokens is not None:  # a scripted sampler stops as soon as it may
        params = replace(
            params,
            max_tokens=max(sample.max_tokens, sample.output_len),
            min_tokens=sample.output_len - 1,
            stop_token_ids=(_STOP,),
        )
    prompt: Sequence[int] = range(sample.prompt_len)  # of what is refused for its length alone
    if len(prompt) < engine.scheduler.config.max_model_len:
        prompt = prompt_token_ids(sample, seed, engine.vocab_size)
    asked = SchedulingParams(**terms)
    request = Request(
        request_id=str(index), prompt_token_ids=prompt, params=params, scheduling=asked
    )
    try:
        engine.add_request(request, start + sent)
    except AdmissionError as error:
        record.reason = QUEUE_FULL if error.retryable else "rejected"
        record.rejected = error.retryable
        record.detail = str(error)
    return record


def _end(record: Record, outcome: RequestRecord, start: float) -> None:
    assert outcome.finished is not None
    record.success = outcome.outcome is Outcome.FINISHED
    record.latency = outcome.finished - outcome.arrival
    record.ttft = 0.0 if outcome.first_token is None else outcome.first_token - outcome.arrival
    if outcome.scheduled is not None:
        record.waited = outcome.scheduled - outcome.arrival
    record.cached_tokens = outcome.cached_tokens
    record.preemptions = outcome.preemptions
    if not record.success:
        record.rejected = outcome.outcome is Outcome.REJECTED  # shed from the queue
        record.reason = SHED if record.rejected else "failed"
        if FinishReason.REPLACED in outcome.finish_reasons:
            record.reason = QUEUE_FULL
        record.detail = outcome.error or ""
