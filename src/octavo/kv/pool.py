"""The pool of KV blocks: who refers to each, and which one to hand out next."""

from __future__ import annotations

from collections import OrderedDict


class OutOfBlocks(RuntimeError):
    """No block is free; the caller should have asked `BlockPool.num_free` first."""


class BlockPool:
    """``num_blocks`` equal blocks with reference counts. Every operation is O(1).

    A block that nobody refers to is free, but what it holds stays usable until the block is handed
    out again: blocks without cached content go first, then the least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks cannot hold anything")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self) -> int:
        """Take the free block least worth keeping, with one reference."""
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are in use")
        block, _ = self._free.popitem(last=False)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference, to a block in use or to a free one whose content is wanted again."""
        if self.refs[block] == 0:
            del self._free[block]
        self.refs[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Give a reference back. ``keep``: the content is cached, so reuse the block last."""
        refs = self.refs[block]
        if refs < 1:
            raise RuntimeError(f"block {block} is released more often than it was taken")
        self.refs[block] = refs - 1
        if refs == 1:
            self._free[block] = None
            if not keep:
                self._free.move_to_end(block, last=False)

    def check(self) -> None:
        """free + referenced = all; `RuntimeError` otherwise."""
        for block, refs in enumerate(self.refs):
            if refs < 0 or (refs == 0) != (block in self._free):
                raise RuntimeError(f"block {block}: {refs} references, free: {block in self._free}")
