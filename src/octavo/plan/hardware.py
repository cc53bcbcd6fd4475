"""What models run on: this machine as measured, GPUs as published, or figures given by hand.

Of GPUs two things are kept apart: the roof, which is what the vendor publishes, and the shares of
it that predictions of speed assume. No kernel runs at a published peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import isfinite

from octavo.execute.cost import Arithmetic, Rates
from octavo.execute.limits import Limits
from octavo.execute.memory import available_memory

LEAST_FIGURE, MOST_FIGURE = 1e-3, 1e9  # of a device: GB/s, Gop/s, GiB
LEAST_SHARE = 1e-6
COMPUTE_SHARE, BANDWIDTH_SHARE = 0.6, 0.8  # of what is published, assumed where nobody measured
EXAMPLE = "memory=48,int8=940,bf16=470,fp32=235,capacity=64"  # GB/s, Gop/s, GiB

Progress = Callable[[], AbstractContextManager[Callable[[str], None]]]


@dataclass(frozen=True, slots=True)
class Device:
    """What a machine does in a second, and how much it holds.

    ``rates`` is the roof, of a working set in bytes, which caches may hold a part of; `predicted`
    is what predictions of speed take. ``memory_bytes`` is what a process finds free on it (of a
    GPU: what its driver shows, before any process); None: not known.
    """

    name: str
    rates: Callable[[int], Rates]
    memory_bytes: int | None = None
    measured: bool = False  # else published, or given
    source: str = ""  # of the figures
    compute_share: float = 1.0  # of the peaks, that predictions assume
    bandwidth_share: float = 1.0
    half: Arithmetic = Arithmetic.FP32  # what multiplies fp16: on GPUs what multiplies bf16
    fp8_ops_per_second: float | None = None  # None: no such unit

    def predicted(self, working_set: int) -> Rates:
        """The roof times the assumed shares."""
        roof = self.rates(working_set)
        share = self.compute_share
        return replace(
            roof,
            bytes_per_second=roof.bytes_per_second * self.bandwidth_share,
            ops_per_second=roof.ops_per_second * share,
            int8_ops_per_second=roof.peak(Arithmetic.INT8) * share,
            bf16_ops_per_second=roof.peak(Arithmetic.BF16) * share,
        )

    def peaks(self, working_set: int = 0) -> Mapping[str, float]:
        """Operations a second by the numbers that are multiplied."""
        roof = self.rates(working_set)
        found = {
            "fp32": roof.peak(Arithmetic.FP32),
            "fp16": roof.peak(self.half),
            "bf16": roof.peak(Arithmetic.BF16),
            "int8": roof.peak(Arithmetic.INT8),
        }
        return (
            found if self.fp8_ops_per_second is None else found | {"fp8": self.fp8_ops_per_second}
        )

    def assuming(self, compute: float | None = None, bandwidth: float | None = None) -> Device:
        """With other shares; None: as they are. Raises `ValueError` outside."""
        for flag, share in (("--compute-share", compute), ("--bandwidth-share", bandwidth)):
            if share is not None and not LEAST_SHARE <= share <= 1.0:  # nan neither
                raise ValueError(f"{flag} is {share:g}, outside {LEAST_SHARE:g} to 1")
        return replace(
            self,
            compute_share=self.compute_share if compute is None else compute,
            bandwidth_share=self.bandwidth_share if bandwidth is None else bandwidth,
        )

    @property
    def assumption(self) -> str:
        """The shares that predictions assume, in words; empty where they take all of the roof."""
        if self.compute_share == self.bandwidth_share == 1.0:
            return ""
        return (
            f"predictions assume {100 * self.compute_share:g} % of the peak operations and "
            f"{100 * self.bandwidth_share:g} % of the bandwidth"
        )

    @property
    def standing(self) -> str:
        """Whose figures these are, for output."""
        if self.measured:
            return "measured"
        return f"published, not measured ({self.source})" if self.source else "given, not measured"


def device(text: str, progress: Progress) -> Device:
    """The device of a name. Raises `ValueError` for what is neither "machine", nor known, nor
    figures. ``progress`` opens a line for what takes long (measuring this machine).
    """
    if text == "machine":
        with progress() as tell:
            limits = Limits.stored(tell)
        name = f"this machine ({limits.cpu}, {limits.threads} threads)"
        return Device(
            name,
            lambda size: limits.rates(working_set=size),
            available_memory(),
            measured=True,
            source="octavo bench machine",
        )
    return _named(text)


def check(text: str) -> None:
    """Raises `ValueError` for what `device` does not know; measures nothing."""
    if text != "machine":
        _named(text)


def _named(text: str) -> Device:
    return _figures(text) if "=" in text else published(text)


def published(text: str) -> Device:
    """A GPU by its name: case, spaces, hyphens and "nvidia" do not matter. Raises `ValueError`."""
    if (key := _plain(text)) not in _BY_NAME:
        raise ValueError(
            f"device {text!r} is not known; known are machine, {', '.join(PUBLISHED)}, or "
            f"figures such as {EXAMPLE} (GB/s, Gop/s, and GiB of capacity)"
        )
    return _BY_NAME[key]


def _figures(text: str) -> Device:
    units = {"memory": "GB/s", "capacity": "GiB"} | dict.fromkeys(("int8", "bf16", "fp32"), "Gop/s")
    figures: dict[str, float] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        try:
            figures[key] = float(value)
        except ValueError:
            equals = ""
        if not equals or key not in units:
            raise ValueError(
                f"device {text!r} is neither machine nor figures such as {EXAMPLE} "
                "(GB/s, Gop/s, and GiB of capacity)"
            )
        if not LEAST_FIGURE <= figures[key] <= MOST_FIGURE or not isfinite(figures[key]):
            raise ValueError(
                f"--device: {item} is not from {LEAST_FIGURE:g} to {MOST_FIGURE:g} {units[key]}"
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
    capacity = int(figures["capacity"] * (1 << 30)) if "capacity" in figures else None
    return Device(text, lambda _: rates, capacity)


def _published(
    name: str,
    source: str,
    *,
    mib: int,
    gb_per_second: float,
    bf16: float,
    int8: float,
    fp32: float,
    fp8: float | None = None,
) -> Device:
    """Figures of a GPU's data sheet: dense tera-operations a second, without sparsity, products of
    half precision accumulated in fp32. ``mib``: what the driver shows as total. Vendors' gigabytes
    are of either kind, and a part is taken by error correction and by firmware.
    """
    rates = Rates(
        1e9 * gb_per_second,
        1e12 * fp32,
        int8_ops_per_second=1e12 * int8,
        bf16_ops_per_second=1e12 * bf16,
    )
    return Device(
        name,
        lambda _: rates,
        mib << 20,
        source=source,
        compute_share=COMPUTE_SHARE,
        bandwidth_share=BANDWIDTH_SHARE,
        half=Arithmetic.BF16,
        fp8_ops_per_second=None if fp8 is None else 1e12 * fp8,
    )


PUBLISHED = {
    "rtx-3090": _published(
        "RTX 3090 24 GB", "NVIDIA Ampere GA102 whitepaper, appendix A",
        mib=24576, gb_per_second=936, bf16=71, int8=284, fp32=35.6,
    ),
    "rtx-4090": _published(
        "RTX 4090 24 GB", "NVIDIA Ada GPU architecture whitepaper, appendix A",
        mib=24564, gb_per_second=1008, bf16=165.2, int8=660.6, fp32=82.6, fp8=330.3,
    ),
    "rtx-5090": _published(
        "RTX 5090 32 GB", "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A",
        mib=32607, gb_per_second=1792, bf16=209.5, int8=838, fp32=104.8, fp8=419,
    ),
    "t4": _published(  # Turing's tensor cores have fp16 and no bf16: the figure is fp16's
        "T4 16 GB", "NVIDIA T4 data sheet",
        mib=15360, gb_per_second=320, bf16=65, int8=130, fp32=8.1,
    ),
    "l4": _published(
        "L4 24 GB", "NVIDIA L4 data sheet, half of its figures with sparsity",
        mib=23034, gb_per_second=300, bf16=121, int8=242, fp32=30.3, fp8=242,
    ),
    "l40s": _published(
        "L40S 48 GB", "NVIDIA L40S data sheet",
        mib=46068, gb_per_second=864, bf16=362, int8=733, fp32=91.6, fp8=733,
    ),
    "a10": _published(
        "A10 24 GB", "NVIDIA A10 data sheet",
        mib=23028, gb_per_second=600, bf16=125, int8=250, fp32=31.2,
    ),
    "a100-40gb": _published(
        "A100 SXM 40 GB", "NVIDIA A100 data sheet",
        mib=40960, gb_per_second=1555, bf16=312, int8=624, fp32=19.5,
    ),
    "a100-80gb": _published(
        "A100 SXM 80 GB", "NVIDIA A100 data sheet",
        mib=81920, gb_per_second=2039, bf16=312, int8=624, fp32=19.5,
    ),
    "h100": _published(
        "H100 SXM 80 GB", "NVIDIA H100 data sheet, half of its figures with sparsity",
        mib=81559, gb_per_second=3350, bf16=989, int8=1979, fp32=67, fp8=1979,
    ),
    "h200": _published(
        "H200 SXM 141 GB", "NVIDIA H200 data sheet, half of its figures with sparsity",
        mib=143771, gb_per_second=4800, bf16=989, int8=1979, fp32=67, fp8=1979,
    ),
    "b200": _published(
        "B200 SXM 180 GB", "NVIDIA DGX B200 data sheet, an eighth, half of it with sparsity",
        mib=183359, gb_per_second=8000, bf16=2250, int8=4500, fp32=75, fp8=4500,
    ),
    "mi300x": _published(
        "MI300X 192 GB", "AMD Instinct MI300X data sheet",
        mib=196592, gb_per_second=5300, bf16=1307.4, int8=2614.9, fp32=163.4, fp8=2614.9,
    ),
}  # fmt: skip


def _plain(name: str) -> str:
    kept = "".join(letter for letter in name.lower() if letter.isalnum())
    return kept.removeprefix("nvidia").removeprefix("amd").removesuffix("gb").removesuffix("sxm")


_BY_NAME = {_plain(name): device for name, device in PUBLISHED.items()}
_BY_NAME |= {_plain(device.name): device for device in PUBLISHED.values()}
_BY_NAME["a100"] = PUBLISHED["a100-80gb"]
