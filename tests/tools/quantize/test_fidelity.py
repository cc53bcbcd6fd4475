"""Fidelity: the references, the text, greedy divergence, and the command on tiny models."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import strict_json
from executor import tiny
from executor.reference import run as plain_run
from octavo.cli import app
from octavo.engine.config import SettingsError
from octavo.executor.native.packing import held_bytes
from octavo.executor.reference import evaluate
from octavo.kv_cache.layout import KvLayout
from octavo.loader import load
from octavo.loader.base import Checkpoint, CheckpointError, Tokenizer
from octavo.loader.dequantize import dequantize
from octavo.models.families import program
from octavo.tools.quantize import fidelity
from octavo.tools.quantize.distance import Fidelity
from octavo.tools.quantize.fidelity import (
    Exact,
    Int32,
    Served,
    TextError,
    compare,
    divergence,
    windows,
)
from oracle.tiny_folders import BASE, FAMILIES, folder, recorded, talking_folder
from paths import ORACLE

TINY = ("tiny-llama", "tiny-llama-odd", "tiny-llama-legacy", "tiny-llama-k", "tiny-gemma3",
        "tiny-gemma3-caps")  # fmt: skip


def all_logits(source: Exact, sequences: Sequence[Int32]) -> list[np.ndarray]:
    source.begin(sequences)
    return [source.logits(i, 0, len(ids)) for i, ids in enumerate(sequences)]


# --- the exact reference -------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_exact_is_what_transformers_computes(name: str) -> None:
    with np.load(ORACLE / f"{name}.npz") as data:
        ids, logits = data["ids"].astype(np.int32), data["logits"]
    source = Exact(load(ORACLE / f"{name}.gguf"), len(ids))
    # Of several lengths at once: what is filled up changes nothing.
    whole, part = all_logits(source, [ids, ids[:17]])
    np.testing.assert_allclose(whole, logits, rtol=0, atol=2e-4)
    np.testing.assert_allclose(part, logits[:17], rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", sorted(path.name for path in FAMILIES.iterdir()))
def test_of_every_family(family: str, tmp_path: Path) -> None:
    """Recorded with keys and values rounded to fp16, which is most of the difference."""
    expected = recorded(family)
    source = Exact(load(folder(family, tmp_path / family)), len(expected.ids))
    [logits] = all_logits(source, [expected.ids])
    assert expected.off(BASE, logits).mean() < 2e-3


def test_of_layers_that_share_a_cache() -> None:
    """A layer at a time, as all at once."""
    checkpoint = tiny.checkpoint(tiny.mixed())
    ids = np.random.default_rng(8).integers(0, 70, 40).astype(np.int32)
    whole, part = all_logits(Exact(checkpoint, 64), [ids, ids[:9]])
    shape = program(checkpoint.config, 64)
    weights = {role: dequantize(checkpoint.weights[role]) for role in shape.weights}
    expected = evaluate.logits(shape, weights, ids[None])[0]
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(part, expected[:9], rtol=0, atol=1e-5)


def test_a_text_is_kept_for_the_next_model() -> None:
    source = Exact(load(ORACLE / "tiny-llama.gguf"), 64)
    text = [np.arange(20, dtype=np.int32)]
    first = all_logits(source, text)[0].copy()
    all_logits(source, [np.arange(9, dtype=np.int32)])
    kept = source._first
    np.testing.assert_array_equal(all_logits(source, text)[0], first)
    assert source._first is kept


# --- comparing -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_folder(tmp_path_factory.mktemp("hf") / "talking")


def perturbed(source: Path, path: Path, size: float) -> Path:
    """The same model with noise on every matrix."""
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    weights = load_file(path / "model.safetensors")
    rng = np.random.default_rng(3)
    for name, value in weights.items():
        if value.ndim == 2:
            noise = size * value.astype(np.float32).std() * rng.standard_normal(value.shape)
            weights[name] = (value.astype(np.float32) + noise).astype(ml_dtypes.bfloat16)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def noisy(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(talking, tmp_path_factory.mktemp("hf") / "noisy", 0.1)


def test_compared_as_numpy_does(talking: Path, noisy: Path) -> None:
    """Logits of both models in float64 by another implementation, and KL from them."""
    models = [load(talking), load(noisy)]
    text = windows(models[0].tokenizer, fidelity.default_text(), 96, "x", 400)
    found = compare(*(Exact(model, 96) for model in reversed(models)), text, threads=2)
    kl, agree, nll = [], [], []
    for ids in text:
        both = []
        for model in models:
            shape = program(model.config, 96)
            weights = {
                role: dequantize(model.weights[role]).astype(np.float64) for role in shape.weights
            }
            logits = plain_run(shape, weights, ids.tolist(), np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            both.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
        p, q = both
        kl += (np.exp(p) * (p - q)).sum(axis=1).tolist()
        agree += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
        nll += (-q[np.arange(len(ids) - 1), ids[1:]]).tolist()
    np.testing.assert_allclose(found.kl, kl, rtol=2e-3, atol=1e-6)
    assert np.mean(found.agree == agree) > 0.995  # a tie may break otherwise in fp32
    np.testing.assert_allclose(found.nll, nll, rtol=1e-4)
    assert Fidelity.of(found).kl_mean > 1e-3


class Fixed:
    """Logits that are given."""

    name = "fixed"
    most_rows = 4

    def __init__(self, logits: list[np.ndarray]) -> None:
        self.given = logits

    def begin(self, sequences: Sequence[Int32]) -> None:
        pass

    def logits(self, index: int, first: int, last: int) -> np.ndarray:
        return self.given[index][first:last]


def test_windows_of_any_length_are_compared_whole() -> None:
    rng = np.random.default_rng(4)
    text = [np.arange(n, dtype=np.int32) % 7 for n in (9, 4, 2)]
    p, q = ([rng.normal(0, 2, (len(ids), 7)).astype(np.float32) for ids in text] for _ in range(2))
    found = compare(Fixed(q), Fixed(p), text, threads=3)
    assert [len(part) for part in found] == [15, 15, 12, 12]
    whole = [fidelity.distances(a, b, ids[1:]) for a, b, ids in zip(p, q, text, strict=True)]
    np.testing.assert_array_equal(found.kl, np.concatenate([part.kl for part in whole]))
    np.testing.assert_array_equal(found.nll, np.concatenate([part.nll for part in whole]))


def test_a_long_text_is_begun_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the reference need not hold all of it."""
    monkeypatch.setattr(fidelity, "_PASS_TOKENS", 10)
    rng = np.random.default_rng(5)
    text = [np.arange(4, dtype=np.int32) for _ in range(5)]
    p, q = ([rng.normal(0, 2, (4, 7)).astype(np.float32) for _ in text] for _ in range(2))

    class Parts(Fixed):
        def begin(self, sequences: Sequence[Int32]) -> None:
            assert sum(map(len, sequences)) <= 10
            self.given, self.left = self.left[: len(sequences)], self.left[len(sequences) :]

    one, other = Parts(q), Parts(p)
    one.left, other.left = q, p
    found = compare(one, other, text)
    whole = [fidelity.distances(a, b, ids[1:]) for a, b, ids in zip(p, q, text, strict=True)]
    np.testing.assert_array_equal(found.kl, np.concatenate([part.kl for part in whole]))
    assert other.left == []


