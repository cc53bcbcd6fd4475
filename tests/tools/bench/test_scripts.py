"""The scripts that make the published line and picture, on made-up figures."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from executor.test_limits import made_up
from octavo.machine.limits import Limits

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def test_a_line_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    growth = script("growth", monkeypatch)
    sizes = [1_000_000, 3_000_000, 4_000_000, 20_000_000]
    lengths = [growth.Length(size, 1.0, 0.5, 2e-3 + size / 4e10, 1e-3, size) for size in sizes]
    line = growth.Line.through(lengths, 5e10)
    assert line.fixed_seconds == pytest.approx(2e-3)
    assert line.bytes_per_second == pytest.approx(4e10)
    assert line.of_limit == pytest.approx(0.8)
    assert line.r_squared == pytest.approx(1.0)
    assert line.worst_residual < 1e-6
    bent = [growth.Length(size, 1.0, 0.5, (size / 1e9) ** 2, 1e-3, size) for size in sizes]
    assert growth.Line.through(bent, 5e10).worst_residual > 1


def test_growth_of_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    growth = script("growth", monkeypatch)
    monkeypatch.setattr(Limits, "measure", classmethod(lambda cls, **_: made_up()))
    model = Path(__file__).parents[2] / "oracle" / "tiny-llama.gguf"
    options = ["--context", "16,32,64", "--repetitions", "1", "--json"]
    monkeypatch.setattr(sys, "argv", ["growth.py", "--model", f"tiny={model}", *options])
    growth.main()
    result = json.loads(capsys.readouterr().out)["tiny"]
    assert [length["tokens"] for length in result["lengths"]] == [16, 32, 64]
    kv_bytes = [length["decode_kv_bytes"] for length in result["lengths"]]
    assert kv_bytes == sorted(kv_bytes)
    assert result["line"].keys() >= {"fixed_seconds", "bytes_per_second", "of_limit", "r_squared"}


def row(batch: int) -> dict[str, Any]:
    rates = {
        f"{phase}_{name}": 100.0 * batch
        for phase in ("prefill", "decode")
        for name in ("tok_s", "tok_s_deviation", "limit_tok_s")
    }
    limit = {"date": "2026-01-01", "int8_ops_per_second": 1e12, "memory_bytes_per_second": 5e10}
    shares = {"prefill_of_limit": 0.5, "decode_of_limit": 0.5}
    about = {"batch": batch, "isa": "avx2", "threads": 2, "context": 64, "prompt_len": 64}
    return about | rates | shares | {"limits": [limit, limit]}


def test_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    plot = script("batch_plot", monkeypatch)
    rows, out = tmp_path / "rows.json", tmp_path / "docs" / "batch.svg"
    rows.write_text(json.dumps([row(batch) for batch in (1, 8, 32)]))
    argv = ["batch_plot.py", f"a={rows}", f"b={rows}", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    plot.main()
    once = out.read_bytes()
    assert once.startswith(b"<?xml")
    plot.main()
    assert out.read_bytes() == once, "the same figures, the same file"


def test_load_time_of_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_time = script("load_time", monkeypatch)
    model = Path(__file__).parents[2] / "oracle" / "tiny-llama.gguf"
    options = ["--model", f"tiny={model}", "--rounds", "2", "--json"]
    monkeypatch.setattr(sys, "argv", ["load_time.py", *options])
    load_time.main()
    (row,) = json.loads(capsys.readouterr().out)
    assert row["model"] == "tiny"
    assert row["file_mb"] == model.stat().st_size / 1e6
    assert 0 < row["seconds"] <= row["worst_seconds"]
    assert 0 < row["weights_mb"] < row["peak_mb"]
    assert 0 < row["interpreter_mb"] < row["peak_mb"]
    assert 0 <= row["tokenizer_mb"] < row["peak_mb"]
    assert 0 < row["explained_share"] < row["peak_share"]


class TestSameOutput:
    MODEL = str(Path(__file__).parents[2] / "oracle" / "tiny-llama.gguf")

    def run(self, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
        same_output = script("same_output", monkeypatch)
        monkeypatch.setattr(sys, "argv", ["same_output.py", self.MODEL, "--prompts", "8", *options])
        same_output.main()

    def test_every_drafter_leaves_answers_as_they_are(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.run(monkeypatch, "--batch-sizes", "1,3", "--length", "60", "--json")
        result = json.loads(capsys.readouterr().out)
        assert result["equal"] is True
        assert result["left_out"] == {}
        names = {"ngram", "suffix", "suffix, branches", "draft_model"}
        found = [(row["drafter"], row["batch"]) for row in result["rows"]]
        assert sorted(found) == sorted((name, batch) for name in names for batch in (1, 3))
        for row in result["rows"]:
            assert row["prompts"] == 8
            assert row["tokens"] == 8 * 60
            assert row["drafted"] >= row["accepted"] > 0

    def test_a_difference_is_said_before_anything_else(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Two tokens are too few for this drafter to draft."""
        options = ("--length", "2", "--batch-sizes", "2", "--config", '{"method": "ngram"}')
        with pytest.raises(SystemExit, match="nothing was drafted by ngram"):
            self.run(monkeypatch, *options)
        assert "all the same" in capsys.readouterr().out
        running = script("same_output", monkeypatch).running

        @contextmanager
        def wrong(checkpoint: Any, config: Any) -> Iterator[Any]:
            with running(checkpoint, config) as engine:
                if config.speculative_config is not None:
                    answers = engine.answers
                    engine.answers = lambda *of: dict.fromkeys(answers(*of))
                yield engine

        monkeypatch.setattr(script("same_output", monkeypatch), "running", wrong)
        with pytest.raises(SystemExit, match="some answers differ"):
            self.run(monkeypatch, *options)
        assert "'greedy_differ': 4, 'drawn_differ': 4" in capsys.readouterr().out

    def test_rejection_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = '{"method": "ngram", "acceptance_method": "rejection"}'
        with pytest.raises(SystemExit, match="acceptance_method is 'rejection'"):
            self.run(monkeypatch, "--config", config)


