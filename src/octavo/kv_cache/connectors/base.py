"""The interface of a KV connector: KV blocks held outside the device's pool.

A connector keeps blocks by their `Key`: the hash of all tokens up to the block's end, and the layer
group. The manager (kv_cache/connectors/manager.py) decides what is loaded and saved. To add a place
for blocks, such as another machine, write one class in one file and give it to the manager.

Methods come in two halves, as in vLLM's ``KVConnectorBase_V1``. The scheduler half says which
blocks the connector has; it answers at once, from what this process knows. The executor half moves
bytes: loads and saves are started here, end later, and are reported by `get_finished`. All methods
are called from the engine's thread. Bytes are a block as the executor exports it; engines with
another packing exchange blocks in the form of kv_cache/exchange_form.py.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.block_hash import Key
from octavo.kv_cache.events import EventQueue

Bytes = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]


class BlockTransfer(Protocol):
    """The executor's access to the bytes of the pool's blocks."""

    def export_blocks(self, blocks: Int32, into: Bytes | None = None) -> Bytes:
        """Copy blocks to ``into`` [len(blocks), block_bytes], or to new memory, and return it."""
        ...

    def import_blocks(self, blocks: Int32, data: Bytes) -> None: ...


@dataclass(slots=True)
class ConnectorStats:
    """Sizes now, and counters since the start, of one connector. Bytes and blocks are of KV."""

    blocks: int = 0  # held, of this engine
    used_bytes: int = 0  # held, of all engines that share the place
    capacity_bytes: int = 0
    saved_blocks: int = 0
    loaded_blocks: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    loading_seconds: float = 0.0  # copying its blocks into the pool
    corrupted_blocks: int = 0  # dropped because they were not what had been saved
    failed_loads: int = 0
    failed_saves: int = 0
    loads_in_time: int = 0  # requests that waited for it and got all of their blocks
    loads_late: int = 0  # requests that stopped waiting and computed the rest
    skipped_hits: int = 0  # hits not used because computing was predicted to take less time


class KvConnector(ABC):
    """KV blocks held in one place."""

    name: str  # in metrics, in events, and for the source of a prefix hit
    bandwidth: float  # bytes a second that loading is expected to reach until it is measured

    def __init__(self) -> None:
        self.events = EventQueue()  # the engine's, once it is attached to one
        self.arrived = threading.Event()  # set when a load is over
        self.counters = ConnectorStats()  # those that `stats` completes with sizes
        # Loads and saves that are over. Any thread appends, the engine's removes.
        self._loaded = deque[tuple[Key, bool, float]]()
        self._saved = deque[Key]()

    # Scheduler half

    @abstractmethod
    def lookup(self, key: Key) -> bool:
        """Return whether the block is there, as far as this process knows."""

    # Executor half

    @abstractmethod
    def start_load_kv(self, key: Key, into: Bytes) -> None:
        """Start to fill ``into`` [block_bytes], which stays in use until the load is over."""

    @abstractmethod
    def start_save_kv(self, key: Key, data: Bytes) -> None:
        """Start to save ``data`` [block_bytes], which nobody changes meanwhile."""

    def get_finished(self) -> tuple[deque[tuple[Key, bool, float]], deque[Key]]:
        """Return the queues of loads and of saves that are over. A load has the key, whether
        ``into`` holds the block, and the seconds that it took; a save is over also when it failed.
        The caller removes an entry once it has dealt with it.
        """
        return self._loaded, self._saved

    def _finish_load(self, key: Key, ok: bool, seconds: float) -> None:
        self._loaded.append((key, ok, seconds))
        self.arrived.set()

    def flush(self) -> None:  # noqa: B027
        """End saves that have been started as soon as possible: the engine is about to stop."""

    def shutdown(self) -> None:  # noqa: B027
        """Stop threads and close connections."""

    def stats(self) -> ConnectorStats:
        """Return the counters and the sizes now."""
        return replace(self.counters)
