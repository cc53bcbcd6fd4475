"""Figures about an engine: what it is doing, and what it has done since the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from octavo.kv_cache.connectors.base import ConnectorStats
from octavo.scheduler.request import RequestRecord
from octavo.scheduler.scheduler import Scheduler
from octavo.spec_decode.replay import agreement
from octavo.spec_decode.speculator import Speculator


@dataclass(slots=True)
class EngineStats:
    """Gauges, and counters since the start that are never reset. Cheap to read from any thread."""

    running: int = 0  # sequences in the batch or prefilling
    waiting: int = 0  # sequences queued, preempted ones included
    waiting_deferred: int = 0  # of these, for blocks that are being read from disk
    waiting_tokens: int = 0
    paused: int = 0  # sequences whose output is not read
    kv_blocks: int = 0
    kv_blocks_used: int = 0  # referenced by a sequence
    kv_blocks_cached: int = 0  # free, and of use if a prompt begins with what they hold
    kv_evictions: int = 0  # of these, those that were handed out again
    kv_waste: float = 0.0  # allocated but unfilled slots ÷ allocated slots
    steps: int = 0
    admitted: int = 0  # requests, whatever became of them
    prompt_tokens: int = 0  # of requests that have begun to be computed
    generation_tokens: int = 0
    computed_tokens: int = 0  # put through the model, recomputation included
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix index
    prefix_hits: int = 0  # prompt tokens found there, or by a connector
    external_hits: Mapping[str, int] = field(default_factory=dict)  # of these, loaded, by connector
    state_snapshots: Mapping[str, int] = field(default_factory=dict)  # in the pool, by kind
    state_restores: int = 0  # sequences that have begun with one
    swapped_tokens: int = 0  # of preempted sequences, loaded from there instead of recomputed
    connectors: Mapping[str, ConnectorStats] = field(default_factory=dict)  # by name
    last_step_tokens: int = 0
    last_step_seconds: float = 0.0  # scheduling to delivery
    step_seconds: float = 0.0  # of all steps
    schedule_seconds: float = 0.0  # of these: choosing and building the batch, drafting included
    sample_seconds: float = 0.0  # drawing tokens from logits
    deliver_seconds: float = 0.0  # committing them and turning them into text
    decode_steps: int = 0  # in which a sequence decoded
    itl_target_s: float | None = None  # seconds that each of these steps may take
    late_steps: int = 0  # those that took longer
    paced_steps: int = 0  # with prompts, sized by the time that they were predicted to take
    paced_seconds: float = 0.0  # that they took, without block copies before them
    predicted_seconds: float = 0.0  # that they were predicted to take
    step_spread: float = 0.0  # standard deviation of actual ÷ predicted, for recent ones
    decode_passes: int = 0  # times a sequence that decodes went through the model
    drafts: int = 0  # of these, with drafts to be checked
    draft_tokens: int = 0
    accepted_tokens: int = 0  # draft tokens that became output
    accepted_per_position: list[int] = field(default_factory=list)
    drafter_failures: int = 0
    drafting_seconds: float = 0.0  # in the drafter
    time_saved_seconds: float = 0.0  # by speculation, estimated; below 0 where it cost more

    @property
    def kv_usage(self) -> float:
        """Share of the pool referenced by sequences, 0 … 1."""
        return self.kv_blocks_used / self.kv_blocks if self.kv_blocks else 0.0

    def add_steps(self, decodes: int, tokens: int, seconds: Sequence[float]) -> None:
        """Add steps of ``tokens`` tokens each, in which ``decodes`` sequences decoded."""
        steps = len(seconds)
        self.steps += steps
        self.decode_passes += decodes * steps
        self.computed_tokens += tokens * steps
        self.last_step_tokens = tokens
        self.last_step_seconds = seconds[-1]
        for each in seconds:
            self.step_seconds += each
        if decodes:
            self.decode_steps += steps
            if self.itl_target_s is not None:
                self.late_steps += sum(each > self.itl_target_s for each in seconds)

    def add_paced(self, seconds: float, predicted: float, spread: float) -> None:
        """Add a step with prompts that was sized by the time it was ``predicted`` to take. Neither
        time counts the block copies before it.
        """
        self.paced_steps += 1
        self.paced_seconds += seconds
        self.predicted_seconds += predicted
        self.step_spread = spread

    def add_draft(self, record: RequestRecord, guesses: list[list[int]], run: list[int]) -> None:
        """Add a draft and its alternatives that were checked; ``run`` is what became output."""
        accepted = max(agreement(guess, run) for guess in guesses)
        drafted = sum(map(len, guesses))
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        positions = self.accepted_per_position
        positions += [0] * (max(map(len, guesses)) - len(positions))
        for at in range(accepted):
            positions[at] += 1
        record.draft_tokens += drafted
        record.accepted_tokens += accepted

    def now(self, scheduler: Scheduler, speculator: Speculator | None) -> EngineStats:
        """Return a copy, with the figures that others count and the gauges as they are now."""
        pool = scheduler.kv.pool
        return replace(
            self,
            running=len(scheduler.decoding) + len(scheduler.prefilling),
            waiting=len(scheduler.waiting),
            waiting_deferred=len(scheduler.waiting.fetching),
            waiting_tokens=scheduler.waiting.tokens,
            paused=len(scheduler.paused),
            kv_blocks_used=pool.num_used,
            kv_blocks_cached=pool.num_cached,
            kv_evictions=pool.evictions,
            kv_waste=scheduler.kv.waste(),
            prompt_tokens=scheduler.prompt_tokens,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            state_snapshots=scheduler.kv.count_snapshots(),
            state_restores=scheduler.kv.num_restored_states,
            external_hits=dict(scheduler.external_hits),
            swapped_tokens=scheduler.swapped_tokens,
            connectors=scheduler.kv.connectors.stats() if scheduler.kv.connectors else {},
            accepted_per_position=self.accepted_per_position[:],
            drafter_failures=speculator.failures if speculator else 0,
            drafting_seconds=speculator.drafting_seconds if speculator else 0.0,
            time_saved_seconds=speculator.saved_seconds if speculator else 0.0,
        )
