"""A layout of quantized matrices in a Hugging Face folder: the interface, and what layouts share.

Which modules are quantized, and with how many bits, is read from the tensors themselves: a
configuration's lists and patterns of names say the same or are wrong. So no pattern of a file's is
ever run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Bytes, Quantization, Stored, Weight
from octavo.loader.grouped import FORMATS, Parts, made_rows, unpack
from octavo.loader.hf_folder import HfWeights
from octavo.models.section import Section

FLOATS = ("F16", "BF16", "F32")
_WORD = 32  # numbers that end on a 32-bit word whatever their bits


class Module(NamedTuple):
    """A quantized linear layer: the names of its tensors, by the last part of each."""

    name: str
    tensors: dict[str, str]


class QuantizationArgs(NamedTuple):
    bits: int
    group: int  # -1: all inputs


MAX_SETTINGS = 64  # that differ: a file with more says nothing that could be checked


class Layout(ABC):
    """Reads the modules that are stored in it. ``markers``: a module with one is quantized;
    ``parts``: the last parts of its tensors' names; ``scales``: that of its scales, in layouts of
    grouped formats. Faults raise `CheckpointError`.
    """

    markers: ClassVar[frozenset[str]]
    parts: ClassVar[frozenset[str]]
    scales: ClassVar[str]

    def __init__(self, stored: HfWeights, quantization: Quantization) -> None:
        self.stored = stored
        self.quantization = quantization

    @abstractmethod
    def weight(self, module: Module, n: int, k: int) -> Weight:
        """The module's matrix of ``n`` outputs and ``k`` inputs."""

    def array(self, module: Module, part: str, *dtypes: str) -> npt.NDArray[Any]:
        return self.stored.array(self.name(module, part), *dtypes)

    def shaped(
        self, module: Module, part: str, shape: tuple[int, ...], *dtypes: str
    ) -> npt.NDArray[Any]:
        """A tensor of exactly this shape."""
        found = self.array(module, part, *dtypes)
        if found.shape != shape:
            self.refuse_shape(module, part, list(shape))
        return found

    def refuse_shape(self, module: Module, part: str, expected: object) -> NoReturn:
        name = self.name(module, part)
        shape = list(self.stored.shape(name))
        self.stored.refuse(name, f"has shape {shape}, not {expected}")

    def name(self, module: Module, part: str) -> str:
        """The tensor's whole name."""
        if part not in module.tensors:
            first = next(iter(module.tensors.values()))
            self.stored.refuse(first, f"has no {module.name}.{part} beside it")
        return module.tensors[part]

    def group_of(self, module: Module, part: str, group: int, k: int) -> int:
        """A group's inputs, of which the formats take multiples of 32, or all."""
        if group == -1 or group >= k:
            return k
        if group % 32:
            name = self.name(module, part)
            self.stored.refuse(name, f"has groups of {group} inputs, not a multiple of 32")
        return group

    def grouped(
        self,
        module: Module,
        part: str,
        shape: tuple[int, int],
        setting: QuantizationArgs,
        parts: Callable[[int, int], Parts],
        order: npt.NDArray[np.int32] | None = None,
    ) -> Weight:
        """A weight named for its ``part``; ``setting`` has the group's inputs. Scales that are not
        finite are refused when its rows are made.
        """
        bits, group = setting

        def finite(first: int, last: int) -> Parts:
            made = parts(first, last)
            if not np.isfinite(made[0]).all():
                self.stored.refuse(self.name(module, self.scales), "has a scale that is not finite")
            return made

        return Weight(
            self.name(module, part),
            FORMATS[bits],
            shape,
            made_rows(*shape, bits, group, finite),
            group,
            order,
            Stored(
                f"{self.quantization.method}-int{bits}",
                sum(self.stored.nbytes(name) for name in module.tensors.values()),
            ),
        )


def distinct(keys: Section, settings: Iterable[QuantizationArgs]) -> list[QuantizationArgs]:
    """In their order."""
    found = list(dict.fromkeys(settings))
    if len(found) > MAX_SETTINGS:
        keys.fail(f"has more than {MAX_SETTINGS} combinations of bits and group sizes")
    return found


def sized(keys: Section, key: str = "group_size") -> int:
    """A group size, -1 for all inputs."""
    size = keys.count(key, least=-1)
    if size == 0:
        keys.fail(f"{key} is 0")
    return size


def bits_of(keys: Section, key: str, allowed: tuple[int, ...]) -> int:
    bits = keys.count(key)
    if bits not in allowed:
        supported = ", ".join(map(str, allowed))
        keys.fail(f"{key} is {bits}, which is not supported; supported are {supported}")
    return bits


def wide(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """F16, F32, or BF16 as its bits, in 32 bits (exactly)."""
    if values.dtype == np.uint16:
        return (values.astype("<u4") << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def words_columns(words: npt.NDArray[Any], bits: int, first: int, last: int) -> Bytes:
    """Numbers ``first`` to ``last`` along the second dimension of [rows, words] 32-bit words."""
    begin = first // _WORD * _WORD
    part = np.ascontiguousarray(words[:, begin * bits // 32 : -(-last * bits // 32)], "<i4")
    return unpack(part.view(np.uint8), bits, last - begin)[:, first - begin :]
