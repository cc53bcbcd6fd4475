"""Tokens a second by batch size, beside what the machine's limits allow.

Prefill: all prompts of a batch from the first step to the last, each drawing one token. Decode: as
many steps as output tokens, every sequence drawing one in each. The limit of a phase is the
roofline of the very steps that were run (`CostModel`), at the machine's rates as measured around
them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from octavo.engine.config import EngineConfig
from octavo.executor.cost import Rates
from octavo.loader.base import Checkpoint
from octavo.machine.limits import Limits, Progress, highest
from octavo.tools.bench.drive import BatchShape, Drive, MeasuredPhase

_WARM_UP = BatchShape(1, 32, 8)


class Spread(NamedTuple):
    """Mean and standard deviation over repetitions."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


_SPECULATION = (
    "tokens_per_pass",
    "acceptance_rate",
    "acceptance_per_position",
    "drafting_share",
    "time_saved_s",
    "estimated_speed_up",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One batch size. Rates in tokens a second; shares as fractions of the limit."""

    model: str
    weight_bytes: int  # as the engine holds them
    isa: str
    threads: int
    batch: int
    prompt_len: int
    output_len: int
    context: int  # when decode begins, in tokens
    kv_cache_dtype: str
    repetitions: int
    prefill_tok_s: float
    prefill_tok_s_deviation: float
    prefill_limit_tok_s: float
    prefill_of_limit: float
    decode_tok_s: float
    decode_tok_s_deviation: float
    decode_limit_tok_s: float
    decode_of_limit: float
    limits: list[dict[str, Any]]  # before and after, or the stored ones
    tokens_per_pass: float | None = None  # of a decoding sequence; None: no speculation
    acceptance_rate: float | None = None  # accepted ÷ checked draft tokens; None: none was checked
    acceptance_per_position: list[float] | None = None  # of the drafts, by their tokens' place
    drafting_share: float | None = None  # of decode's time
    time_saved_s: float | None = None  # of decode, by speculation: estimated from steps' times
    estimated_speed_up: float | None = None  # (time + time saved) ÷ time

    def as_dict(self) -> dict[str, Any]:
        row = asdict(self)
        if self.tokens_per_pass is None:
            for name in _SPECULATION:
                del row[name]
        return row


def throughput(
    model: str | Path | Checkpoint,
    config: EngineConfig,
    *,
    batch_sizes: list[int],
    prompt_len: int,
    output_len: int,
    repetitions: int,
    limits: Limits | None = None,
    progress: Progress = lambda _: None,
) -> Iterator[Row]:
    """A row for each batch size, as it is done.

    ``limits`` None: measured quickly before and after each, on the engine's threads. Raises what
    `Drive.load` does.
    """
    loads = [BatchShape(size, prompt_len, output_len) for size in batch_sizes]
    progress("loading the model")
    drive = Drive.load(model, config, [*loads, _WARM_UP])
    try:
        progress("warming up")
        _phases(drive, _WARM_UP)
        before = limits or drive.limits(progress)
        for load in loads:
            prefills, decodes = [], []
            for repetition in range(repetitions):
                progress(f"batch {load.sequences}, repetition {repetition + 1} of {repetitions}")
                prefill, decode = _phases(drive, load)
                prefills.append(prefill)
                decodes.append(decode)
            around = [before]
            if limits is None:
                before = drive.limits(progress)  # of the next
                around.append(before)
            yield _row(drive, load, prefills, decodes, around)
    finally:
        drive.close()


def _phases(drive: Drive, load: BatchShape) -> tuple[MeasuredPhase, MeasuredPhase]:
    prompts = drive.prompts(load)
    return drive.prefill(prompts), drive.decode(prompts, load.output_len)


def _row(
    drive: Drive,
    load: BatchShape,
    prefills: list[MeasuredPhase],
    decodes: list[MeasuredPhase],
    limits: list[Limits],
) -> Row:
    loaded, working_set = drive.loaded, drive.working_set(load)
    prefill_rates = highest(limits, drive.threads, loaded.weight_bytes)
    decode_rates = highest(limits, drive.threads, working_set)
    prefill = Spread.of([phase.tokens / phase.seconds for phase in prefills])
    decode = Spread.of([phase.tokens / phase.seconds for phase in decodes])
    prefill_limit = _limit(drive, prefills, prefill_rates)
    decode_limit = _limit(drive, decodes, decode_rates)
    passes = sum(phase.passes for phase in decodes)
    drafted = sum(phase.draft_tokens for phase in decodes)
    accepted = sum(phase.accepted_tokens for phase in decodes)
    return Row(
        model=loaded.checkpoint.path.name,
        weight_bytes=loaded.weight_bytes,
        isa=drive.executor.capabilities.tier,
        threads=drive.threads,
        batch=load.sequences,
        prompt_len=load.prompt_len,
        output_len=load.output_len,
        context=load.prompt_len,
        kv_cache_dtype=loaded.engine.scheduler.kv.layout.dtype.value,
        repetitions=len(prefills),
        prefill_tok_s=prefill.mean,
        prefill_tok_s_deviation=prefill.deviation,
        prefill_limit_tok_s=prefill_limit,
        prefill_of_limit=prefill.mean / prefill_limit,
        decode_tok_s=decode.mean,
        decode_tok_s_deviation=decode.deviation,
        decode_limit_tok_s=decode_limit,
        decode_of_limit=decode.mean / decode_limit,
        limits=[each.summary(drive.threads, working_set) for each in limits],
        tokens_per_pass=sum(phase.tokens for phase in decodes) / passes if passes else None,
        acceptance_rate=accepted / drafted if drafted else None,
        **_savings(decodes) if passes else {},
    )


def _savings(decodes: list[MeasuredPhase]) -> dict[str, Any]:
    seconds = sum(phase.seconds for phase in decodes)
    saved = sum(phase.time_saved_seconds for phase in decodes)
    drafts = sum(phase.drafts for phase in decodes)
    accepted = map(sum, zip_longest(*(p.accepted_per_position for p in decodes), fillvalue=0))
    return {
        "acceptance_per_position": [count / drafts for count in accepted] if drafts else None,
        "drafting_share": sum(phase.drafting_seconds for phase in decodes) / seconds,
        "time_saved_s": saved,
        "estimated_speed_up": (seconds + saved) / seconds,
    }


def _limit(drive: Drive, phases: list[MeasuredPhase], rates: Rates) -> float:
    """Tokens a second if every op of the steps ran at the roofline."""
    seconds = sum(
        drive.executor.costs.seconds(batch, rates) for phase in phases for batch in phase.batches
    )
    return sum(phase.tokens for phase in phases) / seconds
