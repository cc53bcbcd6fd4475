"""What commands print."""

import errno
import io
import math
import os
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

    def write(path: Path, error: BaseException) -> None:
        with writing(path) as part:
            assert part.suffix == path.suffix
            part.write_text("half")
            raise error

    for path in (old, new):
        with pytest.raises(OSError, match="No space left") as failed:
            write(path, OSError(errno.ENOSPC, "No space left on device"))
        assert failed.value.filename == str(path)
        with pytest.raises(KeyboardInterrupt):
            write(path, KeyboardInterrupt())
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_text() == "drawn before"


def test_errors_of_something_else_keep_what_they_say(tmp_path: Path) -> None:
    for error in (FileNotFoundError(errno.ENOENT, "none", "a font"), OSError("cannot be drawn")):
        with pytest.raises(OSError, match=re.escape(str(error))) as raised, writing(tmp_path / "x"):
            raise error
        assert raised.value is error


def test_a_file_is_written_where_a_link_leads_and_keeps_its_mode(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_text("before")
    file.chmod(0o600)
    link.symlink_to(file)
    with writing(link) as part:
        part.write_text("after")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("after", 0o600)
    assert link.is_symlink()
    with writing(file, append=True) as part:
        assert part == file
    os.mkfifo(pipe)
    with writing(pipe) as part:  # is no file to put another in place of
        assert part == pipe
    assert sorted(tmp_path.iterdir()) == [file, link, pipe]
