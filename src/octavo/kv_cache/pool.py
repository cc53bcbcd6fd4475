"""The pool of KV blocks: who refers to each, and which one to hand out next."""

from __future__ import annotations

from collections import OrderedDict


class OutOfBlocks(RuntimeError):
    """No block is free; the caller should have asked `BlockPool.num_free` first."""


class BlockPool:
    """``num_blocks`` equal blocks with reference counts. Every operation is O(1).

    A block that nobody refers to is free, but what it holds stays usable until the block is handed
    out again. Handed out first are blocks that hold nothing any more, then those never used (whose
    memory has not been touched), then the least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks cannot hold anything")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.evictions = 0  # blocks handed out again although what they held was usable
        self._empty: list[int] = []
        self._never_used = 0  # all blocks from here on
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._empty) + self.num_blocks - self._never_used + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that hold something still of use."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """Take the free block least worth keeping, with one reference."""
        if self._empty:
            block = self._empty.pop()
        elif self._never_used < self.num_blocks:
            block = self._never_used
            self._never_used += 1
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self.evictions += 1
        else:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are in use")
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference, to a block in use or to a free one whose content is wanted again."""
        if self.refs[block] == 0:
            del self._cached[block]
        self.refs[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Give a reference back. ``keep``: the content is cached, so reuse the block last."""
        refs = self.refs[block]
        if refs < 1:
            raise RuntimeError(f"block {block} is released more often than it was taken")
        self.refs[block] = refs - 1
        if refs == 1:
            if keep:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def check(self) -> None:
        """free + referenced = all; `RuntimeError` otherwise."""
        free = {*self._empty, *self._cached, *range(self._never_used, self.num_blocks)}
        if len(free) != self.num_free:
            raise RuntimeError("a block is free twice")
        for block, refs in enumerate(self.refs):
            if refs < 0 or (refs == 0) != (block in free):
                raise RuntimeError(f"block {block}: {refs} references, free: {block in free}")
