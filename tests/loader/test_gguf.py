"""The GGUF reader: what it reads from good files, and that it refuses bad ones by name."""

import os
import random
import socket
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import (
    ARRAY,
    BOOL,
    F32,
    FLOAT32,
    INT32,
    Q4_K,
    Q8_0,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    Gguf,
    Tensor,
    dynamic_llama,
    string,
    tiny_gemma3,
    tiny_llama,
    tiny_mixtral,
)

from executor.driving import Driver
from octavo.loader import load
from octavo.loader.base import CheckpointError, WeightFormat
from octavo.loader.gguf import GgufFile


def small() -> Gguf:
    file = Gguf()
    file.set("general.name", STRING, "näme").set("count", UINT32, 7).set("on", BOOL, True)
    file.set("reals", ARRAY, FLOAT32, [0.5, -1.0]).set("words", ARRAY, STRING, ["a", "", "ß"])
    file.tensors = [
        Tensor("m", (3, 32), Q8_0, bytes(range(102))),
        Tensor("v", (5,), F32, np.arange(5, dtype="<f4").tobytes()),
    ]
    return file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def refusal(path: Path, data: bytes | None = None) -> str:
    """What the reader says about a file, less the name, which it must begin with."""
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        GgufFile(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


# ── Good files ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("version", [2, 3])
def test_reads_metadata_and_tensors(path: Path, version: int) -> None:
    file = small()
    file.version = version
    read = GgufFile(file.write(path))
    assert read.version == version
    assert read.get("general.name", str) == "näme"
    assert read.get("count", int) == 7
    assert read.get("count", float) == 7.0
    assert read.get("on", bool) is True
    assert read.get("absent", int, 3) == 3
    reals = read.numbers("reals")
    assert reals.tolist() == [0.5, -1.0]
    words = read.strings("words")
    assert words.text() == ["a", "", "ß"]
    matrix = read.weight("m")
    assert (matrix.format, matrix.shape) == (WeightFormat.Q8_0, (3, 32))
    assert matrix.data.tobytes() == bytes(range(102))
    assert not matrix.data.flags.writeable
    assert read.weight("v").data.view("<f4").tolist() == [0, 1, 2, 3, 4]


def test_alignment_of_the_file_is_used(path: Path) -> None:
    file = small().set("general.alignment", UINT32, 128)
    file.alignment = 128
    read = GgufFile(file.write(path))
    assert read.tensors["m"].offset % 128 == 0
    assert read.weight("v").data.view("<f4").tolist() == [0, 1, 2, 3, 4]


def test_nested_arrays_are_read(path: Path) -> None:
    file = small().set("nested", ARRAY, ARRAY, [(UINT8, [1, 2]), (STRING, ["x"])])
    nested = GgufFile(file.write(path)).metadata["nested"]
    assert isinstance(nested, list)
    assert nested[0].tolist() == [1, 2]
    assert nested[1].text() == ["x"]


def test_released_pages_are_read_again(path: Path) -> None:
    read = GgufFile(small().write(path))
    weight = read.weight("m")
    read.release()
    assert weight.data.tobytes() == bytes(range(102))


def test_wrong_kind_of_value_is_named(path: Path) -> None:
    read = GgufFile(small().write(path))
    with pytest.raises(CheckpointError, match="key count is a int, not a str"):
        read.get("count", str)
    with pytest.raises(CheckpointError, match="absent is missing"):
        read.get("absent", str)
    with pytest.raises(CheckpointError, match="reals is not an array of strings"):
        read.strings("reals")
    with pytest.raises(CheckpointError, match="words is not an array of numbers"):
        read.numbers("words")


# ── Bad files ───────────────────────────────────────────────────────────────────────────────────


def test_no_file_a_folder_and_a_device(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.gguf")
    assert "not a regular file" in refusal(tmp_path)
    assert "not a regular file" in refusal(Path("/dev/zero"))
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert "not a regular file" in refusal(tmp_path / "socket")


@pytest.mark.parametrize("size", [0, 1, 4, 23])
def test_shorter_than_a_header(path: Path, size: int) -> None:
    assert f"has {size} bytes" in refusal(path, small().build()[:size])


@pytest.mark.parametrize("size", range(24, len(small().header()), 7))
def test_header_cut_anywhere(path: Path, size: int) -> None:
    assert refusal(path, small().build()[:size])


def test_data_cut(path: Path) -> None:
    assert "'v' ends at byte" in refusal(path, small().build()[:-16])


def with_version(version: bytes) -> bytes:
    data = small().build()
    return data[:4] + version + data[8:]


def with_counts(tensors: int, keys: int, room: int = 40) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, keys) + bytes(room)


def many_arrays(count: int) -> bytes:
    return struct.pack("<IQ", ARRAY, count) + struct.pack("<IQ", UINT8, 0) * count


def raw_key(value: bytes) -> bytes:
    """A file of one key, "k", whose type and value are the given bytes."""
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string("k") + value


def changed(change: Callable[[Gguf], object]) -> bytes:
    file = small()
    change(file)
    return file.build()


def twice() -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 2)
    return head + 2 * (string("same") + struct.pack("<II", UINT32, 1))


