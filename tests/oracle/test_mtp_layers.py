"""Layers for multi-token prediction, from folders and GGUF files, against llama.cpp's logits."""

from pathlib import Path

import numpy as np
import pytest

from octavo.executor.reference import evaluate
from octavo.loader import load
from octavo.loader.base import CheckpointError
from octavo.loader.dequantize import dequantize
from octavo.models.families import mtp_program, program
from octavo.models.program import Float32, Program, Values
from oracle.mtp_folders import NAMES, RecordedMtp, mtp_folder, mtp_gguf, mtp_recorded


def passes(path: Path, recorded: RecordedMtp) -> Float32:
    """What `RecordedMtp.logits` has, by the ops' definitions."""
    checkpoint = load(path)
    stored = checkpoint.weights | checkpoint.mtp_weights()
    weights = {role: dequantize(weight) for role, weight in stored.items()}

    def run(of: Program, tokens: list[int], **values: Float32) -> Values:
        found: Values = dict(values)
        evaluate.run(of.ops, checkpoint.config, weights, found, np.array([tokens]))
        return found

    ids = recorded.ids.tolist()
    hidden = run(program(checkpoint.config), ids)["x"]
    rows = np.concatenate([np.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)
    while True:
        found = run(mtp_program(checkpoint.config), ids, hidden=rows)
        if len(ids) == len(recorded.logits):
            logits: Float32 = found["logits"][0]
            return logits
        ids.append(int(found["logits"][0, -1].argmax()))
        rows = np.concatenate([rows, found["x"][:, -1:]], axis=1)


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, tmp_path: Path) -> None:
    """Of every token of a text, and of drafts behind it."""
    expected = mtp_recorded(name)
    for path in mtp_folder(name, tmp_path / name), mtp_gguf(name, tmp_path / "model.gguf"):
        difference = np.abs(passes(path, expected) - expected.logits) / expected.logits.std()
        print(f"{path.name}: mean {difference.mean():.1e}, most {difference.max():.1e}")
        assert difference.mean() < 1e-5
        assert difference.max() < 1e-3


def test_layers_that_are_not_what_is_said(tmp_path: Path) -> None:
    name = "qwen3_5"
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers is -1, not an integer from 0"):
        load(mtp_folder(name, tmp_path / "negative", {"mtp_num_hidden_layers": -1}))
    two = load(mtp_folder(name, tmp_path / "two", {"mtp_num_hidden_layers": 2}))
    with pytest.raises(ValueError, match="two has 2 layers for multi-token prediction"):
        two.mtp_weights()
    none = load(mtp_folder(name, tmp_path / "none", {"mtp_num_hidden_layers": 0}))
    assert none.config.mtp_layers == 1  # as the tensors say
