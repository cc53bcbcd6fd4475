"""octavo bench throughput: tokens a second by batch size, beside the machine's limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import json_text, on_stderr
from octavo.cli.fold import show_report
from octavo.cli.options import (
    ENGINE_OPTIONS,
    LIMITS_HELP,
    Model,
    engine_config,
    length,
    takes,
)
from octavo.words import plural

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.tools.bench.throughput import Row

EXAMPLES = (
    "octavo bench throughput smollm2",
    "octavo bench throughput model.gguf --prompt-len 512 --output-len 128 --batch-size 1,8,32,128",
    "octavo bench throughput smollm2 --batch-size 1,32 --threads 2 --json > rows.json",
    """octavo bench throughput smollm2 --speculative-config '{"method": "suffix"}'""",
)


def batch_sizes(text: str) -> list[int]:
    """ "1,8,32": positive and different."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of sizes such as 1,8,32") from None
    if min(sizes) < 1:
        raise typer.BadParameter(f"a batch has at least one sequence, not {min(sizes)}")
    if len(set(sizes)) < len(sizes):
        raise typer.BadParameter(f"{text!r} names a size twice")
    return sizes


@takes(engine=(ENGINE_OPTIONS, engine_config))
def command(
    model: Model,
    engine: EngineConfig,
    prompt_len: Annotated[
        str, typer.Option(parser=length, metavar="TOKENS", help="Tokens of each prompt.")
    ] = "512",
    output_len: Annotated[
        str, typer.Option(parser=length, metavar="TOKENS", help="Tokens drawn for each.")
    ] = "128",
    batch_size: Annotated[
        str,
        typer.Option(parser=batch_sizes, metavar="SIZES", help="Sequences at once, each in turn."),
    ] = "1,8,32,128",
    repetitions: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Runs of each, on new prompts.")
    ] = 3,
    stored_limits: Annotated[bool, typer.Option("--stored-limits", help=LIMITS_HELP)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list of rows; shares are fractions.")
    ] = False,
) -> None:
    """Measure prefill and decode beside the machine's limit.

    In tokens a second. Prompts are random and share nothing. Each figure is a mean ± standard
    deviation.
    """
    from octavo.machine.limits import Limits
    from octavo.tools.bench.throughput import throughput

    rows: list[Row] = []
    with on_stderr() as progress:
        for row in throughput(
            model,
            engine,
            batch_sizes=batch_size,  # type: ignore[arg-type]  # parsed
            prompt_len=prompt_len,  # type: ignore[arg-type]
            output_len=output_len,  # type: ignore[arg-type]
            repetitions=repetitions,
            limits=Limits.stored(progress) if stored_limits else None,
            progress=progress,
        ):
            if not as_json:
                progress("")
                show_report(as_text(row) if rows else f"{header(row)}\n{as_text(row)}")
            rows.append(row)
    if not as_json and rows[-1].tokens_per_pass is not None:
        show_report(speculation(rows))
    show_report(
        json_text([row.as_dict() for row in rows], indent=2) if as_json else footer(rows),
        as_json=as_json,
    )


def header(row: Row) -> str:
    """What the rows have in common, and the head of a table in Markdown."""
    return (
        f"{row.model}, {row.weight_bytes / 1e6:.0f} MB, {row.isa}, "
        f"{plural(row.threads, 'thread')}, prompts of {row.prompt_len} tokens, "
        f"{row.output_len} drawn, {plural(row.repetitions, 'repetition')}\n\n"
        "| batch |   prefill tok/s | of limit |   decode tok/s | of limit | memory GB/s |\n"
        "|------:|----------------:|---------:|---------------:|---------:|------------:|"
    )


def as_text(row: Row) -> str:
    """A line of the table."""
    memory = " → ".join(f"{each['bytes_per_second'] / 1e9:.1f}" for each in row.limits)
    prefill, decode = f"{row.prefill_tok_s:.1f}", f"{row.decode_tok_s:.1f}"
    if row.repetitions > 1:  # one has no deviation
        prefill += f" ± {row.prefill_tok_s_deviation:.1f}"
        decode += f" ± {row.decode_tok_s_deviation:.1f}"
    return (
        f"| {row.batch:>5} | {prefill:>15} | {row.prefill_of_limit:>8.1%} "
        f"| {decode:>14} | {row.decode_of_limit:>8.1%} | {memory:>11} |"
    )


def speculation(rows: list[Row]) -> str:
    """What came of the drafts, a line a batch size."""
    return "\n" + "\n".join(
        f"batch {row.batch}: {row.tokens_per_pass:.2f} tokens per pass, "
        + (
            "no draft was checked"
            if row.acceptance_rate is None
            else f"{row.acceptance_rate:.0%} of the drafts accepted{_by_position(row)}"
        )
        + f", drafting {row.drafting_share:.1%} of the time, {row.time_saved_s:.2f} s saved: "
        f"about {row.estimated_speed_up:.2f} × as fast as without"
        for row in rows
    )


def _by_position(row: Row) -> str:
    rates = row.acceptance_per_position or []
    shown = ", ".join(f"{rate:.0%}" for rate in rates[:6]) + (", …" if len(rates) > 6 else "")
    return f" ({shown} by position)" if rates else ""


def footer(rows: list[Row]) -> str:
    """What the shares are shares of."""
    limits = rows[-1].limits[-1]
    return (
        "\nlimit: each op's bytes at the memory's rate or its operations at the peak, whichever "
        f"takes longer;\nint8 {limits['int8_ops_per_second'] / 1e9:.0f}, "
        f"bf16 {limits['bf16_ops_per_second'] / 1e9:.0f}, "
        f"fp32 {limits['fp32_ops_per_second'] / 1e9:.0f} Gop/s; memory before and after each row"
    )
