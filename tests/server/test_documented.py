"""The documentation has every route, and the key files that it shows are tried as they are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.engine.config import EngineConfig
from octavo.scheduler.policies.config import POLICIES
from octavo.server.api_keys import in_effect, read_keys
from octavo.server.config import ServeConfig
from octavo.server.routes import DOCS_ROUTES, ROUTES
from paths import ROOT

DOCS = ROOT / "docs"


def fences(language: str) -> Iterator[tuple[str, str]]:
    """(page, content) of each block of a language."""
    for page in sorted(DOCS.glob("*.md")):
        for found in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S):
            yield page.name, found[1]


KEY_FILES = [(page, text) for page, text in fences("json") if '"keys"' in text]


def serve(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> tuple[EngineConfig, ServeConfig]:
    """What ``octavo serve`` makes of its arguments."""
    seen: list[Any] = []
    monkeypatch.setattr("octavo.server.process.run", lambda *given: seen.append(given) or 0)
    monkeypatch.setattr("octavo.loader.pull.resolve", Path)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    ((_, engine, config),) = seen
    return engine, config


def test_every_route_is_in_the_documentation() -> None:
    said = (DOCS / "serving.md").read_text()
    table = said.partition("\n## Routes\n")[2].partition("\nRequest fields")[0]
    for route in (*ROUTES, *DOCS_ROUTES):
        shown = route.path.replace("{model}", "NAME")
        assert f"`{shown}`" in table or f"`{route.method} {shown}`" in table or not route.summary


def test_every_request_field_is_in_the_documentation() -> None:
    said = (
        (DOCS / "serving.md")
        .read_text()
        .partition("\nRequest fields:\n")[2]
        .partition("\n\nEach")[0]
    )
    for request in filter(None, (route.request for route in ROUTES)):
        missing = [name for name in request.__struct_fields__ if f"`{name}`" not in said]
        assert not missing, request.__name__


@pytest.mark.parametrize("page", ["scheduling.md", "serving.md", "overload.md"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_table_of_policies_has_each(page: str, policy: str) -> None:
    assert f"\n| `{policy}` " in (DOCS / page).read_text()


def test_there_are_some() -> None:
    assert len(KEY_FILES) >= 2


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
