"""What a model's files say of sampling, and who wins."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.engine.sampling_defaults import sampling_defaults
from octavo.llm import LLM
from octavo.loader.base import CheckpointError
from octavo.loader.generation_config import of_gguf
from octavo.sampling.params import SamplingParams
from paths import TINY

FILE = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "repetition_penalty": 1.05,
    "max_new_tokens": 300, "do_sample": True, "eos_token_id": [1, 2], "transformers_version": "5",
}  # fmt: skip
VALUES = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_tokens": 300,
}  # fmt: skip


def defaults(folder: Path, given: dict[str, Any], *more: Any) -> tuple[dict[str, Any], str]:
    checkpoint: Any = SimpleNamespace(path=folder, generation_config=given)
    return sampling_defaults(checkpoint, *more)


def test_supported_values_are_taken_and_others_named(tmp_path: Path) -> None:
    values, report = defaults(tmp_path, FILE | {"typical_p": 0.9, "num_beams": 4})
    assert values == VALUES
    for said in (
        *("temperature 0.6", "max_tokens 300", "generation_config.json"),
        "not applied: num_beams, typical_p (",
    ):
        assert said in report
    assert defaults(tmp_path, {}) == ({}, "")
    assert defaults(tmp_path, {"eos_token_id": 1, "do_sample": False}) == ({}, "")


def test_other_sources(tmp_path: Path) -> None:
    assert defaults(tmp_path, FILE, "vllm")[0] == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    assert defaults(tmp_path, FILE, str(tmp_path))[0] == {"top_k": 7}
    overridden, _ = defaults(tmp_path, FILE, "auto", {"top_k": 3, "min_p": 0.1})
    assert overridden == VALUES | {"top_k": 3, "min_p": 0.1}
    assert defaults(tmp_path, FILE, "vllm", {"top_k": 3})[0] == {"top_k": 3}
    with pytest.raises(CheckpointError, match=r"nothing/generation_config\.json: cannot be opened"):
        defaults(tmp_path, FILE, str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": "hot"}, {"temperature": -1}, {"temperature": True}, {"top_p": 0},
        {"top_p": float("nan")}, {"top_k": 1.5}, {"repetition_penalty": 0}, {"max_new_tokens": 0},
        {"min_p": [1]},
    ],
)  # fmt: skip
def test_bad_values_are_named(tmp_path: Path, bad: dict[str, Any]) -> None:
    name = next(iter(bad)).replace("max_new_tokens", "max_tokens")
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} is .*vllm leaves"):
        defaults(tmp_path, bad)


def test_the_keys_of_gguf_files() -> None:
    there = {"temp": 0.5, "top_k": 9, "penalty_repeat": 1.5, "mirostat": 2}
    file: Any = SimpleNamespace(
        get=lambda key, kind, default: there.get(key.removeprefix("general.sampling."), default)
    )
    assert of_gguf(file) == {"temperature": 0.5, "top_k": 9, "repetition_penalty": 1.5}


def test_a_request_without_params_is_drawn_as_the_model_says() -> None:
    with LLM(TINY, kv_cache_memory_bytes=8 << 20, max_num_seqs=4) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        llm.loaded.checkpoint.generation_config.update({"top_k": 1, "max_new_tokens": 5})
        assert llm.get_default_sampling_params() == SamplingParams(top_k=1, max_tokens=5)
        (given,) = llm.generate([[1, 2, 3]], use_tqdm=False)
        (greedy,) = llm.generate(
            [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False
        )
        assert given.outputs[0].token_ids == greedy.outputs[0].token_ids
        # A default that is more than the context has room for gives way to it.
        llm.loaded.checkpoint.generation_config["max_new_tokens"] = 1 << 20
        (longest,) = llm.generate([[1, 2, 3]], use_tqdm=False)
        assert len(longest.outputs[0].token_ids) <= llm.loaded.max_model_len - 3
        llm.loaded.checkpoint.generation_config["max_new_tokens"] = 5
        other = LLM(llm.loaded, generation_config="vllm", override_generation_config={"top_p": 0.5})
        assert other.get_default_sampling_params() == SamplingParams(top_p=0.5)
