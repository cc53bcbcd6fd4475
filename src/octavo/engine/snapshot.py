"""What the engine is doing, request by request, for operators. No text is shown.

A snapshot is taken on the engine's thread, between two steps. It costs about two microseconds for
each request that is listed, and next to nothing for the others, however long the queue is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from octavo.scheduler.request import RequestSnapshot, SchedulingParams, State, standing
from octavo.scheduler.sequence import Status

if TYPE_CHECKING:  # readers of a snapshot need no engine
    from octavo.engine.engine import Engine
    from octavo.scheduler.request import RequestRecord

# What a snapshot shows of a request as it was submitted
_SHOWN = SchedulingParams.__dataclass_fields__.keys() & RequestSnapshot.__dataclass_fields__


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Figures in blocks. ``cached`` ones are free, but what they hold is still of use; ``free`` are
    the others.
    """

    blocks: int
    block_size: int  # tokens
    used: int
    cached: int
    free: int
    waste: float  # allocated but unfilled slots ÷ allocated slots


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """``time``: clock seconds, to compare two snapshots. Running requests come first, then the
    waiting ones in the order in which the policy would admit them now.
    """

    time: float
    running: int  # sequences
    waiting: int
    waiting_tokens: int  # of those that wait
    max_num_seqs: int
    max_num_batched_tokens: int
    steps: int  # since the start
    computed_tokens: int  # put through the model since the start
    step_tokens: int  # of the last step
    step_seconds: float
    busy_seconds: float  # of all steps since the start
    pool: PoolSnapshot
    requests: list[RequestSnapshot]
    unlisted: int  # requests beyond the limit


def snapshot(engine: Engine, limit: int) -> EngineSnapshot:
    """Take a snapshot that lists at most ``limit`` requests. Call it on the engine's thread."""
    scheduler, stats = engine.scheduler, engine.stats()
    pool, now = scheduler.kv.pool, engine.clock.now()
    listed = [_request(engine, record, now) for record in islice(_records(engine), limit)]
    return EngineSnapshot(
        time=now,
        running=stats.running,
        waiting=stats.waiting,
        waiting_tokens=stats.waiting_tokens,
        max_num_seqs=scheduler.config.max_num_seqs,
        max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
        steps=stats.steps,
        computed_tokens=stats.computed_tokens,
        step_tokens=stats.last_step_tokens,
        step_seconds=stats.last_step_seconds,
        busy_seconds=stats.step_seconds,
        pool=PoolSnapshot(
            blocks=pool.num_blocks,
            block_size=scheduler.kv.block_size,
            used=pool.num_used,
            cached=pool.num_cached,
            free=pool.num_free - pool.num_cached,
            waste=stats.kv_waste,
        ),
        requests=listed,
        unlisted=len(engine.requests) - len(listed),
    )


def _records(engine: Engine) -> Iterator[RequestRecord]:
    """Iterate over the requests, running ones first."""
    scheduler = engine.scheduler
    seen: set[int] = set()
    waiting = chain(scheduler.policy.in_turn(), scheduler.waiting.fetching)
    for seq in chain(scheduler.decoding, scheduler.prefilling, waiting, scheduler.paused):
        if id(seq.owner) not in seen:
            seen.add(id(seq.owner))
            yield seq.owner


def _request(engine: Engine, record: RequestRecord, now: float) -> RequestSnapshot:
    kv = engine.scheduler.kv
    stands = standing(record, now)
    shown: State = "waiting"
    done = 0
    for seq in record.sequences:
        if seq.status is Status.DECODING:
            shown, done = "decode", record.prompt_tokens
            break
        if seq.status is Status.PAUSED:
            shown, done = "paused", record.prompt_tokens
        if seq.status is Status.PREFILLING:
            shown, done = "prefill", 0
            if not kv.num_to_load(seq.slot):
                done = int(kv.num_tokens[seq.slot])
    scheduling: dict[str, Any] = {name: getattr(record.scheduling, name) for name in _SHOWN}
    return RequestSnapshot(
        id=record.request_id,
        state=shown,
        n=record.n,
        prompt_tokens=record.prompt_tokens,
        prompt_tokens_done=min(done, record.prompt_tokens),
        cached_tokens=record.cached_tokens,
        output_tokens=record.completion_tokens,
        max_tokens=record.max_tokens or 0,
        age=now - record.arrival,
        queue_time=_since(record.arrival, record.scheduled),
        ttft=_since(record.arrival, record.first_token),
        tokens_per_second=record.n / record.tpot if record.tpot > 0 else None,
        preemptions=record.preemptions,
        on_target=None if stands is None else stands != "missed",
        **scheduling,
    )


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else end - start
