"""octavo plan roofline: which bound holds in decode and prefill, and the latencies it leaves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text, on_stderr, wrapped, writing
from octavo.cli.fold import show_report
from octavo.cli.options import Model, check_file, length, naming_flags
from octavo.cli.planned import (
    NAMES,
    BandwidthShare,
    Bits,
    ComputeShare,
    EmbeddingFormat,
    GroupSize,
    KvCacheDtype,
    LayersFormat,
    OnDevice,
    Price,
    Unit,
    chosen_scheme,
    embedding_scheme,
    unit,
)
from octavo.machine.memory import as_size
from octavo.tools.plan.defaults import GPU
from octavo.tools.plan.gpu import RUNTIME_BYTES
from octavo.words import number

if TYPE_CHECKING:
    from octavo.tools.plan.phase import Phase
    from octavo.tools.plan.roofline import Point, Roofline

EXAMPLES = (
    "octavo plan roofline llama-3-8b --device h100 --plot roof.svg",
    "octavo plan roofline llama-3-8b --device h100 --format q4_k --price 2.5",
    "octavo plan roofline smollm2 --context 128,2K --batch-sizes 1,8,32",
)

_CONTEXTS, _PROMPTS, _BATCHES = (1024, 4096), (128, 512, 2048, 8192), (1, 8, 32, 64, 128, 256)
_PARTS = ("layers", "head", "attention")


def lengths(text: str) -> tuple[int, ...]:
    """Token counts: "512,2K"."""
    found = tuple(length(item) for item in text.split(","))
    return tuple(sorted(set(found)))


def batches(text: str) -> tuple[int, ...]:
    """Numbers of sequences: "1,8,32"."""
    from octavo.tools.plan.phase import MOST_SEQUENCES

    items = text.split(",")
    if not all(item.strip().isascii() and item.strip().isdecimal() for item in items):
        raise typer.BadParameter(f"{text!r} is not a list of batch sizes such as 1,8,32")
    found = sorted({int(item) if len(item.strip()) < 10 else 10**9 for item in items})
    if not 1 <= found[0] <= found[-1] <= MOST_SEQUENCES:
        raise typer.BadParameter(f"{text!r}: a batch is of 1 to {MOST_SEQUENCES} sequences")
    return tuple(found)


def command(
    model: Model,
    device: OnDevice = "machine",
    format: LayersFormat = None,
    bits: Bits = None,
    group_size: GroupSize = None,
    embedding_format: EmbeddingFormat = None,
    context: Annotated[
        str | None,
        typer.Option(
            parser=lengths,
            metavar="TOKENS,…",
            help="In the cache of each sequence that decodes.",
            show_default="1024,4096",
        ),
    ] = None,
    prompt_len: Annotated[
        str | None,
        typer.Option(
            parser=lengths,
            metavar="TOKENS,…",
            help="Of a prompt that is read alone.",
            show_default="128,512,2048,8192",
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            parser=batches,
            metavar="N,…",
            help="Sequences that decode together.",
            show_default="1,8,32,64,128,256",
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="Of a prompt, most in a step.",
            show_default="all of it",
        ),
    ] = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    arithmetic: Unit = "auto",
    compute_share: ComputeShare = None,
    bandwidth_share: BandwidthShare = None,
    price: Price = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="Draw roof and points: .svg, .png, .pdf."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as one JSON object, in bytes and seconds.")
    ] = False,
) -> None:
    """Show which bound holds, and the latencies it leaves.

    Operations a byte of each part of a step beside those from which the device is bound by
    operations; the batch where decode crosses; TPOT, TTFT of a prompt alone, tokens a second and
    their cost. All counted from the model's own list of operations. MODEL may also be a preset or
    a config.json alone, without weights.
    """
    from octavo.engine.config import EngineConfig
    from octavo.kv_cache.layout import KvDtype, KvLayout
    from octavo.tools.plan import hardware
    from octavo.tools.plan.roofline import roofline
    from octavo.tools.plan.simulation import Setup, weights_on
    from octavo.tools.plan.subject import Subject

    with naming_flags(*NAMES):
        edges = None if embedding_format is None else embedding_scheme(embedding_format)
        chosen = chosen_scheme(format, bits, group_size, False)
        hardware.check(device)
        kv_dtype = KvDtype.of(kv_cache_dtype)
    if plot is not None:
        check_file(plot)
    subject = Subject.find(model)
    most = subject.program.config.context_length
    contexts = _within("--context", context, _CONTEXTS, most)
    prompts = _within("--prompt-len", prompt_len, _PROMPTS, most)
    # Last of what is checked: this machine may have to be measured.
    with naming_flags():
        on = hardware.device(device, on_stderr).assuming(compute_share, bandwidth_share)
    stored = weights_on(on, subject, chosen, edges)
    setup = Setup(subject, stored, on, EngineConfig(kv_cache_dtype=kv_cache_dtype))
    found = roofline(
        subject,
        stored,
        on,
        layout=KvLayout.of(subject.program.config, dtype=kv_dtype),
        contexts=contexts,
        prompts=prompts,
        sequences=_BATCHES if batch_sizes is None else tuple(map(int, batch_sizes)),
        chunk=max_num_batched_tokens,
        quantized=unit(arithmetic),
        expected=setup.rates(),
    )
    try:
        if as_json:
            typer.echo(json_text(as_dict(found, price, setup.basis()), indent=2))
        else:
            show_report(as_text(found, price, max_num_batched_tokens, setup.basis()))
    finally:  # also when nobody reads on
        if plot is not None:
            from octavo.tools.plan.roofline_plot import draw

            with writing(plot) as file:
                draw(found, file)


def _within(flag: str, given: str | None, default: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Raises `SettingsError` for more than the model's context."""
    from octavo.engine.config import SettingsError

    if given is None:
        return tuple(sorted({min(tokens, most) for tokens in default}))
    tokens = tuple(map(int, given))  # parsed already
    if tokens[-1] > most:
        raise SettingsError(
            f"{flag} {tokens[-1]} is more than the model's context allows: {most} tokens"
        )
    return tokens


