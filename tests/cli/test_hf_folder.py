"""A Hugging Face folder from end to end: inspected, generating, served."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import strict_json
from listening import listening
from octavo.cli import app
from octavo.engine.config import EngineConfig
from octavo.engine.load import load_engine
from oracle.tiny_folders import talking_folder

START = "from octavo.cli import main; main()"
MEMORY = ("--kv-cache-memory", "4MiB", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_folder(tmp_path_factory.mktemp("hf") / "talking")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, *MEMORY])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_inspect(folder: Path) -> None:
    facts: dict[str, Any] = strict_json.loads(run("inspect", str(folder), "--json"))
    assert (facts["name"], facts["family"]) == ("talking", "qwen2")
    assert facts["tokenizer"] == "byte-level BPE"
    assert set(facts["stop_tokens"].values()) == {"<|im_end|>", "<|endoftext|>"}
    assert facts["chat_template"] is True
    # Nothing is widened but vectors.
    assert facts["stored_bytes"] == 2 * facts["parameters"]
    assert facts["stored_bytes_per_weight"] == 2.0
    assert 2.0 < facts["held_bytes_per_weight"] < 2.1
    assert facts["parts"]["norms"]["formats"].keys() == {"BF16"}
    assert facts["parts"]["norms"]["held_bytes_per_weight"] == 4.0
    assert facts["file_bytes"] > facts["stored_bytes"]
    loaded = load_engine(folder, EngineConfig(kv_cache_memory_bytes=4 << 20, max_num_seqs=8))
    assert loaded.weight_bytes == facts["weights_bytes"]
    assert loaded.max_model_len == facts["here"]["max_model_len"]
    loaded.engine.close()
    text = run("inspect", str(folder))
    assert re.search(r"embedding +\d[\d,]+ .* 2 → 2 +BF16", text)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[httpx.Client]:
    command = [sys.executable, "-c", START, "serve", str(folder), "--port", "0", *MEMORY]
    with listening(*command) as (url, said), httpx.Client(base_url=url, timeout=60) as client:
        for fact in ("threads", "instruction set", "kv cache", "tokens", "stop tokens"):
            assert any(fact in line for line in said)
        yield client


def test_served_as_generated(folder: Path, served: httpx.Client) -> None:
    """The same tokens over HTTP as from the command line, alone and in company."""
    prompts = ["The cat", "Once upon a time"]
    body = {"temperature": 0, "max_tokens": 12, "logprobs": 1, "return_token_ids": True}
    together = served.post("/v1/completions", json=body | {"prompt": prompts}).json()["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        alone = served.post("/v1/completions", json=body | {"prompt": prompt}).json()["choices"][0]
        assert alone | {"index": 0} == choice | {"index": 0}
        text = run("generate", str(folder), prompt, "--temperature", "0", "--max-tokens", "12")
        assert text.removesuffix("\n") == choice["text"].removesuffix("\n")


def test_chat_goes_through_the_folders_template(served: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    answer = served.post("/v1/chat/completions", json=chat).json()
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokens = served.post(
        "/tokenize", json={"prompt": rendered, "add_special_tokens": False}
    ).json()["tokens"]
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    body = {"prompt": rendered, "max_tokens": 4, "temperature": 0}
    text = served.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert answer["choices"][0]["message"]["content"] == text
