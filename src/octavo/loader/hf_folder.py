"""A Hugging Face model folder: its JSON files, and its tensors over one or several shards.

Files of a folder: ``config.json`` and ``generation_config.json``; ``model.safetensors``, or shards
listed by ``model.safetensors.index.json``; ``tokenizer.json`` and what lies beside it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import numpy.typing as npt

from octavo.loader.base import CheckpointError, Weight
from octavo.loader.bind import listed
from octavo.loader.files import json_object, read_file
from octavo.loader.safetensors import SafetensorsFile

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_JSON = 4 << 20  # bytes, of a configuration
MAX_INDEX = 64 << 20
MAX_SHARDS = 4096


class HfFolder:
    """Reads what is asked for. Any fault raises `CheckpointError` naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []  # what loading decided, to be said to whoever loads

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def fail(self, name: str, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path / name}: {reason}")

    def has(self, name: str) -> bool:
        """Also if it is a link to nothing, of a download that broke off: opening it says so."""
        return os.path.lexists(self.path / name)

    def json(self, name: str, most: int = MAX_JSON) -> dict[str, Any]:
        path = self.path / name
        return json_object(path, read_file(path, most))

    def json_if_any(self, name: str) -> dict[str, Any]:
        return self.json(name) if self.has(name) else {}


class HfWeights:
    """The folder's tensors, by their own names."""

    def __init__(self, folder: HfFolder) -> None:
        self.folder = folder
        if not folder.has(WEIGHTS) and folder.has(INDEX):
            self._open_shards(self._index())
            return
        name = WEIGHTS if folder.has(WEIGHTS) else self._other_name()
        self.files = {name: SafetensorsFile(folder.path / name)}
        self.place = dict.fromkeys(self.files[name].tensors, name)

    def weight(self, name: str) -> Weight:
        return self.files[self.place[name]].weight(name)

    def array(self, name: str, *dtypes: str) -> npt.NDArray[Any]:
        """See `SafetensorsFile.array`."""
        return self.files[self.place[name]].array(name, dtypes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files[self.place[name]].tensors[name].shape

    def dtype(self, name: str) -> str:
        return self.files[self.place[name]].tensors[name].dtype

    def nbytes(self, name: str) -> int:
        info = self.files[self.place[name]].tensors[name]
        return info.end - info.begin

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Raises `CheckpointError` about a tensor."""
        self.folder.fail(self.place[name], f"tensor {name!r} {reason}")

    def release(self) -> None:
        for file in self.files.values():
            file.release()

    @property
    def file_bytes(self) -> int:
        return sum((self.folder.path / name).stat().st_size for name in self.files)

    def _index(self) -> dict[str, str]:
        """Which file each tensor is in. (``total_size`` counts shared tensors twice or not, as the
        writer pleased; the shards' own headers say what is whole.)"""
        places = self.folder.json(INDEX, MAX_INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            self.folder.fail(INDEX, "has no weight_map")
        for tensor, name in places.items():
            if not isinstance(name, str) or not _plain(name):
                self.folder.fail(
                    INDEX, f"tensor {tensor!r} is in {name!r}, which names no safetensors file here"
                )
        if len(set(places.values())) > MAX_SHARDS:
            self.folder.fail(INDEX, f"names more than {MAX_SHARDS} files")
        return places

    def _open_shards(self, places: dict[str, str]) -> None:
        names = sorted(set(places.values()))
        if absent := [name for name in names if not self.folder.has(name)]:
            here = "none of them is" if absent == names else "some of them are not"
            self.folder.fail(INDEX, f"lists shards, and {here} in the folder: {listed(absent)}")
        self.files = {name: SafetensorsFile(self.folder.path / name) for name in names}
        found: dict[str, str] = {}
        for name, file in self.files.items():
            for tensor in file.tensors:
                if tensor in found:
                    self.folder.fail(name, f"tensor {tensor!r} is in {found[tensor]} as well")
                if tensor not in places:
                    self.folder.fail(name, f"tensor {tensor!r} is not listed by {INDEX}")
                if places[tensor] != name:
                    self.folder.fail(
                        name, f"has tensor {tensor!r}, which {INDEX} says is in {places[tensor]}"
                    )
                found[tensor] = name
        if missing := sorted(places.keys() - found.keys()):
            self.folder.fail(INDEX, f"lists tensors that no file has: {listed(missing)}")
        self.place = found

    def _other_name(self) -> str:
        """The only safetensors file, as AutoGPTQ named it after bits and group size."""
        names = sorted(path.name for path in self.folder.path.glob("*.safetensors"))
        if len(names) != 1 or not names[0].startswith("gptq_model"):
            self._fail_without_weights()
        return names[0]

    def _fail_without_weights(self) -> NoReturn:
        here = sorted(path.name for path in self.folder.path.iterdir() if path.is_file())
        weights = [name for name in here if name.endswith((".safetensors", ".bin", ".pth", ".pt"))]
        raise CheckpointError(
            f"{self.folder.path}: has neither {WEIGHTS} nor {INDEX}"
            + (f", only {listed(weights)}" if weights else "")
            + ("; pickled weights are not read, convert them to safetensors"
               if weights and not any(name.endswith(".safetensors") for name in weights) else "")
        )  # fmt: skip


def _plain(name: str) -> bool:
    """Whether it is the name of a safetensors file in the folder itself."""
    return name.endswith(".safetensors") and name == Path(name).name and "\0" not in name
