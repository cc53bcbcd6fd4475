"""octavo quantize: a model made small, layer by layer, and written so that others load it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text
from octavo.cli.fold import show_report
from octavo.cli.options import Model
from octavo.cli.text_samples import Calibration, NumSamples, SeqLen, collected, text_samples
from octavo.machine.memory import as_size

if TYPE_CHECKING:
    from octavo.loader.base import Checkpoint
    from octavo.tools.quantize.forecast import QuantizationForecast
    from octavo.tools.quantize.grid import Scheme
    from octavo.tools.quantize.layouts import Format
    from octavo.tools.quantize.quantize_checkpoint import QuantizationResult
    from octavo.tools.quantize.quantizer import Method, Progress, Recipe, Report

EXAMPLES = (
    "octavo quantize gemma3-270m --method rtn --bits 8 --embedding-bits 5 -o small.gguf",
    "octavo quantize org/repo --method gptq --group-size 128 -o model-gptq",
    "octavo quantize org/repo --bits 3 --group-size 32 -o model-gptq-3bit",
    "octavo quantize org/repo --method awq --calibration mine.txt -o model-awq",
    "octavo quantize org/repo --mix Q4_K_M -o model-q4_k_m.gguf",
    "octavo quantize org/repo --mix Q3_K_M --imatrix imatrix.gguf -o model-q3_k_m.gguf",
    "octavo quantize org/repo --method gptq -o model.q4_1.gguf",
    "octavo quantize org/repo --method rtn --bits 8 --format compressed-tensors -o model-int8",
)


class MethodName(StrEnum):
    rtn = "rtn"
    gptq = "gptq"
    awq = "awq"
    imatrix = "imatrix"


class MixName(StrEnum):
    Q2_K = "Q2_K"
    Q3_K_S = "Q3_K_S"
    Q3_K_M = "Q3_K_M"
    Q3_K_L = "Q3_K_L"
    Q4_K_S = "Q4_K_S"
    Q4_K_M = "Q4_K_M"
    Q5_K_S = "Q5_K_S"
    Q5_K_M = "Q5_K_M"
    Q6_K = "Q6_K"


class FormatName(StrEnum):
    gptq = "gptq"
    awq = "awq"
    compressed_tensors = "compressed-tensors"
    gguf = "gguf"


class OrderName(StrEnum):
    static = "static"
    group = "group"
    none = "none"


class ScalesName(StrEnum):
    mse = "mse"
    minmax = "minmax"


class Bits(StrEnum):
    three = "3"
    four = "4"
    eight = "8"


class EmbeddingBits(StrEnum):
    four = "4"
    five = "5"
    six = "6"
    eight = "8"
    sixteen = "16"


def _place(text: str) -> Path:
    """An empty name would mean the current folder."""
    if not text:
        raise typer.BadParameter("it is empty; name a folder, or a file that ends in .gguf")
    return Path(text)


def command(
    model: Model,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            parser=_place,
            metavar="PATH",
            help="Folder to write, or a file that ends in .gguf.",
        ),
    ],
    mix: Annotated[
        MixName | None,
        typer.Option(
            help="Write a GGUF file with llama.cpp's mix of K-quants of this name, in place of "
            "--bits and --group-size.",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Importance matrix for --mix, of octavo imatrix or llama.cpp.",
            show_default="made of the calibration text",
        ),
    ] = None,
    method: Annotated[
        MethodName | None,
        typer.Option(
            help="Round to nearest, or with a look at a text: GPTQ, AWQ, or (with --mix) the mean "
            "squares of the inputs.",
            show_default="gptq, with --mix imatrix",
        ),
    ] = None,
    bits: Annotated[Bits | None, typer.Option(help="Bits a weight.", show_default="4")] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Inputs that share a scale, a multiple of 32; -1 for all of a row.",
            show_default="64, GGUF 32",
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Scales alone, or zeros too (GGUF: Q4_0 or Q4_1).",
            show_default="zeros too but at 8 bits and in compressed-tensors",
        ),
    ] = None,
    format: Annotated[
        FormatName | None,
        typer.Option(help="Layout.", show_default="gguf for .gguf, awq for awq, else gptq"),
    ] = None,
    embedding_bits: Annotated[
        EmbeddingBits | None,
        typer.Option(
            help="Bits of embedding and head (5: in GGUF, 6: with --mix); 16: they stay as they "
            "are.",
            show_default="the mix's; else 8 where they are a tenth of the weights and readers of "
            "the layout know them so: GGUF, a head in compressed-tensors",
        ),
    ] = None,
    calibration: Calibration = None,
    num_samples: NumSamples = None,
    seq_len: SeqLen = None,
    act_order: Annotated[
        OrderName | None,
        typer.Option(
            help="GPTQ: inputs that matter most first, in groups as they lie (static) or of their "
            "own (group, which makes engines reorder activations); or inputs as they lie (none).",
            show_default="static",
        ),
    ] = None,
    scales: Annotated[
        ScalesName | None,
        typer.Option(
            help="GPTQ: scales of least squared error, or from smallest to largest.",
            show_default="mse",
        ),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            max=1.0,
            metavar="X",
            help="GPTQ: share of the mean added to H.",
            show_default="0.01",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would come, and write nothing.")
    ] = False,
    allow_no_gain: Annotated[
        bool,
        typer.Option(
            "--allow-no-gain",
            help="Write it also where it is not smaller than MODEL, or hardly smaller than a MODEL "
            "that is quantized already.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as one JSON object.")
    ] = False,
) -> None:
    """Make a model small, and write it so that others load it, too.

    It says first how large each part will be and what it loses at least, and stops if the result
    would not be smaller. The source is what MODEL's weights stand for, also where they are
    quantized themselves. An interrupted run goes on where it was when the same command is given
    again.
    """
    from octavo.loader import load
    from octavo.loader.pull import resolve
    from octavo.tools.quantize.forecast import forecast
    from octavo.tools.quantize.gptq_rounding import Order
    from octavo.tools.quantize.layouts import Format
    from octavo.tools.quantize.mixes import Mix
    from octavo.tools.quantize.quantize_checkpoint import quantize
    from octavo.tools.quantize.quantizer import Method, Recipe
    from octavo.tools.quantize.scope import ends, kept, mixed
    from octavo.tools.quantize.state import QuantizeError

    chosen = _method(method, mix)
    if chosen is not Method.GPTQ:
        own = {"--act-order": act_order, "--scales": scales, "--damping": damping}
        _unused(f"--method {chosen.value}", own)
    if chosen is Method.RTN or imatrix is not None:
        text = {"--calibration": calibration, "--num-samples": num_samples, "--seq-len": seq_len}
        _unused("--imatrix" if imatrix is not None else "--method rtn", text)
    if chosen is not Method.IMATRIX:
        _unused(f"--method {chosen.value}", {"--imatrix": imatrix})
    for file, flag in ((calibration, "--calibration"), (imatrix, "--imatrix")):
        if file is not None and not file.is_file():
            raise typer.BadParameter(f"no such file: {file}", param_hint=flag)
    layout = _format(out, chosen, format)
    if (layout is Format.GGUF) != (out.name.endswith(".gguf")):
        raise typer.BadParameter(f"--format {layout.value} and -o {out} do not go together")
    small = None if embedding_bits is None else int(embedding_bits.value)
    samples = None
    if mix is not None:
        grids = {"--bits": bits, "--group-size": group_size, "--symmetric": symmetric}
        _unused("--mix", grids)
        if layout is not Format.GGUF:
            raise typer.BadParameter(f"{mix.value} is of GGUF files (-o NAME.gguf)")
        checkpoint = load(resolve(model))
        recipe = mixed(checkpoint, chosen, Mix[mix.value], small)
        if chosen is Method.IMATRIX and imatrix is None:
            samples = text_samples(checkpoint, calibration, num_samples, seq_len)
    else:
        number = 4 if bits is None else int(bits.value)
        plain = symmetric
        if plain is None:  # what most engines have kernels for
            plain = number == 8 or layout is Format.COMPRESSED_TENSORS
        scheme = _scheme(layout, number, group_size, plain)
        checkpoint = load(resolve(model))
        try:
            at_ends = ends(checkpoint, layout, small, scheme.group, plain)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--embedding-bits") from None
        recipe = Recipe(
            chosen,
            scheme,
            Order.STATIC if act_order is None else Order(act_order.value),
            scales is not ScalesName.minmax,
            0.01 if damping is None else damping,
            at_ends,
        )
        recipe = replace(recipe, kept=kept(checkpoint, recipe, layout))
        if chosen is not Method.RTN:
            samples = text_samples(checkpoint, calibration, num_samples, seq_len)
    coming = forecast(checkpoint, recipe, layout)
    parts = _parts(checkpoint, coming)
    print(_table(parts, coming), file=sys.stderr)
    if layout is not Format.GGUF and (hint := _large_ends(checkpoint, recipe, coming)):
        print(hint, file=sys.stderr)
    if not (coming.gains or allow_no_gain):
        raise QuantizeError(_no_gain(checkpoint, parts, coming))
    if dry_run:
        if as_json:
            typer.echo(json_text({"parts": parts}, indent=2))
        return
    began = time.monotonic()
    if recipe.method is Method.IMATRIX:
        recipe = replace(recipe, importance=_importance(checkpoint, recipe, imatrix, samples))
    with _progress(recipe) as (progress, reached):
        try:
            outcome = quantize(checkpoint, recipe, layout, out, samples, progress)
        except KeyboardInterrupt:
            print(
                f"\ninterrupted after {reached[0]} of {len(checkpoint.config.layers)} layers; "
                "the same command goes on from there",
                file=sys.stderr,
            )
            raise typer.Exit(130) from None
    for note in outcome.notes:
        print(f"note: {note}", file=sys.stderr)
    looked = (0, 0) if samples is None else samples.shape
    facts = _facts(outcome, recipe, layout, looked, time.monotonic() - began) | {"parts": parts}
    show_report(json_text(facts, indent=2) if as_json else _as_text(facts), as_json=as_json)


def _unused(by: str, options: Mapping[str, object]) -> None:
    """Raises for an option that would change nothing."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"{by} makes no use of it", param_hint=name)


