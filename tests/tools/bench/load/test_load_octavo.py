"""Against Octavo's own server: a real engine on a simulated executor, and the command itself."""

import asyncio
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from serve_fakes import FakeEngine
from serving import listening, real_engine, serving, started
from typer.testing import CliRunner

import strict_json
from octavo.cli import app
from octavo.cli.bench import serve as command
from octavo.tools.bench.load.benchmark import Settings, benchmark


def settings(url: str, **changes: Any) -> Settings:
    defaults: dict[str, Any] = {
        "base_url": url, "num_prompts": 12, "random_input_len": 40, "random_output_len": 9,
        "progress": False,
    }  # fmt: skip
    return Settings(**(defaults | changes))


def histogram(metrics: str, name: str) -> tuple[float, float]:
    """(count, sum)"""
    found = dict(re.findall(rf"^octavo:{name}_(count|sum){{.*?}} (\S+)$", metrics, re.MULTILINE))
    return float(found["count"]), float(found["sum"])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_its_figures_agree_with_the_servers(backend: str) -> None:
    async with serving(pause=0.004) as (http, _, _):
        result = await benchmark(
            settings(
                str(http.base_url), backend=backend, request_rate=100.0, save_detailed=True,
                prompt_format="ids" if backend == "openai" else "text",
            )
        )  # fmt: skip
        metrics = (await http.get("/metrics")).text
    assert (result["completed"], result["failed"]) == (12, 0)
    # A client waits for all that the server waits for, and for the way there and back.
    for name, times in (
        ("time_to_first_token_seconds", result["ttfts"]),
        ("e2e_request_latency_seconds", result["latencies"]),
    ):
        count, total = histogram(metrics, name)
        assert count == 12
        assert sum(times) > total > 0
    assert histogram(metrics, "request_prompt_tokens") == (12, result["total_input_tokens"])
    assert histogram(metrics, "request_generation_tokens") == (12, 12 * 9)
    assert result["total_output_tokens"] == 12 * 9
    if backend == "openai":
        assert result["input_lens"] == [40] * 12
        assert not [notice for notice in result["notices"] if "counted" in notice]


async def test_prompts_that_the_server_has_seen_before_are_noticed() -> None:
    engine, _ = real_engine()
    async with started(engine), listening(engine) as url:
        first = await benchmark(settings(url, max_concurrency=1))
        again = await benchmark(settings(url, max_concurrency=1))
        other = await benchmark(settings(url, max_concurrency=1, seed=1))
    assert first["total_cached_tokens"] == other["total_cached_tokens"] == 0
    assert again["total_cached_tokens"] == 12 * 32  # of 40, whole blocks of 16
    assert any("384 of 480 prompt tokens came from" in notice for notice in again["notices"])


async def test_shared_prefixes_are_found_in_the_cache() -> None:
    async with serving() as (http, _, _):
        result = await benchmark(
            settings(
                str(http.base_url), dataset_name="prefix_repetition",
                prefix_repetition_prefix_len=64, prefix_repetition_suffix_len=16,
                prefix_repetition_num_prefixes=2, prefix_repetition_output_len=2, max_concurrency=1,
            )
        )  # fmt: skip
        metrics = (await http.get("/metrics")).text
    assert result["completed"] == 12
    hits = float(re.search(r"^octavo:prefix_cache_hits_total{.*?} (\S+)$", metrics, re.M)[1])
    assert hits == 10 * 64  # all but the first of each prefix, whole blocks of 16


