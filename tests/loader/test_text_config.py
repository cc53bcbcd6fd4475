"""Folders of models that see, of which the language model is loaded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loader.quantized_writer import refused
from octavo.loader import load
from oracle.tiny_folders import TEXT, folder


def renamed(path: Path, prefix: str, head: str) -> None:
    """The tensors of the language model under another prefix; no others."""
    weights = load_file(path / "model.safetensors")
    old, language = "language_model.", "language_model.model."
    names = {
        name: name.replace(language, prefix).replace(old + "lm_head", head) for name in weights
    }
    save_file({names[name]: value for name, value in weights.items()}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head"),
        ("language_model.", "lm_head"),
        ("model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
    ],
)
@pytest.mark.parametrize("name", ["gemma3-nested", "mistral3"])
def test_names_of_the_language_models_tensors(
    name: str, prefix: str, head: str, tmp_path: Path
) -> None:
    whole = load(folder(name, tmp_path / "a"))
    path = folder(name, tmp_path / "b")
    renamed(path, prefix, head)
    found = load(path)
    assert found.weights.keys() == whole.weights.keys()
    for role, weight in whole.weights.items():
        assert np.array_equal(weight.data, found.weights[role].data), role
    assert "only the language model is loaded, not what sees pictures or hears" in found.notes


def test_it_ends_where_either_part_says_so(tmp_path: Path) -> None:
    text: dict[str, Any] = {"eos_token_id": [3, 4]}
    path = folder("gemma3-nested", tmp_path / "m", {"eos_token_id": 7, TEXT: text})
    assert load(path).tokenizer.eos_token_ids == {3, 4, 7}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gemma3-nested", {TEXT: {"hidden_size": None}}, "text_config: hidden_size is null"),
        ("gemma3-nested", {TEXT: None}, "text_config is null"),
        (
            "gemma3-nested",
            {"architectures": ["Gemma3ForCausalLM"]},
            "Gemma3ForConditionalGeneration",
        ),
        ("mistral3", {TEXT: {"model_type": "llama"}}, "model_type 'llama' is not supported"),
        ("mistral3", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not a boolean"),
        ("mistral3", {TEXT: {"per_layer_config": {}}}, "per_layer_config {} is not supported"),
        ("mistral3", {"transformers_weights": "x"}, "transformers_weights 'x' is not supported"),
    ],
)
def test_faults_are_named(name: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = folder(name, tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (path / "config.json").write_text(json.dumps(config))
    assert reason in refused(path)


def test_what_such_a_model_does_not_heed_is_noted(tmp_path: Path) -> None:
    """transformers caps logits of the text model alone."""
    path = folder("gemma3-nested", tmp_path / "m", {TEXT: {"final_logit_softcapping": 3.0}})
    found = load(path)
    assert found.config.logits_softcap == 0.0
    assert any("final_logit_softcapping is passed over" in note for note in found.notes)
