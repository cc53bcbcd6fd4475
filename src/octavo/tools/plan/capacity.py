"""How much of a load an engine can serve: the same requests, with more of them always waiting.

The simulated engine runs the load's own requests in their order, again and again, and somebody is
always in its queue. It begins like an engine that has been at it for long: the first requests are
some way into their answers, evenly spread, so that nothing has to fill up first and requests of one
length do not run in step. What it does is measured from there on, while as many are let in as the
load has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.tools.plan.phase import mixed_batch
from octavo.tools.plan.simulation import Simulation, simulate
from octavo.tools.workload.datasets import Part, Sample
from octavo.tools.workload.metrics import Record

MOST = 512  # requests of a load that are run again; of a longer one, some stretches of it
_STRETCHES = 8
_STATIC_TURNS = 4
# Multiples of the two are spread evenly over a square, however many are taken (Roberts, "The
# unreasonable effectiveness of quasirandom sequences", 2018).
_SPREAD = 0.7548776662466927, 0.5698402909980532
_TURN = 1 << 80  # keeps the tokens of one repetition apart from those of another


class TokenCost(NamedTuple):
    """What tokens cost a full engine, in seconds of its time."""

    prompt_token: float  # that is computed, not found in the prefix cache
    output_token: float

    def of(self, record: Record) -> float:
        """All of a request that was served."""
        computed = record.prompt_len - (record.cached_tokens or 0)
        return computed * self.prompt_token + record.output_tokens * self.output_token

    def left(self, record: Record, time: float) -> float:
        """What is left to do of it at ``time``, in seconds from the start; 0 before it arrives."""
        begun = record.start + record.waited
        first = record.start + record.ttft
        if time < record.start - record.queue_time or time >= record.start + record.latency:
            return 0.0
        if time < first:
            read = max(0.0, time - begun) / max(first - begun, 1e-12)
            return self.of(record) - read * self.prompt_token * (
                record.prompt_len - (record.cached_tokens or 0)
            )
        after = np.cumsum(np.frombuffer(record.itl))
        given = 1 + int(np.searchsorted(after, time - first, side="right"))
        # Drafts that are right bring several tokens at a time.
        share = given / (1 + len(after))
        return (1 - share) * record.output_tokens * self.output_token


class Capacity(NamedTuple):
    """What an engine can serve of a mix of requests."""

    requests_per_second: float
    work: TokenCost


def capacity(
    simulation: Simulation, progress: Callable[[str], None] = lambda _: None
) -> Capacity | None:
    """What the engine of a simulation could serve of the same mix; None where nothing was served.

    Requests that can never run count for nothing. Bounds of the queue are left out.
    """
    records = simulation.replay.records
    kept = [
        (sample, record)
        for sample, record in zip(simulation.samples, records, strict=True)
        if record.success or record.rejected
    ]
    if not any(record.success for _, record in kept):
        return None
    setup, most = simulation.setup, simulation.max_concurrency
    mix = _stretches([sample for sample, _ in kept])
    running = _running(simulation)
    first = running + running // 4  # until so many have been let in it is not measured
    measured = len(mix) * -(-running // len(mix))  # whole turns of the mix
    if setup.batching == "static":  # batches of their longest: of one turn they are too few
        measured *= _STATIC_TURNS
    asked = _running_already(mix, running)
    count = first - running + measured + 1
    turns = running  # none of them is one of a request that runs already
    asked += [_again(mix[index % len(mix)], turns + index // len(mix)) for index in range(count)]
    config = replace(
        setup.config,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
        max_queue_time=None,
        shed_late=False,
    )
    done = simulate(
        replace(setup, config=config),
        asked,
        seed=simulation.seed,
        max_concurrency=min(2 * setup.config.max_num_seqs + 1, most or len(asked)),
        target=simulation.target,
        progress=lambda ended: progress(f"capacity: {ended} of {len(asked)} requests have ended"),
    )
    work = work_of(done)
    full = done.replay.records
    admitted = [record.start + record.waited for record in full]
    start, end = (sorted(admitted)[index] for index in (first, first + measured))
    of_mix = float(np.mean([work.of(record) for record in full[first:]]))
    if setup.batching == "static":
        seconds = measured * of_mix / (end - start)  # of work in a second
    else:
        computed = sum(
            work.of(record) - record.output_tokens * work.output_token
            for record, time in zip(full, admitted, strict=True)
            if start < time <= end
        )
        given = sum(_given(record, start, end) for record in full)
        seconds = (computed + given * work.output_token) / (end - start)
    return Capacity(seconds / of_mix, TokenCost(*(each / seconds for each in work)))


def _given(record: Record, start: float, end: float) -> float:
    """Tokens of a request's answer between two times."""
    times = record.start + record.ttft + np.cumsum([0.0, *record.itl])
    inside = np.count_nonzero((times > start) & (times <= end))
    return float(inside) * record.output_tokens / len(times)