async def test_a_mooncake_trace_shares_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 300, "output_length": 2, "hash_ids": [5]},
        {"timestamp": 100, "input_length": 400, "output_length": 2, "hash_ids": [5]},
        {"timestamp": 200, "input_length": 400, "output_length": 2, "hash_ids": [6]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with serving() as (http, _, _):
        result = await benchmark(
            settings(
                str(http.base_url), dataset_name="mooncake", dataset_path=path, num_prompts=None,
                max_concurrency=1,
            )
        )  # fmt: skip
        metrics = (await http.get("/metrics")).text
    assert result["completed"] == 3
    assert result["total_input_tokens"] == 1100
    hits = float(re.search(r"^octavo:prefix_cache_hits_total{.*?} (\S+)$", metrics, re.M)[1])
    assert hits == 288  # 300 tokens in whole blocks


async def test_what_a_full_queue_refused_is_no_failure() -> None:
    engine = FakeEngine(pause=0.01, queue_full=3)
    async with listening(engine) as url:
        result = await benchmark(settings(url, prompt_format="text"))
    assert result["completed"] >= 3
    assert (result["failed"], result["failures"]) == (0, [])
    assert result["completed"] + result["rejected"] == 12
    (refused,) = result["rejections"]
    assert (refused["reason"], refused["example"]) == ("HTTP 429", "the queue is full")
    assert refused["count"] == result["rejected"]
    assert 0 < result["median_rejection_ms"] <= result["p99_rejection_ms"]


async def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    short = ("--num-prompts", "2", "--random-input-len", "9", "--random-output-len", "3")
    async with listening(engine, api_key=("sesame",)) as url:
        code, out, err = await run("--base-url", url, *short, "--model", "tiny")
        assert (code, out) == (1, "")
        assert "HTTP 401" in err
        assert "OPENAI_API_KEY" in err
        monkeypatch.setenv("OPENAI_API_KEY", "sesame")
        code, out, err = await run("--base-url", url, *short)
        assert code == 0, out + err


# --- the command ---------------------------------------------------------------------------------


async def run(*arguments: str) -> tuple[int, str, str]:
    """The command in a process of its own, while this loop serves."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from octavo.cli import main; main()", "bench", "serve", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


async def test_the_command_prints_and_saves(tmp_path: Path) -> None:
    engine = FakeEngine()
    common = ("--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "5")
    async with listening(engine) as url:
        code, out, err = await run(
            "--base-url", url, *common, "--goodput", "ttft:60000", "tpot:60000", "--save-result",
            "--result-dir", str(tmp_path / "new"), "--percentile-metrics", "ttft,e2el",
            "--metric-percentiles", "50,99.9", "--metadata", "a=1", "b=x=y",
        )  # fmt: skip
        assert code == 0, out + err
        for line in (
            "============ Serving Benchmark Result ============",
            "Successful requests:                     4",
            "Total generated tokens:                  20",
            "P99.9 E2EL (ms):",
            "Request goodput (req/s):",
            "  TTFT: request sent",
        ):
            assert line in out
        assert "ITL" not in out.split("Definitions:")[0]
        (file,) = (tmp_path / "new").iterdir()
        assert re.fullmatch(r"openai-infqps-tiny-\d{8}-\d{6}\.json", file.name)
        saved = json.loads(file.read_text())
        assert (saved["completed"], saved["a"], saved["b"]) == (4, "1", "x=y")
        assert "ttfts" not in saved
        assert str(file) in err

        code, out, _ = await run("--base-url", url, *common, "--json", "--save-detailed")
        assert code == 0
        assert len(strict_json.loads(out)["ttfts"]) == 4
        for _ in range(2):
            await run("--base-url", url, *common, "--append-result", "--result-filename",
                      str(tmp_path / "all"))  # fmt: skip
        assert [strict_json.loads(line)["completed"] for line in (tmp_path / "all").open()] == [
            4,
            4,
        ]


async def test_where_results_cannot_be_is_said_before_the_load(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, out, err = await run("--port", "1", "--save-result", "--result-dir", str(file / "new"))
    assert (code, out, err) == (1, "", f"octavo: {file}: is no folder\n")
    await run("--port", "1", "--save-result", "--result-dir", str(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == [file]  # nobody there: nothing to keep


async def test_the_result_is_kept_also_when_nobody_reads_it(tmp_path: Path) -> None:
    async with listening(FakeEngine()) as url:
        with open("/dev/full", "w") as full:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "from octavo.cli import main; main()", "bench", "serve",
                "--base-url", url, "--num-prompts", "2", "--random-input-len", "8",
                "--random-output-len", "4", "--save-result", "--result-dir", str(tmp_path),
                stdout=full, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, err = await child.communicate()
    assert child.returncode == 1
    assert "a disk is full" in err.decode()
    (file,) = tmp_path.iterdir()
    assert strict_json.loads(file.read_text())["completed"] == 2


async def test_ctrl_c_prints_the_result_so_far() -> None:
    import os
    import signal

    engine = FakeEngine(pause=0.05)
    async with listening(engine) as url:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from octavo.cli import main; main()", "bench", "serve",
            "--base-url", url, "--num-prompts", "50", "--random-input-len", "8",
            "--random-output-len", "4", "--max-concurrency", "2",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        while len(engine.submitted) < 6:
            await asyncio.sleep(0.02)
        os.kill(child.pid, signal.SIGINT)
        out, _ = await child.communicate()
    assert child.returncode == 130
    found = re.search(r"Unfinished requests \(interrupted\): +(\d+)", out.decode())
    assert 0 < int(found[1]) <= 2
    assert "Mean TTFT" in out.decode()


async def test_nobody_there_is_one_line() -> None:
    code, out, err = await run("--port", "1")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"octavo: http://127\.0\.0\.1:1: connection refused .*\n", err)


def given(*arguments: str) -> Settings:
    """The settings that these arguments make."""
    caught: list[Settings] = []
    original = command.settings

    def catch(values: Any) -> Settings:
        caught.append(original(values))
        raise ValueError("caught")

    command.settings = catch
    try:
        result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    finally:
        command.settings = original
    assert caught, result.output
    return caught[0]


def test_defaults_are_vllms() -> None:
    plain = given()
    assert (plain.base_url, plain.backend, plain.seed) == ("http://127.0.0.1:8000", "openai", 0)
    assert (plain.random_input_len, plain.random_output_len) == (1024, 128)
    assert (plain.request_rate, plain.burstiness) == (math.inf, 1.0)
    assert (plain.max_concurrency, plain.num_warmups, plain.ready_check_timeout_sec) == (None, 0, 0)
    assert (plain.metrics, plain.percentiles) == (("ttft", "tpot", "itl"), (99.0,))
    assert (plain.prefix_repetition_prefix_len, plain.prefix_repetition_num_prefixes) == (256, 10)
    assert plain == Settings(sampling=plain.sampling)
    assert set(plain.sampling.values()) == {None}


def test_options_reach_the_settings() -> None:
    found = given(
        "--endpoint-type", "openai-chat", "--host", "::1", "--port", "9", "--input-len", "7",
        "--output-len", "5", "--temperature", "0", "--extra-body", '{"stop": ["x"]}',
        "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "4",
        "--header", "a=b", "c=d", "--no-ignore-eos", "--goodput", "ttft:1", "tpot:2", "e2el:3",
        "--seed", "3", "--disable-tqdm",
    )  # fmt: skip
    assert (found.backend, found.base_url) == ("openai-chat", "http://[::1]:9")
    assert (found.random_input_len, found.random_output_len, found.custom_output_len) == (7, 5, 5)
    assert found.sampling["temperature"] == 0.0
    assert found.extra_body == {"stop": ["x"]}
    assert found.ramp.end == 4.0
    assert found.headers == {"a": "b", "c": "d"}
    assert found.goodput == {"ttft": 1, "tpot": 2, "e2el": 3}
    assert (found.ignore_eos, found.seed, found.progress) == (False, 3, False)


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--goodput", "ttft"], "KEY:MS"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--min-p", "inf"], "--min-p is inf"),
        (["tpot:5"], "belongs to no option"),
        (["--header", "a=b", "--metadata", "c=d", "e=f"], "repeat --header and --metadata"),
        (["--header", "a"], "NAME=VALUE"),
        (["--extra-body", "[]"], "not a JSON object"),
        (["--extra-body", "{"], "not JSON"),
        (["--request-rate", "0"], "--request-rate is from"),
        (["--ramp-up-strategy", "linear"], "needs"),
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy", "up"], "neither linear"),
        (["--prompt-format", "x"], "none of auto"),
        (["--base-url", "ftp://x"], "not a URL"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--dataset-name", "azure"], "needs a --dataset-path"),
        (["--trace-speedup", "0"], "--trace-speedup is from"),
        (["--percentile-metrics", "x"], "none of"),
    ],
)
def test_wrong_use_is_exit_code_2_and_says_why(arguments: list[str], about: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert result.exit_code == 2
    assert about in " ".join(result.output.split())


def test_help_has_examples_that_parse() -> None:
    import shlex

    text = CliRunner().invoke(app, ["bench", "serve", "--help"]).output
    for example in command.EXAMPLES:
        assert example in text
        words = shlex.split(example)[3:]
        if "azure" not in words:
            given(*words)
