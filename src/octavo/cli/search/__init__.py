"""octavo search: settings that are found by measurement."""

from __future__ import annotations

from types import ModuleType

from octavo.cli.search import layer_skip

HELP = "Find settings by measurement."
COMMANDS: tuple[ModuleType, ...] = (layer_skip,)
