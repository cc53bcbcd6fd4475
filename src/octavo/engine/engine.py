"""The loop that ties the rooms together: schedule → execute → sample → commit → deliver."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.outputs import Delta
from octavo.schedule.request import Request, RequestRecord


@dataclass(slots=True)
class EngineStats:
    """What the engine is doing (gauges) and has done since the start (counters, never reset).

    Cheap to read at any time from any thread.
    """

    running: int = 0  # sequences in the batch or prefilling
    waiting: int = 0  # sequences queued, preempted ones included
    kv_blocks: int = 0
    kv_blocks_used: int = 0  # referenced by a sequence
    kv_waste: float = 0.0  # allocated but unfilled slots ÷ allocated slots
    steps: int = 0
    prompt_tokens: int = 0  # of admitted requests at their first scheduling
    generation_tokens: int = 0
    computed_tokens: int = 0  # put through the model, recomputation included
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix index
    prefix_hits: int = 0  # prompt tokens found there
    last_step_tokens: int = 0
    last_step_seconds: float = 0.0

    @property
    def kv_usage(self) -> float:
        """Share of the pool referenced by sequences, 0 … 1."""
        return self.kv_blocks_used / self.kv_blocks if self.kv_blocks else 0.0


class Engine:
    """Synchronous engine. Not thread-safe: one thread calls it (`AsyncEngine` owns one)."""

    def check(self, request: Request) -> None:
        """Refuse what can never run: `AdmissionError` with the arithmetic, `InvalidParameter`.

        Reads only what does not change, so any thread may call it.
        """
        raise NotImplementedError

    def add_request(self, request: Request) -> RequestRecord:
        """Queue a request; it joins the next step. Raises as `check` does, and when the queue is
        full (`AdmissionError` with ``retryable``). The record is the live one, filled as it runs.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        """End a request now, whatever its state; its blocks are free on return. Its last Delta
        (finish_reason ABORT, with the record) comes out of the next `step`. False if unknown.
        """
        raise NotImplementedError

    def step(self) -> list[Delta]:
        """Run one step and return what it produced, in batch order. Never raises for a request's
        fault: a failed request's last Delta has finish_reason ERROR and the record its message.
        """
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether `step` has anything to run or to deliver."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError
