"""The scripts that make the published line and picture, on made-up figures."""

import argparse
import ast
import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import behaviour
import code_size
import gpu_fit
import overload
import path
import simulator_speed
from _behaviour import http
from machine.test_limits import made_up
from octavo.machine.limits import Limits
from octavo.tools.plan.gpu import FITTED, LARGE_ERROR, TYPICAL_ERROR
from overload import Counted, Shape
from paths import ROOT, TINY
from server_cost import Reader, Round, stretch

BENCHMARKS = ROOT / "benchmarks"


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
    options = ["--context", "16,32,64", "--repetitions", "1", "--json"]
    monkeypatch.setattr(sys, "argv", ["growth.py", "--model", f"tiny={TINY}", *options])
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
    options = ["--model", f"tiny={TINY}", "--rounds", "2", "--json"]
    monkeypatch.setattr(sys, "argv", ["load_time.py", *options])
    load_time.main()
    (row,) = json.loads(capsys.readouterr().out)
    assert row["model"] == "tiny"
    assert row["file_mb"] == TINY.stat().st_size / 1e6
    assert 0 < row["seconds"] <= row["worst_seconds"]
    assert 0 < row["weights_mb"] < row["peak_mb"]
    assert 0 < row["interpreter_mb"] < row["peak_mb"]
    assert row["tokenizer_mb"] < row["peak_mb"]  # a difference, of next to nothing here
    assert 0 < row["explained_share"] < row["peak_share"]


class TestSameOutput:
    MODEL = str(TINY)

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
    asked = []

    def workloads(checkpoint: object, count: int, turn: int) -> dict[str, list[list[int]]]:
        asked.append([[5 + turn, 9 + at, *range(20, 50)] for at in range(count)])
        return {"facts": asked[-1], "chat": [[4]] * count}

    monkeypatch.setattr(speculation, "workloads", workloads)
    monkeypatch.setattr(speculation, "LONGEST_TEXT", 128)
    methods = {
        "itself": {"method": "draft_model", "model": str(TINY), "num_speculative_tokens": 3},
        "suffix": {"method": "suffix"},
    }
    none, itself, suffix = speculation.compare(str(TINY), methods, 2, 25, 2, ["facts"])
    assert [row.method for row in (none, itself, suffix)] == ["none", "itself", "suffix"]
    assert none.tokens_per_pass == 1
    assert len(asked) == 3
    assert itself.acceptance_rate == 1
    assert 3 < itself.tokens_per_pass <= 4
    assert 0 < itself.drafting_share < 1