def _method(method: MethodName | None, mix: MixName | None) -> Method:
    from octavo.tools.quantize.quantizer import Method

    if method is None:
        return Method.GPTQ if mix is None else Method.IMATRIX
    if (mix is not None) and method not in (MethodName.rtn, MethodName.imatrix):
        raise typer.BadParameter("--mix goes with imatrix or rtn", param_hint="--method")
    if mix is None and method is MethodName.imatrix:
        raise typer.BadParameter("imatrix goes with --mix", param_hint="--method")
    return Method(method.value)


def _format(out: Path, method: Method, format: FormatName | None) -> Format:
    from octavo.tools.quantize.layouts import Format
    from octavo.tools.quantize.quantizer import Method

    if format is not None:
        return Format(format.value)
    if out.name.endswith(".gguf"):
        return Format.GGUF
    return Format.AWQ if method is Method.AWQ else Format.GPTQ


def _scheme(layout: Format, bits: int, group_size: int | None, symmetric: bool) -> Scheme:
    from octavo.tools.quantize.layouts import Format, scheme_of

    size = group_size if group_size is not None else 32 if layout is Format.GGUF else 64
    if size != -1 and (size < 32 or size % 32):
        raise typer.BadParameter(f"--group-size {size} is neither -1 nor a multiple of 32")
    try:
        return scheme_of(layout, bits, None if size == -1 else size, symmetric)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _importance(
    checkpoint: Checkpoint, recipe: Recipe, file: Path | None, samples: Any
) -> dict[str, Any]:
    """Of a file, or of a text's samples; of the matrices that will be rounded by it."""
    from octavo.tools.quantize.imatrix import importance_of, read_imatrix

    matrix = collected(checkpoint, samples, "") if file is None else read_imatrix(file)
    rounded = [role for role, weight in checkpoint.weights.items() if recipe.of(role, weight.shape)]
    found, unseen = importance_of(matrix, checkpoint, rounded, str(file))
    if unseen:
        print(
            f"note: {unseen} of the experts' matrices saw nothing of the text, and are rounded "
            "without importances",
            file=sys.stderr,
        )
    return found