def test_llama_cpps_speculation_beside_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """From what its server answers."""
    peer = script("_peers.llama_cpp_speculation", monkeypatch)
    served: list[list[str]] = []

    @contextmanager
    def running(command: list[str], port: int) -> Iterator[tuple[int, float]]:
        assert command[command.index("--port") + 1] == str(port)
        served.append(command)
        yield 1, 0.1

    def answer(port: int, prompt: list[int], length: int) -> dict[str, Any]:
        drafts = "--spec-type" in served[-1]
        timings: dict[str, Any] = {"predicted_per_second": 200.0 if drafts else 100.0}
        if drafts:
            timings |= {"draft_n": 10, "draft_n_accepted": 7}
        return {"timings": timings, "tokens": prompt[:length]}

    monkeypatch.setattr(peer, "running", running)
    monkeypatch.setattr(peer, "_answer", answer)
    found = peer.measure("bin", "model.gguf", {"copy": [1, 2, 3]}, 2, 2, 4)
    assert found["none"]["copy"] == (100.0, None, [1, 2])
    assert len(found) == len(served) == len(peer.SETTINGS)
    for name, speeds in found.items():
        if name != "none":
            assert speeds["copy"] == (200.0, 0.7, [1, 2])


def test_every_prompt_of_speculation_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workloads = script("_workloads", monkeypatch).workloads
    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
    checkpoint = SimpleNamespace(tokenizer=tokenizer, chat_template=None)
    turns = [workloads(checkpoint, 32, turn) for turn in range(12)]
    for name in ("copy", "facts", "chat"):
        prompts = [bytes(prompt) for turn in turns for prompt in turn[name]]
        assert len(set(prompts)) == len(prompts) == 12 * 32
        # Not even a beginning of some blocks is known from before.
        assert len({prompt[:80] for prompt in prompts}) == len(prompts)


def test_speculation_is_measured_on_new_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that drafts for itself, which has to read every round's prompts."""
    speculation = script("speculation", monkeypatch)
    model = str(Path(__file__).parents[2] / "oracle" / "tiny-llama.gguf")
    asked = []

    def workloads(checkpoint: object, count: int, turn: int) -> dict[str, list[list[int]]]:
        asked.append([[5 + turn, 9 + at, *range(20, 50)] for at in range(count)])
        return {"facts": asked[-1], "chat": [[4]] * count}

    monkeypatch.setattr(speculation, "workloads", workloads)
    monkeypatch.setattr(speculation, "LONGEST_TEXT", 128)
    methods = {
        "itself": {"method": "draft_model", "model": model, "num_speculative_tokens": 3},
        "suffix": {"method": "suffix"},
    }
    none, itself, suffix = speculation.compare(model, methods, 2, 25, 2, ["facts"])
    assert [row.method for row in (none, itself, suffix)] == ["none", "itself", "suffix"]
    assert none.tokens_per_pass == 1
    assert len(asked) == 3
    assert itself.acceptance_rate == 1
    assert 3 < itself.tokens_per_pass <= 4
    assert 0 < itself.drafting_share < 1


def test_make_bench_names_nothing_to_its_scripts() -> None:
    """So none of them may ask for it."""
    for path in BENCHMARKS.glob("[!_]*.py"):
        if path.name in ("behaviour.py", "make_quantized.py", "quantized_readers.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "add_argument":
                (name, *_) = node.args
                given = {keyword.arg for keyword in node.keywords}
                assert ast.literal_eval(name).startswith("-") or "nargs" in given, path


def test_results_of_fewer_layers_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantizers = script("quantizers", monkeypatch)
    assert quantizers.finished(tmp_path, None) is None
    quantizers.note(tmp_path, 7.4, None)
    assert [quantizers.finished(tmp_path, layers) for layers in (None, 6)] == [7, 7]
    quantizers.note(tmp_path, 3.0, 6)
    assert [quantizers.finished(tmp_path, layers) for layers in (6, 2)] == [3, 3]
    for layers in (12, None):
        with pytest.raises(SystemExit, match="is of 6 layers: remove it, or give --layers 6"):
            quantizers.finished(tmp_path, layers)
