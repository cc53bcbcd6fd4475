"""octavo plan quantization: bytes a weight, and what they do to decode and prefill."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text, on_stderr
from octavo.cli.fold import show_report
from octavo.cli.options import Model, length, naming_flags
from octavo.cli.planned import (
    NAMES,
    Asymmetric,
    Bits,
    EmbeddingFormat,
    GroupSize,
    KvCacheDtype,
    OnDevice,
    Unit,
    chosen_scheme,
    embedding_scheme,
    unit,
)
from octavo.words import number

if TYPE_CHECKING:
    from octavo.kv_cache.layout import KvLayout
    from octavo.tools.plan.hardware import Device
    from octavo.tools.plan.phase import PartCost, Phase
    from octavo.tools.plan.quantization import QuantizationPlan, StoredWeights
    from octavo.tools.plan.schemes import StorageScheme
    from octavo.tools.plan.subject import Subject

EXAMPLES = (
    "octavo plan quantization smollm2",
    "octavo plan quantization llama-2-7b --format gptq --bits 4 --group-size 64",
    "octavo plan quantization qwen2.5-7b --format q4_k --device memory=48,int8=940,bf16=470",
)


def command(
    model: Model,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Show the sums of one format: of GGUF (q4_0, q4_k, …), gptq, awq, "
            "compressed-tensors, w8a8, fp8, bf16, f32.",
            show_default="all in a table",
        ),
    ] = None,
    bits: Bits = None,
    group_size: GroupSize = None,
    asymmetric: Asymmetric = False,
    embedding_format: EmbeddingFormat = None,
    context: Annotated[
        str | None,
        typer.Option(
            parser=length,
            metavar="TOKENS",
            help="In the cache of a sequence that decodes.",
            show_default="128",
        ),
    ] = None,
    prompt_len: Annotated[
        str | None,
        typer.Option(
            parser=length, metavar="TOKENS", help="Read at once in prefill.", show_default="512"
        ),
    ] = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    arithmetic: Unit = "auto",
    device: OnDevice = "machine",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as one JSON object, in bytes and seconds.")
    ] = False,
) -> None:
    """Show what a format does to bytes and speed.

    All as sums: bytes of a weight with its share of scales and zeros; of the model; the tokens a
    second that reading them allows in decode, and operations in prefill; and the batch between the
    two. MODEL may also be a config.json alone, without weights.
    """
    from octavo.engine.config import SettingsError
    from octavo.kv_cache.layout import KvDtype, KvLayout
    from octavo.tools.plan import hardware, schemes
    from octavo.tools.plan import quantization as planning
    from octavo.tools.plan.subject import Subject

    with naming_flags(*NAMES):
        edges = embedding_scheme(embedding_format or "bf16")
        chosen = chosen_scheme(format, bits, group_size, asymmetric)
        hardware.check(device)
        kv_dtype = KvDtype.of(kv_cache_dtype)
    subject = Subject.find(model)
    most = subject.program.config.context_length
    in_cache = _tokens("--context", context, 128, most)
    prompt = _tokens("--prompt-len", prompt_len, 512, most)
    layout = KvLayout.of(subject.program.config, dtype=kv_dtype)
    skipped: dict[str, str] = {}
    variants = [stored] if (stored := planning.as_stored(subject)) and chosen is None else []
    gpu = hardware.is_gpu(device)
    for scheme in schemes.survey() if chosen is None else [chosen]:
        try:
            variant = planning.in_scheme(subject, scheme, edges)
            if planning.for_gpus(variant) and not gpu:
                raise ValueError(f"{scheme.name}: CPUs have no fp8 units (--device h100, say)")
            variants.append(variant)
        except ValueError as error:
            if chosen is not None:
                raise SettingsError(str(error)) from None
            skipped[scheme.name] = str(error).partition(": ")[2]
    # Last of what is checked: this machine may have to be measured.
    with naming_flags():
        on = hardware.device(device, on_stderr)
    plans = [
        planning.plan(
            subject,
            variant,
            on,
            layout=layout,
            context=in_cache,
            prompt=prompt,
            quantized=unit(arithmetic),
        )
        for variant in variants
    ]
    if as_json:
        facts = {
            "model": subject.name,
            "parameters": subject.parameters,
            "device": on.name,
            "context": in_cache,
            "prompt_len": prompt,
            "kv_cache_dtype": kv_dtype,
            "kv_bytes_per_token": layout.bytes_per_token,
            "plans": [as_dict(subject, each) for each in plans],
            "skipped": skipped,
        }
        typer.echo(json_text(facts, indent=2))
    elif chosen is None:
        show_report(as_table(subject, on, plans, skipped, layout, in_cache, prompt))
    else:
        show_report(as_sums(subject, on, plans[0], chosen, edges, layout, in_cache, prompt))


def _tokens(flag: str, given: str | None, default: int, most: int) -> int:
    """Raises `SettingsError` for more than the model's context."""
    from octavo.engine.config import SettingsError

    tokens = min(default, most) if given is None else int(given)  # parsed already
    if tokens > most:
        raise SettingsError(f"{flag} {tokens} is more than the model's context of {most} tokens")
    return tokens


