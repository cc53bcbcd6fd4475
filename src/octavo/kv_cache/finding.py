"""How much of a prompt is cached, and where: the longest prefix that every group can use."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import NamedTuple

from octavo.kv_cache.digest import Key, after
from octavo.kv_cache.layout import KvLayout
from octavo.kv_cache.prefix import Node, PrefixIndex
from octavo.kv_cache.read_ahead import ReadAhead
from octavo.kv_cache.tiers import Source, Tiers


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix: its nodes, and how many tokens of it are taken over.

    Where some of its blocks are to be loaded from another tier, ``nodes`` are those that there are
    and ``beyond`` has the tokens and digest of every block.
    """

    nodes: tuple[Node, ...]
    num_tokens: int
    beyond: tuple[tuple[bytes, bytes], ...] = ()
    num_host_tokens: int = 0  # of these, those for which something is loaded from host memory,
    num_disk_tokens: int = 0  # and those for which something was read from disk
    left_alone: bool = False  # there is more in host memory, but computing it will be quicker

    @property
    def num_blocks(self) -> int:
        """Of a group, those before a window included."""
        return len(self.beyond or self.nodes)


NO_HIT = Hit((), 0)


class Found(NamedTuple):
    """A prefix that is somewhere, as in `Hit`, and what of it the pool does not hold."""

    nodes: tuple[Node, ...]
    num_tokens: int
    blocks: tuple[tuple[bytes, bytes], ...]
    missing: list[tuple[int, Key]]  # at which block


class Finder:
    """Looks prefixes up in the ``index`` of the pool and, where there are any, in other tiers."""

    def __init__(self, index: PrefixIndex, layout: KvLayout, tiers: Tiers | None) -> None:
        self.index = index
        self.tiers = tiers
        self.block_size = layout.block_size
        self._windows = tuple(group.window for group in layout.groups)

    def lookup(self, tokens: array[int], salt: str | None) -> Hit:
        """The longest cached prefix that every group can use, with what is worth loading of it.

        A group without a window needs all blocks; one with a window only those that the next
        position still sees. The last token is always left to compute.
        """
        hit = self._in_pool(tokens, salt)
        tiers, size = self.tiers, self.block_size
        if tiers is None or hit.num_blocks == len(tokens) // size:
            return hit
        further = self._anywhere(tokens, salt, Source.HOST)
        if further is None or further.num_tokens <= hit.num_tokens:
            return hit
        more = further.num_tokens - hit.num_tokens
        if tiers.worth.saved(len(further.missing), hit.num_tokens, more) <= 0:
            return replace(hit, left_alone=True)
        disk = {at for at, key in further.missing if tiers.memory.is_from_disk(key)}
        host = {at for at, _ in further.missing} - disk
        from_host = min(len(host) * size, further.num_tokens)
        from_disk = min(len(disk) * size, further.num_tokens - from_host)
        return Hit(further.nodes, further.num_tokens, further.blocks, from_host, from_disk)

    def _in_pool(self, tokens: array[int], salt: str | None) -> Hit:
        """Of what the pool holds."""
        node = self.index.find(None, (salt or "").encode())
        if node is None:
            return NO_HIT
        size = self.block_size
        last = len(tokens) - 1
        nodes: list[Node] = []
        runs = [0] * len(self._windows)  # cached blocks in a row, up to here
        best = 0
        for start in range(0, len(tokens) - size + 1, size):
            node = self.index.find(node, tokens[start : start + size].tobytes())
            if node is None:
                break
            nodes.append(node)
            position = min(start + size, last)
            usable = True
            for group, window in enumerate(self._windows):
                runs[group] = runs[group] + 1 if node.blocks[group] >= 0 else 0
                first = 0 if window is None else max(0, position - window + 1) // size
                usable = usable and runs[group] >= len(nodes) - first
            if usable:
                best = len(nodes)
        return Hit(tuple(nodes[:best]), min(best * size, last)) if best else NO_HIT

    def _anywhere(self, tokens: array[int], salt: str | None, farthest: Source) -> Found | None:
        """The longest prefix that is somewhere, with that tier as the farthest; None if that is
        none. Of it the blocks that the pool does not hold: at which position, and their keys.
        """
        tiers, index, size = self.tiers, self.index, self.block_size
        assert tiers is not None
        root = (salt or "").encode()
        node = index.find(None, root)
        key = index.child_key(0, root)
        if node is None and index.has_key(key):
            return None
        digest = tiers.names.root(root)
        last = len(tokens) - 1
        nodes: list[Node] = []
        blocks: list[tuple[bytes, bytes]] = []
        missing: list[list[Key]] = []
        keys = {key}
        runs = [0] * len(self._windows)
        best = 0
        for start in range(0, len(tokens) - size + 1, size):
            content = tokens[start : start + size].tobytes()
            node = None if node is None else index.find(node, content)
            key = index.child_key(key, content)
            if node is not None:
                digest = tiers.names.of(node)
                nodes.append(node)
            elif key in keys or index.has_key(key):  # another prefix owns the key
                break
            else:
                digest = after(digest, content)
            keys.add(key)
            blocks.append((content, digest))
            missing.append([])
            position = min(start + size, last)
            usable, anything = True, node is not None
            for group, window in enumerate(self._windows):
                if node is None or node.blocks[group] < 0:
                    source = tiers.find((digest, group))
                    if source is None or (source is Source.DISK and farthest is Source.HOST):
                        runs[group] = 0
                    else:
                        runs[group] += 1
                        missing[-1].append((digest, group))
                        anything = True
                else:
                    runs[group] += 1
                first = 0 if window is None else max(0, position - window + 1) // size
                usable = usable and runs[group] >= len(blocks) - first
            if usable:
                best = len(blocks)
            if not anything:
                break
        if not best:
            return None
        num_tokens = min(best * size, last)
        first_needed = self.first_needed(num_tokens)
        needed = [
            (at, (digest, group))
            for at in range(best)
            for digest, group in missing[at]
            if at >= first_needed[group]
        ]
        return Found(tuple(nodes[:best]), num_tokens, tuple(blocks[:best]), needed)

    def read_ahead(self, tokens: array[int], salt: str | None, now: float) -> ReadAhead | None:
        """Begin to read from disk what is worth it of a prompt that will be looked up later, and
        is worth waiting for. None if nothing is.
        """
        tiers = self.tiers
        if tiers is None or tiers.reading is None:
            return None
        found = self._anywhere(tokens, salt, Source.DISK)
        if found is None:
            return None
        near = self.lookup(tokens, salt).num_tokens
        keys = [key for _, key in found.missing if tiers.find(key) is Source.DISK]
        if not keys or found.num_tokens <= near:
            return None
        return tiers.reading.begin(keys, near, found.num_tokens - near, now)

    def first_needed(self, position: int) -> list[int]:
        """For each group the first block that a query at ``position`` reads."""
        return [
            0 if window is None else max(0, position - window + 1) // self.block_size
            for window in self._windows
        ]
