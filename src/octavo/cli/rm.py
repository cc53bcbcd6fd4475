"""octavo rm: delete pulled models."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from octavo.cli.values import model_names

EXAMPLES = ("octavo rm gemma3-270m", "octavo rm gemma3-270m --yes")


def command(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Names as octavo list has them.",
            metavar="NAME",
            show_default=False,
            autocompletion=model_names,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete pulled models from the cache.

    It asks first, and deletes nothing outside the cache.
    """
    from octavo.loader.pulled import find, remove

    found = [find(name) for name in dict.fromkeys(names)]  # all are there, before one goes
    for model in found:
        if not yes:
            if not sys.stdin.isatty():
                raise typer.BadParameter("there is no terminal to ask on: say --yes")
            what = f"delete {model.name} ({model.size / 1e6:,.1f} MB, {model.folder})?"
            if not typer.confirm(what):
                typer.echo(f"{model.name} is kept", err=True)
                continue
        typer.echo(f"{model.name}: {remove(model.name) / 1e6:,.1f} MB freed")
