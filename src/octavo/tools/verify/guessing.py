"""Answers with every drafter beside those without: the same tokens, logprobs and bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from octavo.engine.config import EngineConfig
from octavo.loader.base import Checkpoint
from octavo.spec_decode.config import SpeculativeConfig
from octavo.spec_decode.heads import read_heads
from octavo.tools.verify.bits import Comparison, Reference, threads_of
from octavo.tools.verify.faults import WrongGuess
from octavo.tools.verify.running import Answer, running
from octavo.tools.verify.trials import COUNT, Trial

NUM_TOKENS = 4  # of a draft, where the length is left open: so that there always are drafts


@dataclass(frozen=True, slots=True)
class Guessing:
    """What a drafter came to, under the rule `replay`."""

    cases: int  # answers compared
    greedy_equal: bool  # tokens, text, logprobs and ends of the greedy trials …
    replay_equal: bool  # … and of those that draw, with their seeds
    rows: int  # of logits, compared
    differing_bits: int
    draft_tokens: int
    accepted_tokens: int
    first: str | None  # difference
    missed: str | None  # what should have happened and did not

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    checkpoint: Checkpoint,
    reference: Reference,
    method: SpeculativeConfig,
    fault: WrongGuess | None = None,
) -> Guessing:
    """Some of the trials one at a time, some four at a time, and all at once; drafts are checked by
    `replay`, whatever ``method`` says. Raises what loading an engine does, and `VerificationError`.
    """
    method = replace(pinned(method, checkpoint), acceptance_method="replay")
    threads = threads_of(reference.config)
    config = replace(reference.config, speculative_config=method, threads=threads)
    comparison = Comparison(reference)
    trials = reference.trials
    equal = {True: True, False: True}
    cases, first = 0, None
    with running(checkpoint, config, row=comparison, change=fault.see if fault else None) as engine:
        if fault is not None:
            engine.engine.sampler = fault.sampler(engine.engine.sampler)
        for batch, chosen in ((1, trials[::3]), (4, trials[1::2]), (COUNT, trials)):
            answers = engine.answers(chosen, batch)
            for trial in chosen:
                cases += trial.params.n
                got, expected = answers[trial.name], reference.answers[trial.name]
                if got != expected:
                    equal[trial.greedy] = False
                    first = first or difference(trial, got, expected, batch)
        stats = engine.stats
    missed = []
    if not stats.draft_tokens:
        missed.append("nothing was drafted")
    if stats.drafter_failures:
        missed.append("the drafter failed and was given up")
    if not comparison.rows:
        missed.append("no row of logits was compared")
    return Guessing(
        cases,
        equal[True],
        equal[False],
        comparison.rows,
        comparison.differing_bits,
        stats.draft_tokens,
        stats.accepted_tokens,
        first or comparison.first,
        "; ".join(missed) or None,
    )


def load(checkpoint: Checkpoint, config: EngineConfig, method: SpeculativeConfig) -> None:
    """Sees whether an engine can be had with a drafter; raises what loading it does."""
    method = pinned(method, checkpoint)
    with running(checkpoint, replace(config, speculative_config=method)):
        pass


def pinned(
    method: SpeculativeConfig, checkpoint: Checkpoint, tokens: int = NUM_TOKENS
) -> SpeculativeConfig:
    """With drafts of a fixed length, of ``tokens`` tokens or as many as there are heads, where the
    length was left open. Raises `CheckpointError` for heads that cannot be read.
    """
    if method.num_speculative_tokens is not None:
        return method
    if method.method == "medusa":
        tokens = min(tokens, read_heads(Path(method.model or ""), checkpoint).num_heads)
    return replace(method, num_speculative_tokens=tokens)


def difference(trial: Trial, got: Answer, expected: Answer, batch: int) -> str:
    """Where two answers part, for people."""
    where = f"{trial.name}, {batch} at a time"
    for choice, tokens in expected.token_ids.items():
        mine = got.token_ids.get(choice, [])
        if mine != tokens:
            at = _parting(mine, tokens)
            return f"{where}, answer {choice}: other tokens from the {at + 1}th on"
        if got.logprobs[choice] != expected.logprobs[choice]:
            at = _parting(got.logprobs[choice], expected.logprobs[choice])
            return f"{where}, answer {choice}: another logprob of the {at + 1}th token"
    return f"{where}: another text, end or logprob of the prompt"


def _parting(one: Sequence[Any], other: Sequence[Any]) -> int:
    same = (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(same, min(len(one), len(other)))
