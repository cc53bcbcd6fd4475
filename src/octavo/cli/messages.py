"""What the user of `octavo chat` types, pastes or pipes in, a message at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

QUOTES = '"""'
_MORE = "... "

# (what to show in front, text already typed) -> a line, or several that were pasted as one.
# Raises EOFError at the end and KeyboardInterrupt on Ctrl-C.
ReadLine = Callable[[str, str], str]


class UnclosedMessage(EOFError):
    """The input ended inside a message in triple quotes."""


def read_message(read_line: ReadLine, prompt: str, typed: str = "") -> tuple[str, bool]:
    """(The next message, whether it was quoted.) Text between triple quotes may have several lines
    and is never a command. Raises what ``read_line`` raises, and `UnclosedMessage`.
    """
    text = read_line(prompt, typed).strip()
    if not text.startswith(QUOTES):
        return text, False
    text = text.removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        try:
            text += "\n" + read_line(_MORE if prompt else "", "").rstrip("\r\n")
        except EOFError:
            raise UnclosedMessage from None
    return text.rstrip().removesuffix(QUOTES).strip("\r\n"), True


def piped_lines() -> ReadLine:
    """Lines of standard input, where it is no terminal."""
    lines = sys.stdin.buffer

    def read_line(prompt: str, typed: str) -> str:
        line = lines.readline()
        if not line:
            raise EOFError
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            shown = line[error.start : error.start + 4].hex(" ")
            raise typer.BadParameter(f"standard input is not UTF-8: bytes {shown}") from None

    return read_line


def terminal_lines() -> ReadLine:
    """Lines edited in the terminal, with a history. A paste of several lines is one line here, and
    Alt-Enter begins another.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.vt100 import Vt100_Output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = create_output(always_prefer_tty=True)  # standard output may be a file
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # it would warn on a terminal that does not tell its cursor
    session: PromptSession[str] = PromptSession(
        key_bindings=keys,
        output=output,
        prompt_continuation=lambda width, line, is_soft_wrap: "" if is_soft_wrap else _MORE,
    )
    return lambda prompt, typed: session.prompt(prompt, default=typed)
