"""The model files that are made: ggml's blocks, and files that load and are the same each time."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import make_models as make
from loader.gguf_writer import Q4_1, tiny_llama
from octavo import loader
from octavo.loader.base import WeightFormat
from octavo.loader.gguf import GgufFile
from octavo.models.config import Experts


def from_q4_0(data: make.Bytes) -> make.Floats:
    blocks = data.reshape(-1, 18)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    quants = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return ((quants.astype(np.float32) - 8) * scale).reshape(-1)


@given(st.lists(st.floats(-100, 100, width=32), min_size=32, max_size=32))
def test_q4_0_is_as_near_as_its_scale_allows(values: list[float]) -> None:
    exact = np.array(values, np.float32)
    size = float(np.abs(exact).max())
    # One step is size / 8; the end opposite to the largest value is one step short of it.
    error = np.abs(from_q4_0(make.to_q4_0(exact)) - exact)
    assert error.max() <= size / 8 * 1.01 + 8 * 2**-24
    assert error[np.abs(exact).argmax()] <= size * 2**-10 + 8 * 2**-24


def test_q4_0_by_hand() -> None:
    """The largest is −4: d = 0.5, and q = ⌊w / d + 8.5⌋: ties go up, 15 is the end."""
    values = np.zeros(32, np.float32)
    values[[0, 1, 2, 16, 17]] = [-4, 0.25, 3.9, 1.0, -0.25]
    block = make.to_q4_0(values)
    assert block[:2].view("<f2")[0] == 0.5
    assert block[2:5].tolist() == [0 | 10 << 4, 9 | 8 << 4, 15 | 8 << 4]
    assert (make.to_q4_0(np.zeros(32, np.float32))[2:] == 0x88).all()


def test_q4_1_by_hand() -> None:
    block = np.concatenate(
        [np.array([0.5, -2], "<f2").view(np.uint8), np.arange(16, dtype=np.uint8) * 17]
    )
    expected = np.arange(16) * 0.5 - 2
    assert make.from_q4_1(block).tolist() == [*expected, *expected]


DENSE = make.Shape("dense", "llama", 2, 64, 4, 2, 16, 128)
SPARSE = make.Shape("sparse", "qwen3moe", 2, 64, 4, 2, 16, 96, experts=5, chosen=2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """To take the tokenizer from."""
    return tiny_llama().write(tmp_path / "source.gguf")


@pytest.mark.parametrize("shape", [DENSE, SPARSE], ids=lambda shape: shape.name)
def test_the_random_model_loads_and_is_the_same_each_time(
    shape: make.Shape, source: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("one.gguf", "two.gguf", "other.gguf")]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        make.write(path, *make.random_q4_0(shape, source, seed))
    one, two, other = (path.read_bytes() for path in paths)
    assert one == two != other
    assert sorted(tmp_path.glob("*")) == sorted([*paths, source])

    loaded = loader.load(paths[0])
    assert (len(loaded.config.layers), loaded.config.tied_embeddings) == (2, True)
    assert loaded.config.experts == (Experts(5, 2, 96, True) if shape is SPARSE else None)
    file = GgufFile(paths[0])
    matrices = {n: t.format for n, t in file.tensors.items() if len(t.shape) > 1}
    routers = {n: matrices.pop(n) for n in list(matrices) if "gate_inp" in n}
    assert set(matrices.values()) == {WeightFormat.Q4_0}
    assert set(routers.values()) <= {WeightFormat.F32}
    down = "blk.1.ffn_down" + ("_exps" if shape is SPARSE else "")
    for name, deviation in {"blk.0.attn_q": 64**-0.5, down: (4 * shape.ffn) ** -0.5}.items():
        values = from_q4_0(file.weight(f"{name}.weight").data)
        assert values.std() == pytest.approx(deviation, rel=0.1)


def test_metadata_is_copied_as_it_is(source: Path, tmp_path: Path) -> None:
    keys = make.metadata(source)
    make.write(tmp_path / "copy.gguf", keys, [])
    copied, original = GgufFile(tmp_path / "copy.gguf"), GgufFile(source)
    assert copied.metadata.keys() == original.metadata.keys()
    assert make.metadata(tmp_path / "copy.gguf") == keys


def test_only_q4_1_is_stored_anew(tmp_path: Path) -> None:
    source = tiny_llama()
    rng = np.random.default_rng(0)
    tensor = source.tensor("blk.0.ffn_up.weight")
    blocks = rng.integers(0, 256, (tensor.shape[0], 20), np.uint8)
    blocks[:, :4] = rng.uniform(0.01, 0.1, (len(blocks), 2)).astype("<f2").view(np.uint8)
    tensor.type, tensor.data = Q4_1, blocks.tobytes()
    path = source.write(tmp_path / "source.gguf")
    make.write(tmp_path / "made.gguf", *make.smollm2_q4_0(path, 0))
    before, after = GgufFile(path), GgufFile(tmp_path / "made.gguf")
    assert after.get("general.file_type", int) == 2
    for name in before.tensors:
        old, new = before.weight(name), after.weight(name)
        if name == "blk.0.ffn_up.weight":
            assert new.format is WeightFormat.Q4_0
            exact = make.from_q4_1(old.data)
            assert np.abs(from_q4_0(new.data) - exact).max() < np.abs(exact).max() / 8
        else:
            assert (new.format, new.shape) == (old.format, old.shape)
            assert (new.data == old.data).all()
