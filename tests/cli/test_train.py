"""octavo train, as a command."""

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import octavo.tools.train.run
import strict_json
from octavo.cli import app
from octavo.engine.config import SettingsError
from octavo.tools.train.medusa_training import HeadRecipe

FACTS = {
    "out": "d", "bytes": 1234, "answers": 10, "tokens": 2000, "vocabulary": 300,
    "vocabulary_covers": 0.99, "top1": [0.5, 0.25], "top1_if_right_before": [0.5, 0.4],
    "tokens_per_pass": 1.7, "prompts_left_out": 3, "why_left_out": "it is too long",
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command has trained, without training or torch."""
    seen: dict[str, Any] = {}

    def train(model: str, out: Path, recipe: HeadRecipe, **how: Any) -> dict[str, Any]:
        seen.update(how, model=model, out=out, recipe=recipe)
        return dict(FACTS)

    monkeypatch.setattr(octavo.tools.train.run, "train", train)
    monkeypatch.setattr(octavo.tools.train.medusa_training, "import_torch", lambda: None)
    return seen


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", "medusa", *arguments])


def test_what_is_not_said_is_the_recipes(asked: dict[str, Any], tmp_path: Path) -> None:
    done = run("m", "-o", str(tmp_path / "d"))
    assert done.exit_code == 0, done.output
    assert asked["recipe"] == HeadRecipe()
    assert (asked["model"], asked["num_prompts"], asked["max_tokens"]) == ("m", 5000, 128)
    assert asked["text"] is asked["measure_on"] is None
    assert "invented" not in asked
    assert "measured on" not in done.stdout
    assert "1.70 tokens a pass" in done.stdout
    assert "right 25.0%, behind right guesses 40.0%" in done.stdout
    assert "3 prompts that the engine cannot take" in done.stdout
    assert "it is too long" in done.stdout


def test_what_is_said_is_done(asked: dict[str, Any], tmp_path: Path) -> None:
    options = [
        "--heads",
        "2",
        "--medusa",
        "--layers",
        "3",
        "--vocabulary",
        "500",
        "--epochs",
        "0.5",
        "--seed",
        "7",
        "--json",
    ]
    done = run("m", "-o", str(tmp_path / "d"), "--text", "t", "--max-tokens", "9", *options)
    assert done.exit_code == 0, done.output
    assert asked["recipe"] == HeadRecipe(
        heads=2, recurrent=False, layers=3, vocabulary=500, epochs=0.5, seed=7
    )
    assert (asked["text"], asked["max_tokens"]) == (Path("t"), 9)
    assert "invented" not in asked
    assert strict_json.loads(done.stdout)["tokens_per_pass"] == 1.7


def test_what_is_asked_may_be_said(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FACTS, "measured_on", {"tokens_per_pass": 1.54})
    options = ["--invented", "0.5", "--prompts", "80", "--measure-on", "f"]
    done = run("m", "-o", str(tmp_path / "d"), *options)
    assert done.exit_code == 0, done.output
    assert (asked["share_invented"], asked["num_prompts"], asked["measure_on"]) == (
        0.5,
        80,
        Path("f"),
    )
    assert "other prompts, 1.54 tokens a pass" in done.stdout


@pytest.mark.parametrize(
    "options", [["--layers", "2"], ["--medusa", "--width", "64"], ["--medusa", "--row-epochs", "2"]]
)
def test_no_flag_is_ignored(asked: dict[str, Any], tmp_path: Path, options: list[str]) -> None:
    done = run("m", "-o", str(tmp_path / "d"), *options)
    assert done.exit_code == 2
    assert "makes no use of it" in done.output
    assert not asked


def test_nothing_is_written_over(asked: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    done = run("m", "-o", str(tmp_path))
    assert isinstance(done.exception, SettingsError)
    assert "something in this folder" in str(done.exception)
    assert not asked


def test_without_torch_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run("m", "-o", str(tmp_path / "d"))
    assert isinstance(done.exception, SettingsError)
    assert f"{sys.executable} -m pip install 'torch>=" in str(done.exception)
