"""fp8 folders as DeepSeek, Qwen and transformers write them ("fp8"), and FBGEMM's ("fbgemm_fp8").

A linear layer has ``weight`` F8_E4M3 [n, k] and ``weight_scale_inv`` (fbgemm: ``weight_scale``), by
which it is multiplied: one number, one for each output, or one for each block of
``weight_block_size`` (https://github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS; transformers,
integrations/finegrained_fp8). Activations would be rounded to fp8; here they stay in 32 bits, so
scales for them (``activation_scale``, ``input_scale``, ``input_scale_ub``) are not needed.
"""

from __future__ import annotations

from octavo.loader.base import Quantization, Weight
from octavo.loader.float_rows import fp8_weight
from octavo.loader.hf_folder import HfWeights
from octavo.loader.quantized_layout import Layout, Module
from octavo.models.section import Section

KEPT = "fp8 asked for, kept in 32 bits"


class Fp8(Layout):
    markers = frozenset({"weight_scale_inv", "weight_scale"})
    parts = frozenset(
        {"weight", "weight_scale_inv", "weight_scale", "activation_scale", "input_scale"}
        | {"input_scale_ub"}
    )

    def __init__(self, stored: HfWeights, keys: Section) -> None:
        method = keys.text("quant_method", "fp8")
        for key, known in (("fmt", "e4m3"), ("scale_fmt", "float"), ("expert_dtype", "fp8")):
            if keys.text(key, known) != known:
                keys.fail(f"{key} {keys.values[key]!r} is not supported, only {known}")
        self.block = block_size(keys, "weight_block_size")
        super().__init__(
            stored, Quantization(method, "e4m3", (8,), (self.block[1] or -1,), True, False, KEPT)
        )

    def weight(self, module: Module, n: int, k: int) -> Weight:
        scale = next(
            part for part in ("weight_scale_inv", "weight_scale") if part in module.tensors
        )
        return fp8_weight(self, module, (n, k), scale, self.block)


def block_size(keys: Section, key: str) -> tuple[int, int]:
    """Outputs and inputs of a block; 0 and 0 where there are none."""
    sizes = keys.values.get(key)
    if sizes is None:
        return 0, 0
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(type(size) is int and 1 <= size < 1 << 31 for size in sizes)
    ):
        keys.fail(f"{key} is {sizes!r:.40}, not two numbers of outputs and inputs")
    return sizes[0], sizes[1]
