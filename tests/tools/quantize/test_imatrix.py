"""Importance matrices: what is collected, both forms of files, and files that are not what they
say."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.executor.reference import evaluate
from octavo.loader import load
from octavo.loader.base import Checkpoint, CheckpointError, WeightFormat
from octavo.models import families
from octavo.models.program import ExpertLinear, Linear, Values, slots
from octavo.tools.quantize.gguf_writer import Content, GgufTensor, key
from octavo.tools.quantize.imatrix import (
    ImportanceEntry,
    ImportanceError,
    ImportanceMatrix,
    collect,
    importance_of,
    read_imatrix,
    write_imatrix,
)
from octavo.tools.quantize.state import LayerResult
from octavo.tools.quantize.tensor_names import tensor_names
from oracle.tiny_folders import BASE, folder, gguf_file
from tools.quantize.quantizing import SAMPLES, qwen3_folder, random_folder, weights_of


def squares_of(checkpoint: Checkpoint) -> dict[str, tuple[np.ndarray, int]]:
    """By role, sums of squares and rows, all samples going through the whole model at once."""
    program = families.program(checkpoint.config)
    weights, values, found = weights_of(checkpoint), Values(), {}
    kv = evaluate.WholeSequences()

    def add(role: str, rows: np.ndarray) -> None:
        flat = rows.reshape(-1, rows.shape[-1]).astype(np.float64)
        found[role] = np.square(flat).sum(axis=0), len(flat)

    for op in program.ops[:-1]:
        if isinstance(op, Linear):
            add(op.weight, values[op.x])
        if isinstance(op, ExpertLinear):
            width = program.weights[op.weights[0]][1]
            chosen, rows = slots(values[op.x], values[op.route], op.experts, width)
            for expert, role in enumerate(op.weights):
                add(role, rows[chosen == expert])
        evaluate.run([op], program.config, weights, values, SAMPLES, kv)
    head = program.ops[-1]
    add(head.weight, values[head.x])
    return found


@pytest.mark.parametrize("name", ["qwen3", "qwen3moe", "phi3"])
def test_sums_are_those_of_the_model_run_as_one(name: str, tmp_path: Path) -> None:
    checkpoint = load(random_folder(name, tmp_path / "m"))
    found, names = collect(checkpoint, SAMPLES, "some text"), tensor_names(checkpoint)
    expected = squares_of(checkpoint)
    for role, (squares, rows) in expected.items():
        if role.endswith("ffn_gate_inp"):
            continue
        entry, expert = found.entries[names[role]], role.rpartition(".")[2]
        index = int(expert) if expert.isdecimal() else 0
        assert entry.counts[index] == rows
        assert np.allclose(entry.sums[index], squares, rtol=1e-4, atol=1e-6 * squares.max())
    assert set(found.entries) == {
        names[role] for role in expected if not role.endswith("ffn_gate_inp")
    }
    assert found._replace(entries={}) == ImportanceMatrix({}, ("some text",), *SAMPLES.shape)


def test_a_folder_has_its_gguf_file_s_sums(tmp_path: Path) -> None:
    """Whose value heads are in another order."""
    name = "qwen3_5_moe"
    sources = folder(name, tmp_path / "folder"), gguf_file(name, BASE, tmp_path / "m.gguf")
    ours, theirs = (collect(load(source), SAMPLES, "").entries for source in sources)
    assert ours.keys() == theirs.keys()
    for tensor, entry in theirs.items():
        assert np.allclose(ours[tensor].sums, entry.sums, rtol=1e-3), tensor


def example() -> ImportanceMatrix:
    rng = np.random.default_rng(1)
    dense = ImportanceEntry(rng.random((1, 64)) * 50, np.array([192.0]))
    sparse = ImportanceEntry(rng.random((4, 64)) * 9, np.array([30.0, 0.0, 12.0, 64.0]))
    sparse.sums[1] = 0.0
    entries = {"blk.0.attn_q.weight": dense, "blk.0.ffn_up_exps.weight": sparse}
    return ImportanceMatrix(entries, ("a.txt", "é.txt"), 6, 32)


def test_gguf_comes_back_as_it_was(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "m.gguf", example())
    found = read_imatrix(tmp_path / "m.gguf")
    assert found._replace(entries={}) == example()._replace(entries={})
    for name, entry in example().entries.items():
        assert np.array_equal(found.entries[name].counts, entry.counts)
        assert np.array_equal(found.entries[name].sums, entry.sums.astype(np.float32))


def test_dat_has_the_means(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "m.dat", example())
    found = read_imatrix(tmp_path / "m.dat")
    assert (found.datasets, found.chunks) == (("é.txt",), 6)
    for name, entry in example().entries.items():
        with np.errstate(invalid="ignore"):
            means = entry.sums / entry.counts[:, None]
        means[entry.counts == 0] = 1.0  # so that readers round what was not seen as without any
        assert np.allclose(found.entries[name].sums[0], means.reshape(-1), rtol=1e-6)


@pytest.mark.parametrize("ending", ["gguf", "dat"])
def test_importances_of_a_model_are_the_means(ending: str, tmp_path: Path) -> None:
    checkpoint = load(random_folder("qwen3moe", tmp_path / "m"))
    matrix = collect(checkpoint, SAMPLES, "")
    write_imatrix(tmp_path / f"i.{ending}", matrix)
    roles = [role for role, w in checkpoint.weights.items() if len(w.shape) == 2]
    roles = [role for role in roles if not role.endswith("ffn_gate_inp") and role != "token_embd"]
    found, unseen = importance_of(read_imatrix(tmp_path / f"i.{ending}"), checkpoint, roles, "i")
    expected = squares_of(checkpoint)
    assert unseen == (0 if ending == "dat" else sum(expected[role][1] == 0 for role in roles))
    for role in found:
        squares, rows = expected[role]
        means = squares / rows if rows else np.ones(len(squares))
        assert np.allclose(found[role], means, rtol=1e-3, atol=1e-5 * means.max())


def test_an_expert_without_rows_has_no_importances(tmp_path: Path) -> None:
    checkpoint = load(random_folder("qwen3moe", tmp_path / "m"))
    matrix = collect(checkpoint, SAMPLES, "")
    entry = matrix.entries["blk.0.ffn_up_exps.weight"]
    entry.counts[1] = 0.0
    roles = ["layers.0.ffn_up_exps.0", "layers.0.ffn_up_exps.1"]
    found, unseen = importance_of(matrix, checkpoint, roles, "i")
    assert unseen >= 1
    assert roles[1] not in found


# ── Files that are not what they say ────────────────────────────────────────────────────────────


def model(path: Path) -> tuple[Checkpoint, ImportanceMatrix]:
    checkpoint = load(qwen3_folder(path))
    return checkpoint, collect(checkpoint, SAMPLES, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("blk.1.attn_k.weight"), r"no entry for blk\.1\.attn_k\.weight"),
        (
            lambda e: e.update({"blk.0.ffn_up.weight": ImportanceEntry(np.ones((1, 63)), _ONE)}),
            r"blk\.0\.ffn_up\.weight has 63 numbers for 1 counts; the model's has 64 inputs",
        ),
        (
            lambda e: e.update({"blk.0.ffn_up.weight": ImportanceEntry(np.ones((2, 32)), _TWO)}),
            r"64 numbers for 2 counts",
        ),
    ],
)
def test_a_matrix_of_another_model_is_refused(
    change: Callable[[dict[str, ImportanceEntry]], object], message: str, tmp_path: Path
) -> None:
    checkpoint, matrix = model(tmp_path / "m")
    roles = [role for role in checkpoint.weights if role.startswith("layers.")]
    roles = [role for role in roles if len(checkpoint.weights[role].shape) == 2]
    assert len(importance_of(matrix, checkpoint, roles, "i")[0]) == len(roles)
    change(matrix.entries)
    with pytest.raises(ImportanceError, match=message):
        importance_of(matrix, checkpoint, roles, "i.gguf")


_ONE, _TWO = np.ones(1), np.ones(2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e-3])
@pytest.mark.parametrize("ending", ["gguf", "dat"])
def test_numbers_that_are_no_squares_are_refused(value: float, ending: str, tmp_path: Path) -> None:
    bad = example()
    bad.entries["blk.0.attn_q.weight"].sums[0, 5] = value
    write_imatrix(tmp_path / f"m.{ending}", bad)
    with pytest.raises(ImportanceError, match=r"blk\.0\.attn_q.* holds .* at place 5"):
        read_imatrix(tmp_path / f"m.{ending}")


@pytest.mark.parametrize("ending", ["gguf", "dat"])
def test_a_truncated_file_is_refused_by_name(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"m.{ending}"
    write_imatrix(path, example())
    data = path.read_bytes()
    needed = len(data) - 40  # less the text's name or padding
    for size in (*range(0, needed, 7), needed):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=path.name):
            read_imatrix(path)


def dat(*entries: bytes, count: int | None = None) -> bytes:
    return struct.pack("<i", len(entries) if count is None else count) + b"".join(entries)


def entry(name: bytes, chunks: int, size: int, numbers: int | None = None) -> bytes:
    data = np.ones(size if numbers is None else numbers, "<f4").tobytes()
    return struct.pack("<i", len(name)) + name + struct.pack("<ii", chunks, size) + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "fewer than"),
        (dat(), "declares 0 entries"),
        (dat(count=-1), "declares -1 entries"),
        (dat(count=2**31 - 1), "declares 2147483647 entries"),
        (dat(struct.pack("<i", -5)), "has -5 bytes"),
        (dat(struct.pack("<i", 1 << 30)), "has 1073741824 bytes"),
        (dat(entry(b"", 1, 4)), "no name of its own"),
        (dat(entry(b"a", 1, 4), entry(b"a", 1, 4)), "no name of its own"),
        (dat(entry(b"\xff\xfe", 1, 4)), "not UTF-8"),
        (dat(entry(b"a", 1, -4, 4)), "declares -4 numbers"),
        (dat(entry(b"a", 1, 0)), "declares 0 numbers"),
        (dat(entry(b"a", -1, 4)), "of -1 chunks"),
        (dat(entry(b"a", 1, 2**31 - 1, 4)), "ends within a's numbers"),
        (dat(entry(b"a", 1, 4)) + b"\1\0\0\0\xff\xff\xff\x7f", "has 2147483647 bytes"),
    ],
)
def test_odd_dat_files_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_imatrix(path)
    assert "m.dat" in str(raised.value)


def gguf(path: Path, tensors: dict[str, np.ndarray], kind: str = "imatrix") -> Path:
    made = [
        GgufTensor(name, v.shape, WeightFormat.F32, None, lambda _, v=v: v)
        for name, v in tensors.items()
    ]
    content = Content([key("general.type", kind)], made, 32)
    data = content.header()
    for tensor in made:
        values = tensor.data(LayerResult.empty()).astype("<f4").tobytes()
        data += values.ljust(content.padded(len(values)), b"\0")
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        ({"a.in_sum2": np.ones((1, 4))}, "imatrix", r"a\.in_sum2 has no a\.counts beside it"),
        (
            {"a.in_sum2": np.ones((1, 4)), "a.counts": np.full((1, 1), 1e-40)},
            "imatrix",
            r"a\.counts holds counts that are not whole",
        ),
        (
            {"a.in_sum2": np.ones((2, 4)), "a.counts": np.ones((3, 1))},
            "imatrix",
            "a has 2 rows of sums and 3 counts",
        ),
        (
            {"a.in_sum2": np.ones((1, 4)), "a.counts": np.full((1, 1), np.nan)},
            "imatrix",
            r"a\.counts holds nan at place 0",
        ),
        ({"a.weight": np.ones((1, 4))}, "model", "no importance matrix but of type 'model'"),
        ({"a.counts": np.ones((1, 1))}, "imatrix", "no importance matrix"),
    ],
)
def test_odd_gguf_files_are_refused(
    tensors: dict[str, np.ndarray], kind: str, message: str, tmp_path: Path
) -> None:
    path = gguf(tmp_path / "m.gguf", tensors, kind)
    with pytest.raises(ImportanceError, match=message):
        read_imatrix(path)