# --- JSON ----------------------------------------------------------------------------------------


def as_dict(subject: Subject, plan: QuantizationPlan) -> dict[str, Any]:
    stored = plan.stored
    return {
        "format": stored.name,
        "bytes_per_weight": plan.bytes_per_weight,
        "sum": None if stored.scheme is None else stored.scheme.sum(*_commonest(subject)),
        "layers_bytes": stored.part_bytes("layers"),
        "embedding_bytes": stored.part_bytes("embedding"),
        "head_bytes": stored.part_bytes("head"),
        "norms_bytes": stored.part_bytes("norms"),
        "bytes": stored.bytes,
        "decode": _phase_dict(plan.decode),
        "prefill": _phase_dict(plan.prefill),
        "layers_bound_by_operations_from_batch": plan.layers_crossing,
        "bound_by_operations_from_batch": plan.crossing,
        "held_bytes": plan.held_bytes,
        "held_bytes_per_weight": plan.held_bytes_per_weight,
        "held_decode_tokens_per_second": plan.held_decode_tokens_per_second,
        "rates": plan.rates.as_dict(),
    }


def _phase_dict(phase: Phase) -> dict[str, Any]:
    return {
        "tokens": phase.tokens,
        "bytes": phase.bytes,
        "operations": phase.ops,
        "memory_seconds": phase.memory_seconds,
        "arithmetic_seconds": phase.arithmetic_seconds,
        "seconds": phase.seconds,
        "tokens_per_second": phase.tokens_per_second,
        "bound": phase.bound,
        "parts": [part._asdict() | {"bound": part.bound} for part in phase.parts],
    }


# --- for people ----------------------------------------------------------------------------------


def _commonest(subject: Subject) -> tuple[int, int]:
    """The [outputs, inputs] of most of the layers' weights: what rows and matrices share depends
    on them.
    """
    counts: Counter[tuple[int, int]] = Counter()
    for shape in subject.matrices().values():
        counts[shape[-2], shape[-1]] += prod(shape)
    return counts.most_common(1)[0][0]


def as_table(
    subject: Subject,
    device: Device,
    plans: list[QuantizationPlan],
    skipped: dict[str, str],
    layout: KvLayout,
    context: int,
    prompt: int,
) -> str:
    width = max(len(plan.stored.name) for plan in plans)
    lines = [
        *_shape(subject),
        "",
        f"{'':<{width}}{'bytes a':>11}{'layers':>10}{'all':>10}{'decode':>10}{'bound':>8}"
        f"{'prefill':>10}{'from':>7}",
        f"{'':<{width}}{'weight':>11}{'MB':>10}{'MB':>10}{'tokens/s':>10}{'by':>8}"
        f"{'tokens/s':>10}{'batch':>7}  the weight's sum",
    ]
    shape = _commonest(subject)
    for plan in plans:
        stored = plan.stored
        how = stored.scheme.sum(*shape) if stored.scheme else _formats(stored)
        crossing = "never" if plan.crossing is None else f"{plan.crossing}"
        bound = {"bytes": "bytes", "operations": "ops"}[plan.decode.bound]
        lines.append(
            f"{stored.name:<{width}}{plan.bytes_per_weight:>11.6f}"
            f"{stored.part_bytes('layers') / 1e6:>10.1f}{stored.bytes / 1e6:>10.1f}"
            f"{number(plan.decode.tokens_per_second):>10}{bound:>8}"
            f"{number(plan.prefill.tokens_per_second):>10}{crossing:>7}  {how}"
        )
    lines += [f"{name:<{width}}  not for this model: {why}" for name, why in skipped.items()]
    rates = plans[0].rates
    lines += [
        "",
        f"bounds of {device.name}: memory {_figures(rates)}",
        f"decode: one sequence, {context} tokens in its cache, whatever the format: "
        f"{layout.bytes_per_token:,} bytes a token ({layout.dtype}).",
        f"prefill: {prompt} tokens. from batch: sequences from which decode takes longer to "
        "compute than to read.",
        "One format with all its sums: --format, with --bits and --group-size.",
    ]
    return "\n".join(lines)


