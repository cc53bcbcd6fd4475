"""What a weight takes in each format: bits of its own, and a share of what its group shares.

A scheme is a sum of terms, each so many bits for so many inputs of a row, or of all rows together:

    bytes a weight = bits/8 + scale bytes/group + zero bytes/group + index bytes/outputs

The terms of the GGUF formats are their blocks' fields (ggml's block structures; K formats keep
6-bit or 4-bit scales of small groups under 16-bit scales of 256); those of GPTQ (AutoGPTQ's
qweight, qzeros, scales, g_idx), AWQ (its GEMM layout) and compressed-tensors (pack-quantized,
int-quantized) are their tensors. w8a8 and fp8 are vLLM's INT8 W8A8 and FP8 W8A8: a scale a row, and
activations that are rounded to 8 bits, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from octavo.loader.base import WeightFormat


class PlannedFormat(Enum):
    """Formats of plans for GPUs, which the engine cannot hold."""

    FP8 = "fp8"  # e4m3 or e5m2: the same bytes

    @property
    def grouped(self) -> bool:
        """As of `WeightFormat`."""
        return False


class Term(NamedTuple):
    """``bits`` for each ``per`` inputs of a row; ``per`` 0: for a whole row. ``shared``: once for
    all rows of a matrix.
    """

    bits: int
    what: str  # "" is the number itself
    per: int = 1
    shared: bool = False

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.per) if self.per else 1

    def share(self, outputs: int, inputs: int) -> Fraction:
        """Bytes a weight of an [outputs, inputs] matrix."""
        rows = outputs if self.shared else 1
        return Fraction(self.bits * self.groups(inputs), 8 * inputs * rows)

    def text(self, outputs: int, inputs: int) -> str:
        if not self.what:
            return f"{self.bits} bits/8"
        size = self.bits / 8
        each = f"{size:g} {'byte' if size == 1 else 'bytes'} {self.what}"
        if self.shared:
            return f"{each}/{outputs} outputs"
        if self.per and inputs % self.per:  # the last group is shorter
            return f"{self.groups(inputs)} × {each}/{inputs}"
        return f"{each}/{self.per or inputs}"


@dataclass(frozen=True, slots=True)
class StorageScheme:
    """How the matrices of a model might be stored."""

    name: str
    format: WeightFormat | PlannedFormat  # in which the engine holds it
    terms: tuple[Term, ...]
    group: int = 0  # of a grouped format, as `Weight` has it; 0: all inputs
    whole_groups: bool = True  # rows must be whole groups
    narrow: bool = False  # activations are rounded to the weights' 8 bits, too, on GPUs

    def problem(self, inputs: int) -> str | None:
        """Why rows of so many inputs cannot be stored so; None if they can."""
        for term in self.terms if self.whole_groups else ():
            if term.per and inputs % term.per:
                return f"rows of {inputs} are no whole groups of {term.per}"
        return None

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of an [outputs, inputs] matrix. Raises `ValueError` if it has none."""
        if (problem := self.problem(inputs)) is not None:
            raise ValueError(f"{self.name}: {problem}")
        return ceil(outputs * inputs * self._share(outputs, inputs))

    def bytes_per_weight(self, outputs: int, inputs: int) -> float:
        return float(self._share(outputs, inputs))

    def _share(self, outputs: int, inputs: int) -> Fraction:
        return sum((term.share(outputs, inputs) for term in self.terms), Fraction(0))

    def sum(self, outputs: int, inputs: int) -> str:
        """The arithmetic of a weight's bytes, from the terms to the result."""
        shares = [term.share(outputs, inputs) for term in self.terms]
        steps = [" + ".join(term.text(outputs, inputs) for term in self.terms)]
        if len(shares) > 1:
            steps.append(" + ".join(f"{float(share):.9g}" for share in shares))
        return " = ".join([*steps, f"{float(sum(shares)):.9g}"])


def _gguf(format: WeightFormat, bits: int, *shared: Term) -> StorageScheme:
    return StorageScheme(format.name, format, (Term(bits, ""), *shared))


def _grid(format: WeightFormat, *terms: Term) -> StorageScheme:
    """Numbers that have no bits of their own."""
    return StorageScheme(format.name, format, (*terms, Term(16, "d", 256)))


