"""HTTP: OpenAI routes, limits, metrics, start and shutdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.server.config import ServeConfig as ServeConfig
    from octavo.server.process import run as run

__all__ = ["ServeConfig", "run"]

_HOMES = {"ServeConfig": "octavo.server.config", "run": "octavo.server.process"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that one module of the server does not load the others."""
    from importlib import import_module

    if home := _HOMES.get(name):
        return getattr(import_module(home), name)
    raise AttributeError(f"module 'octavo.server' has no attribute {name!r}")