def test_make_bench_names_nothing_to_its_scripts() -> None:
    """So none of them may ask for it."""
    named = re.search(r"^NAMED := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert named
    for script in BENCHMARKS.glob("[!_]*.py"):
        if script.stem in named[1].split():
            continue
        for node in ast.walk(ast.parse(script.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "add_argument":
                (name, *_) = node.args
                given = {keyword.arg for keyword in node.keywords}
                assert "required" not in given, script
                assert ast.literal_eval(name).startswith("-") or "nargs" in given, script


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


# --- server_cost.py -------------------------------------------------------------------------------


def test_only_the_stretch_in_which_all_decode_counts() -> None:
    first = [float(second) for second in range(11)]  # 0 … 10
    second = [3.0 + 0.5 * index for index in range(11)]  # 3 … 8
    # From 3 to 8: five tokens of the first, ten of the second.
    assert stretch([first, second]) == pytest.approx(5.0 / 15 * 1e6)


def test_the_ratio() -> None:
    assert Round(800.0, 840.0, 1.0, 1.0, 1.0).ratio == pytest.approx(1.05)


async def test_a_reader_counts_events_however_they_come() -> None:
    reader = Reader(b"")
    event = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
    reader.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    assert reader.times == []
    reader.data_received(event)
    reader.data_received(event * 3)
    assert len(reader.times) == 4
    assert reader.head.startswith(b"HTTP/1.1 200")
    reader.connection_lost(None)
    await asyncio.wait_for(reader.ended, 1)


# --- simulator_speed.py ---------------------------------------------------------------------------


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


# --- overload.py ----------------------------------------------------------------------------------

STUBBORN = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


def test_a_server_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "LAST_WORDS", 0.2)
    port = overload.free_port()
    with overload.running([sys.executable, "-c", STUBBORN, str(port)], port, "/") as url:
        pid = int(overload.urllib.request.urlopen(url).read())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_does_not_start_is_said_to() -> None:
    with (
        pytest.raises(SystemExit, match="did not start"),
        overload.running([sys.executable, "-c", "raise SystemExit"], overload.free_port(), "/"),
    ):
        pass


async def test_tokens_are_counted_and_not_events() -> None:
    counts: list[int] = []
    answer = Counted(lambda count, _: counts.append(count))
    answer.status = 200
    for tokens in (1, 4, 9):
        event = {"choices": [{"text": "a"}], "usage": {"completion_tokens": tokens}}
        answer.data(b"data: " + json.dumps(event).encode() + b"\n\n", 0.0)
    assert counts == [1, 3, 5]
    assert answer.events == 3


def test_enough_are_refused_for_a_p99(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def load(url: str, shape: Shape, count: int, seed: int, **more: Any) -> dict[str, Any]:
        asked.append(count)
        return dict.fromkeys((*overload.SHOWN, "request_throughput"), 2.0)

    class Server:
        def __enter__(self) -> str:
            return ""

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(overload, "load", load)
    monkeypatch.setattr(overload, "octavo", lambda *_: Server())
    given = argparse.Namespace(
        model="m", slo="ttft=1", seconds=1.0, refusals=400, llama_cpp=None
    )  # fmt: skip
    overload.overload(given, Shape(8, 8), ())
    assert asked[-1] == 800
    assert max(asked[-len(overload.SHARES) : -1]) == 3


# --- behaviour.py, path.py and code_size.py -------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["behaviour.py", *map(str, arguments)])
    return behaviour.main()


def test_a_change_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    few = ("--only", "tokens,errors,http", "--share", "0.02")
    for out in (first, second):
        assert run(monkeypatch, "record", out, *few) == 0
    assert run(monkeypatch, "compare", first, second) == 0
    assert json.loads(first.read_text())["http"]["open"]["GET /v1/models"]["status"] == 200
    assert "== http: no differences" in capsys.readouterr().out
    found = json.loads(second.read_text())
    answers = found["tokens"]["file tiny-gemma3-caps"]
    answers[0]["outputs"][0]["logprobs"][0] += "0"
    del found["errors"]["n=0"]
    second.write_text(json.dumps(found))
    assert run(monkeypatch, "compare", first, second, "--only", "errors,tokens") == 1
    out = capsys.readouterr().out
    assert "tokens: 1 difference\nfile tiny-gemma3-caps[0] › outputs[0] › logprobs[0]" in out
    assert 'n=0\n    only before: "InvalidParameter [n]: n is 0;' in out


def test_a_stream_is_the_same_however_it_is_cut() -> None:
    def chunk(text: str, **more: object) -> dict[str, object]:
        return {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, **more}]}

    whole = http._stream([chunk("a"), chunk("bcd"), chunk("", finish_reason="stop")])
    parts = http._stream([chunk("a"), chunk("b"), chunk("cd"), chunk("", finish_reason="stop")])
    assert whole == parts
    assert whole["choices"][0]["delta.content"] == "abcd"


def test_docstrings_and_comments_are_no_code(tmp_path: Path) -> None:
    text = '"""A module."""\nX = 1  # one\n\ndef f():\n    """A function."""\n    return """\n"""\n'
    (tmp_path / "module.py").write_text(text)
    assert code_size.size(tmp_path / "module.py") == {"files": 1, "lines": 4, "functions": 1}


def test_a_chat_is_followed_on_all_threads() -> None:
    command = [sys.executable, path.__file__, "--case", "greedy", "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)["greedy"]
    assert {"octavo-engine", "MainThread"} <= {each["thread"] for each in found}
    assert ("llm.py", "LLM.generate") not in {(each["file"], each["function"]) for each in found}
    files, functions = path.counts(found)
    assert 10 < files < functions <= len(found)  # lambdas of one name count once


# --- gpu_fit.py -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs() -> list[gpu_fit.Run]:
    return gpu_fit.load()[1]


def test_the_constants_are_the_fits(runs: list[gpu_fit.Run]) -> None:
    assert gpu_fit.fit(runs) == pytest.approx(FITTED, rel=0.01)


def test_the_errors_that_are_printed_are_those_on_sources_left_out(runs: list[gpu_fit.Run]) -> None:
    off = np.abs(np.concatenate(list(gpu_fit.left_out(runs).values())))
    assert float(np.median(off)) == pytest.approx(TYPICAL_ERROR, abs=0.01)
    assert float(np.quantile(off, 0.9)) == pytest.approx(LARGE_ERROR, abs=0.015)


def test_runs_are_predicted_as_the_planner_does(runs: list[gpu_fit.Run]) -> None:
    for run in runs:
        assert run.predicted(FITTED) == pytest.approx(run.planned(FITTED), rel=1e-6)


def test_each_run_has_a_source_and_quotes_its_figure() -> None:
    facts = json.loads(gpu_fit.RUNS.read_text())
    assert {run["source"] for run in facts["runs"]} == set(facts["sources"])
    for source in facts["sources"].values():
        assert source["url"].startswith("https://")
        assert source["software"]
    for run in facts["runs"]:
        quoted = run["quote"].replace(",", "")
        assert any(f"{run['value']:{how}}" in quoted for how in ("", "g", ".2f")), run


def test_there_are_runs_enough(runs: list[gpu_fit.Run]) -> None:
    assert len(runs) >= 12
    assert len({run.source for run in runs}) >= 3
    assert len({run.device.name for run in runs}) >= 3
