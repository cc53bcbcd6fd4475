"""The configuration files that the documentation shows are tried as they stand there."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.engine.config import EngineConfig
from octavo.scheduler.policies.config import POLICIES
from octavo.server.config import ServeConfig
from octavo.server.keys import in_effect, read_keys

DOCS = Path(__file__).parents[2] / "docs"


def fences(language: str) -> Iterator[tuple[str, str]]:
    """(page, content) of each block of a language."""
    for page in sorted(DOCS.glob("*.md")):
        for found in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S):
            yield page.name, found[1]


KEY_FILES = [(page, text) for page, text in fences("json") if '"keys"' in text]
UNITS = [(page, text) for page, text in fences("ini") if "ExecStart" in text]
CONTAINERS = [(page, text) for page, text in fences("yaml") if "containers:" in text]


def serve(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> tuple[EngineConfig, ServeConfig]:
    """What ``octavo serve`` makes of its arguments."""
    seen: list[Any] = []
    monkeypatch.setattr("octavo.server.run", lambda *given: seen.append(given) or 0)
    monkeypatch.setattr("octavo.loader.pull.resolve", Path)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    ((_, engine, config),) = seen
    return engine, config


def test_there_are_some() -> None:
    assert len(KEY_FILES) >= 2
    assert UNITS
    assert CONTAINERS


@pytest.mark.parametrize(("page", "text"), KEY_FILES)
@pytest.mark.parametrize("policy", POLICIES)
def test_key_files_can_be_used_under_every_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, text: str, policy: str
) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)
    assert {each["name"] for each in json.loads(text)["keys"]} == {k.name for k in read_keys(file)}
    engine, config = serve(
        monkeypatch, ["m", "--api-key-file", str(file), "--scheduling-policy", policy]
    )
    _, told = in_effect(config.named_keys, engine.scheduling_policy, config.api_key_file)
    for line in told:
        assert str(file) in line
        assert "--scheduling-policy" in line


@pytest.mark.parametrize(("page", "text"), UNITS)
def test_systemd_units_start_with_the_documented_key_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, text: str
) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    name, _, _ = unit["Service"]["LoadCredential"].partition(":")
    program, command, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("octavo", "serve")
    (tmp_path / name).write_text(dict(KEY_FILES)["serving.md"])
    arguments = [argument.replace("%d", str(tmp_path)) for argument in arguments]
    engine, config = serve(monkeypatch, arguments)
    _, told = in_effect(config.named_keys, engine.scheduling_policy, config.api_key_file)
    assert not told  # all that the file says has an effect
    assert config.shutdown_timeout < float(unit["Service"]["TimeoutStopSec"])


@pytest.mark.parametrize(("page", "text"), CONTAINERS)
def test_containers_start(monkeypatch: pytest.MonkeyPatch, page: str, text: str) -> None:
    found = re.search(r"args: \[(.*)\]", text)
    grace = re.search(r"terminationGracePeriodSeconds: (\d+)", text)
    assert found
    assert grace
    command, *arguments = (each.strip().strip('"') for each in found[1].split(","))
    assert command == "serve"
    _, config = serve(monkeypatch, arguments)
    assert config.shutdown_timeout < float(grace[1])
