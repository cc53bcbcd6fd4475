"""octavo plan memory: what weights and KV cache take, where that fits, and what would."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text, on_stderr, wrapped
from octavo.cli.fold import show_report
from octavo.cli.options import PlannedModel, amount, length, named_flags
from octavo.cli.planned import (
    KV_DTYPE_HELP,
    NAMES,
    Asymmetric,
    Bits,
    GroupSize,
    MemoryUtilization,
    chosen_scheme,
)
from octavo.machine.memory import as_size
from octavo.tools.plan.gpu import RUNTIME_BYTES
from octavo.words import plural

if TYPE_CHECKING:
    from octavo.tools.plan.memory_plan import (
        Alternative,
        DeviceMemory,
        KvCacheSize,
        Need,
        ServingLoad,
        Sharing,
    )
    from octavo.tools.plan.quantization import StoredWeights
    from octavo.tools.plan.schemes import StorageScheme
    from octavo.tools.plan.subject import Subject

EXAMPLES = (
    "octavo plan memory llama-2-7b --context 4096 --users 32 --kv-dtype fp16",
    "octavo plan memory llama-3.1-70b --context 32K --users 8 --device h100",
    "octavo plan memory qwen2.5-7b --quantization int4 --kv-dtype int8 --json",
)


def command(
    model: PlannedModel,
    context: Annotated[
        str | None,
        typer.Option(
            parser=length,
            metavar="TOKENS",
            help="Of each user, prompt and answer.",
            show_default="the model's context",
        ),
    ] = None,
    users: Annotated[
        str,
        typer.Option("--users", "--batch-size", "-b", metavar="N", help="Sequences held at once."),
    ] = "1",
    kv_dtype: Annotated[
        str,
        typer.Option(
            "--kv-dtype",
            "--kv-cache-dtype",
            metavar="DTYPE",
            help=KV_DTYPE_HELP,
        ),
    ] = "auto",
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            "--quantization",
            "-q",
            metavar="FORMAT",
            help="Of the weights: int8 or int4 (rounded while loading), a GGUF format (q4_k, …), "
            "gptq, awq, compressed-tensors, w8a8, fp8, bf16, f32.",
            show_default="as stored, else bf16",
        ),
    ] = None,
    bits: Bits = None,
    group_size: GroupSize = None,
    asymmetric: Asymmetric = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Answer for this one: machine, a GPU (h100, rtx-4090, …), or figures with a "
            "capacity in GiB, as memory=48,bf16=470,capacity=64.",
            show_default="this machine, beside common GPUs",
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Beside it, with a cache of its own (speculation)."),
    ] = None,
    block_size: Annotated[
        int, typer.Option(metavar="N", help="Tokens in a KV cache block, a multiple of 16.", min=16)
    ] = 16,
    max_num_batched_tokens: Annotated[
        str | None,
        typer.Option(
            parser=amount,
            metavar="TOKENS",
            help="Most tokens in a step.",
            show_default="512; of a GPU 2048",
        ),
    ] = None,
    memory_utilization: MemoryUtilization = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as one JSON object, in bytes.")
    ] = False,
) -> None:
    """Say what memory so many users take, and where it fits.

    The KV cache as a product with every factor, weights by part, the engine's work space; beside
    this machine and common GPUs; and what would fit where it does not. No weights
    are needed.
    """
    from octavo.engine.config import EngineConfig, SettingsError
    from octavo.kv_cache.layout import KvDtype
    from octavo.tools.plan import memory_plan
    from octavo.tools.plan.subject import Subject

    if memory_utilization is not None and not 0.0 < memory_utilization <= 1.0:  # nan neither
        raise typer.BadParameter(f"--memory-utilization is {memory_utilization:g}, outside 0 to 1")
    number = _users(users)
    try:
        dtype = KvDtype.of(kv_dtype)
    except ValueError:
        raise typer.BadParameter(
            f"--kv-dtype {kv_dtype!r} is not what a cache can hold; auto, "
            f"{', '.join(KvDtype.served())} are, and on GPUs fp8"
        ) from None
    try:
        config = EngineConfig(block_size=block_size)
        given: dict[str, Any] = {}
        seqs = max(number, config.max_num_seqs)
        if max_num_batched_tokens is not None:
            # As the engine asks: a token a step for each sequence that runs.
            budget = int(max_num_batched_tokens)
            if budget < number:
                raise ValueError(
                    f"--max-num-batched-tokens is {budget}, fewer than the {number} users"
                )
            given["max_num_batched_tokens"] = budget
            seqs = max(number, min(config.max_num_seqs, budget))
        if memory_utilization is not None:
            given["memory_utilization"] = memory_utilization
        config = replace(config, max_num_seqs=seqs, **given)
        if draft_model is not None:
            speculation = {"method": "draft_model", "model": draft_model}
            config = replace(config, speculative_config=speculation)
        rounding = format.lower() if format and format.lower() in ("int8", "int4") else None
        scheme = chosen_scheme(None if rounding else format, bits, group_size, asymmetric)
        if rounding and scheme:
            raise ValueError(f"--bits, --group-size and --asymmetric are not for {rounding}")
        places = _places(device)
    except ValueError as error:
        raise typer.BadParameter(named_flags(str(error), *NAMES)) from None
    subject = Subject.find(model)
    most = subject.program.config.context_length
    tokens = most if context is None else int(context)
    if tokens > most:
        raise SettingsError(f"--context {tokens} is more than the model's context of {most} tokens")
    try:
        stored = _stored(subject, rounding, scheme)
        draft = None
        if draft_model is not None:
            beside = Subject.find(draft_model)
            _same_vocabulary(subject, beside)
            draft = memory_plan.PlannedDraftModel(beside, _stored(beside, None, None))
    except ValueError as error:
        raise SettingsError(str(error)) from None
    loads = [
        memory_plan.ServingLoad(
            subject, stored, tokens, number, dtype, place.usual(config, given), draft
        )
        for place in places
    ]
    found = [memory_plan.need(load, place) for load, place in zip(loads, places, strict=True)]
    load, asked, need = loads[0], places[0], found[0]
    instead = []
    if need is None or not need.fits:
        instead = memory_plan.alternatives(load, memory_plan.narrower(load, asked), asked)
    if as_json:
        facts = as_dict(load, places, found, instead)
        typer.echo(json_text(facts, indent=2))
    else:
        serve = _serve(model, rounding, load)
        show_report(as_text(load, places, found, instead, serve, loads))


def _serve(model: str, rounding: str | None, load: ServingLoad) -> str:
    """The command, without the size of its cache, whose engine is what is planned."""
    from octavo.loader.pull import servable

    config, usual = load.config, type(load.config)()
    flags = ["octavo", "serve", servable(model)]
    if rounding is not None:
        flags += ["--quantization", rounding]
    flags += ["--max-model-len", str(load.context), "--kv-cache-dtype", load.dtype]
    for flag in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
        if (value := getattr(config, flag)) != getattr(usual, flag):
            flags += [f"--{flag.replace('_', '-')}", str(value)]
    if config.speculation is not None:
        method = {"method": "draft_model", "model": config.speculation.model}
        flags += ["--speculative-config", json.dumps(method)]
    return shlex.join(flags)


def _users(text: str) -> int:
    from octavo.tools.plan.memory_plan import MOST_USERS

    plain = text.strip()
    number = int(plain) if plain.isascii() and plain.isdecimal() and len(plain) < 12 else 0
    if not 1 <= number <= MOST_USERS:
        raise typer.BadParameter(f"--users {text[:40]!r} is not a number from 1 to {MOST_USERS:,}")
    return number


def _places(device: str | None) -> list[DeviceMemory]:
    """What is asked about, then the rest. Raises `ValueError` for what is not known."""
    from octavo.machine.limits import cpu_model
    from octavo.machine.memory import available_memory
    from octavo.tools.plan import hardware
    from octavo.tools.plan.memory_plan import DeviceMemory

    here = DeviceMemory(f"this machine ({cpu_model()})", available_memory(), here=True)
    gpus = [
        DeviceMemory(gpu.name, gpu.memory_bytes, gpu=True, fp8=gpu.has_fp8)
        for gpu in hardware.PUBLISHED.values()
        if gpu.memory_bytes is not None
    ]
    if device is None or device == "machine":
        return [here, *gpus]
    chosen = hardware.device(device, on_stderr)
    if chosen.memory_bytes is None:
        raise ValueError(f"--device {device!r} says nothing of how much it holds: add capacity=GiB")
    place = DeviceMemory(chosen.name, chosen.memory_bytes, gpu=chosen.gpu, fp8=chosen.has_fp8)
    return [place, here, *(gpu for gpu in gpus if gpu != place)]


def _same_vocabulary(subject: Subject, draft: Subject) -> None:
    """As far as shapes say. Raises `SettingsError`."""
    from octavo.engine.config import SettingsError

    own, others = (each.program.config.vocab_size for each in (subject, draft))
    if own != others:
        raise SettingsError(
            f"--draft-model {draft.name} has a vocabulary of {others:,} tokens and {subject.name} "
            f"one of {own:,}: a draft model needs the model's own"
        )


def _stored(subject: Subject, rounding: str | None, scheme: StorageScheme | None) -> StoredWeights:
    """Raises `ValueError` where a weight cannot be stored so."""
    from octavo.tools.plan import quantization

    if rounding is not None:
        return quantization.as_rounded(subject, rounding)
    return quantization.as_asked(subject, scheme)


# --- JSON ----------------------------------------------------------------------------------------


def as_dict(
    load: ServingLoad,
    places: list[DeviceMemory],
    needs: list[Need | None],
    instead: list[Alternative],
) -> dict[str, Any]:
    from octavo.tools.plan import memory_plan

    cache, subject = load.cache, load.subject
    config = subject.program.config
    return {
        "model": subject.name,
        "parameters": subject.parameters,
        "active_parameters": memory_plan.active_parameters(subject),
        "context": load.context,
        "users": load.users,
        "verdict": verdict(load, places[0], needs[0]),
        "fits": needs[0] is not None and needs[0].fits,
        "kv_dtype": load.dtype,
        "kv_bytes": cache.bytes,
        "factors": cache.factors,
        "steps": cache.steps,
        "kv_number_bytes": cache.numbers,
        "kv_scale_bytes": cache.scales,
        "kv_padding_bytes": cache.padding,
        "kv_bytes_per_token": cache.bytes_per_token,
        "kv_bytes_without_windows": cache.without_windows,
        "block_size": cache.block_size,
        "kv_paged_bytes": cache.paged_bytes,
        "kv_by_kind": [
            kind._asdict()
            | {"bytes": cache.kind_bytes(kind), "paged_bytes": cache.kind_paged_bytes(kind)}
            for kind in cache.kinds
        ],
        "attention": [sharing._asdict() for sharing in memory_plan.sharings(config, cache)],
        "weights": {
            "format": load.stored.name,
            "bytes": load.stored.bytes,
            "parts": [part._asdict() for part in memory_plan.weight_parts(subject, load.stored)],
        },
        "work_bytes": load.work_bytes,
        "draft_model": None if load.draft is None else _draft_dict(load),
        "memory_utilization": load.config.memory_utilization,
        "max_num_batched_tokens": load.config.max_num_batched_tokens,
        "devices": [_place_dict(place, need) for place, need in zip(places, needs, strict=True)],
        "alternatives": [_alternative_dict(each) for each in instead],
    }


def _draft_dict(load: ServingLoad) -> dict[str, Any]:
    assert load.draft is not None
    cache = load.draft_cache
    assert cache is not None
    return {
        "model": load.draft.subject.name,
        "weight_bytes": load.draft.stored.bytes,
        "context": cache.context,
        "kv_bytes": cache.bytes,
    }


def _place_dict(place: DeviceMemory, need: Need | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": place.name,
        "memory_bytes": place.memory_bytes,
        "measured": place.here,
        "fits": need is not None and need.fits,
    }
    if need is None:
        return facts
    return facts | {
        "weight_bytes": need.weight_bytes,
        "work_bytes": need.work_bytes,
        "runtime_bytes": need.runtime_bytes,
        "kv_bytes": need.kv_bytes,
        "bytes": need.bytes,
        "kv_budget_bytes": need.budget,
        "sequences": need.sequences,
        "longest_context": need.context,
    }


def _alternative_dict(each: Alternative) -> dict[str, Any]:
    return {
        "changed": each.changed,
        "format": each.load.stored.name,
        "kv_dtype": each.load.dtype,
        "context": each.load.context,
        "users": each.load.users,
        "weight_bytes": each.need.weight_bytes,
        "kv_bytes": each.need.kv_bytes,
        "bytes": each.need.bytes,
    }


# --- for people ----------------------------------------------------------------------------------


def verdict(load: ServingLoad, place: DeviceMemory, need: Need | None) -> str:
    """In a line: whether it fits there, and how many of its sequences would."""
    what = f"{plural(load.users, 'user')} of {load.context:,} tokens"
    what += " takes" if load.users == 1 else " take"
    if need is None:
        return f"Does not run on {place.name}: no kernel here takes {_unserved(load)}."
    of = f"{as_size(need.bytes)} of {as_size(place.memory_bytes)}"
    if need.fits:
        return f"Fits on {place.name}: {what} {of}, and {need.sequences:,} would fit."
    if need.budget <= 0:
        why = (
            "and weights alone are too much"
            if need.weight_bytes > place.memory_bytes
            else "and weights and work space leave nothing for a cache"
        )
        if place.gpu and need.weight_bytes <= place.memory_bytes:
            why = (
                f"and of the {as_size(int(load.config.memory_utilization * place.memory_bytes))} "
                f"that --gpu-memory-utilization {load.config.memory_utilization:g} allows, "
                "weights, work space and runtime leave nothing for a cache"
            )
        return f"Does not fit on {place.name}: {what} {of}, {why}."
    return (
        f"Does not fit on {place.name}: {what} {of}; the cache may have "
        f"{as_size(need.budget)}, room for {need.sequences:,}."
    )


def _unserved(load: ServingLoad) -> str:
    """What the engine cannot hold."""
    from octavo.kv_cache.layout import KvDtype

    if not load.subject.served:
        return "latent attention"
    cache = load.dtype not in KvDtype.served()
    return f"a cache of {load.dtype}" if cache else f"weights in {load.stored.name}"


def _parts_line(need: Need) -> str:
    runtime = f"{as_size(need.runtime_bytes)} of runtime + " if need.runtime_bytes else ""
    return (
        f"{as_size(need.weight_bytes)} of weights + {as_size(need.work_bytes)} of work space + "
        f"{runtime}{as_size(need.kv_bytes)} of KV cache = {as_size(need.bytes)}"
    )


def as_text(
    load: ServingLoad,
    places: list[DeviceMemory],
    needs: list[Need | None],
    instead: list[Alternative],
    serve: str,
    loads: list[ServingLoad],
) -> str:
    from octavo.tools.plan import memory_plan

    subject = load.subject
    active = memory_plan.active_parameters(subject)
    used = f", {active:,} active" if active != subject.parameters else ""
    lines = [
        f"{subject.name}: {subject.program.config.family}, {subject.parameters:,} parameters{used}",
        verdict(load, places[0], needs[0]),
        *([] if needs[0] is None else [_parts_line(needs[0])]),
        _smallest(places, needs),
        "",
        f"KV cache, {plural(load.users, 'user')} of {load.context:,} tokens in {load.dtype}",
        *_kv_lines(load),
        "",
        f"weights, {load.stored.name}",
        *_weight_lines(load),
        "",
        *_place_lines(loads, places, needs),
    ]
    if instead:
        lines += ["", *_instead_lines(places[0], instead)]
    elif needs[0] is None or not needs[0].fits:
        if load.subject.served:
            lines += ["", _nothing(load, places[0])]
    elif places[0].here and subject.stored is not None:
        lines += ["", f"To have it so: {serve} --kv-cache-memory-bytes {needs[0].kv_bytes}"]
    return "\n".join(lines)


def _smallest(places: list[DeviceMemory], needs: list[Need | None]) -> str:
    fitting = [
        place
        for place, need in zip(places, needs, strict=True)
        if need is not None and need.fits and not place.here
    ]
    if not fitting:
        return "None of the GPUs below holds it alone."
    least = min(fitting, key=lambda place: place.memory_bytes)
    return f"The smallest of the GPUs below that holds it: {least.name}."


def _kv_lines(load: ServingLoad) -> list[str]:
    from octavo.tools.plan import memory_plan

    cache = load.cache
    lines = [f"  {line}" for step in cache.steps for line in _folded(step)]
    lines.append(
        f"  = {as_size(cache.bytes)}; {cache.bytes_per_token:,} bytes for each token of a user"
    )
    if cache.bytes != cache.without_windows:
        lines.append(f"  (without windows it would be {as_size(cache.without_windows)})")
    if len(cache.kinds) > 1:
        lines.append(f"  {'layers':<26}{'bytes':>18}{'in whole blocks':>18}")
        for kind in cache.kinds:
            name = f"{kind.layers} with " + (
                "no window" if kind.window is None else f"a window of {kind.window:,}"
            )
            if not cache.alike:
                name += f", {kind.kv_heads} × {kind.head_dim}"
            lines.append(
                f"  {name:<26}{cache.kind_bytes(kind):>18,}{cache.kind_paged_bytes(kind):>18,}"
            )
    lines.append(
        f"  in whole blocks of {cache.block_size} tokens, as the engine holds it: "
        f"{cache.paged_bytes:,} bytes"
    )
    if cache.block_padding:
        lines.append(
            f"  ({as_size(cache.block_padding)} of them behind layers that take less of a block)"
        )
    lines += [
        f"  {sharing.name}, {_heads(sharing, cache)}: {as_size(sharing.bytes)}"
        + (" (this model)" if sharing.own else "")
        for sharing in memory_plan.sharings(load.subject.program.config, cache)
    ]
    if load.draft_cache is not None and load.draft is not None:
        lines.append(
            f"  the draft model's ({load.draft.subject.name}): {as_size(load.draft_cache.bytes)}"
        )
    return lines


def _heads(sharing: Sharing, cache: KvCacheSize) -> str:
    if cache.latent:
        return "a latent"
    if sharing.kv_heads is None:
        return "KV heads by layer"
    return plural(sharing.kv_heads, "KV head")


def _folded(step: str) -> list[str]:
    """In two lines where it would not fit in one of 98 columns."""
    left, equals, right = step.rpartition(" = ")
    return [step] if len(step) <= 98 or not equals else [left, f"  = {right}"]


def _weight_lines(load: ServingLoad) -> list[str]:
    from octavo.tools.plan import memory_plan

    parts = memory_plan.weight_parts(load.subject, load.stored)
    rows = [(part.name, part.numbers, part.bytes, " ".join(part.formats)) for part in parts]
    rows.append(("all", load.subject.parameters, load.stored.bytes, ""))
    if load.draft is not None:
        subject, stored = load.draft
        rows.append(("draft model", subject.parameters, stored.bytes, stored.name))
    return [
        f"  {name:<18}{count:>17,} × {size / count:<9.6g} = {size:>17,} bytes"
        f"  {as_size(size):>9}  {formats}".rstrip()
        for name, count, size, formats in rows
    ]


def _place_lines(
    loads: list[ServingLoad], places: list[DeviceMemory], needs: list[Need | None]
) -> list[str]:
    load = loads[0]
    lines = [
        f"{'':<18}{'memory':>11}{'takes':>11}{'for cache':>11}{'fits':>6}"
        f"{f'sequences of {load.context:,}':>22}{f'longest for {load.users:,}':>20}"
    ]
    for place, need in zip(places, needs, strict=True):
        name = "this machine" if place.here else place.name
        if need is None:
            lines.append(
                f"{name:<18}{as_size(place.memory_bytes):>11}  no kernel takes {_unserved(load)}"
            )
            continue
        context = f"{need.context:,}" if need.context else "-"
        lines.append(
            f"{name:<18}{as_size(place.memory_bytes):>11}{as_size(need.bytes):>11}"
            f"{as_size(max(need.budget, 0)):>11}{'yes' if need.fits else 'no':>6}"
            f"{need.sequences:>22,}{context:>20}"
        )
    return [
        *lines,
        "Of GPUs the memory is what their drivers show as total, published, not measured; of this",
        "machine what is available now, and weights as Octavo repacks them. For the cache:",
        *(line for share in _shares(loads, places) for line in wrapped(share, "  ")),
    ]


def _shares(loads: list[ServingLoad], places: list[DeviceMemory]) -> list[str]:
    """What the cache may have, and the work space, on each kind of place."""
    said = {}
    for load, place in zip(loads, places, strict=True):
        share, work = load.config.memory_utilization, as_size(load.work_bytes)
        if place.gpu:
            said["on a GPU"] = (
                f"{100 * share:g} % of its memory (--gpu-memory-utilization, as in vLLM) without "
                f"weights, {work} of work space and {as_size(RUNTIME_BYTES)} of its runtime"
            )
        else:
            where = "here" if place.here else f"on {place.name}"
            said[where] = f"{100 * share:g} % of what weights and {work} of work space leave"
    return [f"{where}: {text}" for where, text in said.items()]


def _nothing(load: ServingLoad, place: DeviceMemory) -> str:
    from octavo.tools.plan import memory_plan

    smallest = min(
        (load.stored, *memory_plan.narrower(load, place)), key=lambda stored: stored.bytes
    )
    return (
        f"Nothing narrower, shorter or for fewer users fits on {place.name}: "
        f"{smallest.name}, the weights alone are {as_size(smallest.bytes)}."
    )


def _instead_lines(place: DeviceMemory, instead: list[Alternative]) -> list[str]:
    lines = [
        f"What would fit on {place.name}, the nearest first:",
        f"  {'weights':<34}{'KV':>6}{'context':>12}{'users':>10}{'takes':>12}",
    ]
    for each in instead:
        load = each.load
        lines.append(
            f"  {load.stored.name:<34}{load.dtype:>6}{load.context:>12,}{load.users:>10,}"
            f"{as_size(each.need.bytes):>12}"
        )
    return lines
