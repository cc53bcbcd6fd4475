"""What users type, and what becomes of it."""

import dataclasses
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli import options
from octavo.cli.options import named_flags
from octavo.cli.serve import OFFLOAD_OPTIONS, SERVE_OPTIONS, serve_config
from octavo.engine.config import EngineConfig
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import LatencyTarget
from octavo.server.config import ServeConfig


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("8Ki", 8192),
        ("1.5K", 1536),
        ("512MiB", 512 << 20),
        ("512MB", 512_000_000),
        ("512M", 512 << 20),
        ("512m", 512_000_000),
        ("4GiB", 4 << 30),
        ("4 GiB", 4 << 30),
        ("2T", 2 << 40),
        ("0", 0),
    ],
)
def test_amounts(text: str, value: int) -> None:
    assert options.amount(text) == value


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1e3", "4X", "K", "4GiBs", "1.5.2M", "٣", "inf", "1.5"]
)
def test_not_amounts(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a size"):
        options.amount(text)


@given(st.integers(0, 2**62))
def test_plain_amounts_are_exact(number: int) -> None:
    assert options.amount(str(number)) == number
    assert options.amount(f"{number}K") == number * 1024


def test_max_model_len() -> None:
    assert options.max_model_len("auto") is None
    assert options.max_model_len("8K") == 8192


def test_lists() -> None:
    assert options.id_list("1,2, 3") == (1, 2, 3)
    assert options.id_bias("314=-100") == (314, -100.0)
    assert options.strings(["a", '["b", "c"]']) == ("a", "b", "c")
    for parse, text in (
        (options.id_list, "1,,2"),
        (options.id_list, "one"),
        (options.id_bias, "5"),
        (options.id_bias, "a=b"),
        (lambda text: options.strings([text]), "[1"),
        (lambda text: options.strings([text]), "[1]"),
        (lambda text: options.strings([text]), "[" * 10**5),
        (lambda text: options.strings([text]), "[" + "1" * 5000 + "]"),
        (options.json_object, '{"a":' * 10**5),
        (options.json_object, '{"a":' + "1" * 5000 + "}"),
    ):
        with pytest.raises(typer.BadParameter, match="is not"):
            parse(text)


def test_engine_options_are_the_engine_configs() -> None:
    """Every field has an option, in one of the lists."""
    parameters = options.ENGINE_OPTIONS + options.POLICY_OPTIONS + options.QUEUE_OPTIONS
    names = [parameter.name for parameter in parameters + OFFLOAD_OPTIONS]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(EngineConfig))
    assert options.engine_config(dict.fromkeys(names)) == EngineConfig()


def test_sampling_options_are_the_sampling_params() -> None:
    given = {
        parameter.name: parameter.default
        for parameter in options.sampling_options(max_tokens=7, max_tokens_help="7")
    }
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields - given.keys() == {"n", "logprobs", "prompt_logprobs"}
    assert options.sampling_params(given) == SamplingParams(max_tokens=7)


def test_serve_options_are_the_serve_configs() -> None:
    given = {parameter.name: parameter.default for parameter in SERVE_OPTIONS}
    assert serve_config(given) == ServeConfig()
    given |= {
        "api_key": ["a", "b"],
        "allowed_origins": ['["https://x", "https://y"]'],
        "disable_fastapi_docs": True,
        "uvicorn_log_level": "debug",
    }
    config = serve_config(given)
    assert config.api_key == ("a", "b")
    assert config.allowed_origins == ("https://x", "https://y")
    assert not config.docs
    assert config.log_level == "debug"


def test_keys_and_targets_of_a_server(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"keys": [{"name": "chat", "key": "secret", "weight": 2}]}')
    given = {parameter.name: parameter.default for parameter in SERVE_OPTIONS}
    given |= {"api_key": ["a"], "api_key_file": file, "slo": "ttft=2000,tpot=50"}
    config = serve_config(given)
    assert [(key.name, key.weight) for key in config.keys] == [("key-1", 1.0), ("chat", 2.0)]
    assert config.slo == LatencyTarget(ttft=2.0, tpot=0.05)
    for wrong, why in (
        ({"api_key_file": tmp_path / "none"}, "none: No such file"),
        ({"api_key_file": tmp_path}, "Is a directory"),
        ({"slo": "itl=5"}, "'itl' is none of ttft, tpot, e2el"),
        ({"api_key": ["secret"]}, "'key-1' and 'chat' are the same key"),
    ):
        with pytest.raises(ValueError, match=why):
            serve_config(given | wrong)


def test_a_key_of_an_option_appears_once() -> None:
    with pytest.raises(typer.BadParameter, match="'method' appears twice"):
        options.json_object('{"method": "ngram", "method": "suffix"}')


@pytest.mark.parametrize(
    ("message", "options", "said"),
    [
        ("lower max_num_seqs or block_size", (), "lower --max-num-seqs or --block-size"),
        ("top_p is 2; it must be …", (), "--top-p is 2; it must be …"),
        ("5 prompt tokens + 9 max_tokens", (), "5 prompt tokens + 9 max_tokens"),
        ("min_tokens is 9, more than max_tokens, 3", ("min_tokens", "max_tokens"),
         "--min-tokens is 9, more than --max-tokens, 3"),
        ("threads is 0, below 1", (), "--threads is 0, below 1"),
        ("threads of a pool; isa or else", (), "threads of a pool; isa or else"),
        ("port is 70000, outside 0 to 65535", ("port",), "--port is 70000, outside 0 to 65535"),
        ("quantization 'int3' is not supported", (), "--quantization 'int3' is not supported"),
        ("log_level is 'x'", ("uvicorn_log_level",), "--uvicorn-log-level is 'x'"),
        ("x_max_num_seqs, --max-num-seqs", (), "x_max_num_seqs, --max-num-seqs"),
        ("lower max_num_seqs. Or:", (), "lower --max-num-seqs. Or:"),
        ("./max_model_len.gguf, max_model_len/x: is no model", (),
         "./max_model_len.gguf, max_model_len/x: is no model"),
    ],
)  # fmt: skip
def test_settings_have_the_names_of_their_flags(
    message: str, options: tuple[str, ...], said: str
) -> None:
    assert named_flags(message, *options) == said
