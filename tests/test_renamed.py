"""Imports by the names of before the folders were renamed."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from octavo.renamed import RENAMED

MODULES = {
    "plan.memory": "tools.plan.memory_plan",
    "plan.lengths": "tools.plan.lengths",
    "tools.plan.batching": "tools.plan.continuous_batching",
    "speculate.drafter": "spec_decode.drafter",
    "sample.params": "sampling.params",
}


@pytest.mark.parametrize(("name", "new"), MODULES.items())
def test_an_old_name_gives_the_new_module_and_a_warning(name: str, new: str) -> None:
    script = (
        "import importlib, sys, warnings\n"
        "warnings.simplefilter('error', ImportWarning)\n"
        f"old = importlib.import_module('octavo.{name}')\n"
        f"new = importlib.import_module('octavo.{new}')\n"
        "assert all(getattr(old, each) is getattr(new, each) for each in vars(new)\n"
        "           if not each.startswith('__'))\n"
    )
    command = [sys.executable, "-W", "default", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"octavo.{name} is now octavo.{new}" in done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_class_renamed_with_its_module_has_its_old_name_there() -> None:
    old = import_module("octavo.plan.batching")
    assert old.Limits is old.EngineLimits


def test_every_old_package_leads_somewhere() -> None:
    for new in RENAMED.values():
        import_module(f"octavo.{new}")


def test_what_is_nowhere_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"octavo\.tools\.plan\.nothing"):
        import_module("octavo.plan.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"octavo\.nothing"):
        import_module("octavo.nothing")