def test_a_model_that_computes_no_numbers_is_named() -> None:
    text = [np.zeros(3, np.int32)]
    good, bad = np.zeros((3, 5), np.float32), np.full((3, 5), np.nan, np.float32)
    broken = Fixed([bad])
    broken.name = "broken.gguf"
    for pair in ((broken, Fixed([good])), (Fixed([good]), broken)):
        with pytest.raises(CheckpointError, match=r"broken\.gguf: logits .* not finite"):
            compare(*pair, text)


# --- greedy decoding -----------------------------------------------------------------------------


class Writer:
    """Continues every prompt with given tokens."""

    def __init__(self, tokens: list[list[int]]) -> None:
        self.tokens = tokens

    def greedy(self, prompts: Sequence[Int32], count: int) -> list[Int32]:
        return [np.array(row[:count], np.int32) for row in self.tokens]


class Counter:
    """A reference whose next token is always one more."""

    name = "counter"
    most_rows = 3

    def begin(self, sequences: Sequence[Int32]) -> None:
        self.sequences = sequences

    def logits(self, index: int, first: int, last: int) -> np.ndarray:
        return np.eye(50, dtype=np.float32)[self.sequences[index][first:last] + 1]


def test_divergence_is_the_first_token_that_the_reference_would_not_have_drawn() -> None:
    prompts = [np.array(start, np.int32) for start in ([1, 2, 3], [5], [8, 9], [20])]
    writer = Writer([[4, 5, 6, 7], [6, 7, 9, 10], [0, 1, 2, 3], [21, 22, 23, 0]])
    found = divergence(cast(Served, writer), Counter(), prompts, 4)
    # All alike; differs at the third (though it counts on from there); at once; at the last.
    assert found.positions == (4, 2, 0, 3)
    assert (found.first, found.median, found.never) == (0, 2.5, 1)


