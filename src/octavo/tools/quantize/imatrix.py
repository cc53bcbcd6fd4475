"""Importance matrices: the mean squares of what matrices read on a text, in llama.cpp's files.

For a matrix [out, in] with the inputs x over a text, the importance of input i is mean(x_i²): the
squared error of a row's output is Σ_i e_i² mean(x_i²) for errors e of its weights, if inputs did
not go together. Experts are counted apart, over the rows that are routed to them.

Two forms (ggml-org/llama.cpp, tools/imatrix). GGUF: for each tensor NAME of the model NAME.in_sum2
[matrices, in], sums of squares, and NAME.counts [matrices, 1], rows that were summed, both F32;
keys imatrix.datasets, imatrix.chunk_count and imatrix.chunk_size (tokens). The older one, ".dat",
all little-endian: int32 entries; for each its name (int32 length, bytes), int32 chunks, int32
numbers, and so many float32, mean squares times chunks; then int32 chunks, and the text's name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Checkpoint, CheckpointError, WeightFormat
from octavo.loader.dequantize import dequantize
from octavo.loader.files import map_file
from octavo.loader.gguf import MAGIC, GgufFile
from octavo.models.families import program
from octavo.models.program import Logits
from octavo.tools.quantize.gguf_writer import Bytes, Content, GgufTensor, key
from octavo.tools.quantize.grid import Float32, Float64
from octavo.tools.quantize.hidden_states import HiddenStates, LayerWeights, some_rows
from octavo.tools.quantize.layers import split
from octavo.tools.quantize.state import LayerResult, write_whole
from octavo.tools.quantize.tensor_names import tensor_name, tensor_names
from octavo.tools.quantize.value_heads import in_gguf_order

MAX_NAME = 1 << 12  # bytes
_SUMS, _COUNTS = ".in_sum2", ".counts"
_ALIGNMENT = 32


class ImportanceError(CheckpointError):
    """An importance matrix that cannot be used; the message names the file and the entry."""


class ImportanceEntry(NamedTuple):
    """Of one tensor: sums of squares [matrices, in] and of how many rows each is [matrices]. An
    entry of a ".dat" file has one row of numbers for all its matrices, and a count of 1."""

    sums: Float64
    counts: Float64


class ImportanceMatrix(NamedTuple):
    """Entries by the names that GGUF has for tensors; the texts, and how much of them was read."""

    entries: dict[str, ImportanceEntry]
    datasets: tuple[str, ...]
    chunks: int
    chunk_size: int  # tokens; 0: not known


# ── Collecting ──────────────────────────────────────────────────────────────────────────────────


def collect(
    checkpoint: Checkpoint,
    samples: npt.NDArray[np.int32],
    dataset: str,
    progress: Callable[[int, int], None] = lambda layer, layers: None,
) -> ImportanceMatrix:
    """Of all matrices of the layers and of the head, on samples [sequences, tokens].

    The model is computed in fp32, a layer at a time. ``progress`` hears how many layers are done.
    Raises `CheckpointError` for layers that cannot be computed by themselves, and for inputs that
    are no finite numbers.
    """
    checkpoint = in_gguf_order(checkpoint)
    model = program(checkpoint.config)
    before, layers = split(model)
    names, weights = tensor_names(checkpoint), checkpoint.weights
    hidden = HiddenStates(model, layers)
    hidden.begin(before, samples, lambda role, rows: some_rows(weights[role], rows))
    found: dict[str, ImportanceEntry] = {}

    def add(role: str, matrix: int, squares: Float64, rows: int) -> None:
        count = _matrices(checkpoint, role)
        entry = found.get(names[role])
        if entry is None:
            entry = ImportanceEntry(np.zeros((count, len(squares))), np.zeros(count))
            found[names[role]] = entry
        entry.sums[matrix], entry.counts[matrix] = squares, rows
        if not np.isfinite(squares).all():
            raise ImportanceError(
                f"{checkpoint.path}: {names[role]}: its inputs on the text are not all finite"
            )

    for index, layer in enumerate(layers):
        own = LayerWeights(checkpoint.path, weights, layer)
        done = 0
        for shared in layer.inputs:
            hidden.advance(layer, own, done, shared.first)
            done = shared.first
            width = model.weights[shared.roles[0]][1]
            squares, rows = _sum(hidden.inputs(shared, width), width)
            for role in shared.roles:
                if not shared.router:
                    add(role, shared.expert or 0, squares, rows)
        hidden.advance(layer, own, done, len(layer.ops))
        progress(index + 1, len(layers))
    head = model.ops[-1]
    assert isinstance(head, Logits)
    ops = model.ops[len(before) + sum(len(layer.ops) for layer in layers) : -1]
    roles = (role for op in ops for role in model.roles(op))
    last = {role: dequantize(weights[role]) for role in roles}
    outputs = hidden.outputs(ops, last, head.x)
    add(head.weight, 0, *_sum(outputs, model.weights[head.weight][1]))
    return ImportanceMatrix(found, (dataset,), len(samples), samples.shape[1])


def _sum(inputs: Iterable[Float32], width: int) -> tuple[Float64, int]:
    """Sums of squares [width], and of how many rows."""
    squares, count = np.zeros(width), 0
    for x in inputs:
        rows = x.reshape(-1, width)
        squares += np.square(rows).sum(axis=0, dtype=np.float64)
        count += len(rows)
    return squares, count


def _matrices(checkpoint: Checkpoint, role: str) -> int:
    """In the tensor that a matrix is in."""
    experts = checkpoint.config.experts
    return experts.count if experts is not None and role.rpartition(".")[2].isdecimal() else 1


# ── Use ─────────────────────────────────────────────────────────────────────────────────────────


def importance_of(
    matrix: ImportanceMatrix, checkpoint: Checkpoint, roles: Iterable[str], where: str
) -> tuple[dict[str, Float32], int]:
    """The mean squares [in] of the inputs of some matrices, by role, and how many of these are
    experts to which no row was routed; they have none.

    An embedding and a head may be missing: llama.cpp leaves them out unless it is asked for them.
    Raises `ImportanceError` for an entry that is missing or of another size.
    """
    names, found, unseen = tensor_names(checkpoint), dict[str, Float32](), 0
    for role in roles:
        name, inputs = names[role], checkpoint.weights[role].shape[1]
        # Of a model in another form, where matrices are not fused.
        entry = matrix.entries.get(name) or matrix.entries.get(tensor_name(role))
        if entry is None:
            if not role.startswith("layers."):
                continue
            raise ImportanceError(f"{where}: has no entry for {name}: it is of another model")
        count = _matrices(checkpoint, role)
        if entry.sums.size != count * inputs or len(entry.counts) not in (1, count):
            experts = f" of {count} experts" if count > 1 else ""
            raise ImportanceError(
                f"{where}: {name} has {entry.sums.size} numbers for {len(entry.counts)} counts; "
                f"the model's has {inputs} inputs{experts}"
            )
        index = int(role.rpartition(".")[2]) if count > 1 else 0
        seen = entry.counts[index if len(entry.counts) > 1 else 0]
        if seen > 0:
            found[role] = (entry.sums.reshape(count, inputs)[index] / seen).astype(np.float32)
        else:
            unseen += 1
    return found, unseen


# ── Files ───────────────────────────────────────────────────────────────────────────────────────


def write_imatrix(path: Path, matrix: ImportanceMatrix) -> None:
    """As GGUF, or in the older form to a path that ends in ".dat"."""
    write_whole(path, _as_dat(matrix) if path.suffix == ".dat" else _as_gguf(matrix))


def _as_gguf(matrix: ImportanceMatrix) -> bytes:
    tensors = []
    for name, entry in sorted(matrix.entries.items()):
        for ending, numbers in ((_SUMS, entry.sums), (_COUNTS, entry.counts[:, None])):
            data = numbers.astype("<f4").view(np.uint8).reshape(-1)
            tensor = GgufTensor(name + ending, numbers.shape, WeightFormat.F32, None, _giving(data))
            tensors.append(tensor)
    keys = [
        key("general.type", "imatrix"),
        key("imatrix.datasets", matrix.datasets),
        key("imatrix.chunk_count", matrix.chunks),
        key("imatrix.chunk_size", matrix.chunk_size),
    ]
    content = Content(keys, tensors, _ALIGNMENT)
    parts = [content.header()]
    for tensor in tensors:
        data = tensor.data(LayerResult.empty())
        parts += [data.tobytes(), bytes(content.padded(data.nbytes) - data.nbytes)]
    return b"".join(parts)


def _giving(data: Bytes) -> Callable[[LayerResult], Bytes]:
    return lambda _: data


def _as_dat(matrix: ImportanceMatrix) -> bytes:
    parts = [struct.pack("<i", len(matrix.entries))]
    for name, entry in sorted(matrix.entries.items()):
        chunks = max(1, -(-int(entry.counts.max()) // max(1, matrix.chunk_size)))
        seen = entry.counts[:, None]
        means = np.divide(entry.sums, seen, out=np.ones_like(entry.sums), where=seen > 0)
        numbers = (means * chunks).astype("<f4")
        parts.append(_text(name) + struct.pack("<ii", chunks, numbers.size) + numbers.tobytes())
    text = matrix.datasets[-1] if matrix.datasets else ""
    return b"".join(parts) + struct.pack("<i", matrix.chunks) + _text(text)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<i", len(data)) + data


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Of either form. Raises `ImportanceError`, or `CheckpointError` for a damaged GGUF file."""
    if bytes(map_file(path, len(MAGIC), "importance matrix")[: len(MAGIC)]) == MAGIC:
        return _from_gguf(GgufFile(path))
    return _Dat(path).matrix()


