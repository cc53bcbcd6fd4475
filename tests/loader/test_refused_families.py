"""Families that are known by name and refused, and what is wrong in files of those that are not."""

from pathlib import Path
from typing import Any

import pytest
from gguf_writer import FLOAT32, STRING, UINT32, tiny_llama

from loader.quantized_writer import refused
from octavo.loader import load
from octavo.loader.base import CheckpointError
from octavo.models.families import ARCHITECTURES, HF_TYPES, HF_WRAPPERS
from octavo.models.refused import REFUSED
from oracle.tiny_folders import TEXT, folder

ROPE = "rope_parameters"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_is_given(name: str, tmp_path: Path) -> None:
    assert name not in {*HF_TYPES, *HF_WRAPPERS, *ARCHITECTURES}
    path = folder("llama", tmp_path / "m", {"model_type": name})
    assert f"model_type {name!r} is not supported: {REFUSED[name]}" in refused(path)
    file = tiny_llama()
    file.set("general.architecture", STRING, name)
    with pytest.raises(CheckpointError) as error:
        load(file.write(tmp_path / "model.gguf"))
    assert f"architecture {name!r} is not supported: {REFUSED[name]}" in str(error.value)


def test_also_of_a_text_part(tmp_path: Path) -> None:
    path = folder("mistral3", tmp_path / "m", {TEXT: {"model_type": "mistral4"}})
    assert "text_config: model_type 'mistral4' is not supported: latent" in refused(path)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "rotated": ("smollm3", {"no_rope_layers": 4}, "no_rope_layers is not a list of 0 and 1"),
    "flags": ("smollm3", {"no_rope_layers": [2] * 5}, "no_rope_layers is not a list of 0 and 1"),
    "few": ("smollm3", {"no_rope_layers": [1] * 4}, "no_rope_layers has 4 numbers for 5 layers"),
    "interval": (
        "smollm3",
        {"no_rope_layers": None, "no_rope_layer_interval": 0},
        "no_rope_layer_interval is 0, not an integer from 1",
    ),
    "no window": (
        "smollm3",
        {"layer_types": ["sliding_attention"] * 5},
        "layer_types has sliding_attention, but",
    ),
    "no growth": ("ministral3", {ROPE: YARN}, "llama_4_scaling_beta is missing"),
    "shrinking": ("ministral3", {ROPE: YARN | {"llama_4_scaling_beta": -1.0}}, "by -1.0 from 32"),
    "no original context": (
        "ministral3",
        {ROPE: {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
        "original_max_position_embeddings is missing",
    ),
    "no logits": ("cohere2", {"logit_scale": 0}, "logit_scale is 0, not a positive number"),
    "epsilon": ("cohere2", {"layer_norm_eps": 0.0}, "norm_eps is 0.0"),
    "pattern": (
        "cohere2",
        {"layer_types": None, "sliding_window_pattern": 0},
        "sliding_window_pattern is 0, not an integer from 1",
    ),
    "a section for all": ("cohere2", {ROPE: {"full_attention": {}}}, "a section for each layer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_named(name: str, tmp_path: Path) -> None:
    family, changes, reason = WRONG[name]
    assert reason in refused(folder(family, tmp_path / "m", changes))


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("attention.temperature_scale", FLOAT32, 0.1),
        ("attention.sliding_window", UINT32, 16),
    ],
)
def test_keys_of_other_architectures_are_refused(
    key: str, kind: int, value: float, tmp_path: Path
) -> None:
    file = tiny_llama()
    file.set(f"llama.{key}", kind, value)
    with pytest.raises(CheckpointError, match=f"metadata key llama.{key} is .* is not supported"):
        load(file.write(tmp_path / "model.gguf"))
