"""`octavo bench` and `octavo profile`: what they print, and what they refuse."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import strict_json
from machine.test_limits import made_up
from octavo.cli import app
from octavo.engine.config import SettingsError
from octavo.machine.limits import Limits
from paths import ORACLE


@pytest.fixture(autouse=True)
def made_up_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No test measures: what was asked for is noted."""
    asked: list[Any] = []

    def measure(cls: type[Limits], threads: int | None = None, **options: Any) -> Limits:
        asked.append((threads, options.get("quick", False)))
        return made_up(quick=options.get("quick", False))

    monkeypatch.setattr(Limits, "measure", classmethod(measure))
    monkeypatch.setattr("octavo.machine.limits.misfit", lambda _: None)
    return asked


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


class TestMachine:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))

    def test_json(self) -> None:
        assert (
            Limits.from_dict(strict_json.loads(run("bench", "machine", "--json").stdout))
            == made_up()
        )
        assert Limits.load() == made_up()

    def test_text(self) -> None:
        text = run("bench", "machine").stdout
        for figure in ("1,600.0", "800.0", "40.0", "400.0", "16 MiB (L3)"):
            assert figure in text

    def test_a_quick_or_partial_measurement_is_not_stored(self, made_up_machine: list[Any]) -> None:
        run("bench", "machine", "--quick")
        run("bench", "machine", "--threads", "1000")
        assert made_up_machine == [(None, True), (1000, False)]
        assert Limits.load() is None

    @pytest.mark.parametrize("threads", ["0", "-1", "x", "5000"])
    def test_no_such_threads(self, threads: str) -> None:
        assert "--threads" in run("bench", "machine", "--threads", threads, code=2).stderr


MODELS = sorted(ORACLE.glob("tiny-*.gguf"))
LLAMA = next(path for path in MODELS if path.name == "tiny-llama.gguf")


class TestThroughput:
    @pytest.mark.parametrize("model", [LLAMA, LLAMA.with_name("tiny-gemma3.gguf")])
    def test_json(self, model: Path, made_up_machine: list[Any]) -> None:
        lengths = ("--prompt-len", 20, "--output-len", "3", "--repetitions", "2")
        out = run("bench", "throughput", model, "--batch-size", "1,3", *lengths, "--json").stdout
        rows = strict_json.loads(out)
        assert [row["batch"] for row in rows] == [1, 3]
        for row in rows:
            assert row["model"] == model.name
            assert (row["context"], row["output_len"], row["repetitions"]) == (20, 3, 2)
            for phase in ("prefill", "decode"):
                rate, limit = row[f"{phase}_tok_s"], row[f"{phase}_limit_tok_s"]
                assert rate > 0
                assert row[f"{phase}_tok_s_deviation"] >= 0
                assert row[f"{phase}_of_limit"] == pytest.approx(rate / limit)
            assert len(row["limits"]) == 2, "before and after"
        assert made_up_machine == [(None, True)] * 3, "around each batch size"

    @pytest.mark.parametrize("pinned", [{}, {"num_speculative_tokens": 2}])
    def test_speculation(self, pinned: dict[str, int]) -> None:
        lengths = ("--prompt-len", 30, "--output-len", "40", "--repetitions", "1")
        config = json.dumps({"method": "suffix"} | pinned)
        command = ("bench", "throughput", LLAMA, "--batch-size", "1,2", *lengths)
        out = run(*command, "--speculative-config", config, "--json").stdout
        for row in strict_json.loads(out):
            assert row["tokens_per_pass"] >= 1
            assert 0 < row["drafting_share"] < 1
            assert row["estimated_speed_up"] > 0
            if pinned:
                assert 0 < row["acceptance_rate"] <= 1
                assert row["tokens_per_pass"] > 1
                by_position = row["acceptance_per_position"]
                assert len(by_position) == 2
                assert 1 >= by_position[0] >= by_position[1] >= 0
        assert "tokens_per_pass" not in strict_json.loads(run(*command, "--json").stdout)[0]
        text = run(*command, "--speculative-config", config).stdout
        assert "batch 2: " in text
        assert "tokens per pass" in text
        assert "s saved: about" in text

    def test_text(self) -> None:
        lengths = ("--prompt-len", 9, "--output-len", "2", "--repetitions", "1")
        text = run("bench", "throughput", LLAMA, "--batch-size", "2", *lengths).stdout
        assert "prompts of 9 tokens, 2 drawn, 1 repetition\n" in text
        header, _, row = [line for line in text.splitlines() if line.startswith("|")]
        assert header.count("|") == row.count("|") == 7
        assert row.count("±") == 0  # one has no deviation
        assert row.count("%") == 2

    @pytest.mark.parametrize("options", [(), ("--max-model-len", "64")])
    def test_the_whole_context_can_be_measured(self, options: tuple[str, ...]) -> None:
        most = int(options[1]) if options else 256
        lengths = ("--output-len", "8", "--repetitions", "1", "--batch-size", "2", *options)
        command = ("bench", "throughput", LLAMA, *lengths, "--prompt-len")
        text = run(*command, str(most - 8)).stdout
        assert f"prompts of {most - 8} tokens, 8 drawn" in text
        refused = run(*command, str(most - 7), code=1).exception
        assert f"take {most + 1} tokens; the model's context has {most}" in str(refused)

    def test_stored_limits_are_taken_when_asked_for(
        self, made_up_machine: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
        made_up().save()
        options = ("--prompt-len", 9, "--output-len", 2, "--repetitions", 1, "--stored-limits")
        out = run("bench", "throughput", LLAMA, "--batch-size", 1, *options, "--json").stdout
        assert len(strict_json.loads(out)[0]["limits"]) == 1
        assert made_up_machine == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--batch-size", "0"), "at least one sequence"),
            (("--batch-size", "a,b"), "not a list of sizes"),
            (("--batch-size", "1,,2"), "not a list of sizes"),
            (("--batch-size", "2,2"), "twice"),
            (("--batch-size", ""), "not a list of sizes"),
            (("--prompt-len", "0"), "at least one token"),
            (("--output-len", "-3"), "not a size"),
            (("--repetitions", "0"), "repetitions"),
        ],
    )
    def test_wrong_use(self, options: tuple[str, ...], message: str) -> None:
        assert message in run("bench", "throughput", LLAMA, *options, code=2).stderr

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--kv-cache-memory", "64KiB", "--max-model-len", "48"), "needs .* KV blocks"),
            (("--max-num-seqs", "4"), "batch size 8 is above max_num_seqs 4"),
            (("--prompt-len", "100000"), "the model's context has"),
            (("--no-enable-prefix-caching",), "prefix caching must be on"),
        ],
    )
    def test_what_cannot_be_run(self, options: tuple[str, ...], message: str) -> None:
        given = ("--batch-size", "8", "--prompt-len", "20", "--output-len", "4", *options)
        result = run("bench", "throughput", LLAMA, *given, code=1)
        assert isinstance(result.exception, SettingsError)
        assert re.search(message, str(result.exception))


