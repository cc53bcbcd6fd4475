"""`octavo bench` and `octavo profile`: what they print, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.test_limits import made_up
from octavo.bench.limits import Limits
from octavo.cli import app


@pytest.fixture(autouse=True)
def made_up_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No test measures: what was asked for is noted."""
    asked: list[Any] = []

    def measure(cls: type[Limits], threads: int | None = None, **options: Any) -> Limits:
        asked.append((threads, options.get("quick", False)))
        return made_up(quick=options.get("quick", False))

    monkeypatch.setattr(Limits, "measure", classmethod(measure))
    return asked


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


class TestMachine:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))

    def test_json(self) -> None:
        assert Limits.from_dict(json.loads(run("bench", "machine", "--json").stdout)) == made_up()
        assert Limits.load() == made_up()

    def test_text(self) -> None:
        text = run("bench", "machine").stdout
        for figure in ("1,600.0", "800.0", "50.0", "400.0", "L3, 16 MiB"):
            assert figure in text

    def test_a_quick_or_partial_measurement_is_not_stored(self, made_up_machine: list[Any]) -> None:
        run("bench", "machine", "--quick")
        run("bench", "machine", "--threads", "1000")
        assert made_up_machine == [(None, True), (1000, False)]
        assert Limits.load() is None

    @pytest.mark.parametrize("threads", ["0", "-1", "x", "5000"])
    def test_no_such_threads(self, threads: str) -> None:
        assert "--threads" in run("bench", "machine", "--threads", threads, code=2).stderr