def _running(simulation: Simulation) -> int:
    """About how many of the load's requests run at a time when there are enough."""
    setup, samples = simulation.setup, simulation.samples
    plan, layout = setup.plan()
    shared = sum(record.cached_tokens or 0 for record in simulation.replay.records)
    tokens = sum(
        sample.prompt_len
        + (sample.output_len / 2 if setup.memory == "paged" else sample.max_tokens or 0)
        for sample in samples
    )
    held = max(tokens - shared, 1) / len(samples)
    fit = int(plan.num_blocks * layout.block_size / held)
    return max(1, min(setup.config.max_num_seqs, fit, simulation.max_concurrency or fit))


def _stretches(samples: Sequence[Sample]) -> Sequence[Sample]:
    """All, or some stretches of very many: neighbours may share prompts."""
    if len(samples) <= MOST:
        return samples
    length = MOST // _STRETCHES
    starts = np.linspace(0, len(samples) - length, _STRETCHES).astype(int).tolist()
    return [sample for start in starts for sample in samples[start : start + length]]


def _again(sample: Sample, turn: int) -> Sample:
    """The same at once, with tokens that it shares with others of its turn only."""
    parts = tuple(Part(part.key + turn * _TURN, part.length) for part in sample.parts)
    return replace(sample, parts=parts, arrival=0.0)


def _running_already(mix: Sequence[Sample], running: int) -> list[Sample]:
    """The requests that are part of the way into their answers. An answer twice as long is met
    twice as often.
    """
    ends = np.cumsum([sample.output_len for sample in mix])
    times = np.zeros(len(mix), np.int64)  # that each has been chosen
    found = []
    for index in range(running):
        which, share = ((index + 1) * step % 1 for step in _SPREAD)
        chosen = int(np.searchsorted(ends, which * ends[-1], side="right"))
        found.append(_part_way(_again(mix[chosen], int(times[chosen])), share, index))
        times[chosen] += 1
    return found


def _part_way(sample: Sample, share: float, index: int) -> Sample:
    """With a share of its answer given already."""
    given = int(share * (sample.output_len - 1))
    allowed = None if sample.max_tokens is None else sample.max_tokens - given
    return replace(
        sample,
        prompt_len=sample.prompt_len + given,
        output_len=sample.output_len - given,
        parts=(*sample.parts, Part((index + 1) * _TURN**2, given)),
        max_tokens=allowed,
    )


def work_of(simulation: Simulation) -> TokenCost:
    """By the cost model alone: what a token of a prompt adds to a step of a full engine, and each
    sequence's share of a step that only decodes.
    """
    executor, samples = simulation.engine.executor, simulation.samples
    assert isinstance(executor, SimulatedExecutor)
    limits = simulation.engine.scheduler.config
    running = _running(simulation)
    context = int(np.mean([sample.prompt_len + sample.output_len / 2 for sample in samples]))
    prompt = int(np.mean([sample.prompt_len for sample in samples]))
    tokens = max(1, min(prompt, limits.max_num_batched_tokens - running))
    decode, mixed = (
        executor.costs.seconds(mixed_batch(running, context, some), executor.rates)
        for some in (0, tokens)
    )
    return TokenCost((mixed - decode) / tokens, decode / running)
