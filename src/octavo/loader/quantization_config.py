"""Which layout of quantized matrices a Hugging Face folder has, and its modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from octavo.loader.awq import Awq
from octavo.loader.base import Quantization, Weight
from octavo.loader.compressed_tensors import CompressedTensors
from octavo.loader.fp8 import Fp8
from octavo.loader.gptq import Gptq
from octavo.loader.hf_folder import CONFIG, HfFolder, HfWeights
from octavo.loader.modelopt import ModelOpt
from octavo.loader.quantized_layout import Layout, Module
from octavo.models.section import Section

# Beside config.json, of writers before they put it there; and what is meant if it does not say.
_OWN_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_AUTO_ROUND = {  # packing formats
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
}
# Ends of tensors' names that only quantized modules have.
_TELLING = tuple(
    f".{part}" for layout in (Gptq, Awq, CompressedTensors, Fp8) for part in layout.markers
)


class ModelTensors:
    """A folder's tensors by the names of an unquantized model: those of a quantized module are one,
    ``module.weight``.
    """

    def __init__(self, stored: HfWeights) -> None:
        self.stored = stored
        self.layout = find_layout(stored)
        self.modules: dict[str, Module] = {}
        self.names = list(stored.place)
        if self.layout is None:
            return
        parts: dict[str, dict[str, str]] = {}
        for name in stored.place:
            module, _, part = name.rpartition(".")
            if part in self.layout.parts:
                parts.setdefault(module, {})[part] = name
        for module, tensors in parts.items():
            if self.layout.markers & tensors.keys():
                self.modules[f"{module}.weight"] = Module(module, tensors)
        quantized = {name for m in self.modules.values() for name in m.tensors.values()}
        self.names = [name for name in self.names if name not in quantized] + list(self.modules)

    @property
    def quantization(self) -> Quantization | None:
        """None if no module is quantized, whatever a file that was left over says."""
        return self.layout.quantization if self.layout is not None and self.modules else None

    def weight(self, name: str, n: int, k: int) -> Weight:
        """``n`` and ``k``: what a quantized module must be."""
        if name not in self.modules:
            return self.stored.weight(name)
        assert self.layout is not None
        return self.layout.weight(self.modules[name], n, k)

    def first(self, name: str) -> str:
        """A stored tensor of it, for error messages."""
        if name in self.modules:
            return next(iter(self.modules[name].tensors.values()))
        return name


def find_layout(stored: HfWeights) -> Layout | None:
    """Reads the configuration. None if nothing is quantized."""
    folder = stored.folder
    values, where, prefix, default = _configuration(folder)

    def fail(reason: str) -> NoReturn:
        folder.fail(where, prefix + reason)

    if values is None:
        for name in stored.place:
            if name.endswith(_TELLING):
                stored.refuse(
                    name,
                    "is of a quantized module, but config.json has no quantization_config",
                )
        return None
    if not isinstance(values, dict):
        fail("is not an object")
    keys = Section(fail, values)
    method = keys.text("quant_method", default).lower()
    if method == "mxfp4":  # of experts only, which are read with their stacks
        return None
    if method not in _METHODS:
        fail(f"quant_method {method!r} is not supported; supported are {', '.join(_METHODS)}")
    return _METHODS[method](stored, keys)


def _configuration(folder: HfFolder) -> tuple[Any, str, str, str]:
    """The object, the file it is in, where in it, and the method if it does not say."""
    config = folder.json(CONFIG)
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            default = "compressed-tensors" if key == "compression_config" else ""
            return config[key], CONFIG, f"{key}: ", default
    for name, method in _OWN_FILES.items():
        if folder.has(name):
            return folder.json(name), name, "", method
    return None, CONFIG, "", ""


def _auto_round(stored: HfWeights, keys: Section) -> Layout:
    packing = keys.text("packing_format", "auto_round:auto_gptq")
    layout = _AUTO_ROUND.get(packing)
    if layout is None:
        keys.fail(
            f"packing_format {packing!r} is not supported; supported are {', '.join(_AUTO_ROUND)}"
        )
    if keys.text("data_type", "int") != "int":
        keys.fail(f"data_type {keys.values['data_type']!r} is not supported, only int")
    if keys.count("act_bits", 16) < 16:
        keys.fail(
            f"act_bits {keys.values['act_bits']} is not supported: activations stay as they are"
        )
    if layout == "awq":
        return Awq(stored, keys)
    return Gptq(stored, keys, layout)


_METHODS: dict[str, Callable[[HfWeights, Section], Layout]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "fbgemm_fp8": Fp8,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
}
