"""Every command's help page, as somebody reads it who has 80 columns and knows no Python."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from octavo.cli import app

_ROOT: Any = typer.main.get_command(app)


def _pages(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _pages(each, *path, name)


PAGES = dict(_pages(_ROOT))
GROUPS = [path for path, command in PAGES.items() if hasattr(command, "commands")]
COMMANDS = [path for path in PAGES if path not in GROUPS]


def _page(*path: str) -> str:
    """On a terminal of 80 columns."""
    done = subprocess.run(
        [sys.executable, "-c", "from octavo.cli import main; main()", *path, "--help"],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_a_list_of_commands_has_each_summary_whole(group: tuple[str, ...]) -> None:
    listed = _page(*group).partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) == len(PAGES[group].commands)
    for line in listed:
        assert re.fullmatch(r"  \S+ +\S.*[^.]\.", line), line


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_page_is_written_for_people(path: tuple[str, ...]) -> None:
    page = CliRunner().invoke(app, [*path, "--help"], prog_name="octavo").output
    head, examples, tail = page.partition("\n  Examples:\n")
    assert examples, "no examples"
    assert tail.startswith(f"    octavo {' '.join(path)}")
    # No Python types, no x<=…, no default in parentheses of its own.
    assert not re.search(r"<[\w|\[\] ]+>|RANGE|UUID|<=|>=|default: \(", head)
    assert all(len(line) <= 80 for line in head.splitlines())


def test_each_option_says_what_it_takes_and_what_it_is_for() -> None:
    for path, command in PAGES.items():
        for option in command.params:
            if option.name != "version":
                assert option.help, (path, option.name)
            if option.param_type_name == "option" and not option.is_flag:
                assert option.metavar, (path, option.name)


def test_ranges_and_switches_are_in_words() -> None:
    page = " ".join(_page("top").split())
    assert "--interval X Seconds between two looks (0.1 to 3,600). [default: 1]" in page
    page = " ".join(_page("train", "medusa").split())
    assert "--threads N Compute threads (at least 1). [default: one per usable core]" in page
    assert "one for each token. [default: recurrent]" in page
    page = " ".join(_page("serve").split())
    assert "--allow-credentials / --no-allow-credentials CORS: let browsers" in page
    assert page.index("Arguments:") < page.index("Engine:") < page.index("Server:")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("top --interval 0", "'--interval': 0 is outside 0.1 to 3,600"),
        ("train medusa m -o d --heads 17", "'--heads': 17 is outside 1 to 16"),
        ("serve m --threads zero", "'--threads': 'zero' is not a whole number, at least 1"),
        ("quantize m -o d --method best", "'--method': 'best' is none of rtn, gptq, awq, imatrix"),
        ("serve m --port 70000", "--port is 70000, outside 0 to 65535"),
        ("serve m --quantization int3", "--quantization 'int3' is not supported"),
        ("plan roofline m --device h900", "--device 'h900' is not known"),
        ("plan quantization m --format q9", "--format 'q9' is not one of"),
        ("simulate m --embedding-format q9", "--embedding-format 'q9' is not one of"),
        ("plan memory m --block-size 17", "--block-size is 17, not a multiple of 16"),
        ("serve m --max-logprobs -1", "--max-logprobs is -1, below 0"),
        ("bench serve --random-range-ratio 2", "--random-range-ratio must be in [0, 1), not 2"),
        ("bench throughput m --prompt-len 1.5", "'1.5' is not a size such as"),
        ("search layer-skip m --isa zz", "unknown instruction set 'zz'; this build has"),
        ("tune m --slo ttft=5 --slo-attainment 2", "--slo-attainment is 2; it must be above 0"),
        ("generat m x", "No such command 'generat'. Did you mean 'generate'?"),
        ("bench trougput m", "Did you mean 'throughput'?"),
    ],
)
def test_wrong_use_names_flag_value_and_range(arguments: str, said: str) -> None:
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Input should" not in result.stderr
