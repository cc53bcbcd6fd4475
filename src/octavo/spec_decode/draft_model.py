"""Drafts by a smaller model of the same vocabulary, token by token, for all sequences at once.

Leviathan et al., "Fast inference from transformers via speculative decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.executor.base import Batch
from octavo.kv_cache.cache import KvCache, peak_blocks
from octavo.kv_cache.layout import KvLayout
from octavo.models.families import program
from octavo.scheduler.request import RequestRecord
from octavo.scheduler.sequence import Sequence as Seq
from octavo.scheduler.sequence import Status
from octavo.spec_decode import tuning
from octavo.spec_decode.draft_checkpoint import DraftModel
from octavo.spec_decode.drafter import NO_DRAFT, Draft, ModelDrafter, Target
from octavo.spec_decode.partial_draft import PartialDraft, extend, next_batch
from octavo.spec_decode.replay import agreement


def needed_blocks(layout: KvLayout, num_tokens: int) -> int:
    """Return the blocks that must be free to read a text: its own, and for drafts one per group and
    a second state.
    """
    return peak_blocks(layout, num_tokens) + len(layout.groups) + layout.state_blocks


@dataclass(slots=True, eq=False)
class _DraftCache:
    """A sequence's slot in the draft model's cache. The tokens that the cache counts are the
    sequence's own.
    """

    seq: Seq
    slot: int
    # Behind the sequence's, right or wrong. With recurrent layers, none are: the state is of before
    # them, so that they are read again.
    drafted: list[int] = field(default_factory=list)
    used: int = 0  # the last step it took part in
    size: int = 0  # tokens of the sequence for that step's first pass …
    most: int = 0  # … and how many to draft behind them


class DraftModelDrafter(ModelDrafter):
    """Drafts by a smaller model with a cache of its own.

    Each draft is what the target's sampler, with the state it will have, draws from the draft
    model's logits: with the same random numbers, penalties and masks, so where the two models'
    distributions are alike the tokens are the same.

    A sequence enters the cache when it is first drafted for, its text in pieces. It leaves the
    cache when it ends, is preempted, or was used least recently when others need blocks; then it is
    read again.
    """

    def __init__(self, target: Target, draft: DraftModel, num_blocks: int) -> None:
        """Load the draft model into memory with ``num_blocks`` blocks of cache."""
        limits = target.scheduler.config
        self._context = min(limits.max_model_len, draft.checkpoint.config.context_length)
        self.kv = KvCache(
            draft.layout,
            num_blocks,
            limits.max_num_seqs,
            -(-self._context // draft.layout.block_size),
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        self._executor = target.executor.companion(
            draft.checkpoint,
            program(draft.checkpoint.config, self._context),
            draft.layout,
            num_blocks=num_blocks,
            max_tokens=limits.max_num_batched_tokens,
            max_logits_rows=limits.max_num_seqs,
            max_seqs=limits.max_num_seqs,
            max_blocks_per_seq=self.kv.tables.shape[2],
        )
        draft.checkpoint.release()  # the executor has its own packed copy
        self._sampler = target.sampler
        self._rejection = target.rejection
        self._caches: dict[Seq, _DraftCache] = {}
        self._found: dict[Seq, int] = {}  # tokens of texts without a slot that the cache has
        self._step = 0

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        """As `ModelDrafter` says."""
        self._step += 1
        for seq in [seq for seq in self._caches if seq.status is not Status.DECODING]:
            self._drop(seq)
        caches = self._plan(decoding, counts)
        if not caches:
            return [NO_DRAFT] * len(decoding)
        result = self._executor.execute(self._first_batch(caches))
        for cache in caches:
            self.kv.advance(cache.slot, cache.size)
            self.kv.register(cache.slot, cache.seq.token_ids)
            self.kv.commit_state(cache.slot)
        drafts = {
            cache.seq: PartialDraft(cache.seq, cache.most, probabilities=self._rejection)
            for cache in caches
            if cache.most
        }
        going = list(drafts.values())
        passes = 0
        state = self.kv.state
        while going := extend(self._sampler, result, going):
            if state is not None:
                going = [draft for draft in going if state.lend(self._caches[draft.seq].slot)]
                if not going:
                    break
            caches = [self._caches[draft.seq] for draft in going]
            if state is None:
                for draft, cache in zip(going, caches, strict=True):
                    cache.drafted.append(draft.last_token)
            slots = np.array([cache.slot for cache in caches], np.int32)
            copies = self.kv.take_copies()
            batch = next_batch(going, slots, passes, self.kv, copies, state)
            result = self._executor.execute(batch)
            passes += 1
        if state is not None:
            for seq in drafts:
                state.give_back(self._caches[seq].slot)
        return [drafts[seq].draft() if seq in drafts else NO_DRAFT for seq in decoding]

    def _plan(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[_DraftCache]:
        """Return who takes part: first those that lack few tokens, then texts to be read."""
        taking: list[_DraftCache] = []
        behind: list[tuple[int, int, Seq, int]] = []  # tokens missing, order, sequence, count
        left = self._executor.max_tokens
        for seq, count in zip(decoding, counts, strict=True):
            most = min(count, self._context - len(seq.token_ids) + 1)
            if most < 1:
                continue
            cache = self._caches.get(seq)
            if cache is not None:
                self._settle(cache)
            missing = self._missing(seq)
            if cache is None or missing > tuning.DRAFT_MODEL_FEW_TOKENS:
                behind.append((missing, len(behind), seq, most))
            elif missing <= left and self._make_room(cache, missing):
                taking.append(self._take(cache, missing, most))
                left -= missing
        left = min(left, tuning.DRAFT_MODEL_READING_TOKENS)
        reading: set[RequestRecord] = set()  # its other choices find what this one leaves
        for _, _, seq, most in sorted(behind):  # a long text keeps nobody waiting
            cache = self._caches.get(seq)
            if left < 1 or (cache is None and seq.owner in reading):
                continue
            cache = cache or self._open(seq)
            if cache is None:
                continue
            reading.add(seq.owner)
            missing = self._missing(seq)
            size = min(missing, left, self.kv.capacity(cache.slot))
            if size >= 1:
                taking.append(self._take(cache, size, most if size == missing else 0))
                left -= size
        if reading or self._step % tuning.DRAFT_MODEL_IDLE_STEPS == 0:
            self._found.clear()  # others may find more, or what they found is gone
        return taking

    def _take(self, cache: _DraftCache, size: int, most: int) -> _DraftCache:
        """Reserve places for ``size`` tokens and, as far as there is room, a draft behind them."""
        cache.used, cache.size = self._step, size
        cache.most = min(most, 1 + self.kv.capacity(cache.slot) - size)
        self.kv.reserve(cache.slot, size + max(0, cache.most - 1))
        return cache

    def _first_batch(self, caches: list[_DraftCache]) -> Batch:
        """Return the first pass, with logits behind each text that is complete."""
        offsets = np.cumsum([0, *(cache.size for cache in caches)], dtype=np.int32)
        slots = np.array([cache.slot for cache in caches], np.int32)
        tokens, positions = [], []
        for cache, start in zip(caches, self.kv.num_tokens[slots].tolist(), strict=True):
            end = start + cache.size
            tokens.append(cache.seq.token_ids[start:end])
            positions.append(np.arange(start, end))
        state = None
        if self.kv.state is not None:
            totals = [len(cache.seq.token_ids) for cache in caches]
            state = self.kv.state.plan(slots, offsets, 0, totals)
        return Batch(
            np.concatenate(tokens, dtype=np.int32),
            np.concatenate(positions, dtype=np.int32),
            offsets,
            slots,
            self.kv.tables,
            (offsets[1:] - 1)[[cache.most > 0 for cache in caches]],
            self.kv.take_copies(),
            state,
        )

    # The cache

    def _settle(self, cache: _DraftCache) -> None:
        """Keep the tokens drafted last that became output; the others will be overwritten."""
        start = int(self.kv.num_tokens[cache.slot])
        # The sequence's last token is always computed, for its logits.
        right = agreement(cache.drafted, cache.seq.token_ids[start:-1])
        cache.drafted.clear()
        self.kv.advance(cache.slot, right)
        self.kv.trim(cache.slot)
        self.kv.register(cache.slot, cache.seq.token_ids)

    def _open(self, seq: Seq) -> _DraftCache | None:
        """Open a slot for a text if it fits beside the others, except those unused for long."""
        kv = self.kv
        salt = seq.owner.scheduling.cache_salt
        while True:
            hit = kv.lookup(seq.token_ids, salt)
            need = needed_blocks(kv.layout, len(seq.token_ids)) - kv.blocks_in_use(hit)
            if need <= kv.pool.num_free and kv.num_free_slots:
                break
            idle = self._least_used()
            if idle is None or self._caches[idle].used > self._step - tuning.DRAFT_MODEL_IDLE_STEPS:
                return None
            self._drop(idle)
        self._found.pop(seq, None)
        cache = self._caches[seq] = _DraftCache(seq, kv.open(hit, salt))
        return cache

    def _make_room(self, cache: _DraftCache, count: int) -> bool:
        """Reserve places for ``count`` tokens, if necessary those of the least recently used."""
        while not self.kv.reserve(cache.slot, count):
            idle = self._least_used(cache)
            if idle is None:
                return False
            self._drop(idle)
        return True

    def _least_used(self, but: _DraftCache | None = None) -> Seq | None:
        """Return the sequence that was used least recently and takes no part in this step; of
        several, the one that came last.
        """
        idle = [
            seq
            for seq, cache in self._caches.items()
            if cache is not but and cache.used < self._step
        ]
        return max(idle, key=lambda seq: (-self._caches[seq].used, seq.order), default=None)

    def _drop(self, seq: Seq) -> None:
        self.kv.close(self._caches.pop(seq).slot)

    # The rest of the protocol

    def unread(self, seq: Seq) -> int:
        """As `ModelDrafter` says: what neither the sequence's slot nor a cached prefix has."""
        cache = self._caches.get(seq)
        return self._missing(seq) - (len(cache.drafted) if cache else 0)

    def _missing(self, seq: Seq) -> int:
        """Return the number of the sequence's tokens that are not in the cache."""
        if seq in self._caches:
            return len(seq.token_ids) - int(self.kv.num_tokens[self._caches[seq].slot])
        if seq not in self._found:
            hit = self.kv.lookup(seq.token_ids, seq.owner.scheduling.cache_salt)
            self._found[seq] = hit.num_tokens
        return len(seq.token_ids) - self._found[seq]

    def end(self, seq: Seq) -> None:
        self._found.pop(seq, None)
        if seq in self._caches:
            self._drop(seq)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless every slot and block is free or held for a sequence."""
        kv = self.kv
        if len(self._caches) + kv.num_free_slots != len(kv.num_tokens):
            raise RuntimeError("a slot of the draft model's cache is neither free nor a sequence's")
        if not self._caches and kv.pool.num_used:
            raise RuntimeError(f"nobody holds {kv.pool.num_used} blocks of the draft model's cache")
        if self._caches:
            kv.check()

    def close(self) -> None:
        for seq in list(self._caches):
            self._drop(seq)
        self._executor.close()
