"""A conversation in the terminal: what is one message, how answers are shown, why they ended."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from counting import CountingEngine, loaded, noted_prompts
from octavo.cli import app
from octavo.cli.endings import why_ended
from octavo.cli.wrap import Wrapped
from octavo.engine.outputs import Delta
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import FinishReason
from paths import TESTS
from patience import PATIENCE


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that reach the engine."""
    engine = CountingEngine()
    prompts = noted_prompts(engine)
    monkeypatch.setattr("octavo.engine.load.load_engine", lambda model, config: loaded(engine))
    monkeypatch.setattr("octavo.cli.models.checkpoint", lambda model, chat: Path(model))
    return prompts


def chat(text: str | bytes, *options: str) -> Result:
    return CliRunner().invoke(app, ["chat", "m", "--max-tokens", "1", *options], input=text)


# --- what is one message -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("//tmp is full\n", "/tmp is full"),
        ("/usr/bin/env: no such file\n", "/usr/bin/env: no such file"),
        ('"""one\n\n  two"""\n', "one\n\n  two"),
        ('"""\n/reset\n"""\n', "/reset"),
        ('"""all in one"""\n', "all in one"),
        ('"""say ""\nor """ twice\n"""\n', 'say ""\nor """ twice'),
        ("no newline at the end", "no newline at the end"),
        ("windows\r\n", "windows"),
    ],
)
def test_a_message(sent: list[str], typed: str, message: str) -> None:
    result = chat(typed)
    assert result.exit_code == 0, result.output
    assert sent == [f"user: {message}\nassistant: "]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "/tmp is full\n",
            "/tmp is not a command (/help lists them). To send it as a message: //tmp",
        ),
        ("/rest\n", "did you mean /reset?"),
        ('"""one\n', 'has no closing """: it was not sent'),
        ('""""""\n', ""),
        ("/\n", "/ is not a command"),
    ],
)
def test_no_message(sent: list[str], typed: str, said: str) -> None:
    result = chat(typed)
    assert result.exit_code == 0, result.output
    assert sent == []
    assert said in result.stderr


def test_input_that_is_not_text_is_named(sent: list[str]) -> None:
    result = chat(b"a\xffb\n")
    assert result.exit_code == 2
    assert "standard input is not UTF-8" in result.stderr


_CHAT = """
import sys
from octavo.cli.chat import Conversation
from octavo.llm import LLM
from octavo.sampling.params import SamplingParams
sys.path.insert(0, {tests!r})
from counting import CountingEngine, loaded
engine = CountingEngine()
check = engine.check
def noting(request):
    print("SENT", bytes(request.prompt_token_ids), flush=True)
    return check(request)
engine.check = noting
Conversation(LLM(loaded(engine)), SamplingParams(max_tokens=2), None, False).run()
"""


def test_on_a_terminal_a_paste_is_one_message_and_a_path_can_be_sent() -> None:
    """A real terminal, with the bytes that one sends for a bracketed paste."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    script = _CHAT.format(tests=str(TESTS))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen = b""

    def until(what: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + PATIENCE
        while what not in seen:
            assert select.select([ours], [], [], deadline - time.monotonic())[0], seen
            seen += os.read(ours, 4096)
        seen = seen.partition(what)[2]

    try:
        until(b"\x1b[?2004h")  # bracketed paste is on
        os.write(ours, b"\x1b[200~/tmp\rtwo\rthree\x1b[201~")
        os.write(ours, b" and\x1b\rfour\r")  # Alt-Enter begins a line
        until(rb"SENT b'user: /tmp\ntwo\nthree and\nfour\nassistant: '")
        until(b"(cut off by --max-tokens 2)")
        until(b"\x1b[?2004h")
        os.write(ours, b"/tmp\r")
        until(b"To send it as a message: //tmp")
        until(b"\x1b[?2004h")
        os.write(ours, b"\r")  # it is there to be sent
        until(rb"user: /tmp\nassistant: '")
        until(b"\x1b[?2004h")
        os.write(ours, b"\x03")
        until(b"Ctrl-D or /exit leaves")
        until(b"\x1b[?2004h")
        os.write(ours, b"\x04")
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# --- why it ended --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "stop", "tokens", "said"),
    [
        (FinishReason.LENGTH, None, 5, "cut off by --max-tokens 5"),
        (FinishReason.LENGTH, None, 3, "cut off: the context of 1,000 tokens is full; do this"),
        (FinishReason.STOP, "\n", 3, r"ended by the stop text '\n'"),
        (FinishReason.STOP, 7, 3, "ended by the token id 7"),
        (FinishReason.STOP, None, 3, None),
    ],
)
def test_the_end_is_explained(
    finish: FinishReason, stop: str | int | None, tokens: int, said: str | None
) -> None:
    last = Delta("0", 0, "", [], finish_reason=finish, stop_reason=stop)
    assert why_ended(last, tokens, SamplingParams(max_tokens=5), 1000, "do this") == said


def test_chat_says_why_an_answer_ended(sent: list[str]) -> None:
    assert "(cut off by --max-tokens 1)\n" in chat("hi\n").stderr


# --- words ---------------------------------------------------------------------------------------


def wrapped(pieces: list[str], width: int) -> str:
    out: list[str] = []
    writer = Wrapped(out.append, lambda: width)
    for piece in pieces:
        writer.feed(piece)
    writer.end()
    return "".join(out)


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("one two three", 8, "one two\nthree"),
        ("one two", 7, "one two"),
        ("one\n  two three", 8, "one\n  two\nthree"),
        ("averylongword", 5, "averylongword"),  # the terminal breaks it
        ("a averylongword b", 5, "a\naverylongword b"),  # of which its last line has three
        ("東京は日本", 4, "東京\nは日\n本"),
        ("```py\nx = 1 + 2 + 3\n```\none two", 6, "```py\nx = 1 + 2 + 3\n```\none\ntwo"),
        ("red\x1b[31m\x07", 80, "red?[31m?"),
        ("", 5, ""),
        ("a  ", 2, "a  "),
    ],
)
def test_lines_break_between_words(text: str, width: int, shown: str) -> None:
    assert wrapped([text], width) == shown
    assert wrapped(list(text), width) == shown


@given(st.text(st.sampled_from("ab \n東é"), max_size=60), st.integers(4, 12), st.data())
def test_wrapping_loses_nothing_and_does_not_depend_on_the_pieces(
    text: str, width: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown = wrapped(pieces, width)
    assert shown == wrapped([text], width)
    strip = str.maketrans("", "", " \n")
    assert shown.translate(strip) == text.translate(strip)
    assert shown.count("\n") >= text.count("\n")


def test_what_is_no_terminal_gets_the_text_itself() -> None:
    from octavo.cli.wrap import answer_writer

    out: list[str] = []
    stream = SimpleNamespace(isatty=lambda: False, write=out.append, flush=lambda: None)
    writer = answer_writer(stream)  # type: ignore[arg-type]
    writer.feed("one two\x1b[1m " * 50)
    writer.end()
    assert "".join(out) == "one two\x1b[1m " * 50
