"""Text that comes in pieces, wrapped at words to a terminal's width."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Callable
from typing import TextIO

from rich.cells import cell_len

_FENCE = "```"


def answer_writer(stream: TextIO) -> Wrapped:
    """For a model's text: wrapped on a terminal, as it is anywhere else."""

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    if not stream.isatty():
        return Wrapped(write, lambda: sys.maxsize, plain=True)
    return Wrapped(write, lambda: shutil.get_terminal_size().columns)


class Wrapped:
    """Passes text on to ``write``, with a line break in place of the space before a word that does
    not fit in ``width()`` columns. A word is held back until it ends.

    Lines between ``` fences are code: they are left to the terminal. Control characters are shown
    as "?", because a terminal would obey them. ``plain``: everything is passed on as it is.
    """

    def __init__(
        self, write: Callable[[str], None], width: Callable[[], int], *, plain: bool = False
    ) -> None:
        self._write = write
        self._width = width
        self._plain = plain
        self._column = 0
        self._space = ""  # before the word
        self._word = ""
        self._line = ""  # what it begins with, enough to tell a fence
        self._code = False

    def feed(self, text: str) -> None:
        if self._plain:
            self._write(text)
            return
        for character in text:
            self._take(character)

    def end(self) -> None:
        """What was held back. The next text may go on in the same line."""
        self._put_word()
        if self._space:
            self._write(self._space)
            self._space = ""

    def _take(self, character: str) -> None:
        if character == "\n":
            self.end()
            self._write("\n")
            if self._line.lstrip().startswith(_FENCE):
                self._code = not self._code
            self._column, self._line = 0, ""
            return
        if len(self._line) < 80:
            self._line += character
        if character == "\t":
            self._put_word()
            self._space += "    "
        elif unicodedata.category(character) == "Cc":
            self._word += "?"
        elif character == " ":
            self._put_word()
            self._space += character
        else:
            wide = cell_len(character) > 1  # lines may break on either side of a Chinese character
            if wide:
                self._put_word()
            self._word += character
            if wide or self._code:
                self._put_word()

    def _put_word(self) -> None:
        if not self._word:
            return
        width, cells = self._width(), cell_len(self._word)
        whole = self._column + len(self._space) + cells
        if whole > width and self._column and not self._code:
            self._write("\n" + self._word)
            whole = cells
        else:
            self._write(self._space + self._word)
        # The terminal itself breaks a word that is longer than a line.
        self._column = whole if whole <= width else whole % width
        self._space = self._word = ""
