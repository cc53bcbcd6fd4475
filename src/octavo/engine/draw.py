"""From a step's logits to tokens and prompt logprobs, as many rows at a time as are held."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.execute.batch import Float32, StepResult
from octavo.sample.sampler import Sampled, Sampler, SamplerState, TokenLogprobs
from octavo.schedule.batching import PromptRows, Scheduled


def draw(
    sampler: Sampler, scheduled: Scheduled, states: Sequence[SamplerState], result: StepResult
) -> tuple[Sampled, dict[PromptRows, list[TokenLogprobs] | str]]:
    """What the rows of a step give: a token for each of ``scheduled.samples``, whose ``states`` are
    given, and the logprobs of ``scheduled.prompt_rows`` (or why there are none).
    """
    logits = result.logits
    total = len(scheduled.batch.logits_rows)
    scores: dict[PromptRows, list[TokenLogprobs] | str] = {}
    if logits is None or len(logits) == total or result.logits_from is None:
        sampled = sampler.sample(logits, scheduled.sample_rows, states)
        for span in scheduled.prompt_rows:
            _score(sampler, span, 0, total, logits, scores)
        return sampled, scores

    rows = scheduled.sample_rows
    token_ids = [-1] * len(rows)
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    errors: dict[int, str] = {}
    first = 0
    while True:
        end = first + len(logits)
        here = [index for index, row in enumerate(rows) if first <= row < end]
        part = sampler.sample(
            logits, [rows[index] - first for index in here], [states[index] for index in here]
        )
        for at, index in enumerate(here):
            token_ids[index] = part.token_ids[at]
            if part.logprobs is not None:
                logprobs[index] = part.logprobs[at]
        errors |= {here[at]: why for at, why in part.errors.items()}
        for span in scheduled.prompt_rows:
            _score(sampler, span, first, end, logits, scores)
        if end == total:
            break
        first, logits = end, result.logits_from(end)
    return Sampled(token_ids, logprobs if any(logprobs) else None, errors), scores


def _score(
    sampler: Sampler,
    span: PromptRows,
    first: int,
    end: int,
    logits: Float32 | None,
    scores: dict[PromptRows, list[TokenLogprobs] | str],
) -> None:
    """Add the logprobs of those rows of a prompt that lie in [first, end)."""
    so_far = scores.setdefault(span, [])
    low, high = max(first, span.row), min(end, span.row + span.size)
    if low >= high or isinstance(so_far, str):
        return
    request = span.seq.owner.request
    position = span.position + low - span.row
    try:
        so_far += sampler.prompt_logprobs(
            logits,
            range(low - first, high - first),
            request.prompt_token_ids[position : position + high - low],
            request.params.prompt_logprobs or 0,
        )
    except ValueError as error:
        scores[span] = str(error)
