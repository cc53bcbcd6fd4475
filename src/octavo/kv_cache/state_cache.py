"""The states of recurrent layers of all sequences, in pages: blocks of the pool.

A sequence's state is behind its last token, less its pending ones: drafts that were right, of which
a log has the inputs that recurrent layers had for them. The next step applies these first, then its
own tokens. A step may read a state from some pages and write it to others, which replace them when
the step is committed; so nothing is ever copied. Pages whose content is in the prefix index, or
that several sequences refer to, are not written, and pages that a step reads are referred to until
it is committed: none of them is handed out in it.

Of a sequence's states, some at ends of blocks become snapshots:

- the last one (rolling): it goes when the sequence has the next. When the sequence ends or is
  preempted it stays, so that the next turn, or the sequence, continues from there;
- the last two that a prompt passes: the next prompt may end otherwise, if its chat template does;
- where the keys and values of a longer prefix were found than states: others share it;
- every `_INTERVAL` tokens of a prompt.

All but the first take pages only while some are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.prefix_index import Node
from octavo.kv_cache.snapshots import SnapshotKind, Snapshots
from octavo.kv_cache.state_batch import StateBatch

Int32 = npt.NDArray[np.int32]

_INTERVAL = 4096  # tokens
_MOST_STORES = 4  # snapshots of one chunk


@dataclass(slots=True)
class _Part:
    """A sequence's part in the step that is under way."""

    start: int  # tokens that the state is behind which it reads
    end: int  # … and that which it stores
    snapshots: dict[int, SnapshotKind]  # by how many tokens they are behind
    kept: list[tuple[int, list[int]]]  # of these, pages of all but the one at the end
    log: list[int]  # rows of the log with its drafts


