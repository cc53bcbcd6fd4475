"""The connector on disk in a folder where others add and remove things and set clocks: nothing
waits, nothing is raised, links are not followed, and what is not a block stays.
"""

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kv_cache.test_disk import ENGINE, FILE, SIZE, block, content, files, name, opened, path
from octavo.kv_cache.connectors import disk_index
from octavo.kv_cache.connectors.disk import Disk

TIB = 1 << 40


def filled(folder: Path, count: int, **more: Any) -> Disk:
    """With blocks from 0 on, each used a second after the one before."""
    disk = opened(folder, **more)
    for number in range(count):
        disk.write(name(number), block(number))
        os.utime(path(disk, name(number)), (number, number))
    return disk


def sparse(file: Path) -> None:
    file.parent.mkdir(exist_ok=True, parents=True)
    file.touch()
    os.truncate(file, TIB)


def good(disk: Disk, *numbers: int) -> bool:
    return all((content(disk, name(each)) == block(each)).all() for each in numbers)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_huge_file_with_holes_takes_nobodys_place(tmp_path: Path, reopened: bool) -> None:
    disk = filled(tmp_path, 8, budget=16 * FILE)
    hole = path(disk, name(50))
    sparse(hole)
    if reopened:
        disk = opened(tmp_path, budget=16 * FILE)
    for number in range(8, 13):
        disk.write(name(number), block(number))
    assert good(disk, *range(13))
    assert not disk.lookup(name(50))
    assert not hole.exists()
    assert (disk.counters.corrupted_blocks, disk.used) == (1, 13 * FILE)
    disk.write(name(50), block(50))
    assert good(disk, 50)


def test_nor_does_one_of_another_engine(tmp_path: Path) -> None:
    disk = filled(tmp_path, 8, budget=16 * FILE)
    other = opened(tmp_path, budget=16 * FILE, engine=b"other")
    hole = path(other, name(1))
    sparse(hole)
    disk = opened(tmp_path, budget=16 * FILE)
    assert disk.used == 8 * FILE
    for number in range(8, 13):
        disk.write(name(number), block(number))
    assert good(disk, *range(13))
    assert hole.exists()  # how long its blocks are is not known here
    assert content(other, name(1)) is None


def test_a_file_system_that_says_late_what_another_engines_blocks_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = filled(tmp_path, 6, budget=32 * FILE, engine=b"other")
    real = os.stat

    def lagging(file: str, **more: Any) -> os.stat_result:
        found = real(file, **more)
        return os.stat_result([*found], {"st_blocks": 1, "st_mtime_ns": found.st_mtime_ns})

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lagging)
        one = opened(tmp_path, budget=32 * FILE)
        assert one.used == 6 * 512
        one.write(name(100), block(100))
        assert one.used == 6 * 512 + FILE
    order = [*one._index._files]
    one.write(name(101), block(101))
    assert one.used == 8 * FILE
    assert [*one._index._files] == [*order, one._path(name(101))]
    path(other, name(0)).unlink()
    one.write(name(102), block(102))
    assert one.used == 8 * FILE
    assert not one._index._growing
    one._index.check()


def pipe(file: Path, outside: Path) -> None:
    os.mkfifo(file)


def sock(file: Path, outside: Path) -> None:
    os.mknod(file, 0o600 | stat.S_IFSOCK)  # to bind one its path would have to be short


