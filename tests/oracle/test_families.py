"""Tiny models of every family, as folders and GGUF files, against transformers' recorded logits.

Tolerances are shares of the logits' standard deviation. transformers computed in float32 on keys
and values rounded to float16, as Octavo's cache has them. So float32 weights differ by the order of
sums, and by single keys and values that this puts on the other side of a rounding. bfloat16 weights
are the same numbers to both; a tier that multiplies them with bfloat16 units rounds activations to
eight bits of mantissa as well (one part in 512), as every engine on those units does.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from executor.driving import Driver, Float32
from octavo.loader import load
from octavo.loader.base import Checkpoint, WeightFormat
from octavo.loader.bind import ROUTERS
from oracle.tiny_folders import BASE, FAMILIES, folder, gguf_file, gguf_labels, labels, recorded

NAMES = sorted(path.name for path in FAMILIES.iterdir() if path.is_dir())
TIERS = ("generic", "avx2", "avx512_bf16")  # avx512 has the code of the last, but for BF16
CHUNKS = ([150, 1], [64], [7], [1])  # of a sequence; the last one repeats
EXACT = (2e-4, 4e-3)  # mean and largest difference
# Of activations in bfloat16, nine tenths of the differences: after rounding, a token may go to
# other experts, and a recurrent state carries that on.
ROUNDED = 0.06


def run(
    checkpoint: Checkpoint, isa: str, ids: list[int], chunks: list[int], threads: int = 1
) -> Float32:
    config = checkpoint.config.for_length(len(ids))
    try:
        driver = Driver(
            replace(checkpoint, config=config), isa=isa, kv_dtype="fp16", threads=threads
        )
    except ValueError as error:
        pytest.skip(str(error))
    logits = driver.run(ids, chunks)
    driver.executor.close()
    return logits


def assert_close(difference: Float32, tolerance: tuple[float, float] = EXACT) -> None:
    print(f"mean {difference.mean():.1e}, most {difference.max():.1e}")
    assert difference.mean() < tolerance[0]
    assert difference.max() < tolerance[1]


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("name", NAMES)
def test_float32(name: str, isa: str, tmp_path: Path) -> None:
    """The prompt at once, then every further token by itself."""
    expected = recorded(name)
    checkpoint = load(folder(name, tmp_path / name))
    got = run(checkpoint, isa, expected.tokens(BASE), [expected.prompt, 1])
    assert_close(expected.off(BASE, got))


@pytest.mark.parametrize("isa", ["generic", "avx512_bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name: str, isa: str, tmp_path: Path) -> None:
    expected = recorded(name)
    checkpoint = load(folder(name, tmp_path / name, bf16=True))
    matrices = {role: w.format for role, w in checkpoint.weights.items() if len(w.shape) == 2}
    for role, format in matrices.items():
        router = role.endswith(ROUTERS)
        assert format is (WeightFormat.F32 if router else WeightFormat.BF16)
    ids = expected.tokens(BASE)
    got = run(checkpoint, isa, ids, [expected.prompt, 1])
    difference = expected.off(f"{BASE}.bfloat16", got)
    if isa == "avx512_bf16":
        assert np.quantile(difference, 0.9) < ROUNDED
    else:
        assert_close(difference)
    # Same bits however it is cut, and on however many threads.
    assert (run(checkpoint, isa, ids, [len(ids)], threads=2) == got).all()


@pytest.mark.parametrize(
    ("name", "label"), [(name, label) for name in NAMES for label in labels(name) if label != BASE]
)
def test_cases(name: str, label: str, tmp_path: Path) -> None:
    """Other rotary scalings, windows, shapes and ways to write a config, in chunks of all sizes."""
    expected = recorded(name)
    chunks = CHUNKS[labels(name).index(label) % len(CHUNKS)]
    checkpoint = load(folder(name, tmp_path / name, label=label))
    got = run(checkpoint, "generic", expected.tokens(label), chunks)
    assert_close(expected.off(label, got))


@pytest.mark.parametrize(
    ("name", "label"), [(name, label) for name in NAMES for label in gguf_labels(name)]
)
def test_gguf(name: str, label: str, tmp_path: Path) -> None:
    """The same models as GGUF: other names, other orders, the same logits."""
    expected = recorded(name)
    checkpoint = load(gguf_file(name, label, tmp_path / "model.gguf"))
    got = run(checkpoint, "generic", expected.tokens(label), [expected.prompt, 1])
    assert_close(expected.off(label, got))
