"""The process: bind, load, print what was loaded, serve, drain on a signal."""

from __future__ import annotations

from pathlib import Path

from octavo.engine.load import EngineConfig
from octavo.serve.config import ServeConfig


def run(model: str | Path, engine: EngineConfig, serve: ServeConfig) -> int:
    raise NotImplementedError
