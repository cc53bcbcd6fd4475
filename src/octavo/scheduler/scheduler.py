"""Who runs next.

Every step: decode rows first, then chunks of prompts, under one budget of tokens and, with a
target, of seconds (scheduler/budget.py); a waiting request joins as soon as there is a slot, budget
and room in the cache. When blocks run out, somebody gives its own back and is computed again later.
Who is served first, who is let in next and who gives way is the policy's to say
(scheduler/policies/): by default whoever came first, whoever came first, and whoever came last, so
that the oldest always finishes.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from itertools import islice, repeat
from math import inf
from typing import Any

import numpy as np

from octavo.kv_cache.cache import Int32, KvCache
from octavo.kv_cache.layout import KvLayout
from octavo.kv_cache.prefix_index import Hash, chain_hash
from octavo.kv_cache.prefix_lookup import NO_HIT, Hit
from octavo.scheduler import admission
from octavo.scheduler.batching import BatchBuilder, Branches, Chunk, Scheduled
from octavo.scheduler.budget import Budget, Timing
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.drafting import Proposer, draft
from octavo.scheduler.policies.base import BY_ARRIVAL
from octavo.scheduler.policies.choice import policy_of
from octavo.scheduler.request import FinishReason, Request, RequestRecord
from octavo.scheduler.room import Room
from octavo.scheduler.sequence import RequestState, Sequence, Status
from octavo.scheduler.shedding import Shedding
from octavo.scheduler.suspects import Suspects
from octavo.scheduler.waiting import Waiting

_LOOKED_AT = 32  # of those who wait, for prompts shorter than one under way


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
            max_branches=config.max_branches,
            enable_prefix_caching=config.enable_prefix_caching,
            hasher=hasher,
        )
        self.policy = policy_of(config.policy)
        self.shedding = Shedding(
            config.policy.max_queue_time, config.policy.shed_late, self._missing_tokens
        )
        self.prefilling: list[Sequence] = []  # in the policy's order
        self.decoding: list[Sequence] = []  # in order of arrival
        self.waiting = Waiting(self.policy, self.kv)
        self.held: list[Sequence] = []  # of paused requests
        self._paused: dict[RequestState, None] = {}
        self.num_left_waiting = 0  # when the last step had let in whom it could
        self._room = Room(config, self.kv, self.policy, self.decoding, self.prefilling)
        self.num_preemptions = 0
        self.prompt_tokens = 0  # of requests that have begun
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.external_hits: Counter[str] = Counter()  # of these, loaded, by connector
        self.swapped_tokens = 0  # of preempted sequences, taken back from there
        self._arrivals = 0
        self._reserved_slots = 0  # for sequences that will fork
        # The order of the queue's head, which may have ended, and free blocks when it was refused.
        self._blocked: tuple[tuple[int, int], int] | None = None
        self._scheduled: Scheduled | None = None
        self._served: set[Sequence] = set()  # whose turn it was for a chunk of the step
        self._suspects = Suspects()
        self._builder = BatchBuilder(config, self.kv)
        self._decodes_changed = False
        self._to_join = 0  # of the batch that static batching is letting in

    @property
    def _free_slots(self) -> int:
        """That nobody has or will fork into."""
        return self.kv.num_free_slots - self._reserved_slots

    # Requests

    def check(self, request: Request) -> int:
        """The output tokens this request may have; `AdmissionError` if it can never run."""
        return admission.output_limit(request, self.config, self.kv.layout, self.kv.pool.num_blocks)

    def check_queue(
        self, num_prompt_tokens: int, pending: int = 0, pending_tokens: int = 0
    ) -> None:
        """Refuse when the queue is full. ``pending``: requests on their way to it, less those of
        all who find a seat at the next step.
        """
        admission.check_queue(
            self.config,
            max(0, len(self.waiting) + pending),
            self.waiting.tokens + pending_tokens,
            num_prompt_tokens,
        )

    def new_state(
        self,
        request: Request,
        record: RequestRecord,
        max_tokens: int,
        outputs: Items[Any] | None = None,
    ) -> RequestState:
        """A request that is not queued yet, of which nothing is held. ``max_tokens``: as `check`
        says. ``outputs``: of each of its sequences.
        """
        state = RequestState(request, record, max_tokens)
        self._arrivals += 1
        prompt = array("i", request.prompt_token_ids)
        for choice in range(request.params.n):
            seq = Sequence(state, choice, (self._arrivals, choice), prompt[:])
            seq.status = Status.FORKING if choice else Status.WAITING
            seq.output = outputs[choice] if outputs else None
            state.sequences.append(seq)
        state.num_unfinished = len(state.sequences)
        record.finish_reasons = [None] * len(state.sequences)
        return state

    def add(self, state: RequestState, now: float) -> None:
        """Queue a request; it joins the next step if there is room. If this fails, nothing of it is
        left.
        """
        self.shedding.add(state)
        self.waiting.add(state.sequences[0], state.record.arrival, now)

    def pause(self, state: RequestState) -> None:
        """None of its sequences that have begun to answer goes on until `resume`: from the next
        step on they hold no blocks, and are computed again later, as if they had been preempted.
        """
        self._paused[state] = None

    def resume(self, state: RequestState, now: float) -> None:
        self._paused.pop(state, None)
        for seq in [seq for seq in self.held if seq.owner is state]:
            self.held.remove(seq)
            seq.status = Status.WAITING
            self.waiting.push(seq, now)

    def _hold(self) -> None:
        """Take from paused requests what they hold. Whoever is to show alone that it is not at
        fault does so first.
        """
        if not self._paused or self._suspects:
            return
        for state in self._paused:
            for seq in state.sequences:
                if len(seq.token_ids) == state.num_prompt_tokens:
                    continue
                if seq.slot >= 0:
                    self._leave(seq)
                elif seq.status is Status.WAITING:
                    self.waiting.remove(seq)
                else:
                    continue
                self.waiting.end_prefetch(seq)
                seq.status = Status.HELD
                self.held.append(seq)

    def _missing_tokens(self, state: RequestState) -> int:
        """Tokens to be computed before a request's first."""
        seq = state.sequences[0]
        if seq.slot >= 0:
            return self._missing(seq)
        cached = self._lookup(seq).num_tokens
        if seq.status is Status.FETCHING and seq.prefetch is not None:
            cached = max(cached, seq.prefetch.num_tokens)  # it is on its way
        return len(seq.token_ids) - cached

    # A step

    def schedule(
        self, now: float, proposer: Proposer | None = None, timing: Timing | None = None
    ) -> Scheduled | None:
        """The next step, or None when there is nothing to compute. ``timing``: for the target.

        Drafts take what is left of budget, rows and blocks: nobody waits or is preempted for them.
        """
        self.policy.now = now
        self.waiting.poll(may_read=not self._suspects)
        self._hold()
        self._cut_in()
        preemptions = self.num_preemptions
        self._grow_decodes()
        self._update_decode_slots()
        budget = Budget(self.config, self.decode_positions(), timing)
        chunks: list[Chunk] = []
        for seq, others in self._prompts(preemptions):
            if chunk := self._chunk(seq, budget, others):
                chunks.append(chunk)
            self._served.add(seq)
            if budget.spent or not (chunk or self.config.chunked_prefill):
                break
        self.num_left_waiting = len(self.waiting)
        if chunks and not budget.spent:
            chunks[0] = self._extend(chunks[0], budget)
        if not self.decoding and not chunks:
            return None
        self._update_decode_slots()
        drafts: list[list[int]] | None = None
        branches: Branches = {}
        # Whoever is to show that it is not at fault does so without drafts.
        if (
            proposer is not None
            and self.decoding
            and not self._suspects
            and (room := budget.drafts()) > 0
        ):
            num_tokens = self.config.max_num_batched_tokens - budget.tokens
            slots = self._builder.decode_slots
            drafts, branches = draft(proposer, self.kv, self.decoding, slots, num_tokens, room)
        self._scheduled = self._builder.build(self.decoding, chunks, drafts, branches)
        return self._scheduled

    def _grow_decodes(self) -> None:
        """A slot in the cache for the next token of every decoding sequence."""
        kv = self.kv
        self._update_decode_slots()
        slots = self._builder.decode_slots
        if not len(slots):
            return
        full = kv.num_tokens[slots] % kv.block_size == 0
        needing = [self.decoding[index] for index in np.flatnonzero(full)]
        if kv.shared_tails:
            needing += [seq for seq in self.decoding if seq.slot in kv.shared_tails]
            needing.sort(key=BY_ARRIVAL)
        for seq in needing:
            while seq.status is Status.DECODING and not kv.reserve(seq.slot, 1):
                self._preempt(self._last())

    def _prompts(self, preemptions: int) -> Iterator[tuple[Sequence, Items[Sequence]]]:
        """In which order prompts are served, and who of those under way comes after each: the first
        of them, whose turn it is, then the shortest of the others, and newcomers as they are let
        in. Nobody is let in when this step has preempted: who was just sent away would come
        straight back.
        """
        admit = self._admit if self.config.batching == "continuous" else self._admit_batch
        may_admit = True

        def newcomers(shorter_than: float) -> Iterator[tuple[Sequence, Items[Sequence]]]:
            nonlocal may_admit
            while may_admit and self.num_preemptions == preemptions:
                if shorter_than < inf:
                    head = self._next_waiting()
                    if head is None or len(head.token_ids) >= shorter_than:
                        return
                admitted = admit()
                may_admit = admitted is not None
                if admitted is not None:
                    yield admitted, ()

        first, *others = self.prefilling or (None,)
        if first is not None:
            yield first, others
        others = [seq for seq in others if seq.status is Status.PREFILLING]
        for seq in sorted(others, key=self._missing):
            yield from newcomers(self._missing(seq))
            if seq.status is Status.PREFILLING:
                yield seq, ()
        yield from newcomers(inf)

    def _chunk(self, seq: Sequence, budget: Budget, others: Items[Sequence]) -> Chunk | None:
        """As many of the sequence's missing tokens as budget and blocks allow; none before all that
        is cached of it is in the pool.
        """
        if self.kv.num_to_load(seq.slot) and not self._load(seq, budget):
            return None
        missing = self._missing(seq)
        start = len(seq.token_ids) - missing
        scored = seq.owner.scores_prompt
        if budget.tokens < missing and not self.config.chunked_prefill:
            return None
        count = budget.fit(start, missing, scored=scored)
        if count < missing and self._shorter_behind(missing, others):
            count = budget.fit(start, missing, scored=scored, half=True)
        if count < 1:
            return None
        while (room := self.kv.capacity(seq.slot)) < 1 and (last := self._last()) is not seq:
            self._preempt(last)
        count = min(count, room)
        if count < 1:
            return None
        self.kv.reserve(seq.slot, count)
        chunk = Chunk(seq, start, count)
        budget.take(start, count, chunk.logits_rows)
        return chunk

    def _load(self, seq: Sequence, budget: Budget) -> bool:
        """As many blocks of the sequence's hit as budget and pool allow. Whether that is all."""
        kv = self.kv
        each, to_load = kv.seconds_to_load(seq.slot), kv.num_to_load(seq.slot)
        count = budget.blocks(to_load, each)
        while count and not kv.pool.num_free and (last := self._last()) is not seq:
            self._preempt(last)
        count = min(count, kv.pool.num_free)
        budget.copy(each * kv.load(seq.slot, count))
        return count == to_load

    def _extend(self, chunk: Chunk, budget: Budget) -> Chunk:
        """What nobody else took goes to the first prompt that has a chunk."""
        seq, start, count = chunk
        end = start + count
        missing = len(seq.token_ids) - end
        if not missing or seq.owner.scores_prompt:
            return chunk
        more = min(budget.fit(end, missing), self.kv.capacity(seq.slot) - count)
        if more < 1:
            return chunk
        self.kv.reserve(seq.slot, count + more)
        extended = Chunk(seq, start, count + more)
        budget.take(end, more, extended.logits_rows - chunk.logits_rows)
        return extended

    def _missing(self, seq: Sequence) -> int:
        """Tokens that are not in the cache yet, of a sequence with a slot."""
        return len(seq.token_ids) - int(self.kv.num_tokens[seq.slot])

    def _shorter_behind(self, missing: int, others: Items[Sequence]) -> bool:
        """Whether anybody would be through before a prompt of so many tokens: of the ``others``
        under way, or of those who wait, as far as there are slots. Then the prompt takes
        no more than half of what is left of a step.
        """
        if any(self._missing(other) < missing for other in others):
            return True
        slots = min(self._free_slots, _LOOKED_AT)
        return any(len(seq.token_ids) < missing for seq in islice(self.policy, max(0, slots)))

    def _admit(self) -> Sequence | None:
        """Let the queue's head in, if all its known tokens fit beside those who run."""
        seq = self._next_waiting()
        if seq is None:
            return None
        kv = self.kv
        running = len(self.decoding) + len(self.prefilling)
        if self._free_slots < 1 + len(seq.followers):
            return None
        if running and self._blocked is not None:
            head, free = self._blocked
            if head == seq.order and kv.pool.num_free <= free:
                return None
        hit = self._lookup(seq)
        if running and not self._room.fits(seq, hit):
            self._blocked = seq.order, kv.pool.num_free
            return None
        self._blocked = None
        self._let_in(seq, hit)
        return seq

    def _lookup(self, seq: Sequence) -> Hit:
        if seq.owner.scores_prompt:
            return NO_HIT
        return self.kv.lookup(seq.token_ids, seq.owner.request.cache_salt)

    def _let_in(self, seq: Sequence, hit: Hit) -> None:
        """Out of the queue and into a slot."""
        self.waiting.remove(seq)
        # Where steps have a target, what is in another tier is copied in as they have time for it.
        at_once = self.config.itl_target is None
        seq.slot = self.kv.open(hit, seq.owner.request.cache_salt, at_once=at_once)
        self.waiting.end_prefetch(seq)
        seq.sought = True  # or will never be: what it has is in the pool from now on
        if self.config.memory == "reserve":
            self.kv.reserve(seq.slot, len(seq.token_ids) + seq.num_to_come - 1)
        seq.status = Status.PREFILLING
        insort(self.prefilling, seq, key=self.policy.rank)
        self._reserved_slots += len(seq.followers)
        owner, computed = seq.owner, len(seq.token_ids) - hit.num_tokens
        seq.hit = hit
        if owner.record.scheduled is None:
            owner.record.scheduled = self.policy.now
        if not owner.counted and computed > owner.charged:
            self.policy.begins(owner, computed - owner.charged)
            owner.charged = computed

    def _admit_batch(self) -> Sequence | None:
        """Static batching: who waits when nobody runs is let in, as far as there is room; whoever
        else waits until the last of them has ended.
        """
        if not self.decoding and not self.prefilling:
            self._to_join = len(self.policy)
        admitted = self._admit() if self._to_join else None
        self._to_join = self._to_join - 1 if admitted else 0
        return admitted

    def _cut_in(self) -> None:
        """Let those in, before anyone is served, who displace whoever runs; as many as there are
        tokens for in the step beside those whom they do not displace.
        """
        policy = self.policy
        self._served.clear()
        if policy.displaces_any and self.config.batching == "continuous" and not self._suspects:
            while (
                (self.decoding or self.prefilling)
                and (seq := policy.challenger()) is not None
                and policy.displaces(seq, self._last())
                and self._is_budget_for(seq)
                and self._make_room(seq)
            ):
                pass
        if len(self.prefilling) > 1:  # ranks may have changed
            self.prefilling.sort(key=policy.rank)

    def _is_budget_for(self, seq: Sequence) -> bool:
        """Whether there are tokens for it in the step beside those whom it does not displace. Of
        prompts ahead, one that is longer takes no more than half of what is left (schedule/budget).
        """
        missing = len(seq.token_ids)
        left = self.config.max_num_batched_tokens - len(self.decoding)
        if not self._free_slots:
            left += self._last().status is Status.DECODING  # it takes this one's place
        for other in self.prefilling:
            if not self.policy.displaces(seq, other):
                ahead = self._missing(other)
                left -= ahead if ahead <= missing else left // 2
        return left > 0

    def _make_room(self, seq: Sequence) -> bool:
        """Let a sequence in that displaces others, in the places and blocks of as few of them as
        will do. False, and nothing is changed, if all of them would not.
        """
        way = self._room.way_in(seq, self._lookup, self._free_slots)
        if way is None:
            return False
        for other in way.leaving:
            self._preempt(other)
        more = iter(way.others)
        while not self._room.fits(seq, way.hit):  # blocks that others share did not become free
            if (another := next(more, None)) is None:
                return False
            self._preempt(another)
        self._let_in(seq, way.hit)
        return True

    def _next_waiting(self) -> Sequence | None:
        """The queue's head; while a suspect must run alone, only its own."""
        alone = self.alone
        if alone is None:
            return self.policy.head()
        return next((seq for seq in alone.sequences if seq.status is Status.WAITING), None)

    def _last(self) -> Sequence:
        """Who gives way in this step."""
        return self._room.last(self._served)

    def _preempt(self, seq: Sequence) -> None:
        """Take everything from a running sequence; it will be computed again."""
        self._requeue(seq)
        seq.owner.record.preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, seq: Sequence) -> None:
        """Back into the queue."""
        self._leave(seq)
        seq.status = Status.WAITING
        self.waiting.push(seq, self.policy.now)

    def _leave(self, seq: Sequence) -> None:
        """Out of the running ones; slot and blocks are free."""
        if seq.status is Status.DECODING:
            self.decoding.remove(seq)
            self._decodes_changed = True
        else:
            self.prefilling.remove(seq)
            self._reserved_slots -= len(seq.followers)
        self.kv.close(seq.slot)
        seq.slot, seq.hit = -1, None
        self._blocked = None

    def _update_decode_slots(self) -> None:
        if self._decodes_changed:
            self._builder.decode_slots = np.array(
                [seq.slot for seq in self.decoding], dtype=np.int32
            )
            self._decodes_changed = False

    # After a step

    def took(self, scheduled: Scheduled, seconds: float) -> None:
        """What the step has taken: those who look ahead learn what prompts take."""
        if scheduled.chunks:
            num_tokens = scheduled.batch.num_tokens
            self.shedding.took(num_tokens, seconds)
            self.policy.took(num_tokens, seconds)

    def commit(self, scheduled: Scheduled, runs: Items[Items[int]]) -> None:
        """The step has been computed; ``runs`` are the tokens that each of its ``samples`` drew:
        one, and with drafts as many more as were right.

        Sequences that ended meanwhile are left out.
        """
        self._scheduled = None
        kv = self.kv
        for index in scheduled.branches:
            if scheduled.decodes[index].slot >= 0 and (
                branch := scheduled.taken(index, runs[index])
            ):
                kv.adopt(branch.slot)
        kv.prune()
        decodes, drafts = scheduled.decodes, scheduled.drafts
        slots = self._builder.decode_slots
        drawn = runs[: len(decodes)]
        if scheduled.stale:
            alive = [index for index, seq in enumerate(decodes) if seq.slot >= 0]
            drawn = [drawn[index] for index in alive]
            drafts = drafts and [drafts[index] for index in alive]
            decodes = [decodes[index] for index in alive]
            slots = np.array([seq.slot for seq in decodes], dtype=np.int32)
        if decodes:
            for seq, run in zip(decodes, drawn, strict=True):
                seq.token_ids.extend(run)
            sizes = 1 if drafts is None else np.array([len(run) for run in drawn], dtype=np.int32)
            num_tokens = kv.num_tokens[slots] + sizes
            kv.num_tokens[slots] = num_tokens
            self._builder.last_token[slots] = [run[-1] for run in drawn]
            # Whose new positions complete a block:
            for index in np.flatnonzero(num_tokens % kv.block_size < sizes).tolist():
                seq = decodes[index]
                kv.register(seq.slot, seq.token_ids)
            self.policy.drew(decodes, map(len, drawn))
            if self.config.memory == "paged":
                for seq, draft in zip(decodes, drafts or (), strict=False):
                    if draft:
                        kv.trim(seq.slot)
        for chunk in scheduled.chunks:
            seq, start, size = chunk
            if seq.slot < 0:
                continue
            self._count(seq)
            kv.advance(seq.slot, size)
            kv.register(seq.slot, seq.token_ids)
            if seq.owner.scores_prompt:
                scored = min(start + size, seq.owner.num_prompt_tokens - 1)
                seq.num_scored = max(seq.num_scored, scored)
            if chunk.is_last:
                self._begin_decoding(seq)
        first = len(scheduled.decodes)
        for seq, run in zip(scheduled.samples[first:], runs[first:], strict=True):
            if seq.slot >= 0:
                seq.token_ids.extend(run)
                self._builder.last_token[seq.slot] = run[-1]
                self.policy.drew((seq,), (len(run),))
        if self._suspects and scheduled.samples:
            self._clear_suspect(scheduled.samples[0].owner)

    def _count(self, seq: Sequence) -> None:
        """Its first chunk has been computed, so that it has had all of its hit."""
        hit, seq.hit = seq.hit, None
        owner = seq.owner
        if hit is None:
            return
        if owner.counted:
            self.swapped_tokens += sum(tokens for _, tokens in hit.external_tokens)
            return
        owner.counted = True
        owner.record.cached_tokens = hit.num_tokens
        self.prompt_tokens += owner.num_prompt_tokens
        if self.config.enable_prefix_caching and not owner.scores_prompt:
            self.prefix_queries += owner.num_prompt_tokens
            self.prefix_hits += hit.num_tokens
            self.external_hits.update(dict(hit.external_tokens))

    # Many steps at once

    def steady_steps(self) -> int:
        """For how many steps from now nothing but the same decodes will run, unless the sampler
        ends one: no prompt is under way, nobody who waits can be let in, no sequence reaches its
        maximum, and blocks suffice. 0 where that is not certain.
        """
        quiet = self.decoding and not (self.prefilling or self._suspects or self.kv.shared_tails)
        if not quiet or self.kv.connectors is not None or self._may_admit():
            return 0
        self._update_decode_slots()
        limit = min(seq.num_to_come for seq in self.decoding) - 1
        return self.kv.max_steps(self._builder.decode_slots, limit)

    def _may_admit(self) -> bool:
        """Whether somebody may be let in, or be sent away, although nobody has left since the last
        step.
        """
        if self.policy and self.shedding.is_asked:
            return True
        if self.config.batching == "static":
            return self._to_join > 0
        head = self.policy.head()
        if head is None:
            return False
        if self.policy.displaces_any:
            return True
        kv = self.kv
        if self._free_slots < 1 + len(head.followers):
            return False
        if self._blocked is None or any(group.window for group in kv.layout.groups):
            return True  # windows give blocks back
        refused, free = self._blocked
        return refused != head.order or kv.pool.num_free > free

    def decode_positions(self) -> Int32:
        """Where each decoding sequence is."""
        return self.kv.num_tokens[self._builder.decode_slots]

    def leap(self, tokens: Int32) -> None:
        """As many steady steps as ``tokens`` [decoding, steps] has columns: schedule and commit."""
        slots = self._builder.decode_slots
        self.policy.drew(self.decoding, repeat(tokens.shape[1]))
        for seq, run in zip(self.decoding, tokens, strict=True):
            seq.token_ids.frombytes(run.tobytes())
        self.kv.advance_steps(slots, [seq.token_ids for seq in self.decoding], tokens.shape[1])
        self._builder.last_token[slots] = tokens[:, -1]

    def _begin_decoding(self, seq: Sequence) -> None:
        """The prompt is through: from now on a token a step, for the sequence and its forks."""
        self.prefilling.remove(seq)
        followers = seq.followers
        self._reserved_slots -= len(followers)
        for follower in followers:
            follower.slot = self.kv.fork(seq.slot)
            follower.stood = seq.stood
        for begun in (seq, *followers):
            begun.status = Status.DECODING
            insort(self.decoding, begun, key=BY_ARRIVAL)
        self._decodes_changed = True

    def finish(self, seq: Sequence, reason: FinishReason) -> bool:
        """End a sequence in whatever state; True if it was its request's last."""
        if seq.status is Status.FINISHED:
            return False
        if seq.slot >= 0:
            self._leave(seq)
            if self._scheduled is not None:
                self._scheduled.stale = True
        elif seq.status in (Status.WAITING, Status.FETCHING):
            self.waiting.remove(seq)
        elif seq.status is Status.HELD:
            self.held.remove(seq)
        self.waiting.end_prefetch(seq)
        self._served.discard(seq)
        seq.status = Status.FINISHED
        seq.owner.record.finish_reasons[seq.choice] = reason
        seq.owner.num_unfinished -= 1
        if seq.owner.num_unfinished == 0:
            self._paused.pop(seq.owner, None)
        if not self.has_work():
            self.shedding.clear()
        return seq.owner.num_unfinished == 0

    def end(self, state: RequestState, reason: FinishReason) -> list[Sequence]:
        """End what is left of a request, whatever it is doing; the sequences that ended now."""
        unfinished = [seq for seq in state.sequences if seq.status is not Status.FINISHED]
        for seq in unfinished:
            self.finish(seq, reason)
        return unfinished

    def retry_alone(self, scheduled: Scheduled) -> bool:
        """The step failed and nothing it should have written counts. Whose fault it was cannot be
        seen, so each of its requests will run alone, without drafts, until it draws a token.

        False if one request was so alone in the step: then it is that one's fault.
        """
        self._scheduled = None
        owners = {id(seq.owner): seq.owner for seq in scheduled.sequences}
        if len(owners) < 2 and scheduled.drafts is None:
            return False
        for seq in self.decoding + self.prefilling:
            self._requeue(seq)
        self._suspects.accuse(owners.values())
        return True

    @property
    def alone(self) -> RequestState | None:
        """Who is to run alone in the next step, to show that it is not at fault."""
        return self._suspects.tried

    def start_over(self, states: Iterable[RequestState]) -> None:
        """After a failure that may have left queue and cache half done: both are made anew. Of
        ``states``, all requests there are, every sequence that has not ended waits with its
        tokens as they are, and those who ran will run alone as after `retry_alone`.
        """
        if self._scheduled is not None:
            self._scheduled.stale = True
        self._scheduled = self._blocked = None
        self._room.forget()
        self.kv.clear()
        self.decoding.clear()
        self.prefilling.clear()
        self.held.clear()
        self._decodes_changed = True
        self._reserved_slots = self._to_join = 0
        self.waiting.clear()
        suspects = []
        for state in states:
            unfinished = [seq for seq in state.sequences if seq.status is not Status.FINISHED]
            state.num_unfinished = len(unfinished)
            if any(seq.slot >= 0 for seq in state.sequences):
                suspects.append(state)
            for seq in state.sequences:
                seq.prefetch = None  # the cache, as it was emptied, has unpinned what was loaded
            for seq in unfinished:
                if seq.status is not Status.FORKING:
                    seq.status = Status.WAITING
                    self.waiting.push(seq, seq.queued if seq.slot < 0 else self.policy.now)
                seq.slot, seq.hit = -1, None
        if not suspects and (first := self.policy.head()) is not None:
            suspects = [first.owner]
        self._suspects.accuse(suspects)

    def _clear_suspect(self, state: RequestState) -> None:
        """It drew a token alone, so it is not at fault: back to its place in the queue."""
        if self._suspects.tried is state:
            self._suspects.acquit()
            for seq in self.decoding + self.prefilling:
                self._requeue(seq)

    def has_work(self) -> bool:
        """Whether there is anything to compute: paused requests wait for others to do something."""
        return bool(self.waiting or self.prefilling or self.decoding)

    def check_idle(self) -> None:
        """With no request left nothing may be held; `RuntimeError` otherwise. Costs nothing."""
        kv = self.kv
        if kv.num_branches:
            raise RuntimeError("a branch has outlived its step")
        if kv.connectors is not None and kv.connectors.staging.num_pinned:
            raise RuntimeError("no request is left, but blocks in host memory are pinned")
        if (
            self.has_work()
            or self.held
            or kv.pool.num_used
            or kv.num_free_slots != self.config.max_num_seqs
        ):
            raise RuntimeError(
                f"no request is left, but {kv.pool.num_used} of {kv.pool.num_blocks} blocks and "
                f"{self.config.max_num_seqs - kv.num_free_slots} slots are held"
            )

    def check_integrity(self) -> None:
        """Cache, queue and running sequences agree; `RuntimeError` otherwise."""
        self.kv.check(seq.prefetch for seq in self.waiting if seq.prefetch is not None)
        if self.kv.num_branches:
            raise RuntimeError("a branch has outlived its step")
        running = self.decoding + self.prefilling
        slots = {seq.slot for seq in running}
        if len(slots) != len(running) or -1 in slots:
            raise RuntimeError("two running sequences share a slot, or one has none")
        if len(slots) + self.kv.num_free_slots != self.config.max_num_seqs:
            raise RuntimeError("a slot is neither free nor running")
        if any(seq.slot >= 0 or seq.status is not Status.HELD for seq in self.held):
            raise RuntimeError("a sequence is held that runs or waits")
        if self._reserved_slots != sum(len(seq.followers) for seq in self.prefilling):
            raise RuntimeError("slots are reserved for nobody")
        if self.waiting.tokens != sum(len(seq.token_ids) for seq in self.waiting):
            raise RuntimeError("the queue's tokens are miscounted")
