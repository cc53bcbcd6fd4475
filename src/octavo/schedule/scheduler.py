"""Who runs next.

Every step: decode rows first, then chunks of prompts, oldest first, under one token budget; a
waiting request joins as soon as there is a slot, budget and room in the cache. When blocks run
out, the latest arrival gives its own back and is computed again later, ahead of newcomers; so the
oldest always finishes.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.execute.batch import Batch
from octavo.kv.cache import NO_HIT, KvCache
from octavo.kv.layout import KvLayout
from octavo.kv.prefix import Hash, chain_hash
from octavo.schedule.config import SchedulerConfig
from octavo.schedule.request import AdmissionError, FinishReason, Request, RequestRecord
from octavo.schedule.sequence import RequestState, Sequence, Status

Int32 = npt.NDArray[np.int32]
BY_ARRIVAL = attrgetter("order")


class Chunk(NamedTuple):
    """``size`` known tokens of a sequence from position ``start`` on."""

    seq: Sequence
    start: int
    size: int


class PromptRows(NamedTuple):
    """Logits rows ``row`` … that predict the prompt's tokens at ``position`` …"""

    seq: Sequence
    row: int
    position: int
    size: int


@dataclass(slots=True, eq=False)
class Scheduled:
    """One step: the batch, and whom its logits are for. Valid until the next `schedule`."""

    batch: Batch
    decodes: list[Sequence]  # the batch's first sequences, a token each
    chunks: list[Chunk]  # the others
    samples: list[Sequence]  # who draws a token …
    sample_rows: list[int]  # … from which row of logits (n > 1: first tokens share a row)
    prompt_rows: list[PromptRows]
    stale: bool = False  # a sequence in it has ended since

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *(chunk.seq for chunk in self.chunks)]


