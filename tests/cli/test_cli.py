"""The commands, on an engine that needs no model."""

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import octavo
import strict_json
from counting import CountingEngine, loaded, noted_prompts
from octavo.cli import _explain, app, main
from octavo.engine.config import EngineConfig, SettingsError
from octavo.loader.base import ChatTemplateError, CheckpointError
from octavo.server.config import ServeConfig
from paths import TINY

COMMANDS = ("serve", "chat", "generate", "pull", "inspect", "fidelity")


def run(*arguments: str, input: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=input)


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from octavo.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> CountingEngine:
    """`load_engine` gives this one; ``configs`` notes what it was asked for."""
    engine = CountingEngine()
    engine.configs = []  # type: ignore[attr-defined]

    def load_engine(model: Path, config: EngineConfig) -> Any:
        engine.configs.append((model, config))  # type: ignore[attr-defined]
        return loaded(engine)

    monkeypatch.setattr("octavo.engine.load.load_engine", load_engine)
    monkeypatch.setattr("octavo.loader.pull.resolve", Path)
    monkeypatch.setattr("octavo.cli.models.checkpoint", lambda model, chat: Path(model))
    return engine


def test_version() -> None:
    assert run("--version").output == f"octavo {octavo.__version__}\n"


def test_without_its_script() -> None:
    done = subprocess.run([sys.executable, "-m", "octavo", "--version"], capture_output=True)
    assert done.stdout.decode() == f"octavo {octavo.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    text = run(command, "--help").output
    assert "Examples:" in text
    examples = importlib.import_module(f"octavo.cli.{command}").EXAMPLES
    for example in examples:
        assert example in text
        assert f"octavo {command} " in example


