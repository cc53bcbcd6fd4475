"""octavo fidelity: what a model's numbers have lost, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text, now_and_then, on_stderr, writing
from octavo.cli.fold import show_report
from octavo.cli.options import ENGINE_OPTIONS, check_file, engine_config, length, takes
from octavo.words import number

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig

EXAMPLES = (
    "octavo fidelity smollm2",
    "octavo fidelity smollm2-gptq smollm2-awq --against smollm2 --plot variants.svg",
    "octavo fidelity smollm2 --kv-cache-dtype fp16 --text book.txt --json",
)


@takes(engine=(ENGINE_OPTIONS, engine_config))
def command(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Known names, GGUF files or their folders, or Hugging Face ids: each is measured.",
            show_default=False,
            metavar="MODEL",
        ),
    ],
    engine: EngineConfig,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER",
            help="The model that is right: the one before it was made small.",
            show_default="the first MODEL",
        ),
    ] = None,
    reference: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="How OTHER is computed. exact: its numbers as they are, in fp32, without kernels "
            "and cache. served: as the engine serves it without options; faster for large models.",
        ),
    ] = "exact",
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text to measure on.",
            show_default="25 kB of English and code that Octavo brings",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(parser=length, metavar="N", help="Of the text, the first N tokens only."),
    ] = None,
    context: Annotated[
        str,
        typer.Option(
            parser=length,
            metavar="TOKENS",
            help="The text is cut into windows of so many tokens, or as many as the shortest "
            "context of a model.",
        ),
    ] = "1024",
    speed: Annotated[bool, typer.Option(help="Measure tokens a second, too.")] = True,
    kernels: Annotated[
        bool, typer.Option(help="Check that the kernels hold and multiply the file's numbers.")
    ] = True,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="Draw quality against bytes: .svg, .png, .pdf."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print an object; of several models, a list of them.")
    ] = False,
) -> None:
    """Measure what a model has lost, and what it costs.

    Its next-token distributions beside those of OTHER: perplexity; KL divergence in nats, mean and
    99th percentile; how often both rank the same token first; when greedy answers part. Bytes;
    tokens a second. Engine options hold for the MODELs, so that what they lose is measured, too.
    """
    from octavo.engine.config import SettingsError

    if reference not in ("exact", "served"):
        raise typer.BadParameter(f"reference {reference!r} is neither exact nor served")
    if plot is not None:
        check_file(plot)
    from octavo.tools.bench.fidelity_report import measure
    from octavo.tools.quantize.fidelity import TextError

    try:
        with on_stderr() as show:
            rows = measure(
                models,
                engine,
                against=against or models[0],
                how=reference,
                text=text,
                tokens=None if tokens is None else int(tokens),  # parsed already
                context=int(context),
                speed=speed,
                kernels=kernels,
                progress=now_and_then(show),
            )
    except TextError as error:
        raise SettingsError(str(error)) from None
    try:
        if as_json:
            typer.echo(json_text(rows[0] if len(models) == 1 else rows, indent=2))
        else:
            show_report(as_text(rows[0]) if len(models) == 1 else as_table(rows))
    finally:  # of the two, what goes wrong with one does not take the other with it
        if plot is not None:
            from octavo.tools.quantize.plot import draw

            with writing(plot) as file:
                draw(rows, file)
    faults = [
        f"{row['path']}: {fault}" for row in rows if kernels for fault in row["kernels"]["faults"]
    ]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise SettingsError(f"the kernels are not faithful: {faults[0]}{more}")


# --- for people ----------------------------------------------------------------------------------


def as_text(row: dict[str, Any]) -> str:
    """One model."""
    greedy = row["greedy"]
    settings = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
    lines = [
        f"{row['model']}{f' ({settings})' if settings else ''} {_against(row)}",
        f"{row['text']}: {row['tokens']:,} tokens in windows of {row['context']:,}",
        "",
        f"perplexity     {row['perplexity']:.4f} (the reference {row['reference_perplexity']:.4f})",
        f"KL             mean {number(row['kl_mean'])} ± {number(row['kl_standard_error'], 2)} "
        f"nats, median {number(row['kl_median'], 3)}, 99th percentile {number(row['kl_p99'])}, "
        f"largest {row['kl_max']:.3g}",
        f"top-1          {row['top1_agreement']:.2%} of positions rank the same token first",
        f"greedy         {greedy['median']:g} tokens until the first that the reference would not "
        f"have drawn, in the median of {greedy['prompts']} prompts; {greedy['first']} at the "
        f"earliest; in {greedy['never']} not within {greedy['tokens']}",
        f"size           file {row['file_bytes']:,} bytes, held {row['held_bytes']:,}; "
        f"{row['bytes_per_weight']:.4f} bytes a weight of the matrices "
        f"({row['held_bytes_per_weight']:.4f} held)",
    ]
    if "decode_tokens_per_second" in row:
        lines.append(
            f"speed          decode {row['decode_tokens_per_second']:.1f} tokens/s, one stream; "
            f"prefill {row['prefill_tokens_per_second']:.0f} ({row['isa']}, "
            f"{row['threads']} threads)"
        )
    if "kernels" in row:
        lines += _kernel_lines(row["kernels"])
    if not row["same_tokens"]:
        lines.append(
            "tokens         its own tokenizer cuts this text otherwise; both were given the "
            "reference's"
        )
    return "\n".join(lines)


def _against(row: dict[str, Any]) -> str:
    how = "computed exactly, in fp32" if row["reference"] == "exact" else "as the engine serves it"
    return f"against {row['against']}, {how}"


def _kernel_lines(found: dict[str, Any]) -> list[str]:
    lines = [
        f"kernels        {found['matrices']} matrices hold the file's numbers "
        f"(off by {found['max_deviation']:.1g} at most); products are off by "
        f"{found['max_product_error']:.2f} of what rounding activations allows"
        if not found["faults"]
        else f"kernels        NOT FAITHFUL: {found['faults'][0]}"
    ]
    if found["columns"]:
        outliers = sum(found["outlier_columns"].values())
        lines.append(
            f"fixed point    {outliers:,} of {found['columns']:,} columns have a group whose scale "
            "is over 100 × the median's, and lose precision "
            f"(the largest: {found['max_outlier']:.3g} ×)"
        )
        if outliers:
            worst = sorted(found["outlier_columns"].items(), key=lambda item: -item[1])[:5]
            lines.append(
                "               most in " + ", ".join(f"{name} ({count})" for name, count in worst)
            )
    return lines


def as_table(rows: list[dict[str, Any]]) -> str:
    """Several models in Markdown, a line each."""
    first = rows[0]
    lines = [
        f"{_against(first)}: perplexity {first['reference_perplexity']:.4f}; "
        f"{first['text']}, {first['tokens']:,} tokens in windows of {first['context']:,}",
        "",
        "| model | file MB | bytes a weight (held) | perplexity | mean KL, nats | 99 % | top-1 "
        "| greedy | decode tok/s | prefill |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        decode, prefill = (
            f"{row[name]:.0f}" if name in row else "–"
            for name in ("decode_tokens_per_second", "prefill_tokens_per_second")
        )
        lines.append(
            f"| {row['model']} | {row['file_bytes'] / 1e6:.1f} | {row['bytes_per_weight']:.3f} "
            f"({row['held_bytes_per_weight']:.3f}) | {row['perplexity']:.3f} "
            f"| {number(row['kl_mean'])} | {number(row['kl_p99'], 3)} "
            f"| {row['top1_agreement']:.2%} | {row['greedy']['median']:g} | {decode} | {prefill} |"
        )
    greedy = first["greedy"]
    lines += [
        "",
        f"greedy: tokens until the first that the reference would not have drawn, median of "
        f"{greedy['prompts']} prompts (at most {greedy['tokens']})",
    ]
    outliers = {
        row["model"]: sum(row["kernels"]["outlier_columns"].values())
        for row in rows
        if row.get("kernels", {}).get("outlier_columns")
    }
    lines += [
        f"{name}: {count:,} columns lose precision in fixed point (a group's scale over 100 × the "
        "others')"
        for name, count in outliers.items()
    ]
    return "\n".join(lines)
