"""Snapshots: states of recurrent layers at the ends of blocks, for sequences that begin alike.

A snapshot is the pages of a state that the prefix index names: content (node, group + i) for page
i, behind all groups of keys and values. Its pages are useful only together. So they come and go
together, but for the time in which they are being loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum

from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.connectors.manager import ConnectorManager
from octavo.kv_cache.prefix_index import Node, PrefixIndex


class SnapshotKind(StrEnum):
    ROLLING = "rolling"  # a running sequence's last one, until it has the next
    KEPT = "kept"


class Snapshots:
    """Which nodes have snapshots in the pool, at most ``most``."""

    def __init__(
        self,
        pool: BlockPool[tuple[Node, int]],
        index: PrefixIndex,
        most: int,
        connectors: ConnectorManager | None,
        block_size: int,
    ) -> None:
        self.most = most
        self._block_size = block_size
        self.connectors = connectors
        self._pool = pool
        self._index = index
        self._kinds: OrderedDict[Node, SnapshotKind] = OrderedDict()  # least recently used first

    def count(self, kind: SnapshotKind) -> int:
        return sum(each is kind for each in self._kinds.values())

    def enter(self, node: Node, pages: Sequence[int], kind: SnapshotKind) -> bool:
        """Enter ``pages`` as the node's snapshot. Return False if it has one, or none is wanted."""
        if not self.most:
            return False
        first = len(node.blocks)
        before = node.num_held
        for page, block in enumerate(pages, first):
            self._index.put(node, page, block)
        is_new = node.num_held > before
        if is_new or kind is SnapshotKind.KEPT:
            self._add(node, kind)
        return is_new

    def use(self, node: Node) -> None:
        """Keep a snapshot that a sequence has been found to begin with, or a page of one that has
        been loaded.
        """
        self._add(node, SnapshotKind.KEPT)

    def keep(self, node: Node) -> None:
        """Keep the snapshot of a sequence that runs no longer."""
        if node in self._kinds:
            self._add(node, SnapshotKind.KEPT)

    def replace(self, node: Node) -> None:
        """Drop a sequence's snapshot, which has a newer one, unless it is kept."""
        if self._kinds.get(node) is SnapshotKind.ROLLING:
            self.drop(node)

    def drop(self, node: Node) -> None:
        """Forget a snapshot; its pages are of no use any more."""
        self._kinds.pop(node, None)
        for block in node.pages[:]:
            if block >= 0:
                self._index.forget(block)
                self._pool.discard(block)

    def overwrite(self, node: Node) -> None:
        """Drop a snapshot whose pages are needed; save it first if it is kept."""
        connectors = self.connectors
        if connectors is not None and self._kinds.get(node) is SnapshotKind.KEPT:
            tokens = node.depth * self._block_size
            for page, block in enumerate(node.pages, len(node.blocks)):
                if block >= 0:
                    connectors.save_overwritten(block, node, page, len(node.pages), tokens)
        self.drop(node)

    def _add(self, node: Node, kind: SnapshotKind) -> None:
        """Note a snapshot as the last used one. ``kind``: a kept one stays so."""
        known = self._kinds.get(node)
        if known is not SnapshotKind.KEPT:
            self._kinds[node] = kind
            if kind is SnapshotKind.KEPT and self.connectors is not None:
                self.connectors.filled.extend(
                    (node, page, block)
                    for page, block in enumerate(node.pages, len(node.blocks))
                    if block >= 0
                )
        self._kinds.move_to_end(node)
        while len(self._kinds) > max(1, self.most):
            self.overwrite(next(iter(self._kinds)))

    def check(self) -> None:
        """Raise `RuntimeError` unless these are the nodes with pages in the pool."""
        held = {node for node, group, _ in self._index.held() if group >= len(node.blocks)}
        if held != set(self._kinds):
            raise RuntimeError("a snapshot in the pool is not known, or is known and not there")
