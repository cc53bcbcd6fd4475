"""The project itself: its files agree with each other and with what they promise."""

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import octavo
from octavo.extras import install_command
from octavo.renamed import RENAMED, RENAMED_CLASSES
from paths import ROOT

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


# --- optional dependencies ------------------------------------------------------------------------

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


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
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]:
        found = re.findall(r"octavo\[\w+\]|'\.\[\w+\]'", path.read_text())
        assert not found, path


# --- old names of packages and modules ------------------------------------------------------------

MODULES = {
    "plan.memory": "tools.plan.memory_plan",
    "plan.lengths": "tools.plan.lengths",
    "tools.plan.batching": "tools.plan.continuous_batching",
    "bench.fidelity": "tools.bench.fidelity_report",
    "bench.load.report": "tools.bench.load.load_report",
    "bench.load.run": "tools.bench.load.load_generator",
    "bench.load.stream": "tools.bench.load.streamed_answer",
    "checkpoint.layout": "loader.quantized_layout",
    "checkpoint.quantization": "loader.quantization_config",
    "checkpoint.section": "models.section",
    "execute.build": "executor.registry",
    "quant.awq": "tools.quantize.awq_scaling",
    "quant.gptq": "tools.quantize.gptq_rounding",
    "quant.hf_tokenizer": "tools.quantize.hf_tokenizer_writer",
    "serve": "server",
    "speculate.drafter": "spec_decode.drafter",
    "speculate.scripted": "spec_decode.scripted_drafter",
    "tools.quantize.run": "tools.quantize.quantize_checkpoint",
    "train.medusa": "tools.train.medusa_training",
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
    for (new, old_class), new_class in RENAMED_CLASSES.items():
        ((old, _),) = (names for names in RENAMED.items() if names[1] == new)
        module = import_module(f"octavo.{old}")
        assert getattr(module, old_class) is getattr(module, new_class)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_server_starts_from_its_package() -> None:
    from octavo.server.config import ServeConfig
    from octavo.server.process import run

    for name in ("serve", "server"):
        package = import_module(f"octavo.{name}")
        assert (package.run, package.ServeConfig) == (run, ServeConfig)


def test_every_old_package_leads_somewhere() -> None:
    for new in RENAMED.values():
        import_module(f"octavo.{new}")


def test_what_is_nowhere_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"octavo\.tools\.plan\.nothing"):
        import_module("octavo.plan.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"octavo\.nothing"):
        import_module("octavo.nothing")
