"""A smaller model of the same vocabulary guesses token after token, for all sequences at once.

Leviathan et al., "Fast inference from transformers via speculative decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from octavo.executor.base import Batch, Executor, StepResult
from octavo.kv_cache.cache import KvCache, peak_blocks
from octavo.kv_cache.layout import KvLayout
from octavo.models.families import program
from octavo.sampling.sampler import Sampler
from octavo.scheduler.batching import Scheduled
from octavo.scheduler.request import RequestRecord
from octavo.scheduler.sequence import Sequence as Seq
from octavo.scheduler.sequence import Status
from octavo.spec_decode.draft_checkpoint import DraftModel
from octavo.spec_decode.drafter import NO_DRAFT, Draft, Target
from octavo.spec_decode.guess import Guess, draw_next

_FEW = 32  # tokens not seen yet, with which a sequence takes part at once
_CATCH_UP = 128  # tokens a step, of texts that are read from their beginning
_IDLE = 64  # steps without drafting after which a cache may make place for another text


def make(target: Target, draft: DraftModel, num_blocks: int) -> DraftModelDrafter:
    """The drafter, in memory, with so many blocks of cache."""
    checkpoint, layout = draft.checkpoint, draft.layout
    limits, executor = target.scheduler.config, target.executor
    context = min(limits.max_model_len, checkpoint.config.context_length)
    kv = KvCache(
        layout,
        num_blocks,
        limits.max_num_seqs,
        -(-context // layout.block_size),
        enable_prefix_caching=limits.enable_prefix_caching,
    )
    drafting = executor.companion(
        checkpoint,
        program(checkpoint.config, context),
        layout,
        num_blocks=num_blocks,
        max_tokens=limits.max_num_batched_tokens,
        max_logits_rows=limits.max_num_seqs,
        max_seqs=limits.max_num_seqs,
        max_blocks_per_seq=kv.tables.shape[2],
    )
    checkpoint.release()  # the executor has its own packed copy
    return DraftModelDrafter(
        drafting, kv, target.sampler, context=context, with_probabilities=target.rejection
    )


def needed_blocks(layout: KvLayout, num_tokens: int) -> int:
    """Blocks that must be free for a text to be read: its own, and of each group one for drafts."""
    return peak_blocks(layout, num_tokens) + len(layout.groups)


class _Cache:
    """A sequence in the draft model's cache; the cache's ``num_tokens`` of it are known to agree
    with the sequence.
    """

    __slots__ = ("drafted", "slot", "used")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.drafted: list[int] = []  # written behind these, right or wrong
        self.used = 0  # when it took part last


class _Span(NamedTuple):
    """Tokens of a sequence for the first pass, and how many to draft behind them."""

    seq: Seq
    cache: _Cache
    start: int
    size: int
    most: int


class DraftModelDrafter:
    """Implements `ModelDrafter`.

    Each draft is what the target's sampler, with the state it will have, draws from the draft
    model's logits: same random numbers, penalties and masks, so that where the distributions are
    alike the tokens are the same. ``context``: tokens that the draft model takes.
    ``with_probabilities``: drafts say what they were drawn from.

    The cache is of the draft model alone. A sequence enters it when it is first drafted for, its
    text in pieces, and leaves it when it ends, is preempted, or others need the blocks and it was
    used least recently: it is then read again.
    """

    def __init__(
        self,
        executor: Executor,
        kv: KvCache,
        sampler: Sampler,
        *,
        context: int,
        with_probabilities: bool = False,
    ) -> None:
        self.kv = kv
        self._executor = executor
        self._sampler = sampler
        self._context = context
        self._with_probabilities = with_probabilities
        self._caches: dict[Seq, _Cache] = {}
        self._found: dict[Seq, int] = {}  # tokens that others have left of texts without a cache
        self._step = 0

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        """As `ModelDrafter` says."""
        self._step += 1
        for seq in [seq for seq in self._caches if seq.status is not Status.DECODING]:
            self._drop(seq)
        spans = self._plan(decoding, counts)
        if not spans:
            return [NO_DRAFT] * len(decoding)
        result = self._executor.execute(self._batch(spans))
        for seq, cache, _, size, _ in spans:
            self.kv.advance(cache.slot, size)
            self.kv.register(cache.slot, seq.token_ids)
        guesses = {
            span.seq: Guess.begin(span.seq, span.most, probabilities=self._with_probabilities)
            for span in spans
            if span.most
        }
        going = list(guesses.values())
        while going := draw_next(self._sampler, result, going):
            for guess in going:
                self._caches[guess.seq].drafted.append(guess.last_token)
            result = self._executor.execute(self._next(going))
        return [guesses[seq].draft() if seq in guesses else NO_DRAFT for seq in decoding]

    # What is computed

    def _plan(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[_Span]:
        """Who takes part: first those that lack few tokens, then texts that are being read."""
        left = self._executor.max_tokens
        spans: list[_Span] = []
        behind: list[tuple[Seq, int]] = []
        for seq, asked in zip(decoding, counts, strict=True):
            count = min(asked, self._context - len(seq.token_ids) + 1)
            if count < 1:
                continue
            cache = self._caches.get(seq)
            if cache is None:
                behind.append((seq, count))
                continue
            self._settle(seq, cache)
            start = int(self.kv.num_tokens[cache.slot])
            size = len(seq.token_ids) - start
            if size > _FEW:
                behind.append((seq, count))
            elif size <= left and self._reserve(cache, size):
                more = self.kv.capacity(cache.slot) - size
                count = min(count, 1 + more)
                self.kv.reserve(cache.slot, size + count - 1)
                cache.used = self._step
                spans.append(_Span(seq, cache, start, size, count))
                left -= size
        left = min(left, _CATCH_UP)
        behind.sort(key=lambda each: self._missing(each[0]))  # a long text keeps nobody waiting
        reading: set[RequestRecord] = set()  # its other choices find what this one leaves
        for seq, count in behind:
            cache = self._caches.get(seq)
            if left < 1 or (cache is None and seq.owner in reading):
                continue
            cache = cache or self._open(seq)
            if cache is None:
                continue
            reading.add(seq.owner)
            start = int(self.kv.num_tokens[cache.slot])
            missing = len(seq.token_ids) - start
            room = self.kv.capacity(cache.slot)
            size = min(missing, left, room)
            if size < 1:
                continue
            count = min(count, 1 + room - size) if size == missing else 0
            self.kv.reserve(cache.slot, size + max(0, count - 1))
            cache.used = self._step
            spans.append(_Span(seq, cache, start, size, count))
            left -= size
        if reading or self._step % _IDLE == 0:
            self._found.clear()  # others may find more, or what they found is gone
        return spans

    def _batch(self, spans: list[_Span]) -> Batch:
        """The first pass; logits behind each text that is whole."""
        sizes = [span.size for span in spans]
        offsets = np.cumsum([0, *sizes], dtype=np.int32)
        tokens = [span.seq.token_ids[span.start : span.start + span.size] for span in spans]
        positions = [np.arange(span.start, span.start + span.size) for span in spans]
        ends = offsets[1:] - 1
        return Batch(
            np.concatenate(tokens, dtype=np.int32),
            np.concatenate(positions, dtype=np.int32),
            offsets,
            np.array([span.cache.slot for span in spans], np.int32),
            self.kv.tables,
            ends[[span.most > 0 for span in spans]],
            self.kv.take_copies(),
        )

    def _next(self, guesses: list[Guess]) -> Batch:
        """A further pass: the token drafted last of each."""
        count = np.arange(len(guesses) + 1, dtype=np.int32)
        caches = [self._caches[guess.seq] for guess in guesses]
        slots = np.array([cache.slot for cache in caches], np.int32)
        drafted = np.array([len(cache.drafted) for cache in caches], np.int32)
        return Batch(
            np.array([guess.last_token for guess in guesses], np.int32),
            self.kv.num_tokens[slots] + drafted - 1,
            count,
            slots,
            self.kv.tables,
            count[:-1],
            self.kv.take_copies(),
        )

    # The cache

    def _settle(self, seq: Seq, cache: _Cache) -> None:
        """Of what was drafted last, the tokens that came stay; the rest is written over."""
        start = int(self.kv.num_tokens[cache.slot])
        right = 0
        # The sequence's last token is always computed, for its logits.
        for guess, token in zip(cache.drafted, seq.token_ids[start:-1], strict=False):
            if guess != token:
                break
            right += 1
        cache.drafted.clear()
        self.kv.advance(cache.slot, right)
        self.kv.trim(cache.slot)
        self.kv.register(cache.slot, seq.token_ids)

    def _open(self, seq: Seq) -> _Cache | None:
        """A cache for a text, if it has place beside the others, but for those long unused."""
        kv = self.kv
        salt = seq.owner.cache_salt
        hit = kv.lookup(seq.token_ids, salt)
        need = needed_blocks(kv.layout, len(seq.token_ids)) - kv.blocks_in_use(hit)
        while need > kv.pool.num_free or not kv.num_free_slots:
            idle = self._least_used()
            if idle is None or self._caches[idle].used > self._step - _IDLE:
                return None
            self._drop(idle)
            hit = kv.lookup(seq.token_ids, salt)
        self._found.pop(seq, None)
        cache = self._caches[seq] = _Cache(kv.open(hit, salt))
        return cache

    def _reserve(self, cache: _Cache, count: int) -> bool:
        """Place for ``count`` tokens, if need be that of who was used least recently."""
        while not self.kv.reserve(cache.slot, count):
            idle = self._least_used(cache)
            if idle is None:
                return False
            self._drop(idle)
        return True

    def _least_used(self, but: _Cache | None = None) -> Seq | None:
        """Who was used least recently and takes no part in this step; of several, who came last."""
        idle = [
            (-cache.used, seq.order, seq)
            for seq, cache in self._caches.items()
            if cache is not but and cache.used < self._step
        ]
        return max(idle, key=lambda each: each[:2])[2] if idle else None

    def _drop(self, seq: Seq) -> None:
        self.kv.close(self._caches.pop(seq).slot)

    # The rest of the protocol

    def observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        """Nothing: what came is seen in the sequences."""

    def unread(self, seq: Seq) -> int:
        """As `Reading` says: what the sequence's cache has not, or the prefixes of others."""
        cache = self._caches.get(seq)
        return self._missing(seq) - (len(cache.drafted) if cache else 0)

    def _missing(self, seq: Seq) -> int:
        """Tokens that are in no cache."""
        cache = self._caches.get(seq)
        if cache is not None:
            return len(seq.token_ids) - int(self.kv.num_tokens[cache.slot])
        found = self._found.get(seq)
        if found is None:
            hit = self.kv.lookup(seq.token_ids, seq.owner.cache_salt)
            found = self._found[seq] = hit.num_tokens
        return len(seq.token_ids) - found

    def end(self, seq: Seq) -> None:
        self._found.pop(seq, None)
        if seq in self._caches:
            self._drop(seq)

    def check_integrity(self) -> None:
        """The cache's accounts agree; `RuntimeError` otherwise."""
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
