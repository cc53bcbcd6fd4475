"""octavo list: the models that have been pulled."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli.console import json_text
from octavo.cli.fold import show_report

EXAMPLES = ("octavo list", "octavo list --json")


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models that have been pulled, with size and path.

    octavo pull --list has the names of those that can be.
    """
    from octavo.loader.pull import cache_dir
    from octavo.loader.pulled import pulled

    models = pulled()
    if as_json:
        facts = [
            {"name": each.name, "bytes": each.size, "path": each.path and str(each.path)}
            for each in models
        ]
        typer.echo(json_text({"folder": str(cache_dir() / "models"), "models": facts}))
        return
    if not models:
        show_report(f"no models in {cache_dir() / 'models'}; octavo pull --list has names")
        return
    width = max(len(each.name) for each in models) + 2
    for each in models:
        where = each.path or f"{each.folder}: not whole; octavo pull {each.name} mends it"
        show_report(f"{each.name:<{width}}{each.size / 1e6:>8,.1f} MB  {where}")
