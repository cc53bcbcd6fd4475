"""The bytes of the pool's blocks, as an executor lends them to other tiers."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]


class Arena(Protocol):
    def export_blocks(self, blocks: Int32, into: Bytes | None = None) -> Bytes:
        """[len(blocks), block_bytes], a copy: in ``into``, or else in memory of its own."""
        ...

    def import_blocks(self, blocks: Int32, data: Bytes) -> None: ...
