"""Shared by all rooms: the real models, from the cache that `make test` fills."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.checkpoint import pull


def _model(name: str) -> Path:
    if path := pull.cached(name):
        return path
    if os.environ.get("OCTAVO_TEST_MODELS") == "required":
        pytest.fail(f"{name} is not in the cache: octavo pull {name}")
    pytest.skip(f"{name} is not in the cache: octavo pull {name}")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as a GGUF file."""
    return _model("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M, as a GGUF file."""
    return _model("gemma3-270m")