def as_sums(
    subject: Subject,
    device: Device,
    plan: QuantizationPlan,
    scheme: StorageScheme,
    edges: StorageScheme,
    layout: KvLayout,
    context: int,
    prompt: int,
) -> str:
    stored, rates = plan.stored, plan.rates
    lines = [*_shape(subject), "", f"bytes a weight: {scheme.name}"]
    shapes = sorted({shape[-2:] for shape in subject.matrices().values()})
    sums = {shape: scheme.sum(*shape) for shape in shapes}
    rows = {inputs: sums[outputs, inputs] for outputs, inputs in shapes}
    if len(set(sums.values())) == 1:
        lines.append(f"  {sums[shapes[0]]}")
    elif all(rows[inputs] == how for (_, inputs), how in sums.items()):
        # What a row shares depends on its length …
        lines += [f"  rows of {inputs}: {rows[inputs]}" for inputs in sorted(rows)]
    else:  # … and what a matrix shares on its rows.
        lines += [f"  {outputs}·{inputs}: {how}" for (outputs, inputs), how in sums.items()]
    lines += ["", "weights"]
    weights = {"layers": 0, "embedding": 0, "head": 0, "norms": 0}
    for role, shape in subject.program.weights.items():
        weights[_part(role)] += prod(shape)
    each_of = {"layers": scheme.name, "norms": "F32"}
    for name, count in weights.items():
        if count:
            size = stored.part_bytes(name)
            tied = ", also the head" if name == "embedding" and not weights["head"] else ""
            lines.append(
                f"  {name:<10}{count:>16,} × {size / count:<11.9g} = {size:>16,} bytes"
                f"  ({each_of.get(name, edges.name)}{tied})"
            )
    whole, bf16 = subject.parameters, 2 * subject.parameters
    lines.append(
        f"  {'all':<10}{whole:>16,} × {stored.bytes / whole:<11.6g} = {stored.bytes:>16,} bytes"
        f"  (BF16: {bf16:,}, {bf16 / stored.bytes:.3g} ×)"
    )
    if plan.held_bytes is not None:
        lines.append(
            f"  Octavo holds them repacked in {plan.held_bytes:,} bytes, "
            f"{plan.held_bytes_per_weight:.6g} a weight of the layers"
        )
    lines += [
        "",
        f"decode, one sequence with {context} tokens in its cache "
        f"({layout.bytes_per_token:,} bytes a token in {layout.dtype}, whatever the format)",
        *_phase_lines(plan.decode),
    ]
    if plan.held_decode_tokens_per_second is not None:
        lines.append(
            f"  of what Octavo holds: {number(plan.held_decode_tokens_per_second)} tokens/s at most"
        )
    lines += ["", *_crossing_lines(plan, context), "", f"prefill, {prompt} tokens"]
    lines += _phase_lines(plan.prefill)
    lines += [
        "",
        f"{device.name}: memory {_figures(rates)}",
        "A weight takes two operations a token, a multiplication and an addition. Times are added "
        "op by op, each the longer",
        "of its two; after the last attention only the row is computed whose token comes next.",
    ]
    return "\n".join(lines)


