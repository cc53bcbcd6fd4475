"""octavo bench: the machine's limits, a model's speed beside them, a server under load."""

from __future__ import annotations

from types import ModuleType

from octavo.cli.bench import machine, serve, throughput

HELP = "Measure the machine, a model, or a server."
COMMANDS: tuple[ModuleType, ...] = (machine, throughput, serve)
