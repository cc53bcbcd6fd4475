"""Writes safetensors files one tensor after another, none held, in shards where they grow large.

The header comes first in the file and is known last: room is left for it, and what is over is
spaces, as the format's specification has it for alignment.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from octavo.tools.quantize.layouts import HfTensor
from octavo.tools.quantize.state import write_whole

MAX_SHARD = 4 << 30  # bytes
ROOM = 200  # of header, for a tensor with a name like the longest known


class SafetensorsWriter:
    """Files named "model…" in a folder, with an index if there are several.

    They are there whole after `finish`; until then under other names, which `discard` removes.
    """

    def __init__(self, folder: Path, tensors: int, max_shard: int = MAX_SHARD) -> None:
        """``tensors``: how many there will be at most."""
        self.folder = folder
        self.max_shard = max_shard
        self._room = -(-(ROOM * tensors + 1024) // 4096) * 4096
        self._parts: list[Path] = []
        self._headers: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._at = 0

    def add(self, name: str, tensor: HfTensor) -> None:
        data = np.ascontiguousarray(tensor.data)
        if self._file is None or (self._at and self._at + data.nbytes > self.max_shard):
            self._begin()
        assert self._file is not None
        self._headers[-1][name] = {
            "dtype": tensor.dtype,
            "shape": list(data.shape),
            "data_offsets": [self._at, self._at + data.nbytes],
        }
        self._file.write(data.data)
        self._at += data.nbytes

    def finish(self) -> int:
        """Gives the files their names; returns the bytes of all tensors."""
        self._end()
        count = len(self._parts)
        places: dict[str, str] = {}
        total = 0
        for number, (part, header) in enumerate(zip(self._parts, self._headers, strict=True), 1):
            name = "model.safetensors"
            if count > 1:
                name = f"model-{number:05}-of-{count:05}.safetensors"
            os.replace(part, self.folder / name)
            places |= dict.fromkeys((key for key in header if key != "__metadata__"), name)
            total += max(
                entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"
            )
        if count > 1:
            index = {"metadata": {"total_size": total}, "weight_map": places}
            write_whole(
                self.folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode()
            )
        return total

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()
        for part in self._parts:
            part.unlink(missing_ok=True)

    def _begin(self) -> None:
        self._end()
        part = self.folder / f"writing-{len(self._parts):05}.safetensors.part"
        self._parts.append(part)
        self._headers.append({"__metadata__": {"format": "pt"}})
        self._file = part.open("wb")
        self._file.write(bytes(8 + self._room))
        self._at = 0

    def _end(self) -> None:
        if self._file is None:
            return
        header = json.dumps(self._headers[-1], separators=(",", ":")).encode()
        if len(header) > self._room:
            raise AssertionError(f"a header of {len(header)} bytes in room for {self._room}")
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
