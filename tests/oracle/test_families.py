"""Tiny models of every family as Hugging Face folders, against transformers' recorded logits.

Tolerances are shares of the logits' standard deviation. transformers computed in float32 on keys
and values rounded to float16, as Octavo's cache has them. So float32 weights differ by the order of
sums, and by single keys and values that this puts on the other side of a rounding. bfloat16 weights
are the same numbers to both; a tier that multiplies them with bfloat16 units rounds activations to
eight bits of mantissa as well (one part in 512), as every engine on those units does.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.driving import Driver, Float32
from octavo.loader import load
from octavo.loader.base import Checkpoint, WeightFormat
from oracle.tiny_folders import FAMILIES, folder, gguf_file, recorded

NAMES = sorted(path.name for path in FAMILIES.iterdir() if path.is_dir())
TIERS = ("generic", "avx2", "avx512", "avx512_bf16")
PROMPT = 40
EXACT = (1e-4, 4e-3)  # mean and largest difference
ROUNDED = (1.5e-2, 0.2)


def run(checkpoint: Checkpoint, isa: str, ids: list[int], chunks: list[int], **kw: Any) -> Float32:
    try:
        driver = Driver(checkpoint, isa=isa, kv_dtype="fp16", **kw)
    except ValueError as error:
        pytest.skip(str(error))
    logits = driver.run(ids, chunks)
    driver.executor.close()
    return logits


def assert_close(got: Float32, expected: Float32, tolerance: tuple[float, float] = EXACT) -> None:
    difference = np.abs(got - expected) / expected.std()
    print(f"mean {difference.mean():.1e}, most {difference.max():.1e}")
    assert difference.mean() < tolerance[0]
    assert difference.max() < tolerance[1]


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("name", NAMES)
def test_float32(name: str, isa: str, tmp_path: Path) -> None:
    """The prompt at once, then every further token by itself."""
    meta, arrays = recorded(name)
    checkpoint = load(folder(name, tmp_path / name))
    got = run(checkpoint, isa, arrays["ids"].tolist(), [PROMPT, 1])
    assert_close(got[meta["first_row"] :], arrays["float32"])


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name: str, isa: str, tmp_path: Path) -> None:
    meta, arrays = recorded(name)
    checkpoint = load(folder(name, tmp_path / name, bf16=True))
    matrices = {role: w.format for role, w in checkpoint.weights.items() if len(w.shape) == 2}
    for role, format in matrices.items():
        router = role.endswith("ffn_gate_inp")
        assert format is (WeightFormat.F32 if router else WeightFormat.BF16)
    ids = arrays["ids"].tolist()
    got = run(checkpoint, isa, ids, [PROMPT, 1])
    tolerance = ROUNDED if isa == "avx512_bf16" else EXACT
    assert_close(got[meta["first_row"] :], arrays["bfloat16"], tolerance)
    # Same bits however it is cut, and on however many threads.
    assert np.array_equal(run(checkpoint, isa, ids, [len(ids)], threads=2), got)


@pytest.mark.parametrize(
    ("name", "label"), [(name, label) for name in NAMES for label in recorded(name)[0]["variants"]]
)
def test_variants(name: str, label: str, tmp_path: Path) -> None:
    """Other rotary scalings, windows and ways to write a config, on the same weights."""
    meta, arrays = recorded(name)
    variant = meta["variants"][label]
    checkpoint = load(folder(name, tmp_path / name, variant["changes"]))
    checkpoint = replace(checkpoint, config=checkpoint.config.for_length(variant["tokens"]))
    ids = arrays["ids"].tolist()[: variant["tokens"]]
    got = run(checkpoint, "generic", ids, [PROMPT, 1])[meta["first_row"] :: meta["variant_stride"]]
    expected = arrays[f"{label}.float32"]
    assert_close(got, expected)
    # It is not the base model's result: the change was heard.
    base = arrays["float32"][:: meta["variant_stride"]][: len(expected)]
    assert np.abs(expected - base).max() > 0.05


def labels(name: str) -> list[str]:
    if not (path := FAMILIES / name / "gguf.npz").exists():
        return []
    with np.load(path) as data:
        return [label for label in data if label != "meta"]


@pytest.mark.parametrize(
    ("name", "label"), [(name, label) for name in NAMES for label in labels(name)]
)
def test_gguf(name: str, label: str, tmp_path: Path) -> None:
    """The same models as GGUF: other names, other orders, the same logits."""
    meta, arrays = recorded(name)
    tokens, key, stride = PROMPT + 64, "float32", 1
    if label != "base":
        tokens, stride = meta["variants"][label]["tokens"], meta["variant_stride"]
        key = f"{label}.float32"
    checkpoint = load(gguf_file(name, label, tmp_path / "model.gguf"))
    checkpoint = replace(checkpoint, config=checkpoint.config.for_length(tokens))
    got = run(checkpoint, "generic", arrays["ids"].tolist()[:tokens], [PROMPT, 1])
    assert_close(got[meta["first_row"] :: stride], arrays[key])
