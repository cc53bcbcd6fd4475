"""Reports on a narrow terminal."""

import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.fold import fold
from octavo.words import number, plural
from paths import TINY

TABLE = """\
                  seqs  tokens  good  a second
best               256    2048   3 %     2.529
without rounding   256    1024   1 %    0.5498
in all: two
"""
FACTS = """\
requests      50 of 50 served, 1024 tokens in and 128 out
KV cache      9.8 %
"""


def test_a_table_folds_at_its_columns() -> None:
    assert fold(TABLE, 80) == TABLE.rstrip("\n")
    assert fold(TABLE, 36).splitlines() == [
        "                  seqs  tokens  good",
        "best               256    2048   3 %",
        "without rounding   256    1024   1 %",
        "",
        "                  a second",
        "best                 2.529",
        "without rounding    0.5498",
        "in all: two",
    ]


def test_a_text_beside_a_name_is_wrapped_beside_it() -> None:
    assert fold(FACTS, 44).splitlines() == [
        "requests      50 of 50 served, 1024 tokens",
        "              in and 128 out",
        "KV cache      9.8 %",
    ]


def test_a_line_with_a_label_is_its_own() -> None:
    text = "Cache: 14 GiB of bf16, 41,511 blocks\na step: up to 256 sequences\nand more of it"
    assert fold(text, 28).splitlines() == [
        "Cache: 14 GiB of bf16,",
        "  41,511 blocks",
        "a step: up to 256 sequences",
        "and more of it",
    ]
    assert fold("One two three\nfour of it", 12).splitlines() == [
        "One two",
        "  three four",
        "  of it",
    ]


def test_a_table_in_markdown_stays_one() -> None:
    table = "| a |    b |\n|---|-----:|\n| 1 |   22 |"
    assert fold(table, 8) == table


def test_sentences_are_wrapped_and_commands_can_be_copied() -> None:
    assert fold("One two three four\n  five six seven", 12).splitlines() == [
        "One two", "  three four", "  five six", "    seven",
    ]  # fmt: skip
    line = "octavo serve m --max-num-seqs 256 --block-size 16 --threads 2"
    folded = fold(line, 30)
    assert folded.splitlines() == [
        "octavo serve m \\", "    --max-num-seqs 256 \\", "    --block-size 16 \\",
        "    --threads 2",
    ]  # fmt: skip
    assert folded.replace("\\\n", "").split() == line.split()


_CELL = st.text(st.sampled_from("ab1"), min_size=1, max_size=8)
_ROWS = st.lists(st.lists(_CELL, min_size=4, max_size=4), min_size=2, max_size=5)


@given(_ROWS, st.integers(24, 60))
def test_folding_loses_no_cell(rows: list[list[str]], width: int) -> None:
    text = "\n".join("  ".join(f"{cell:>8}" for cell in row) for row in rows)
    folded = fold(text, width)
    assert all(len(line) <= width for line in folded.splitlines())
    for row in rows:
        for cell in row:
            assert cell in folded
    assert sorted(set(folded.split())) == sorted({cell for row in rows for cell in row})


@given(st.text(st.sampled_from("ab  \n"), max_size=200), st.integers(30, 60))
def test_folding_loses_no_word(text: str, width: int) -> None:
    folded = fold(text, width)
    assert set(folded.split()) == set(text.split())
    longest = max(map(len, text.split()), default=0)
    assert all(len(line) <= max(width, longest + width // 2) for line in folded.splitlines())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.979e6, "1,979,000"), (13610.2, "13,610"), (116.739, "116.7"), (0.000123456, "0.0001235"),
        (0, "0"), (5, "5"), (99999, "100,000"), (-2.5, "-2.5"), (float("inf"), "inf"), (10.0, "10"),
    ],
)  # fmt: skip
def test_numbers_are_plain(value: float, shown: str) -> None:
    assert number(value) == shown


@given(st.floats(1e-9, 1e15))
def test_a_number_is_within_half_of_its_last_digit(value: float) -> None:
    shown = number(value)
    assert "e" not in shown
    assert float(shown.replace(",", "")) == pytest.approx(value, rel=5.001e-4)


def test_plurals() -> None:
    assert plural(1, "request", "wait") == "1 request waits"
    assert plural(0, "request", "wait") == "0 requests wait"
    assert plural(2000, "row") == "2000 rows"
    assert plural(1, "line", "were") == "1 line was"


# --- all reports that are cheap to make ----------------------------------------------------------

DEVICE = "memory=10,int8=150,bf16=80,fp32=37,capacity=16"
REPORTS = [
    f"inspect {TINY}",
    "pull --list",
    "list",
    "plan memory llama-3-8b --users 1 --device l4",
    f"plan memory {TINY} --users 1 --device {DEVICE}",
    f"plan quantization llama-3-8b --device {DEVICE}",
    f"plan quantization llama-3-8b --format q4_k --device {DEVICE}",
    "plan roofline llama-3-8b --device h100",
    f"plan roofline {TINY} --device {DEVICE}",
    "plan batching --step-ms 20 --input-len 64 --output-len 1 --request-rate 8",
    "plan batching --step-ms 20 --input-len 1 --output-len geometric:100 --request-rate 80",
    f"simulate {TINY} --device {DEVICE} --num-prompts 1 --input-len 1 --output-len 1",
    f"simulate {TINY} --device {DEVICE} --num-prompts 40 --request-rate 4 --input-len 8 "
    "--output-len 4",
    f"tune {TINY} --device {DEVICE} --num-prompts 8 --input-len 8 --output-len 4 --request-rate 1 "
    "--slo ttft=500 --trials 3",
    f"generate {TINY} x --max-tokens 2",
]


_SLOW = ("generate", "simulate", "tune", "plan quantization llama-3-8b --dev")
NARROW = [command for command in REPORTS if not command.startswith(_SLOW)]


@pytest.mark.parametrize(
    ("width", "command"),
    [*((80, command) for command in REPORTS), *((60, command) for command in NARROW)],
)
def test_a_report_fits_the_terminal(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    for line in result.stdout.splitlines():
        longest = max(map(len, line.split()), default=0)  # a path, or the cell of a table
        assert len(line) <= max(width, longest + 4) or line.startswith("|"), line
        assert not re.search(r"\d[eE][+-]?\d\d", line), line
        assert not re.search(r"(?<![\d.,–-])1 (?!is|was|has)[a-z]+[^s\W]s\b(?! of|/s)", line), line
        assert "± 0.0" not in line


@pytest.mark.parametrize("width", [60, 80])
def test_no_name_is_broken_at_a_hyphen_in_help(width: int) -> None:
    for command in ("serve", "bench serve"):
        page = subprocess.run(
            [sys.executable, "-m", "octavo", *command.split(), "--help"],
            env=os.environ | {"COLUMNS": str(width)}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert not re.search(r"\w-$", page, re.MULTILINE)
