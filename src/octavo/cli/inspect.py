"""octavo inspect: what a model is, what its numbers weigh, and what of it fits here."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text
from octavo.cli.fold import show_report
from octavo.cli.options import ENGINE_OPTIONS, Model, engine_config, named_flags, takes
from octavo.machine.memory import as_size
from octavo.words import plural

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.loader.base import Checkpoint

EXAMPLES = (
    "octavo inspect smollm2",
    "octavo inspect model.gguf --json",
    "octavo inspect gemma3-270m --kv-cache-memory 256MiB --max-model-len 4K",
)


@takes(engine=(ENGINE_OPTIONS, engine_config))
def command(
    model: Model,
    engine: EngineConfig,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as one JSON object, sizes in bytes.")
    ] = False,
) -> None:
    """Show what a model is and what of it fits here.

    Its shape, its bytes by part, its KV bytes per token, and how many tokens and sequences this
    machine holds; with engine options, how many under them. Nothing is
    loaded but the file's header.
    """
    from octavo.loader import load
    from octavo.loader.pull import resolve

    facts = describe(load(resolve(model)), engine)
    show_report(
        json_text(facts, indent=2, ensure_ascii=False) if as_json else as_text(facts),
        as_json=as_json,
    )


def describe(checkpoint: Checkpoint, engine: EngineConfig) -> dict[str, Any]:
    """The facts as `--json` prints them; sizes in bytes, lengths in tokens."""
    from octavo.engine.cache_plan import plan_cache
    from octavo.engine.config import DoesNotFit, SettingsError
    from octavo.loader.chat_template import problem
    from octavo.loader.rounding import rounded
    from octavo.machine.memory import available_memory
    from octavo.models.families import program

    if engine.quantization is not None:
        checkpoint = rounded(checkpoint, engine.quantization)
    config = checkpoint.config
    layout = engine.layout_of(config)
    try:
        layout.dtype.check_served()
        parts = weigh(checkpoint, engine.isa)
        formats = weigh_formats(checkpoint, engine.isa)
    except ValueError as error:  # no such instruction set here, or no kernel for such a cache
        raise SettingsError(str(error)) from None
    parameters, stored, held = (
        sum(part[name] for part in parts.values())
        for name in ("parameters", "stored_bytes", "held_bytes")
    )
    experts: dict[str, Any] | None = None
    if config.experts is not None:
        idle = config.experts.count - config.experts.chosen
        experts = asdict(config.experts) | {
            "layers": sum(layer.experts is not None for layer in config.layers),
            # Of the parameters, what one token's step multiplies with.
            "active_parameters": parameters
            - parts["experts"]["parameters"] // config.experts.count * idle,
        }
    windows: dict[str, int] = {}
    for layer in config.layers:
        if layer.recurrence is not None:
            continue
        kind = "global" if layer.window is None else str(layer.window)
        windows[kind] = windows.get(kind, 0) + 1
    heads = Counter(config.heads_of(layer) for layer in config.layers)
    alike = next(iter(heads)) if len(heads) == 1 else (None, None)
    tokenizer = checkpoint.tokenizer
    available = available_memory()
    here: dict[str, Any] = {"memory_available_bytes": available}
    try:
        plan = plan_cache(engine, program(config), layout, held, available)
    except DoesNotFit as error:
        here["does_not_fit"] = str(error)
    else:
        here |= {
            "kv_cache_bytes": plan.kv_cache_bytes,
            "max_model_len": plan.max_model_len,
            "tokens": plan.capacity_tokens,
            "sequences": round(plan.capacity_sequences, 2),
        }
    return {
        "path": str(checkpoint.path),
        "name": config.name,
        "family": config.family,
        "layers": len(config.layers),
        "heads": config.num_heads,
        "kv_heads": alike[0],
        "head_dim": alike[1],
        "heads_by_kind": [
            {"layers": count, "kv_heads": kv_heads, "head_dim": head_dim}
            for (kv_heads, head_dim), count in heads.items()
        ],
        "layers_sharing_caches": sum(layer.shares is not None for layer in config.layers),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "experts": experts,
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "default_max_model_len": config.default_length,
        "windows": windows,
        "tied_embeddings": config.tied_embeddings,
        "parameters": parameters,
        "file_bytes": checkpoint.file_bytes,
        "stored_bytes": stored,
        "weights_bytes": held,
        "stored_bytes_per_weight": stored / parameters,
        "held_bytes_per_weight": held / parameters,
        "parts": parts,
        "formats": formats,
        "quantization": None
        if checkpoint.quantization is None
        else checkpoint.quantization._asdict(),
        "kv_cache_dtype": layout.dtype.value,
        "kv_bytes_per_token": layout.bytes_per_token,
        "kv_held_bytes_per_token": layout.held_bytes_per_token,
        "kv_block_bytes": layout.block_bytes,
        "recurrent_layers": sum(layer.recurrence is not None for layer in config.layers),
        "state_bytes": 0 if layout.state is None else layout.state.payload_bytes,
        "state_held_bytes": layout.state_blocks * layout.block_bytes,
        "tokenizer": tokenizer.kind,
        "bos_token": tokenizer.bos_token_id,
        "stop_tokens": {
            str(token_id): tokenizer.token_text(token_id)
            for token_id in sorted(tokenizer.eos_token_ids)
        },
        "chat_template": checkpoint.chat_template is not None,
        "notes": list(checkpoint.notes),
        "chat_template_error": problem(checkpoint.chat_template),
        "here": here,
    }


def weigh(checkpoint: Checkpoint, isa: str | None = None) -> dict[str, dict[str, Any]]:
    """Bytes by part, as stored in the file and as the engine holds them (packed for ``isa``)."""
    from math import prod

    from octavo.executor.native.packing import held_bytes

    parts: dict[str, dict[str, Any]] = {}
    for role, weight in checkpoint.weights.items():
        part = parts.setdefault(
            part_of(role), {"parameters": 0, "stored_bytes": 0, "held_bytes": 0, "formats": {}}
        )
        format, stored = weight.stored
        part["parameters"] += prod(weight.shape)
        part["stored_bytes"] += stored
        part["held_bytes"] += held_bytes(weight, isa)
        formats = part["formats"]
        formats[format] = formats.get(format, 0) + stored
    for part in parts.values():
        for kind in ("stored", "held"):
            part[f"{kind}_bytes_per_weight"] = part[f"{kind}_bytes"] / part["parameters"]
    order = (
        *("embedding", "layer inputs", "attention", "recurrence", "ffn", "router", "experts"),
        *("norms", "head"),
    )
    return {name: parts[name] for name in sorted(parts, key=order.index)}


def weigh_formats(checkpoint: Checkpoint, isa: str | None = None) -> list[dict[str, Any]]:
    """Bytes by format: of the file, and what the engine makes of it; the largest first."""
    from math import prod

    from octavo.executor.native.held_form import held_form
    from octavo.executor.native.packing import held_bytes

    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for weight in checkpoint.weights.values():
        stored = weight.stored
        kept = held_form(weight)
        group = kept.group or None
        # Of all inputs, however many a matrix has.
        group = -1 if group is not None and group >= weight.shape[-1] else group
        key = (stored.format, kept.format, group, weight.order is not None)
        facts = found.setdefault(
            key,
            {
                "stored": stored.format,
                "held": kept.format.name,
                "group_size": group,
                "activation_order": weight.order is not None,
                "tensors": 0,
                "parameters": 0,
                "stored_bytes": 0,
                "held_bytes": 0,
            },
        )
        facts["tensors"] += 1
        facts["parameters"] += prod(weight.shape)
        facts["stored_bytes"] += stored.nbytes
        facts["held_bytes"] += held_bytes(weight, isa)
    for facts in found.values():
        for kind in ("stored", "held"):
            facts[f"{kind}_bytes_per_weight"] = facts[f"{kind}_bytes"] / facts["parameters"]
    return sorted(found.values(), key=lambda facts: -facts["stored_bytes"])


def part_of(role: str) -> str:
    """The part of the network a weight's role belongs to; a tied head is the embedding."""
    from octavo.models.family import LAYER_INPUTS

    names = role.split(".")
    name = names[2] if names[0] == "layers" else names[0]
    if name == "token_embd":
        return "embedding"
    if name == "output":
        return "head"
    if name in LAYER_INPUTS:
        return "layer inputs"
    if "norm" in name or name == "layer_output_scale":
        return "norms"
    if name.endswith("exps"):
        return "experts"
    if name.startswith("ffn_gate_inp") or name == "exp_probs_b":
        return "router"
    if name.startswith(("ssm_", "shortconv")) or name in ("attn_qkv", "attn_gate"):
        return "recurrence"
    return name.split("_")[0].replace("attn", "attention")


