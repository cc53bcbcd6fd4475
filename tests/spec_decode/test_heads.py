"""Files of heads: read as they were written, and refused by name when they are not."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import octavo.loader
from executor import tiny
from octavo.loader.base import Checkpoint, CheckpointError, WeightFormat
from octavo.loader.dequantize import dequantize
from octavo.spec_decode.heads import RECURRENT, fingerprint, read_heads
from paths import ORACLE
from spec_decode.random_heads import folder, tensors


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return octavo.loader.load(ORACLE / "tiny-llama-k.gguf")


@pytest.fixture(scope="module")
def other() -> Checkpoint:
    return octavo.loader.load(ORACLE / "tiny-llama-odd.gguf")


def test_heads_that_were_written_are_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = folder(tmp_path / "heads", checkpoint, recurrent=False, layers=2)
    heads = read_heads(path, checkpoint)
    model = checkpoint.config
    expected = tensors(model.hidden_size, model.vocab_size, recurrent=False, layers=2)
    assert not heads.recurrent
    assert heads.num_heads == 3
    assert heads.token_map.tolist() == expected["token_map"].tolist()
    assert heads.num_layers == 2
    assert len(heads.weights) == 3 * 2 * 2
    for name, weight in heads.weights.items():
        assert np.array_equal(dequantize(weight), expected[name])


def test_a_recurrent_head_that_was_written_is_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    heads = read_heads(folder(tmp_path / "heads", checkpoint), checkpoint)
    expected = tensors(checkpoint.config.hidden_size, checkpoint.config.vocab_size)
    assert heads.recurrent
    assert set(heads.weights) == {f"{name}.weight" for name in RECURRENT} | {"skip.bias"}
    for name, weight in heads.weights.items():
        assert np.array_equal(dequantize(weight), expected[name])


def test_other_names_of_the_counts_are_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = folder(tmp_path / "heads", checkpoint, recurrent=False)
    values = json.loads((path / "config.json").read_text())
    values["num_heads"] = values.pop("medusa_num_heads")
    values["num_hidden_layers"] = values.pop("medusa_num_layers")
    (path / "config.json").write_text(json.dumps(values))
    assert read_heads(path, checkpoint).num_heads == 3


@pytest.mark.parametrize(
    ("recurrent", "changes", "reason"),
    [
        (True, {"model_type": "eagle"}, "model_type is 'eagle'"),
        (True, {"hidden_size": 32}, "another model: hidden_size is 32"),
        (True, {"vocab_size": 71000}, "another model: vocab_size is 71000"),
        (True, {"vocab_size": "many"}, "vocab_size is 'many'"),
        (True, {"medusa_num_heads": 0}, "medusa_num_heads is 0"),
        (True, {"medusa_num_heads": True}, "medusa_num_heads is True"),
        (True, {"medusa_num_heads": 17}, "medusa_num_heads is 17"),
        (True, {"intermediate_size": 95}, "'gate.weight' has the shape"),
        (True, {"intermediate_size": 10**9}, "intermediate_size is 1000000000"),
        (True, {"truncated_vocab_size": 39}, "token_map"),
        (True, {"truncated_vocab_size": 10**9}, "truncated_vocab_size"),
        (True, {"recurrent": False}, "no tensor 'blocks.0.layers.0.weight'"),
        (True, {"recurrent": "yes"}, "recurrent is 'yes'"),
        (True, {"target": None}, "target does not say"),
        (True, {"target": "0" * 32}, "another model"),
        # Counts that are not the tensors'.
        (False, {"medusa_num_heads": 4}, "no tensor 'blocks.3"),
        (False, {"medusa_num_heads": 2}, "'blocks.2.layers.0.bias' has no part"),
        (False, {"medusa_num_layers": 10**9}, "medusa_num_layers is 1000000000"),
        (False, {"medusa_fc_bias": False}, "has no part"),
        (False, {"recurrent": True}, "no tensor"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, recurrent: bool, changes: dict[str, Any], reason: str
) -> None:
    path = folder(tmp_path / "heads", checkpoint, recurrent=recurrent)
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_heads(path, checkpoint)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("token_map", np.arange(40, dtype=np.int64)[::-1].copy(), "ascending"),
        ("token_map", np.arange(40, dtype=np.int64) - 1, "ascending"),
        ("token_map", np.arange(40, dtype=np.int64) + 10**9, "ascending"),
        ("token_map", np.zeros(40, np.int64), "ascending"),
        ("token_map", np.arange(40, dtype=np.float32), "type F32"),
        ("gate.weight", np.zeros((3, 3), np.float16), "shape"),
        ("skip.bias", np.zeros(3, np.float16), "shape"),
        ("down.weight", np.zeros((256, 96), np.int8), "type I8"),
        ("blocks.9.token.weight", np.zeros((3, 3), np.float32), "no part"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, name: str, value: np.ndarray, reason: str
) -> None:
    path = folder(tmp_path / "heads", checkpoint)
    values = load_file(path / "model.safetensors") | {name: value}
    save_file(values, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=reason):
        read_heads(path, checkpoint)


def test_numbers_that_are_none_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = folder(tmp_path / "heads", checkpoint)
    for name in ("gate.weight", "skip.bias", "down.weight"):
        values = load_file(path / "model.safetensors")
        values[name].reshape(-1)[5] = np.nan
        save_file(values, path / "bad.safetensors")
        whole = (path / "model.safetensors").read_bytes()
        (path / "bad.safetensors").rename(path / "model.safetensors")
        with pytest.raises(CheckpointError, match=name):
            read_heads(path, checkpoint)
        (path / "model.safetensors").write_bytes(whole)


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    checkpoint: Checkpoint, tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "heads"
    if not path.exists():
        folder(path, checkpoint)
    for name in ("config.json", "model.safetensors"):
        whole = (path / name).read_bytes()
        damaged = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, min(len(whole), 3000) - 1))
            damaged[at] = data.draw(st.integers(0, 255))
        end = data.draw(st.integers(0, len(whole)) | st.just(len(whole)))
        (path / name).write_bytes(damaged[:end])
        with suppress(CheckpointError):
            read_heads(path, checkpoint)
        (path / name).write_bytes(whole)


def test_heads_of_another_model_are_refused(
    checkpoint: Checkpoint, other: Checkpoint, tmp_path: Path
) -> None:
    path = folder(tmp_path / "heads", checkpoint)
    with pytest.raises(CheckpointError, match="another model"):
        read_heads(path, other)


def test_a_model_is_known_whatever_its_matrices_are_stored_as(checkpoint: Checkpoint) -> None:
    def model(format: WeightFormat, seed: int = 0) -> Checkpoint:
        return replace(tiny.checkpoint(tiny.config(), format, seed), tokenizer=checkpoint.tokenizer)

    known = fingerprint(model(WeightFormat.Q8_0))
    assert fingerprint(model(WeightFormat.Q4_0)) == known
    assert fingerprint(model(WeightFormat.Q8_0, seed=1)) != known
