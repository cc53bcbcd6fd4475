"""The machine's limits: measured in every part, kept, and read back or measured anew."""

from __future__ import annotations

import json
import logging
import math
import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from octavo import _native
from octavo.executor.cost import Arithmetic
from octavo.machine import limits as module
from octavo.machine.limits import Limits, Rate, Read, highest, store
from octavo.machine.others import Taken


def rates_of(*values: float) -> tuple[Rate, ...]:
    return tuple(Rate(1 << i, value, 1.1 * value, "made up") for i, value in enumerate(values))


def made_up(**changes: Any) -> Limits:
    """A machine of four cores that is this one by name."""
    values: dict[str, Any] = {
        "cpu": module.cpu_model(),
        "cores": module.usable_cpus()[0],
        "kernels": module.kernel_build(),
        "date": "2026-01-01T00:00:00+00:00",
        "quick": False,
        "int8": rates_of(4e11, 8e11, 16e11),
        "bf16": rates_of(2e11, 4e11, 8e11),
        "fp32": rates_of(1e11, 2e11, 4e11),
        "read": tuple(
            Read(level, size, Rate(threads, rate * threads, rate * threads, "made up"))
            for threads in (1, 2, 4)
            for level, size, rate in (
                ("L2", threads << 19, 1e11),
                ("L3", 16 << 20, 5e10),
                ("memory", 256 << 20, 1e10),
            )
        ),
        "barrier": rates_of(1e-9, 2e-7, 4e-7),
    }
    return Limits(**values | changes)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    monkeypatch.setattr(module, "misfit", lambda _: None)
    return tmp_path


def test_a_quick_measurement_has_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the caches were small, so that it is over soon on a busy machine as well.
    monkeypatch.setattr(module, "cache_sizes", lambda: {2: (1 << 18, 1), 3: (1 << 20, 1)})
    monkeypatch.setattr(module, "_LEAST_MEMORY_READ", 8 << 20)
    seen: list[str] = []
    measured = Limits.measure(2, quick=True, progress=seen.append)
    assert measured.quick
    assert measured.threads == 2
    assert len(measured.int8) == len(measured.fp32) == len(measured.barrier) == 1
    assert (measured.read[0].level, measured.read[-1].level) == ("L2", "memory")
    reads = (read.rate for read in measured.read)
    for rate in (*measured.int8, *measured.bf16, *measured.fp32, *reads):
        assert rate.threads == 2
        assert 1e6 < rate.median <= rate.best < 1e18
    assert 0 < measured.barrier[0].best <= measured.barrier[0].median
    assert any("memory" in message for message in seen)
    assert Limits.from_dict(json.loads(json.dumps(measured.as_dict()))) == measured


def test_the_loops_are_this_machines() -> None:
    kinds = {kind for kind, _ in _native.peak_loops()}
    assert {"int8", "fp32"} <= kinds <= {"int8", "bf16", "fp32"}
    pool = _native.ThreadPool(1)
    with pytest.raises(ValueError, match="no loop"):
        _native.measure_peak(pool, len(_native.peak_loops()), 1e-3, 1)
    with pytest.raises(ValueError, match="seconds"):
        _native.measure_peak(pool, 0, 0.0, 1)
    buffer = _native.ReadBuffer(pool, 1 << 16)
    with pytest.raises(ValueError, match="cannot read"):
        buffer.measure(pool, 0, 0, 1 << 17, 1e-3, 1)
    with pytest.raises(ValueError, match="cannot read"):
        buffer.measure(pool, 0, 0, 16, 1e-3, 1)
    assert len(buffer.measure(pool, 0, 0, 1 << 16, 1e-4, 3)) == 3


def test_limits_are_kept_and_found_again(home: Path) -> None:
    assert Limits.load() is None
    path = made_up().save()
    assert path.is_relative_to(home)
    assert Limits.load() == made_up()
    assert list(path.parent.iterdir()) == [path], "nothing else is left"
    changed = replace(made_up(), kernels="another build")
    changed.save()
    assert Limits.load() is None