def as_text(facts: dict[str, Any]) -> str:
    """The same for people."""
    here = facts["here"]
    stops = ", ".join(f"{text} ({token_id})" for token_id, text in facts["stop_tokens"].items())
    windows = ", ".join(
        f"{count} global" if window == "global" else f"{count} with a window of {window}"
        for window, count in facts["windows"].items()
    )
    if facts["recurrent_layers"]:
        windows += f", {facts['recurrent_layers']} recurrent"
    lines = [
        facts["path"],
        f"model       {facts['name'] or '(unnamed)'}, {facts['family']}, "
        f"{facts['parameters'] / 1e6:.1f} M parameters",
        f"shape       {facts['layers']} layers ({windows}), hidden {facts['hidden_size']}, "
        f"ffn {facts['intermediate_size']}",
        *_experts(facts),
        f"heads       {facts['heads']} query on {_heads(facts)}; "
        f"vocabulary {facts['vocab_size']:,}",
        f"context     {facts['context_length']:,} tokens"
        + (
            ""
            if facts["default_max_model_len"] == facts["context_length"]
            else f"; {facts['default_max_model_len']:,}, as in training, without --max-model-len"
        ),
        f"tokenizer   {facts['tokenizer']}, stops at {stops or 'nothing'}, "
        f"{'with' if facts['chat_template'] else 'no'} chat template",
        *(
            [f"            that cannot be used: {facts['chat_template_error']}"]
            if facts["chat_template_error"]
            else []
        ),
        *([f"quantized   {_scheme(facts['quantization'])}"] if facts["quantization"] else []),
        "",
        f"{'weights':<12}{'parameters':>14}{'stored':>12}{'held':>12}{'bytes a weight':>16}"
        "  formats",
    ]
    for name, part in facts["parts"].items():
        total = part["stored_bytes"]
        formats = ", ".join(
            kind if size == total else f"{kind} {100 * size / total:.0f} %"
            for kind, size in sorted(part["formats"].items(), key=lambda item: -item[1])
        )
        tied = " (also the head)" if name == "embedding" and facts["tied_embeddings"] else ""
        lines.append(
            f"{name:<12}{part['parameters']:>14,}{as_size(part['stored_bytes']):>12}"
            f"{as_size(part['held_bytes']):>12}{_per_weight(part)}  {formats}{tied}"
        )
    lines += [
        f"{'all':<12}{facts['parameters']:>14,}{as_size(facts['stored_bytes']):>12}"
        f"{as_size(facts['weights_bytes']):>12}"
        f"{_per_weight(facts)}",
        "",
        f"{'formats':<24}{'tensors':>8}{'stored':>12}{'held':>12}{'bytes a weight':>16}  held as",
        *(
            f"{each['stored']:<24}{each['tensors']:>8,}{as_size(each['stored_bytes']):>12}"
            f"{as_size(each['held_bytes']):>12}{_per_weight(each)}  {_held(each)}"
            for each in facts["formats"]
        ),
        "",
        f"kv cache    {facts['kv_bytes_per_token']:,} bytes a token ({facts['kv_cache_dtype']})"
        f"{_padding(facts)}",
    ]
    if facts["recurrent_layers"]:
        lines.append(
            f"state       {facts['state_bytes']:,} bytes a sequence for "
            f"{plural(facts['recurrent_layers'], 'recurrent layer')}, "
            f"{as_size(facts['state_held_bytes'])} in whole blocks"
        )
    if "does_not_fit" in here:
        lines.append(f"here        does not fit: {named_flags(here['does_not_fit'])}")
    else:
        lines.append(
            f"here        {as_size(here['memory_available_bytes'])} free; a KV cache of "
            f"{as_size(here['kv_cache_bytes'])} holds {here['tokens']:,} tokens, "
            f"{here['sequences']:.1f} sequences of {here['max_model_len']:,}"
        )
    lines += [f"note        {note}" for note in facts["notes"]]
    return "\n".join(lines)


