"""What an error says about missing packages is a command that works here."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from octavo.extras import install_command

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_command_names_packages_that_an_index_has(extra: str) -> None:
    python, *words = shlex.split(install_command(extra))
    assert python == sys.executable
    assert words[:3] == ["-m", "pip", "install"]
    assert words[3:] == EXTRAS[extra]


def test_without_an_installation_it_is_the_clone_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("octavo.extras.requires", nothing)
    assert install_command("train").endswith("pip install '.[train]'")


def test_nothing_else_is_said_anywhere() -> None:
    """No index has Octavo, and only a clone knows ``.[extra]``."""
    root = Path(__file__).parents[1]
    for path in [*root.glob("src/**/*.py"), *root.glob("docs/*.md"), root / "README.md"]:
        found = re.findall(r"octavo\[\w+\]|'\.\[\w+\]'", path.read_text())
        assert not found, path
