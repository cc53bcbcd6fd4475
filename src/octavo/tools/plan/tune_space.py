"""What `octavo tune` chooses from: the values of each setting, and their points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from octavo.loader.rounding import FLOATS, PLANNED, QUANTIZATIONS
from octavo.tools.plan.hardware import Device
from octavo.tools.plan.subject import Subject

AS_IT_PAYS = "as it pays"
ROUNDS = ("kv_cache_dtype", "quantization")  # the settings that round numbers
_ROUNDING: Mapping[str | None, int] = dict.fromkeys(("auto", "bf16", "fp16", None), 0) | {
    "fp8": 1,
    "int8": 1,
    "int4": 2,
}


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """A point of the search."""

    max_num_seqs: int
    max_num_batched_tokens: int
    memory: float  # share of what weights and work space leave that is KV cache
    kv_cache_dtype: str
    quantization: str  # "none": as stored
    speculation: str = "off"  # "as it pays", or tokens of a draft

    @property
    def rounding(self) -> int:
        """How many numbers are rounded how far; 0: none further than they are stored."""
        return _ROUNDING[self.kv_cache_dtype] + _ROUNDING[self.config_quantization]

    @property
    def config_quantization(self) -> str | None:
        return None if self.quantization == "none" else self.quantization


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched: the values of each setting, ascending, and the engine's defaults."""

    axes: Mapping[str, tuple[int | float | str, ...]]  # by field of Choice
    default: Choice

    def __post_init__(self) -> None:
        for axis in fields(Choice):
            values = self.axes[axis.name]
            if getattr(self.default, axis.name) not in values:
                raise ValueError(f"the default {axis.name} is none of {values}")

    def coarse(self) -> Iterator[Choice]:
        """The ends of each axis, and the default; of memory, which seldom matters, the default; of
        speculation the first two.
        """
        some = []
        for name, values in self.axes.items():
            default = self._default(name)
            kept = {values[0], values[-1], default}
            if name == "memory":
                kept = {default}
            elif name == "speculation":
                kept = {*values[:2], default}
            some.append([value for value in values if value in kept])
        for values in product(*some):
            yield self._choice(values)

    def all(self) -> Iterator[Choice]:
        for values in product(*self.axes.values()):
            yield self._choice(values)

    def _choice(self, values: Sequence[int | float | str]) -> Choice:
        return Choice(**dict(zip(self.axes, values, strict=True)))  # type: ignore[arg-type]

    def _default(self, name: str) -> int | float | str:
        value: int | float | str = getattr(self.default, name)
        return value

    def step(self, choice: Choice, name: str, by: int) -> Choice | None:
        """The next value of one axis; None past its end."""
        values = self.axes[name]
        at = values.index(getattr(choice, name)) + by
        if not 0 <= at < len(values):
            return None
        return replace(choice, **{name: values[at]})  # type: ignore[arg-type]

    def distance(self, choice: Choice) -> int:
        """Steps from the default."""
        return sum(
            abs(values.index(getattr(choice, name)) - values.index(self._default(name)))
            for name, values in self.axes.items()
        )


def describe(choice: Choice) -> str:
    """For a line of progress."""
    parts = [
        f"{choice.max_num_seqs} seqs",
        f"{choice.max_num_batched_tokens} tokens",
        f"{100 * choice.memory:g} % kv {choice.kv_cache_dtype}",
    ]
    if choice.quantization != "none":
        parts.append(choice.quantization)
    if choice.speculation != "off":
        parts.append(f"drafts {choice.speculation}")
    return ", ".join(parts)


def space(
    subject: Subject,
    device: Device,
    given: Mapping[str, object],
    *,
    memory: float,
    tokens: int,
    lossless: bool = False,
    acceptance: float | None = None,
) -> Space:
    """All settings that this model can be served with there. ``given``: those of `EngineConfig`
    that are not to be searched; ``memory`` and ``tokens``: the defaults of that device; speculation
    is searched where an ``acceptance`` is given, the method of ``given`` or n-grams.
    """
    measured = device.measured
    seqs = _powers(4, 256 if measured else 1024)
    budgets = _powers(64, 4096 if measured else 16384)
    axes: dict[str, tuple[int | float | str, ...]] = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budgets,
        "memory": (0.5, 0.75, memory) if device.gpu else (0.25, 0.5, 0.9),
        # GPUs' engines have fp8 and no integers there.
        "kv_cache_dtype": ("auto", "fp8") if device.gpu else ("auto", "int8", "int4"),
        "quantization": quantizations(subject, device.has_fp8),
        "speculation": ("off",),
    }
    if acceptance is not None:
        axes["speculation"] = ("off", AS_IT_PAYS, "1", "2", "4", "8")
    if lossless:
        axes |= {"kv_cache_dtype": ("auto",), "quantization": ("none",)}
    default: dict[str, int | float | str] = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": tokens,
        "memory": memory,
        "kv_cache_dtype": "auto",
        "quantization": "none",
        "speculation": "off",
    }
    renamed = {"memory_utilization": "memory"}
    for name, value in given.items():
        axis = renamed.get(name, name)
        if axis not in axes:
            continue
        assert isinstance(value, int | float | str)
        if axis == "quantization" and value not in quantizations(subject, fp8=True):
            raise ValueError(
                f"--quantization {value} is for float weights, and these are quantized already"
            )
        axes[axis], default[axis] = (value,), value
    if given.get("kv_cache_memory_bytes") is not None:
        axes["memory"] = (default["memory"],)  # which does not count then
    # What is given for one of the two bounds what the other's default may be.
    if "max_num_seqs" in given and "max_num_batched_tokens" not in given:
        least = int(default["max_num_seqs"])
        axes["max_num_batched_tokens"] = tuple(b for b in budgets if b >= least) or (least,)
        default["max_num_batched_tokens"] = max(tokens, int(axes["max_num_batched_tokens"][0]))
    if "max_num_batched_tokens" in given and "max_num_seqs" not in given:
        most = int(default["max_num_batched_tokens"])
        axes["max_num_seqs"] = tuple(s for s in seqs if s <= most) or (most,)
        default["max_num_seqs"] = min(256, int(axes["max_num_seqs"][-1]))
    return Space(axes, Choice(**default))  # type: ignore[arg-type]


def _powers(low: int, high: int) -> tuple[int, ...]:
    return tuple(1 << bit for bit in range(low.bit_length() - 1, high.bit_length()))


def quantizations(subject: Subject, fp8: bool) -> tuple[str, ...]:
    """What ``--quantization`` takes for it: a file of rounded numbers is served as it is."""
    stored = subject.stored
    matrices = subject.matrices()
    if stored is not None and any(stored[role].format not in FLOATS for role in matrices):
        return ("none",)
    return ("none", *(PLANNED if fp8 else ()), *QUANTIZATIONS)
