"""Which matrices are rounded, what that takes, and what is said before it is done."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import strict_json
from octavo.cli import app
from octavo.loader import load
from octavo.tools.quantize.forecast import forecast, sizes
from octavo.tools.quantize.layouts import Format, scheme_of
from octavo.tools.quantize.quantize_checkpoint import quantize
from octavo.tools.quantize.quantizer import Method, Recipe
from octavo.tools.quantize.scope import EMBEDDING, HEAD, ends, kept, large, worth
from oracle.test_families import run
from oracle.tiny_folders import talking_folder
from paths import ORACLE
from tools.quantize.quantizing import (
    SAMPLES,
    logits_of,
    make,
    qwen3_folder,
    random_folder,
    weights_of,
)

LEGACY = ORACLE / "tiny-llama-legacy.gguf"  # with a head of its own
MIXED = ORACLE / "tiny-llama-k.gguf"  # whose head is its embedding


def ids_of(path: Path) -> list[int]:
    size = load(path).config.vocab_size
    return np.random.default_rng(5).integers(0, size, 40).tolist()


def tied_folder(path: Path) -> Path:
    random_folder("llama", path, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


# ── Embedding and head ──────────────────────────────────────────────────────────────────────────


def test_ends_are_small_where_they_are_much_of_a_model_and_can_be_read(tmp_path: Path) -> None:
    checkpoint = load(qwen3_folder(tmp_path / "source"))  # with a head of its own
    assert large(checkpoint)
    found = {format: set(ends(checkpoint, format, None, 32, True)) for format in Format}
    assert found == {
        Format.GPTQ: set(),
        Format.AWQ: set(),
        Format.COMPRESSED_TENSORS: {HEAD},
        Format.GGUF: {EMBEDDING, HEAD},
    }
    assert ends(checkpoint, Format.GGUF, 16, 32, True) == {}
    for format in (Format.GPTQ, Format.AWQ):
        with pytest.raises(ValueError, match=f"the {format.value} layout has embedding and head"):
            ends(checkpoint, format, 8, 32, True)
    weights = dict(checkpoint.weights)
    for role in (EMBEDDING, HEAD):
        weights[role] = weights[role]._replace(shape=(4, 64))
    few = replace(checkpoint, weights=weights)
    assert not large(few)
    assert ends(few, Format.GGUF, None, 32, True) == {}
    assert set(ends(few, Format.GGUF, 4, 32, True)) == {EMBEDDING, HEAD}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_small_ends_in_a_folder_are_served(bits: int, tied: bool, tmp_path: Path) -> None:
    source = tied_folder(tmp_path / "s") if tied else qwen3_folder(tmp_path / "s")
    how: dict[str, Any] = {"format": "compressed-tensors", "symmetric": True, "embedding": bits}
    outcome = make(source, tmp_path / "out", **how)
    assert any("transformers 5.24 does not" in note for note in outcome.notes)
    after, before = load(tmp_path / "out"), load(source)
    roles = [EMBEDDING] if tied else [EMBEDDING, HEAD]
    assert {r: after.weights[r].format.name for r in roles} == dict.fromkeys(roles, f"I{bits}")
    for role in roles:
        wanted, got = weights_of(before)[role], weights_of(after)[role]
        assert np.abs(got - wanted).max() < np.abs(wanted).max() * (0.005 if bits == 8 else 0.08)
    ids = ids_of(source)
    expected = logits_of(after, [ids])[0]
    error = np.abs(run(after, "generic", ids, [40]) - expected).mean() / expected.std()
    assert error < 0.1  # activations are rounded to 8 bits


@pytest.mark.parametrize("embedding", [None, 4, 5])
def test_small_ends_of_a_gguf_file_are_served(embedding: int | None, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    make(LEGACY, out, format="gguf", embedding=embedding)
    before, after = load(LEGACY), load(out)
    for role in (EMBEDDING, HEAD):
        old, new = before.weights[role], after.weights[role]
        small = new.nbytes <= old.nbytes
        assert small
        if embedding is not None:
            assert new.format.name == f"Q{embedding}_1" or new.nbytes == old.nbytes
        if new.format is old.format:
            assert np.array_equal(new.data, old.data)
    ids = ids_of(LEGACY)
    expected = logits_of(after, [ids])[0]
    error = np.abs(run(after, "generic", ids, [40]) - expected).mean() / expected.std()
    assert error < 0.1


def test_later_layers_make_up_for_a_small_embedding(tmp_path: Path) -> None:
    """They are quantized behind it as it will be: other codes than behind the one that was."""
    source = qwen3_folder(tmp_path / "source")
    how: dict[str, Any] = {"method": "gptq", "format": "compressed-tensors", "symmetric": True}
    for bits in (4, 16):
        make(source, tmp_path / str(bits), embedding=bits, **how)
    small, large = (weights_of(load(tmp_path / bits)) for bits in ("4", "16"))
    assert any(not np.array_equal(small[role], large[role]) for role in small if "layers" in role)


# ── What stays ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_what_would_only_lose_stays_byte_for_byte(method: str, tmp_path: Path) -> None:
    scheme = scheme_of(Format.GGUF, 4, 32, False)
    checkpoint = load(LEGACY)
    plain = Recipe(Method(method), scheme)
    stays = kept(checkpoint, plain, Format.GGUF)
    formats = {role: checkpoint.weights[role].format.name for role in stays}
    assert set(formats.values()) == {"Q4_0", "Q4_1", "Q5_0"}  # Q5_0 is a tenth larger at most
    recipe = replace(plain, kept=stays)
    quantize(checkpoint, recipe, Format.GGUF, tmp_path / "o.gguf", SAMPLES, lambda report: None)
    after = load(tmp_path / "o.gguf")
    for role, weight in checkpoint.weights.items():
        new = after.weights[role]
        if role in stays:
            assert (new.format, new.data.tobytes()) == (weight.format, weight.data.tobytes())
        elif role.startswith("layers.") and len(weight.shape) == 2:
            assert new.format.name == "Q4_1"
    assert kept(checkpoint, Recipe(Method.AWQ, scheme), Format.GGUF) == frozenset()
    assert kept(checkpoint, plain, Format.GPTQ) == frozenset()


@pytest.mark.parametrize(
    ("before", "after", "quantized", "expected"),
    [
        (100, 100, False, False),
        (100, 99, False, True),
        (100, 101, False, False),
        (100, 91, True, False),
        (100, 90, True, True),
    ],
)
def test_what_is_worth_a_loss(before: int, after: int, quantized: bool, expected: bool) -> None:
    assert worth(before, after, quantized=quantized) is expected


# ── What is said before ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("format", "bits", "group", "symmetric", "embedding"),
    [
        ("gptq", 4, 32, True, 16),
        ("gptq", 4, None, False, 16),
        ("gptq", 8, 32, False, 16),
        ("awq", 4, 32, False, 16),
        ("compressed-tensors", 4, 32, True, None),
        ("compressed-tensors", 8, None, True, 8),
        ("compressed-tensors", 4, None, True, 4),
        ("gguf", 4, 32, False, None),
        ("gguf", 8, 32, True, 4),
        ("gguf", 4, 32, False, 5),
        ("gguf", 4, 32, True, 5),
        ("gguf", 4, 32, True, 16),
    ],
)
@pytest.mark.parametrize("source", [LEGACY, MIXED, "folder"])
def test_sizes_are_those_written(
    source: Path | str, format: str, bits: int, group: int | None, symmetric: bool,
    embedding: int | None, tmp_path: Path,
) -> None:  # fmt: skip
    path = source if isinstance(source, Path) else talking_gguf_folder(tmp_path / "source")
    name = "out.gguf" if format == "gguf" else "out"
    how: dict[str, Any] = {"format": format, "bits": bits, "group": group, "symmetric": symmetric}
    outcome = make(path, tmp_path / name, embedding=embedding, **how)
    checkpoint, kind = load(path), Format(format)
    scheme = scheme_of(kind, bits, group, symmetric)
    recipe = Recipe(Method.RTN, scheme, ends=ends(checkpoint, kind, embedding, group, symmetric))
    said = sum(sizes(checkpoint, recipe, kind).values())
    tensors = len(checkpoint.weights) + 2
    padding = 32 * tensors if format == "gguf" else 0
    assert 0 <= outcome.nbytes - said <= padding


def talking_gguf_folder(path: Path) -> Path:
    from tools.quantize.test_gguf_model import speaking

    return speaking(qwen3_folder(path))


def test_the_least_error_is_one(tmp_path: Path) -> None:
    source = qwen3_folder(tmp_path / "source")
    checkpoint = load(source)
    scheme = scheme_of(Format.GPTQ, 4, 32, False)
    coming = forecast(checkpoint, Recipe(Method.RTN, scheme), Format.GPTQ)
    assert coming.quantized == ()
    assert coming.gains
    for method in ("rtn", "gptq"):
        make(source, tmp_path / method, method=method)
        before, after = weights_of(checkpoint), weights_of(load(tmp_path / method))
        for role, (squares, lost) in coming.squares.items():
            error = np.square(after[role] - before[role]).mean() / np.square(before[role]).mean()
            assert lost / squares <= error * 1.001, role
            assert lost > 0.0 or role not in before or before[role].ndim == 1 or "lay" not in role


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


@pytest.mark.parametrize("format", ["gptq", "awq", "gguf"])
def test_what_does_not_gain_is_not_made_unasked(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.tools.quantize.quantizer.INPUTS", 16)
    out = tmp_path / ("out.gguf" if format == "gguf" else "out")
    how = (MIXED, "--method", "rtn", "--format", format, "--embedding-bits", 16, "--group-size", 32)
    if format == "gguf":
        how = (*how, "--bits", 8)
    refused = command(*how, "-o", out)
    assert refused.exit_code != 0
    said = str(refused.exception)
    assert "nothing was written. --allow-no-gain writes it all the same" in said
    assert "would grow from" in said or "only, by less than 10%" in said
    assert "the source is quantized already (" in refused.stderr
    assert not list(tmp_path.iterdir())
    done = command(*how, "--allow-no-gain", "--json", "-o", out)
    assert done.exit_code == 0, done.output
    facts = strict_json.loads(done.stdout)
    assert out.exists()
    parts = facts["parts"]
    assert parts["all"]["bytes"] == sum(p["bytes"] for n, p in parts.items() if n != "all")
    assert abs(parts["all"]["bytes"] - facts["bytes"]) < 2048
    assert parts["all"]["source_bytes"] == facts["source_bytes"]


def test_a_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.tools.quantize.quantizer.INPUTS", 16)
    source = talking_folder(tmp_path / "source")
    done = command(
        source, "--method", "rtn", "--group-size", -1, "--dry-run", "--json", "-o", tmp_path / "out"
    )
    assert done.exit_code == 0, done.output
    parts = strict_json.loads(done.stdout)["parts"]
    assert list(parts)[-1] == "all"
    assert 0.0 < parts["ffn"]["least_error"] < 0.5
    assert parts["ffn"]["bytes"] < parts["ffn"]["source_bytes"]
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    assert "least error" in done.stderr
    assert "the embedding and the head, " in done.stderr
    assert "stay in 16 bits; a 4-bit GGUF file" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "compressed-tensors", "--asymmetric"], "cannot load zero points"),
        (["--embedding-bits", "8"], "the gptq layout has embedding and head in 16 bits"),
        (["--format", "awq", "--embedding-bits", "4"], "the awq layout has embedding and head"),
        (["--embedding-bits", "7"], "'7'"),
        (
            ["--format", "compressed-tensors", "--embedding-bits", "5"],
            "compressed-tensors layout has 3, 4 and 8 bits",
        ),
    ],
)
def test_what_nobody_could_read_is_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    result = command(LEGACY, *arguments, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_an_order_of_groups_that_was_dropped_is_refused(tmp_path: Path) -> None:
    how = ("--format", "compressed-tensors", "--act-order", "group", "--group-size", 32)
    source = qwen3_folder(tmp_path / "source")
    text = tmp_path / "text"
    text.write_text("!" * 400)
    result = command(source, *how, "--seq-len", 16, "--calibration", text, "-o", tmp_path / "out")
    assert "has dropped groups in another order" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_the_configuration_names_the_ends(tmp_path: Path) -> None:
    source = qwen3_folder(tmp_path / "source")
    make(source, tmp_path / "out", format="compressed-tensors", symmetric=True, embedding=None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    targets = {
        tuple(g["targets"]): g["weights"]["num_bits"] for g in config["config_groups"].values()
    }
    assert targets == {("Linear",): 4, ("re:.*lm_head$",): 8}
    assert (config["format"], config["ignore"]) == ("pack-quantized", [])
    make(
        source, tmp_path / "w8a8", format="compressed-tensors", bits=8, group=None,
        symmetric=True, embedding=None,
    )  # fmt: skip
    config = json.loads((tmp_path / "w8a8" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert [g["format"] for g in config["config_groups"].values()] == [
        "int-quantized", "pack-quantized",
    ]  # fmt: skip
    assert load(tmp_path / "w8a8").weights[HEAD].format.name == "I8"
