"""States that know which tokens they are behind: a step over them is checked, and applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.state_batch import StateBatch

Int32 = npt.NDArray[np.int32]


class WrongContent(BaseException):
    """No `Exception`, so that the engine does not take it for a failed step."""


class HashedStates:
    """A state is a hash of the tokens that were applied to it, one by one, 0 before the first. Page
    i of it begins with that hash + i, in ``content`` [blocks, …].
    """

    def __init__(
        self,
        content: npt.NDArray[np.int64],
        num_pages: int,
        hasher: Callable[[int, int], int],
    ) -> None:
        self._content = content
        self._num_pages = num_pages
        self._hash = hasher
        self._log: dict[int, int] = {}  # the token of each row

    def advance(
        self,
        step: StateBatch,
        offsets: Int32,
        token_ids: Int32,
        before: Sequence[int],
        pool: BlockPool[Any],
    ) -> list[list[tuple[Int32, int]]]:
        """Bring each span's state through its tokens. ``before``: the hash of all tokens in front
        of each span. Return, for each span, pages and the hash that is to be stored there.
        """
        assert step.tables.shape[1] == self._num_pages
        assert step.stores.tolist() == sorted(step.stores.tolist())
        assert len(step.log) == offsets[-1]
        assert len(step.pending_offsets) == len(before) + 1 == len(offsets)
        assert step.pending_offsets[-1] == len(step.pending)
        logged = [row for row in step.log.tolist() if row >= 0]
        assert len({*logged}) == len(logged)
        assert not {*logged} & {*step.pending.tolist()}, "a row of the log is written and read"
        read: list[set[int]] = []
        stored: list[list[tuple[Int32, int]]] = []
        for index, expected in enumerate(before):
            passed = [self._read(step, index, read)]
            begin, end = step.pending_offsets[index : index + 2]
            for row in step.pending[begin:end].tolist():
                passed.append(self._hash(passed[-1], self._log[row]))
            if passed[-1] != expected:
                raise WrongContent(f"the state of span {index} is behind other tokens")
            for token in token_ids[offsets[index] : offsets[index + 1]].tolist():
                passed.append(self._hash(passed[-1], token))
            stores = [each[1:] for each in step.stores.tolist() if each[0] == index]
            stored.append([(step.tables[row], passed[applied]) for applied, row in stores])
        written: set[int] = set()
        for index, stores_of in enumerate(stored):
            for page in (page for pages, _ in stores_of for page in pages.tolist()):
                if page < 0 or pool.refs[page] != 1 or pool.contents[page] or page in written:
                    raise WrongContent(f"a state is written to block {page}")
                if any(page in theirs for at, theirs in enumerate(read) if at != index):
                    raise WrongContent(f"block {page} is written while another span reads it")
                written.add(page)
        for row, token in zip(step.log.tolist(), token_ids.tolist(), strict=True):
            if row >= 0:
                self._log[row] = token
        return stored

    def _read(self, step: StateBatch, index: int, read: list[set[int]]) -> int:
        """Return a span's state, and note the pages."""
        read.append(set())
        if step.reads[index] < 0:
            return 0
        pages = step.tables[step.reads[index]]
        assert (pages >= 0).all()
        read[-1].update(pages.tolist())
        assert len(read[-1]) == len(pages)
        values = self._content[pages, 0] - np.arange(len(pages))
        if (values != values[0]).any():
            raise WrongContent(f"the pages of span {index} are of several states")
        return int(values[0])

    def store(self, pages: Int32, state: int) -> None:
        self._content[pages, 0] = state + np.arange(len(pages))
