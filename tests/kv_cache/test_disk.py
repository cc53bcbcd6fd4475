"""The connector on disk: what is written comes back, and nothing else, whatever lies there."""

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.connecting import FaultyDisk
from octavo.kv_cache.block_hash import Key, after, root
from octavo.kv_cache.connectors import disk_index
from octavo.kv_cache.connectors.base import Bytes
from octavo.kv_cache.connectors.disk import HEADER_BYTES, Disk
from paths import TESTS
from patience import PATIENCE

SIZE = 4096
ENGINE = b"engine"
FILE = HEADER_BYTES + SIZE


def name(number: int, group: int = 0) -> Key:
    return after(root(ENGINE, b""), number.to_bytes(4, "little")), group


def block(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def opened(folder: Path, budget: int = 1 << 30, engine: bytes = ENGINE) -> Disk:
    return Disk(folder, engine, SIZE, budget)


def content(disk: Disk, key: Key) -> Bytes | None:
    into = np.zeros(SIZE, np.uint8)
    return into if disk.read(key, into) else None


def path(disk: Disk, key: Key) -> Path:
    return Path(disk._root, disk._path(key))


def test_written_read_and_found_again(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for number in range(20):
        disk.write(name(number, number % 3), block(number))
    again = opened(tmp_path)
    assert len(again) == 20
    assert again.used == disk.used == 20 * FILE
    for number in range(20):
        found = content(again, name(number, number % 3))
        assert found is not None
        assert (found == block(number)).all()
        assert content(again, name(number, 7)) is None
    assert not again.counters.corrupted_blocks


def cut(file: Path, rng: random.Random) -> None:
    with file.open("r+b") as out:
        out.truncate(rng.randrange(FILE))


def flipped(file: Path, rng: random.Random) -> None:
    whole = bytearray(file.read_bytes())
    whole[rng.randrange(FILE)] ^= 1 << rng.randrange(8)
    file.write_bytes(whole)


def zeroed(file: Path, rng: random.Random) -> None:
    whole = bytearray(file.read_bytes())
    first = rng.randrange(FILE - 600)
    whole[first : first + 600] = bytes(600)
    file.write_bytes(whole)


def longer(file: Path, rng: random.Random) -> None:
    with file.open("ab") as out:
        out.write(rng.randbytes(rng.randint(1, 100)))


def foreign(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.randbytes(FILE))


def empty(file: Path, rng: random.Random) -> None:
    file.write_bytes(b"")


def folder(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


def link(file: Path, rng: random.Random) -> None:
    target = file.with_name("elsewhere")
    file.rename(target)
    file.symlink_to(target)


def pipe(file: Path, rng: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def other_key(file: Path, rng: random.Random) -> None:
    """Another block of the same engine, under this one's name."""
    disk = opened(file.parents[3] / "other")
    disk.write(name(999), block(999))
    file.write_bytes(path(disk, name(999)).read_bytes())


def other_engine(file: Path, rng: random.Random) -> None:
    disk = opened(file.parents[3] / "other", engine=b"another")
    disk.write(name(1), block(999))
    file.write_bytes(path(disk, name(1)).read_bytes())


HARM: list[Callable[[Path, random.Random], None]] = [
    cut, flipped, zeroed, longer, foreign, empty, folder, link, pipe, other_key, other_engine,
]  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("reopened", [False, True])
def test_nothing_bad_is_served(
    tmp_path: Path,
    harm: Callable[[Path, random.Random], None],
    reopened: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = opened(tmp_path / "disk")
    for number in range(8):
        disk.write(name(number), block(number))
    for seed in (1, 2, 3):
        harm(path(disk, name(seed)), random.Random(seed))
    if reopened:
        disk = opened(tmp_path / "disk")
    for number in range(8):
        found = content(disk, name(number))
        if number in (1, 2, 3):
            assert found is None
            assert not disk.lookup(name(number))
        else:
            assert found is not None
            assert (found == block(number)).all()
    assert disk.counters.corrupted_blocks == 3
    assert len([r for r in caplog.records if "is dropped" in r.message]) == 1
    # And its place is good for a right one again.
    disk.write(name(2), block(2))
    assert content(disk, name(2)) is not None


def test_a_header_altered_anywhere_is_refused(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for place in range(HEADER_BYTES):
        disk.write(name(place), block(place))
        file = path(disk, name(place))
        whole = bytearray(file.read_bytes())
        whole[place] ^= 0xFF
        file.write_bytes(whole)
        assert content(disk, name(place)) is None
    assert disk.counters.corrupted_blocks == HEADER_BYTES


def test_what_has_vanished_is_a_miss(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    disk.write(name(1), block(1))
    path(disk, name(1)).unlink()
    assert disk.lookup(name(1))
    assert content(disk, name(1)) is None
    assert not disk.lookup(name(1))
    assert not disk.counters.corrupted_blocks


def test_a_folder_removed_while_it_is_used(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    disk.write(name(1), block(1))
    for file in sorted(tmp_path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    disk.write(name(2), block(2))
    assert content(disk, name(1)) is None
    assert content(disk, name(2)) is not None
    assert not disk.counters.failed_saves


def test_names_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    disk = opened(tmp_path, budget=4 * FILE)
    disk.write(name(1), block(1))
    shard = path(disk, name(1)).parent
    strangers = [
        shard / "notes.txt",
        shard / f"{'g' * 64}-0",
        shard / f"{name(1)[0].hex()}-00",
        shard / f"{name(1)[0].hex().upper()}-0",
        shard / f"{name(1)[0].hex()[:-2]}-0",
        tmp_path / "octavo-kv-1" / "readme",
        tmp_path / "else",
    ]
    for stranger in strangers:
        stranger.write_bytes(b"mine")
    again = opened(tmp_path, budget=4 * FILE)
    assert len(again) == 1
    for number in range(2, 9):
        again.write(name(number), block(number))
    assert all(stranger.read_bytes() == b"mine" for stranger in strangers)


def test_the_budget_is_kept_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    disk = opened(tmp_path, budget=10 * FILE)
    for number in range(9):
        disk.write(name(number), block(number))
        os.utime(path(disk, name(number)), (number, number))
    assert content(disk, name(0)) is not None  # used just now
    for number in range(9, 14):
        disk.write(name(number), block(number))
        assert disk.used <= 10 * FILE
        assert sum(f.stat().st_size for f in tmp_path.rglob("*-0")) <= 10 * FILE
    assert disk.lookup(name(0))
    assert not disk.lookup(name(1))
    assert content(disk, name(13)) is not None


def test_a_block_larger_than_the_budget_is_not_written(tmp_path: Path) -> None:
    disk = opened(tmp_path, budget=FILE - 1)
    disk.write(name(1), block(1))
    assert not disk.lookup(name(1))
    assert not [*tmp_path.rglob("*-0")]


def test_another_engine_shares_nothing_but_the_budget(tmp_path: Path) -> None:
    one = opened(tmp_path, budget=5 * FILE)
    for number in range(4):
        one.write(name(number), block(number))
        os.utime(path(one, name(number)), (number, number))
    other = opened(tmp_path, budget=5 * FILE, engine=b"other weights")
    assert len(other) == 0
    assert other.used == 4 * FILE
    assert content(other, name(1)) is None
    other.write(name(1), block(50))
    found = content(other, name(1))
    assert found is not None
    assert (found == block(50)).all()
    assert content(one, name(0)) is None  # the oldest of all made room
    found = content(one, name(3))
    assert found is not None
    assert (found == block(3)).all()
    assert not one.counters.corrupted_blocks


SERVE = """
import random, sys
sys.path.insert(0, sys.argv[3])
from kv_cache.test_disk import *
disk, rng = opened(Path(sys.argv[1]), budget=160 * FILE), random.Random(int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
wrong = 0
for _ in range(300):
    number = rng.randrange(300)
    if rng.random() < 0.6:
        disk.write(name(number), block(number))
    else:
        found = content(disk, name(number))
        wrong += found is not None and not (found == block(number)).all()
disk._index.check()
c = disk.counters
print(wrong, c.corrupted_blocks, c.failed_loads, c.failed_saves, c.saved_bytes > 0)
"""


def test_three_servers_in_one_folder(tmp_path: Path) -> None:
    """They write the same blocks, read them and evict each other's, at the same time, and what
    they all have written stays within the budget of one.
    """
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", SERVE, str(tmp_path), str(seed), str(TESTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    for server in servers:
        assert server.stdout.readline() == "ready\n"
    for server in servers:
        server.stdin.write("go\n")
        server.stdin.flush()
    most = 0
    while any(server.poll() is None for server in servers):
        most = max(most, files(tmp_path))
        time.sleep(0.005)
    most = max(most, files(tmp_path))  # in case this process had no turn before they ended
    assert 100 < most <= 160
    for server in servers:
        said, _ = server.communicate()
        assert said.split() == ["0", "0", "0", "0", "True"]


def files(folder: Path) -> int:
    return sum(len(os.listdir(shard)) for shard in folder.glob("*/*/*"))


def test_two_engines_of_one_process_write_the_same_block(tmp_path: Path) -> None:
    """As two servers in containers do, of which each has the same process id."""
    one, other = opened(tmp_path), opened(tmp_path)
    start = threading.Barrier(2, timeout=PATIENCE)

    def serve(disk: Disk) -> None:
        for number in range(100):
            start.wait()
            disk.write(name(number), block(number))

    threads = [threading.Thread(target=serve, args=(disk,)) for disk in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not one.counters.failed_saves + other.counters.failed_saves
    again = opened(tmp_path)
    assert len(again) == 100
    assert all(content(again, name(number)) is not None for number in range(100))
    assert files(tmp_path) == 100


def test_what_others_write_and_remove_is_seen_without_a_restart(tmp_path: Path) -> None:
    one, other = (opened(tmp_path, budget=64 * FILE) for _ in range(2))
    other.write(name(1), block(1))
    one.write(name(2), block(2))
    assert one.lookup(name(1))
    path(one, name(1)).unlink()
    one.write(name(3), block(3))
    assert not one.lookup(name(1))
    assert one.used == 2 * FILE


def test_room_is_made_without_listing_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one block the writer, which holds the interpreter's lock, looks at few files."""
    disk = opened(tmp_path, budget=1000 * FILE)
    for number in range(1000):
        disk.write(name(number), block(number))
    looked: list[str] = []
    real = os.stat

    def stat(file: str, **more: Any) -> os.stat_result:
        looked.append(file)
        return real(file, **more)

    monkeypatch.setattr(os, "stat", stat)
    for number in range(1000, 1020):
        before = len(looked)
        disk.write(name(number), block(number))
        assert disk.lookup(name(number))
        assert len(looked) - before <= disk_index._AT_ONCE
    assert len(looked) < 100


def test_a_smaller_budget_is_reached_in_parts(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for number in range(300):
        disk.write(name(number), block(number))
    smaller = opened(tmp_path, budget=100 * FILE)
    for number in range(300, 310):
        smaller.write(name(number), block(number))
    assert files(tmp_path) <= 100
    assert smaller.used == files(tmp_path) * FILE
    assert smaller.lookup(name(309))
    assert not smaller.lookup(name(0))


def test_what_another_server_has_used_stays(tmp_path: Path) -> None:
    one = opened(tmp_path, budget=20 * FILE)
    for number in range(18):
        one.write(name(number), block(number))
    other = opened(tmp_path, budget=20 * FILE)
    time.sleep(0.02)  # the clock of the file system ticks
    assert content(other, name(0)) is not None
    for number in range(18, 24):
        one.write(name(number), block(number))
    assert one.lookup(name(0))
    assert not one.lookup(name(1))


def test_a_full_disk_stops_writing_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    disk = Disk(tmp_path, ENGINE, SIZE, 1 << 30, now=lambda: clock[0])
    disk.write(name(1), block(1))
    real = os.writev
    attempts = []

    def full(file: int, parts: list[bytes]) -> int:
        attempts.append(file)
        if len(attempts) % 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, [parts[0], memoryview(parts[1])[:100]])  # only some of it fits

    monkeypatch.setattr(os, "writev", full)
    disk.write(name(2), block(2))
    disk.write(name(3), block(3))
    assert len(attempts) == 1
    clock[0] = 61
    disk.write(name(2), block(2))
    assert len(attempts) == 3  # the rest of what did not fit was tried
    assert disk.counters.failed_saves == 2
    assert "No space left on device; nothing is written for 60 seconds" in caplog.text
    assert not disk.lookup(name(2))
    assert content(disk, name(1)) is not None  # reading goes on
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == 1
    monkeypatch.undo()
    clock[0] = 122
    disk.write(name(2), block(2))
    assert content(disk, name(2)) is not None


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """Under a limit on the size of files, which the kernel keeps."""
    code = (
        "import resource, signal, sys; sys.path.insert(0, sys.argv[2]);"
        "from kv_cache.test_disk import *;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "disk = opened(Path(sys.argv[1])); disk.write(name(1), block(1));"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "disk.write(name(2), block(2));"
        "print(disk.counters.failed_saves, disk.lookup(name(2)), "
        "content(disk, name(1)) is not None)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(TESTS)], capture_output=True, text=True
    )
    assert ran.stdout.split() == ["1", "False", "True"], ran.stderr
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_an_error_while_reading_is_a_miss_and_costs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk = opened(tmp_path)
    disk.write(name(1), block(1))

    def broken(file: int, parts: list[bytes]) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "readv", broken)
        assert content(disk, name(1)) is None
    assert (disk.counters.corrupted_blocks, disk.counters.failed_loads) == (0, 1)
    assert disk.lookup(name(1)) == (number == errno.ENOMEM)  # a bad sector is written over
    assert content(opened(tmp_path), name(1)) is not None


def test_without_descriptors_nothing_is_read_and_nothing_lost(tmp_path: Path) -> None:
    code = (
        "import os, resource, sys; sys.path.insert(0, sys.argv[2]);"
        "from kv_cache.test_disk import *;"
        "disk = opened(Path(sys.argv[1])); disk.write(name(1), block(1));"
        "one, two = os.open('/', os.O_RDONLY), os.open('/', os.O_RDONLY);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (two + 1, two + 2));"
        "none = content(disk, name(1)) is None; os.close(one);"
        "none = none and content(disk, name(1)) is None; os.close(two);"
        "print(none, disk.counters.corrupted_blocks, disk.counters.failed_loads, "
        "content(disk, name(1)) is not None)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(TESTS)], capture_output=True, text=True
    )
    assert ran.stdout.split() == ["True", "0", "2", "True"], ran.stderr


def test_what_comes_in_pieces_is_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readv, writev = os.readv, os.writev

    def some(parts: list[memoryview]) -> list[memoryview]:
        first = next(part for part in parts if len(part))
        return [first[: 1 + len(first) // 2]]

    monkeypatch.setattr(os, "readv", lambda file, parts: readv(file, some(parts)))
    monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, some(parts)))
    disk = opened(tmp_path)
    disk.write(name(1), block(1))
    found = content(disk, name(1))
    assert found is not None
    assert (found == block(1)).all()
    assert not disk.counters.failed_saves


@pytest.mark.parametrize("seed", range(3))
def test_a_system_full_of_faults(tmp_path: Path, seed: int) -> None:
    """Nothing is raised, nothing wrong is read, and files and bytes add up."""
    rng = random.Random(seed)
    disk = FaultyDisk(SIZE, 40, time.monotonic)
    hits = 0
    for _ in range(1500):
        number = rng.randrange(60)
        if rng.random() < 0.5:
            disk.write(name(number), block(number))
        else:
            found = content(disk, name(number))
            hits += found is not None
            assert found is None or (found == block(number)).all()
        disk._index.check()
    assert hits > 100
    assert disk.counters.corrupted_blocks
    assert disk.counters.failed_loads
    assert disk.counters.failed_saves


def test_unfinished_files_are_nothing_and_go_when_abandoned(tmp_path: Path) -> None:
    disk = opened(tmp_path, budget=3 * FILE)
    disk.write(name(1), block(1))
    unfinished = path(disk, name(1)).with_name(f"{path(disk, name(1)).name}.123.tmp")
    unfinished.write_bytes(b"x" * 100)
    again = opened(tmp_path, budget=3 * FILE)
    assert len(again) == 1
    assert unfinished.exists()
    old = time.time() - 2 * disk_index._ABANDONED
    os.utime(unfinished, (old, old))
    opened(tmp_path)
    assert not unfinished.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        opened(tmp_path / "file" / "folder")


def test_others_may_not_read_what_users_asked(tmp_path: Path) -> None:
    disk = opened(tmp_path / "cache")
    disk.write(name(1), block(1))
    file = path(disk, name(1))
    assert file.stat().st_mode & 0o077 == 0
    for made in [*file.parents][:3]:
        assert made.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("level", range(5))
def test_nor_once_a_folder_has_been_made_again(tmp_path: Path, level: int) -> None:
    disk = opened(tmp_path / "users" / "cache")
    disk.write(name(1), block(1))
    file = path(disk, name(1))
    made = [*file.parents][:5]
    for again in (False, True):
        if again:
            shutil.rmtree(made[level])
            disk.write(name(2), block(2))
            disk._keys.discard(name(1))
            disk.write(name(1), block(1))
        for each in made:
            assert each.stat().st_mode & 0o077 == 0
    assert content(disk, name(1)) is not None
