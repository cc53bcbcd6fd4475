"""From a step's logits to tokens and prompt logprobs, as many rows at a time as are held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.execute.batch import Float32, StepResult
from octavo.sample.sampler import Sampled, Sampler, SamplerState, TokenLogprobs
from octavo.schedule.batching import PromptRows, Scheduled
from octavo.speculate.verify import replay


class Drawn(NamedTuple):
    """What a step gave: for each of its samples, in order, the run of tokens that its sequence goes
    on with. The samplers' states are behind the runs.
    """

    runs: list[list[int]]  # empty for a sample in ``errors``
    logprobs: list[list[TokenLogprobs | None]] | None  # a run's; None when nobody asked for any
    errors: dict[int, str]  # index into the samples -> why it gave no token
    scores: dict[PromptRows, list[TokenLogprobs] | str]  # or why there are none


def draw(
    sampler: Sampler, scheduled: Scheduled, states: Sequence[SamplerState], result: StepResult
) -> Drawn:
    """Tokens for each of ``scheduled.samples``, whose ``states`` are given, and the logprobs of
    ``scheduled.prompt_rows``.
    """
    rows = scheduled.sample_rows
    if scheduled.drafts is None:
        sampled, scores = _sample(sampler, rows, states, scheduled, result)
        runs = [[token] for token in sampled.token_ids]
        logprobs = None if sampled.logprobs is None else [[entry] for entry in sampled.logprobs]
        for index in sampled.errors:
            runs[index] = []
            if logprobs is not None:
                logprobs[index] = []
        return Drawn(runs, logprobs, sampled.errors, scores)

    sizes = [1 + len(draft) for draft in scheduled.drafts]
    sizes += [1] * (len(states) - len(sizes))
    spread = [row + at for row, size in zip(rows, sizes, strict=True) for at in range(size)]
    owners = [state for state, size in zip(states, sizes, strict=True) for _ in range(size)]
    sampled, scores = _sample(sampler, spread, owners, scheduled, result)
    return _verified(scheduled.drafts, states, sizes, sampled, scores)


def _verified(
    drafts: list[list[int]],
    states: Sequence[SamplerState],
    sizes: list[int],
    sampled: Sampled,
    scores: dict[PromptRows, list[TokenLogprobs] | str],
) -> Drawn:
    """The draws that stand. A draw that failed behind others is tried again in the next step, where
    it comes first.
    """
    runs: list[list[int]] = []
    logprobs: list[list[TokenLogprobs | None]] = []
    errors: dict[int, str] = {}
    first = 0
    for index, size in enumerate(sizes):
        drawn = sampled.token_ids[first : first + size]
        kept = replay(drafts[index] if index < len(drafts) else (), drawn)
        if kept < size:
            recorded = size - drawn.count(-1)
            states[index].rewind(recorded - kept)
        if kept == 0:
            errors[index] = sampled.errors[first]
        runs.append(drawn[:kept])
        if sampled.logprobs is not None:
            logprobs.append(sampled.logprobs[first : first + kept])
        first += size
    return Drawn(runs, None if sampled.logprobs is None else logprobs, errors, scores)


def _sample(
    sampler: Sampler,
    rows: Sequence[int],
    states: Sequence[SamplerState],
    scheduled: Scheduled,
    result: StepResult,
) -> tuple[Sampled, dict[PromptRows, list[TokenLogprobs] | str]]:
    """A draw from each of the rows by its state, and the prompts' scores."""
    logits = result.logits
    total = len(scheduled.batch.logits_rows)
    scores: dict[PromptRows, list[TokenLogprobs] | str] = {}
    if logits is None or len(logits) == total or result.logits_from is None:
        sampled = sampler.sample(logits, rows, states)
        for span in scheduled.prompt_rows:
            _score(sampler, span, 0, total, logits, scores)
        return sampled, scores

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
