"""The search for the layers that draft best: its arithmetic, and what it measures."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from executor import tiny
from octavo.cli import app
from octavo.cli.search.layer_skip import as_text
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import load_engine
from octavo.executor.base import Batch
from octavo.executor.native.executor import NativeExecutor
from octavo.loader.base import Checkpoint, WeightFormat
from octavo.models.families import program
from octavo.models.subset import keep_layers
from octavo.spec_decode.config import SpeculativeConfig
from octavo.tools.bench.layer_search import (
    DEPTH,
    Answers,
    Costs,
    Layers,
    best_length,
    eliminate,
    search,
)
from paths import ORACLE, TINY

FLAT = [1.0] * (DEPTH + 1)  # a pass costs the same, whatever the tokens


@pytest.mark.parametrize(
    ("accepted", "draft", "length", "speedup"),
    [
        ([1.0] * DEPTH, 0.0, DEPTH, DEPTH + 1),
        ([0.0] * DEPTH, 0.5, 1, 1 / 1.5),
        ([0.5, 0.25, 0.125], 0.1, 2, 1.75 / 1.2),
        ([0.9, 0.1, 0.0], 0.1, 1, 1.9 / 1.1),
    ],
)
def test_the_best_length_is_that_of_most_tokens_a_second(
    accepted: list[float], draft: float, length: int, speedup: float
) -> None:
    best = best_length(accepted, draft, FLAT)
    assert best.length == length
    assert best.speedup == pytest.approx(speedup)
    assert best.tokens_per_pass == pytest.approx(1 + sum(accepted[:length]))


def plain(count: int, agreement: dict[int, float]) -> list[Layers]:
    """Removing the least missed, one by one, looking at all each time."""
    kept, path = list(range(count)), []
    while len(kept) > 1:
        kept.remove(min(kept, key=lambda layer: (agreement[layer], layer)))
        path.append(tuple(kept))
    return path


@given(st.lists(st.integers(0, 6), min_size=2, max_size=12), st.floats(0.0, 0.4))
def test_layers_go_least_missed_first_and_none_is_asked_about_twice(
    losses: list[int], fixed: float
) -> None:
    """Where each layer's loss is its own; what is worth the search is a prefix of the whole way."""
    count = len(losses)
    total = 10 * sum(losses) + 10
    asked: list[Layers] = []

    def agreement(kept: Layers) -> float:
        asked.append(kept)
        return 1.0 - sum(losses[layer] for layer in range(count) if layer not in kept) / total

    costs = Costs(FLAT, fixed, (1.0 - fixed) / count)
    steps = eliminate([()] * count, agreement, costs)
    expected = plain(count, dict(enumerate(losses)))
    assert [step.layers for step in steps] == expected[: len(steps)]
    assert len(asked) == len(set(asked))
    assert len(asked) <= sum(range(count - len(steps) + 1, count + 1))
    for step in steps:
        assert step.acceptance == agreement(step.layers)


def test_the_search_ends_where_nothing_is_to_be_had() -> None:
    costs = Costs(FLAT, 0.5, 0.05)
    assert len(eliminate([()] * 10, lambda _: 0.0, costs)) == 1
    assert len(eliminate([()] * 10, lambda _: 0.9, Costs(FLAT, 0.0, 0.1))) == 9
    # A layer costs next to nothing: with one fewer there is hardly more to gain.
    assert len(eliminate([()] * 10, lambda kept: len(kept) / 10, Costs(FLAT, 0.1, 1e-6))) < 4


def test_a_layer_goes_with_those_that_read_its_cache() -> None:
    """2 and 3 are of no use without each other, and cannot be kept without 1, whose cache they
    read.
    """

    def agreement(kept: Layers) -> float:
        there = {*kept}
        assert 1 in there or not {2, 3} & there
        lost = {0: 0.3, 4: 0.01, 5: 0.2}
        together = 0.1 if not {1, 2, 3} & there else 0.25 * len({1, 2, 3} - there)
        return 1.0 - together - sum(lost[layer] for layer in lost if layer not in there)

    steps = eliminate([(), (2, 3), (), (), (), ()], agreement, Costs(FLAT, 0.0, 0.1))
    kept = [step.layers for step in steps]
    assert kept == [(0, 1, 2, 3, 5), (0, 5), (0,)]
    # All read the first one's: it stays.
    flat = eliminate([(1, 2), (), ()], lambda kept: 0.9, Costs(FLAT, 0.0, 0.1))
    assert flat[-1].layers == (0,)


def answers(checkpoint: Checkpoint, prompts: list[list[int]], positions: int) -> Answers:
    return Answers(
        checkpoint,
        EngineConfig(threads=1, kv_cache_dtype="int8"),
        [np.array(prompt, np.int32) for prompt in prompts],
        positions,
        lambda _: None,
    )