def device(file: Path, outside: Path) -> None:
    try:
        os.mknod(file, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # reads as zeros without end
    except PermissionError:
        pytest.skip("only root makes devices")


def folder(file: Path, outside: Path) -> None:
    file.mkdir()


def link(file: Path, outside: Path) -> None:
    file.symlink_to(outside / "file")


def link_to_nothing(file: Path, outside: Path) -> None:
    file.symlink_to(outside / "nothing")


def link_to_a_folder(file: Path, outside: Path) -> None:
    file.symlink_to(outside)


STRANGE: list[Callable[[Path, Path], None]] = [
    pipe, sock, device, folder, link, link_to_nothing, link_to_a_folder,
]  # fmt: skip


@pytest.mark.parametrize("put", STRANGE)
@pytest.mark.parametrize("when", ["before", "running", "written over"])
def test_what_is_no_file(tmp_path: Path, put: Callable[[Path, Path], None], when: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"mine")
    disk = filled(tmp_path / "disk", 4)
    file = path(disk, name(1))
    file.unlink()
    put(file, outside)
    if when == "before":
        disk = opened(tmp_path / "disk")
        assert not disk.lookup(name(1))
    if when == "written over":
        disk._keys.discard(name(1))
        disk.write(name(1), block(1))
    elif when == "running":
        assert content(disk, name(1)) is None
        assert disk.counters.corrupted_blocks == 1
    disk.write(name(1), block(1))  # its place is good for a block
    if not disk.lookup(name(1)):  # once a folder has been removed from it
        disk.write(name(1), block(1))
    assert good(disk, 0, 1, 2, 3)
    assert sorted(each.name for each in outside.iterdir()) == ["file"]
    assert (outside / "file").read_bytes() == b"mine"


def test_a_folder_with_something_in_it_stays_and_stops_nothing_else(tmp_path: Path) -> None:
    disk = filled(tmp_path, 2)
    file = path(disk, name(5))
    file.mkdir(parents=True)
    (file / "notes").write_bytes(b"mine")
    disk.write(name(5), block(5))
    disk.write(name(6), block(6))
    assert not disk.lookup(name(5))
    assert good(disk, 0, 1, 6)
    assert (file / "notes").read_bytes() == b"mine"
    assert disk.counters.failed_saves == 1


@pytest.mark.parametrize("put", [pipe, sock, device, link, link_to_nothing, link_to_a_folder])
@pytest.mark.parametrize("left", [False, True])
def test_what_is_no_folder_in_a_shards_place_stops_no_other(
    tmp_path: Path,
    put: Callable[[Path, Path], None],
    left: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"mine")
    disk = filled(tmp_path / "disk", 1)
    shard = path(disk, name(5)).parent
    put(shard, outside)
    if left:
        disk = opened(tmp_path / "disk")
    for _ in range(3):
        for number in range(40):
            disk.write(name(number), block(number))
    assert not disk.lookup(name(5))
    assert good(disk, *(number for number in range(40) if number != 5))
    assert (disk.counters.failed_saves, disk.counters.corrupted_blocks) == (3, 0)
    [warning] = caplog.records
    assert f"{path(disk, name(5))}: cannot be written: Not a directory" in warning.message
    assert [each.name for each in outside.iterdir()] == ["file"]
    assert (outside / "file").read_bytes() == b"mine"
    assert os.path.lexists(shard)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOENT])
def test_nor_does_a_shard_that_may_not_be_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk = filled(tmp_path, 1)
    real = os.open

    def refused(file: str, *more: Any, **most: Any) -> int:
        if file == path(disk, name(5)).parent.name:
            raise OSError(number, os.strerror(number))
        return real(file, *more, **most)

    monkeypatch.setattr(os, "open", refused)
    for each in range(10):
        disk.write(name(each), block(each))
    assert disk.counters.failed_saves == 1
    assert good(disk, *(each for each in range(10) if each != 5))


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("engine", [ENGINE, b"other"])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_link_in_a_folders_place_is_not_followed(
    tmp_path: Path, level: int, engine: bytes, reopened: bool
) -> None:
    """Not to read, write, touch, count, or make room."""
    budget = 8 * FILE
    moved = filled(tmp_path / "disk", 6, budget=budget, engine=engine)
    disk = opened(tmp_path / "disk", budget=budget)
    place = path(moved, name(0)).parents[level]
    outside = tmp_path / "outside"
    place.rename(outside)
    place.symlink_to(outside)

    def seen() -> dict[Path, tuple[bytes, int]]:
        inside = [each for each in outside.rglob("*") if each.is_file()]
        return {each: (each.read_bytes(), each.stat().st_mtime_ns) for each in inside}

    before = seen()
    if reopened:
        if level == 2 or (level == 1 and engine == ENGINE):
            with pytest.raises(OSError, match="a link, which is not followed"):
                opened(tmp_path / "disk", budget=budget)
            return
        disk = opened(tmp_path / "disk", budget=budget)
        assert disk.used == (6 - len(before)) * FILE
    assert content(disk, name(0)) is None
    disk.write(name(0), block(0))
    disk._index.use(moved._path(name(0)))
    for number in range(6, 20):
        disk.write(name(number), block(number))
    assert seen() == before
    if engine == ENGINE:
        assert not disk.lookup(name(0))
    if level == 0 or (level == 1 and engine != ENGINE):
        assert good(disk, *range(15, 20))  # all others are written
    disk._index.check()


def test_a_link_in_the_place_of_all_is_refused(tmp_path: Path) -> None:
    disk = filled(tmp_path / "disk", 1)
    own = path(disk, name(0)).parents[1]
    for place in (own, own.parent):
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match="a link, which is not followed"):
            opened(tmp_path / "disk")
        place.unlink()
        (tmp_path / "elsewhere").rename(place)
    (tmp_path / "link").symlink_to(tmp_path / "disk")  # what the operator names may be one
    assert good(opened(tmp_path / "link"), 0)


def test_folders_that_are_not_of_the_connector_are_left_alone(tmp_path: Path) -> None:
    disk = filled(tmp_path, 1, budget=4 * FILE)
    file = path(disk, name(0))
    strangers = [
        file.parents[2] / "backup" / file.parent.name / file.name,
        file.parents[1] / "old" / file.name,
        file.parent / f"{'0' * 64}-0",
    ]
    for stranger in strangers:
        stranger.parent.mkdir(parents=True, exist_ok=True)
        stranger.write_bytes(bytes(100 * FILE))
        os.utime(stranger, (0, 0))
    disk = opened(tmp_path, budget=4 * FILE)
    assert disk.used == FILE
    for number in range(1, 9):
        disk.write(name(number), block(number))
    assert good(disk, 8)
    assert all(stranger.exists() for stranger in strangers)


