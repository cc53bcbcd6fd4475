"""Safetensors files: read as the format's own library writes them, and hostile ones refused."""

import json
import os
import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from octavo.loader.base import CheckpointError, WeightFormat
from octavo.loader.safetensors import MAX_HEADER, SafetensorsFile

VALUES = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.linspace(-2, 2, 5).astype(np.float16),
    "c": np.linspace(-2, 2, 6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "scalar": np.array(3.5, np.float32),
    "none": np.zeros((0, 4), np.float32),
    "ids": np.arange(3, dtype=np.int64),
}
FORMAT_NAMES = ("F32", "F16", "BF16")
FORMATS = {"a.weight": WeightFormat.F32, "b": WeightFormat.F16, "c": WeightFormat.BF16}


def build(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def opened(path: Path, data: bytes) -> SafetensorsFile:
    path.write_bytes(data)
    return SafetensorsFile(path)


def test_views_of_what_the_library_wrote(tmp_path: Path) -> None:
    file = opened(tmp_path / "m.safetensors", save(VALUES, {"format": "pt"}))
    assert file.tensors.keys() == VALUES.keys()
    for name, format in FORMATS.items():
        weight = file.weight(name)
        assert (weight.name, weight.format, weight.shape) == (name, format, VALUES[name].shape)
        assert weight.data.tobytes() == VALUES[name].tobytes()
        assert not weight.data.flags.writeable
        assert not weight.data.flags.owndata
    assert file.weight("scalar").shape == ()
    assert file.weight("none").data.nbytes == 0
    with pytest.raises(CheckpointError, match="'ids' is of type I64, which is not supported"):
        file.weight("ids")
    file.release()
    assert file.weight("c").data.tobytes() == VALUES["c"].tobytes()


def test_split_is_by_rows_and_views(tmp_path: Path) -> None:
    weight = opened(tmp_path / "m.safetensors", save(VALUES)).weight("a.weight")
    first, second = weight.split([1, 2])
    assert (first.shape, second.shape) == ((1, 4), (2, 4))
    assert second.data.view(np.float32).tolist() == list(range(4, 12))
    assert np.shares_memory(second.data, weight.data)


def test_a_tensor_out_of_line_is_aligned(tmp_path: Path) -> None:
    values = np.arange(2, dtype=np.float32)
    for pad in range(4):
        header = json.dumps({"x": tensor()}).encode() + b" " * pad
        weight = opened(tmp_path / "m.safetensors", build(header, values.tobytes())).weight("x")
        assert weight.data.view(np.float32).tolist() == [0, 1]
        assert weight.data.ctypes.data % 4 == 0


FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes, fewer than a safetensors header's"),
    "length beyond the file": (build({}, length=10**6), "header of 1000000 bytes; only"),
    "length of 2^63": (build({}, length=1 << 63), f"more than {MAX_HEADER}"),
    "no JSON": (build(b"{nope"), "is not valid JSON"),
    "no UTF-8": (build(b'{"\xff": 1}'), "is not valid JSON"),
    "a list": (build(b"[]"), "is not a JSON object"),
    "deep": (build(b'{"a":' + b"[" * 200000), "nested too deeply"),
    "twice": (build(b'{"a": {}, "a": {}}'), "'a' appears twice"),
    "metadata of numbers": (build({"__metadata__": {"a": 1}}), "not an object of strings"),
    "no object": (build({"x": 1}), "tensor 'x' is not described"),
    "no dtype": (build({"x": {"shape": [], "data_offsets": [0, 4]}}), "tensor 'x' is not descr"),
    "one key more": (build({"x": tensor() | {"a": 1}}, bytes(8)), "tensor 'x' is not described"),
    "unknown dtype": (build({"x": tensor("F33")}, bytes(8)), "unknown type 'F33'"),
    "dtype a list": (build({"x": tensor(["F32"])}, bytes(8)), "unknown type ['F32']"),
    "negative shape": (build({"x": tensor(shape=[-2])}, bytes(8)), "has the shape [-2]"),
    "shape of true": (build({"x": tensor(shape=[True, 2])}, bytes(8)), "has the shape [True"),
    "shape of floats": (build({"x": tensor(shape=[2.0])}, bytes(8)), "has the shape [2.0]"),
    "nine dimensions": (build({"x": tensor(shape=[1] * 9)}, bytes(8)), "has the shape [1, 1"),
    "huge shape": (build({"x": tensor(shape=[1 << 62] * 8)}, bytes(8)), "does not take the 8"),
    "shape and size": (build({"x": tensor(shape=[3])}, bytes(8)), "does not take the 8 bytes"),
    "three offsets": (build({"x": tensor(offsets=[0, 4, 8])}, bytes(8)), "data_offsets [0, 4, 8]"),
    "backwards": (build({"x": tensor(offsets=[8, 0])}, bytes(8)), "lies at bytes 8 to 0 of 8"),
    "past the end": (build({"x": tensor()}, bytes(7)), "lies at bytes 0 to 8 of 7: truncated"),
    "overlap": (
        build({"x": tensor(), "y": tensor(offsets=[4, 12])}, bytes(12)),
        "tensor 'y' overlaps tensor 'x'",
    ),
    "gap": (build({"x": tensor(offsets=[4, 12])}, bytes(12)), "4 bytes before tensor 'x' belong"),
    "rest": (build({"x": tensor()}, bytes(9)), "1 bytes after tensor 'x' belong to no tensor"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_refused(name: str, tmp_path: Path) -> None:
    data, reason = FAULTS[name]
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path / "m.safetensors", data)
    assert str(caught.value).startswith(f"{tmp_path}/m.safetensors: ")
    assert reason in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        SafetensorsFile(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        SafetensorsFile(tmp_path)


def mutations(count: int, path: Path) -> None:
    """Bytes changed, cut out or doubled in the header: read as something, or refused by name."""
    good = save(VALUES, {"format": "pt"})
    header = 8 + int.from_bytes(good[:8], "little")
    rng = random.Random(count)
    read = 0
    for _ in range(count):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(header)
            match rng.randrange(4):
                case 0:
                    data[at] = rng.choice(b'0123456789-{}[],:"\\ \x00\xff')
                case 1:
                    data[at] ^= 1 << rng.randrange(8)
                case 2:
                    del data[at : at + rng.randrange(1, 9)]
                case 3:
                    data[at:at] = data[at : at + rng.randrange(1, 9)]
        try:
            file = opened(path, bytes(data))
        except CheckpointError as error:
            if not str(error).startswith(str(path)):
                raise
            continue
        read += 1
        for name, info in file.tensors.items():
            assert 0 <= info.begin <= info.end <= len(data)
            if info.dtype in FORMAT_NAMES:
                assert file.weight(name).data.nbytes == info.end - info.begin
    assert 0 < read < count


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_headers(count: int, tmp_path: Path) -> None:
    mutations(count, tmp_path / "m.safetensors")
