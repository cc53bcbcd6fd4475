"""Flags and commands of other servers: accepted, or answered with what stands for them here."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from octavo.cli import app
from octavo.cli.elsewhere import COMMANDS, LLAMA_CPP, OLLAMA, VLLM, row
from paths import ROOT

_ROOT: Any = typer.main.get_command(app)
PAGE = (ROOT / "docs/coming-from.md").read_text()
FLAGS = (*VLLM, *LLAMA_CPP, *OLLAMA)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def options(command: Any) -> set[str]:
    return {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that octavo serve is asked for."""
    models: list[str] = []

    def resolve(model: str) -> Path:
        models.append(model)
        return Path(model)

    monkeypatch.setattr("octavo.loader.pull.resolve", resolve)
    monkeypatch.setattr("octavo.server.process.run", lambda model, engine, config: 0)
    return models


def test_no_flag_is_told_of_twice_or_is_an_option_of_serve() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert not set(names) & options(_ROOT.commands["serve"])
    assert not set(COMMANDS) & set(_ROOT.commands)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.names[0])
def test_a_flag_that_does_not_apply_is_answered(flag: Any, asked: list[str]) -> None:
    for name in flag.names:
        if "" not in flag.same:
            result = run("serve", "m", name, *(["other"] if flag.takes_value else []))
            assert result.exit_code == 2
            assert f"No such option: {name}. Here: {flag.here}" in result.stderr
    assert asked == []
    for value in flag.same:
        given = [flag.names[0], value] if value else [flag.names[0]]
        result = run("serve", *given, "m")
        assert result.exit_code == 0, result.stderr
        assert " ".join(given) + " changes nothing here: " in result.stderr
    assert asked == ["m"] * len(flag.same)


def test_what_is_said_to_use_is_there() -> None:
    """Every flag and command that an answer names exists."""
    known = {flag for command in _ROOT.commands.values() for flag in options(command)}
    for here in [flag.here for flag in FLAGS] + list(COMMANDS.values()):
        for flag in re.findall(r"--[a-z][a-z-]+", here):
            assert flag in known | {"--version", "--help"}, here
        for name in re.findall(r"octavo ([a-z]+)", here):
            assert name in _ROOT.commands, here
        for page in re.findall(r"docs/[a-z-]+\.md", here):
            assert (ROOT / page).exists()


@pytest.mark.parametrize(
    "given",
    [
        ["--model", "m"],
        ["--model=m"],
        ["-m", "m"],
        ["--port", "0", "-m", "m", "--tensor-parallel-size=1", "--dtype", "auto"],
        ["m", "--api-key", "--grammar"],  # which is a key
        ["m", "--max_num_seqs", "4", "--tensor_parallel_size=1", "--max_model_len=99"],
    ],
)
def test_the_model_may_be_an_option(given: list[str], asked: list[str]) -> None:
    result = run("serve", *given)
    assert result.exit_code == 0, result.stderr
    assert asked == ["m"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["serve", "--model", "m", "n"], "unexpected extra argument"),
        (["bench", "serve", "-m", "m"], "No such option: -m. Here: --model"),
        (["pull", "--model", "m"], "no model is asked for"),
        (["serve", "--model"], "MODEL is the first argument"),
        (["generate", "--model", "m", "x"], "MODEL is the first argument"),
        (["generate", "m", "x", "-np", "4"], "No such option: -np. Here: --max-num-seqs"),
        (["serve", "m", "--max-model-length", "4"], "--max-model-len"),
        (["plan", "roofline", "m", "--batch-size", "3"], "--batch-sizes)"),
        (["serve", "m", "--tensor_parallel_size", "2"], "--tensor-parallel-size. Here: Octavo"),
        (["serve", "m", "--served_model", "x"], "No such option: --served_model"),
        (["status"], "No such command 'status'. Here: octavo top"),
        (["run", "m"], "No such command 'run'. Here: octavo chat MODEL"),
        (["bench", "latency", "m"], "octavo bench throughput MODEL"),
        (["lst"], "Did you mean 'list'?"),
    ],
)
def test_wrong_use_says_what_is_right(given: list[str], said: str, asked: list[str]) -> None:
    result = run(*given)
    assert result.exit_code == 2
    assert said in result.stderr
    assert asked == []


def test_other_options_keep_their_own_meaning(asked: list[str]) -> None:
    """-n, --format and --device are options of some commands."""
    assert "--format" in options(_ROOT.commands["plan"].commands["quantization"])
    result = run("plan", "quantization", "llama-3-8b", "--format", "q9")
    assert "'q9' is not one of" in result.stderr


# What people try, of no program.
OTHER_WORDS = {
    "ls", "remove", "delete", "download", "help", "version", "benchmark", "start", "server",
    "models", "status", "stats", "convert", "embed", "completion", "prompt", "info",
}  # fmt: skip


def test_the_page_has_each_flag_and_what_is_said_to_it() -> None:
    for flag in FLAGS:
        assert row(flag) in PAGE
    rows = re.findall(r"^\| `-.*", PAGE, re.MULTILINE)
    assert len(rows) == len(FLAGS)
    for name in COMMANDS:
        if name not in OTHER_WORDS:
            assert name in PAGE, name


def test_flags_that_are_said_to_be_the_same_are() -> None:
    same = PAGE.partition("## vLLM's flags that are the same here\n\n")[2].partition("\n\n")[0]
    flags = re.findall(r"`(--[a-z-]+)`", same)
    assert len(flags) > 30
    assert set(flags) <= options(_ROOT.commands["serve"])
    same = PAGE.partition("## llama.cpp's flags\n\n")[2].partition("are the same")[0]
    known = options(_ROOT.commands["serve"]) | options(_ROOT.commands["generate"])
    assert set(re.findall(r"`(--[a-z-]+)`", same)) <= known
