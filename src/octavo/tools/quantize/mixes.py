"""The usual mixes of K-quants: which matrix of a model is in which format.

The rules are llama.cpp's (ggml-org/llama.cpp, src/llama-quant.cpp), so that a file of a name has
the sizes that people know under it: matrices that hurt most get more bits, such as values and down
projections of the first, the last and every third layer between. Blocks of 256 do not fit every
matrix; a format of blocks of 32 with as many bits or more stands in for them.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from octavo.loader.base import Checkpoint, WeightFormat
from octavo.loader.bind import ROUTERS
from octavo.models.config import ModelConfig
from octavo.models.families import FAMILIES
from octavo.tools.quantize.grid import CodeKind, Scheme
from octavo.tools.quantize.tensor_names import tensor_names

BLOCK = 256  # weights of a K-quant's block
_STANDS_IN = {
    WeightFormat.Q2_K: WeightFormat.Q4_0,
    WeightFormat.Q3_K: WeightFormat.Q4_0,
    WeightFormat.Q4_K: WeightFormat.Q5_0,
    WeightFormat.Q5_K: WeightFormat.Q5_1,
    WeightFormat.Q6_K: WeightFormat.Q8_0,
}


class Mix(Enum):
    """Values are GGUF's ``general.file_type``."""

    Q2_K = 10
    Q3_K_S = 11
    Q3_K_M = 12
    Q3_K_L = 13
    Q4_K_S = 14
    Q4_K_M = 15
    Q5_K_S = 16
    Q5_K_M = 17
    Q6_K = 18

    @property
    def base(self) -> WeightFormat:
        """The format of most matrices."""
        return WeightFormat[self.name[:4]]


class _Place(NamedTuple):
    """Where a matrix is in its model."""

    layer: int
    layers: int
    value: int  # matrices of values in the layers before
    values: int  # in all layers
    shared: int  # query heads on a KV head, in the first layer
    experts: int
    large: bool  # a Llama of 80 layers, most of whose values are shared

    def more_bits(self, index: int, count: int) -> bool:
        """Whether the one at ``index`` of so many is first, last, or a third one between."""
        return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def mix_schemes(checkpoint: Checkpoint, mix: Mix) -> dict[str, Scheme]:
    """What every matrix of a model is rounded to, by role: those of the layers, embedding, head."""
    config, weights = checkpoint.config, checkpoint.weights
    names = tensor_names(checkpoint)
    matrices = [
        role
        for role, weight in weights.items()
        if len(weight.shape) == 2 and not role.endswith(ROUTERS)
    ]
    values = list(dict.fromkeys(names[role] for role in matrices if _part(names[role]) in _VALUES))
    found = {}
    for role in matrices:
        inputs, name = weights[role].shape[1], names[role]
        if role.startswith("layers."):
            place = _Place(
                int(role.split(".")[1]),
                len(config.layers),
                values.index(name) if name in values else 0,
                len(values),
                config.num_heads // config.heads_of(config.layers[0])[0],
                config.experts.count if config.experts is not None else 0,
                _large(config),
            )
            format = _of_layer(mix, _part(name), place)
        elif role == "output" or "output" not in weights:
            format = WeightFormat.Q6_K
        else:
            format = mix.base
        found[role] = block_scheme(format, inputs)
    return found


def block_scheme(format: WeightFormat, inputs: int) -> Scheme:
    """A format of ggml's, or what stands in for it where its blocks do not fit."""
    if inputs % BLOCK:
        format = _STANDS_IN.get(format, format)
    of_16 = format in (WeightFormat.Q2_K, WeightFormat.Q3_K, WeightFormat.Q6_K)
    return Scheme(int(format.name[1]), 16 if of_16 else 32, CodeKind[format.name])


_VALUES = ("attn_v", "attn_qkv")


def _part(name: str) -> str:
    """``blk.3.attn_q.weight`` → ``attn_q``"""
    return name.removesuffix(".weight").partition(".")[2].partition(".")[2]


def _large(config: ModelConfig) -> bool:
    llama = FAMILIES[config.family].gguf == "llama"
    return llama and len(config.layers) == 80 and config.num_heads != config.num_kv_heads


def _of_layer(mix: Mix, part: str, at: _Place) -> WeightFormat:
    if part in _VALUES:
        return _of_values(mix, at)
    if part == "attn_k" and at.experts == 8:
        return WeightFormat.Q8_0
    if part == "attn_output":
        return _of_attention_output(mix, at)
    if part.startswith("ffn_down"):
        return _of_down(mix, at)
    return mix.base


def _of_values(mix: Mix, at: _Place) -> WeightFormat:
    found = mix.base
    match mix:
        case Mix.Q2_K:
            found = WeightFormat.Q4_K if at.shared >= 4 else WeightFormat.Q3_K
        case Mix.Q3_K_M:
            found = WeightFormat.Q5_K if at.value < 2 else WeightFormat.Q4_K
        case Mix.Q3_K_L:
            found = WeightFormat.Q5_K
        case Mix.Q4_K_S if at.value < 4:
            found = WeightFormat.Q5_K
        case Mix.Q4_K_M | Mix.Q5_K_M if at.more_bits(at.value, at.values):
            found = WeightFormat.Q6_K
    if at.experts == 8:
        return WeightFormat.Q8_0
    if at.large and found in (WeightFormat.Q3_K, WeightFormat.Q4_K):
        return WeightFormat.Q5_K
    return found


def _of_attention_output(mix: Mix, at: _Place) -> WeightFormat:
    if at.experts == 8:
        small = mix in (Mix.Q2_K, Mix.Q3_K_S, Mix.Q3_K_M, Mix.Q4_K_S, Mix.Q4_K_M)
        return WeightFormat.Q5_K if small else mix.base
    more = {
        Mix.Q2_K: WeightFormat.Q3_K,
        Mix.Q3_K_M: WeightFormat.Q4_K,
        Mix.Q3_K_L: WeightFormat.Q5_K,
    }
    return more.get(mix, mix.base)


def _of_down(mix: Mix, at: _Place) -> WeightFormat:
    match mix:
        case Mix.Q2_K:
            return WeightFormat.Q3_K
        case Mix.Q3_K_M:
            return WeightFormat.Q5_K if at.layer < at.layers // 16 else WeightFormat.Q4_K
        case Mix.Q3_K_L:
            return WeightFormat.Q5_K
        case Mix.Q4_K_S if at.layer < at.layers // 8:
            return WeightFormat.Q5_K
        case Mix.Q4_K_M | Mix.Q5_K_M if at.more_bits(at.layer, at.layers):
            return WeightFormat.Q6_K
    return mix.base