def _experts(facts: dict[str, Any]) -> list[str]:
    if (experts := facts["experts"]) is None:
        return []
    return [
        f"experts     {experts['count']} of {experts['intermediate_size']} in "
        f"{experts['layers']} layers; a token goes to {experts['chosen']}, "
        f"which makes {experts['active_parameters'] / 1e6:.1f} M parameters"
    ]


def _heads(facts: dict[str, Any]) -> str:
    kinds = facts["heads_by_kind"]
    alike = len(kinds) == 1
    said = " or ".join(
        f"{kind['kv_heads']} KV, {kind['head_dim']} wide"
        + ("" if alike else f" ({kind['layers']} layers)")
        for kind in kinds
    )
    sharing = facts["layers_sharing_caches"]
    return f"{said}; {sharing} layers read others' keys and values" if sharing else said


def _padding(facts: dict[str, Any]) -> str:
    padded = facts["kv_held_bytes_per_token"]
    return "" if padded == facts["kv_bytes_per_token"] else f", {padded:,} with what blocks leave"


def _held(facts: dict[str, Any]) -> str:
    """A format of the engine, with what is a matrix's own."""
    if facts["group_size"] is None:
        return str(facts["held"])
    order = ", in activation order" if facts["activation_order"] else ""
    return f"{facts['held']}, {_groups(facts['group_size'])}{order}"


def _groups(size: int) -> str:
    return "one scale a row" if size == -1 else f"a scale for {size} inputs"


def _scheme(facts: dict[str, Any]) -> str:
    """How the checkpoint's writer made its numbers small."""
    said = [
        f"{facts['method']} ({facts['layout']})",
        f"{' and '.join(map(str, facts['bits']))} bits",
        " and ".join(_groups(size) for size in facts["group_sizes"]),
        "symmetric" if facts["symmetric"] else "zeros of its own",
    ]
    if facts["activation_order"]:
        said.append("activation order")
    if facts["activations"]:
        said.append(f"activations {facts['activations']}")
    return ", ".join(said)


def _per_weight(part: dict[str, Any]) -> str:
    """As stored and as held."""
    stored, held = part["stored_bytes_per_weight"], part["held_bytes_per_weight"]
    return f"{f'{stored:.3g} → {held:.3g}':>16}"
