"""Prefix lookup: how much of a prompt is cached, in the pool and by connectors."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.kv_cache.block_hash import Key, after, digest_of, root
from octavo.kv_cache.connectors.base import KvConnector
from octavo.kv_cache.connectors.manager import ConnectorManager
from octavo.kv_cache.connectors.prefetch import Prefetch
from octavo.kv_cache.layout import KvLayout
from octavo.kv_cache.prefix_index import Node, PrefixIndex


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix: its nodes, and how many of its tokens are used.

    If some blocks are to be loaded, ``nodes`` has only the nodes that exist, and ``beyond`` has the
    tokens and the hash of every block: until the hit is used, other sequences may end that keep a
    node without blocks.
    """

    nodes: tuple[Node, ...]
    num_tokens: int
    beyond: tuple[tuple[bytes, bytes], ...] = ()
    # Blocks that the pool does not hold: position, key, and who has it.
    missing: tuple[tuple[int, Key, KvConnector], ...] = ()
    external_tokens: tuple[tuple[str, int], ...] = ()  # loaded, by connector
    skipped: bool = False  # host memory has more, but computing it takes less time
    wanted: int = 0  # tokens of a longer prefix that could be used if its state had been kept

    @property
    def num_blocks(self) -> int:
        """Blocks of one group, those outside its window included."""
        return len(self.beyond or self.nodes)


NO_HIT = Hit((), 0)


class PrefixLookup:
    """Looks prefixes up in the ``index`` of the pool and, if there are any, in connectors."""

    def __init__(
        self, index: PrefixIndex, layout: KvLayout, connectors: ConnectorManager | None
    ) -> None:
        self.index = index
        self.connectors = connectors
        self.block_size = layout.block_size
        self._windows = tuple(group.window for group in layout.groups)
        self._num_pages = layout.state_blocks

    def lookup(self, tokens: array[int], salt: str | None) -> Hit:
        """Return the longest cached prefix that every group can use, with the blocks that are worth
        loading.

        A group without a window needs all blocks, one with a window only those that the next
        position still sees; recurrent layers need a snapshot behind the last token that is used.
        The last token of ``tokens`` is always left to be computed.
        """
        hit = self._longest(tokens, salt)
        connectors, size = self.connectors, self.block_size
        if connectors is None or hit.num_blocks == len(tokens) // size or connectors.paused:
            return hit
        longer = self._longest(tokens, salt, connectors.all[:1])
        more = longer.num_tokens - hit.num_tokens
        if more <= 0:
            return hit
        if connectors.cost.seconds_saved(len(longer.missing), hit.num_tokens, more) <= 0:
            return replace(hit, skipped=True)
        # A position counts for the connector that its blocks came from; of two, not for staging.
        staging = connectors.staging
        origins: dict[int, str] = {}
        for at, key, _ in longer.missing:
            if origins.get(at, staging.name) == staging.name:
                origins[at] = staging.origin(key)
        blocks, left = Counter(origins.values()), longer.num_tokens
        external: list[tuple[str, int]] = []
        for connector in connectors.all:
            external.append((connector.name, min(blocks[connector.name] * size, left)))
            left -= external[-1][1]
        return replace(longer, external_tokens=tuple(external))

    def prefetch(self, tokens: array[int], salt: str | None, now: float) -> Prefetch | None:
        """Start to load into host memory what is worth waiting for, of a prompt that will be looked
        up later. Return None if nothing is.
        """
        connectors = self.connectors
        if connectors is None or connectors.prefetcher is None or connectors.paused:
            return None
        found = self._longest(tokens, salt, connectors.all)
        near = self.lookup(tokens, salt).num_tokens
        blocks = [(key, who) for _, key, who in found.missing if who is not connectors.staging]
        if not blocks or found.num_tokens <= near:
            return None
        more = found.num_tokens - near
        return connectors.prefetcher.start(blocks, near, more, now, whole=self._num_pages > 0)

    def _longest(
        self, tokens: array[int], salt: str | None, among: Sequence[KvConnector] = ()
    ) -> Hit:
        """Return the longest prefix that every group can use, of blocks in the pool and, by the
        first that has them, blocks of the connectors ``among``.
        """
        index, size = self.index, self.block_size
        salted = (salt or "").encode()
        node = index.find(None, salted)
        key = index.child_key(0, salted)
        if node is None and (not among or index.has_key(key)):
            return NO_HIT
        engine = b"" if self.connectors is None else self.connectors.engine
        digest, keys = root(engine, salted), {key}
        last = len(tokens) - 1
        nodes: list[Node] = []
        beyond: list[tuple[bytes, bytes]] = []
        missing: list[tuple[int, Key, KvConnector]] = []
        runs = [0] * len(self._windows)  # usable blocks in a row, up to here
        pages: list[tuple[int, Key, KvConnector]] = []  # of the state, missing
        best = wanted = 0
        for at, start in enumerate(range(0, len(tokens) - size + 1, size)):
            content = tokens[start : start + size].tobytes()
            node = None if node is None else index.find(node, content)
            if node is not None:
                nodes.append(node)
                if among:
                    key, digest = node.key, digest_of(node, engine)
            elif not among:
                break
            else:
                key = index.child_key(key, content)
                if key in keys or index.has_key(key):  # another prefix has the same key
                    break
                digest = after(digest, content)
                keys.add(key)
            if among:
                beyond.append((content, digest))
            position = min(start + size, last)
            usable, held = True, node is not None
            for group, window in enumerate(self._windows):
                if node is not None and node.blocks[group] >= 0:
                    runs[group] += 1
                else:
                    for who in among:
                        if who.lookup((digest, group)):
                            runs[group] += 1
                            missing.append((at, (digest, group), who))
                            held = True
                            break
                    else:
                        runs[group] = 0
                first = 0 if window is None else max(0, position - window + 1) // size
                usable = usable and runs[group] > at - first
            if usable and self._num_pages:
                found = None
                if start + size <= last:
                    wanted = start + size
                    found = self._missing_pages(at, node, digest, among)
                usable = found is not None
                pages = pages if found is None else found
            if usable:
                best = at + 1
            if not held:
                break
        if not best:
            return replace(NO_HIT, wanted=wanted)
        num_tokens = min(best * size, last)
        needed = self.first_needed(num_tokens)
        usable_blocks = (each for each in missing if needed[each[1][1]] <= each[0] < best)
        return Hit(
            tuple(nodes[:best]),
            num_tokens,
            tuple(beyond[:best]),
            (*usable_blocks, *pages),
            wanted=wanted if wanted > num_tokens else 0,
        )

    def _missing_pages(
        self, at: int, node: Node | None, digest: bytes, among: Sequence[KvConnector]
    ) -> list[tuple[int, Key, KvConnector]] | None:
        """Return the pages of a node's snapshot that the pool does not hold, and who of ``among``
        does; None if nobody has one of them.
        """
        missing: list[tuple[int, Key, KvConnector]] = []
        first = len(self._windows)
        for group in range(first, first + self._num_pages):
            if node is not None and node.block(group) >= 0:
                continue
            key = digest, group
            who = next((who for who in among if who.lookup(key)), None)
            if who is None:
                return None
            missing.append((at, key, who))
        return missing

    def first_needed(self, position: int) -> list[int]:
        """Return, for each group, the first block that a query at ``position`` reads."""
        return [
            0 if window is None else max(0, position - window + 1) // self.block_size
            for window in self._windows
        ]
