"""What the benchmark refuses; that leaping changes nothing is tests/tools/plan/test_leaping.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import simulator_speed


def test_without_a_trace_there_is_no_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulator_speed.py"])
    with pytest.raises(SystemExit) as refused:
        simulator_speed.main()
    assert refused.value.code == 2
    assert not capsys.readouterr().out


def test_each_run_is_a_process_with_the_same_result(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:{second:02},100,{9 + second}\n" for second in range(5))
    )
    leapt, stepped = (simulator_speed.apart(trace, 4, leaps) for leaps in (True, False))
    assert leapt["result"] == stepped["result"]
    assert (leapt["requests"], leapt["leaps"], stepped["leaps"]) == (4, True, False)
