"""Octavo: a serving engine for large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo import renamed

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine as AsyncEngine
    from octavo.engine.config import EngineConfig as EngineConfig
    from octavo.engine.load import load_engine as load_engine
    from octavo.llm import LLM as LLM
    from octavo.llm import CompletionOutput as CompletionOutput
    from octavo.llm import RequestOutput as RequestOutput
    from octavo.sampling.params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "load_engine",
]

_HOMES = {
    "LLM": "octavo.llm",
    "CompletionOutput": "octavo.llm",
    "RequestOutput": "octavo.llm",
    "AsyncEngine": "octavo.engine.async_engine",
    "EngineConfig": "octavo.engine.config",
    "load_engine": "octavo.engine.load",
    "SamplingParams": "octavo.sampling.params",
}

renamed.install()


def __getattr__(name: str) -> Any:
    """Import on first use, so that `octavo --help` and one room alone stay light."""
    from importlib import import_module

    if home := _HOMES.get(name):
        return getattr(import_module(home), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
