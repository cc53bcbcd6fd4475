"""Mixes of K-quants: their rules, and the files that are written by them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.executor.reference import evaluate
from octavo.loader import load
from octavo.loader.base import Checkpoint, CheckpointError
from octavo.loader.gguf import GgufFile
from octavo.models import families
from octavo.tools.quantize.imatrix import collect, importance_of
from octavo.tools.quantize.layouts import Format
from octavo.tools.quantize.mixes import Mix, mix_schemes
from octavo.tools.quantize.quantize_checkpoint import quantize
from octavo.tools.quantize.quantizer import Method, Recipe, Report, round_each
from octavo.tools.quantize.scope import mixed
from octavo.tools.quantize.state import QuantizeError
from octavo.tools.quantize.tensor_names import tensor_names
from oracle.test_families import run
from paths import ORACLE, TESTS
from tools.quantize.mix_models import MODELS, mix_folder
from tools.quantize.quantizing import SAMPLES, logits_of, random_folder, speaking, weights_of

K = ORACLE / "tiny-llama-k.gguf"


def wide_folder(path: Path, name: str = "llama", **changes: Any) -> Path:
    """With inputs of whole K-quants' blocks, but for the attention's output."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return speaking(random_folder(name, path, **sizes | changes))


def with_importance(checkpoint: Checkpoint, recipe: Recipe) -> Recipe:
    roles = [role for role, w in checkpoint.weights.items() if recipe.of(role, w.shape)]
    found, _ = importance_of(collect(checkpoint, SAMPLES, ""), checkpoint, roles, "")
    return replace(recipe, importance=found)


def write(source: Path, out: Path, recipe: Recipe) -> Checkpoint:
    quantize(load(source), recipe, Format.GGUF, out, None, lambda report: None)
    return load(out)


@pytest.mark.parametrize("name", MODELS)
def test_rules_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Which are recorded."""
    checkpoint = load(mix_folder(name, tmp_path))
    recorded = json.loads((TESTS / "tools/quantize/mixes.json").read_text())[name]
    names = tensor_names(checkpoint)
    for index, mix in enumerate(Mix):
        expected = {tensor: formats.split()[index] for tensor, formats in recorded.items()}
        schemes = mix_schemes(checkpoint, mix)
        assert {names[r]: s.kind.format.name for r, s in schemes.items()} == expected, mix


def test_every_matrix_has_the_format_of_the_mix(tmp_path: Path) -> None:
    source = wide_folder(tmp_path / "m")
    checkpoint = load(source)
    for mix in Mix:
        recipe = mixed(checkpoint, Method.RTN, mix)
        after = write(source, tmp_path / f"{mix.name}.gguf", recipe)
        formats = {
            role: scheme.kind.format for role, scheme in mix_schemes(checkpoint, mix).items()
        }
        matrices = {role for role, w in checkpoint.weights.items() if len(w.shape) == 2}
        assert formats.keys() == matrices
        assert {role: after.weights[role].format for role in matrices} == formats
        file = GgufFile(tmp_path / f"{mix.name}.gguf")
        assert file.get("general.file_type", int) == mix.value


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3moe"])
@pytest.mark.parametrize("mix", [Mix.Q4_K_M, Mix.Q2_K])
def test_the_model_is_still_the_same(name: str, mix: Mix, tmp_path: Path) -> None:
    """Rows, experts and fused parts are where they belong: the folder with its matrices rounded
    where they lie is the same function."""
    source = wide_folder(tmp_path / "m", name)
    before = load(source)
    recipe = with_importance(before, mixed(before, Method.IMATRIX, mix))
    after = write(source, tmp_path / "o.gguf", recipe)
    weights = {
        role: round_each(recipe, role, value).values() if recipe.of(role, value.shape) else value
        for role, value in weights_of(before).items()
    }
    expected = evaluate.logits(families.program(before.config), weights, SAMPLES[:2])
    assert np.abs(logits_of(after) - expected).max() < 1e-4 * np.abs(expected).max()


def test_an_importance_matrix_brings_the_outputs_closer(tmp_path: Path) -> None:
    source = wide_folder(tmp_path / "m")
    before = load(source)
    expected = logits_of(before, SAMPLES)
    errors = []
    for method in (Method.RTN, Method.IMATRIX):
        recipe = mixed(before, method, Mix.Q3_K_S)
        if method is Method.IMATRIX:
            recipe = with_importance(before, recipe)
        after = write(source, tmp_path / f"{method.value}.gguf", recipe)
        errors.append(float(np.square(logits_of(after, SAMPLES) - expected).mean()))
    assert errors[1] < errors[0]


@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
def test_bits_of_the_ends(bits: int, tmp_path: Path) -> None:
    source = wide_folder(tmp_path / "m")
    checkpoint = load(source)
    after = write(source, tmp_path / "o.gguf", mixed(checkpoint, Method.RTN, Mix.Q3_K_M, bits))
    formats = {4: "Q4_K", 5: "Q5_K", 6: "Q6_K", 8: "Q8_0", 16: "BF16"}
    for role in ("token_embd", "output"):
        assert after.weights[role].format.name == formats[bits]
    assert after.weights["layers.0.attn_q"].format.name == "Q3_K"


def test_what_a_gguf_file_has_small_already_stays(tmp_path: Path) -> None:
    before = load(K)
    recipe = mixed(before, Method.RTN, Mix.Q5_K_M)
    assert recipe.kept
    after = write(K, tmp_path / "o.gguf", recipe)
    for role, weight in before.weights.items():
        if role in recipe.kept:
            assert after.weights[role].data.tobytes() == weight.data.tobytes()
    ids = np.arange(40).tolist()
    expected = logits_of(after, [ids])[0]
    error = np.abs(run(after, "generic", ids, [40]) - expected).mean() / expected.std()
    assert error < 0.1  # activations are rounded to 8 bits


def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    source = wide_folder(tmp_path / "m")
    checkpoint = load(source)
    recipe = with_importance(checkpoint, mixed(checkpoint, Method.IMATRIX, Mix.Q4_K_M))
    write(source, tmp_path / "whole.gguf", recipe)

    def stop(report: Report) -> None:
        if report.last:
            raise KeyboardInterrupt

    out = tmp_path / "o.gguf"
    with pytest.raises(KeyboardInterrupt):
        quantize(checkpoint, recipe, Format.GGUF, out, None, stop)
    other = replace(recipe, importance={r: v * 2 for r, v in recipe.importance.items()})
    with pytest.raises(QuantizeError, match=r"other settings \(importance"):
        quantize(checkpoint, other, Format.GGUF, out, None, lambda report: None)
    write(source, out, recipe)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    checkpoint = load(wide_folder(tmp_path / "m"))
    weight = checkpoint.weights["layers.0.attn_q"]
    bad = np.full(weight.nbytes // 2, 0x7FC0, "<u2").view(np.uint8)
    weights = dict(checkpoint.weights) | {"layers.0.attn_q": weight._replace(source=bad)}
    checkpoint = replace(checkpoint, weights=weights)
    recipe = mixed(checkpoint, Method.RTN, Mix.Q4_K_M)
    with pytest.raises(CheckpointError, match=r"q_proj.*no numbers"):
        quantize(checkpoint, recipe, Format.GGUF, tmp_path / "o.gguf", None, lambda report: None)
