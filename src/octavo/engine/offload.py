"""The KV connectors of a loaded engine: their sizes, and the digest that names their blocks."""

from __future__ import annotations

import errno
import logging
import shutil
import time
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from platform import machine
from typing import TYPE_CHECKING, Any

from octavo.engine.step_time import StepTimePredictor
from octavo.executor.base import Executor
from octavo.kv_cache.connectors.base import KvConnector
from octavo.kv_cache.connectors.disk import FORMAT, HEADER_BYTES, Disk
from octavo.kv_cache.connectors.folders import check_folder
from octavo.kv_cache.connectors.host import HostMemory
from octavo.kv_cache.connectors.manager import ConnectorManager
from octavo.kv_cache.transfer_cost import TransferCost
from octavo.loader.base import Tokenizer
from octavo.loader.tokenizer import BpeTokenizer
from octavo.machine.memory import as_size
from octavo.models.program import Program

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig

logger = logging.getLogger(__name__)

_MOST_DISK = 16 << 30  # bytes, unless a budget is given; and at most half of the free space
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


def check_disk(folder: str) -> None:
    """Raise `ValueError` unless the folder exists or can be made, and can be written to."""
    if not folder:
        raise ValueError("kv_offload_dir is empty")
    try:
        check_folder(Path(folder))
    except OSError as error:
        if error.errno not in _FULL:
            raise _refused(folder, error) from None


def _refused(folder: str, error: OSError) -> ValueError:
    reason = error.strerror or str(error)
    return ValueError(f"kv_offload_dir {folder}: may not be written: {reason}")


def make_connectors(
    config: EngineConfig,
    executor: Executor,
    step_times: StepTimePredictor,
    program: Program,
    tokenizer: Tokenizer,
) -> ConnectorManager:
    """Return an engine's connectors: host memory, and a disk if the settings have a folder. Then
    ``executor`` must have the digest of its weights. ``step_times`` learns from its steps. Raise
    `ValueError`.
    """
    layout, host_bytes = executor.layout, config.kv_offload_bytes
    slots = host_bytes // layout.block_bytes
    if slots < 1:
        raise ValueError(
            f"kv_offload_memory {host_bytes} is less than a block of {layout.block_bytes} bytes"
        )
    others: list[KvConnector] = []
    digest = b"of this process only"
    if config.kv_offload_dir is not None:
        digest = engine_digest(executor, program, tokenizer, config.quantization)
        budget = config.kv_offload_disk
        if budget is not None and budget < layout.block_bytes:
            raise ValueError(
                f"kv_offload_disk {budget} is less than a block of {layout.block_bytes} bytes"
            )
        disk = _disk(config.kv_offload_dir, digest, layout.block_bytes, budget)
        others += [] if disk is None else [disk]
    cost = TransferCost(
        layout.block_bytes,
        layout.block_size / len(layout.groups),
        lambda start, tokens: step_times.seconds_alone(start, tokens, executor.max_tokens),
        executor.max_tokens,
        time.perf_counter,
    )
    return ConnectorManager(digest, HostMemory(slots, layout.block_bytes), others, cost=cost)


def _disk(folder: str, engine: bytes, block_bytes: int, budget: int | None) -> Disk | None:
    """Return the connector for ``folder``; None if the disk has no space for its folders. Raise
    `ValueError`.
    """
    try:
        disk = Disk(Path(folder), engine, block_bytes, budget or 0)
    except OSError as error:
        if error.errno not in _FULL:
            raise _refused(folder, error) from None
        logger.warning("kv offload: %s: %s: nothing is kept there", folder, error.strerror)
        return None
    if budget is None:
        # Its own files count as free space, so that the budget is the same at each start.
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
    """Return the digest of what the bytes of a block mean, besides its tokens: weights as loaded,
    the computation, layout and number format of the cache, the executor, its instruction-set tier
    and the version of its numerics, the format of files; and of what the tokens mean.

    It does not depend on source code: with a new release, blocks stay usable unless
    `Capabilities.numerics` was raised.
    """
    layout, able = executor.layout, executor.capabilities
    digest = sha256()
    for part in (
        executor.digest,
        canonical((program.config, program.ops, layout, quantization)).encode(),
        _tokenizer_digest(tokenizer),
        f"{FORMAT}, {able.name}, {machine()} {able.tier}, numerics {able.numerics}".encode(),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def canonical(value: Any) -> str:
    """Return `repr` with every field of a dataclass and with sets sorted: the order of a set of
    strings differs between processes.
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


def _tokenizer_digest(tokenizer: Tokenizer) -> bytes:
    digest = sha256(repr((tokenizer.kind, sorted(tokenizer.eos_token_ids))).encode())
    if isinstance(tokenizer, BpeTokenizer):
        digest.update(tokenizer.backend_json().encode())
        digest.update(repr(tokenizer.framing).encode())
    else:
        for token_id in range(tokenizer.vocab_size):
            digest.update(tokenizer.spelling(token_id).encode() + b"\0")
    return digest.digest()
