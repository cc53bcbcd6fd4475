"""What this machine can do at best: arithmetic, reading memory, and going from job to job.

Every share of a limit that Octavo prints refers to these. Loops that do nothing else
(kernels/machine_limits.h) find them, on the engine's own threads: several ways are tried for each
limit, and the best is kept. Bandwidth drifts with what neighbours on the machine do, so whoever
compares measures again in the same run: ``Limits.measure(quick=True)``, a second or two.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from msgspec import Meta, Struct

from octavo import _native
from octavo.executor.cost import Arithmetic, Rates
from octavo.loader.pull import cache_dir
from octavo.machine.cpu import usable_cpus
from octavo.machine.memory import as_size, available_memory
from octavo.machine.others import Others
from octavo.words import plural

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
Positive = Annotated[float, Meta(gt=0, le=1e300)]

ARITHMETICS = ("int8", "bf16", "fp32")

_OLD = 30  # days after which stored limits are measured again
_OTHER = 1.3  # times as fast, or as slow: more than neighbours on the machine explain

_LEAST_MEMORY_READ = 256 << 20  # bytes
_AHEAD = (1024, 2048, 4096, 8192)  # bytes to prefetch ahead
_CACHES = {2: (1 << 20, 1), 3: (16 << 20, 1)}  # where the system does not say


class Rate(Struct, frozen=True, forbid_unknown_fields=True):
    """One limit on a number of threads: the best way's median and maximum over repetitions.

    The median is the limit: what can be had all the time. Per second, except for barriers.
    """

    threads: Annotated[int, Meta(ge=1)]
    median: Positive
    best: Positive
    how: str  # the instruction, or how memory was read

    @classmethod
    def of(cls, threads: int, values: Sequence[float], how: str) -> Self:
        return cls(threads, statistics.median(values), max(values), how)


_Rates = Annotated[tuple[Rate, ...], Meta(min_length=1)]


class Read(Struct, frozen=True, forbid_unknown_fields=True):
    """How fast ``bytes`` bytes are read over and over, each thread reading its share."""

    level: str  # what holds them: "L2", "L3", or "memory", of which caches may hold a part
    bytes: Annotated[int, Meta(ge=1)]
    rate: Rate  # bytes a second


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """The machine's limits by number of threads, ascending, all threads last."""

    cpu: str
    cores: int  # that the process may use
    kernels: str  # which build of the native module measured
    date: str  # ISO 8601
    quick: bool
    int8: _Rates  # operations a second; a multiply-add is two
    bf16: tuple[Rate, ...]  # the same; empty where the CPU has no such instruction
    fp32: _Rates
    read: Annotated[tuple[Read, ...], Meta(min_length=1)]  # by threads, then by size, memory last
    barrier: _Rates  # seconds from one empty job of a run to the next; best: the least

    @classmethod
    def measure(
        cls,
        threads: int | None = None,
        *,
        quick: bool = False,
        pool: _native.ThreadPool | None = None,
        progress: Progress = lambda _: None,
    ) -> Self:
        """Measure on 1, 2, 4, … ``threads`` (None: as many as the engine would take).

        ``quick``: on ``threads`` only, and fewer ways of each tried; ``pool``: on its threads only.
        """
        most = pool.size if pool else threads or usable_cpus()[0]
        counts = [most]
        if not (quick or pool):  # 1, 2, 4, … and all
            counts = sorted({1 << power for power in range(most.bit_length())} | {most})
        pools = {count: pool or _native.ThreadPool(count) for count in counts}
        caches = cache_sizes()
        sizes = {count: _working_sets(count, caches) for count in counts}
        peaks: dict[str, list[Rate]] = {name: [] for name in ARITHMETICS}
        reads: list[Read] = []
        barriers: list[Rate] = []
        for count, each in pools.items():
            for name in ARITHMETICS:
                progress(f"{name} peak on {plural(count, 'thread')}")
                peaks[name] += _peak(each, name, quick)
            progress(f"thread pool of {plural(count, 'thread')}")
            seconds = _native.measure_barrier(each, 200, 20 if quick else 100)
            barriers.append(Rate(count, statistics.median(seconds), min(seconds), "empty jobs"))
        largest = max(size for levels in sizes.values() for _, size in levels)
        buffer = _native.ReadBuffer(pools[counts[-1]], largest)
        for count, each in pools.items():
            good: dict[str, list[_Way]] = {}  # of each level, when it has been read before
            for level, size in sizes[count]:
                progress(f"reading {as_size(size)} ({level}) on {plural(count, 'thread')}")
                ways = good.get(level) or _ways(quick)
                rate, good[level] = _read(each, buffer, size, ways, 3 if quick else 6)
                reads.append(Read(level, size, rate))
        cpu, cores, kernels = _identity()
        return cls(
            cpu,
            cores,
            kernels,
            datetime.now(UTC).isoformat(timespec="seconds"),
            quick,
            **{name: tuple(rates) for name, rates in peaks.items()},
            read=tuple(reads),
            barrier=tuple(barriers),
        )

    # Reading them

    @property
    def threads(self) -> int:
        """The most threads measured."""
        return self.fp32[-1].threads

    def ops_per_second(self, arithmetic: str, threads: int | None = None) -> float:
        """``arithmetic`` is "int8", "bf16" (fp32's where the CPU has none of its own) or "fp32"."""
        return _at(getattr(self, arithmetic) or self.fp32, threads)

    def bytes_per_second(self, threads: int | None = None, working_set: int | None = None) -> float:
        """Return the rate of reading ``working_set`` bytes over and over; None: more than any cache
        holds.

        What is somewhat larger than the caches is in part still found there. The time of a pass
        grows with what is read, so between measured sizes it is the time that is read off.
        """
        counts, rates = [], []
        for count, group in groupby(self.read, lambda read: read.rate.threads):
            points = list(group)
            sizes = [point.bytes for point in points]
            size = sizes[-1] if working_set is None else min(max(working_set, sizes[0]), sizes[-1])
            passes = [point.bytes / point.rate.median for point in points]
            counts.append(count)
            rates.append(size / np.interp(size, sizes, passes))
        return float(np.interp(counts[-1] if threads is None else threads, counts, rates))

    def barrier_seconds(self, threads: int | None = None) -> float:
        return _at(self.barrier, threads)

    def rates(self, threads: int | None = None, working_set: int | None = None) -> Rates:
        """Return the rates for a cost model; arguments as above."""
        return Rates(
            self.bytes_per_second(threads, working_set),
            self.ops_per_second("fp32", threads),
            int8_ops_per_second=self.ops_per_second("int8", threads),
            bf16_ops_per_second=self.ops_per_second("bf16", threads),
        )

    def summary(self, threads: int | None = None, working_set: int | None = None) -> dict[str, Any]:
        """Return the limits that apply, by name, for a JSON row."""
        return {
            "date": self.date,
            "quick": self.quick,
            "threads": self.threads if threads is None else threads,
            "int8_ops_per_second": self.ops_per_second("int8", threads),
            "bf16_ops_per_second": self.ops_per_second("bf16", threads),
            "fp32_ops_per_second": self.ops_per_second("fp32", threads),
            "bytes_per_second": self.bytes_per_second(threads, working_set),
            "memory_bytes_per_second": self.bytes_per_second(threads),
            "barrier_seconds": self.barrier_seconds(threads),
        }

    # Keeping them

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Read what `as_dict` wrote. Raise `ValueError` for anything else."""
        try:
            limits = msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a machine's limits: {error}") from error
        sizes = [(item.rate.threads, item.bytes) for item in limits.read]
        if sizes != sorted(sizes):
            raise ValueError("what was read is out of order")
        return limits

    def save(self) -> Path:
        """Store as this machine's limits, and return the file."""
        path = _path()
        store(path, self.as_dict())
        return path

    @classmethod
    def load(cls) -> Self | None:
        """Read what is stored for this machine and build; None, with a warning if unreadable."""
        path = _path()
        try:
            limits = cls.from_dict(json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the machine's stored limits are unreadable: %s: %s", path, error)
            return None
        return limits if (limits.cpu, limits.cores, limits.kernels) == _identity() else None

    @classmethod
    def stored(cls, progress: Progress = lambda _: None) -> Self:
        """Return what is stored, if it still fits; else measure now, and store it. ``progress`` is
        told before.
        """
        limits = cls.load()
        why = None if limits is None else misfit(limits)
        if limits is None or why is not None:
            again = "once" if why is None else f"again, as {why}"
            progress(
                f"measuring what this machine can do, {again}, in some ten seconds; kept in "
                f"{_path()}\n"
            )
            others = Others()
            limits = cls.measure(progress=progress)
            if taken := others.taken().text:
                logger.warning(
                    "the machine's limits may be too low: %s; octavo bench machine measures again",
                    taken,
                )
            try:
                limits.save()
            except OSError as error:
                logger.warning("the machine's limits cannot be stored: %s", error)
        return limits


def misfit(limits: Limits) -> str | None:
    """Return why stored limits no longer fit this machine; None if they do.

    They are of the same CPU, cores and build, but may be old, or the machine's speed has changed.
    """
    age = datetime.now(UTC) - datetime.fromisoformat(limits.date)
    if not -timedelta(days=1) < age < timedelta(days=_OLD):
        return f"they are of {limits.date}"
    others = Others()
    stored = limits.fp32[-1]
    change = _speed(stored) / stored.best
    slowed = change < 1 and others.taken().text  # by what others take
    if slowed or 1 / _OTHER < change < _OTHER:
        return None
    return f"arithmetic is {change:.2f} times as fast as when they were measured"


def _speed(stored: Rate) -> float:
    """Return what the loop of an fp32 peak does now, at best, in a tenth of a second."""
    loops = _loops("fp32")
    index = next((index for index, how in loops if how == stored.how), loops[0][0])
    return max(_native.measure_peak(_native.ThreadPool(stored.threads), index, 4e-3, 25))


def _at(rates: tuple[Rate, ...], threads: int | None) -> float:
    """Return the rate on ``threads`` (None: the most measured); between measured counts, in
    proportion.
    """
    if threads is None:
        return rates[-1].median
    return float(np.interp(threads, [r.threads for r in rates], [r.median for r in rates]))


# --- measuring -----------------------------------------------------------------------------------


def _loops(arithmetic: str) -> list[tuple[int, str]]:
    """Return the number and the name of each loop of a kind, best first."""
    loops = enumerate(_native.peak_loops())
    return [(index, how) for index, (kind, how) in loops if kind == arithmetic]


def _peak(pool: _native.ThreadPool, arithmetic: str, quick: bool) -> list[Rate]:
    """Return the best loop of a kind; none where the CPU has none."""
    rates = [
        Rate.of(pool.size, _native.measure_peak(pool, index, 4e-3, 12 if quick else 30), how)
        for index, how in _loops(arithmetic)[: 1 if quick else None]
    ]
    return [max(rates, key=lambda rate: rate.median)] if rates else []


# A way to read: a loop, how many bytes it prefetches ahead, and a description
_Way = tuple[int, int, str]


def _ways(quick: bool) -> list[_Way]:
    """Return every way worth trying."""
    loops = _native.read_loops()
    widest = list(dict.fromkeys(loads for loads, _, _ in loops))[:2]
    ways = []
    for index, (loads, streams, prefetches) in enumerate(loops):
        if loads not in widest or (quick and streams > 2):
            continue
        for ahead in ((4096,) if quick else _AHEAD) if prefetches else (0,):
            fetch = f", prefetch {ahead} B ahead" if prefetches else ""
            ways.append((index, ahead, f"{loads}, {plural(streams, 'stream')}{fetch}"))
    return ways


def _read(
    pool: _native.ThreadPool,
    buffer: _native.ReadBuffer,
    size: int,
    ways: list[_Way],
    rounds: int,
) -> tuple[Rate, list[_Way]]:
    """Return the best way's bytes a second, and the ways that came near it.

    All are tried shortly, and the best three again for ``rounds`` of five repetitions.
    """

    def run(way: _Way, repetitions: int) -> list[float]:
        loop, ahead, _ = way
        return buffer.measure(pool, loop, ahead, size, 1e-3, repetitions)

    tried = {way: statistics.median(run(way, 3)) for way in ways}
    best = sorted(tried, key=lambda way: -tried[way])
    values: dict[_Way, list[float]] = {way: [] for way in best[:3]}
    # In turn, so that a neighbour's busy moment does not decide which is best.
    for _ in range(rounds):
        for way in values:
            values[way] += run(way, 5)
    rates = [Rate.of(pool.size, found, description) for (*_, description), found in values.items()]
    return max(rates, key=lambda rate: rate.median), best[:6]


def _working_sets(threads: int, caches: dict[int, tuple[int, int]]) -> list[tuple[str, int]]:
    """Return what to read, by rising size in bytes: half of the threads' L2, half of their L3, and
    two, four and eight times all the L3 that they reach.
    """
    (l2, _), (l3, sharing) = caches[2], caches[3]
    in_l2 = l2 // 2 * threads
    in_l3 = l3 // 2 * max(1, threads // sharing) * min(threads, sharing) // sharing
    reached = l3 * min(threads, max(1, usable_cpus()[0] // sharing))
    most = available_memory() // 4
    memory = [min(max(reached, _LEAST_MEMORY_READ // 8) * times, most) for times in (2, 4, 8)]
    sizes = [("L2", in_l2), ("L3", in_l3), *(("memory", size) for size in memory)]
    page = 1 << 12
    kept: list[tuple[str, int]] = []
    for level, size in sizes:  # those that are well apart
        if not kept or size >= 1.5 * kept[-1][1]:
            kept.append((level, size // page * page))
    return kept


def cache_sizes(root: Path = Path("/")) -> dict[int, tuple[int, int]]:
    """Read from sysfs the bytes of the caches of level 2 and 3, and how many CPUs share one."""
    sizes = dict(_CACHES)
    for folder in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind = (int((folder / "level").read_text()), (folder / "type").read_text())
            text = (folder / "size").read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:])
            size = int(text[:-1]) * unit if unit else int(text)
            mask = (folder / "shared_cpu_map").read_text().replace(",", "")
            if level in sizes and kind.strip() == "Unified" and size > 0:
                sizes[level] = size, max(1, int(mask, 16).bit_count())
        except (OSError, ValueError):
            continue
    return sizes


# --- which machine -------------------------------------------------------------------------------


@cache
def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def kernel_build() -> str:
    """Return a name of this build of the native module: another may find other limits."""
    return hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()[:16]


def _identity() -> tuple[str, int, str]:
    return cpu_model(), usable_cpus()[0], kernel_build()


def _path() -> Path:
    return stored_path("limits", *_identity())


def store(path: Path, facts: dict[str, Any]) -> None:
    """Write facts as JSON, whole or not at all; several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(f".{os.getpid()}")
    try:
        staged.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n")
        staged.replace(path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def stored_path(kind: str, *identity: object) -> Path:
    """Return the file, beside the model cache, for facts of a kind about ``identity``."""
    digest = hashlib.sha256("\n".join(map(str, identity)).encode()).hexdigest()[:16]
    return cache_dir() / kind / f"{digest}.json"


def highest(limits: Sequence[Limits], threads: int, working_set: int) -> Rates:
    """Return the highest of each rate of several measurements."""
    rates = [each.rates(threads, working_set) for each in limits]
    return Rates(
        max(rate.bytes_per_second for rate in rates),
        max(rate.ops_per_second for rate in rates),
        int8_ops_per_second=max(rate.peak(Arithmetic.INT8) for rate in rates),
        bf16_ops_per_second=max(rate.peak(Arithmetic.BF16) for rate in rates),
    )
