"""Shared by all rooms: the real models, from the cache that `make test` fills; and how property
tests draw: the same examples each time, so that a red run is the change's fault; others in `make
long`, which says how to repeat one that failed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from octavo.checkpoint import pull

settings.register_profile("search", deadline=None)
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


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
