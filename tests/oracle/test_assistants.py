"""Assistants of Gemma 4 on the target's keys and values, against transformers' logits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.driving import Driver
from octavo.loader import load
from octavo.loader.base import CheckpointError
from octavo.loader.hf_assistant import load_assistant
from oracle.assistant_folders import LENGTHS, NAMES, assistant_folder, recorded_assistant
from oracle.tiny_folders import TEXT, Float32, folder, recorded


def drafted(driver: Driver, program: int, ids: list[int], length: int, count: int) -> Float32:
    """The assistant's logits behind a token, and behind each of its guesses but the last."""
    sequence = driver.start(ids)
    driver.step([(sequence, length - 1)])
    batch = driver.batch([(sequence, 1)])
    hidden, rows = driver.executor.execute(batch).hidden, []
    token = ids[length]
    for _ in range(count):
        assert hidden is not None
        step = replace(batch, token_ids=np.array([token], np.int32))
        result = driver.executor.execute(step, program, hidden.copy())
        assert result.logits is not None
        rows.append(result.logits[0].copy())
        hidden, token = result.hidden, int(rows[-1].argmax())
    driver.finish(sequence)
    return np.stack(rows)


@pytest.mark.parametrize("isa", ["generic", "avx512"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, isa: str, tmp_path: Path) -> None:
    """Texts shorter and longer than the window, with other numbers of query heads."""
    target = load(folder(name, tmp_path / "target"))
    program, weights = load_assistant(assistant_folder(name, tmp_path / "own"), target.config)
    try:
        driver = Driver(target, isa=isa, kv_dtype="fp16", threads=2, keep_hidden=True)
    except ValueError as error:
        pytest.skip(str(error))
    added = driver.executor.add_program(program, weights, keep_hidden=True)
    expected, ids = recorded_assistant(name).logits, recorded(name).ids.tolist()
    for length, rows in zip(LENGTHS, expected, strict=True):
        got = drafted(driver, added, ids, length, len(rows))
        difference = np.abs(got - rows) / expected.std()
        print(f"{length}: mean {difference.mean():.1e}, most {difference.max():.1e}")
        assert difference.mean() < 1e-3
        assert difference.max() < 2e-2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma4"}, "model_type 'gemma4' is not supported"),
        ({"backbone_hidden_size": 48}, "hidden rows of 48 elements; the model's have 32"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings false is not supported"),
        ({TEXT: {"num_kv_shared_layers": 2}}, "num_kv_shared_layers is not the number of all"),
        ({TEXT: {"hidden_size_per_layer_input": 8}}, "inputs of layers and experts are not"),
        ({TEXT: {"sliding_window": 8}}, "window, rotary positions, KV heads or widths are not"),
        ({TEXT: {"vocab_size": 80}}, "has a vocabulary of 80 tokens, the model one of 96"),
        ({TEXT: {"hidden_size": 32}}, "the model's metadata asks for"),
    ],
)
def test_what_does_not_suit_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    target = load(folder("gemma4", tmp_path / "target"))
    path = assistant_folder("gemma4", tmp_path / "own", changes)
    with pytest.raises((CheckpointError, ValueError), match=named):
        load_assistant(path, target.config)
