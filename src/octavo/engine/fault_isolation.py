"""What becomes of the requests when a step fails.

A failure of the executor or the sampler leaves engine and scheduler as they were before the step.
Its requests run again, each alone; one that fails alone ends (`retry_alone`).

A failure anywhere else may have left anything half done (memory can run out anywhere). Then only
what was delivered counts: the cache is emptied, and everything that was not delivered is computed
again by requests that run alone at first (`start_over`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.engine.outputs import Delta, SequenceOutput
from octavo.scheduler.batching import Scheduled
from octavo.scheduler.request import FinishReason, Outcome, RequestRecord
from octavo.scheduler.sequence import Sequence, Status

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

logger = logging.getLogger(__name__)

OUTCOMES = {
    FinishReason.STOP: Outcome.FINISHED,
    FinishReason.LENGTH: Outcome.FINISHED,
    FinishReason.ABORT: Outcome.ABORTED,
    FinishReason.ERROR: Outcome.FAILED,
    FinishReason.REPLACED: Outcome.REJECTED,
    FinishReason.SHED: Outcome.REJECTED,
}


def retry_alone(
    engine: Engine, scheduled: Scheduled, error: Exception, deltas: list[Delta]
) -> None:
    """Run the requests of a failed step again, each alone; end the one that failed alone."""
    logger.exception("a step of %d tokens failed", scheduled.batch.num_tokens, exc_info=error)
    rewind(scheduled.sequences + scheduled.samples)
    if not engine.scheduler.isolate(scheduled):
        for seq in scheduled.sequences:
            engine.end(seq.owner, FinishReason.ERROR, deltas, f"the step failed: {error}")


def rewind(sequences: Iterable[Sequence]) -> None:
    """Undo the draws that were not delivered."""
    for seq in sequences:
        output: SequenceOutput = seq.output
        output.sampler.rewind(output.sampler.num_generated - output.num_tokens)


def start_over(
    engine: Engine, error: Exception, deltas: list[Delta], culprit: RequestRecord | None = None
) -> None:
    """Keep only what was delivered, and compute the rest again. The requests that end with an error
    are the ``culprit``, which was alone in the step that failed, and those of which it is not
    certain what was delivered.
    """
    logger.exception("the engine starts over", exc_info=error)
    engine.num_starts += 1
    cut_off: dict[str, FinishReason] = {}
    for request_id, record in engine.requests.items():
        for seq in record.sequences:
            output: SequenceOutput = seq.output
            if (reason := record.finish_reasons[seq.choice]) is None:
                rewind([seq])
                del seq.token_ids[record.prompt_tokens + output.num_tokens :]
            if engine.speculator is not None:
                engine.speculator.forget(seq)
            if reason is not None:
                seq.status = Status.FINISHED
                if OUTCOMES[reason] is not Outcome.FINISHED:
                    cut_off[request_id] = reason
                continue
            if output.prompt_logprobs is not None:
                seq.num_scored = len(output.prompt_logprobs) - 1
            if output.in_doubt:
                cut_off.setdefault(request_id, FinishReason.ERROR)
    engine.scheduler.start_over(engine.requests.values())
    for request_id, record in [*engine.requests.items()]:
        if record.num_unfinished == 0:
            if record.outcome is None:
                reason = cut_off.get(request_id, FinishReason.STOP)
                engine.close_record(record, OUTCOMES[reason])
            engine.drop(record)
        elif record is culprit or request_id in cut_off:
            reason = cut_off.get(request_id, FinishReason.ERROR)
            why = f"the step failed: {error!r}" if reason is FinishReason.ERROR else None
            engine.end(record, reason, deltas, record.error or why)
