"""The tiers of a loaded engine's prefix cache: how large they are, and what their blocks are named
by.
"""

from __future__ import annotations

import errno
import logging
import shutil
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import octavo
from octavo.engine.pace import Pace
from octavo.engine.recompute import Recomputing
from octavo.executor.base import Executor
from octavo.kv_cache.disk import HEADER_BYTES, Disk
from octavo.kv_cache.folders import check_folder
from octavo.kv_cache.host_memory import HostMemory
from octavo.kv_cache.tiers import Tiers
from octavo.kv_cache.worker import ThreadWorker
from octavo.loader.base import Tokenizer
from octavo.loader.tokenizer import BpeTokenizer
from octavo.machine.memory import as_size
from octavo.models.program import Program

logger = logging.getLogger(__name__)

STAGING_BYTES = 256 << 20  # that a disk is read into, where no host memory is asked for
_MOST_DISK = 16 << 30  # bytes, where no budget is given; and at most half of what there is room for
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
_NUMBERS = (
    "executor",
    "kv_cache",
    "loader",
    "machine",
    "models",
)  # rooms that decide what a block holds


class Refused(ValueError):
    """A setting of the tiers that this machine cannot honour."""


def check_disk(folder: str) -> None:
    """That the folder is there, or can be made, and can be written to. Raises `Refused`."""
    if not folder:
        raise Refused("kv_offload_dir is empty")
    try:
        check_folder(Path(folder))
    except OSError as error:
        if error.errno not in _FULL:
            raise _refused(folder, error) from None


def _refused(folder: str, error: OSError) -> Refused:
    reason = error.strerror or str(error)
    return Refused(f"kv_offload_dir {folder}: may not be written: {reason}")


def make_tiers(
    executor: Executor,
    pace: Pace,
    program: Program,
    tokenizer: Tokenizer,
    *,
    quantization: str | None,
    host_bytes: int,
    folder: str | None,
    disk_bytes: int | None,
) -> Tiers:
    """``executor`` has the digest of its weights if there is a ``folder``. ``pace`` learns from its
    steps. Raises `Refused`.
    """
    layout = executor.layout
    slots = host_bytes // layout.block_bytes
    if slots < 1:
        raise Refused(
            f"kv_offload_memory {host_bytes} is less than a block of {layout.block_bytes} bytes"
        )
    memory = HostMemory(slots, layout.block_bytes)
    disk = reader = writer = None
    name = b"of this process only"
    if folder is not None:
        name = engine_digest(executor, program, tokenizer, quantization)
        check_disk(folder)
        if disk_bytes is not None and disk_bytes < layout.block_bytes:
            raise Refused(
                f"kv_offload_disk {disk_bytes} is less than a block of {layout.block_bytes} bytes"
            )
        disk = _disk(folder, name, layout.block_bytes, disk_bytes)
    if disk is not None:
        reader = ThreadWorker("octavo-kv-read")
        writer = ThreadWorker("octavo-kv-write", patient=True)
    return Tiers(
        name,
        memory,
        disk,
        reader=reader,
        writer=writer,
        tokens_per_block=layout.block_size / len(layout.groups),
        computing=Recomputing(pace, executor.max_tokens),
    )


def _disk(folder: str, name: bytes, block_bytes: int, budget: int | None) -> Disk | None:
    """The tier in ``folder``; None if the disk has no room for its folders. Raises `Refused`."""
    try:
        disk = Disk(Path(folder), name, block_bytes, budget or 0)
    except OSError as error:
        if error.errno not in _FULL:
            raise _refused(folder, error) from None
        logger.warning("kv offload: %s: %s: nothing is kept there", folder, error.strerror)
        return None
    if budget is None:
        # What the folder holds makes room when it goes: at each start the budget is the same.
        free = shutil.disk_usage(folder).free
        disk.limit(min(_MOST_DISK, (free + disk.used) // 2))
        if disk.budget < HEADER_BYTES + block_bytes:
            logger.warning(
                "kv offload: %s is full (%s free): what it holds is read, and nothing is written "
                "(--kv-offload-disk says how much may be)",
                folder,
                as_size(free),
            )
    return disk


def engine_digest(
    executor: Executor, program: Program, tokenizer: Tokenizer, quantization: str | None
) -> bytes:
    """Of everything that decides what a block holds beside its tokens: weights as they were loaded,
    the computation, the cache's layout, kernels and the code around them, and the instruction set;
    and of what the tokens mean.
    """
    layout, able = executor.layout, executor.capabilities
    digest = sha256()
    for part in (
        executor.digest,
        canonical((program.config, program.ops, layout, able, quantization)).encode(),
        _tokenizer_digest(tokenizer),
        build_digest(),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def canonical(value: Any) -> str:
    """What `repr` says, with every field of a dataclass, and sets in order: that of strings is
    another in each process.
    """
    match value:
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(canonical, value)))}}}"
        case tuple() | list():
            return f"({', '.join(map(canonical, value))})"
    if is_dataclass(value):
        named = (f"{each.name}={canonical(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__name__}({', '.join(named)})"
    return repr(value)


def build_digest() -> bytes:
    """Of the compiled kernels and of the code that tells them what to do."""
    package = Path(octavo.__file__).parent
    files = [*package.glob("_native*")]
    for room in _NUMBERS:
        files += (package / room).rglob("*.py")
    digest = sha256(octavo.__version__.encode())
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode())
        digest.update(content)
    return digest.digest()


def _tokenizer_digest(tokenizer: Tokenizer) -> bytes:
    digest = sha256(repr((tokenizer.kind, sorted(tokenizer.eos_token_ids))).encode())
    if isinstance(tokenizer, BpeTokenizer):
        digest.update(tokenizer.backend_json().encode())
        digest.update(repr(tokenizer.framing).encode())
    else:
        for token_id in range(tokenizer.vocab_size):
            digest.update(tokenizer.spelling(token_id).encode() + b"\0")
    return digest.digest()
