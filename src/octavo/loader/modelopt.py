"""Folders of NVIDIA's ModelOpt: FP8 and NVFP4 (https://github.com/NVIDIA/Model-Optimizer).

FP8: ``weight`` F8_E4M3 [n, k] times ``weight_scale``. NVFP4: ``weight`` U8 [n, k/2], two E2M1
numbers in a byte, times ``weight_scale`` F8_E4M3 [n, k/16], times ``weight_scale_2``. Scales of
activations (``input_scale``) are not needed: activations stay in 32 bits beside fp8 weights, and
have 8 bits beside fp4 ones. Scales of an fp8 cache (``k_scale``, ``v_scale``) are passed over: the
cache is in one of the formats of ``--kv-cache-dtype``.
"""

from __future__ import annotations

from octavo.loader.base import Quantization, Weight
from octavo.loader.float_rows import FP4_GROUP, fp4_weight, fp8_weight
from octavo.loader.fp8 import KEPT
from octavo.loader.hf_folder import HfWeights
from octavo.loader.quantized_layout import Layout, Module
from octavo.models.section import Section

EIGHT_BITS = "fp4 asked for, 8 bits here"
_ALGORITHMS = {"FP8": (8, -1, KEPT), "NVFP4": (4, FP4_GROUP, EIGHT_BITS)}


class ModelOpt(Layout):
    markers = frozenset({"weight_scale"})
    parts = frozenset({"weight", "weight_scale", "weight_scale_2", "input_scale"})
    parts |= {"k_scale", "v_scale"}

    def __init__(self, stored: HfWeights, keys: Section) -> None:
        if keys.values.get("quantization") is not None:  # hf_quant_config.json
            keys = keys.object("quantization")
        algorithm = keys.text("quant_algo", "")
        if algorithm not in _ALGORITHMS:
            keys.fail(
                f"quant_algo {algorithm!r} is not supported; supported are {', '.join(_ALGORITHMS)}"
            )
        bits, group, activations = _ALGORITHMS[algorithm]
        if bits == 4 and keys.count("group_size", FP4_GROUP) != FP4_GROUP:
            keys.fail(f"group_size is {keys.values['group_size']}; {algorithm} has {FP4_GROUP}")
        if keys.values.get("kv_cache_quant_algo") or keys.values.get("kv_cache_scheme"):
            stored.folder.note(
                "the scales of an fp8 cache that the checkpoint has are passed over: "
                "--kv-cache-dtype says what the cache is in"
            )
        super().__init__(
            stored,
            Quantization("modelopt", algorithm, (bits,), (group,), True, False, activations),
        )

    def weight(self, module: Module, n: int, k: int) -> Weight:
        if "weight_scale_2" not in module.tensors:
            return fp8_weight(self, module, (n, k), "weight_scale", (0, 0))
        return fp4_weight(self, module, (n, k), "weight", "weight_scale_2", lambda number: number)
