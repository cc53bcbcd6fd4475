"""Draw tokens and prompt logprobs from a step's logits, as many rows at a time as are held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.executor.base import Float32, StepResult
from octavo.sampling.sampler import Sampler, SamplerState, TokenLogprobs
from octavo.scheduler.batching import PromptRows, Scheduled
from octavo.spec_decode.replay import replay


class Drawn(NamedTuple):
    """What a step drew: for each of its samples, in order, the run of tokens that continues its
    sequence. The samplers' states are behind the runs.
    """

    runs: list[list[int]]  # empty for a sample in ``errors``
    logprobs: list[list[TokenLogprobs | None]] | None  # a run's; None when nobody asked for any
    errors: dict[int, str]  # index into the samples -> why it gave no token
    scores: dict[PromptRows, list[TokenLogprobs] | str]  # or why there are none


def draw(
    sampler: Sampler,
    scheduled: Scheduled,
    states: Sequence[SamplerState],
    result: StepResult,
    *,
    rejection: bool = False,
) -> Drawn:
    """Draw tokens for each of ``scheduled.samples``, whose ``states`` are given, and compute the
    logprobs of ``scheduled.prompt_rows``. Drafts are checked by ``rejection`` or by replay.

    A sample draws from the rows of its draft as long as the draws are the draft's tokens. Where a
    run has left the draft and continues as a branch does, it draws on from the branch's rows: they
    equal those of decoding token by token, and the sampler's state is behind the run. A draw that
    failed behind others is tried again in the next step, where it comes first.

    This holds whatever rule verified the draft. The token that took a rejected one's place was
    drawn from the target's distribution or, under speculative sampling, from the residual
    max(0, p - q), normalised; neither knows of branches. Miao et al. ("SpecInfer", 2024, multi-step
    speculative sampling) then try one branch after another: each is accepted with the residual's
    probability of its token over the branch's own of it, and otherwise taken out of the residual.
    Branches are certain of their tokens, so the divisor is 1, and what is taken out is the token
    itself: this is to draw from the residual once and to follow the branch that has the token, if
    there is one. Behind it the target's own distribution counts again.
    """
    held, total = result.logits, len(scheduled.batch.logits_rows)
    size = total if held is None or result.logits_from is None else max(1, len(held))
    if scheduled.drafts is None and size >= total:
        drawn = _draw_one_each(sampler, held, scheduled.sample_rows, states, rejection)
        _score(sampler, held, 0, total, scheduled.prompt_rows, drawn)
        return drawn

    runs: list[list[int]] = [[] for _ in states]
    logprobs: list[list[TokenLogprobs | None]] = [[] for _ in states]
    drawn = Drawn(runs, logprobs, {}, {})
    going = list(range(len(states)))  # samples that may draw on
    for first in range(0, total, size):
        if first:
            assert result.logits_from is not None
            held = result.logits_from(first)
        end = first + size
        later: list[int] = []
        while going:
            spans: dict[int, tuple[int, list[int]]] = {}  # number of draws, and guesses at them
            rows: list[int] = []
            owners: list[SamplerState] = []
            guessed: list[int] = []
            drawn_from: list[Float32 | None] = []
            for index in going:
                # Rows come in the order of branches: no run leads back to rows before these.
                if (head := _head(scheduled, index, runs[index])) is None:
                    continue
                row, guesses, given = head
                if row >= end:
                    later.append(index)
                    continue
                count = min(1 + len(guesses), end - row)
                spans[index] = count, guesses
                rows += range(row - first, row - first + count)
                owners += [states[index]] * count
                if rejection:
                    guessed += [*guesses, -1][:count]
                    drawn_from += [*(given or [None] * len(guesses)), None][:count]
            if not spans:
                break
            if rejection:
                sampled = sampler.verify(held, rows, owners, guessed, drawn_from)
            else:
                sampled = sampler.sample(held, rows, owners)
            begin, going = 0, []
            for index, (count, guesses) in spans.items():
                tokens = sampled.token_ids[begin : begin + count]
                kept = replay(guesses, tokens)
                if kept < count:
                    states[index].rewind(count - tokens.count(-1) - kept)
                if kept and (index in scheduled.branches or count <= len(guesses)):
                    going.append(index)
                if not (kept or runs[index]):
                    drawn.errors[index] = sampled.errors[begin]
                runs[index] += tokens[:kept]
                found = sampled.logprobs
                logprobs[index] += found[begin : begin + kept] if found else [None] * kept
                begin += count
        going = later
        _score(sampler, held, first, end, scheduled.prompt_rows, drawn)
    return drawn if any(map(any, logprobs)) else drawn._replace(logprobs=None)


def _draw_one_each(
    sampler: Sampler,
    logits: Float32 | None,
    rows: Sequence[int],
    states: Sequence[SamplerState],
    rejection: bool,
) -> Drawn:
    """Draw a token for each sample, the quick way: most steps have no drafts and hold all rows."""
    if rejection:  # its draws have random numbers of their own, drafts or not
        sampled = sampler.verify(logits, rows, states, [-1] * len(rows), [None] * len(rows))
    else:
        sampled = sampler.sample(logits, rows, states)
    runs = [[token] for token in sampled.token_ids]
    logprobs = None if sampled.logprobs is None else [[entry] for entry in sampled.logprobs]
    for index in sampled.errors:
        runs[index] = []
        if logprobs is not None:
            logprobs[index] = []
    return Drawn(runs, logprobs, sampled.errors, {})


def _head(
    scheduled: Scheduled, index: int, run: list[int]
) -> tuple[int, list[int], list[Float32 | None] | None] | None:
    """Return the row of logits behind a sample's run, in its draft or in a branch that begins with
    the run, the guesses that follow it there, and the distributions that these were drawn from
    (None: not at random). None if nothing begins so.
    """
    known, drafts = len(run), scheduled.drafts or ()
    draft = drafts[index] if index < len(drafts) else []
    if draft[:known] == run:
        given = scheduled.probabilities[index] if draft and scheduled.probabilities else None
        rows = None if given is None else [*given[known : len(draft)]]
        return scheduled.sample_rows[index] + known, draft[known:], rows
    for branch in scheduled.branches.get(index, ()):
        if branch.token_ids[:known] == run:
            return branch.row + known - 1, branch.token_ids[known:], None
    return None


def _score(
    sampler: Sampler,
    logits: Float32 | None,
    first: int,
    end: int,
    spans: Sequence[PromptRows],
    drawn: Drawn,
) -> None:
    """Add the logprobs of those rows of prompts that lie in [first, end)."""
    for span in spans:
        so_far = drawn.scores.setdefault(span, [])
        low, high = max(first, span.row), min(end, span.row + span.size)
        if low >= high or isinstance(so_far, str):
            continue
        position = span.position + low - span.row
        try:
            so_far += sampler.prompt_logprobs(
                logits,
                range(low - first, high - first),
                span.seq.token_ids[position : position + high - low],
                span.seq.owner.params.prompt_logprobs or 0,
            )
        except ValueError as error:
            drawn.scores[span] = str(error)