def test_a_file_that_may_not_be_read_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = filled(tmp_path, 2)
    real = os.open

    def refused(file: str, flags: int, *more: Any, **most: Any) -> int:
        if file == path(disk, name(1)).name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(file, flags, *more, **most)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        assert content(disk, name(1)) is None
    assert (disk.counters.corrupted_blocks, disk.counters.failed_loads) == (0, 1)
    assert path(disk, name(1)).exists()
    disk.write(name(1), block(1))
    assert good(disk, 0, 1)


@pytest.mark.parametrize("count", [3, 7])
def test_a_folder_that_becomes_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Nothing is lost and reading goes on, also where there is no room and none can be made."""
    clock = [0.0]
    disk = Disk(tmp_path, ENGINE, SIZE, 8 * FILE, now=lambda: clock[0])
    for number in range(count):
        disk.write(name(number), block(number))
    real = os.open

    def read_only(file: str, flags: int, *more: Any, **most: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(file, flags, *more, **most)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        for each in ("unlink", "rmdir", "mkdir", "rename", "utime"):
            patched.setattr(os, each, refused)
        for number in range(7, 20):
            clock[0] += 100.0
            disk.write(name(number), block(number))
        assert good(disk, *range(count))
    clock[0] += 100.0
    disk.write(name(20), block(20))
    assert good(disk, 20)
    assert disk.used <= 8 * FILE
    disk._index.check()


@pytest.mark.parametrize("level", range(4))
def test_a_folder_that_vanishes_and_a_file_in_its_place(tmp_path: Path, level: int) -> None:
    disk = filled(tmp_path / "disk", 4, budget=64 * FILE)
    gone = [tmp_path / "disk", *reversed(path(disk, name(2)).parents[:3])][level]
    shutil.rmtree(gone)
    gone.write_bytes(b"mine")
    assert content(disk, name(2)) is None
    disk.write(name(2), block(2))
    more = [each for each in range(10, 30) if path(disk, name(each)).parent != gone]
    for number in more:
        disk.write(name(number), block(number))
    assert gone.read_bytes() == b"mine"
    assert not disk.lookup(name(2))
    assert disk.counters.failed_saves == (1 if level == 3 else 1 + len(more))
    if level == 3:
        assert good(disk, *more)
    gone.unlink()
    disk.write(name(2), block(2))
    assert good(disk, 2)
    disk._index.check()


def test_the_smaller_of_two_budgets_holds_while_it_writes(tmp_path: Path) -> None:
    small, large = opened(tmp_path, budget=20 * FILE), opened(tmp_path, budget=400 * FILE)

    def serve(disk: Disk, first: int) -> None:
        for number in range(first, first + 150):
            disk.write(name(number), block(number))

    threads = [threading.Thread(target=serve, args=each) for each in ((small, 0), (large, 1000))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(200, 300):
        small.write(name(number), block(number))
    assert files(tmp_path) <= 20
    assert good(small, 299)
    for number in range(2000, 2100):
        large.write(name(number), block(number))
    assert good(large, *range(2000, 2100))
    for disk in (small, large):
        assert (
            not disk.counters.corrupted_blocks
            + disk.counters.failed_loads
            + disk.counters.failed_saves
        )
        disk._index.check()


@pytest.mark.parametrize("when", [-1e9, 0.0, 4e9])
def test_clocks_that_are_wrong(tmp_path: Path, when: float) -> None:
    """Files of long ago or of the future make room like others, and what is unfinished goes."""
    disk = filled(tmp_path, 8, budget=10 * FILE)
    for number in range(4):
        os.utime(path(disk, name(number)), (when, when))
    unfinished = path(disk, name(1)).with_name(f"{path(disk, name(1)).name}.0a.tmp")
    unfinished.write_bytes(b"x")
    os.utime(unfinished, (when, when))
    again = opened(tmp_path, budget=10 * FILE)
    assert not unfinished.exists()
    for each, first in ((disk, 100), (again, 200)):
        for number in range(first, first + 20):
            each.write(name(number), block(number))
            assert each.used <= 10 * FILE
        assert good(each, first + 19)
        assert files(tmp_path) <= 10


def test_a_clock_that_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [time.time_ns()]
    monkeypatch.setattr(disk_index.time, "time_ns", lambda: clock[0])
    one, other = opened(tmp_path, budget=20 * FILE), opened(tmp_path, budget=20 * FILE)
    for number in range(200):
        clock[0] -= 10**12
        (one if number % 2 else other).write(name(number), block(number))
        assert good(one if number % 2 else other, number)
        assert files(tmp_path) <= 20