# --- text ----------------------------------------------------------------------------------------


class Words:
    """A token a word; prompts begin with token 0."""

    vocab_size = 100

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [1 + hash(word) % 90 for word in text.split()]
        return [0, *ids] if add_special_tokens else ids


WORDS = cast(Tokenizer, Words())


def test_windows_begin_as_prompts_do_and_miss_nothing() -> None:
    text = " ".join(str(n) for n in range(23))
    ids = WORDS.encode(text, add_special_tokens=False)
    cut = windows(WORDS, text, 8, "x")
    assert [len(window) for window in cut] == [8, 8, 8, 3]
    assert all(window[0] == 0 for window in cut)
    assert np.concatenate([window[1:] for window in cut]).tolist() == ids
    # A last token alone predicts nothing.
    assert [len(window) for window in windows(WORDS, text, 8, "x", 22)] == [8, 8, 8]


@pytest.mark.parametrize("text", ["", "   ", "one"])
def test_a_text_without_two_tokens_is_refused(text: str) -> None:
    with pytest.raises(TextError, match=r"book\.txt: has [01] tokens; at least 2"):
        windows(WORDS, text, 8, "book.txt")


def test_prompts_are_spread_over_the_text() -> None:
    text = [np.arange(100, dtype=np.int32), np.arange(100, 130, dtype=np.int32)]
    chosen = fidelity.prompts(text, 4, 16)
    assert [len(prompt) for prompt in chosen] == [16] * 4
    assert [prompt[0] for prompt in chosen] == [0, 16, 48, 80]
    assert len(fidelity.prompts(text, 50, 16)) == 7  # no place twice
    assert fidelity.prompts([np.array([3, 4], np.int32)], 4, 16)[0].tolist() == [3, 4]


def test_the_default_text_is_not_what_quantizers_learn_from() -> None:
    from octavo.tools.quantize import calibrate

    learned = calibrate.default_text()
    held_out = fidelity.default_text()
    assert len(held_out) > 20_000
    assert not [line for line in held_out.splitlines() if len(line) > 40 and line in learned]


# --- the command ---------------------------------------------------------------------------------

SCHEMA = {
    "model", "path", "against", "reference", "text", "tokens", "context", "positions",
    "perplexity", "reference_perplexity", "kl_mean", "kl_standard_error", "kl_median", "kl_p99",
    "kl_max", "top1_agreement", "same_tokens", "greedy", "settings", "isa", "threads",
    "kv_bytes_per_token", "file_bytes", "held_bytes", "bytes_per_weight",
    "held_bytes_per_weight", "prefill_tokens_per_second", "decode_tokens_per_second", "kernels",
}  # fmt: skip
SMALL = ("--tokens", "300", "--context", "128", "--threads", "2")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["fidelity", *arguments])
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.stdout


