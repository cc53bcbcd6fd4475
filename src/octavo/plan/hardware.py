"""What models run on: this machine as measured, GPUs as published, or figures given by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from octavo.bench.limits import Limits
from octavo.engine.memory import available_memory
from octavo.execute.cost import Rates

LEAST_FIGURE, MOST_FIGURE = 1e-3, 1e9  # of a device: GB/s, Gop/s

Progress = Callable[[], AbstractContextManager[Callable[[str], None]]]


@dataclass(frozen=True, slots=True)
class Device:
    """What a machine does in a second, and how much it holds.

    ``rates`` is of a working set in bytes, which caches may hold a part of; ``memory_bytes`` None:
    not known.
    """

    name: str
    rates: Callable[[int], Rates]
    memory_bytes: int | None = None
    measured: bool = False  # else published, or given


def device(text: str, progress: Progress) -> Device:
    """The device of a name. Raises `ValueError` for what is neither "machine", nor known, nor
    figures. ``progress`` opens a line for what takes long (measuring this machine).
    """
    if text == "machine":
        with progress() as tell:
            limits = Limits.stored(tell)
        name = f"this machine ({limits.cpu}, {limits.threads} threads)"
        return Device(
            name, lambda size: limits.rates(working_set=size), available_memory(), measured=True
        )
    if "=" not in text:
        if text.lower() not in PUBLISHED:
            raise ValueError(
                f"device {text!r} is not known; known are machine, {', '.join(PUBLISHED)}, or "
                "figures such as memory=48,int8=940,bf16=470,fp32=235 (GB/s and Gop/s)"
            )
        return PUBLISHED[text.lower()]
    return _figures(text)


def _figures(text: str) -> Device:
    figures: dict[str, float] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        try:
            figures[key] = float(value)
        except ValueError:
            equals = ""
        if not equals or key not in ("memory", "int8", "bf16", "fp32"):
            raise ValueError(
                f"device {text!r} is neither machine nor figures such as "
                "memory=48,int8=940,bf16=470,fp32=235 (GB/s and Gop/s)"
            )
        if not LEAST_FIGURE <= figures[key] <= MOST_FIGURE:  # nan neither
            raise ValueError(
                f"--device: {item} is not from {LEAST_FIGURE:g} to {MOST_FIGURE:g} "
                f"{'GB/s' if key == 'memory' else 'Gop/s'}"
            )
    given = [figures[key] for key in ("fp32", "bf16", "int8") if key in figures]
    if "memory" not in figures or not given:
        raise ValueError(f"device {text!r}: memory and at least one of int8, bf16, fp32 are needed")
    # A unit that is not given runs on the next wider one.
    fp32 = figures.get("fp32", given[0])
    bf16 = figures.get("bf16", fp32)
    rates = Rates(
        1e9 * figures["memory"],
        1e9 * fp32,
        int8_ops_per_second=1e9 * figures.get("int8", bf16),
        bf16_ops_per_second=1e9 * bf16,
    )
    return Device(text, lambda _: rates)


def _published(name: str, gib: int, gb_per_second: float, bf16: float, int8: float) -> Device:
    """Figures of a GPU's data sheet: dense tera-operations a second, without sparsity."""
    rates = Rates(
        1e9 * gb_per_second,
        1e12 * bf16,  # what is fp32 in a program runs beside the tensor cores' work
        int8_ops_per_second=1e12 * int8,
        bf16_ops_per_second=1e12 * bf16,
    )
    return Device(name, lambda _: rates, gib << 30)


PUBLISHED = {
    "h100": _published("H100 SXM 80 GB", 80, 3350, 989, 1979),
}
