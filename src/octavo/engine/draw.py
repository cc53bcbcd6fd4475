"""Draw tokens and prompt logprobs from a step's logits, as many rows at a time as are held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.executor.base import Float32, StepResult
from octavo.sampling.sampler import Sampled, Sampler, SamplerState, TokenLogprobs
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


class _Logits:
    """The rows of logits of a step, of which ``size`` are held at a time."""

    def __init__(self, result: StepResult, total: int) -> None:
        self.total = total
        sliced = result.logits is not None and result.logits_from is not None
        self.size = max(1, len(result.logits) if sliced else total)  # type: ignore[arg-type]
        self._first = 0
        self._held = result.logits
        self._from = result.logits_from

    def part(self, row: int) -> tuple[int, Float32 | None]:
        """Return the first row of the part that ``row`` is in, and the part's rows."""
        first = row // self.size * self.size
        if first != self._first:
            assert self._from is not None
            self._first, self._held = first, self._from(first)
        return first, self._held


class _Draws(NamedTuple):
    """Draws to be made, in order: each has its row of logits, its state and, by rejection, the
    guess (-1: none) and the distribution that it was drawn from.
    """

    rows: Sequence[int]
    states: Sequence[SamplerState]
    guesses: Sequence[int] | None = None  # None: plain draws
    drawn_from: Sequence[Float32 | None] = ()

    def take(
        self, sampler: Sampler, logits: Float32 | None, first: int, indices: Sequence[int]
    ) -> Sampled:
        """Make some of the draws, with logits from row ``first`` on."""
        rows = [self.rows[index] - first for index in indices]
        states = [self.states[index] for index in indices]
        if self.guesses is None:
            return sampler.sample(logits, rows, states)
        guesses = [self.guesses[index] for index in indices]
        drawn_from = [self.drawn_from[index] for index in indices]
        return sampler.verify(logits, rows, states, guesses, drawn_from)


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
    """
    rows = scheduled.sample_rows
    logits = _Logits(result, len(scheduled.batch.logits_rows))
    if scheduled.drafts is None:
        draws = _Draws(rows, states)
        if rejection:  # its draws have random numbers of their own, drafts or not
            draws = _Draws(rows, states, [-1] * len(rows), [None] * len(rows))
        sampled, scores = _sample(sampler, draws, scheduled, logits)
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
    draws = _Draws(spread, owners)
    if rejection:
        draws = _Draws(spread, owners, *_guesses(scheduled, len(states)))
    sampled, scores = _sample(sampler, draws, scheduled, logits)
    drawn = _verified(scheduled.drafts, states, sizes, sampled, scores)
    if scheduled.branches:
        _follow(sampler, scheduled, states, logits, drawn, rejection)
    return drawn


def _guesses(scheduled: Scheduled, count: int) -> tuple[list[int], list[Float32 | None]]:
    """Return, for each draw of ``count`` samples, the guess at it (-1 behind the last) and the
    distribution that it was drawn from.
    """
    drafts = scheduled.drafts or []
    guesses: list[int] = []
    drawn_from: list[Float32 | None] = []
    for draft, q in zip(drafts, scheduled.probabilities or [None] * len(drafts), strict=True):
        guesses += [*draft, -1]
        drawn_from += [None] * len(draft) if q is None else list(q[: len(draft)])
        drawn_from.append(None)
    rest = count - len(drafts)
    return guesses + [-1] * rest, drawn_from + [None] * rest


def _verified(
    drafts: list[list[int]],
    states: Sequence[SamplerState],
    sizes: list[int],
    sampled: Sampled,
    scores: dict[PromptRows, list[TokenLogprobs] | str],
) -> Drawn:
    """Keep the draws that stand. By rejection, which ends with the first draw that is not the
    guess, all of them do. A draw that failed behind others is tried again in the next step, where
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


