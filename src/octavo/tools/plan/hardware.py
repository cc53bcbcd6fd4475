"""What models run on: this machine as measured, GPUs as published, or figures given by hand.

Of GPUs two things are kept apart: the roof, which is what the vendor publishes, and what
predictions of speed assume: shares of it, and time for each step and launch (tools/plan/gpu.py). No
kernel runs at a published peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import isfinite

from octavo.engine.config import SettingsError
from octavo.executor.cost import Arithmetic, Rates
from octavo.kv_cache.layout import KvDtype
from octavo.machine.limits import Limits
from octavo.machine.memory import available_memory
from octavo.tools.plan.gpu import FITTED, LARGE_ERROR, RUNTIME_BYTES, TYPICAL_ERROR, Shares

LEAST_FIGURE, MOST_FIGURE = 1e-3, 1e9  # of a device: GB/s, Gop/s, GiB
LEAST_SHARE = 1e-6
UNITS = ("int4", "int8", "fp8", "fp16", "bf16", "fp32")  # whose peaks figures may give
EXAMPLE = "memory=48,int8=940,bf16=470,fp32=235,capacity=64"  # GB/s, Gop/s, GiB
# What a unit that is not given runs on: 16 bits of either kind are one, and 8 bits are widened to
# them.
_INSTEAD = {
    "bf16": ("fp16", "fp32", "fp8", "int8", "int4"),
    "fp16": ("bf16",),
    "fp32": ("bf16",),
    "fp8": ("bf16",),
    "int8": ("bf16",),
}

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
    shares: Shares | None = None  # what predictions assume; None: all of the roof
    # Weights of few bits are widened to 16 bits and a runtime takes memory of its own. Else it is a
    # CPU that computes as this engine does: quantized weights are multiplied in int8.
    gpu: bool = False
    half: Arithmetic = Arithmetic.FP32  # what multiplies fp16: mostly what multiplies bf16
    taken: str = ""  # which units run at the peak of another, because their own is not given
    int4_ops_per_second: float | None = None  # shown only: no scheme multiplies in 4 bits

    def predicted(self, working_set: int, launches: int = 0) -> Rates:
        """The roof times the assumed shares, with the time of a step of so many operations."""
        roof, shares = self.rates(working_set), self.shares
        if shares is None:
            return roof
        half = roof.peak(Arithmetic.BF16)

        def narrow(unit: Arithmetic) -> float:
            peak = roof.peak(unit)  # where it is no higher, 16 bits are what runs
            return peak * (shares.narrow if peak > half else shares.compute)

        return replace(
            roof,
            bytes_per_second=roof.bytes_per_second * shares.bandwidth,
            ops_per_second=roof.ops_per_second * shares.compute,
            bf16_ops_per_second=half * shares.compute,
            int8_ops_per_second=narrow(Arithmetic.INT8),
            fp8_ops_per_second=narrow(Arithmetic.FP8),
            knee=shares.knee,
            step_overhead=shares.step_seconds + launches * shares.launch_seconds,
        )

    @property
    def has_fp8(self) -> bool:
        return self.gpu and self.rates(0).fp8_ops_per_second is not None

    def peaks(self, working_set: int = 0) -> Mapping[str, float]:
        """Operations a second by the numbers that are multiplied."""
        roof = self.rates(working_set)
        found = {
            "fp32": roof.peak(Arithmetic.FP32),
            "fp16": roof.peak(self.half),
            "bf16": roof.peak(Arithmetic.BF16),
            "int8": roof.peak(Arithmetic.INT8),
        }
        if roof.fp8_ops_per_second is not None:
            found["fp8"] = roof.fp8_ops_per_second
        if self.int4_ops_per_second is not None:
            found["int4"] = self.int4_ops_per_second
        return found

    def assuming(self, compute: float | None = None, bandwidth: float | None = None) -> Device:
        """With other shares; None: as they are. Raises `ValueError` outside."""
        for flag, share in (("--compute-share", compute), ("--bandwidth-share", bandwidth)):
            if share is not None and not LEAST_SHARE <= share <= 1.0:  # nan neither
                raise ValueError(f"{flag} is {share:g}, outside {LEAST_SHARE:g} to 1")
        if compute is None and bandwidth is None:
            return self
        shares = self.shares or _WHOLE
        if compute is not None:
            shares = shares._replace(compute=compute, narrow=compute)
        if bandwidth is not None:
            shares = shares._replace(bandwidth=bandwidth)
        return replace(self, shares=shares)

    @property
    def assumption(self) -> str:
        """What predictions assume, in words; empty where they take all of the roof."""
        if self.shares is None or self.shares == _WHOLE:
            return ""
        shares = self.shares
        text = f"predictions assume {100 * shares.compute:.3g} % of the peak operations"
        if shares.narrow != shares.compute:
            text += f" ({100 * shares.narrow:.3g} % in 8 bits)"
        text += f" and {100 * shares.bandwidth:.3g} % of the bandwidth"
        if shares.step_seconds or shares.launch_seconds:
            step, launch = 1e3 * shares.step_seconds, 1e6 * shares.launch_seconds
            text += f", {step:.2g} ms a step and {launch:.2g} µs an operation"
        if shares == FITTED:
            text += (
                f": fitted to published runs, half of which are within {100 * TYPICAL_ERROR:.0f} % "
                f"and nine tenths within {100 * LARGE_ERROR:.0f} % (docs/planning.md)"
            )
        return text

    @property
    def standing(self) -> str:
        """Whose figures these are, for output."""
        if self.measured:
            return "measured"
        if self.source:
            return f"published, not measured ({self.source})"
        kind = "a GPU's" if self.gpu else "a CPU's"
        return f"given as {kind}, not measured" + (f"; {self.taken}" if self.taken else "")

    def usable_bytes(self, utilization: float) -> int | None:
        """What weights, activations and cache may take. Of a GPU the share of all its memory that
        vLLM's ``gpu_memory_utilization`` is, without what the runtime holds; else all that is free.
        """
        if self.memory_bytes is None or not self.gpu:
            return self.memory_bytes
        return int(self.memory_bytes * utilization) - RUNTIME_BYTES

    def attention(self, dtype: KvDtype, quantized: Arithmetic | None = None) -> Arithmetic:
        """What multiplies keys and values. As this engine's kernels do: codes are multiplied as
        they are where quantized weights are; GPUs widen them to 16 bits. Raises `SettingsError` for
        what only GPUs have.
        """
        if not self.gpu:
            try:
                dtype.check_served()
            except ValueError as error:
                raise SettingsError(str(error)) from None
        if dtype not in (KvDtype.INT8, KvDtype.INT4):
            return Arithmetic.BF16
        return quantized or (Arithmetic.BF16 if self.gpu else Arithmetic.INT8)


_WHOLE = Shares(1.0, 1.0, 1.0, float("inf"), 0.0, 0.0)


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


def is_gpu(text: str) -> bool:
    """Whether a device of this name is a GPU. Raises `ValueError` as `check`."""
    return text != "machine" and _named(text).gpu


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
    units = {"memory": "GB/s", "capacity": "GiB"} | dict.fromkeys(UNITS, "Gop/s")
    figures: dict[str, float] = {}
    kind = ""
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key == "kind" and not kind and value in ("cpu", "gpu"):
            kind = value
            continue
        if key == "kind":
            raise ValueError(f"--device: {item} is neither kind=cpu nor kind=gpu, given once")
        try:
            number = float(value)
        except ValueError:
            equals = ""
        if not equals or key not in units:
            raise ValueError(
                f"device {text!r} is neither machine nor figures such as {EXAMPLE} "
                f"(GB/s; Gop/s of {', '.join(UNITS)}; GiB of capacity; kind=gpu)"
            )
        if key in figures:
            raise ValueError(f"--device: {key} is given twice")
        if not LEAST_FIGURE <= number <= MOST_FIGURE or not isfinite(number):
            raise ValueError(
                f"--device: {item} is not from {LEAST_FIGURE:g} to {MOST_FIGURE:g} {units[key]}"
            )
        figures[key] = number
    if "memory" not in figures or not any(unit in figures for unit in UNITS):
        raise ValueError(
            f"device {text!r}: memory and at least one of {', '.join(UNITS)} are needed"
        )
    peaks, source = dict(figures), {unit: unit for unit in figures}  # and whose figure each is
    for unit, others in _INSTEAD.items():
        if unit not in figures:
            other = next(name for name in others if name in peaks)
            peaks[unit], source[unit] = peaks[other], source[other]
    # CPUs as this engine knows them have peaks in int8, bf16 and fp32.
    gpu = kind == "gpu" or (not kind and any(unit in figures for unit in ("int4", "fp8", "fp16")))
    rates = Rates(
        1e9 * figures["memory"],
        1e9 * peaks["fp32"],
        int8_ops_per_second=1e9 * peaks["int8"],
        bf16_ops_per_second=1e9 * peaks["bf16"],
        fp8_ops_per_second=1e9 * figures["fp8"] if "fp8" in figures else None,
    )
    capacity = int(figures["capacity"] * (1 << 30)) if "capacity" in figures else None
    return Device(
        text,
        lambda _: rates,
        capacity,
        shares=FITTED if gpu else None,
        gpu=gpu,
        half=Arithmetic.BF16,
        taken=", ".join(
            f"{unit} as {own}"
            for unit, own in source.items()
            if unit != own and (gpu or unit != "fp8")
        ),
        int4_ops_per_second=1e9 * figures["int4"] if "int4" in figures else None,
    )


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
        fp8_ops_per_second=None if fp8 is None else 1e12 * fp8,
    )
    return Device(
        name,
        lambda _: rates,
        mib << 20,
        source=source,
        shares=FITTED,
        gpu=True,
        half=Arithmetic.BF16,
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
    "h20": _published(
        "H20 SXM 96 GB", "as resellers publish them: NVIDIA has no public data sheet of it",
        mib=97871, gb_per_second=4000, bf16=148, int8=296, fp32=44, fp8=296,
    ),
    "b200": _published(
        "B200 SXM 180 GB", "NVIDIA HGX B200 data sheet, half of its figures with sparsity",
        mib=183359, gb_per_second=7700, bf16=2250, int8=4500, fp32=75, fp8=4500,
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