class TestProfile:
    def profile(self, *options: str | Path) -> dict[str, Any]:
        out = run("profile", LLAMA, "--steps", "3", "--json", *options).stdout
        facts: dict[str, Any] = strict_json.loads(out)
        return facts

    @pytest.mark.parametrize(
        ("options", "kind", "tokens"),
        [
            (("--batch-size", "3", "--context", "40"), "decode", 3),
            (("--prompt-len", "33"), "prefill", 33),
            (("--prompt-len", "33", "--batch-size", "2"), "prefill", 66),
        ],
    )
    def test_the_parts_add_up(self, options: tuple[str, ...], kind: str, tokens: int) -> None:
        facts = self.profile(*options)
        assert (facts["kind"], facts["tokens"]) == (kind, tokens)
        parts = sum(row["seconds"] for row in facts["regions"]) + sum(facts["overheads"].values())
        assert parts == pytest.approx(facts["step_seconds"])
        assert all(seconds >= 0 for seconds in facts["overheads"].values())
        limits = sum(row["limit_seconds"] for row in facts["regions"])
        assert limits == pytest.approx(facts["limit_seconds"])
        for row in facts["regions"]:
            assert row["bytes_per_second"] * row["seconds"] in (0, pytest.approx(row["bytes"]))
            assert (row["bound"] is None) == (not row["limit_seconds"])
            assert row["of_limit"] is None or row["limit_seconds"]
        layers = {row["layer"] for row in facts["regions"]}
        assert {None, 0, 1} <= layers

    def test_text(self) -> None:
        text = run("profile", LLAMA, "--steps", "2").stdout
        for part in ("logits", "attention", "meetings of the threads", "sampling", "step"):
            assert f"\n{part}" in text
        assert "attention [1]" in run("profile", LLAMA, "--steps", "2", "--layers").stdout

    def test_the_trace_is_one_a_viewer_opens(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        facts = self.profile("--trace", path)
        trace = json.loads(path.read_text())
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        others = [event for event in trace["traceEvents"] if event["ph"] != "X"]
        assert {event["name"] for event in others} == {"process_name", "thread_name"}
        assert all(event["ph"] == "M" for event in others)
        for event in events:
            assert event.keys() == {"name", "cat", "ph", "ts", "dur", "args", "pid", "tid"}
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        # On one thread any two are apart or one within the other.
        tolerance = 1e-3  # of a microsecond: rounding
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in events]
        spans.sort(key=lambda span: (span[0], -span[1]))
        for (_, a_end), (b, b_end) in combinations(spans, 2):
            apart = a_end <= b + tolerance
            assert apart or b_end <= a_end + tolerance
        by_kind = {
            kind: [event for event in events if event["cat"] == kind]
            for kind in ("step", "engine", "layer", "region")
        }
        (step,) = by_kind["step"]
        assert step["dur"] == pytest.approx(1e6 * facts["step_seconds"])
        assert [event["name"] for event in by_kind["engine"]] == [
            "schedule", "execute", "sample", "commit"
        ]  # fmt: skip
        assert [event["name"] for event in by_kind["layer"]] == ["layer 0", "layer 1"]
        assert len(by_kind["region"]) == len(facts["regions"])
        inside = [event for event in by_kind["region"] if within(event, by_kind["layer"][0])]
        assert any(event["name"] == "attention" for event in inside)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--batch-size", "0"), "batch-size"),
            (("--context", "x"), "not a size"),
            (("--prompt-len", "0"), "at least one token"),
            (("--prompt-len", "8", "--context", "8"), "either"),
            (("--steps", "0"), "steps"),
        ],
    )
    def test_wrong_use(self, options: tuple[str, ...], message: str) -> None:
        assert message in run("profile", LLAMA, *options, code=2).stderr

    def test_plain_steps_only(self) -> None:
        options = ("--speculative-config", '{"method": "ngram"}')
        result = run("profile", LLAMA, *options, code=1)
        assert "a profile is taken without it" in str(result.exception)


def within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    end = outer["ts"] + outer["dur"]
    return bool(outer["ts"] <= inner["ts"] <= end)