def _shape(subject: Subject) -> list[str]:
    """Where the parameters are, with the product of each matrix's sides."""
    config = subject.program.config
    layers = len(config.layers)
    weights = subject.program.weights
    lines = [f"{subject.name}: {config.family}, {subject.parameters:,} parameters"]
    shapes = Counter(subject.matrices().values())
    total = sum(map(prod, subject.matrices().values()))
    if all(count % layers == 0 for count in shapes.values()):
        sides = " + ".join(
            f"{count // layers} × ".removeprefix("1 × ") + "·".join(map(str, shape))
            for shape, count in shapes.items()
        )
        lines.append(f"  layers     {total:>15,} = {layers} × ({sides})")
    else:
        lines.append(f"  layers     {total:>15,} in {layers} layers that differ")
    for name, role in (("embedding", "token_embd"), ("head", "output")):
        if role in weights:
            rows, columns = weights[role]
            tied = ", also the head" if name == "embedding" and "output" not in weights else ""
            lines.append(f"  {name:<10} {rows * columns:>15,} = {rows} · {columns}{tied}")
    vectors = sum(prod(shape) for role, shape in weights.items() if _part(role) == "norms")
    lines.append(f"  norms      {vectors:>15,} (and biases)")
    return lines


def _part(role: str) -> str:
    from octavo.tools.plan.subject import part

    return part(role)


def _formats(stored: StoredWeights) -> str:
    """What a file's layers have, by bytes."""
    sizes: Counter[str] = Counter()
    for role, size in stored.sizes.items():
        if _part(role) == "layers":
            sizes[stored.formats[role].name] += size
    total = sum(sizes.values())
    return ", ".join(
        name if size == total else f"{name} {100 * size / total:.0f} %"
        for name, size in sizes.most_common()
    )


def _phase_lines(phase: Phase) -> list[str]:
    """A line for each part: bytes and their time, operations and theirs, and what binds."""
    gb = phase.rates.bytes_per_second / 1e9
    lines = [
        f"  {'':<16}{'bytes':>15}{f'÷ {number(gb)} GB/s':>17}{'operations':>20}{'÷ peak':>14}"
        f"{'the longer':>15}",
        *(_line(part.label, part) for part in phase.parts),
        _line("step", phase),
    ]
    lines.append(
        f"  {phase.tokens:,} {'token' if phase.tokens == 1 else 'tokens'} ÷ "
        f"{1e3 * phase.seconds:.4f} ms = {number(phase.tokens_per_second)} tokens/s at most"
    )
    return lines


def _line(label: str, cost: PartCost | Phase) -> str:
    return (
        f"  {label:<16}{cost.bytes:>15,}{1e3 * cost.memory_seconds:>14.4f} ms{cost.ops:>20,}"
        f"{1e3 * cost.arithmetic_seconds:>11.4f} ms{1e3 * cost.seconds:>12.4f} ms  {cost.bound}"
    )


def _crossing_lines(plan: QuantizationPlan, context: int) -> list[str]:
    """From which batch decode is bound by operations, and why."""
    rates = plan.rates
    units = {part.arithmetic for part in plan.decode.parts if part.name == "layers"}
    lines = ["from bytes to operations"]
    if plan.layers_crossing is None:
        lines.append("  each expert sees some of a batch's tokens only")
    elif len(units) == 1:
        (unit,) = units
        read = plan.bytes_per_weight / rates.bytes_per_second
        lines += [
            f"  a weight: {plan.bytes_per_weight:.6g} bytes ÷ "
            f"{number(rates.bytes_per_second / 1e9)} GB/s = {number(1e12 * read)} ps to read; "
            f"2 operations ÷ {number(rates.peak(unit) / 1e9)} Gop/s ({unit}) = "
            f"{number(2e12 / rates.peak(unit))} ps a sequence:",
            "  the layers' matrices are bound by operations from "
            f"{number(plan.layers_crossing)} sequences on",
        ]
    else:
        lines.append(
            f"  the layers' matrices are bound by operations from {number(plan.layers_crossing)} on"
        )
    if plan.crossing is None:
        lines.append(
            f"  the whole step never is: a sequence's cache of {context} tokens takes longer to "
            "read than its token to compute"
        )
    else:
        lines.append(
            f"  the whole step, with the head and a cache of {context} tokens each, from "
            f"{plan.crossing} on"
        )
    return lines


def _figures(rates: Any) -> str:
    peaks = ", ".join(f"{unit} {number(rates.peak(unit) / 1e9)}" for unit in rates.units)
    return f"{number(rates.bytes_per_second / 1e9)} GB/s; {peaks} Gop/s"