# --- JSON ----------------------------------------------------------------------------------------


def as_dict(found: Roofline, price: float | None, basis: str) -> dict[str, Any]:
    return {
        "model": found.subject.name,
        "parameters": found.subject.parameters,
        "format": found.stored.name,
        "weight_bytes": found.stored.bytes,
        "kv_cache_dtype": found.layout.dtype,
        "kv_bytes_per_token": found.layout.bytes_per_token,
        "device": found.device.name,
        "measured": found.device.measured,
        "standing": found.device.standing,
        "basis": basis,
        "memory_bytes": found.device.memory_bytes,
        "rates": found.rates.as_dict(),
        "predicted_rates": found.expected.as_dict(),
        "peaks": found.device.peaks(found.stored.bytes),
        "roofs": [roof._asdict() for roof in found.roofs],
        "contexts": [asdict(context) for context in found.contexts],
        "decode": [
            {
                "sequences": point.sequences,
                "context": point.context,
                "tpot_seconds": point.seconds,
                **_point_dict(point, price),
            }
            for point in found.decode
        ],
        "prefill": [
            {
                "prompt_len": point.context,
                "ttft_seconds": point.seconds,
                **_point_dict(point, price),
            }
            for point in found.prefill
        ],
    }


def _point_dict(point: Point, price: float | None) -> dict[str, Any]:
    from octavo.tools.plan.roofline import per_million

    phase, rate = point.phase, point.tokens_per_second
    return {
        "tokens": phase.tokens,
        "seconds_at_roof": point.seconds_at_roof,
        "tokens_per_second": rate,
        "tokens_per_unit_of_cost": None if price is None else 3600 * rate / price,
        "cost_per_million_tokens": None if price is None else per_million(price, rate),
        "operations": phase.ops,
        "bytes": phase.bytes,
        "operations_per_byte": phase.intensity,
        "operations_per_second": point.ops_per_second,
        "memory_seconds": phase.memory_seconds,
        "arithmetic_seconds": phase.arithmetic_seconds,
        "bound": phase.bound,
        "mfu": point.mfu,
        "bytes_held": point.bytes_held,
        "fits": point.fits,
        "parts": [
            part._asdict() | {"operations_per_byte": part.intensity if part.bytes else None,
                              "bound": part.bound}
            for part in phase.parts
        ],
    }  # fmt: skip


# --- for people ----------------------------------------------------------------------------------


