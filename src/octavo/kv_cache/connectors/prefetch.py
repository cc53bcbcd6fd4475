"""Loads from connectors into host memory, started while the request that needs them waits.

A request waits no longer than computing would take. A part of host memory is left to blocks that
the pool overwrites.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.kv_cache.block_hash import Key
from octavo.kv_cache.connectors.base import KvConnector
from octavo.kv_cache.connectors.host import HostMemory
from octavo.kv_cache.transfer_cost import Measured, TransferCost

_SHARE = 0.75  # of host memory, at most, is for blocks that wait for their request,
_SHARE_OF_ONE = 0.5  # and so much of it for one request


@dataclass(slots=True, eq=False)
class Prefetch:
    """The loads that one waiting request needs."""

    connector: KvConnector  # that has the first block
    deadline: float  # clock seconds: by then computing would have been as fast
    remaining: int  # blocks
    num_tokens: int  # of the prompt that will be cached when all have been loaded
    pinned: list[Key] = field(default_factory=list)  # loaded, kept until the request is admitted
    over: bool = False  # the request does not wait any more


class Prefetcher:
    """All methods run in the engine's thread."""

    def __init__(
        self,
        connectors: Sequence[KvConnector],
        staging: HostMemory,
        cost: TransferCost,
        now: Callable[[], float],
    ) -> None:
        block_bytes = staging.data.shape[1]
        self._connectors = connectors
        self._staging = staging
        self._cost = cost
        self._now = now
        self._seconds = {
            each.name: Measured(block_bytes / each.bandwidth, now) for each in connectors
        }
        # What is being loaded: by which connector, into which slot, and for whom.
        self._loads: dict[Key, tuple[KvConnector, int, list[Prefetch]]] = {}

    @property
    def num_slots(self) -> int:
        """Slots of host memory that are being filled."""
        return len(self._loads)

    @property
    def capacity(self) -> int:
        """Slots of host memory for further loads."""
        most = max(1, int(self._staging.num_slots * _SHARE))
        held = self._staging.num_pinned + len(self._loads)
        return min(most - held, self._staging.num_takeable)

    def start(
        self,
        blocks: Sequence[tuple[Key, KvConnector]],
        start: int,
        num_tokens: int,
        now: float,
        *,
        whole: bool = False,
    ) -> Prefetch | None:
        """Start to load ``blocks`` in this order, as far as there is capacity, for a request that
        would otherwise compute ``num_tokens`` from position ``start`` on. Return None if computing
        takes less time, or if only all of them are of use (``whole``) and there is no capacity.
        """
        capacity = min(self.capacity, max(1, int(self._staging.num_slots * _SHARE_OF_ONE)))
        chosen: list[tuple[Key, KvConnector]] = []
        queued = Counter(connector.name for connector, _, _ in self._loads.values())
        for key, connector in blocks:
            if key not in self._loads:
                if capacity < 1:
                    break
                capacity -= 1
                queued[connector.name] += 1
            chosen.append((key, connector))
        if not chosen or (whole and len(chosen) < len(blocks)):
            return None
        num_tokens = num_tokens * len(chosen) // len(blocks)
        waiting = sum(count * self._seconds[name].seconds for name, count in queued.items())
        patience = self._cost.seconds_saved(len(chosen), start, num_tokens)
        if waiting >= patience:
            self._staging.counters.skipped_hits += 1
            return None
        prefetch = Prefetch(chosen[0][1], now + patience, len(chosen), start + num_tokens)
        try:
            for key, connector in chosen:
                if key not in self._loads:
                    slot = self._staging.take()
                    assert slot is not None
                    self._loads[key] = connector, slot, []
                    try:
                        connector.start_load_kv(key, self._staging.data[slot])
                    except Exception:  # nobody fills the slot
                        del self._loads[key]
                        self._staging.give_back(slot)
                        raise
                self._loads[key][2].append(prefetch)
        except BaseException:
            self.end(prefetch)
            raise
        return prefetch

    def poll(self) -> None:
        """Enter the blocks that have arrived into host memory."""
        for connector in self._connectors:
            connector.arrived.clear()
            loaded, _ = connector.get_finished()
            while loaded:
                key, ok, seconds = loaded[0]
                self._seconds[connector.name].took(seconds)
                _, slot, waiting = self._loads[key]
                if ok:
                    self._staging.put(key, slot, connector.name)
                else:
                    self._staging.give_back(slot)
                for prefetch in waiting:
                    prefetch.remaining -= 1
                    if ok and not prefetch.over:
                        prefetch.pinned.append(key)
                        self._staging.pin(key)
                # Last: `forget` cleans up after a failure before.
                del self._loads[key]
                loaded.popleft()

    def is_ready(self, prefetch: Prefetch, now: float) -> bool:
        """Return whether the request need not wait any longer."""
        return not prefetch.remaining or now >= prefetch.deadline

    def count(self, prefetch: Prefetch) -> None:
        """Count a request that stops waiting."""
        if prefetch.remaining:
            prefetch.connector.counters.loads_late += 1
        else:
            prefetch.connector.counters.loads_in_time += 1

    def end(self, prefetch: Prefetch) -> None:
        """Unpin its blocks: the request has been admitted or has ended."""
        if not prefetch.over:
            prefetch.over = True
            for key in prefetch.pinned:
                self._staging.unpin(key)

    def wait(self, seconds: float) -> None:
        """Wait until a block has arrived, at most ``seconds``."""
        loading = (connector for connector, _, _ in self._loads.values())
        next(loading, self._connectors[0]).arrived.wait(seconds)

    def forget(self) -> set[int]:
        """End all prefetches after a failure at any point. Return the slots still being filled."""
        for _, _, waiting in self._loads.values():
            for prefetch in waiting:
                prefetch.over = True
        for connector in self._connectors:
            loaded, _ = connector.get_finished()
            if loaded:  # the first may have been entered when `poll` failed
                key, *_ = loaded[0]
                known = self._loads.get(key)
                if known is None or (
                    self._staging.lookup(key) and self._staging.slot(key) == known[1]
                ):
                    self._loads.pop(key, None)
                    loaded.popleft()
        return {slot for _, slot, _ in self._loads.values()}