def rows(*arguments: str) -> Any:
    return strict_json.loads(run(*arguments, "--json"))


def test_json(talking: Path) -> None:
    row = rows(str(talking), *SMALL)
    assert row.keys() == SCHEMA
    assert row["positions"] == row["tokens"] == 300
    assert row["kl_mean"] < 1e-3  # bf16 activations and cache
    assert row["kl_p99"] >= row["kl_median"] > 0
    assert row["perplexity"] == pytest.approx(row["reference_perplexity"], rel=1e-2)
    assert row["bytes_per_weight"] == 2.0
    assert row["kernels"]["faults"] == []
    assert row["greedy"]["prompts"] == 8
    assert row["greedy"]["tokens"] == 32
    assert row["file_bytes"] == (talking / "model.safetensors").stat().st_size
    assert row["decode_tokens_per_second"] > 0
    assert row["settings"] == {"threads": 2}


def test_against_itself_as_served_exactly_nothing_is_lost(talking: Path) -> None:
    row = rows(str(talking), "--reference", "served", "--no-speed", "--no-kernels", *SMALL)
    assert (row["kl_mean"], row["kl_max"], row["top1_agreement"]) == (0.0, 0.0, 1.0)
    assert row["perplexity"] == row["reference_perplexity"]
    assert row["greedy"]["first"] == row["greedy"]["tokens"]
    assert row["greedy"]["never"] == row["greedy"]["prompts"]
    assert "kernels" not in row
    assert "decode_tokens_per_second" not in row


@pytest.mark.parametrize(
    ("setting", "value", "most"),
    [
        ("kv_cache_dtype", "fp16", 1e-3),
        ("kv_cache_dtype", "int8", 1e-3),
        ("kv_cache_dtype", "int4", 0.1),
        ("quantization", "int8", 0.01),
        ("quantization", "int4", 1.0),
    ],
)
def test_what_a_setting_loses(talking: Path, setting: str, value: str, most: float) -> None:
    common = ("--reference", "served", "--no-speed", *SMALL)
    option = "--" + setting.replace("_", "-")
    row = rows(str(talking), "--against", str(talking), option, value, *common)
    assert row["settings"][setting] == value
    assert 0 < row["kl_mean"] < most
    assert row["kernels"]["faults"] == []  # of the weights as they are held
    assert row["bytes_per_weight"] == 2.0
    model = load(talking)
    plain = sum(held_bytes(weight) for weight in model.weights.values())
    assert (row["held_bytes"] == plain) is (setting != "quantization")
    sixteen = KvLayout.of(model.config).bytes_per_token
    narrower = setting == "kv_cache_dtype" and value != "fp16"
    assert (row["kv_bytes_per_token"] < sixteen) is narrower