# ── What will come ──────────────────────────────────────────────────────────────────────────────


def _parts(checkpoint: Checkpoint, coming: QuantizationForecast) -> dict[str, dict[str, Any]]:
    """By part of the network and in all: parameters, bytes, and the least error (RMS of it over
    RMS of the matrices)."""
    from math import prod

    from octavo.cli.inspect import part_of

    sums: dict[str, list[float]] = {}
    for role, weight in checkpoint.weights.items():
        count = prod(weight.shape)
        squares, lost = coming.squares[role] if len(weight.shape) == 2 else (0.0, 0.0)
        own = (count, coming.before[role], coming.after.get(role, 0), count * squares, count * lost)
        for part in (part_of(role), "all"):
            sums[part] = [a + b for a, b in zip(sums.get(part, [0] * 5), own, strict=True)]
    sums["all"] = sums.pop("all")  # last
    return {
        part: {
            "parameters": int(count),
            "source_bytes": int(before),
            "bytes": int(after),
            "least_error": (lost / squares) ** 0.5 if squares else 0.0,
        }
        for part, (count, before, after, squares, lost) in sums.items()
    }


def _table(parts: dict[str, dict[str, Any]], coming: QuantizationForecast) -> str:
    lines = [
        f"{'weights':<12}{'parameters':>14}{'before':>12}{'after':>12}{'bytes a weight':>16}"
        f"{'least error':>13}"
    ]
    for name, part in parts.items():
        a, b = (part[key] / part["parameters"] for key in ("source_bytes", "bytes"))
        error = f"{part['least_error']:.1%}" if part["least_error"] else "–"
        lines.append(
            f"{name:<12}{part['parameters']:>14,}{as_size(part['source_bytes']):>12}"
            f"{as_size(part['bytes']):>12}{f'{a:.3g} → {b:.3g}':>16}{error:>13}"
        )
    lines.append("least error: of rounding to nearest, RMS, as a share of the weights' own")
    if coming.quantized:
        lines.append(
            f"the source is quantized already ({', '.join(coming.quantized)}): it has lost once, "
            "and this comes on top"
        )
    return "\n".join(lines)


