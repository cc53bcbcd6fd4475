"""Threads from CPU quotas: both versions of control groups, nested, absent and unlimited."""

import os
from pathlib import Path

import pytest

from octavo.machine import cpu


def system(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "400000 100000"}, 4.0),
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "300000 100000",
            },
            3.0,
        ),
        # A container that sees the host's path, but its own group at the root of the mount.
        ("0::/docker/123\n", {"sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        (
            "3:cpuset:/x\n1:cpu,cpuacct:/x\n0::/\n",
            {
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        (
            "1:cpu:/\n",
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_quota(
    tmp_path: Path,
    cgroup: str,
    files: dict[str, str],
    quota: float | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert cpu.cpu_quota(system(tmp_path, cgroup, files)) == quota
    assert not caplog.messages


@pytest.mark.parametrize(
    "said", ["nonsense", "", "100000", "100000 0", "-5 100000", "0 100000", "1e5 100000", "1 2 3"]
)
def test_a_broken_quota_is_named_once(
    tmp_path: Path, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = system(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": said + "\n"})
    for _ in range(3):
        assert cpu.cpu_quota(root) is None
    (line,) = caplog.messages
    assert f"{root}/sys/fs/cgroup/cpu.max is not a CPU quota" in line


def test_a_broken_quota_hides_no_other(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/cpu.max": "200000 100000", "sys/fs/cgroup/a/b/cpu.max": "?"}
    assert cpu.cpu_quota(system(tmp_path, "0::/a/b\n", files)) == 2.0


def test_no_proc(tmp_path: Path) -> None:
    assert cpu.cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("allowed", "quota", "threads", "source"),
    [
        (8, None, 8, "8 CPUs in the affinity mask"),
        (8, 1.5, 2, "CPU quota of 1.5"),
        (8, 0.3, 1, "CPU quota of 0.3"),
        (2, 4.0, 2, "2 CPUs in the affinity mask"),
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch, allowed: int, quota: float | None, threads: int, source: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    monkeypatch.setattr(cpu, "cpu_quota", lambda: quota)
    assert cpu.usable_cpus() == (threads, source)