# Scales and mins of small groups, and the 16-bit numbers that they multiply.
GGUF = {
    scheme.format: scheme
    for scheme in (
        _gguf(WeightFormat.F32, 32),
        _gguf(WeightFormat.F16, 16),
        _gguf(WeightFormat.BF16, 16),
        _gguf(WeightFormat.Q8_0, 8, Term(16, "scale", 32)),
        _gguf(WeightFormat.Q6_K, 6, Term(8, "scale", 16), Term(16, "d", 256)),
        _gguf(WeightFormat.Q5_1, 5, Term(16, "scale", 32), Term(16, "min", 32)),
        _gguf(WeightFormat.Q5_0, 5, Term(16, "scale", 32)),
        _gguf(
            WeightFormat.Q5_K, 5, Term(6, "scale", 32), Term(6, "min", 32),
            Term(32, "d and dmin", 256),
        ),
        _gguf(WeightFormat.Q4_1, 4, Term(16, "scale", 32), Term(16, "min", 32)),
        _gguf(WeightFormat.Q4_0, 4, Term(16, "scale", 32)),
        _gguf(
            WeightFormat.Q4_K, 4, Term(6, "scale", 32), Term(6, "min", 32),
            Term(32, "d and dmin", 256),
        ),
        _gguf(WeightFormat.IQ4_NL, 4, Term(16, "scale", 32)),
        _gguf(WeightFormat.IQ4_XS, 4, Term(6, "scale", 32), Term(16, "d", 256)),
        _gguf(WeightFormat.MXFP4, 4, Term(8, "exponent", 32)),
        _gguf(WeightFormat.Q3_K, 3, Term(6, "scale", 16), Term(16, "d", 256)),
        _gguf(
            WeightFormat.Q2_K, 2, Term(4, "scale", 16), Term(4, "min", 16),
            Term(32, "d and dmin", 256),
        ),
        _grid(WeightFormat.IQ3_S, Term(9, "point", 4), Term(8, "signs", 8), Term(4, "scale", 32)),
        _grid(WeightFormat.IQ3_XXS, Term(8, "point", 4), Term(7, "signs", 8), Term(4, "scale", 32)),
        _grid(WeightFormat.IQ2_S, Term(10, "point", 8), Term(8, "signs", 8), Term(4, "scale", 16)),
        _grid(WeightFormat.IQ2_XS, Term(9, "point", 8), Term(7, "signs", 8), Term(4, "scale", 16)),
        _grid(WeightFormat.IQ2_XXS, Term(8, "point", 8), Term(7, "signs", 8), Term(4, "scale", 32)),
        _grid(WeightFormat.IQ1_M, Term(11, "point", 8), Term(1, "sign", 8), Term(3, "scale", 16)),
        _grid(WeightFormat.IQ1_S, Term(11, "point", 8), Term(1, "sign", 32), Term(3, "scale", 32)),
        _gguf(WeightFormat.TQ2_0, 2, Term(16, "d", 256)),
        _grid(WeightFormat.TQ1_0, Term(416, "digits", 256)),
    )
}  # fmt: skip

_LARGEST_GROUP = 1 << 31
GROUPED = {3: WeightFormat.I3, 4: WeightFormat.I4, 8: WeightFormat.I8}
BITS = {"gptq": (3, 4, 8), "awq": (4,), "compressed-tensors": (4, 8)}
# By vLLM's names: 8 bits for weights and activations. e4m3 and e5m2 take the same bytes.
EIGHT_BITS = {
    name: StorageScheme(
        name.partition("_")[0], format, (Term(8, ""), Term(16, "scale", 0)), narrow=True
    )
    for name, format in (
        ("w8a8", WeightFormat.I8),
        ("fp8", PlannedFormat.FP8),
        ("fp8_e4m3", PlannedFormat.FP8),
        ("fp8_e5m2", PlannedFormat.FP8),
    )
}
NAMES = (*(format.name.lower() for format in GGUF), *BITS, *EIGHT_BITS)


def scheme(
    name: str, bits: int | None = None, group: int | None = None, *, symmetric: bool = True
) -> StorageScheme:
    """The scheme of a name of `NAMES`; ``group`` -1 is a whole row.

    ``bits`` and ``group`` are for gptq, awq and compressed-tensors (None: 4 bits, groups of 128),
    ``symmetric`` for compressed-tensors, which then has no zeros. Raises `ValueError` for what
    the format has not.
    """
    name = name.lower()
    if name not in NAMES:
        raise ValueError(f"format {name!r} is not one of {', '.join(NAMES)}")
    if name not in BITS:
        found = EIGHT_BITS.get(name) or GGUF[WeightFormat[name.upper()]]
        if bits is not None or group is not None:
            raise ValueError(
                f"{found.name} has bits and groups of its own: {found.sum(1, 256)}; "
                f"--bits and --group-size are for {', '.join(BITS)}"
            )
        return found
    bits, group = 4 if bits is None else bits, 128 if group is None else group
    if bits not in BITS[name]:
        allowed = " or ".join(map(str, BITS[name]))
        raise ValueError(f"{name} has {allowed} bits, not {bits}")
    if group != -1 and (not 32 <= group <= _LARGEST_GROUP or group % 32):
        raise ValueError(
            f"--group-size {group} is neither a multiple of 32 up to 2³¹ nor -1, a whole row"
        )
    per = max(group, 0)
    terms = [Term(bits, ""), Term(16, "scale", per)]
    if name != "compressed-tensors" or not symmetric:
        terms.append(Term(bits, "zero", per))
    if name == "gptq":
        terms.append(Term(32, "g_idx", shared=True))  # each input's group
    wide = f"group {group}" if per else "a row"
    kind = "" if name != "compressed-tensors" else " sym" if symmetric else " asym"
    return StorageScheme(
        f"{name} {bits} bits{kind}, {wide}",
        GROUPED[bits],
        tuple(terms),
        per,
        whole_groups=name != "gptq",
    )


def survey() -> list[StorageScheme]:
    """What a table of formats shows: every GGUF format, and the grouped ones at usual sizes."""
    grouped = [
        scheme(name, bits, group)
        for name, bits, groups in (
            ("compressed-tensors", 8, (-1,)),
            ("gptq", 8, (128,)),
            ("gptq", 4, (32, 64, 128, -1)),
            ("awq", 4, (64, 128)),
            ("compressed-tensors", 4, (32, 128)),
            ("gptq", 3, (128,)),
        )
        for group in groups
    ]
    return [*GGUF.values(), EIGHT_BITS["w8a8"], EIGHT_BITS["fp8"], *grouped]
