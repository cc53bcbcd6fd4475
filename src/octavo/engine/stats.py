"""What an engine is doing and has done, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octavo.kv_cache.tiers import TierStats
from octavo.scheduler.request import RequestRecord
from octavo.scheduler.scheduler import Scheduler
from octavo.spec_decode.speculator import Speculator
from octavo.spec_decode.replay import agreement


@dataclass(slots=True)
class EngineStats:
    """What the engine is doing (gauges) and has done since the start (counters, never reset).

    Cheap to read at any time from any thread.
    """

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
    prefix_hits: int = 0  # prompt tokens found there, or in another tier
    prefix_hits_host: int = 0  # of these, those for which blocks were loaded from host memory,
    prefix_hits_disk: int = 0  # and those for which blocks were read from disk
    swapped_tokens: int = 0  # of preempted sequences, loaded from there instead of recomputed
    tiers: TierStats | None = None  # of the cache beyond the pool, where there is one
    last_step_tokens: int = 0
    last_step_seconds: float = 0.0  # scheduling to delivery
    step_seconds: float = 0.0  # of all steps
    schedule_seconds: float = 0.0  # of these: choosing and building the batch, drafting included
    sample_seconds: float = 0.0  # drawing tokens from logits
    deliver_seconds: float = 0.0  # committing them and turning them into text
    decode_steps: int = 0  # in which somebody decoded
    itl_target: float | None = None  # seconds; of these steps each is to take no longer
    late_steps: int = 0  # of these, the longer ones
    paced_steps: int = 0  # with prompts, sized by the time that they were predicted to take
    paced_seconds: float = 0.0  # that they took, block copies before them left out,
    predicted_seconds: float = 0.0  # and were predicted to take
    step_spread: float = 0.0  # standard deviation of actual ÷ predicted, of late
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

    @property
    def last_step_late(self) -> bool:
        """Whether the last step took longer than the target."""
        return self.itl_target is not None and self.last_step_seconds > self.itl_target

    def add_step(self, decodes: int, tokens: int, seconds: float) -> None:
        """A step of so many ``tokens`` was delivered, in which ``decodes`` sequences decoded."""
        self._add(decodes, tokens, (seconds,))

    def add_leap(self, decodes: int, seconds: Sequence[float]) -> None:
        """Steps of so many ``seconds`` each, in which ``decodes`` sequences drew a token each and
        nothing else happened.
        """
        self._add(decodes, decodes, seconds)
        self.generation_tokens += decodes * len(seconds)

    def _add(self, decodes: int, tokens: int, seconds: Sequence[float]) -> None:
        steps = len(seconds)
        self.steps += steps
        self.decode_passes += decodes * steps
        self.computed_tokens += tokens * steps
        self.last_step_tokens = tokens
        if decodes:
            self.decode_steps += steps
        for each in seconds:
            self.last_step_seconds = each
            self.step_seconds += each
            if decodes:
                self.late_steps += self.last_step_late

    def add_paced(self, seconds: float, predicted: float, spread: float) -> None:
        """The last step had prompts, by the time that it was ``predicted`` to take; it took
        ``seconds``. Neither counts the block copies before it.
        """
        self.paced_steps += 1
        self.paced_seconds += seconds
        self.predicted_seconds += predicted
        self.step_spread = spread

    def add_draft(self, record: RequestRecord, guesses: list[list[int]], run: list[int]) -> None:
        """A draft and its alternatives were checked; ``run`` is what became output."""
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
        """A copy, with what others count and what is there now."""
        pool = scheduler.kv.pool
        return replace(
            self,
            running=len(scheduler.decoding) + len(scheduler.prefilling),
            waiting=len(scheduler.waiting),
            waiting_deferred=len(scheduler.waiting.fetching),
            waiting_tokens=scheduler.waiting.tokens,
            paused=len(scheduler.held),
            kv_blocks_used=pool.num_used,
            kv_blocks_cached=pool.num_cached,
            kv_evictions=pool.evictions,
            kv_waste=scheduler.kv.waste(),
            prompt_tokens=scheduler.prompt_tokens,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prefix_hits_host=scheduler.prefix_hits_host,
            prefix_hits_disk=scheduler.prefix_hits_disk,
            swapped_tokens=scheduler.swapped_tokens,
            tiers=scheduler.kv.tiers.stats() if scheduler.kv.tiers else None,
            accepted_per_position=self.accepted_per_position[:],
            drafter_failures=speculator.failures if speculator else 0,
            drafting_seconds=speculator.drafting_seconds if speculator else 0.0,
            time_saved_seconds=speculator.saved_seconds if speculator else 0.0,
        )