class Scheduler:
    """Owns the queue, the running sequences and their cache. Not thread-safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        layout: KvLayout,
        num_blocks: int,
        *,
        hasher: Hash = chain_hash,
    ) -> None:
        self.config = config
        self.kv = KvCache(
            layout,
            num_blocks,
            config.max_num_seqs,
            -(-config.max_model_len // layout.block_size),
            enable_prefix_caching=config.enable_prefix_caching,
            hasher=hasher,
        )
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []  # both in order of arrival
        self.decoding: list[Sequence] = []
        self.waiting_tokens = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0  # of requests that were scheduled
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._arrivals = 0
        self._reserved_slots = 0  # for sequences that will fork
        self._blocked: tuple[Sequence, int] | None = None  # queue head, free blocks when refused
        self._scheduled: Scheduled | None = None
        self._suspects: deque[RequestState] = deque()  # to be run alone after a failed step
        # The batch's arrays, written in place.
        self._last_token: Int32 = np.zeros(config.max_num_seqs, dtype=np.int32)
        self._decode_slots: Int32 = np.empty(0, dtype=np.int32)
        self._decodes_changed = False
        self._token_ids: Int32 = np.empty(config.max_num_batched_tokens, dtype=np.int32)
        self._positions: Int32 = np.empty(config.max_num_batched_tokens, dtype=np.int32)
        self._seq_offsets: Int32 = np.arange(config.max_num_seqs + 1, dtype=np.int32)
        self._seq_slots: Int32 = np.empty(config.max_num_seqs, dtype=np.int32)
        self._counting: Int32 = np.arange(
            max(config.max_num_batched_tokens, config.max_model_len) + 1, dtype=np.int32
        )
        self._counting_list = list(range(config.max_num_seqs))

    # Admission

    def check(self, request: Request) -> int:
        """The output tokens this request may have; `AdmissionError` if it can never run."""
        prompt = len(request.prompt_token_ids)
        limit = self.config.max_model_len
        if prompt == 0:
            raise AdmissionError("the prompt has no tokens; at least 1 is needed", "prompt")
        if prompt >= limit:
            raise AdmissionError(
                f"the prompt has {prompt} tokens; the context of {limit} tokens leaves room for "
                f"{limit - 1} and at least 1 new token",
                "prompt",
            )
        wanted = request.params.max_tokens
        max_tokens = limit - prompt if wanted is None else wanted
        if prompt + max_tokens > limit:
            raise AdmissionError(
                f"{prompt} prompt tokens + {max_tokens} max_tokens = {prompt + max_tokens}, more "
                f"than the context of {limit} tokens",
                "max_tokens",
            )
        if request.params.n > self.config.max_num_seqs:
            raise AdmissionError(
                f"n is {request.params.n}, more than max_num_seqs {self.config.max_num_seqs}", "n"
            )
        # The last token is never put through the model.
        blocks = self.kv.peak_blocks(prompt + max_tokens - 1)
        if blocks > self.kv.pool.num_blocks:
            raise AdmissionError(
                f"{prompt} prompt tokens + {max_tokens} max_tokens need {blocks} KV blocks of "
                f"{self.kv.block_size} tokens; there are {self.kv.pool.num_blocks}",
                "max_tokens",
            )
        return max_tokens

    def check_queue(
        self, num_prompt_tokens: int, pending: int = 0, pending_tokens: int = 0
    ) -> None:
        """Refuse when the queue is full. ``pending``: requests on their way to it."""
        requests, tokens = self.config.max_num_queued_reqs, self.config.max_num_queued_tokens
        queued = len(self.waiting) + pending
        if requests is not None and queued >= requests:
            raise AdmissionError(f"{queued} requests wait, of at most {requests}", retryable=True)
        queued_tokens = self.waiting_tokens + pending_tokens
        if tokens is not None and queued and queued_tokens + num_prompt_tokens > tokens:
            raise AdmissionError(
                f"{queued_tokens} prompt tokens wait; with {num_prompt_tokens} more they exceed "
                f"{tokens}",
                retryable=True,
            )

    def add(self, request: Request, record: RequestRecord) -> RequestState:
        """Queue a request; it joins the next step if there is room."""
        state = RequestState(request, record, self.check(request))
        self._arrivals += 1
        prompt = array("i", request.prompt_token_ids)
        for choice in range(request.params.n):
            seq = Sequence(state, choice, (self._arrivals, choice), prompt[:])
            seq.status = Status.FORKING if choice else Status.WAITING
            state.sequences.append(seq)
        state.num_unfinished = len(state.sequences)
        record.finish_reasons = [None] * len(state.sequences)
        self.waiting.append(state.sequences[0])
        self.waiting_tokens += len(prompt)
        return state

    # A step

    def schedule(self, now: float) -> Scheduled | None:
        """The next step, or None when there is nothing to compute."""
        preemptions = self.num_preemptions
        self._grow_decodes()
        budget = self.config.max_num_batched_tokens - len(self.decoding)
        rows = self.config.logits_rows - len(self.decoding)
        chunks: list[Chunk] = []
        for seq in self.prefilling[:]:
            if (
                budget
                and seq.status is Status.PREFILLING
                and (chunk := self._chunk(seq, budget, rows))
            ):
                chunks.append(chunk)
                budget -= chunk.size
                rows -= self._rows(chunk)
        while budget and rows and self.num_preemptions == preemptions:
            admitted = self._admit(now)
            if admitted is None:
                break
            if chunk := self._chunk(admitted, budget, rows):
                chunks.append(chunk)
                budget -= chunk.size
                rows -= self._rows(chunk)
        if budget and chunks:
            chunks[0] = self._extend(chunks[0], budget, rows)
        if not self.decoding and not chunks:
            return None
        self._scheduled = self._batch(chunks)
        return self._scheduled

    def _grow_decodes(self) -> None:
        """A slot in the cache for the next token of every decoding sequence."""
        kv = self.kv
        slots = self._slots_of_decodes()
        if not len(slots):
            return
        full = kv.num_tokens[slots] % kv.block_size == 0
        needing = [self.decoding[index] for index in np.flatnonzero(full)]
        if kv.shared_tails:
            needing += [seq for seq in self.decoding if seq.slot in kv.shared_tails]
            needing.sort(key=BY_ARRIVAL)
        for seq in needing:
            while seq.status is Status.DECODING and not kv.reserve(seq.slot, 1):
                self._preempt(self._latest())

    def _chunk(self, seq: Sequence, budget: int, rows: int) -> Chunk | None:
        """As many of the sequence's missing tokens as budget, rows and blocks allow."""
        start = int(self.kv.num_tokens[seq.slot])
        missing = len(seq.token_ids) - start
        count = min(missing, budget)
        if missing > self.config.max_num_batched_tokens and self._others_behind(seq):
            count = min(count, max(1, budget // 2))  # a long prompt leaves room for short ones
        if seq.owner.scores_prompt:
            count = min(count, rows)
        while (room := self.kv.room(seq.slot)) < 1 and (latest := self._latest()) is not seq:
            self._preempt(latest)
        count = min(count, room)
        if rows < 1 and start + count == len(seq.token_ids):
            count -= 1
        if count < 1:
            return None
        self.kv.reserve(seq.slot, count)
        return Chunk(seq, start, count)

    def _extend(self, chunk: Chunk, budget: int, rows: int) -> Chunk:
        """The budget nobody else took goes to the oldest prompt."""
        seq, start, count = chunk
        more = min(len(seq.token_ids) - start - count, budget, self.kv.room(seq.slot) - count)
        if more < 1 or rows < 1 or seq.owner.scores_prompt:
            return chunk
        self.kv.reserve(seq.slot, count + more)
        return Chunk(seq, start, count + more)

    def _others_behind(self, seq: Sequence) -> bool:
        return seq is not self.prefilling[-1] or (
            bool(self.waiting) and self.kv.num_free_slots > self._reserved_slots
        )

    def _rows(self, chunk: Chunk) -> int:
        """Rows of logits a chunk takes."""
        seq, start, count = chunk
        if seq.owner.scores_prompt:
            return count
        return int(start + count == len(seq.token_ids))

    def _admit(self, now: float) -> Sequence | None:
        """Let the queue's head in, if all its known tokens fit beside those who run."""
        seq = self._next_waiting()
        if seq is None:
            return None
        kv = self.kv
        forks = len(seq.owner.forking) if seq.choice == 0 else 0
        if kv.num_free_slots - self._reserved_slots < 1 + forks:
            return None
        free = kv.pool.num_free
        running = len(self.decoding) + len(self.prefilling)
        if running and self._blocked is not None:
            head, free_then = self._blocked
            if head is seq and free <= free_then:
                return None
        salt = seq.owner.request.cache_salt
        hit = NO_HIT if seq.owner.scores_prompt else kv.lookup(seq.token_ids, salt)
        if running:
            # Beside its own blocks, those promised to prompts under way and the next block of
            # everyone who runs must stay free: else it would soon be preempted again.
            promised = sum(
                max(0, kv.peak_blocks(len(other.token_ids)) - kv.held_blocks(other.slot))
                for other in self.prefilling
            )
            reserve = running * len(kv.layout.groups)
            need = kv.peak_blocks(len(seq.token_ids)) - kv.blocks_in_use(hit)
            if need + promised + reserve > free:
                self._blocked = (seq, free)
                return None
        self._blocked = None
        self.waiting.remove(seq)
        seq.slot = kv.open(hit, salt)
        seq.status = Status.PREFILLING
        insort(self.prefilling, seq, key=BY_ARRIVAL)
        self._reserved_slots += forks
        self.waiting_tokens -= len(seq.token_ids)
        record = seq.owner.record
        if record.scheduled is None:
            record.scheduled = now
            record.cached_tokens = hit.num_tokens
            self.prompt_tokens += len(seq.token_ids)
            if self.config.enable_prefix_caching:
                self.prefix_queries += len(seq.token_ids)
                self.prefix_hits += hit.num_tokens
        return seq

    def _next_waiting(self) -> Sequence | None:
        """The queue's head; while a suspect must run alone, only its own."""
        while self._suspects and self._suspects[0].num_unfinished == 0:
            self._suspects.popleft()
        if not self._suspects:
            return self.waiting[0] if self.waiting else None
        suspect = self._suspects[0]
        return next((seq for seq in self.waiting if seq.owner is suspect), None)

    def _latest(self) -> Sequence:
        """The running sequence that came last."""
        return max(
            (running[-1] for running in (self.decoding, self.prefilling) if running), key=BY_ARRIVAL
        )

    def _preempt(self, seq: Sequence) -> None:
        """Take everything from a running sequence; it will be computed again."""
        self._requeue(seq)
        seq.owner.record.preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, seq: Sequence) -> None:
        """Back into the queue, to the place of its arrival."""
        self._leave(seq)
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=BY_ARRIVAL)
        self.waiting_tokens += len(seq.token_ids)

    def _leave(self, seq: Sequence) -> None:
        """Out of the running ones; slot and blocks are free."""
        if seq.status is Status.DECODING:
            self.decoding.remove(seq)
            self._decodes_changed = True
        else:
            self.prefilling.remove(seq)
            if seq.choice == 0:
                self._reserved_slots -= len(seq.owner.forking)
        self.kv.close(seq.slot)
        seq.slot = -1
        self._blocked = None

    def _slots_of_decodes(self) -> Int32:
        if self._decodes_changed:
            self._decode_slots = np.array([seq.slot for seq in self.decoding], dtype=np.int32)
            self._decodes_changed = False
        return self._decode_slots

    def _batch(self, chunks: list[Chunk]) -> Scheduled:
        """Decode rows, then chunks, as flat arrays."""
        kv = self.kv
        slots = self._slots_of_decodes()
        decodes = len(slots)
        np.take(self._last_token, slots, out=self._token_ids[:decodes])
        np.take(kv.num_tokens, slots, out=self._positions[:decodes])
        samples = self.decoding[:]
        sample_rows = self._counting_list[:decodes]
        if not chunks:
            seq_slots, offsets, rows = (
                slots,
                self._seq_offsets[: decodes + 1],
                self._counting[:decodes],
            )
            return Scheduled(
                self._flat(decodes, offsets, seq_slots, rows),
                samples[:],
                [],
                samples,
                sample_rows,
                [],
            )
        prompt_rows: list[PromptRows] = []
        total = decodes
        offsets = self._counting[: decodes + len(chunks) + 1].copy()
        seq_slots = self._seq_slots[: decodes + len(chunks)]
        seq_slots[:decodes] = slots
        rows_of: list[Int32] = [self._counting[:decodes]]
        num_rows = decodes
        for index, chunk in enumerate(chunks):
            seq, start, count = chunk
            self._token_ids[total : total + count] = seq.token_ids[start : start + count]
            self._positions[total : total + count] = self._counting[start : start + count]
            seq_slots[decodes + index] = seq.slot
            taken = self._rows(chunk)
            if taken:
                if seq.owner.scores_prompt:
                    first = max(start, seq.num_scored)
                    size = min(start + count, seq.owner.num_prompt_tokens - 1) - first
                    if size > 0:
                        row = num_rows + first - start
                        prompt_rows.append(PromptRows(seq, row, first + 1, size))
                rows_of.append(self._counting[total + count - taken : total + count])
                num_rows += taken
            total += count
            offsets[decodes + index + 1] = total
            if start + count == len(seq.token_ids):
                forking = seq.owner.forking if seq.choice == 0 else []
                samples += [seq, *forking]
                sample_rows += [num_rows - 1] * (1 + len(forking))
        return Scheduled(
            self._flat(total, offsets, seq_slots, np.concatenate(rows_of)),
            self.decoding[:],
            chunks,
            samples,
            sample_rows,
            prompt_rows,
        )

    def _flat(self, total: int, offsets: Int32, seq_slots: Int32, rows: Int32) -> Batch:
        return Batch(
            self._token_ids[:total],
            self._positions[:total],
            offsets,
            seq_slots,
            self.kv.tables,
            rows,
            self.kv.take_copies(),
        )

    # After a step

    def commit(self, scheduled: Scheduled, token_ids: Items[int]) -> None:
        """The step has been computed; ``token_ids`` are what its ``samples`` drew.

        Sequences that ended meanwhile are left out.
        """
        self._scheduled = None
        kv = self.kv
        decodes = scheduled.decodes
        if scheduled.stale:
            alive = [seq.slot >= 0 for seq in decodes]
            slots = np.array([seq.slot for seq in decodes if seq.slot >= 0], dtype=np.int32)
            drawn = [token for token, here in zip(token_ids, alive, strict=False) if here]
            decodes = [seq for seq in decodes if seq.slot >= 0]
        else:
            slots = self._decode_slots
            drawn = list(token_ids[: len(decodes)])
        if decodes:
            kv.num_tokens[slots] += 1
            self._last_token[slots] = drawn
            for index in np.flatnonzero(kv.num_tokens[slots] % kv.block_size == 0).tolist():
                seq = decodes[index]
                kv.register(seq.slot, seq.token_ids)
        for seq, start, count in scheduled.chunks:
            if seq.slot < 0:
                continue
            kv.advance(seq.slot, count)
            kv.register(seq.slot, seq.token_ids)
            if seq.owner.scores_prompt:
                scored = min(start + count, seq.owner.num_prompt_tokens - 1)
                seq.num_scored = max(seq.num_scored, scored)
            if start + count == len(seq.token_ids):
                self._begin_decoding(seq)
        for seq, token in zip(scheduled.samples, token_ids, strict=True):
            if seq.slot >= 0:
                seq.token_ids.append(token)
        for seq in scheduled.samples[len(scheduled.decodes) :]:
            if seq.slot >= 0:
                self._last_token[seq.slot] = seq.token_ids[-1]
        if self._suspects and scheduled.samples:
            self._clear_suspect(scheduled.samples[0].owner)

    def _begin_decoding(self, seq: Sequence) -> None:
        """The prompt is through: from now on a token a step, for the sequence and its forks."""
        self.prefilling.remove(seq)
        begun = [seq]
        if seq.choice == 0:
            for fork in seq.owner.forking:
                fork.slot = self.kv.fork(seq.slot)
                self._reserved_slots -= 1
                begun.append(fork)
        for each in begun:
            each.status = Status.DECODING
            insort(self.decoding, each, key=BY_ARRIVAL)
        self._decodes_changed = True

    def finish(self, seq: Sequence, reason: FinishReason) -> bool:
        """End a sequence in whatever state; True if it was its request's last."""
        if seq.status is Status.FINISHED:
            return False
        if seq.slot >= 0:
            self._leave(seq)
            if self._scheduled is not None:
                self._scheduled.stale = True
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self.waiting_tokens -= len(seq.token_ids)
        seq.status = Status.FINISHED
        seq.owner.record.finish_reasons[seq.choice] = reason
        seq.owner.num_unfinished -= 1
        return seq.owner.num_unfinished == 0

    def end(self, state: RequestState, reason: FinishReason) -> list[Sequence]:
        """End what is left of a request, whatever it is doing; the sequences that ended now."""
        unfinished = [seq for seq in state.sequences if seq.status is not Status.FINISHED]
        for seq in unfinished:
            self.finish(seq, reason)
        return unfinished

    def retry_alone(self, scheduled: Scheduled) -> bool:
        """The step failed and nothing it should have written counts. Whose fault it was cannot be
        seen, so each of its requests will run alone until it draws a token.

        False if one request was alone in the step: then it is that one's fault.
        """
        self._scheduled = None
        owners = {id(seq.owner): seq.owner for seq in scheduled.sequences if seq.slot >= 0}
        if len(owners) < 2:
            return False
        for seq in self.decoding + self.prefilling:
            self._requeue(seq)
        self._suspects = deque(sorted(owners.values(), key=lambda state: state.sequences[0].order))
        return True

    def _clear_suspect(self, state: RequestState) -> None:
        """It drew a token alone, so it is not at fault: back to its place in the queue."""
        if self._suspects[0] is state:
            self._suspects.popleft()
            for seq in self.decoding + self.prefilling:
                self._requeue(seq)

    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding)

    def check_idle(self) -> None:
        """With no request left nothing may be held; `RuntimeError` otherwise. Costs nothing."""
        kv = self.kv
        if self.has_work() or kv.pool.num_used or kv.num_free_slots != self.config.max_num_seqs:
            raise RuntimeError(
                f"no request is left, but {kv.pool.num_used} of {kv.pool.num_blocks} blocks and "
                f"{self.config.max_num_seqs - kv.num_free_slots} slots are held"
            )

    def check_integrity(self) -> None:
        """Cache, queue and running sequences agree; `RuntimeError` otherwise."""
        self.kv.check()
        running = self.decoding + self.prefilling
        slots = {seq.slot for seq in running}
        if len(slots) != len(running) or -1 in slots:
            raise RuntimeError("two running sequences share a slot, or one has none")
        if len(slots) + self.kv.num_free_slots != self.config.max_num_seqs:
            raise RuntimeError("a slot is neither free nor running")
        if self._reserved_slots != sum(
            len(seq.owner.forking) for seq in self.prefilling if seq.choice == 0
        ):
            raise RuntimeError("slots are reserved for nobody")
        if self.waiting_tokens != sum(len(seq.token_ids) for seq in self.waiting):
            raise RuntimeError("the queue's tokens are miscounted")
