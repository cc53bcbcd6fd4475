"""What commands print."""

from __future__ import annotations

import errno
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest

import octavo.cli
import strict_json
from octavo.cli.console import json_text, on_stderr, writing


def test_json_is_json() -> None:
    facts = {"a": [math.inf, (1.5, -math.inf)], "b": {"c": np.float64("nan"), "d": None, "e": "ü"}}
    text = json_text(facts, ensure_ascii=False)
    assert strict_json.loads(text) == {
        "a": [None, [1.5, None]],
        "b": {"c": None, "d": None, "e": "ü"},
    }
    with pytest.raises(ValueError, match="Infinity is not JSON"):
        strict_json.loads("[Infinity]")


def test_all_commands_print_it_so() -> None:
    for path in Path(octavo.cli.__file__).parent.rglob("*.py"):
        assert not re.search(r"(echo|print)\(\s*json\.dumps?\(", path.read_text()), path


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "term", "shown"),
    [
        (Terminal, "xterm", "\r\x1b[Konce, 10 s\n\r\x1b[Kon 1 thread\r\x1b[K"),
        (Terminal, "dumb", "once, 10 s\non 1 thread\n"),
        (io.StringIO, "xterm", "once, 10 s\non 1 thread\n"),
    ],
)
def test_a_message_that_ends_its_line_stays(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], term: str, shown: str
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr", error := stream())
    with on_stderr() as show:
        show("once, 10 s\n")
        show("on 1 thread")
    assert error.getvalue() == shown


def test_a_full_disk_is_named_and_leaves_nothing_new(tmp_path: Path) -> None:
    old, new = tmp_path / "old.svg", tmp_path / "new.svg"
    old.write_text("drawn before")

    def write(path: Path) -> None:
        with writing(path):
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device")

    for path in (old, new):
        with pytest.raises(OSError, match="No space left") as failed:
            write(path)
        assert failed.value.filename == str(path)
    assert list(tmp_path.iterdir()) == [old]