def test_limits_that_cannot_be_stored_are_still_measured(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "limits").write_text("in the way")
    monkeypatch.setattr(Limits, "measure", classmethod(lambda cls, **_: made_up()))
    assert Limits.stored() == made_up()
    assert "cannot be stored" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "null",
        "[" * 100_000,
        '{"cpu": 3}',
        "\ud800".encode("utf-8", "surrogatepass"),
    ],
)
def test_a_spoilt_file_is_measured_again_with_a_warning(
    home: Path,
    text: str | bytes,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = made_up().save()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setattr(Limits, "measure", classmethod(lambda cls, **_: made_up()))
    with caplog.at_level(logging.WARNING):
        assert Limits.stored() == made_up()
    assert "unreadable" in caplog.text
    assert str(path) in caplog.text
    assert Limits.load() == made_up()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data["int8"].clear(),
        lambda data: data["int8"][0].update(median=0),
        lambda data: data["fp32"][0].update(extra=1),
        lambda data: data["fp32"][0].update(median=math.inf),
        lambda data: data["barrier"][0].update(best=math.nan),
        lambda data: data["read"].clear(),
        lambda data: data["read"].reverse(),
        lambda data: data["read"][0].update(bytes=-1),
        lambda data: data["read"][0].update(rate=3),
        lambda data: data.pop("barrier"),
        lambda data: data.update(fp32="fast"),
        lambda data: data.update(unknown=1),
    ],
)
def test_what_is_not_limits_is_refused(spoil: Any) -> None:
    data = json.loads(json.dumps(made_up().as_dict()))
    spoil(data)
    with pytest.raises(ValueError, match=r"rate|limits|read"):
        Limits.from_dict(data)


def test_reading_them() -> None:
    machine = made_up()
    assert machine.threads == 4
    assert machine.ops_per_second("int8") == 16e11
    assert machine.ops_per_second("int8", 2) == 8e11
    assert machine.ops_per_second("int8", 3) == 12e11
    assert machine.bytes_per_second() == 4e10
    assert machine.bytes_per_second(1) == 1e10
    assert machine.bytes_per_second(3) == 3e10
    assert machine.barrier_seconds(2) == 2e-7
    without = replace(machine, bf16=())
    assert without.ops_per_second("bf16") == without.ops_per_second("fp32")


def test_the_larger_the_slower() -> None:
    machine = made_up()
    for size, rate in ((1, 4e11), (2 << 20, 4e11), (16 << 20, 2e11), (256 << 20, 4e10)):
        assert machine.bytes_per_second(4, size) == pytest.approx(rate)
    passes = [size / machine.bytes_per_second(4, size) for size in (16 << 20, 136 << 20, 256 << 20)]
    assert passes[1] == pytest.approx((passes[0] + passes[2]) / 2), "half way"
    sizes = [1 << power for power in range(40)]
    rates = [machine.bytes_per_second(2, size) for size in sizes]
    assert rates == sorted(rates, reverse=True)
    assert machine.bytes_per_second(4, 1 << 40) == machine.bytes_per_second(4)


def test_as_a_cost_models_rates() -> None:
    rates = made_up().rates(2, 256 << 20)
    assert rates.bytes_per_second == 2e10
    peaks = {kind: rates.peak(kind) for kind in Arithmetic}
    assert peaks == {"int8": 8e11, "fp8": 4e11, "bf16": 4e11, "fp32": 2e11}
    slow = replace(made_up(), int8=rates_of(1e11, 2e11, 3e11))
    both = highest([made_up(), slow], 2, 256 << 20)
    assert both == rates
    assert made_up().summary(2, 256 << 20)["bytes_per_second"] == 2e10


