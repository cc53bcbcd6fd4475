"""`octavo simulate`: its loads, its result, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import octavo
import strict_json
from octavo.cli import app, main
from octavo.cli.simulate import DEFAULT_GOODPUT
from octavo.scheduler.policies.config import POLICIES

ON = ("--model", "llama-3-8b", "--device", "h100")
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = HEADER + "".join(
    f"2023-11-16 18:15:{second:02}.5000000,{100 + 7 * second},{5 + second}\n"
    for second in range(20)
)


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["simulate", *ON, *arguments])
    assert result.exit_code == code, result.output
    return result


def figures(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = strict_json.loads(run("--json", *arguments).stdout)
    return found


def refused(*arguments: str, capsys: Any, monkeypatch: Any) -> str:
    """The line on standard error of a command that does not run."""
    monkeypatch.setattr(sys, "argv", ["octavo", "simulate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code not in (0, None)
    out, err = capsys.readouterr()
    assert not out
    message = err + (ended.value.code if isinstance(ended.value.code, str) else "")
    assert "internal error" not in message
    return " ".join(message.replace("│", " ").split())


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


def test_the_fields_that_programs_read(azure: Path) -> None:
    found = figures("--trace", str(azure))
    assert found["requests"] == found["completed"] == 20
    assert found["total_output_tokens"] == sum(range(5, 25))
    assert found["output_throughput"] == found["total_output_tokens"] / found["duration"]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
    assert found["slo"] == {"ttft_ms": 500, "tpot_ms": 50}
    assert DEFAULT_GOODPUT == ("ttft:500", "tpot:50")
    assert found["request_goodput"] == pytest.approx(20 / found["duration"])
    assert 0 < found["kv_waste"] < 0.1
    assert found["saturated"] is False
    assert found["last_arrival"] == 19.0
    read, basis = found["notices"]
    assert read == "trace azure.csv: 20 requests, read as azure"
    assert basis.startswith("figures of H100 SXM 80 GB, not measured; predictions assume ")


def test_goodput_is_said_as_in_bench_serve(azure: Path) -> None:
    both = figures("--trace", str(azure), "--goodput", "ttft:0.001", "tpot:50")
    assert both["slo"] == {"ttft_ms": 0.001, "tpot_ms": 50}
    assert both["request_goodput"] == 0
    assert figures("--trace", str(azure), "--goodput", "e2el:1e9")["good"] == 20


def test_objectives_and_models_may_be_said_as_elsewhere(azure: Path) -> None:
    found = figures("--trace", str(azure), "--slo", "ttft=100,e2el=9000")
    assert found["slo"] == {"ttft_ms": 100, "e2el_ms": 9000}
    arguments = ["simulate", "llama-3-8b", "--device", "h100", "--trace", str(azure), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert strict_json.loads(result.stdout)["ttft_ms"] == found["ttft_ms"]


def test_windows_and_speed_are_those_of_bench_serve(azure: Path) -> None:
    found = figures("--trace", str(azure), "--trace-start", "5", "--trace-duration", "10",
                    "--trace-speedup", "2", "--max-output-len", "8")  # fmt: skip
    assert (found["requests"], found["last_arrival"]) == (10, 4.5)
    assert found["total_output_tokens"] == 10 * 8
    assert any("answers cut to 8 tokens" in notice for notice in found["notices"])


def test_answers_that_max_tokens_cuts_are_counted(azure: Path) -> None:
    found = figures("--trace", str(azure), "--max-tokens", "20")
    assert found["total_output_tokens"] == sum(min(tokens, 20) for tokens in range(5, 25))
    assert found["notices"][1:-1] == [
        "--max-tokens 20 cuts 4 of 20 answers (290 tokens in the load, 280 asked)"
    ]
    assert len(figures("--trace", str(azure), "--max-tokens", "24")["notices"]) == 2


def test_what_bench_serve_wrote_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    detailed = {
        "num_prompts": 3, "start_times": [2.5, 1.0, 0.5], "input_lens": [30, 20, 10],
        "output_lens": [6, 0, 4], "errors": ["", "HTTP 503: full", ""],
    }  # fmt: skip
    path.write_text(json.dumps(detailed, indent=2))
    assert figures("--trace", str(path))["requests"] == 2
    path.write_text(json.dumps(detailed))
    found = figures("--trace", str(path))
    assert (found["requests"], found["last_arrival"]) == (2, 2.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (40, 10)
    assert found["notices"][1] == "1 requests that failed have no answer's length: left out"


def test_synthetic_requests_share_their_prefixes() -> None:
    found = figures("--dataset-name", "prefix_repetition", "--num-prompts", "20",
                    "--request-rate", "10", "--prefix-repetition-num-prefixes", "2",
                    "--prefix-repetition-output-len", "8")  # fmt: skip
    assert found["requests"] == 20
    assert found["prefix_hits"] == 18 * 256
    off = figures("--dataset-name", "prefix_repetition", "--num-prompts", "20",
                  "--request-rate", "10", "--prefix-repetition-num-prefixes", "2",
                  "--prefix-repetition-output-len", "8", "--no-enable-prefix-caching")  # fmt: skip
    assert off["prefix_hits"] == 0
    assert off["tokens_per_step"] > found["tokens_per_step"]


def test_techniques_are_switched_from_the_command() -> None:
    load = ("--num-prompts", "40", "--random-input-len", "200", "--random-output-len", "50",
            "--random-range-ratio", "0.9", "--max-num-seqs", "8")  # fmt: skip
    plain, static, reserved, whole, guessed = (
        figures(*load, *technique)
        for technique in (
            (), ("--batching", "static"), ("--memory", "reserve", "--max-tokens", "200"),
            ("--no-enable-chunked-prefill",),
            ("--speculative-acceptance", "0.9", "--num-speculative-tokens", "3"),
        )
    )  # fmt: skip
    assert static["output_throughput"] < 0.8 * plain["output_throughput"]
    assert reserved["kv_waste"] > 0.3 > 0.06 > plain["kv_waste"]
    assert reserved["settings"]["enable_prefix_caching"] is False
    assert whole["settings"]["max_num_batched_tokens"] == 8192
    assert guessed["output_throughput"] > 1.5 * plain["output_throughput"]
    assert guessed["speculation"]["tokens_per_pass"] > 2.5


def test_weights_are_rounded_as_serve_would() -> None:
    """Fewer bytes to read for a token, and more room for the cache."""
    load = ("--num-prompts", "3", "--input-len", "50", "--output-len", "20")
    stored, rounded = (figures(*load, *more) for more in ((), ("--quantization", "int4")))
    assert rounded["weight_bytes"] == 4_830_445_568
    assert rounded["settings"]["kv_blocks"] > 1.1 * stored["settings"]["kv_blocks"]
    # As published of Qwen2.5 7B on an A100: 84 tokens/s in bf16, 148 to 154 in 4 bits.
    assert 0.45 < rounded["tpot_ms"]["p50"] / stored["tpot_ms"]["p50"] < 0.65
    twice = run(*load, "--quantization", "int4", "--format", "q4_0", code=2)
    assert "give one" in " ".join(twice.output.replace("│", " ").split())


def test_people_see_what_was_assumed_and_what_came_of_it(azure: Path) -> None:
    shown = run("--trace", str(azure), "--price", "2").output
    for part in (
        "figures as published or given, not measured",
        "20 of 20 served, 166 tokens in and 14 out on average", "goodput",
        "within TTFT 500 ms, TPOT 50 ms: 100.0 % of all", "saturated     no", "to the first token",
        "waste", "preemptions", "at 2 an hour", "continuous batching, paged memory",
    ):  # fmt: skip
        assert part in shown, shown


CLASSES = (
    "--num-prompts", "120", "--input-len", "100", "--output-len", "30", "--request-rate", "35",
    "--max-num-seqs", "4", "--class", "chat:share=1,ttft=300,tpot=50",
    "--class", "bulk:share=3,priority=5,weight=0.5,slo=none",
)  # fmt: skip


def test_classes_have_what_the_policy_gives_them() -> None:
    found = {policy: figures(*CLASSES, "--scheduling-policy", policy) for policy in POLICIES}
    for policy, result in found.items():
        classes, settings = result["classes"], result["settings"]
        assert settings["scheduling_policy"] == policy
        assert sum(each["requests"] for each in classes.values()) == 120
        assert classes["bulk"]["attainment"] == 1, "it was promised nothing"
        assert result["good"] == sum(each["good"] for each in classes.values())
        for field in ("priority", "weight"):
            unused = any(f"{field} has no effect" in each for each in result["notices"])
            assert unused is (field not in POLICIES[policy].request_fields)
    chat = {policy: result["classes"]["chat"] for policy, result in found.items()}
    assert chat["fcfs"]["attainment"] < 0.7
    for policy in ("priority", "fair", "deadline"):
        assert chat[policy]["attainment"] > 0.95, policy
        assert chat[policy]["ttft_ms"]["p50"] < 0.5 * chat["fcfs"]["ttft_ms"]["p50"]


def test_people_see_each_class() -> None:
    shown = run(*CLASSES).output
    assert "class          requests" in shown
    assert "TPOT 50 ms, or its class's own" in shown
    assert figures("--num-prompts", "2", "--output-len", "3")["classes"] == {}
    assert "no whole number" in run("--class", "a:clients=x", code=2).output.replace("\n", " ")


def test_files_are_written_also_when_nobody_reads_the_output(azure: Path, tmp_path: Path) -> None:
    timeline = tmp_path / "t.json"
    command = "from octavo.cli import main; main()"
    arguments = ["simulate", *ON, "--trace", str(azure), "--timeline", str(timeline)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", command, *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OCTAVO_DEBUG": "0"},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith("octavo: a disk is full: No space left on device\n")
    assert json.loads(timeline.read_text())["traceEvents"]


def test_pictures_and_timelines_are_files(azure: Path, tmp_path: Path) -> None:
    plot, timeline = tmp_path / "p.svg", tmp_path / "t.json"
    run("--trace", str(azure), "--plot", str(plot), "--timeline", str(timeline))
    drawn = plot.read_text()
    assert "<svg" in drawn
    events = json.loads(timeline.read_text())["traceEvents"]
    assert sum(event["name"].startswith("request ") for event in events) == 20
    assert {event["ph"] for event in events} == {"M", "X", "C"}


def test_the_same_to_the_last_digit_whatever_the_hash_seed(tmp_path: Path) -> None:
    """Shared prefixes, preemptions and speculation, in processes that hash differently."""
    trace = tmp_path / "mooncake.jsonl"
    trace.write_text("".join(
        json.dumps({"timestamp": 20 * i, "input_length": 1100 + i, "output_length": 200 + i % 60,
                    "hash_ids": [i % 3, 10 + i % 5, 100 + i]}) + "\n"
        for i in range(40)
    ))  # fmt: skip
    code = "import sys; from octavo.cli import main; main()"
    command = [sys.executable, "-c", code, "simulate", *ON, "--trace", str(trace), "--json",
               "--kv-cache-memory", "600MiB", "--max-model-len", "2048",
               "--speculative-acceptance", "0.6"]  # fmt: skip
    path = str(Path(octavo.__file__).parents[1])
    both = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        both.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    found = strict_json.loads(outputs[0])
    assert found["prefix_hits"] > 0
    assert found["preemptions"] > 0
    assert found["speculation"]["accepted_tokens"] > 0


def test_another_seed_is_another_load() -> None:
    load = ("--num-prompts", "30", "--request-rate", "20", "--random-output-len", "20")
    assert figures(*load)["ttft_ms"] == figures(*load)["ttft_ms"]
    assert figures(*load)["ttft_ms"] != figures(*load, "--seed", "1")["ttft_ms"]


@pytest.mark.parametrize(
    ("text", "about"),
    [
        (HEADER + "2023-11-16 18:15:46,-3,5\n", ":2: ContextTokens is '-3', not a length"),
        (
            HEADER + "2023-11-16 18:15:46,3,5\n2023-11-16 18:15:44.5,3,5\n",
            ":3: TIMESTAMP is 1.5 s before the request above: the trace is not in order of time",
        ),
        (
            '{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n'
            '{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n',
            ":2: timestamp is 0.004 s before the request above",
        ),
        ('{"num_prompts": 4, "duration": 3}', "has no list start_times: write it with --save-det"),
        (
            '{"num_prompts": 1, "start_times": [Infinity], "input_lens": [1], "output_lens": [1], '
            '"errors": [""]}',
            "start_times[0] is inf, not seconds",
        ),
        (
            '{"num_prompts": 1, "start_times": [0], "input_lens": [-1], "output_lens": [1], '
            '"errors": [""]}',
            "input_lens[0] is -1, not a length",
        ),
    ],
)
def test_a_wrong_trace_is_named_by_line_and_field(
    text: str, about: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    said = refused(*ON, "--trace", str(path), capsys=capsys, monkeypatch=monkeypatch)
    assert said.startswith("octavo: ")
    assert about in said


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (("--model", "llama-3-8b", "--device", "abacus"), "abacus"),
        (("--model", "llama-3-8b", "--device", "t4"), "available - 14.96 GiB weights"),
        (("--model", "no-such-model", "--device", "h100"), "no-such-model"),
        ((*ON, "--trace", "missing.csv"), "missing.csv: No such file"),
        ((*ON, "--dataset-name", "result", "--trace", os.devnull), "is no regular file"),
        ((*ON, "--max-model-len", "9000"), "--max-model-len 9000 is more than the model's context"),
        ((*ON, "--goodput", "ttft:-1"), "0 or more milliseconds"),
        ((*ON, "--goodput", "ttft"), "is not KEY:MS"),
        ((*ON, "--goodput", "ttft:1", "--slo", "ttft=1"), "two names of one thing"),
        (("--device", "h100"), "which model?"),
        ((*ON, "smollm2"), "one model is simulated, not smollm2 and llama-3-8b"),
        ((*ON, "--batching", "dynamic"), "neither continuous nor static"),
        ((*ON, "--memory", "none"), "neither paged nor reserve"),
        ((*ON, "--memory", "reserve", "--enable-prefix-caching"), "is not shared"),
        ((*ON, "--speculative-acceptance", "1.5"), "from 0 to 1, not 1.5"),
        ((*ON, "--speculative-acceptance", "nan"), "from 0 to 1, not nan"),
        ((*ON, "--num-speculative-tokens", "4"), "needs --speculative-acceptance"),
        ((*ON, "--speculative-acceptance", "1", "--num-speculative-tokens", "65"), "from 1 to 64"),
        ((*ON, "--format", "q9"), "q9"),
        ((*ON, "--request-rate", "0"), "--request-rate is from 1e-06"),
        ((*ON, "--dataset-name", "sharegpt", "--trace", "x.json"), "--save-detailed"),
        ((*ON, "--dataset-name", "nonsense"), "is none of"),
        ((*ON, "--trace", "a", "--dataset-path", "b"), "two names of one thing"),
        ((*ON, "--plot", "x.gif"), "a plot is a file of .svg, .png, .pdf"),
        ((*ON, "--timeline", "x.txt"), "not a file of .json"),
        ((*ON, "--timeline", "/no/such/folder/x.json"), "there is no folder"),
        ((*ON, "--price", "-1"), "not from 10⁻⁶ to 10⁹ an hour"),
        ((*ON, "--price", "1e-320"), "not from 10⁻⁶ to 10⁹ an hour"),
        ((*ON, "--plot", "/no/such/folder/x.svg"), "there is no folder"),
        ((*ON, "--request-rate", "5", "--burstiness", "1e-300"), "--burstiness 1e-300"),
        ((*ON, "--request-rate", "1e-308", "--num-prompts", "5"), "--request-rate is from"),
        ((*ON, "--num-prompts", "1000000000000"), "--num-prompts"),
        ((*ON, "--random-input-len", "9999999999999"), "--random-input-len"),
        ((*ON, "--max-num-seqs", "1000000000000"), "--max-num-seqs"),
        ((*ON, "--trace-speedup", "1e-308", "--trace", "x"), "--trace-speedup is from"),
        (
            ("llama-3-8b", "--device", "memory=3000,bf16=900000,capacity=1e9"),
            "blocks of KV cache: at most 67,108,864 are simulated; give --device less capacity",
        ),
        (
            (*ON, "--num-prompts", "2", "--random-output-len", "99999999"),
            "none of the 2 requests could be served; request 0 was rejected: 1024 prompt tokens + "
            "99999999 max_tokens",
        ),
        ((*ON, "--max-num-seqs", "4096"), "--max-num-batched-tokens 2048 is below --max-num-seqs"),
        (
            (*ON, "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"),
            "--max-num-batched-tokens 4096 is below --max-model-len 8192",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(
    arguments: tuple[str, ...], about: str, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert about in refused(*arguments, capsys=capsys, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "command",
    [
        "simulate --model nonesuch",
        "simulate --model llama-3-8b --memory-utilization 3",
        "simulate --model llama-3-8b --plot load.txt",
        "simulate --model llama-3-8b --trace nonesuch.csv",
        "tune nonesuch --slo ttft=500",
        "plan roofline nonesuch",
        "plan roofline llama-3-8b --context 99999999",
        "plan quantization nonesuch",
        "plan batching nonesuch",
    ],
)
def test_what_can_be_refused_is_before_the_machine_is_measured(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.machine.limits.Limits.stored", lambda *_: pytest.fail("measured"))
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code != 0
    assert not isinstance(result.exception, pytest.fail.Exception), result.exception
