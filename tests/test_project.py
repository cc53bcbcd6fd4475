"""The project itself: its files agree with each other and with what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version() -> None:
    assert PROJECT["version"] == octavo.__version__


def test_no_framework_in_the_base_install() -> None:
    names = {re.split(r"[<>=\[; ]", line)[0].lower() for line in PROJECT["dependencies"]}
    assert not names & {"torch", "transformers", "tensorflow", "jax", "onnxruntime", "scipy"}


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


@pytest.mark.parametrize(
    "target",
    ["setup", "serve", "test", "lint", "long", "native", "bench", "models", "wheel", "clean"],
)
def test_make_has(target: str) -> None:
    result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_pages_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_index_has_every_page() -> None:
    docs = ROOT / "docs"
    linked = re.findall(r"\]\((?!\.\.)([^)#]+)\)", (docs / "README.md").read_text())
    assert sorted(linked) == sorted(
        page.relative_to(docs).as_posix() for page in docs.rglob("*.md") if page.name != "README.md"
    )


def test_the_changelog_has_this_version() -> None:
    assert f"\n## {octavo.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.long
def test_pip_install_gives_a_command_and_no_framework(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", ROOT], check=True, cwd=tmp_path)
    out = subprocess.run(
        [tmp_path / "venv/bin/octavo", "--version"], check=True, capture_output=True, text=True
    ).stdout
    assert out == f"octavo {octavo.__version__}\n"
    subprocess.run([python, "-c", "import octavo._native, octavo.llm"], check=True, cwd=tmp_path)
    listed = subprocess.run(
        [python, "-m", "pip", "list"], check=True, capture_output=True, text=True
    ).stdout
    assert "torch" not in listed


def test_the_readmes_figures_are_those_of_the_results() -> None:
    """Each row of the comparison with other engines, value by value."""
    row = re.compile(r"^\| [^|]*(?:prefill|decode|served)[^|]* \| (\d.*) \|$", re.MULTILINE)
    results = (ROOT / "benchmarks/RESULTS.md").read_text().replace("**", "")
    measured = [line.split(" | ") for line in row.findall(results)]
    claimed = [line.split(" | ") for line in row.findall((ROOT / "README.md").read_text())]
    assert len(claimed) == 8
    for *values, ratio in claimed:
        [found] = [line for line in measured if line[:4] == values]
        assert found[4].split()[0] == ratio
