"""The pool of KV blocks: references to each block, and which block to hand out next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Generic, TypeVar

Content = TypeVar("Content")


class BlockPool(Generic[Content]):
    """``num_blocks`` equal blocks with reference counts. Every operation is O(1).

    ``contents`` names what each block holds, None if that is of no use to others; the owner of the
    pool sets it. A block without references is free, but its content stays usable until the block
    is handed out again. Blocks without usable content are handed out first, then blocks that were
    never used (whose memory has not been touched), then the least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks cannot hold anything")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.contents: list[Content | None] = [None] * num_blocks
        self.evictions = 0  # blocks handed out again although their content was usable
        self._empty: list[int] = []
        self._never_used = 0  # all blocks from here on
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._empty) + self.num_blocks - self._never_used + len(self._cached)

    @property
    def num_cached(self) -> int:
        """How many free blocks have usable content."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """Take the free block that is least worth keeping, with one reference and the content that
        it still has. Raise `RuntimeError` if no block is free; ask `num_free` before.
        """
        if self._empty:
            block = self._empty.pop()
        elif self._never_used < self.num_blocks:
            block = self._never_used
            self._never_used += 1
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self.evictions += 1
        else:
            raise RuntimeError(f"all {self.num_blocks} blocks are in use")
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block in use, or to a free block whose content is needed again."""
        if self.refs[block] == 0:
            del self._cached[block]
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """Give a reference back. A block with usable content is handed out last."""
        refs = self.refs[block]
        if refs < 1:
            raise RuntimeError(f"block {block} is released more often than it was taken")
        self.refs[block] = refs - 1
        if refs == 1:
            if self.contents[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def discard(self, block: int) -> None:
        """Hand the block, whose content is of no use any more, out first as soon as it is free."""
        if self.refs[block] == 0:
            del self._cached[block]
            self._empty.append(block)

    def reset(self, used: Container[int]) -> None:
        """Repair the accounts after a failure at any point: each block of ``used`` has one
        reference, and all others are free.
        """
        self.refs = [int(block in used) for block in range(self.num_blocks)]
        free = [block for block in range(self._never_used) if not self.refs[block]]
        self._empty = [block for block in free if self.contents[block] is None]
        self._cached = OrderedDict.fromkeys(
            block
            for block in [*self._cached, *free]
            if self.contents[block] is not None and not self.refs[block]
        )

    def check(self) -> None:
        """Raise `RuntimeError` unless every block is either free or referenced."""
        free = {*self._empty, *self._cached, *range(self._never_used, self.num_blocks)}
        if len(free) != self.num_free:
            raise RuntimeError("a block is free twice")
        for block, refs in enumerate(self.refs):
            if refs < 0 or (refs == 0) != (block in free):
                raise RuntimeError(f"block {block}: {refs} references, free: {block in free}")