def _from_gguf(file: GgufFile) -> ImportanceMatrix:
    kind = file.get("general.type", str, "imatrix")
    names = [name for name in file.tensors if name.endswith(_SUMS)]
    if kind != "imatrix" or not names:
        raise ImportanceError(f"{file.path}: is no importance matrix but of type {kind!r}")
    entries = {}
    for name in names:
        of = name.removesuffix(_SUMS)
        if of + _COUNTS not in file.tensors:
            raise ImportanceError(f"{file.path}: {name} has no {of + _COUNTS} beside it")
        sums, counts = _numbers(file, name), _numbers(file, of + _COUNTS).reshape(-1)
        if not np.array_equal(counts, np.rint(counts)):
            raise ImportanceError(f"{file.path}: {of + _COUNTS} holds counts that are not whole")
        if len(counts) != len(sums):
            raise ImportanceError(
                f"{file.path}: {of} has {len(sums)} rows of sums and {len(counts)} counts"
            )
        entries[of] = ImportanceEntry(sums, counts)
    datasets = file.strings("imatrix.datasets")
    return ImportanceMatrix(
        entries,
        tuple(datasets.text()) if datasets is not None else (),
        file.get("imatrix.chunk_count", int, 0),
        file.get("imatrix.chunk_size", int, 0),
    )


