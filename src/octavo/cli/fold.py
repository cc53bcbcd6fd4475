"""Reports, folded to the width of a terminal: text at words, tables at columns."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

_GAP = re.compile(r"\S {2,}\S")  # between two cells of a table
_LABEL = re.compile(r"[a-z ]{1,20}: |octavo ")  # of a line that goes on with none
_NARROWEST = 40  # columns that a report is folded to
_LEAST = 24  # columns that a cell of text is given, to be wrapped in


def show_report(text: str, *, as_json: bool = False) -> None:
    """Print a report, on a terminal folded to its width; COLUMNS says it for what is none. JSON
    stays as it is.
    """
    if not as_json and (sys.stdout.isatty() or "COLUMNS" in os.environ):
        text = fold(text, max(_NARROWEST, shutil.get_terminal_size().columns))
    print(text, flush=True)


def fold(text: str, width: int) -> str:
    """The text with no line longer than ``width``, but for words that are. Of a table that is
    wider the columns go below each other, each part with the table's first column.
    """
    lines: list[str] = []
    for is_table, block in groupby(text.splitlines(), _is_row):
        rows = list(block)
        if all(_cells(row) <= width for row in rows):
            lines += rows
        elif is_table and len(cells := _columns(rows)) > 1:
            lines += _folded(rows, cells, width)
        else:
            for paragraph in _paragraphs(rows):
                lines += _wrapped(paragraph, width)
    return "\n".join(lines)


def _is_row(line: str) -> bool:
    return bool(_GAP.search(line)) and not line.startswith("|")  # a table in Markdown stays one


def _paragraphs(lines: Sequence[str]) -> Iterator[str]:
    """Lines that go on with a small letter belong to the one above."""
    joined = ""
    for line in lines:
        if joined[:1].isupper() and line[:1].islower() and not _LABEL.match(line):
            joined = f"{joined} {line}"
            continue
        if joined:
            yield joined
        joined = line
        if not line:
            yield line
    if joined:
        yield joined


def _wrapped(line: str, width: int) -> list[str]:
    if _cells(line) <= width or line.startswith("|"):
        return [line]
    if line.startswith("octavo "):  # is to be copied; a flag and its value stay together
        line = re.sub(r"(--\S+) (?!--)", "\\1\0", line)
        parts = _words(line, width - 2, "    ")
        return [part.replace("\0", " ") for part in (*(f"{p} \\" for p in parts[:-1]), parts[-1])]
    return _words(line, width, " " * (len(line) - len(line.lstrip()) + 2))


def _words(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _columns(rows: Sequence[str]) -> list[tuple[int, int]]:
    """Where each column begins and ends: between them two characters are blank in all rows."""
    longest = max(map(len, rows))
    filled = [any(row[at : at + 1].strip() for row in rows) for at in range(longest)]
    starts = [
        at
        for at in range(longest)
        if filled[at] and (at == 0 or not any(filled[max(0, at - 2) : at]))
    ]
    return list(pairwise([*starts, longest + 2]))


def _folded(rows: Sequence[str], columns: Sequence[tuple[int, int]], width: int) -> Iterator[str]:
    first, *others = columns
    label = first[1]
    groups: list[list[tuple[int, int]]] = [[]]
    taken = label
    for start, end in others:
        # Each has the blanks before it, so that right-aligned numbers stay below their titles.
        if groups[-1] and taken + end - start - 2 > width:  # without the two blanks behind it
            groups.append([])
            taken = label
        groups[-1].append((start, end))
        taken += end - start
    for number, group in enumerate(groups):
        if number:
            yield ""
        for row in rows:
            line = row[:label] + "".join(row[start:end] for start, end in group)
            last = row[group[-1][0] : group[-1][1]].strip()
            yield from _row(line.rstrip(), last, width)


def _row(line: str, last: str, width: int) -> Iterator[str]:
    """One line, or several where the last cell is a text that is too long for one."""
    if _cells(line) <= width:
        yield line
        return
    before = len(line) - len(last)
    longest = max(map(len, last.split()), default=0)
    indent = before if width - before >= max(_LEAST, longest) else min(4, width // 4)
    if indent < before:
        yield line[:before].rstrip()
    for index, part in enumerate(_words(last, max(_LEAST, width - indent))):
        yield (line[:before] if indent == before and not index else " " * indent) + part


def _cells(text: str) -> int:
    """Columns of a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