def _follow(
    sampler: Sampler,
    scheduled: Scheduled,
    states: Sequence[SamplerState],
    logits: _Logits,
    drawn: Drawn,
    rejection: bool,
) -> None:
    """Where a run has left its draft and continues as a branch does, draw on from the branch's
    rows: they equal those of decoding token by token, and the sampler's state is behind the run.

    This holds whatever rule verified the draft. The token that took a rejected one's place was
    drawn from the target's distribution or, under speculative sampling, from the residual
    max(0, p - q), normalised; neither knows of branches. Miao et al. ("SpecInfer", 2024, multi-step
    speculative sampling) then try one branch after another: each is accepted with the residual's
    probability of its token over the branch's own of it, and otherwise taken out of the residual.
    Branches are certain of their tokens, so the divisor is 1, and what is taken out is the token
    itself: this is to draw from the residual once and to follow the branch that has the token, if
    there is one. Behind it the target's own distribution counts again.
    """
    going = [index for index in scheduled.branches if drawn.runs[index]]
    while True:
        # Rows come in the order of branches, so the lowest part of the logits is done first.
        heads = {index: head for index in going if (head := _head(scheduled, drawn, index))}
        if not heads:
            return
        first, held = logits.part(min(row for row, _ in heads.values()))
        going = [index for index, (row, _) in heads.items() if row >= first + logits.size]
        spans = {
            index: (row - first, guesses[: first + logits.size - row - 1])
            for index, (row, guesses) in heads.items()
            if row < first + logits.size
        }
        draws = _Draws(
            [row + at for row, guesses in spans.values() for at in range(1 + len(guesses))],
            [states[index] for index, (_, guesses) in spans.items() for _ in (None, *guesses)],
        )
        if rejection:
            certain = [each for _, guesses in spans.values() for each in (*guesses, -1)]
            draws = _Draws(draws.rows, draws.states, certain, [None] * len(certain))
        sampled = draws.take(sampler, held, 0, range(len(draws.rows)))
        begin = 0
        for index, (_, guesses) in spans.items():
            end = begin + 1 + len(guesses)
            tokens = sampled.token_ids[begin:end]
            kept = replay(guesses, tokens)
            states[index].rewind(len(tokens) - tokens.count(-1) - kept)
            drawn.runs[index] += tokens[:kept]
            if drawn.logprobs is not None:
                given = sampled.logprobs
                drawn.logprobs[index] += given[begin : begin + kept] if given else [None] * kept
            if kept:
                going.append(index)
            begin = end


def _head(scheduled: Scheduled, drawn: Drawn, index: int) -> tuple[int, list[int]] | None:
    """Return the row of logits behind a run, in a branch that begins with the run, and the guesses
    that follow it there; None if there is no such branch.
    """
    run = drawn.runs[index]
    for branch in scheduled.branches[index]:
        if branch.token_ids[: len(run)] == run:
            return branch.row + len(run) - 1, branch.token_ids[len(run) :]
    return None


def _sample(
    sampler: Sampler, draws: _Draws, scheduled: Scheduled, logits: _Logits
) -> tuple[Sampled, dict[PromptRows, list[TokenLogprobs] | str]]:
    """Make the draws; return them and the prompts' scores."""
    rows = draws.rows
    scores: dict[PromptRows, list[TokenLogprobs] | str] = {}
    if logits.size >= logits.total:
        _, held = logits.part(0)
        sampled = draws.take(sampler, held, 0, range(len(rows)))
        for span in scheduled.prompt_rows:
            _score(sampler, span, 0, logits.total, held, scores)
        return sampled, scores

    token_ids = [-1] * len(rows)
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    errors: dict[int, str] = {}
    ended: set[int] = set()  # ids of states whose guess did not stand
    for begin in range(0, logits.total, logits.size):
        first, held = logits.part(begin)
        end = first + logits.size
        here = [index for index, row in enumerate(rows) if first <= row < end]
        if ended:
            here = [index for index in here if id(draws.states[index]) not in ended]
        part = draws.take(sampler, held, first, here)
        for at, index in enumerate(here):
            token_ids[index] = part.token_ids[at]
            if part.logprobs is not None:
                logprobs[index] = part.logprobs[at]
            if draws.guesses is not None and token_ids[index] != draws.guesses[index]:
                ended.add(id(draws.states[index]))
        errors |= {here[at]: why for at, why in part.errors.items()}
        for span in scheduled.prompt_rows:
            _score(sampler, span, first, end, held, scores)
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
    position = span.position + low - span.row
    try:
        so_far += sampler.prompt_logprobs(
            logits,
            range(low - first, high - first),
            span.seq.token_ids[position : position + high - low],
            span.seq.owner.params.prompt_logprobs or 0,
        )
    except ValueError as error:
        scores[span] = str(error)
