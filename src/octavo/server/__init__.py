"""HTTP: OpenAI routes, limits, metrics, start and shutdown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.server.config import ServeConfig

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig

__all__ = ["ServeConfig", "run"]


def run(model: str | Path, engine: EngineConfig, serve: ServeConfig) -> int:
    """Load ``model`` and serve it until a signal. Returns the process's exit code."""
    from octavo.server.process import run as run_process

    return run_process(model, engine, serve)
