"""`octavo speculate`: what it shows of each pass, and that it adds up."""

import io
import json
import os
import pty
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import strict_json
from octavo.cli import app
from octavo.cli.speculate import _asked
from paths import ORACLE, TINY

PROMPT = "ab ab ab ab ab ab"


def run(*arguments: str, model: Path = TINY, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["speculate", str(model), PROMPT, *arguments])
    assert result.exit_code == code, result.output
    return result


def config(**fields: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps(fields)


CONFIGS = [
    (TINY, config(method="suffix", num_speculative_tokens=3), ()),
    (TINY, config(method="ngram", num_speculative_tokens=4), ("--allowed-token-ids", "9,10,11")),
    (
        TINY,
        config(
            method="draft_model",
            model=str(TINY),
            num_speculative_tokens=3,
            acceptance_method="rejection",
        ),
        ("--temperature", "0.8", "--repetition-penalty", "1.2"),
    ),
    (
        ORACLE / "tiny-gemma3.gguf",
        config(
            method="layer_skip",
            layers=[0, 1],
            num_speculative_tokens=2,
            acceptance_method="rejection",
        ),
        ("--temperature", "1.2"),
    ),
]


@pytest.mark.parametrize(("model", "given", "sampling"), CONFIGS)
def test_passes_add_up(model: Path, given: tuple[str, ...], sampling: tuple[str, ...]) -> None:
    common = ("--max-tokens", "40", "--ignore-eos", "--seed", "3", *sampling)
    found = strict_json.loads(run("--json", *common, *given, model=model).stdout)
    passes, total = found["passes"], found["summary"]
    assert len(found["token_ids"]) == 40
    assert sum(len(each["run"]) for each in passes) == total["tokens"] == 39
    assert total["passes"] == len(passes)
    assert total["tokens_per_pass"] == pytest.approx(39 / len(passes))
    assert found["token_ids"][1:] == [token for each in passes for token in each["run"]]
    assert total["proposed"] == sum(len(each["draft"]) for each in passes) > 0
    for each in passes:
        fates = [guess["fate"] for guess in each["draft"]]
        accepted = fates.count("accepted")
        rest = fates[accepted:]
        assert fates[:accepted] == ["accepted"] * accepted
        assert rest[1:] == ["discarded"] * len(rest[1:])
        tokens = [guess["token_id"] for guess in each["draft"]]
        assert each["run"][:accepted] == tokens[:accepted]
        assert each["rows"] == 1 + len(tokens)
        assert all(0 <= guess["p"] <= 1 and 0 < guess["q"] <= 1 for guess in each["draft"])
        if "--temperature" not in sampling:  # greedy: the target is certain
            assert all(g["p"] == (g["fate"] == "accepted") for g in each["draft"][: accepted + 1])
    if "rejection" not in given[1]:
        assert total["same_output"]
    saved = total["saved_by_passes_seconds"] - total["extra_rows_seconds"]
    assert np.isclose(total["time_saved_seconds"], saved - total["drafting_seconds"])


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    given = config(method="draft_model", model=str(TINY), num_speculative_tokens=3)
    total = strict_json.loads(run("--json", "--max-tokens", "21", "--ignore-eos", *given).stdout)[
        "summary"
    ]
    assert total["acceptance_rate"] == 1
    assert total["acceptance_per_position"] == [1, 1, 1]
    assert total["tokens_per_pass"] == 4


def test_without_a_terminal_everything_is_printed() -> None:
    text = run("--max-tokens", "30", "--ignore-eos").stdout
    assert "\x1b" not in text
    for what in ("pass 1 ", "tokens per pass", "time saved", "in theory", "the same as without"):
        assert what in text
    assert "suffix, 4 tokens each time" in text


def test_stepping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter shows the next pass, q leaves."""
    result = CliRunner().invoke(
        app, ["speculate", str(TINY), PROMPT, "--step", "--max-tokens", "30"], input="\nq\n"
    )
    assert result.exit_code == 0
    assert "pass 2" in result.stdout
    assert "pass 3" not in result.stdout
    result = CliRunner().invoke(
        app, ["speculate", str(TINY), PROMPT, "--step", "--max-tokens", "30"], input="a\n"
    )
    assert "the answer" in result.stdout


def test_one_token_is_an_answer_too() -> None:
    found = strict_json.loads(run("--json", "--max-tokens", "1").stdout)
    assert found["passes"] == []
    assert "1 token" not in run("--max-tokens", "1").stdout


@pytest.mark.parametrize("end", range(1, 9))
def test_guesses_behind_the_answers_end_are_not_accepted(end: int) -> None:
    """A drafter that is always right, and a stop token at every place of a pass."""
    given = config(method="draft_model", model=str(TINY), num_speculative_tokens=3)
    common = ("--json", "--temperature", "1", "--seed", "2", "--max-tokens", "9", *given)
    tokens = strict_json.loads(run(*common, "--ignore-eos").stdout)["token_ids"]
    assert tokens.index(tokens[end]) == end  # else it would stop before
    found = strict_json.loads(run(*common, "--stop-token-ids", str(tokens[end])).stdout)
    assert found["token_ids"] == tokens[: end + 1]
    *whole, last = found["passes"]
    assert all(len(each["run"]) == 4 for each in whole)
    fates = [guess["fate"] for guess in last["draft"]]
    accepted = [g["token_id"] for g in last["draft"] if g["fate"] == "accepted"]
    assert accepted == last["run"][: len(accepted)]
    assert (last["own_p"] is None) == (len(accepted) == len(last["run"]))
    assert fates[len(last["run"]) :] == ["discarded"] * (3 - len(last["run"]))
    assert found["summary"]["accepted"] <= found["summary"]["tokens"]


def test_what_it_makes_no_use_of_is_refused() -> None:
    assert "--step" in run("--json", "--step", code=2).output
    assert "--max-num-seqs" in run("--max-num-seqs", "7", code=2).output
    strict_json.loads(run("--json", "--no-step", "--max-tokens", "3").stdout)


@pytest.mark.parametrize(
    ("key", "answer"), [(b"q", "q"), (b"A", "a"), (b"\r", "\n"), (b"\x04", "q")]
)
def test_a_key_of_a_terminal_is_enough(
    monkeypatch: pytest.MonkeyPatch, key: bytes, answer: str
) -> None:
    """Without Enter."""
    ours, theirs = pty.openpty()
    answered = threading.Event()

    def press() -> None:
        while not answered.wait(0.02):  # what comes before it listens is dropped
            os.write(ours, key)

    pressing = threading.Thread(target=press)
    with open(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        pressing.start()
        try:
            assert _asked(Console(file=io.StringIO())) == answer
        finally:
            answered.set()
            pressing.join()
            os.close(ours)