def _no_gain(
    checkpoint: Checkpoint, parts: dict[str, dict[str, Any]], coming: QuantizationForecast
) -> str:
    from octavo.tools.quantize.scope import WORTH

    before, after = parts["all"]["source_bytes"], parts["all"]["bytes"]
    change = f"grow from {as_size(before)} to {as_size(after)}"
    if after == before:
        change = f"stay at {as_size(before)}"
    elif after < before:
        change = (
            f"shrink from {as_size(before)} to {as_size(after)} only, by less than {WORTH:.0%}, "
            "the least for a model that is quantized already"
        )
    others = ", ".join(f"{flags} ({as_size(size)})" for size, flags in _smaller(checkpoint, coming))
    error = f"{parts['all']['least_error']:.1%}"
    loss = "" if error == "0.0%" else f", its weights off by {error} (RMS) at least"
    return (
        f"{checkpoint.path.name} would {change}{loss}; nothing was written. --allow-no-gain writes "
        "it all the same. "
        + (f"What would be smaller: {others}" if others else "No GGUF file would be smaller either")
    )


def _large_ends(checkpoint: Checkpoint, recipe: Recipe, coming: QuantizationForecast) -> str | None:
    """What to know where embedding or head stay and are a large part of what will be written."""
    from octavo.tools.quantize.forecast import sizes
    from octavo.tools.quantize.layouts import Format, scheme_of
    from octavo.tools.quantize.quantizer import Recipe
    from octavo.tools.quantize.scope import EMBEDDING, HEAD, ends, large

    staying = [role for role in (EMBEDDING, HEAD) if role in coming.after.keys() - recipe.ends]
    if not staying or not large(checkpoint):
        return None
    share = sum(coming.after[role] for role in staying) / sum(coming.after.values())
    scheme = scheme_of(Format.GGUF, 4, 32, False)
    small = ends(checkpoint, Format.GGUF, 8, 32, False)
    whole = sum(sizes(checkpoint, Recipe(recipe.method, scheme, ends=small), Format.GGUF).values())
    named = {EMBEDDING: "the embedding", HEAD: "the head"}
    return (
        f"{' and '.join(named[role] for role in staying)}, {share:.0%} of the result, "
        f"{'stays' if len(staying) == 1 else 'stay'} in 16 bits; a 4-bit GGUF file (-o NAME.gguf) "
        f"has 8 there and takes {as_size(whole)}"
    )


