"""Models split over several GGUF files: read as one, refused naming the file that is wrong."""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from gguf_writer import (
    ARRAY,
    INT32,
    STRING,
    UINT16,
    UINT32,
    Gguf,
    Tensor,
    split,
    tiny_llama,
    write_split,
)
from test_gguf import mutate

from octavo.loader import load
from octavo.loader.base import CheckpointError
from octavo.loader.gguf_split import first_shard, open_gguf, shard_names


def test_names() -> None:
    names = [f"a-b-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    assert all(shard_names(name) == names for name in names)
    assert {first_shard(name) for name in names} == {names[0]}
    for whole in (
        "model.gguf",
        "a-1-of-3.gguf",
        "a-00000-of-00003.gguf",
        "a-00004-of-00003.gguf",
        "a-00000-of-00000.gguf",
        "a-00001-of-00003.gguf.part",
    ):
        assert shard_names(whole) == [whole]
        assert first_shard(whole) == whole


@pytest.mark.parametrize("counts", [[0, 0], [5, 5, 0], [1, 4, 0, 2, 0]], ids=str)
def test_read_as_one_from_any_of_them(tmp_path: Path, counts: list[int]) -> None:
    """Also with no tensors in the first file, or in one between."""
    whole = load(tiny_llama().write(tmp_path / "whole.gguf"))
    paths = write_split(split(tiny_llama(), counts), tmp_path)
    for path in paths:
        checkpoint = load(path)
        assert checkpoint.path == paths[0]
        assert checkpoint.file_bytes == sum(each.stat().st_size for each in paths)
        assert checkpoint.config == whole.config
        assert checkpoint.weights.keys() == whole.weights.keys()
        checkpoint.release()
        for role, weight in whole.weights.items():
            assert checkpoint.weights[role].data.tobytes() == weight.data.tobytes()
            assert checkpoint.weights[role].name == weight.name


def test_a_joined_model_is_a_file_like_any_other(tmp_path: Path) -> None:
    """gguf-split --merge leaves split.count = 0."""
    file = tiny_llama().set("split.count", UINT16, 0).set("split.no", UINT16, 0)
    assert load(file.write(tmp_path / "joined.gguf")).config.num_heads == 4


def test_each_file_has_an_alignment_of_its_own(tmp_path: Path) -> None:
    files = split(tiny_llama(), [3, 0])
    files[1].set("general.alignment", UINT32, 256).alignment = 256
    whole = load(tiny_llama().write(tmp_path / "whole.gguf"))
    read = load(write_split(files, tmp_path)[0])
    last = "layers.1.ffn_down"
    assert read.weights[last].data.tobytes() == whole.weights[last].data.tobytes()


Change = Callable[[list[Gguf]], object]
BAD: dict[str, tuple[Change, int, str]] = {  # the change, the file that is named (from 0), and why
    "other count": (
        lambda f: f[1].set("split.count", UINT16, 4),
        1,
        r"has split\.count 4; model-00001-of-00003\.gguf has 3",
    ),
    "other number": (
        lambda f: f[2].set("split.no", UINT16, 1),
        2,
        r"says it is file 2 of a split model, but is named as file 3",
    ),
    "no number": (lambda f: f[1].drop("split.no"), 1, r"metadata key split\.no is missing"),
    "no count": (lambda f: f[2].drop("split.count"), 2, r"metadata key split\.count is missing"),
    "a number that is text": (
        lambda f: f[1].set("split.no", STRING, "1"),
        1,
        r"split\.no is a str, not a int",
    ),
    "count of tensors that differs": (
        lambda f: f[1].set("split.tensors.count", INT32, 2),
        1,
        r"has split\.tensors\.count 2; model-00001-of-00003\.gguf has 20",
    ),
    "no count of tensors": (
        lambda f: [each.drop("split.tensors.count") for each in f],
        0,
        r"metadata key split\.tensors\.count is missing",
    ),
    "a tensor too few": (
        lambda f: f[1].tensors.pop(),
        0,
        r"declares 20 tensors in its 3 files, which have 19",
    ),
    "a tensor too many": (
        lambda f: f[2].tensors.append(Tensor("blk.9.attn_norm.weight", (32,))),
        0,
        r"declares 20 tensors in its 3 files, which have 21",
    ),
    "a tensor twice": (
        lambda f: f[2].tensors.append(Tensor("output_norm.weight", (32,))),
        2,
        r"tensor 'output_norm\.weight' is in model-00001-of-00003\.gguf already",
    ),
    "a tensor twice, in later files": (
        lambda f: f[2].tensors.append(f[1].tensors[0]),
        2,
        r"is in model-00002-of-00003\.gguf already",
    ),
    "other architecture": (
        lambda f: f[1].set("general.architecture", STRING, "qwen3"),
        1,
        r"has general\.architecture 'qwen3', other than model-00001-of-00003\.gguf",
    ),
    "another magic": (lambda f: setattr(f[2], "version", 77), 2, r"is GGUF version 77"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("given", [0, 1, 2])
def test_what_does_not_fit_together_is_named(tmp_path: Path, name: str, given: int) -> None:
    change, blamed, reason = BAD[name]
    files = split(tiny_llama(), [5, 5, 0])
    change(files)
    paths = write_split(files, tmp_path)
    if name in ("no count", "other count", "other number", "no number") and given == blamed:
        # Given by itself, such a file says something else that is wrong, of itself, or is a whole
        # model of which most is missing.
        with pytest.raises(CheckpointError) as caught:
            load(paths[given])
        assert str(caught.value).startswith(f"{paths[given]}: ")
        return
    with pytest.raises(CheckpointError, match=reason) as caught:
        load(paths[given])
    assert str(caught.value).startswith(f"{paths[blamed]}: ")


def test_missing_files_are_named(tmp_path: Path) -> None:
    paths = write_split(split(tiny_llama(), [2] * 6), tmp_path)
    paths[3].unlink()
    with pytest.raises(CheckpointError) as caught:
        load(paths[1])
    assert str(caught.value) == (
        f"{paths[1]}: is one of 6 files of a split model; missing beside it: "
        "model-00004-of-00006.gguf"
    )
    for path in paths[:1] + paths[4:]:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"00001-of-00006.gguf, .*, .* and 1 more$"):
        load(paths[1])


@pytest.mark.parametrize("name", ["m.gguf", "m-00002-of-00003.gguf", "m-00001-of-00002.gguf"])
def test_a_name_that_does_not_say_so_is_refused(tmp_path: Path, name: str) -> None:
    path = split(tiny_llama(), [5, 5, 0])[0].write(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"is not named so \(…-00001-of-00003\.gguf\)$"):
        open_gguf(path)


@pytest.mark.parametrize("value", [-1, 3, 1 << 40])
def test_a_number_beyond_the_count_is_refused(tmp_path: Path, value: int) -> None:
    files = split(tiny_llama(), [5, 5, 0])
    files[0].set("split.no", 11, value)  # a 64-bit integer
    with pytest.raises(CheckpointError, match="is not named so"):
        open_gguf(write_split(files, tmp_path)[0])


def test_a_count_without_end_costs_nothing(tmp_path: Path) -> None:
    file = tiny_llama().set("split.count", UINT32, 99999).set("split.no", UINT16, 0)
    path = file.write(tmp_path / "m-00001-of-99999.gguf")
    with pytest.raises(CheckpointError, match=r"missing beside it: m-00002-.* and 99995 more$"):
        open_gguf(path)
    file.set("split.count", ARRAY, INT32, [1])
    with pytest.raises(CheckpointError, match=r"split\.count is a ndarray, not a int"):
        open_gguf(file.write(path))


def survive(tmp_path: Path, count: int, seed: int) -> None:
    """Whole loads with a mutated file among good ones end in a checkpoint or `CheckpointError`."""
    rng = random.Random(seed)
    files = split(tiny_llama(1), [4, 4, 0])
    paths = write_split(files, tmp_path)
    good = [path.read_bytes() for path in paths]
    loaded = 0
    for index in range(count):
        which = index % 3
        paths[which].write_bytes(mutate(good[which], len(files[which].header()), rng))
        with suppress(CheckpointError):
            checkpoint = load(paths[rng.randrange(3)])
            loaded += 1
            assert all(
                weight.data.nbytes == weight.nbytes for weight in checkpoint.weights.values()
            )
        paths[which].write_bytes(good[which])
    assert count // 100 < loaded < count


@pytest.mark.parametrize(
    ("count", "seed"), [(1000, 1), pytest.param(100_000, 100, marks=pytest.mark.long)]
)
def test_mutated_files(tmp_path: Path, count: int, seed: int) -> None:
    survive(tmp_path, count, seed)