def test_cache_sizes(tmp_path: Path) -> None:
    for index, (level, kind, size, mask) in enumerate(
        [
            (1, "Data", "32K", "01"),
            (2, "Unified", "512K", "03"),
            (3, "Unified", "96M", "ff,00000000"),
        ]
    ):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        for name, value in (
            ("level", level), ("type", kind), ("size", size), ("shared_cpu_map", mask)
        ):  # fmt: skip
            (folder / name).write_text(f"{value}\n")
    assert module.cache_sizes(tmp_path) == {2: (512 << 10, 2), 3: (96 << 20, 8)}
    assert module.cache_sizes(tmp_path / "nowhere").keys() == {2, 3}


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64, 1024])
def test_working_sets_are_apart(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cpus", lambda: (threads, ""))
    monkeypatch.setattr(module, "available_memory", lambda: 1 << 44)
    for l3 in ((8 << 20, 4), (32 << 20, 8), (2 << 20, 2)):
        levels, sizes = zip(*module._working_sets(threads, {2: (1 << 20, 1), 3: l3}), strict=True)
        assert levels[0] == "L2"
        assert sizes[0] == threads << 19
        assert levels[-1] == "memory"
        assert sizes[-1] >= max(256 << 20, 8 * l3[0])
        assert all(b >= 1.5 * a for a, b in pairwise(sizes))
    monkeypatch.setattr(module, "available_memory", lambda: 1 << 28)
    assert module._working_sets(1, {2: (1 << 20, 1), 3: (32 << 20, 1)})[-1][1] <= 1 << 26


class Quiet:
    """A machine that nobody else uses, or somebody does."""

    share = 0.0

    def taken(self) -> Taken:
        return Taken(2 * self.share, 0.0, 2)


@pytest.mark.parametrize(
    ("days", "speed", "share", "why"),
    [
        (1, 1.0, 0.0, None),
        (1, 0.8, 0.0, None),
        (1, 1.9, 0.5, "1.90 times as fast"),
        (1, 0.5, 0.0, "0.50 times as fast"),
        (1, 0.5, 0.5, None),  # it is slower for what others take
        (40, 1.0, 0.0, "they are of 2026-"),
        (-40, 1.0, 0.0, "they are of 2026-"),
    ],
)
def test_limits_that_no_longer_fit_are_measured_again_which_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    days: int,
    speed: float,
    share: float,
    why: str | None,
) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    now = datetime(2026, 6, 1, tzinfo=UTC)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls.fromisoformat(now.isoformat())

    monkeypatch.setattr(module, "datetime", Clock)
    monkeypatch.setattr(Quiet, "share", share)
    monkeypatch.setattr(module, "Others", Quiet)
    monkeypatch.setattr(module, "_speed", lambda stored: speed * stored.best)
    kept = made_up(date=(now - timedelta(days=days)).isoformat())
    kept.save()
    new = made_up(date=now.isoformat(), quick=True)
    monkeypatch.setattr(Limits, "measure", classmethod(lambda cls, **_: new))
    said: list[str] = []
    assert Limits.stored(said.append) == (kept if why is None else new)
    assert (why or "") in "".join(said)
    assert bool(said) is (why is not None)


def test_limits_measured_beside_others_say_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Limits, "measure", classmethod(lambda cls, **_: made_up()))
    monkeypatch.setattr(Quiet, "share", 0.4)
    monkeypatch.setattr(module, "Others", Quiet)
    Limits.stored()
    assert "may be too low: other processes took 0.8 of 2 CPUs" in caplog.text


def test_the_first_use_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What, how long about and where it goes, on a line that stays; and once."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    monkeypatch.setattr(module, "misfit", lambda _: None)
    monkeypatch.setattr(Limits, "measure", classmethod(lambda cls, **_: made_up()))
    said: list[str] = []
    Limits.stored(said.append)
    (line,) = said
    assert re.fullmatch(r"measuring what this machine can do, once, .* seconds; kept in .*\n", line)
    assert str(tmp_path) in line
    Limits.stored(said.append)
    assert said == [line]


def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, text: str) -> int:
        self.touch()
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        store(tmp_path / "limits" / "a.json", {})
    assert list((tmp_path / "limits").iterdir()) == []