def by_hand(found: Answers, checkpoint: Checkpoint, layers: Layers, depth: int) -> list[float]:
    """The same, place after place: the text through the model, then guesses by the layers."""
    compute = program(checkpoint.config)
    executor = NativeExecutor(
        checkpoint,
        compute,
        found.executor.layout,
        num_blocks=found.executor.num_blocks,
        max_tokens=512,
        max_logits_rows=1,
        max_seqs=1,
        max_blocks_per_seq=found.tables.shape[2],
        threads=1,
    )
    subset = executor.add_program(keep_layers(compute, layers))
    shape = (len(found.tables), 1, found.tables.shape[2])
    tables = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)

    def run(tokens: list[int], at: int, number: int) -> int:
        count = len(tokens)
        batch = Batch(
            np.array(tokens, np.int32),
            np.arange(at, at + count, dtype=np.int32),
            np.array([0, count], np.int32),
            np.zeros(1, np.int32),
            tables,
            np.array([count - 1], np.int32),
            np.empty((0, 2), np.int32),
        )
        logits = executor.execute(batch, number).logits
        return int(logits[0].argmax())

    right = np.zeros(depth)
    places = [place for place in found.places if place.index % 2 == 1]
    for place in places:
        text = place.answer.tolist()
        run(text[: place.at], 0, 0)
        for step in range(depth):
            at = place.at + step
            if run([text[at]], at, subset) != text[at + 1]:
                break
            right[step] += 1
    return (right / len(places)).tolist()


@pytest.mark.parametrize(("family", "layers"), [("llama", (0, 2)), ("gemma3", (1, 2))])
def test_what_is_measured_is_what_drafting_would_give(family: str, layers: Layers) -> None:
    config = tiny.config(family, tied_embeddings=family != "gemma3")  # or a token is said for ever
    checkpoint = tiny.checkpoint(config, WeightFormat.Q8_0)
    rng = np.random.default_rng(5)
    prompts = [[int(t) for t in rng.integers(0, 70, length)] for length in (14, 31, 40, 3)]
    found = answers(checkpoint, prompts, 80)
    assert [len(place.answer) for place in found.places[::20]] == [
        len(prompt) + 20 + DEPTH for prompt in prompts
    ]
    measured = found.accepted(layers, 3, of_others=True)
    assert measured == by_hand(found, checkpoint, layers, 3)
    assert 0 < measured[0] < 1
    # The whole model says what it said; and other programs have spoilt nothing for that.
    for of_others in False, True:
        assert found.accepted((0, 1, 2), DEPTH, of_others=of_others) == [1.0] * DEPTH
    assert found.accepted(layers, 3, of_others=True) == measured
    times = found.seconds([(None, 1), (layers, 1), (None, DEPTH + 1)])
    assert all(0 < seconds < 60 for seconds in times)


def test_layers_that_do_nothing_are_skipped() -> None:
    """Three of six layers add zeros to the residual stream: without them the rest are always right,
    and only then others go.
    """
    config = tiny.config()
    config = replace(config, layers=config.layers[:1] * 6)
    checkpoint = tiny.checkpoint(config, WeightFormat.Q8_0)
    for layer in 1, 3, 4:
        for name in "attn_output", "ffn_down":
            role = f"layers.{layer}.{name}"
            weight = checkpoint.weights[role]
            checkpoint.weights[role] = weight._replace(source=np.zeros_like(weight.data))
    rng = np.random.default_rng(5)
    prompts = [[int(t) for t in rng.integers(0, 70, 20)] for _ in range(4)]
    found = answers(checkpoint, prompts, 80)
    costs = Costs(FLAT, 0.1, 0.15)
    steps = eliminate([()] * 6, lambda some: found.accepted(some, 1)[0], costs)
    assert [step.acceptance for step in steps[:3]] == [1.0] * 3
    assert steps[2].layers == (0, 2, 5)
    assert max(steps, key=lambda step: step.predicted.speedup) is steps[2]
    assert found.accepted((0, 2, 5), DEPTH, of_others=True) == [1.0] * DEPTH


def test_what_is_found_can_be_served(tmp_path: Path) -> None:
    path = ORACLE / "tiny-llama-legacy.gguf"
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and so on and so forth. " * 60)
    found = search(str(path), EngineConfig(threads=1), text=text, positions=32)
    json.dumps(found)
    given = SpeculativeConfig.of(found["speculative_config"])
    engine = load_engine(path, EngineConfig(threads=1, speculative_config=given))
    assert "layer_skip with layers" in engine.report()
    engine.engine.close()
    assert found["positions"] == 32
    assert found["pays"] == (found["speedup"] > 1)
    assert found["layers"] == found["speculative_config"]["layers"]
    assert max(row["speedup"] for row in found["finalists"]) == found["speedup"]
    text_shown = as_text(found)
    assert json.dumps(found["layers"]) in text_shown
    assert ("It does not pay" in text_shown) == (not found["pays"])


def test_what_cannot_be_searched_is_refused(tmp_path: Path) -> None:
    path = str(ORACLE / "tiny-llama-legacy.gguf")
    text = tmp_path / "text.txt"
    text.write_text("A few words.")
    with pytest.raises(SettingsError, match="has 1 prompt of"):
        search(path, EngineConfig(threads=1), text=text)
    with pytest.raises(SettingsError, match="speculative_config has no part"):
        search(path, EngineConfig(threads=1, speculative_config={"method": "ngram"}))
    with pytest.raises(SettingsError, match="longer than the model's context"):
        search(path, EngineConfig(threads=1), positions=8192)


def test_options_that_the_search_has_no_use_for_are_refused() -> None:
    for name in ("--max-num-seqs", "--max-model-len", "--kv-cache-memory", "--speculative-config"):
        result = CliRunner().invoke(app, ["search", "layer-skip", str(TINY), name, "7"])
        assert result.exit_code == 2
        assert f"No such option: {name}" in result.output
