"""Who is let in now and who is told to come back later.

Everything here may be called from any thread and waits for nothing, for those who are refused are
to be told at once while the engine is at its busiest: the queue is compared in integers, and what
is read of the engine for a forecast is read once a step, whoever asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.engine import Engine
from octavo.engine.waiting import Waiting
from octavo.scheduler.request import AdmissionError, RequestRecord


class Admission:
    def __init__(self, engine: Engine, *, within_target: bool = False) -> None:
        """``within_target``: refuse for now what would miss its latency target, or have those miss
        theirs who run, by prediction.
        """
        self.within_target = within_target
        self.waiting = Waiting(engine)
        engine.observers.append(self.waiting)
        self._scheduler = engine.scheduler
        self._places = engine.places

    @property
    def fair_queue(self) -> int | None:
        """How many requests may wait, where clients have fair shares; else None."""
        config = self._scheduler.config
        fair = config.policy.scheduling_policy == "fair"
        return config.max_num_queued_reqs if fair else None

    def check_queue(
        self, asks: Sequence[RequestRecord], queued: int, queued_tokens: int
    ) -> list[RequestRecord]:
        """Refuse for now (`AdmissionError`, retryable) what the queue has no room for, and for
        good what it never has. ``queued``: requests that are on their way to it, with so many
        prompt tokens; ``asks``: those who would come in together, none where nothing is known of
        one, and it may come before everybody. Returns those whose places they would take
        (engine/places.py).
        """
        scheduler = self._scheduler
        config = scheduler.config
        if config.max_num_queued_reqs is not None:
            most = config.max_num_queued_reqs + config.max_num_seqs
            if len(asks) > most:
                raise AdmissionError(
                    f"there are {len(asks)} prompts, and no more than {most} may run and wait",
                    "prompt",
                )
        # Who finds a free seat at the next step does not wait in a queue, whether the engine has
        # taken note of it since the last one or not.
        left = min(scheduler.num_left_waiting, len(scheduler.waiting))
        seats = 0 if left else scheduler.kv.num_free_slots
        try:
            return self._places.check(asks, queued - seats, queued_tokens)
        except AdmissionError as error:
            error.retry_after = self.waiting.forecast(None, queued, queued_tokens).wait
            raise

    def check_forecast(
        self, asks: Sequence[RequestRecord], queued: int, queued_tokens: int
    ) -> None:
        """Refuse for now what would wait for too long or, where that is asked for, miss its
        target: of those who come together the last one.
        """
        scheduler = self._scheduler
        if not asks or not self._foresees(asks[-1]):
            return
        # An idle engine takes anybody: waiting makes nothing better, and what steps take is only
        # learned from steps.
        if queued or scheduler.waiting or scheduler.decoding or scheduler.prefilling:
            queued += len(asks) - 1
            queued_tokens += sum(record.prompt_tokens for record in asks[:-1])
            forecast = self.waiting.forecast(asks[-1], queued, queued_tokens)
            self.waiting.check(asks[-1], forecast, target=self.within_target)

    def _foresees(self, record: RequestRecord) -> bool:
        most = self._scheduler.config.policy.max_queue_time
        return most is not None or (self.within_target and record.target is not None)
