"""Drafts in a step: a proposer's guesses, cut to what the step has left after decodes and prompts,
each with reserved positions in the cache.
"""

from __future__ import annotations

from typing import Protocol

from octavo.kv_cache.cache import Int32, KvCache
from octavo.scheduler.batching import Branches
from octavo.scheduler.sequence import Sequence


class Proposer(Protocol):
    """Guesses the next tokens, which the model then checks in one pass."""

    def propose(self, decoding: list[Sequence], num_tokens: int, room: int) -> list[list[int]]:
        """Return a draft for each of the sequences, empty for those that get none. Must not raise.

        The step has ``num_tokens`` tokens without drafts, and ``room`` for so many more in all.
        """
        ...

    def alternatives(self) -> dict[int, list[list[int]]]:
        """Return other guesses at the same tokens as the drafts just proposed, by the index of
        their sequence, the most promising first; they are checked in the same pass as far as they
        fit. Each costs its tokens and one more. Must not raise.
        """
        ...


def fit_drafts(
    kv: KvCache, decoding: list[Sequence], slots: Int32, drafts: list[list[int]], room: int
) -> list[list[int]]:
    """Cut drafts to what can be used, ``room`` tokens in all, and reserve their positions.
    ``slots`` are those of the decoding sequences.

    A draft may be as long as all tokens to come but the last: that one follows it anyway.
    """
    if not any(drafts):
        return drafts
    if kv.state is not None:
        room = min(room, len(kv.state.free_log_rows))
    reserved = (kv.num_blocks[slots] * kv.block_size - kv.num_tokens[slots]).tolist()
    fitted: list[list[int]] = []
    for seq, guess, places in zip(decoding, drafts, reserved, strict=True):
        count = min(len(guess), room, seq.num_to_come - 1)
        if count >= places:
            count = min(count, kv.capacity(seq.slot) - 1)
            kv.reserve(seq.slot, 1 + count)
        fitted.append(guess[:count])
        room -= count
    return fitted


def fit_branches(
    kv: KvCache,
    decoding: list[Sequence],
    alternatives: dict[int, list[list[int]]],
    drafts: list[list[int]],
    room: int,
) -> Branches:
    """Give rows of the block tables to as many of the alternatives as still fit beside the drafts,
    cut as those are. A sequence without a draft gets none.
    """
    left = room - sum(map(len, drafts))
    if kv.state is not None:
        left = min(left, len(kv.state.free_log_rows) - sum(map(len, drafts)))
    branches: Branches = {}
    for index, guesses in alternatives.items():
        seq = decoding[index]
        for guess in guesses:
            count = min(len(guess), left - 1, seq.num_to_come - 1)
            if count < 1 or not drafts[index]:
                break
            if guess[:count] == drafts[index][:count]:
                continue
            row = kv.branch(seq.slot, 1 + count)
            if row is None:
                return branches
            branches.setdefault(index, []).append((row, guess[:count]))
            left -= 1 + count
    return branches