HUGE = [1 << 20, 1 << 32, 1 << 62, (1 << 64) - 1]
BAD: dict[str, tuple[bytes, str]] = {
    "magic": (b"GGML" + bytes(60), "not with the magic"),
    "version 1": (with_version(b"\1\0\0\0"), "version 1; supported are 2 and 3"),
    "version 4": (with_version(b"\4\0\0\0"), "version 4"),
    "big-endian": (with_version(b"\0\0\0\3"), "big-endian"),
    "duplicate key": (twice(), "'same' appears twice"),
    "empty key": (changed(lambda f: f.set("", UINT32, 1)), "key 5 is empty"),
    "key not UTF-8": (
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string(b"\xff") + bytes(20),
        "not UTF-8",
    ),
    "long key": (changed(lambda f: f.set("k" * 65536, UINT32, 1)), "more than 65535"),
    "value not UTF-8": (changed(lambda f: f.set("s", STRING, b"\xff")), "value of s is not UTF-8"),
    "unknown type": (raw_key(struct.pack("<I", 13) + bytes(8)), "unknown value type 13"),
    "bool of 2": (raw_key(struct.pack("<IB", BOOL, 2)), "bool of value 2"),
    "bools of 2": (raw_key(struct.pack("<IIQB", ARRAY, BOOL, 1, 2)), "array of bools"),
    "array of unknown type": (raw_key(struct.pack("<IIQ", ARRAY, 99, 0)), "unknown type 99"),
    "deep arrays": (
        raw_key(struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000 + bytes(12)),
        "more than 4 deep",
    ),
    "many keys": (with_counts(0, 65537, 65537 * 14), "65537 metadata keys, more than 65536"),
    "many tensors": (with_counts(65537, 0, 65537 * 33), "65537 tensors, more than 65536"),
    "many arrays": (
        raw_key(struct.pack("<IIQ", ARRAY, ARRAY, 2) + 2 * many_arrays(40_000)),
        "80002 arrays in arrays, more than 65536",
    ),
    "alignment 0": (changed(lambda f: f.set("general.alignment", UINT32, 0)), "alignment is 0"),
    "alignment 24": (changed(lambda f: f.set("general.alignment", UINT32, 24)), "is 24, not a"),
    "alignment 2^31": (
        changed(lambda f: f.set("general.alignment", UINT32, 1 << 31)),
        "power of two",
    ),
    "alignment text": (changed(lambda f: f.set("general.alignment", STRING, "x")), "not a int"),
    "zero dimension": (
        changed(lambda f: f.tensors.append(Tensor("z", (4, 0)))),
        "'z' has a dimension of zero",
    ),
    "no dimensions": (changed(lambda f: f.tensors.append(Tensor("z", ()))), "has 0 dimensions"),
    "five dimensions": (
        changed(lambda f: f.tensors.append(Tensor("z", (1, 1, 1, 1, 1)))),
        "has 5 dimensions",
    ),
    "unnamed tensor": (changed(lambda f: f.tensors.append(Tensor("", (1,)))), "2 is empty"),
    "long name": (changed(lambda f: f.tensors.append(Tensor("n" * 65, (1,)))), "more than 64"),
    "duplicate tensor": (
        changed(lambda f: f.tensors.append(Tensor("v", (1,)))),
        "'v' appears twice",
    ),
    "unsupported type": (
        changed(lambda f: f.tensors.append(Tensor("q", (256,), 40))),
        "'q' is of type NVFP4, which is not supported; supported are F32",
    ),
    "unknown tensor type": (
        changed(lambda f: f.tensors.append(Tensor("q", (256,), 77))),
        "unknown (77)",
    ),
    "half a block": (
        changed(lambda f: f.tensors.append(Tensor("q", (2, 128), Q4_K))),
        "'q' has rows of 128 elements, not whole blocks of 256 as Q4_K needs",
    ),
    "overlap": (
        changed(lambda f: f.tensors.append(Tensor("o", (8,), offset=64))),
        "'o' overlaps tensor 'm'",
    ),
    "same place": (changed(lambda f: f.tensors.append(Tensor("o", (8,), offset=0))), "overlaps"),
    "unaligned offset": (
        changed(lambda f: f.tensors.append(Tensor("o", (1,), offset=1000 * 32 + 4))),
        "offset",
    ),
    "past the end": (
        changed(lambda f: f.tensors.append(Tensor("o", (8,), data=b"", offset=320))),
        "'o' ends at byte",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_refused_by_name(path: Path, name: str) -> None:
    data, reason = BAD[name]
    assert reason in refusal(path, data)


@pytest.mark.parametrize("huge", HUGE)
def test_huge_declarations_cost_nothing(path: Path, huge: int) -> None:
    cases = [
        with_counts(huge, 0),
        with_counts(0, huge),
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, huge) + bytes(64),  # length of a key
        raw_key(struct.pack("<IQ", STRING, huge) + bytes(64)),
        raw_key(struct.pack("<IIQQ", ARRAY, STRING, 1, huge) + bytes(64)),
        *(
            raw_key(struct.pack("<IIQ", ARRAY, kind, huge) + bytes(64))
            for kind in (UINT8, BOOL, INT32, UINT64, STRING, ARRAY)
        ),
        *(
            changed(
                lambda f, shape=shape: f.tensors.append(Tensor("h", shape, data=b"", offset=96))
            )
            for shape in ((huge,), (huge, huge), (1, huge, huge, huge))
        ),
        changed(lambda f: f.tensors.append(Tensor("h", (1,), data=b"", offset=huge & ~31))),
    ]
    for data in cases:
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(CheckpointError):
            GgufFile(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 19, data[:80]


# ── Mutations ───────────────────────────────────────────────────────────────────────────────────


def mutate(data: bytes, end: int, rng: random.Random) -> bytes:
    """A few faults in the bytes before ``end``, of the kinds that upset parsers."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(min(end, len(out) - 8))
        match rng.randrange(8):
            case 0 | 1:
                out[at] = rng.randrange(256)
            case 2:
                out[at] ^= 1 << rng.randrange(8)
            case 3:
                values = (0, 1, 0x7F, 0x80, 0xFF)
                out[at : at + 4] = bytes([rng.choice(values)]) * 4
            case 4:
                value = rng.choice((0, 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1))
                out[at : at + 8] = struct.pack("<Q", value)
            case 5:
                del out[at : at + rng.randrange(1, 64)]
            case 6:
                out[at:at] = out[at : at + rng.randrange(1, 64)]
            case _:
                del out[rng.randrange(len(out) // 2, len(out)) + 9 :]
    return bytes(out)


def survive(tmp_path: Path, count: int, seed: int) -> None:
    """Whole loads of mutated files end in a checkpoint that works or a `CheckpointError`."""
    rng = random.Random(seed)
    originals = [tiny_llama(1), tiny_gemma3(1), tiny_mixtral(1), dynamic_llama()]
    path = tmp_path / "mutated.gguf"
    loaded = 0
    for index in range(count):
        original = originals[index % 4]
        path.write_bytes(mutate(original.build(), len(original.header()), rng))
        with suppress(CheckpointError):
            tokenizer = load(path).tokenizer
            loaded += 1
            ids = tokenizer.encode("hello the  abc <tool>\n")
            assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
            tokenizer.decode(ids)
    assert count // 50 < loaded < count  # the mutations reach beyond the first check, and do harm


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_any_bytes_run(tmp_path: Path, seed: int) -> None:
    """Formats of all kinds in one file, whatever their blocks hold: numbers that may be NaN."""
    checkpoint = load(dynamic_llama(seed).write(tmp_path / "any.gguf"))
    logits = Driver(checkpoint).run([1, 2, 3])
    assert logits.shape == (3, checkpoint.config.vocab_size)


@pytest.mark.parametrize(
    ("count", "seed"), [(2000, 1), pytest.param(100_000, 100, marks=pytest.mark.long)]
)
def test_mutated_files(tmp_path: Path, count: int, seed: int) -> None:
    survive(tmp_path, count, seed)
