"""Quantized matrices as the tensors of GPTQ, AWQ and compressed-tensors folders.

Written from the descriptions that the readers carry (loader/gptq.py, awq.py and
compressed_tensors.py). Each layout says which schemes it can express; the tensors of a module are
named after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.loader.gguf import BLOCKS
from octavo.loader.grouped import pack
from octavo.tools.quantize.grid import CodeKind, Quantized, Scheme, Steps, bf16_bits

Array = npt.NDArray[Any]
# Of eight outputs in a word, which one each nibble holds (AutoAWQ, GEMM).
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Format(Enum):
    GPTQ = "gptq"
    AWQ = "awq"
    COMPRESSED_TENSORS = "compressed-tensors"
    GGUF = "gguf"


class HfTensor(NamedTuple):
    dtype: str  # as safetensors calls it
    data: Array  # of as many bytes an element; bfloat16 as uint16


def scheme_of(format: Format, bits: int, group: int | None, symmetric: bool) -> Scheme:
    """What a layout can express of it. Raises `ValueError` for what it cannot."""
    kind = CodeKind.SYMMETRIC if symmetric else CodeKind.ASYMMETRIC
    if bits == 6:
        raise ValueError("6 bits are a K-quant's (--mix)")
    if bits == 5 and format is not Format.GGUF:
        raise ValueError(f"the {format.value} layout has 3, 4 and 8 bits; GGUF has 5 too")
    match format:
        case Format.AWQ:
            if bits != 4:
                raise ValueError("the awq layout has 4 bits only; gptq has 3 and 8 too")
            if symmetric:
                raise ValueError("the awq layout is asymmetric; gptq can be symmetric")
            return Scheme(bits, group, kind, Steps.BOTH)
        case Format.COMPRESSED_TENSORS:
            if not symmetric:
                raise ValueError(
                    "transformers cannot load zero points in the compressed-tensors layout unless "
                    "it dequantizes the model (tried: 5.24 with compressed-tensors 0.20.1); "
                    "gptq and awq have zeros that it loads"
                )
            return Scheme(bits, group, kind, Steps.BF16)
        case Format.GGUF:
            if group != 32:
                raise ValueError("GGUF has groups of 32 inputs (--group-size 32)")
            if bits == 3:
                raise ValueError("GGUF has 3 bits in K-quants (--mix Q3_K_M); gptq has them, too")
            if bits == 8:
                if not symmetric:
                    raise ValueError("GGUF's 8 bits (Q8_0) are symmetric; its 4 can have zeros")
                return Scheme(bits, group, CodeKind.Q8_0)
            if bits == 5:
                return Scheme(bits, group, CodeKind.Q5_0 if symmetric else CodeKind.Q5_1)
            return Scheme(bits, group, CodeKind.Q4_0 if symmetric else CodeKind.Q4_1)
    return Scheme(bits, group, kind, Steps.BOTH)


# ── Modules ─────────────────────────────────────────────────────────────────────────────────────


def gptq_tensors(matrix: Quantized) -> dict[str, HfTensor]:
    """v1: zeros less one."""
    bits, zero = matrix.scheme.bits, _zero(matrix)
    less_one = (zero - np.uint8(1)) & np.uint8(matrix.scheme.levels)
    return {
        "qweight": HfTensor("I32", _words(matrix.codes, bits).T),
        "qzeros": HfTensor("I32", _words(less_one.T, bits)),
        "scales": HfTensor("F16", matrix.step.T.astype("<f2")),
        "g_idx": HfTensor("I32", matrix.group_of.astype("<i4")),
    }


def awq_tensors(matrix: Quantized) -> dict[str, HfTensor]:
    return {
        "qweight": HfTensor("I32", _words(_awq_order(matrix.codes.T), 4)),
        "qzeros": HfTensor("I32", _words(_awq_order(_zero(matrix).T), 4)),
        "scales": HfTensor("F16", matrix.step.T.astype("<f2")),
    }


def packed_tensors(matrix: Quantized) -> dict[str, HfTensor]:
    """compressed-tensors, pack-quantized."""
    return {
        "weight_packed": HfTensor("I32", _words(matrix.codes, matrix.scheme.bits)),
        "weight_scale": HfTensor("BF16", bf16_bits(matrix.step)),
        "weight_shape": HfTensor("I64", np.array(matrix.shape, "<i8")),
    }


def plain_tensors(matrix: Quantized) -> dict[str, HfTensor]:
    """compressed-tensors, int-quantized."""
    return {
        "weight": HfTensor("I8", (matrix.codes ^ np.uint8(128)).view(np.int8)),
        "weight_scale": HfTensor("BF16", bf16_bits(matrix.step)),
    }


def module_bytes(
    format: Format, scheme: Scheme, rows: int, inputs: int, *, packed: bool = False
) -> int:
    """What a quantized matrix takes. ``packed``: one beside the layers, see `OutputLayout`."""
    bits, groups = scheme.bits, scheme.groups(inputs)
    along_inputs, along_rows = -(-inputs * bits // 32), -(-rows * bits // 32)
    match format:
        case Format.GPTQ:
            return 4 * (along_inputs * rows + along_rows * groups + inputs) + 2 * groups * rows
        case Format.AWQ:
            return 4 * along_rows * (inputs + groups) + 2 * groups * rows
        case Format.COMPRESSED_TENSORS:
            if _plain(scheme) and not packed:
                return rows * inputs + 2 * rows
            return 4 * along_inputs * rows + 2 * groups * rows + 16
    count, size = BLOCKS[scheme.kind.format]
    return rows * inputs // count * size


def _zero(matrix: Quantized) -> npt.NDArray[np.uint8]:
    if matrix.zero is None:
        raise ValueError("a grid without integer zeros is of no such layout")
    return matrix.zero


def _words(numbers: npt.NDArray[np.uint8], bits: int) -> Array:
    """[rows, count] numbers as little-endian 32-bit words along the second dimension: one stream of
    bits, in which a number of 3 bits may lie in two words."""
    streams = pack(np.ascontiguousarray(numbers), bits)
    return np.pad(streams, ((0, 0), (0, -streams.shape[1] % 4))).view("<i4")


def _awq_order(numbers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    rows, outputs = numbers.shape
    if outputs % 8:
        raise ValueError(f"the awq layout has outputs in eights, not {outputs}")
    return numbers.reshape(rows, -1, 8)[:, :, _AWQ_ORDER].reshape(rows, outputs)


# ── Configurations ──────────────────────────────────────────────────────────────────────────────


class OutputLayout(NamedTuple):
    """``files``: configurations in files of their own, beside config.json's. ``outputs``: of which
    a matrix has a multiple. Embedding and head, where they are quantized, are `packed_tensors`.
    """

    tensors: Callable[[Quantized], dict[str, HfTensor]]
    config: dict[str, Any]
    files: dict[str, dict[str, Any]]
    outputs: int = 1


def layout_of(
    format: Format,
    scheme: Scheme,
    *,
    ordered: bool,
    damping: float,
    kept: Sequence[str] = (),
    ends: Mapping[str, Scheme] | None = None,
) -> OutputLayout:
    """How a scheme is written. ``ordered``: groups are of neighbouring inputs; ``kept``: modules of
    layers that stay as they are; ``ends``: of the modules beside the layers those that are
    quantized. Raises `ValueError` for what the layout has no place for."""
    match format:
        case Format.GPTQ:
            config = {
                "quant_method": "gptq",
                "bits": scheme.bits,
                "group_size": scheme.group or -1,
                "desc_act": not ordered,
                "sym": scheme.kind is CodeKind.SYMMETRIC,
                "lm_head": False,
                "damp_percent": damping,
                "checkpoint_format": "gptq",
                "pack_dtype": "int32",
            }
            return OutputLayout(gptq_tensors, config, {"quantize_config.json": config})
        case Format.AWQ:
            if not ordered:
                raise ValueError("the awq layout has no groups in another order (--act-order)")
            config = {
                "quant_method": "awq",
                "bits": scheme.bits,
                "group_size": scheme.group or -1,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": list(kept) or None,
            }
            own = {"w_bit": scheme.bits, "q_group_size": scheme.group or -1}
            return OutputLayout(
                awq_tensors,
                config,
                {"quant_config.json": own | {"zero_point": True, "version": "GEMM"}},
                outputs=8,
            )
        case Format.COMPRESSED_TENSORS:
            if not ordered:
                raise ValueError(
                    "compressed-tensors has dropped groups in another order (--act-order group), "
                    "and transformers refuses such a folder; gptq has them"
                )
            return _compressed_tensors(scheme, kept, ends or {})
    raise ValueError(f"{format.value} is no folder's layout")


_PACKED, _PLAIN, _MIXED = "pack-quantized", "int-quantized", "mixed-precision"


def _compressed_tensors(
    scheme: Scheme, kept: Sequence[str], ends: Mapping[str, Scheme]
) -> OutputLayout:
    plain = _plain(scheme)
    groups = [_config_group("Linear", scheme, _PLAIN if plain else _PACKED)]
    groups += [_config_group(f"re:.*{name}$", own, _PACKED) for name, own in ends.items()]
    formats = {group["format"] for group in groups}
    config = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": [*([] if "lm_head" in ends else ["lm_head"]), *kept],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    return OutputLayout(plain_tensors if plain else packed_tensors, config, {})


def _plain(scheme: Scheme) -> bool:
    """8 bits a channel is what engines run in integers, with activations rounded as they come."""
    return scheme.bits == 8 and scheme.group is None


def _config_group(target: str, scheme: Scheme, format: str) -> dict[str, Any]:
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if scheme.group is None else "group",
        "group_size": scheme.group,
        "actorder": None,
        "dynamic": False,
        "observer": "minmax",
    }
    activations = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    return {
        "targets": [target],
        "weights": weights,
        "input_activations": activations if format == _PLAIN else None,
        "output_activations": None,
        "format": format,
    }
