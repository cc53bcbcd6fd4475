"""What an interrupted run leaves behind: every finished layer, and the settings it was made with.

A folder of one file a layer. Each appears under its name in one rename, whole; a run that finds the
same settings goes on after the last. Codes of four bits lie two to a byte. A file carries a seal, a
digest of the settings, the layer's number and its arrays: what is not of this run is never used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.loader.base import CheckpointError, WeightFormat
from octavo.tools.quantize.grid import Float32, Quantized, Scheme
from octavo.tools.quantize.k_quants import GgmlBlocks

STATE = "state.json"
_LAYERS = "layer-*.npz"
_SEAL, _STARVED = "seal", "starved"
# What numpy, zipfile and zlib raise for files that are not as they were written.
_DAMAGE = (
    *(OSError, ValueError, TypeError, AttributeError, LookupError, EOFError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)


class QuantizeError(CheckpointError):
    """A model, setting or place that cannot be used; the message says why and what to do."""


class LayerResult(NamedTuple):
    """A layer's matrices by role, the vectors (and routers) that changed with them, and the experts
    that saw too little of the calibration text."""

    matrices: dict[str, Quantized | GgmlBlocks]
    vectors: dict[str, Float32]
    starved: list[int]

    @classmethod
    def empty(cls) -> LayerResult:
        return cls({}, {}, [])


class State:
    """The folder of one run; nobody else works in it meanwhile.

    Raises `QuantizeError` when it is another run's.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], scheme: Scheme) -> None:
        self.folder = folder
        self.scheme = scheme
        self._settings = json.dumps(settings, sort_keys=True).encode()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise QuantizeError(f"{folder}: another process is quantizing there") from None
        try:
            self._claim(settings)
        except BaseException:
            os.close(self._lock)
            raise

    def _claim(self, settings: dict[str, Any]) -> None:
        path = self.folder / STATE
        if not path.exists():
            if any(self.folder.glob(_LAYERS)):
                raise QuantizeError(
                    f"{self.folder}: holds layers but no {STATE}, which says how they were made: "
                    "remove the folder"
                )
            write_whole(path, json.dumps(settings, indent=2).encode())
            return
        try:
            found = json.loads(path.read_text("utf-8"))
            differing = [key for key in settings if found.get(key) != settings[key]]
        except (ValueError, AttributeError):
            raise QuantizeError(f"{path}: is damaged: remove {self.folder}") from None
        if differing:
            changes = ", ".join(
                f"{key} {_shown(found.get(key))} → {_shown(settings[key])}" for key in differing
            )
            raise QuantizeError(
                f"{self.folder}: holds an interrupted run with other settings ({changes}): "
                "run it with those to finish it, or remove the folder"
            )

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04}.npz"

    def finished(self) -> int:
        """Layers that are done, from the first on."""
        count = 0
        while self._path(count).exists():
            count += 1
        return count

    def save(self, layer: int, result: LayerResult) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for role, matrix in result.matrices.items():
            if isinstance(matrix, GgmlBlocks):
                arrays[f"{role}|{matrix.format.name}"] = matrix.data
                continue
            arrays[f"{role}|codes"] = _pack(matrix.codes) if self._nibbles else matrix.codes
            for name in ("step", "zero", "low", "group_of"):
                value = getattr(matrix, name)
                if value is not None:
                    arrays[f"{role}|{name}"] = value
        for role, vector in result.vectors.items():
            arrays[f"{role}|vector"] = vector
        if result.starved:
            arrays[_STARVED] = np.array(result.starved, np.int32)
        arrays[_SEAL] = self._seal(layer, arrays)
        temporary = self.folder / "writing.npz"
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path(layer))

    def load(self, layer: int) -> LayerResult:
        """Raises `QuantizeError` if the file is damaged, or another run's or layer's."""
        path = self._path(layer)
        try:
            with np.load(path, allow_pickle=False) as data:
                arrays = {key: data[key] for key in data.files}
            seal = arrays.pop(_SEAL, None)
            if not np.array_equal(seal, self._seal(layer, arrays)):
                raise ValueError("it is not what this run wrote")
            return self._result(arrays)
        except _DAMAGE as error:
            raise QuantizeError(f"{path}: is damaged ({error}): remove it and run again") from None

    def _seal(self, layer: int, arrays: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
        found = hashlib.blake2b(self._settings + b"%d" % layer)
        for key, array in sorted(arrays.items()):
            found.update(f"{key} {array.dtype} {array.shape}".encode())
            found.update(array.tobytes())
        return np.frombuffer(found.digest(), np.uint8)

    def _result(self, arrays: dict[str, npt.NDArray[Any]]) -> LayerResult:
        result = LayerResult.empty()
        result.starved.extend(arrays.pop(_STARVED, np.empty(0, np.int32)).tolist())
        parts: dict[str, dict[str, npt.NDArray[Any]]] = {}
        for key, array in arrays.items():
            role, _, name = key.partition("|")
            parts.setdefault(role, {})[name] = array
        for role, part in parts.items():
            if "vector" in part:
                result.vectors[role] = part["vector"]
                continue
            if "codes" not in part:
                ((format, data),) = part.items()
                result.matrices[role] = GgmlBlocks(WeightFormat[format], data)
                continue
            codes = _unpack(part["codes"]) if self._nibbles else part["codes"]
            result.matrices[role] = Quantized(
                self.scheme,
                codes,
                part["step"],
                part.get("zero"),
                part.get("low"),
                part["group_of"],
            )
        return result

    @property
    def _nibbles(self) -> bool:
        return self.scheme.bits == 4

    @property
    def closed(self) -> bool:
        return self._lock < 0

    def close(self) -> None:
        os.close(self._lock)
        self._lock = -1

    def remove(self) -> None:
        """When everything is written where it belongs. The settings go after the layers, the last
        layer first, so that what a kill leaves is a run to go on with."""
        for path in sorted(self.folder.glob(_LAYERS), reverse=True):
            path.unlink()
        (self.folder / STATE).unlink()
        self.close()
        shutil.rmtree(self.folder)


def _pack(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return codes[:, ::2] | (codes[:, 1::2] << np.uint8(4))


def _unpack(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    low, high = packed & np.uint8(15), packed >> np.uint8(4)
    return np.stack([low, high], axis=2).reshape(len(packed), -1)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"


def write_whole(path: Path, data: bytes) -> None:
    """The file is there with all its bytes, or not at all."""
    temporary = path.with_name(path.name + ".part")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
