"""A quantized model as a Hugging Face folder, in the layout of GPTQ, AWQ or compressed-tensors.

What the recipe does not round keeps the type that a source folder has it in, and becomes bfloat16
where the source is a GGUF file. What is not weights comes from the source folder, or is made of the
GGUF file's metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Checkpoint, Weight
from octavo.loader.dequantize import dequantize
from octavo.loader.hf_config import text_config
from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.models.families import FAMILIES
from octavo.tools.quantize import hf_tokenizer_writer
from octavo.tools.quantize.grid import Float32, Quantized, bf16, bf16_bits
from octavo.tools.quantize.hf_model import HfModule, hf_config, places
from octavo.tools.quantize.layouts import HfTensor, OutputLayout, packed_tensors
from octavo.tools.quantize.nearest import nearest_stored, stacked
from octavo.tools.quantize.quantizer import Recipe
from octavo.tools.quantize.row_order import row_order
from octavo.tools.quantize.safetensors_writer import SafetensorsWriter
from octavo.tools.quantize.state import LayerResult, QuantizeError, State, write_whole

# Of a source's configuration, what says how its weights were stored.
_OF_STORAGE = ("quantization_config", "compression_config")
_MODULE_TENSORS = 5  # at most, of a quantized module


class FolderTarget:
    """Where a checkpoint's quantized form goes. Raises `QuantizeError` for a family that no folder
    can express, and for a matrix that the layout cannot."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, layout: OutputLayout) -> None:
        self.checkpoint = checkpoint
        self.recipe = recipe
        self.config = checkpoint.config
        self.family = FAMILIES[self.config.family]
        self.layout = layout
        self.from_folder = checkpoint.path.is_dir()
        if self.from_folder:
            # A head that differs from the embedding is not tied, whatever the file says.
            tied = {"tie_word_embeddings": self.config.tied_embeddings}
            self.values = text_config(HfFolder(checkpoint.path)) | tied
        else:
            self.values = hf_config(self.config) | {"torch_dtype": "bfloat16"}
        self.places = list(places(self.config, list(checkpoint.weights)))
        self._check_outputs()

    def _check_outputs(self) -> None:
        for place in self.places:
            shapes = [self.checkpoint.weights[role].shape for role in place.roles]
            outputs = sum(shape[0] for shape in shapes)
            if self.recipe.of(place.roles[0], shapes[0]) and outputs % self.layout.outputs:
                raise QuantizeError(
                    f"{self.checkpoint.weights[place.roles[0]].name} has {outputs} outputs; "
                    f"the layout has a multiple of {self.layout.outputs}: choose another --format"
                )

    def stored(self, role: str, values: Float32) -> Float32:
        """A vector, or a router, as readers of the folder will have it."""
        if form := self.family.form(role):
            return form.read(self._rounded(role, form.write(values)))
        return self._rounded(role, values)

    def _rounded(self, role: str, values: Float32) -> Float32:
        shift = np.float32(self.family.shift(role))
        match stored_as(self.checkpoint, self.checkpoint.weights[role]):
            case "BF16":
                return bf16(values - shift) + shift
            case "F16":
                return (values - shift).astype(np.float16).astype(np.float32) + shift
        return (values - shift) + shift

    def write(self, state: State, folder: Path) -> int:
        """Everything, config.json last; returns the bytes of all tensors."""
        ids: dict[str, Any] = {}
        if self.from_folder:
            hf_tokenizer_writer.copy_files(self.checkpoint.path, folder)
        else:
            ids = hf_tokenizer_writer.write_files(self.checkpoint, folder)
        writer = SafetensorsWriter(folder, _MODULE_TENSORS * len(self.places))
        try:
            self._add_all(writer, state)
            size = writer.finish()
        except BaseException:
            writer.discard()
            raise
        for name, values in self.layout.files.items():
            _write_json(folder / name, values)
        kept = {k: v for k, v in self.values.items() if k not in _OF_STORAGE}
        _write_json(folder / CONFIG, kept | ids | {"quantization_config": self.layout.config})
        return size

    def _add_all(self, writer: SafetensorsWriter, state: State) -> None:
        at, result = -1, LayerResult.empty()
        for place in self.places:
            role = place.roles[0]
            if role.startswith("layers."):
                layer = int(role.split(".")[1])
                if layer != at:
                    at, result = layer, state.load(layer)
            if role in result.matrices:
                tensors = self._module(place, result)
            elif scheme := self.recipe.ends.get(role):
                tensors = packed_tensors(nearest_stored(scheme, self.checkpoint.weights[role]))
            else:
                tensors = {place.ending: self._tensor(place, result)}
            for part, tensor in tensors.items():
                writer.add(f"{place.name}.{part}".removesuffix("."), tensor)

    def _module(self, place: HfModule, result: LayerResult) -> dict[str, HfTensor]:
        parts = []
        for role in place.roles:
            matrix, order = result.matrices[role], self._order(role)
            assert isinstance(matrix, Quantized)
            parts.append(matrix if order is None or self.from_folder else matrix.rows(order))
        whole = stacked(parts)
        return self.layout.tensors(whole if place.order is None else whole.rows(place.order))

    def _order(self, role: str) -> npt.NDArray[np.intp] | None:
        return row_order(self.config, role, interleaved=self.family.hf_interleaved)

    def _tensor(self, place: HfModule, result: LayerResult) -> HfTensor:
        parts = [self._plain(role, result) for role in place.roles]
        if len(parts) == 1:
            return parts[0]
        data = np.concatenate([part.data for part in parts])
        return HfTensor(parts[0].dtype, data if place.order is None else data[place.order])

    def _plain(self, role: str, result: LayerResult) -> HfTensor:
        weight = self.checkpoint.weights[role]
        format, floats = stored_as(self.checkpoint, weight), ("F32", "F16", "BF16")
        if role not in result.vectors and weight.format.name == format and len(weight.shape) == 2:
            return HfTensor(format, weight.data.view(_DTYPES[format]).reshape(weight.shape))
        values = result.vectors[role] if role in result.vectors else dequantize(weight)
        order = self._order(role)
        if order is not None and not self.from_folder:
            values = values[order]
        if shift := self.family.shift(role):
            values = values - np.float32(shift)
        if form := self.family.form(role):
            values = form.write(values)
        assert format in floats
        if format == "BF16":
            return HfTensor(format, bf16_bits(values))
        return HfTensor(format, values.astype(_DTYPES[format]))


_DTYPES: dict[str, npt.DTypeLike] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def stored_as(checkpoint: Checkpoint, weight: Weight) -> str:
    """The dtype in which a folder made of a checkpoint has a weight that is not quantized."""
    name = weight.stored.format
    return name if checkpoint.path.is_dir() and name in _DTYPES else "BF16"


def _write_json(path: Path, values: object) -> None:
    write_whole(path, json.dumps(values, indent=2, ensure_ascii=False).encode() + b"\n")
