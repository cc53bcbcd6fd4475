"""octavo train: what makes a model faster, learned from what it says."""

from __future__ import annotations

from types import ModuleType

from octavo.cli.train import medusa

HELP = "Train what drafts for a model; needs PyTorch."
COMMANDS: tuple[ModuleType, ...] = (medusa,)
