"""All experts of a layer in one tensor of a Hugging Face folder, as gpt-oss has them.

Of each expert, the rows of gate and up lie in turn: gate's first, up's first, gate's second, …
Matrices of floats are stored [in, out]; those in MXFP4 [out, in], as blocks and scales of their own
(loader/mxfp4.py). Biases are [out]. Before each of these stands a dimension of experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from octavo.loader.base import MadeRows, Weight, WeightFormat
from octavo.loader.bind import vector
from octavo.loader.hf_folder import HfWeights
from octavo.loader.mxfp4 import BLOCK, mxfp4
from octavo.models.config import ModelConfig

_TENSOR = re.compile(
    r"layers\.(\d{1,4})\.mlp\.experts\.(gate_up_proj|down_proj)(_blocks|_scales|_bias)?"
)
_PARTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}

# The rows of a matrix [rows, in] that start at `first` and are `step` apart.
_Take = Callable[[int, int], Weight]


def interleaved_experts(
    stored: HfWeights, name: str, plain: str, config: ModelConfig
) -> dict[str, Weight] | None:
    """Return the experts' matrices or biases by role; None for a tensor of something else.

    ``plain`` is the tensor's name without a prefix. Scales are found with their blocks, and give
    nothing by themselves. Raises `CheckpointError` for a shape that the config does not ask for.
    """
    match = _TENSOR.fullmatch(plain)
    if match is None or config.experts is None:
        return None
    count, inner = config.experts.count, config.experts.intermediate_size
    parts, kind = _PARTS[match[2]], match[3]
    rows, inputs = len(parts) * inner, config.hidden_size
    if len(parts) == 1:
        rows, inputs = inputs, inner
    blocks = -(-inputs // BLOCK)
    shapes = {
        None: (count, inputs, rows),
        "_blocks": (count, rows, blocks, BLOCK // 2),
        "_scales": (count, rows, blocks),
        "_bias": (count, rows),
    }
    _expect(stored, name, shapes[kind])
    if kind == "_scales":
        _expect(stored, name.removesuffix(kind) + "_blocks", shapes["_blocks"])
        return {}
    if kind == "_blocks":
        scales = name.removesuffix(kind) + "_scales"
        _expect(stored, scales, shapes["_scales"])
        if inputs % BLOCK:
            stored.refuse(name, f"is of {inputs} inputs, which are no blocks of {BLOCK}")
        of_blocks, of_scales = stored.array(name, "U8"), stored.array(scales, "U8")
        take = [_taken(mxfp4(name, b, s)) for b, s in zip(of_blocks, of_scales, strict=True)]
    else:
        weight = stored.weight(name)
        data = weight.data.reshape(count, -1)
        take = [
            _of_vector(weight, each, rows) if kind else _transposed(weight, each, rows)
            for each in data
        ]
    ending = ".bias" if kind == "_bias" else ""
    return {
        f"layers.{int(match[1])}.{part}.{expert}{ending}": of(at, len(parts))
        for expert, of in enumerate(take)
        for at, part in enumerate(parts)
    }


def _expect(stored: HfWeights, name: str, shape: tuple[int, ...]) -> None:
    if name not in stored.place:
        stored.folder.fail("the weights", f"have no tensor {name!r}")
    if stored.shape(name) != shape:
        found = list(stored.shape(name))
        stored.refuse(name, f"has shape {found}; config.json asks for {list(shape)}")


def _taken(weight: Weight) -> _Take:
    return lambda first, step: weight.take(np.arange(first, weight.shape[0], step))


def _of_vector(weight: Weight, data: npt.NDArray[np.uint8], rows: int) -> _Take:
    flat = vector(weight._replace(shape=(rows,), source=data))

    def take(first: int, step: int) -> Weight:
        values = np.ascontiguousarray(flat.data.view("<f4")[first::step])
        values.flags.writeable = False
        return flat._replace(shape=values.shape, source=values.view(np.uint8))

    return take


def _transposed(weight: Weight, data: npt.NDArray[np.uint8], rows: int) -> _Take:
    """``data``: of a matrix [in, rows]."""
    number = "<u4" if weight.format is WeightFormat.F32 else "<u2"
    columns = data.view(number).reshape(-1, rows)

    def take(first: int, step: int) -> Weight:
        own = columns[:, first::step].T

        def make(begin: int, end: int) -> npt.NDArray[np.uint8]:
            return np.ascontiguousarray(own[begin:end]).view(np.uint8).reshape(-1)

        source = MadeRows(len(own), own.shape[1] * own.itemsize, make)
        return weight._replace(shape=own.shape, source=source)

    return take
