"""A load put through an engine: requests arrive at their times, and records come out.

Real engine and simulated engine run the same loop; their clocks and executors differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.engine.engine import Engine
from octavo.sample.params import SamplingParams
from octavo.schedule.request import AdmissionError, Outcome, Request, RequestRecord
from octavo.workload.datasets import Sample, draws
from octavo.workload.metrics import Record

_STOP = 0  # a token that ends an answer
QUEUE_FULL = "queue full"  # why a request was refused that might have been served later


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a load. Times are seconds from its start, in the engine's clock."""

    records: list[Record]
    duration: float  # to the end of the last request
    idle: float  # of it, without any request


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
    watch: Callable[[Engine, float], None] = lambda engine, now: None,
) -> Replay:
    """Every sample at its ``arrival`` (in order), until all have ended. Of these at most
    ``max_concurrency`` are with the engine at a time; others wait to be sent. ``progress`` is told
    how many have ended, ``watch`` of every step's end.
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
        now = clock.now() - start
        while arrived < len(samples) and _arrival(samples[arrived]) <= now and len(live) < most:
            sent = max(_arrival(samples[arrived]), room_since)
            record = _begin(engine, samples[arrived], arrived, start, sent, seed)
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
            continue
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
                progress(len(records))
        watch(engine, clock.now() - start)
    records.sort(key=lambda record: record.index)
    return Replay(records, clock.now() - start, idle)


def _arrival(sample: Sample) -> float:
    return sample.arrival or 0.0


def _begin(
    engine: Engine, sample: Sample, index: int, start: float, sent: float, seed: int
) -> Record:
    record = Record(index, False, sent, sample.prompt_len, 0, queue_time=sent - _arrival(sample))
    params = SamplingParams(temperature=0.0, max_tokens=sample.output_len, ignore_eos=True)
    if sample.max_tokens is not None:  # a scripted sampler stops as soon as it may
        params = replace(
            params,
            max_tokens=max(sample.max_tokens, sample.output_len),
            min_tokens=sample.output_len - 1,
            stop_token_ids=(_STOP,),
        )
    prompt = prompt_token_ids(sample, seed, engine.vocab_size)
    request = Request(request_id=str(index), prompt_token_ids=prompt, params=params)
    try:
        engine.add_request(request, start + sent)
    except AdmissionError as error:
        record.reason = QUEUE_FULL if error.retryable else "rejected"
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
        record.reason, record.detail = "failed", outcome.error or ""
