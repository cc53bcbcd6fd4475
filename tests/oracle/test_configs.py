"""Drawn config.json files of every family, against transformers' recorded logits.

compare_configs.py recorded them, and compares many more where transformers is.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.executor.reference import evaluate
from octavo.loader import load
from octavo.loader.dequantize import dequantize
from octavo.models.families import program
from octavo.models.hf_type import TRANSFORMERS
from oracle.drawn_configs import MODEL_TYPES, around, ids_of, make_weights, write_folder
from paths import ORACLE

RECORDED: dict[str, Any] = json.loads(gzip.decompress((ORACLE / "configs.json.gz").read_bytes()))
CASES: list[dict[str, Any]] = RECORDED["cases"]
LIMIT = 1e-3  # of the logits' standard deviation; transformers sums in another order


@pytest.fixture(scope="module")
def logits() -> dict[str, np.ndarray]:
    with np.load(ORACLE / "configs.npz") as data:
        return dict(data)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_logits(index: int, logits: dict[str, np.ndarray], tmp_path: Path) -> None:
    case = CASES[index]
    config, seed = case["config"], case["seed"]
    shapes = {name: tuple(shape) for name, shape in case["shapes"].items()}
    path = tmp_path / "model"
    weights = make_weights(shapes, seed, around(config["model_type"]))
    write_folder(path, config, weights, len(weights["model.embed_tokens.weight"]))
    checkpoint = load(path)
    length = case["length"]
    made = program(checkpoint.config, max(length, checkpoint.config.default_length))
    values = {role: dequantize(weight) for role, weight in checkpoint.weights.items()}
    got = evaluate.logits(made, values, np.array([ids_of(seed, length)]))[0]
    wanted = logits[str(index)]
    assert np.abs(got[-len(wanted) :] - wanted).max() / wanted.std() < LIMIT, config


def test_every_family_and_spelling_is_among_them() -> None:
    configs = [case["config"] for case in CASES]
    assert {config["model_type"] for config in configs} == set(MODEL_TYPES)
    for key in ("rope_scaling", "rope_parameters"):
        values = [config[key] for config in configs if key in config]
        assert None in values
        assert {} in values
        assert any(values)
    assert any(c.get("rope_scaling") and c.get("rope_parameters") for c in configs)
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"):
        assert any(key not in config for config in configs)


def test_the_records_are_of_the_release_that_was_recorded() -> None:
    assert RECORDED["transformers"] == TRANSFORMERS