def _smaller(checkpoint: Checkpoint, coming: QuantizationForecast) -> list[tuple[int, str]]:
    """Sizes and flags of some GGUF files that would gain, the largest, which loses least, first."""
    from octavo.tools.quantize.forecast import sizes
    from octavo.tools.quantize.layouts import Format, scheme_of
    from octavo.tools.quantize.quantizer import Method, Recipe
    from octavo.tools.quantize.scope import ends, kept, worth

    found: dict[int, str] = {}
    before = sum(coming.before.values())
    for bits, small in product((8, 4), (8, 5, 4)):
        symmetric = bits == 8
        scheme = scheme_of(Format.GGUF, bits, 32, symmetric)
        at_ends = ends(checkpoint, Format.GGUF, small, scheme.group, symmetric)
        recipe = Recipe(Method.RTN, scheme, ends=at_ends)
        recipe = replace(recipe, kept=kept(checkpoint, recipe, Format.GGUF))
        size = sum(sizes(checkpoint, recipe, Format.GGUF).values())
        if worth(before, size, quantized=bool(coming.quantized)):
            found.setdefault(size, f"--bits {bits} --embedding-bits {small} -o NAME.gguf")
    return sorted(found.items(), reverse=True)[:3]


# ── What comes ──────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _progress(recipe: Recipe) -> Iterator[tuple[Progress, list[int]]]:
    """A bar on a terminal, a line a layer elsewhere; and how many layers are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    reached = [0]
    began = time.monotonic()
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("layers"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(recipe.method.value, total=None)

        def show(report: Report) -> None:
            reached[0] = report.layer + report.last
            loss = "" if report.loss is None else f", error {report.loss:.2e}"
            what = f"{recipe.method.value} {report.role}{loss}" if report.role else "catching up"
            bar.update(task, description=what, total=report.layers, completed=reached[0])
            if report.last and not console.is_terminal:
                seconds = time.monotonic() - began
                print(
                    f"layer {reached[0]}/{report.layers}  {what}  {seconds:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )

        yield show, reached


def _facts(
    outcome: QuantizationResult,
    recipe: Recipe,
    format: Format,
    looked: tuple[int, int],
    seconds: float,
) -> dict[str, Any]:
    samples, length = looked
    return {
        "path": str(outcome.path),
        "method": recipe.method.value,
        "mix": None if recipe.mix is None else recipe.mix.name,
        "bits": recipe.scheme.bits,
        "group_size": recipe.scheme.group or -1,
        "kind": recipe.scheme.kind.value,
        "format": format.value,
        "kept_matrices": len(recipe.kept),
        "embedding_bits": {role: scheme.bits for role, scheme in recipe.ends.items()},
        "num_samples": samples,
        "seq_len": length,
        "parameters": outcome.parameters,
        "bytes": outcome.nbytes,
        "source_bytes": outcome.source_nbytes,
        "bytes_per_weight": outcome.bytes_per_weight,
        "seconds": round(seconds, 1),
        "starved_experts": outcome.starved,
        "notes": list(outcome.notes),
    }


def _as_text(facts: dict[str, Any]) -> str:
    how = f"{facts['mix']} by {facts['method']}"
    if facts["mix"] is None:
        group = "rows" if facts["group_size"] == -1 else f"groups of {facts['group_size']}"
        how = f"{facts['bits']} bits by {facts['method']} in {group}, {facts['kind']}"
    text = f", on {facts['num_samples']} pieces of {facts['seq_len']} tokens"
    kept = f"; {facts['kept_matrices']} matrices of the layers are as they were"
    return (
        f"{facts['path']}: {facts['format']}, {how}{text if facts['num_samples'] else ''}"
        f"{kept if facts['kept_matrices'] else ''}\n"
        f"{as_size(facts['bytes'])}, {facts['bytes_per_weight']:.3f} bytes a weight "
        f"(the source {as_size(facts['source_bytes'])}), in {facts['seconds']:,.0f} s"
    )
