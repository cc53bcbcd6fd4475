"""The memory that is really available, from made-up machines."""

from pathlib import Path

import pytest

from octavo.machine.memory import as_size, available_memory

GIB = 1 << 30


def machine(root: Path, cgroup: str, files: dict[str, object], available: int = 20 * GIB) -> Path:
    contents = {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_without_a_limit_it_is_the_kernels_estimate(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/memory.current": 5}
    assert available_memory(machine(tmp_path, "0::/a", files)) == 20 * GIB
    assert available_memory() > 0


def test_the_tightest_cgroup_counts_and_file_pages_can_be_dropped(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/b/memory.max": 8 * GIB,
        "sys/fs/cgroup/a/b/memory.current": 3 * GIB,
        "sys/fs/cgroup/a/b/memory.stat": f"anon 5\ninactive_file {1 * GIB}",
        "sys/fs/cgroup/a/memory.max": 7 * GIB,
        "sys/fs/cgroup/a/memory.current": 3 * GIB,
    }
    assert available_memory(machine(tmp_path, "0::/a/b", files)) == 4 * GIB


def test_version_1_limits_and_a_container_that_hides_its_own_path(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 1 * GIB,
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0",
    }
    cgroup = "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/"
    assert available_memory(machine(tmp_path, cgroup, files)) == 1 * GIB


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": 1 * GIB,
    }
    assert available_memory(machine(tmp_path, "4:memory:/x", files)) == 20 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": 1 * GIB, "sys/fs/cgroup/memory.current": 2 * GIB}
    assert available_memory(machine(tmp_path, "0::/", files)) == 0


def test_sizes() -> None:
    sizes = (0, 1023, 1 << 10, 1000 << 20, int(92.7 * (1 << 20)), 3 << 30, 5 << 40, -(1 << 21))
    assert [as_size(size) for size in sizes] == [
        "0 B", "1023 B", "1 KiB", "1000 MiB", "92.7 MiB", "3 GiB", "5 TiB", "-2 MiB"
    ]  # fmt: skip


@pytest.mark.parametrize("said", ["lots", "", "1 2"])
def test_a_broken_limit_is_named_once(
    tmp_path: Path, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"sys/fs/cgroup/memory.max": said, "sys/fs/cgroup/memory.current": "5"}
    root = machine(tmp_path, "0::/", files)
    for _ in range(3):
        assert available_memory(root) == 20 * GIB
    (line,) = caplog.messages
    assert f"{root}/sys/fs/cgroup/memory.max is not a limit of memory ({said!r})" in line