def test_several_models_make_a_table_and_a_plot(talking: Path, noisy: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    text = run(str(talking), str(noisy), "--against", str(talking), "--plot", str(plot),
               "--no-speed", *SMALL)  # fmt: skip
    assert text.count("\n| ") == 3  # a head and two models
    assert "against" in text
    assert "<svg" in plot.read_text()
    found = rows(str(talking), str(noisy), "--no-speed", "--no-kernels", *SMALL)
    assert found[1]["kl_mean"] > 10 * found[0]["kl_mean"]
    assert found[1]["against"] == str(talking)
    assert found[1]["reference_perplexity"] == found[0]["reference_perplexity"]


def test_no_window_is_longer_than_what_is_served(talking: Path) -> None:
    common = ("--no-speed", "--no-kernels", *SMALL)
    row = rows(str(talking), "--max-model-len", "48", *common)
    assert row["context"] == 48
    assert row["greedy"]["tokens"] == 12


def test_nothing_is_longer_than_the_shortest_context(talking: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(talking, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    common = ("--tokens", "200", "--no-kernels", "--threads", "2")
    for model, against in ((short, talking), (talking, short)):
        for how in ("exact", "served"):
            row = rows(str(model), "--against", str(against), "--reference", how, *common)
            assert row["context"] == 64
            assert row["greedy"]["tokens"] == 16
            assert row["decode_tokens_per_second"] > 0


def test_what_was_measured_stands_when_drawing_fails(
    talking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("octavo.tools.quantize.plot.draw", fail)
    result = CliRunner().invoke(
        app,
        ["fidelity", str(talking), "--plot", str(tmp_path / "x.svg"), "--no-speed", "--no-kernels",
         *SMALL],
    )  # fmt: skip
    assert isinstance(result.exception, OSError)
    assert "perplexity" in result.stdout


def test_a_text_of_ones_own(talking: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A short text.")
    row = rows(str(talking), "--text", str(text), "--no-speed", "--no-kernels")
    assert row["text"] == str(text)
    assert row["tokens"] == len(load(talking).tokenizer.encode("A short text."))
    out = run(str(talking), "--text", str(text), "--no-speed")
    assert "perplexity" in out
    assert "hold the file's numbers" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 tokens; at least 2 are needed"),
        (b"a", "has 1 tokens; at least 2 are needed"),
        (b"\x80\xff\x00binary", "is not UTF-8 text: byte 0"),
    ],
)
def test_texts_that_are_none(talking: Path, tmp_path: Path, content: bytes, message: str) -> None:
    text = tmp_path / "text"
    text.write_bytes(content)
    result = CliRunner().invoke(app, ["fidelity", str(talking), "--text", str(text)])
    assert isinstance(result.exception, SettingsError)
    assert f"{text}: {message}" in str(result.exception)


def test_a_text_that_is_not_there(talking: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["fidelity", str(talking), "--text", str(tmp_path / "none")])
    assert isinstance(result.exception, FileNotFoundError)


def test_other_vocabularies_are_refused(talking: Path) -> None:
    other = str(ORACLE / "tiny-llama.gguf")
    result = CliRunner().invoke(app, ["fidelity", str(talking), "--against", other])
    assert isinstance(result.exception, CheckpointError)
    assert "a vocabulary of" in str(result.exception)
    assert "and" in str(result.exception)


def test_a_vocabulary_of_other_tokens_is_refused(talking: Path) -> None:
    from dataclasses import replace

    model = load(talking)

    class Shifted:
        def __getattr__(self, name: str) -> Any:
            return getattr(model.tokenizer, name)

        def token_bytes(self, token_id: int) -> bytes:
            return model.tokenizer.token_bytes(token_id + 1)

    other: Checkpoint = replace(model, tokenizer=cast(Tokenizer, Shifted()))
    with pytest.raises(CheckpointError, match=r"token \d+ is .* their vocabularies differ"):
        fidelity.check_vocabulary(model, other, [np.arange(40, 60, dtype=np.int32)])


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("--reference", "guess"), SystemExit, "neither exact nor served"),
        (("--plot", "x.bmp"), SettingsError, "a plot is a file of .svg, .png, .pdf"),
        (("--context", "1"), SettingsError, "no room for two"),
        (("--tokens", "0"), SystemExit, "at least one token"),
        (("--plot", "none/x.svg"), SettingsError, "there is no folder none"),
        (("--speculative-config", '{"method": "ngram"}'), SettingsError, "speculative_config has"),
        (
            ("--kv-cache-memory", "1KiB"),
            SettingsError,
            "KV blocks of 2,048 bytes = 98,304 bytes; the cache has 1,024",
        ),
    ],
)
def test_wrong_use(
    talking: Path, arguments: tuple[str, ...], kind: type[Exception], message: str
) -> None:
    result = CliRunner().invoke(app, ["fidelity", str(talking), *arguments])
    assert isinstance(result.exception, kind)
    assert message in " ".join((result.output + str(result.exception)).split())
