"""docs/limits.md says what is refused: each line is tried, and nothing refused is left out."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.loader import load
from octavo.loader.base import CheckpointError
from octavo.loader.pull import PullError, resolve
from octavo.server.app import App
from octavo.server.config import ServeConfig
from octavo.server.protocol import LABELS, NEUTRAL_CHAT, NEUTRAL_COMPLETION
from oracle.tiny_folders import folder
from paths import ROOT
from server.serve_fakes import FakeEngine, served_model

PAGE = (ROOT / "docs/limits.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(title: str) -> Iterator[list[str]]:
    for line in section(title).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and "`" in line:
            yield cells


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


ROUTES = [route for cells in rows("Routes") for route in quoted(cells[0])]
FIELDS = [
    (of, field)
    for fields, ofs, _ in rows("Request fields")
    for of in ofs.split(", ")
    for field in quoted(fields)
]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
}


def client() -> httpx.AsyncClient:
    app = App(FakeEngine(), served_model(), ServeConfig())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


async def test_routes() -> None:
    assert len(ROUTES) > 20
    async with client() as server:
        for route in ROUTES:
            answer = await server.post(route, json={"model": "tiny", "input": "x"})
            assert answer.status_code == 404, route
            assert answer.json()["error"]["message"], route


async def test_fields() -> None:
    assert len(FIELDS) > 40
    async with client() as server:
        for of, field in FIELDS:
            answer = await server.post(PATHS[of], json=BODIES[of] | {field: {"asked": 1}})
            assert answer.status_code == 400, (of, field)
            error = answer.json()["error"]
            assert error["param"] == field, (of, field)
            assert "not supported" in error["message"], (of, field)


def test_no_field_is_left_out() -> None:
    for of, neutral in (("chat", NEUTRAL_CHAT), ("completions", NEUTRAL_COMPLETION)):
        said = {field for name, field in FIELDS if name == of}
        assert said == set(neutral) - set(LABELS), of


async def test_parts_of_messages() -> None:
    kinds = quoted(section("Request fields").partition("Parts of the types")[2])
    assert len(kinds) >= 4
    async with client() as server:
        for kind in kinds:
            content = [{"type": kind, kind: {"url": "data:,"}}]
            body = {"messages": [{"role": "user", "content": content}]}
            answer = await server.post(PATHS["chat"], json=body)
            assert answer.status_code == 400, kind
            assert "only text parts are supported" in answer.json()["error"]["message"], kind


def test_models(tmp_path: Path) -> None:
    told = {cells[0].partition(" ")[0]: quoted(cells[1]) for cells in rows("Models")}
    key, *families = told["families"]
    assert key == "model_type"
    assert len(families) > 5
    for family in families:
        path = folder("llama", tmp_path / family, {"model_type": family})
        with pytest.raises(CheckpointError, match=rf"model_type '?{family}'? is not supported"):
            load(path)
    key, *methods = told["number"]
    assert key == "quant_method"
    for method in methods:
        changes = {"quantization_config": {"quant_method": method}}
        path = folder("llama", tmp_path / method, changes)
        with pytest.raises(CheckpointError, match="is not supported"):
            load(path)
    for name, (file,) in (("pickled", told["weights"]), ("adapter", told["adapters"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(json.dumps({}))
        with pytest.raises(PullError, match=name):
            resolve(str(tmp_path / name))
