"""Heads that learn: from a model's answers to files that draft for it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import octavo.loader
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import load_engine
from octavo.llm import LLM
from octavo.loader.base import Checkpoint
from octavo.sampling.params import SamplingParams
from octavo.spec_decode.heads import read_heads
from octavo.tools.train import medusa_training
from octavo.tools.train.run import train
from paths import ORACLE

PROMPTS = ("abc", "hello", "xyz", "qrs")
MODEL = ORACLE / "tiny-llama-k.gguf"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return octavo.loader.load(MODEL)


def trained(out: Path, text: Path, **recipe: Any) -> dict[str, Any]:
    made = medusa_training.HeadRecipe(
        **{"heads": 3, "vocabulary": 60, "width": 64, "batch": 64, "epochs": 10} | recipe
    )
    return train(MODEL, out, made, text=text, num_prompts=40, max_tokens=20, threads=1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A few prompts; the last is held out: a random model's answer to it cannot be foreseen."""
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join([*PROMPTS, "held out"]))
    return path


@pytest.mark.parametrize("recurrent", [True, False])
def test_heads_learn_and_draft(
    checkpoint: Checkpoint, tmp_path: Path, text: Path, recurrent: bool
) -> None:
    pytest.importorskip("torch")
    report = trained(tmp_path / "heads", text, recurrent=recurrent, layers=2, epochs=200)
    assert len(report["top1"]) == len(report["top1_if_right_before"]) == 3
    assert report["answers"] == 5
    assert (report["prompts_left_out"], report["why_left_out"]) == (0, None)
    heads = read_heads(tmp_path / "heads", checkpoint)
    assert heads.recurrent is recurrent
    assert len(heads.token_map) == report["vocabulary"]
    prompts = [checkpoint.tokenizer.encode(each) for each in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "threads": 1}
    drafting = {"method": "medusa", "model": str(tmp_path / "heads"), "num_speculative_tokens": 3}
    with LLM(load_engine(checkpoint, EngineConfig(**settings))) as llm:
        expected = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
    with LLM(load_engine(checkpoint, EngineConfig(**settings, speculative_config=drafting))) as llm:
        found = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
        stats = llm.loaded.engine.stats()
    assert found == expected
    assert stats.accepted_tokens > 0.3 * stats.draft_tokens > 5


def test_the_same_seed_gives_the_same_heads(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("torch")
    reports = [
        trained(tmp_path / name, text, epochs=1, seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    for file in ("model.safetensors", "config.json"):
        files = [(tmp_path / name / file).read_bytes() for name in "abc"]
        assert files[0] == files[1] != files[2]
    assert reports[0]["top1"] == reports[1]["top1"]
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["training"]["recipe"]["seed"] == 1


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    one = tmp_path / "one.txt"
    one.write_text("abc\n")
    with pytest.raises(SettingsError, match="fewer than two answers"):
        trained(tmp_path / "heads", one)
    assert not (tmp_path / "heads").exists()


def test_prompts_that_are_too_long_are_counted(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("torch")
    text.write_text(text.read_text() + "\n" + "too long " * 500)
    report = trained(tmp_path / "heads", text, epochs=1)
    assert report["prompts_left_out"] == 1
    assert "tokens" in report["why_left_out"]


def test_a_folder_that_cannot_be_written_costs_no_training(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("octavo.tools.train.run.load_engine", load)
    with pytest.raises(OSError, match=r"prompts\.txt"):
        trained(text / "heads", text)
    with pytest.raises(AssertionError):
        trained(tmp_path / "new", text)
    assert not (tmp_path / "new").exists()


def test_without_torch_one_is_told_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SettingsError, match=r"-m pip install 'torch>="):
        medusa_training.import_torch()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"heads": 0}, "heads is 0"),
        ({"layers": 9}, "layers is 9"),
        ({"vocabulary": 1}, "vocabulary is 1"),
        ({"epochs": -1.0}, "epochs is -1"),
        ({"epochs": float("inf")}, "epochs is inf"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
    ],
)
def test_a_recipe_that_makes_no_heads_is_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        medusa_training.HeadRecipe(**wrong)