def test_nothing_heavy_is_imported_for_the_help() -> None:
    script = (
        "import sys, octavo.cli; "
        "print(*{m.partition('.')[0] for m in sys.modules} & "
        "{'numpy', 'tokenizers', 'fastapi', 'uvicorn', 'huggingface_hub', 'jinja2', 'rich'})"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


def test_a_clone_without_the_native_module_says_what_to_run() -> None:
    assert "make native" in _explain(ImportError("cannot import name '_native' from 'octavo'"))
    assert "internal error" in _explain(ImportError("cannot import name 'other'"))


def test_a_missing_nanobind_backend_is_named() -> None:
    text = "Importing the extension '_native' failed because 'nanobind_backend' is not installed."
    assert _explain(ImportError(text)) == f"octavo: {text}"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("octavo ser", ["serve"]),
        ("octavo plan mem", ["memory"]),
        ("octavo serve smol", ["smollm2"]),
        ("octavo pull gemma3", ["gemma3-270m"]),
        ("octavo serve smollm2 --max-num-s", ["--max-num-seqs"]),
        ("octavo serve -tp 2 --max-num-s", ["--max-num-seqs"]),  # refused, but not while one types
        ("octavo quantize smollm2 --method g", ["gptq"]),
        ("octavo serve ./no-such-model", []),  # the shell completes names of files
    ],
)
def test_a_shell_completes(typed: str, completed: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    result = CliRunner().invoke(
        app, [], prog_name="octavo", env=words | {"_OCTAVO_COMPLETE": "complete_bash"}
    )
    assert result.output.split() == completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_the_shell_is_printed(shell: str) -> None:
    env = {"_OCTAVO_COMPLETE": f"source_{shell}"}
    result = CliRunner().invoke(app, [], prog_name="octavo", env=env)
    assert f"_OCTAVO_COMPLETE=complete_{shell}" in result.output


# --- generate ------------------------------------------------------------------------------------


def test_generate_streams(engine: CountingEngine) -> None:
    result = run("generate", "m.gguf", "x", "--max-tokens", "3")
    assert result.exit_code == 0
    assert result.output == "abc\n"
    assert engine.closed


def test_generate_several_in_order(engine: CountingEngine) -> None:
    result = run("generate", "m.gguf", "x", "-", "-n", "2", "--max-tokens", "2", input="from stdin")
    assert result.output == "ab\n---\n" * 3 + "ab\n"
    assert engine.most_at_once == 2  # all in one batch


def test_generate_json(engine: CountingEngine) -> None:
    result = run("generate", "m.gguf", "one", "three", "--max-tokens", "4", "--json")
    lines = [strict_json.loads(line) for line in result.stdout.splitlines()]
    assert lines[0] == {
        "text": "abcd",
        "token_ids": list(b"abcd"),
        "finish_reason": "length",
        "stop_reason": None,
        "usage": {
            "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "cached_tokens": 0,
        },
    }  # fmt: skip
    assert lines[1]["usage"]["prompt_tokens"] == 5


def test_generate_json_with_choices_and_logprobs(engine: CountingEngine) -> None:
    result = run("generate", "m", "x", "-n", "2", "--max-tokens", "1", "--logprobs", "1", "--json")
    output = strict_json.loads(result.stdout)
    assert [choice["text"] for choice in output["choices"]] == ["a", "a"]
    assert output["usage"]["completion_tokens"] == 2
    assert output["logprobs"] == [
        [
            {"token_id": 97, "logprob": -0.5, "rank": 2, "decoded_token": "a"},
            {"token_id": 122, "logprob": -0.25, "rank": 1, "decoded_token": "z"},
        ]
    ]


@pytest.mark.parametrize("option", ["--logprobs", "--prompt-logprobs"])
def test_what_only_json_shows_needs_json(engine: CountingEngine, option: str) -> None:
    result = run("generate", "m", "x", option, "1")
    assert result.exit_code == 2
    assert f"{option} needs --json" in result.output


def test_generate_chat(engine: CountingEngine) -> None:
    result = run(
        "generate", "m", "hi", "--chat", "--system", "be brief", "--json", "--max-tokens", "1"
    )
    prompt = "system: be brief\nuser: hi\nassistant: "
    assert strict_json.loads(result.stdout)["usage"]["prompt_tokens"] == len(prompt)


def test_generate_passes_everything_on(engine: CountingEngine) -> None:
    seen = []
    check = engine.check
    engine.check = lambda request: seen.append(request.params) or check(request)  # type: ignore
    result = run(
        "generate", "m", "x", "--temperature", "0.5", "--top-k", "5", "--top-p", "0.9",
        "--min-p", "0.1", "--seed", "3", "--stop", "a", "--stop", "b", "--stop-token-ids", "1,2",
        "--logit-bias", "7=-1.5", "--logit-bias", "8=2", "--ignore-eos", "--max-tokens", "2",
        "--banned-token-ids", "9", "--presence-penalty", "-1", "--no-skip-special-tokens",
        "--top-n-sigma", "1.5",
        "--max-model-len", "1k", "--kv-cache-memory", "64MiB", "--threads", "1",
        "--no-enable-prefix-caching", "--memory-utilization", "0.25", "--max-num-seqs", "4",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert seen == [
        octavo.SamplingParams(
            temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, seed=3, stop=("a", "b"),
            stop_token_ids=(1, 2), logit_bias={7: -1.5, 8: 2.0}, ignore_eos=True, max_tokens=2,
            banned_token_ids=(9,), presence_penalty=-1.0, skip_special_tokens=False,
            top_n_sigma=1.5,
        )
    ]  # fmt: skip
    assert engine.configs == [  # type: ignore[attr-defined]
        (
            Path("m"),
            EngineConfig(
                max_model_len=1000, kv_cache_memory_bytes=64 << 20, threads=1,
                enable_prefix_caching=False, memory_utilization=0.25, max_num_seqs=4,
            ),
        )
    ]  # fmt: skip


def test_generate_failure_is_told(engine: CountingEngine) -> None:
    result = run("generate", "m", "fail", "x", "--max-tokens", "3")
    assert result.exit_code == 1
    assert "prompt 1 failed: it was told to" in result.stderr
    assert result.stdout == "a\n---\nabc\n"


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "m", "--tensor-parallel-size", "2"), "No such option: --tensor-parallel-size"),
        (("serve", "m", "--port", "99999"), "--port is 99999"),
        (("serve", "m", "--max-model-len", "8q"), "'8q' is not a size"),
        (("serve", "m", "--max-model-len", "1"), "--max-model-len is 1, below 2"),
        (("serve", "m", "--uvicorn-log-level", "loud"), "--uvicorn-log-level is 'loud'"),
        (("serve",), "Missing argument"),
        (("generate", "m"), "Missing argument"),
        (("generate", "m", "x", "--logit-bias", "5"), "not ID=VALUE"),
        (("generate", "m", "x", "--system", "s"), "--system needs --chat"),
        (("generate", "m", "-", "-"), "- can be given once"),
        (("generate", "m", "x", "--top-p", "2"), "--top-p is 2.0; it must be a number above 0"),
        (
            ("generate", "m", "x", "--top-n-sigma", "-3"),
            "--top-n-sigma is -3.0; it must be a number",
        ),
        (("generate", "m", "x", "-n", "0"), "--n is 0; it must be an integer from 1 to 128"),
        (("chat", "m", "--min-tokens", "9", "--max-tokens", "3"), "more than --max-tokens, 3"),
        (("speculate", "m", "x", "--stop-token-ids", "-1"), "--stop-token-ids contains -1"),
        (("generate", "m", "x", "-n", "3", "--max-num-seqs", "2"), "more than --max-num-seqs 2"),
        (("speculate", "m", "x", "--max-num-batched-tokens", "1"), "--max-num-batched-tokens of 2"),
        (("pull",), "name a model"),
        (("pull", "--list", "smollm2"), "it takes no names"),
        (("nonsense",), "No such command"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_standard_input_must_be_text(engine: CountingEngine) -> None:
    result = run("generate", "m", "-", input=b"a\xff")
    assert result.exit_code == 2
    assert "standard input is not UTF-8, from byte 1" in result.stderr


def test_an_error_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none.gguf")
    monkeypatch.setenv("OCTAVO_DEBUG", "0")
    for command in (("generate", missing, "x"), ("serve", missing), ("inspect", missing)):
        monkeypatch.setattr(sys, "argv", ["octavo", *command])
        with pytest.raises(SystemExit, match="1"):
            main()
        assert capsys.readouterr() == ("", f"octavo: {missing}: no such file or folder\n")
    assert "Traceback" in process("inspect", missing, OCTAVO_DEBUG="1").stderr


def test_no_memory_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, engine: CountingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(model: Path, config: EngineConfig) -> Any:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr("octavo.engine.load.load_engine", full)
    monkeypatch.setattr(sys, "argv", ["octavo", "generate", "m", "x"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err.startswith("octavo: out of memory")


def test_a_cache_that_cannot_be_written_names_its_variable(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("in the way")
    done = process("pull", "smollm2", OCTAVO_HOME=str(tmp_path / "home"), OCTAVO_DEBUG="0")
    assert done.returncode == 1
    assert re.fullmatch(r"octavo: .*home/models.*OCTAVO_HOME.*\n", done.stderr)
    error = NotADirectoryError(20, "Not a directory", str(tmp_path / "home" / "limits"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
        assert _explain(error).endswith("(OCTAVO_HOME moves what Octavo keeps)")
    assert _explain(OSError(28, "No space left on device")) == (
        "octavo: a disk is full: No space left on device"
    )


def test_settings_are_flags_and_models_have_their_own_names() -> None:
    assert _explain(SettingsError("threads is 0, below 1")) == "octavo: --threads is 0, below 1"
    said = "seed has no weights; ./max_model_len.gguf neither"
    assert _explain(CheckpointError(said)) == f"octavo: {said}"


def test_an_instruction_set_of_the_environment_is_named_by_its_variable() -> None:
    for command in ("memory", "quantization"):
        done = process("plan", command, "llama-3-8b", OCTAVO_ISA="zz")
        assert done.returncode == 1
        *_, error = done.stderr.splitlines()  # the machine's limits may be measured before
        assert error.startswith("octavo: OCTAVO_ISA: unknown instruction set 'zz'; ")


def test_text_that_is_none_is_refused(engine: CountingEngine) -> None:
    for command in (["generate", "m", "a\udcff"], ["speculate", "m", "a\udcff"]):
        result = run(*command)
        assert result.exit_code == 2
        assert "'PROMPT': it is not UTF-8, from character 2" in result.stderr
    assert "'--system'" in run("chat", "m", "--system", "\udcff").stderr


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_a_terminal_that_knows_no_utf8(locale: str) -> None:
    page = process("serve", "--help", LC_ALL=locale, PYTHONIOENCODING="ascii")
    assert (page.returncode, page.stderr) == (0, "")
    shown = process("inspect", str(TINY), LC_ALL=locale, PYTHONIOENCODING="ascii")
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize(
    ("environment", "written"),
    [
        ({"LC_ALL": "C"}, b"\xff\xc3\xa9"),
        ({"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8"}, rb"\udcff" + b"\xc3\xa9"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0"}, rb"\udcff\xe9"),
    ],
)
def test_nothing_is_lost_of_a_path_that_is_not_text(
    environment: dict[str, str], written: bytes
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import octavo.cli; octavo.cli.app = lambda **_: print('\\udcff\\xe9', end='');"
            "octavo.cli.main()",
        ],
        capture_output=True,
        env={"PYTHONIOENCODING": ""} | os.environ | environment,
    )
    assert (done.stdout, done.stderr) == (written, b"")


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    result = process("inspect", str(path), OCTAVO_DEBUG="0")
    assert result.returncode == 1
    assert re.fullmatch(r"octavo: .*broken\.gguf.*\n", result.stderr)


def test_pull_list_and_unknown(tmp_path: Path) -> None:
    listed = process("pull", "--list", OCTAVO_HOME=str(tmp_path))
    assert re.search(r"smollm2 .*\n.*not here: 93 MB to fetch", listed.stdout)
    result = process("pull", "smolm2", OCTAVO_HOME=str(tmp_path), OCTAVO_DEBUG="0")
    assert result.returncode == 1
    assert "did you mean smollm2?" in result.stderr
    result = process("pull", "smollm2", OCTAVO_HOME=str(tmp_path), OCTAVO_OFFLINE="1")
    assert result.returncode == 1
    assert "downloads are off" in result.stderr


# --- serve and chat ------------------------------------------------------------------------------


def test_serve_hands_over(monkeypatch: pytest.MonkeyPatch, engine: CountingEngine) -> None:
    seen = []

    def fake_run(model: Path, engine: EngineConfig, config: ServeConfig) -> int:
        seen.append((model, engine, config))
        return 3

    monkeypatch.setattr("octavo.server.process.run", fake_run)
    result = CliRunner().invoke(
        app,
        ["serve", "m", "--port", "0", "--served-model-name", "a", "--max-num-queued-reqs", "9"],
        env={"OCTAVO_API_KEY": "secret"},
    )
    assert result.exit_code == 3
    run("serve", "m")
    assert seen == [
        (
            Path("m"),
            EngineConfig(max_num_queued_reqs=9),
            ServeConfig(port=0, served_model_name=("a",), api_key=("secret",)),
        ),
        (Path("m"), EngineConfig(), ServeConfig(served_model_name=("m",))),
    ]


def test_chat_keeps_the_conversation(engine: CountingEngine) -> None:
    prompts = noted_prompts(engine)
    lines = [
        "hi", "", "again", "/stats", "/system be brief", "hello", "/reset", "/nonsense", "/help",
        "x" * 2000, "bye", "/exit", "never",
    ]  # fmt: skip
    result = run("chat", "m", "--max-tokens", "2", input="\n".join(lines))
    assert result.exit_code == 0, result.output
    assert result.stdout == "ab\n" * 4
    assert prompts[:3] == [
        "user: hi\nassistant: ",
        "user: hi\nassistant: ab\nuser: again\nassistant: ",
        "system: be brief\nuser: hello\nassistant: ",
    ]
    # What was refused is not kept.
    assert prompts[-1] == "system: be brief\nuser: bye\nassistant: "
    for text in ("2 new tokens", "/nonsense is not a command", "Ctrl-C stops", "more than 1000"):
        assert text in result.stderr


def test_ctrl_c_keeps_the_conversation(engine: CountingEngine) -> None:
    prompts = noted_prompts(engine)
    steps = 0

    def press() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)

    engine.on_step = press
    result = run("chat", "m", "--max-tokens", "1000", input="hi\nagain\n/exit\n")
    assert result.exit_code == 0, result.output
    assert engine.aborted == ["0"]
    assert prompts[1] == "user: hi\nassistant: abc\nuser: again\nassistant: "
    assert "(stopped by Ctrl-C)" in result.stderr


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, engine: CountingEngine) -> None:
    engine.on_step = lambda: os.kill(os.getpid(), signal.SIGINT)
    result = run("generate", "m", "x", "--max-tokens", "1000")
    assert (result.exit_code, result.stderr) == (130, "octavo: interrupted\n")
    assert engine.closed

    def load_engine(model: Path, config: EngineConfig) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.engine.load.load_engine", load_engine)
    for command in ("generate m x", "chat m", "speculate m x"):
        result = run(*command.split())
        assert (result.exit_code, result.output) == (130, "octavo: interrupted\n"), command


@pytest.mark.parametrize("command", ["chat", "generate --chat hi", "speculate --chat hi"])
def test_a_base_model_is_refused_before_it_is_loaded(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.load.load_engine", None)
    name, *options = command.split()
    result = run(name, str(TINY), *options, input="hi\n")
    assert isinstance(result.exception, ChatTemplateError)
    assert "tiny-llama.gguf has no chat template" in str(result.exception)
    assert "octavo generate" in str(result.exception)
