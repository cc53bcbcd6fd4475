"""The scripts that compare two trees: behaviour.py, path.py and code_size.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import behaviour
import code_size
import path
from _behaviour import http


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["behaviour.py", *map(str, arguments)])
    return behaviour.main()


def test_a_change_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    few = ("--only", "tokens,errors,http", "--share", "0.02")
    for out in (first, second):
        assert run(monkeypatch, "record", out, *few) == 0
    assert run(monkeypatch, "compare", first, second) == 0
    assert json.loads(first.read_text())["http"]["open"]["GET /v1/models"]["status"] == 200
    assert "== http: no differences" in capsys.readouterr().out
    found = json.loads(second.read_text())
    answers = found["tokens"]["file tiny-gemma3-caps"]
    answers[0]["outputs"][0]["logprobs"][0] += "0"
    del found["errors"]["n=0"]
    second.write_text(json.dumps(found))
    assert run(monkeypatch, "compare", first, second, "--only", "errors,tokens") == 1
    out = capsys.readouterr().out
    assert "tokens: 1 difference\nfile tiny-gemma3-caps[0] › outputs[0] › logprobs[0]" in out
    assert 'n=0\n    only before: "InvalidParameter [n]: n is 0;' in out


def test_a_stream_is_the_same_however_it_is_cut() -> None:
    def chunk(text: str, **more: object) -> dict[str, object]:
        return {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, **more}]}

    whole = http._stream([chunk("a"), chunk("bcd"), chunk("", finish_reason="stop")])
    parts = http._stream([chunk("a"), chunk("b"), chunk("cd"), chunk("", finish_reason="stop")])
    assert whole == parts
    assert whole["choices"][0]["delta.content"] == "abcd"


def test_docstrings_and_comments_are_no_code(tmp_path: Path) -> None:
    text = '"""A module."""\nX = 1  # one\n\ndef f():\n    """A function."""\n    return """\n"""\n'
    (tmp_path / "module.py").write_text(text)
    assert code_size.size(tmp_path / "module.py") == {"files": 1, "lines": 4, "functions": 1}


def test_a_chat_is_followed_on_all_threads() -> None:
    command = [sys.executable, path.__file__, "--case", "greedy", "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)["greedy"]
    assert {"octavo-engine", "MainThread"} <= {each["thread"] for each in found}
    assert ("llm.py", "LLM.generate") not in {(each["file"], each["function"]) for each in found}
    files, functions = path.counts(found)
    assert 10 < files < functions == len(found)
