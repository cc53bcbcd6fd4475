"""octavo profile: one step of a model taken apart, op by op."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import json_text, on_stderr, writing
from octavo.cli.fold import show_report
from octavo.cli.options import (
    ENGINE_OPTIONS,
    LIMITS_HELP,
    Model,
    check_file,
    engine_config,
    length,
    takes,
)
from octavo.words import plural

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.tools.bench.profile import Profile

EXAMPLES = (
    "octavo profile smollm2",
    "octavo profile smollm2 --batch-size 32 --context 1K",
    "octavo profile smollm2 --prompt-len 512 --trace prefill.json",
)


@takes(engine=(ENGINE_OPTIONS, engine_config))
def command(
    model: Model,
    engine: EngineConfig,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sequences that decode, or prompts read.")
    ] = 1,
    context: Annotated[
        str | None,
        typer.Option(
            parser=length,
            metavar="TOKENS",
            help="Tokens each has in the cache when it decodes.",
            show_default="128",
        ),
    ] = None,
    prompt_len: Annotated[
        str | None,
        typer.Option(
            parser=length,
            metavar="TOKENS",
            help="Take apart the reading of prompts of this length, instead of decoding.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, max=10000, metavar="N", help="Steps run; the median one is shown.")
    ] = 15,
    layers: Annotated[
        bool, typer.Option("--layers", help="A row for every region, not one for all layers.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            metavar="FILE",
            help="Write the step as a trace file for Perfetto or chrome://tracing.",
        ),
    ] = None,
    stored_limits: Annotated[bool, typer.Option("--stored-limits", help=LIMITS_HELP)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as one JSON object, in seconds and bytes.")
    ] = False,
) -> None:
    """Take one step apart, and show where its time goes.

    Time, bytes, operations and share of the limit of each of its parts. They add up to the step;
    what is neither memory nor arithmetic (threads that meet, scheduling, sampling) stands below.
    """
    from octavo.loader import load
    from octavo.loader.pull import resolve
    from octavo.machine.limits import Limits
    from octavo.models.families import program
    from octavo.tools.bench.drive import BatchShape
    from octavo.tools.bench.profile import profile
    from octavo.tools.bench.trace import trace as as_trace

    if trace is not None:
        check_file(trace, "")
    if prompt_len is not None and context is not None:
        raise typer.BadParameter("either --prompt-len (prefill) or --context (decode)")
    tokens = int(prompt_len or context or 128)  # parsed already
    if prompt_len is not None and batch_size * tokens > engine.max_num_batched_tokens:
        engine = replace(engine, max_num_batched_tokens=batch_size * tokens)
    checkpoint = load(resolve(model))
    with on_stderr() as progress:
        result, step = profile(
            checkpoint,
            engine,
            BatchShape(batch_size, tokens, steps + 8),
            prefill=prompt_len is not None,
            steps=steps,
            limits=Limits.stored(progress) if stored_limits else None,
            progress=progress,
        )
    try:
        show_report(
            json_text(result.as_dict(), indent=2) if as_json else as_text(result, layers),
            as_json=as_json,
        )
    finally:  # also when nobody reads on
        if trace is not None:
            with writing(trace) as file:
                file.write_text(json_text(as_trace(result, step, program(checkpoint.config))))


def as_text(profile: Profile, layers: bool = False) -> str:
    """A table: regions, longest first, then what is none of them."""
    total = profile.step_seconds
    what = (
        f"reading {profile.sequences} × {profile.tokens // profile.sequences} tokens"
        if profile.kind == "prefill"
        else f"{plural(profile.sequences, 'sequence')} decoding at a context of {profile.context}"
    )
    lines = [
        f"{profile.model}, {profile.isa}, {plural(profile.threads, 'thread')}: {what}",
        f"{1e3 * total:.3f} ms, {profile.of_limit:.1%} of the limit "
        f"(median of {profile.steps} steps)",
        "",
        f"{'':<30}{'n':>5}{'µs':>11}{'of step':>9}{'MB':>10}{'Mop':>11}{'GB/s':>8}{'Gop/s':>8}"
        f"{'of limit':>10}  bound by",
    ]
    rows = [(1, row) for row in profile.regions] if layers else profile.by_name()
    for count, row in rows:
        where = f" [{row.layer}]" if layers and row.layer is not None else ""
        share = "" if row.of_limit is None else f"{row.of_limit:.1%}"
        lines.append(
            f"{row.name + where:<30}{count:>5}{1e6 * row.seconds:>11.1f}{row.seconds / total:>9.1%}"
            f"{row.bytes / 1e6:>10.3f}{row.operations / 1e6:>11.2f}"
            f"{row.bytes_per_second / 1e9:>8.1f}{row.operations_per_second / 1e9:>8.1f}"
            f"{share:>10}  {row.bound or ''}".rstrip()
        )
    for name, seconds in profile.overheads.items():
        times = f"{profile.meetings}" if name.startswith("meetings") else ""
        lines.append(f"{name:<30}{times:>5}{1e6 * seconds:>11.1f}{seconds / total:>9.1%}")
    lines.append(f"{'step':<30}{'':>5}{1e6 * total:>11.1f}{1:>9.1%}")
    memory = " → ".join(f"{each['bytes_per_second'] / 1e9:.1f}" for each in profile.limits)
    last = profile.limits[-1]
    lines += [
        "",
        f"limits: memory {memory} GB/s, int8 {last['int8_ops_per_second'] / 1e9:.0f}, "
        f"bf16 {last['bf16_ops_per_second'] / 1e9:.0f}, "
        f"fp32 {last['fp32_ops_per_second'] / 1e9:.0f} Gop/s, "
        f"{1e9 * last['barrier_seconds']:.0f} ns from job to job",
    ]
    return "\n".join(lines)
