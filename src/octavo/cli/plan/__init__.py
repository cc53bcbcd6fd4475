"""octavo plan: what a model and its settings take and give, before anything is loaded."""

from __future__ import annotations

from types import ModuleType

from octavo.cli.plan import batching, memory, quantization, roofline

HELP = "Plan what a model takes and gives, before it is loaded."
COMMANDS: tuple[ModuleType, ...] = (memory, roofline, batching, quantization)
