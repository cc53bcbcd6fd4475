"""Every command that README and docs show runs as written from a clone, or its line says what it
needs behind ``# needs:``.
"""

import importlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
from typer.testing import CliRunner

from octavo.cli import app
from octavo.loader import pull
from octavo.loader.names import preset
from paths import ROOT
from patience import PATIENCE

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_ROOT: Any = typer.main.get_command(app)
_WRITES = ("-o", "--output", "--out", "--plot", "--kv-offload-dir", "--trace=")


class Shown(NamedTuple):
    """A command of a page. ``words`` without the program; ``made`` what lines above it write."""

    page: str
    line: str
    words: list[str]
    needs: str
    made: set[str]

    @property
    def name(self) -> str:
        """ "plan memory"."""
        words = self.words[:2] if hasattr(_ROOT.commands[self.words[0]], "commands") else self.words
        return " ".join(words[: 2 if words is not self.words else 1])


def blocks(page: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL) + re.findall(
        r"(?:^ {4}.*\n)+", page, re.MULTILINE
    )


def shown(program: str) -> Iterator[Shown]:
    """The commands of all pages that begin with this program."""
    for path in PAGES:
        made: set[str] = set()
        for block in blocks(path.read_text()):
            lines = block.replace("\\\n", " ").splitlines()
            typed = [line for line in lines if line.strip().startswith("$ ")]
            for line in typed or lines:  # where there are prompts, the rest is what comes
                line = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
                if not line.startswith(f"{program} "):
                    continue
                words = _alone(shlex.split(line, comments=True)[1:])
                needs = line.partition("# needs: ")[2].strip()
                yield Shown(path.name, line, words, needs, set(made))
                made |= {b for a, b in itertools.pairwise(words) if a in _WRITES}


def _alone(words: list[str]) -> list[str]:
    """Without what the shell does with its input and output."""
    return list(itertools.takewhile(lambda word: word not in ("|", ">", "<", "&"), words))


COMMANDS = list(shown("octavo"))
SCRIPTS = list(shown("python"))


def ids(command: Shown) -> str:
    return f"{command.page}: {command.line[:60]}"


def lacks(command: Shown) -> set[str]:
    """The words that name what a clone does not have."""
    words = [word for word in command.words if not word.startswith("-")]
    values = dict(itertools.pairwise(command.words))
    written = {values[flag] for flag in (*_WRITES, "--trace") if flag in values}
    if command.words[0] in ("simulate", "tune"):
        written.discard(values.get("--trace", ""))  # there it is read
    found = set()
    for word in words:
        name = word.rpartition("=")[2]
        if name in written | command.made or (ROOT / name).exists():
            continue
        if re.fullmatch(
            r".*\.(gguf|csv|jsonl?|txt)|[A-Z][A-Z_]{3,}|org/repo(:\S+)?|.*LLAMA.*", name
        ):
            found.add(name)
    return found


def test_there_are_commands_to_try() -> None:
    assert len(COMMANDS) > 50
    assert len(SCRIPTS) > 10
    assert sum(bool(command.needs) for command in COMMANDS) > 10


@pytest.mark.parametrize("command", COMMANDS, ids=ids)
def test_a_command_parses_and_says_what_it_needs(command: Shown) -> None:
    if command.words != ["--version"]:
        words = command.words
        _ROOT.commands[words[0]].make_context(words[0], words[1:])
    if missing := lacks(command):
        assert command.needs, f"{command.page}: {command.line}: where does {missing} come from?"
    if command.words[0] == "top" or command.words[:2] == ["bench", "serve"]:
        assert command.needs or command.page == "load.md"  # where the server is the line above


@pytest.mark.parametrize("command", SCRIPTS, ids=ids)
def test_a_script_is_there_and_says_what_it_needs(command: Shown) -> None:
    assert (ROOT / command.words[0]).exists()
    if missing := lacks(command):
        assert command.needs, f"{command.line}: where does {missing} come from?"


def test_models_that_are_named_are_known() -> None:
    for command in COMMANDS:
        if command.needs or command.words[0] not in _ROOT.commands:
            continue
        words, found = list(command.words), _ROOT
        while hasattr(found, "commands"):
            name, *words = words
            found = found.commands[name]
        given = found.make_context(name, words).params
        models = [given[each.name] for each in found.params if each.metavar == "MODEL"]
        for model in models:
            for each in model if isinstance(model, list | tuple) else [model]:
                if each is not None:
                    assert pull.known(each) or preset(each) or each in command.made, command.line


def test_examples_of_help_pages_parse() -> None:
    for name, command in _ROOT.commands.items():
        room = getattr(command, "commands", {"": command})
        for own in room:
            module = f"octavo.cli.{name}" + (f".{own}" if own else "")
            for example in importlib.import_module(module.replace("-", "_")).EXAMPLES:
                words = shlex.split(example)
                words = _alone(words[words.index("octavo") + 1 :])
                target = _ROOT.commands[words[0]]
                if hasattr(target, "commands"):
                    target, words = target.commands[words[1]], words[1:]
                target.make_context(words[0], words[1:])


# --- run -----------------------------------------------------------------------------------------

QUICK = ("inspect", "generate", "list", "pull", "plan memory", "plan roofline", "plan batching")
SERVERS = ("serve",)
_THIS_MACHINE = ("plan roofline", "plan batching")  # which would be measured first


def quick(command: Shown) -> bool:
    measured = command.name in _THIS_MACHINE and not {"--device", "--step-ms"} & {*command.words}
    return not command.needs and command.name in QUICK and not measured


@pytest.mark.parametrize("command", list(filter(quick, COMMANDS)), ids=ids)
def test_a_quick_command_runs_as_written(
    command: Shown,
    smollm2_path: Path,
    gemma3_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command.words, input="")
    assert result.exit_code == 0, f"{result.exception!r}\n{result.output}"
    assert result.output.strip()


@pytest.mark.long
def test_all_others_run_as_written(smollm2_path: Path, gemma3_path: Path, tmp_path: Path) -> None:
    octavo = [sys.executable, "-m", "octavo"]
    for command in COMMANDS:
        if command.needs or quick(command) or command.name in ("chat", *SERVERS):
            continue
        if command.made and lacks(command):
            continue
        done = subprocess.run([*octavo, *command.words], cwd=tmp_path, timeout=7200)
        assert done.returncode == 0, command.line


@pytest.mark.long
def test_servers_start_as_written(smollm2_path: Path, tmp_path: Path) -> None:
    octavo = [sys.executable, "-m", "octavo"]
    for command in COMMANDS:
        made = any(name in word for name in command.made for word in command.words)
        if command.needs or command.name not in SERVERS or made:
            continue
        log = tmp_path / "log"
        words = [*command.words, "--port", "0"]
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*octavo, *words], cwd=tmp_path, stderr=file, env=os.environ | {"OCTAVO_DEBUG": "1"}
            )
        try:
            until = time.monotonic() + PATIENCE
            while "listening on" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
