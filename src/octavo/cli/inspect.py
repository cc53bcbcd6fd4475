"""octavo inspect: what a model is and what of it fits here."""

from __future__ import annotations

import typer

from octavo.cli.options import Model

EXAMPLES = (
    "octavo inspect smollm2",
    "octavo inspect model.gguf --json",
)


def command(model: Model) -> None:
    """Show a model's shape, its bytes by part, its KV bytes per token, and what fits here."""
    raise typer.Exit(1)