class StateCache:
    """Pages by slot. ``num_tokens`` [slots] is the cache's own array."""

    def __init__(
        self,
        num_pages: int,
        pool: BlockPool[tuple[Node, int]],
        snapshots: Snapshots,
        allocate: Callable[[], int],
        num_tokens: Int32,
        *,
        block_size: int,
        max_branches: int,
        log_rows: int,
    ) -> None:
        self.num_pages = num_pages
        self.snapshots = snapshots
        self.free_log_rows = list(range(log_rows - 1, -1, -1))
        self._log_rows = log_rows
        self._pool = pool
        self._allocate = allocate
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._interval = max(1, _INTERVAL // block_size) * block_size
        max_seqs = len(num_tokens)
        self._pages: list[list[int]] = [[] for _ in range(max_seqs)]  # []: before the first token
        self._writes: dict[int, list[int]] = {}  # pages that the next step writes instead
        self._pending: dict[int, list[int]] = {}  # rows of the log, the oldest first
        self._rolling: dict[int, Node] = {}
        self._wanted: dict[int, int] = {}  # positions of shared prefixes without a snapshot
        self._parts: dict[
            int, _Part
        ] = {}  # of the step under way, where commit has something to do
        self._branches: dict[int, tuple[int, list[int]]] = {}  # by row: its slot, its log rows
        self._scratch: dict[int, list[int]] = {}  # pages of drafts that are being made
        # By slot: its pages, behind them those that it writes instead, then those of its drafts;
        # the rest are snapshots of the step.
        self._tables: Int32 = np.full(((3 + _MOST_STORES) * max_seqs, num_pages), -1, np.int32)
        self._reads: Int32 = np.full(max_seqs + max_branches, -1, np.int32)  # rows of the tables
        self._stores: Int32 = np.full(max_seqs, -1, np.int32)
        self._busy = np.zeros(max_seqs, np.bool_)  # it may have content, or has writes or pending
        self._num_pending: Int32 = np.zeros(max_seqs + max_branches, np.int32)
        self._no_log: Int32 = np.full(0, -1, np.int32)

    # Beginning and end of a sequence

    def open(self, slot: int, node: Node | None, wanted: int) -> None:
        """Begin a slot with the node's snapshot, as far as the pool has it; None: with nothing. For
        slots whose state that is, too, pages must be free (`needed_by_others`). ``wanted``: where a
        snapshot would have been of use.
        """
        self._wanted[slot] = wanted
        if node is None:
            return
        pages = node.pages[:] or [-1] * self.num_pages
        others = self._without_writes(pages)
        for page in pages:
            if page >= 0:
                self._pool.share(page)
        self._set_pages(slot, pages)
        self._busy[slot] = True
        if node.pages:
            self.snapshots.use(node)
        for other in others:
            self._take_writes(other)

    def put_page(self, slot: int, page: int, block: int) -> None:
        """Enter a page that has been loaded."""
        self._pages[slot][page] = block
        self._tables[slot, page] = block

    def needed_by_others(self, node: Node) -> int:
        """Return the blocks that `open` takes for sequences whose state the node's snapshot is."""
        return self.num_pages * len(self._without_writes(node.pages))

    def pages_of(self, slot: int) -> Sequence[int]:
        """Return the pages of a slot's state; -1 for those to be loaded."""
        return self._pages[slot]

    def held_blocks(self, slot: int) -> int:
        """Return the blocks of a slot's state, or of the one that it will write first."""
        return self.num_pages if self._pages[slot] or slot in self._writes else 0

    def owed_blocks(self, slot: int) -> int:
        """Return the blocks that a slot with a state takes in its next step to write another."""
        return max(0, self.missing(slot)) if self._pages[slot] else 0

    @property
    def num_blocks(self) -> int:
        """How many blocks have states of sequences."""
        states = (pages for pages in chain(self._pages, self._writes.values()) if pages)
        return self.num_pages * len({pages[-1] for pages in states})

    def _without_writes(self, pages: Sequence[int]) -> list[int]:
        refs = self._pool.refs
        at = next((at for at, page in enumerate(pages) if page >= 0 and refs[page]), None)
        if at is None:
            return []
        return [
            slot
            for slot, theirs in enumerate(self._pages)
            if theirs and theirs[at] == pages[at] and slot not in self._writes
        ]

    def fork(self, slot: int, child: int) -> None:
        """Begin ``child`` with the slot's state."""
        if slot in self._pending or slot in self._parts:
            raise RuntimeError(f"slot {slot} is forked in the middle of a step")
        for page in self._pages[slot]:
            self._pool.share(page)
        self._set_pages(child, self._pages[slot][:])
        self._busy[child] = self._busy[slot]

    def close(self, slot: int) -> None:
        """Give back everything. The last snapshot stays."""
        if (part := self._parts.pop(slot, None)) is not None:
            for _, pages in part.kept:
                self._release(pages)
            self.free_log_rows += part.log
        self.give_back(slot)
        self._release(self._writes.pop(slot, ()))
        self._release(self._pages[slot])
        self._set_pages(slot, [])
        self._set_pending(slot, [])
        self._busy[slot] = False
        self._wanted.pop(slot, None)
        if (node := self._rolling.pop(slot, None)) is not None:
            self.snapshots.keep(node)

    # A step

    def missing(self, slot: int) -> int:
        """Return how many blocks `reserve` takes; less than 0: gives back."""
        needs = self._needs_writes(slot)
        return self.num_pages * (needs - (slot in self._writes))

    def _needs_writes(self, slot: int) -> bool:
        refs, pages = self._pool.refs, self._pages[slot]
        return not pages or any(refs[page] > 1 for page in pages if page >= 0)

    def reserve(self, slot: int) -> None:
        """Take the pages without which the slot cannot take part in a step."""
        if (missing := self.missing(slot)) > 0:
            self._take_writes(slot)
        elif missing < 0:
            self._release(self._writes.pop(slot))
            self._stores[slot] = slot

    def plan(
        self, slots: Int32, offsets: Int32, num_decodes: int, totals: Sequence[int]
    ) -> StateBatch:
        """Return the states of a step: ``num_decodes`` decoding sequences with their drafts, then
        chunks of those that know ``totals`` tokens, then branches. All have reserved what they
        need. ``slots`` [S], ``offsets`` [S + 1]: as of the batch.
        """
        count = num_decodes + len(totals)
        own, sizes = slots[:count], np.diff(offsets)
        certain = sizes[:count].copy()  # tokens behind which the state is stored
        certain[:num_decodes] = 1
        ends = self._num_tokens[own] + certain
        drafting = sizes[:count] > certain
        changing = self._busy[own] | (ends % self._block_size == 0) | drafting
        changing[num_decodes:] = True
        log = self._no_rows(int(offsets[-1]))
        if drafting.any() or len(slots) > count:
            log = log.copy()
        extra: list[tuple[int, int, int]] = []
        for span in np.flatnonzero(changing).tolist():
            total = None if span < num_decodes else totals[span - num_decodes]
            part = self.begin(int(own[span]), int(ends[span]), int(certain[span]), total)
            for position, pages in part.kept:
                row = 3 * len(self._pages) + len(extra)
                self._tables[row] = pages
                extra.append((span, position - part.start, row))
            if drafts := int(sizes[span] - certain[span]):
                part.log = self._take_log(drafts)
                log[offsets[span] + 1 : offsets[span + 1]] = part.log
        for span in range(count, len(slots)):
            row = int(slots[span])
            slot, rows = self._branches[row]
            rows += self._take_log(int(sizes[span]) - 1)
            log[offsets[span] + 1 : offsets[span + 1]] = rows
            self._reads[row], self._num_pending[row] = self._reads[slot], self._num_pending[slot]
        stores = np.empty((count + len(extra), 3), np.int32)
        stores[:count, 0] = np.arange(count)
        stores[:count, 1] = certain + self._num_pending[own]
        stores[:count, 2] = self._stores[own]
        if extra:
            stores[count:] = extra
            stores = stores[np.lexsort((stores[:, 1], stores[:, 0]))]
        pending_offsets = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(self._num_pending[slots], out=pending_offsets[1:])
        pending = self._pending_of(slots) if pending_offsets[-1] else _NONE
        return self._batch(self._reads[slots], stores, pending_offsets, pending, log)

    def _batch(
        self, reads: Int32, stores: Int32, pending_offsets: Int32, pending: Int32, log: Int32
    ) -> StateBatch:
        """Return a step's states with the rows of the tables that it has to do with."""
        used, inverse = np.unique(np.concatenate((reads, stores[:, 2])), return_inverse=True)
        first = int(np.count_nonzero(used < 0))  # a span that reads nothing
        places: Int32 = (inverse - first).astype(np.int32)
        stores[:, 2] = places[len(reads) :]
        tables = self._tables[used[first:]]
        return StateBatch(tables, places[: len(reads)], stores, pending_offsets, pending, log)

    def begin(self, slot: int, end: int, certain: int = 1, total: int | None = None) -> _Part:
        """Plan a slot's part in a step: where it writes, and which snapshots it leaves. ``end``,
        ``certain``: the tokens behind which it stores its state, and how many of them are of the
        step. ``total``: as of `_boundaries`.
        """
        start = end - certain - int(self._num_pending[slot])
        snapshots = self._boundaries(slot, start, end, total)
        part = self._parts[slot] = _Part(start, end, snapshots, [], [])
        if slot not in self._writes:
            self._make_writable(slot)
        for position in part.snapshots:
            if position < end and self._pool.num_free >= self.num_pages:
                part.kept.append((position, self._take()))
        return part

    def _boundaries(
        self, slot: int, start: int, end: int, total: int | None
    ) -> dict[int, SnapshotKind]:
        """Return which states behind more than ``start`` tokens, up to ``end``, become snapshots.
        ``total``: tokens that are known of a prompt under way.
        """
        if not self.snapshots.most:
            return {}
        size = self._block_size
        found: dict[int, SnapshotKind] = {}
        if (rolling := end // size * size) > start:
            found[rolling] = SnapshotKind.ROLLING
        if total is not None:
            last = (total - 1) // size * size
            first = (start // self._interval + 1) * self._interval
            every = range(first, end + 1, self._interval)
            kept = {last, last - size, self._wanted.get(slot, 0), *every}
            found |= {each: SnapshotKind.KEPT for each in kept if start < each <= end}
        return dict(sorted(found.items())[-_MOST_STORES:])

    def _make_writable(self, slot: int) -> None:
        """Let a slot whose state is a snapshot write elsewhere, or else forget the snapshot."""
        pages, contents = self._pages[slot], self._pool.contents
        if self._needs_writes(slot):
            raise RuntimeError(f"slot {slot} takes part in a step with no state to write")
        nodes = {content[0] for page in pages if (content := contents[page]) is not None}
        if nodes and self._pool.num_free >= self.num_pages:
            self._take_writes(slot)
            return
        for node in nodes:
            self.snapshots.overwrite(node)
        self._busy[slot] = slot in self._pending

    @property
    def is_changing(self) -> bool:
        """Whether the step under way leaves `commit` anything to do."""
        return bool(self._parts)

    def commit(self, slot: int, node_at: Callable[[int], Node | None]) -> None:
        """Take over what a step has done to a slot's state, after its tokens have been counted and
        its blocks registered. ``node_at`` returns the node that so many tokens end with.
        """
        part = self._parts.pop(slot, None)
        if part is None:
            return
        if (writes := self._writes.pop(slot, None)) is not None:
            self._release(self._pages[slot])
            self._set_pages(slot, writes)
        right = int(self._num_tokens[slot]) - part.end
        self.free_log_rows += part.log[right:]
        self._set_pending(slot, part.log[:right])
        self._busy[slot] = right > 0
        for position, pages in part.kept:
            self._enter(slot, node_at(position), pages, part.snapshots[position])
            self._release(pages)
        if (kind := part.snapshots.get(part.end)) is not None:
            self._busy[slot] |= self._enter(slot, node_at(part.end), self._pages[slot], kind)

    def _enter(self, slot: int, node: Node | None, pages: list[int], kind: SnapshotKind) -> bool:
        if node is None or not self.snapshots.enter(node, pages, kind):
            return False
        if (last := self._rolling.get(slot)) is not None:
            self.snapshots.replace(last)
        self._rolling[slot] = node
        return True

    # Branches

    def needed_for_branch(self, slot: int) -> int:
        """Return the blocks that `branch` takes."""
        return 0 if slot in self._writes else self.num_pages

    def branch(self, slot: int, row: int) -> None:
        """Let a branch read the slot's state, while the slot writes another."""
        if slot not in self._writes:
            self._take_writes(slot)
        self._branches[row] = slot, []

    def adopt(self, row: int) -> None:
        """Let the slot continue with the drafts of the branch, not with its own."""
        slot, rows = self._branches.pop(row)
        part = self._parts[slot]
        self.free_log_rows += part.log
        part.log = rows

    def drop(self, row: int) -> None:
        _, rows = self._branches.pop(row)
        self.free_log_rows += rows

    # Drafts in the making: passes over one token of each slot, before the step

    def lend(self, slot: int) -> bool:
        """Take pages for the states behind a draft's tokens; return False if not as many are
        free.
        """
        if slot not in self._scratch:
            if self._pool.num_free < self.num_pages:
                return False
            pages = self._scratch[slot] = self._take()
            self._tables[2 * len(self._pages) + slot] = pages
        return True

    def give_back(self, slot: int) -> None:
        """Take back what `lend` gave, if it did."""
        self._release(self._scratch.pop(slot, ()))

    def draft(self, slots: Int32, *, first: bool) -> StateBatch:
        """Return the states of a pass. The ``first`` reads those of the slots, and none changes
        them.
        """
        count = len(slots)
        scratch = 2 * len(self._pages) + slots
        num_pending = self._num_pending[slots] if first else np.zeros(count, np.int32)
        ones, spans = np.ones(count, np.int32), np.arange(count, dtype=np.int32)
        return self._batch(
            self._reads[slots] if first else scratch,
            np.stack([spans, num_pending + ones, scratch], axis=1),
            np.concatenate(([0], np.cumsum(num_pending)), dtype=np.int32),
            self._pending_of(slots) if first else _NONE,
            self._no_rows(count),
        )

    # Inside

    def _take(self) -> list[int]:
        return [self._allocate() for _ in range(self.num_pages)]

    def _take_writes(self, slot: int) -> None:
        writes = self._writes[slot] = self._take()
        self._stores[slot] = len(self._pages) + slot
        self._tables[self._stores[slot]] = writes
        self._busy[slot] = True

    def _set_pages(self, slot: int, pages: list[int]) -> None:
        self._pages[slot] = pages
        self._stores[slot] = slot
        self._reads[slot] = slot if pages else -1
        self._tables[slot] = pages or -1

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page >= 0:
                self._pool.release(page)

    def _set_pending(self, slot: int, rows: list[int]) -> None:
        self.free_log_rows += self._pending.pop(slot, ())
        self._num_pending[slot] = len(rows)
        if rows:
            self._pending[slot] = rows

    def _pending_of(self, slots: Int32) -> Int32:
        rows: list[int] = []
        for slot in slots.tolist():
            of = self._branches[slot][0] if slot >= len(self._pages) else slot
            rows += self._pending.get(of, ())
        return np.array(rows, np.int32)

    def _take_log(self, count: int) -> list[int]:
        return [self.free_log_rows.pop() for _ in range(count)]

    def _no_rows(self, count: int) -> Int32:
        if len(self._no_log) < count:
            self._no_log = np.full(count, -1, np.int32)
        return self._no_log[:count]

    def held(self) -> Iterable[int]:
        """Iterate over every reference to a page."""
        kept = (pages for part in self._parts.values() for _, pages in part.kept)
        lists = chain(self._pages, self._writes.values(), self._scratch.values(), kept)
        return (page for page in chain.from_iterable(lists) if page >= 0)

    def check(self) -> None:
        """Raise `RuntimeError` unless log rows add up and snapshots are known."""
        self.snapshots.check()
        rows = [*self.free_log_rows, *chain.from_iterable(self._pending.values())]
        rows += chain.from_iterable(part.log for part in self._parts.values())
        rows += chain.from_iterable(rows for _, rows in self._branches.values())
        if sorted(rows) != list(range(self._log_rows)):
            raise RuntimeError("a row of the log of states is lost, or used twice")


_NONE: Int32 = np.empty(0, np.int32)