def as_text(found: Roofline, price: float | None, chunk: int | None, basis: str) -> str:
    from octavo.tools.plan.roofline import levels

    rates, layout, stored = found.rates, found.layout, found.stored
    scale, letter = (1e12, "T") if found.roofs[0].ops_per_second >= 1e13 else (1e9, "G")
    peaks = [
        f"{name} {number(peak / scale, 6)}"
        for name, peak in found.device.peaks(stored.bytes).items()
    ]
    lines = [
        f"{found.subject.name}: {found.subject.parameters:,} parameters, {stored.bytes:,} bytes of "
        f"weights ({stored.name}),",
        f"{layout.bytes_per_token:,} bytes of KV cache a token ({layout.dtype})",
        "",
        *wrapped(f"{found.device.name}: {found.device.standing}"),
        f"  {'memory':<12}{number(rates.bytes_per_second / 1e9):>9} GB/s",
        *(
            f"  {names:<12}{roof.ops_per_second / scale:>9,.6g} {letter}op/s ÷ "
            f"{number(rates.bytes_per_second / 1e9)} GB/s: bound by operations from "
            f"{number(roof.ridge)} a byte on"
            for names, roof in levels(found.roofs)
        ),
        f"  {'peaks':<12}{', '.join(peaks)} {letter}op/s",
        *wrapped(found.device.assumption or basis, "  "),
        "",
        *_table("decode", ("context", "batch"), "TPOT", found.decode, price),
        *(_crossing(context) for context in found.contexts),
        "",
        *_table("prefill of a prompt alone", ("", "tokens"), "TTFT", found.prefill, price),
    ]
    if chunk is not None:
        lines.append(f"  in steps of at most {chunk:,} tokens, each of which reads the weights")
    lines += [
        "",
        *wrapped(
            "ops/byte: operations a byte moved; * takes longer to compute than to read. MFU: the "
            "share of the time that arithmetic at its peak would take. Bounds are added op by op, "
            "each the longer time."
        ),
    ]
    if any(point.seconds < 0.99 * point.seconds_at_roof for point in found.decode + found.prefill):
        lines.append(
            "! predictions are faster than the limits: those were measured when the machine was "
            "busier.\n  octavo bench machine measures them again"
        )
    if any(point.fits is False for point in found.decode + found.prefill):
        memory = as_size(found.device.memory_bytes or 0)
        used = (
            f"the {GPU.memory_utilization:g} of the device's {memory} that engines use without a "
            f"runtime's {as_size(RUNTIME_BYTES)}"
            if found.device.gpu
            else f"the device's {memory}"
        )
        lines += wrapped(f"! weights and these caches take more than {used}")
    return "\n".join(lines)


def _table(
    title: str,
    columns: tuple[str, str],
    latency: str,
    points: tuple[Point, ...],
    price: float | None,
) -> list[str]:
    from octavo.tools.plan.roofline import per_million

    shown = [name for name in _PARTS if any(_part(point.phase, name) for point in points)]
    head = "".join(f"{name:>10}" for name in [*shown, "step"])
    paid = f"{'a million':>12}" if price is not None else ""
    width = 10 * (len(shown) + 1)
    lines = [
        title,
        f"{'':18}{' ops/byte of ':·^{width}}".replace("·", " ", 2),
        f"  {columns[0]:>8}{columns[1]:>8}{head}{latency + ' ms':>10}{'tokens/s':>10}"
        f"{'MFU':>7}{paid}",
    ]
    for point in points:
        first = f"{point.context:,}" if columns[0] else ""
        second = f"{point.sequences:,}" if columns[0] else f"{point.context:,}"
        cells = [_part(point.phase, name) for name in shown]
        cells.append(_cell(point.phase.intensity, point.phase.bound))
        cost = "" if price is None else f"{number(per_million(price, point.tokens_per_second)):>12}"
        lines.append(
            f"{'!' if point.fits is False else ' '} {first:>8}{second:>8}"
            f"{''.join(f'{cell:>10}' for cell in cells)}"
            f"{number(1e3 * point.seconds):>10}{point.tokens_per_second:>10,.0f}"
            f"{100 * point.mfu:>6.1f}%{cost}"
        )
    return lines


def _part(phase: Phase, name: str) -> str:
    """Operations a byte of what has this name, in whatever arithmetics."""
    parts = [part for part in phase.parts if part.name == name]
    moved, ops = sum(part.bytes for part in parts), sum(part.ops for part in parts)
    if not moved:
        return ""
    reading = sum(part.memory_seconds for part in parts)
    computing = sum(part.arithmetic_seconds for part in parts)
    return _cell(ops / moved, "bytes" if reading >= computing else "operations")


def _cell(intensity: float, bound: str) -> str:
    digits = f"{intensity:.3g}" if intensity < 1000 else f"{intensity:.0f}"
    return digits + ("*" if bound == "operations" else " ")


def _crossing(context: Any) -> str:
    where = (
        "never bound by operations"
        if context.crossing is None
        else f"bound by operations from {context.crossing:,} "
        f"sequence{'s' * (context.crossing > 1)} on"
    )
    return (
        f"  context {context.context:,}: {where}; ever larger batches near {number(context.limit)} "
        "ops/byte"
    )