def _numbers(file: GgufFile, name: str) -> Float64:
    """[rows, numbers of a row]"""
    weight = file.weight(name)
    if weight.format is not WeightFormat.F32:
        raise ImportanceError(f"{file.path}: {name} is of type {weight.format.name}, not F32")
    numbers = np.ascontiguousarray(weight.data).view("<f4").reshape(-1, weight.shape[-1])
    return checked(numbers, f"{file.path}: {name}")


def checked(numbers: Float32, what: str) -> Float64:
    """Raises `ImportanceError` for what is negative or no number."""
    with np.errstate(invalid="ignore"):  # of NaN
        wide = numbers.astype(np.float64)
    odd = ~(np.isfinite(wide) & (wide >= 0.0))
    if odd.any():
        at = int(odd.reshape(-1).argmax())
        raise ImportanceError(f"{what} holds {wide.reshape(-1)[at]} at place {at}")
    return wide


class _Dat:
    """A ".dat" file, read from its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path, 4, "importance matrix")
        self._at = 0

    def matrix(self) -> ImportanceMatrix:
        count = self._int("the number of entries")
        if not 1 <= count <= len(self._data):
            self._fail(f"is no importance matrix: it declares {count} entries")
        entries: dict[str, ImportanceEntry] = {}
        for index in range(count):
            name = self._name(f"the name of entry {index}")
            if not name or name in entries:
                self._fail(f"entry {index} has no name of its own but {name!r}")
            chunks, size = self._int(f"{name}'s chunks"), self._int(f"{name}'s size")
            if size < 1 or chunks < 0:
                self._fail(f"{name} declares {size} numbers of {chunks} chunks")
            data = self._take(4 * size, f"{name}'s numbers")
            numbers = checked(np.frombuffer(data, "<f4"), f"{self.path}: {name}")
            entries[name] = ImportanceEntry(numbers[None] / max(1, chunks), np.ones(1))
        chunks, datasets = 0, tuple[str, ...]()
        if self._at < len(self._data):  # what older programs leave out
            chunks = max(0, self._int("the number of chunks"))
            if self._at < len(self._data):
                datasets = (self._name("the text's name"),)
        return ImportanceMatrix(entries, datasets, chunks, 0)

    def _int(self, what: str) -> int:
        return int.from_bytes(self._take(4, what), "little", signed=True)

    def _name(self, what: str) -> str:
        size = self._int(f"the length of {what}")
        if not 0 <= size <= MAX_NAME:
            self._fail(f"{what} has {size} bytes, not 0 to {MAX_NAME}")
        try:
            return self._take(size, what).decode()
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8")

    def _take(self, size: int, what: str) -> bytes:
        if size > len(self._data) - self._at:
            self._fail(f"ends within {what}: truncated?")
        data = self._data[self._at : self._at + size]
        self._at += size
        return data

    def _fail(self, reason: str) -> NoReturn:
        raise ImportanceError(f"{self.path}: {reason}")
