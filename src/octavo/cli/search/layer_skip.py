"""octavo search layer-skip: which of a model's own layers should draft for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text, now_and_then, on_stderr
from octavo.cli.fold import show_report
from octavo.cli.options import ENGINE_OPTIONS, Model, engine_config, takes
from octavo.words import plural

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig

EXAMPLES = (
    "octavo search layer-skip smollm2",
    "octavo search layer-skip llama.gguf --text prompts.txt --positions 512 --json",
)

# What says how the model is loaded, how its cache looks and what it runs on; all else the search
# finds, or has no use for.
_USED = ("kv_cache_dtype", "quantization", "block_size", "memory_utilization", "threads", "isa")
_ENGINE_OPTIONS = [option for option in ENGINE_OPTIONS if option.name in _USED]


@takes(engine=(_ENGINE_OPTIONS, engine_config))
def command(
    model: Model,
    engine: EngineConfig,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text whose pieces are the prompts: the more it is like what the model will "
            "be asked, the better.",
            show_default="25 kB of English and code that Octavo brings",
        ),
    ] = None,
    positions: Annotated[
        int,
        typer.Option(
            min=8,
            max=8192,
            metavar="N",
            help="Places of answers to compare layers at, and as many others to report on.",
        ),
    ] = 256,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was found as one JSON object.")
    ] = False,
) -> None:
    """Find which of a model's own layers draft best for it.

    MODEL answers pieces of a text. Its layers are taken away one by one, each time the one that is
    missed least, and the passes are timed: that gives the tokens a second to expect from drafting
    with what is left (method layer_skip), which may be fewer than without.
    """
    from octavo.engine.config import SettingsError
    from octavo.tools.bench.layer_search import search
    from octavo.tools.quantize.fidelity import TextError

    try:
        with on_stderr() as show:
            found = search(
                model, engine, text=text, positions=positions, progress=now_and_then(show)
            )
    except TextError as error:
        raise SettingsError(str(error)) from None
    show_report(json_text(found, indent=2) if as_json else as_text(found), as_json=as_json)


def as_text(found: dict[str, Any]) -> str:
    """The finalists, then what to do."""
    lines = [
        f"{found['model']}: {found['num_layers']} layers, "
        f"{1e3 * found['seconds_per_step']:.2f} ms a token without drafts on "
        + plural(found["threads"], "thread"),
        f"measured at {found['positions']} places of greedy answers to {found['text']}",
        "",
        f"{'layers':>7}{'1st right':>11}{'2nd':>7}{'3rd':>7}{'ms a guess':>12}{'length':>8}"
        f"{'tokens a pass':>15}{'speed':>9}",
    ]
    for row in found["finalists"]:
        first, second, third = row["accepted_by_position"][:3]
        lines.append(
            f"{len(row['layers']):>7}{first:>11.0%}{second:>7.0%}{third:>7.0%}"
            f"{1e3 * row['seconds_per_guess']:>12.2f}{row['draft_length']:>8}"
            f"{row['tokens_per_pass']:>15.2f}{row['speedup']:>7.2f} ×"
        )
    lines.append("")
    if found["pays"]:
        lines.append(f"The best is {found['speedup']:.2f} × as fast as no speculation, with")
    else:
        lines.append(
            f"It does not pay: the best is {found['speedup']:.2f} × as fast as no speculation, with"
        )
    config = json.dumps(found["speculative_config"])
    return "\n".join([*lines, f"  --speculative-config '{config}'"])
