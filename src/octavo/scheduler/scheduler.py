"""Decides what each step computes.

A step holds a token of every decoding sequence, then chunks of prompts, within a budget of tokens
and, with a target, of time (token_budget.py). A waiting request is admitted as soon as there are a
slot, budget and blocks for it. When blocks run out, a running sequence is preempted: it gives up
its slot and blocks, waits, and is computed again later. The policy (policies/) decides the order of
admission, of service and of preemption. By default all three go by arrival, and the last to come is
preempted first, so that the oldest request always finishes.

The methods stand in the order of a request's life: queue, schedule, admit, preempt, commit, finish;
then fault isolation, many steps at once, and checks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from itertools import chain, islice, repeat, takewhile
from math import inf
from typing import Any

import numpy as np

from octavo.kv_cache.cache import Int32, KvCache
from octavo.kv_cache.layout import KvLayout
from octavo.kv_cache.prefix_index import Hash, chain_hash
from octavo.kv_cache.prefix_lookup import NO_HIT, Hit
from octavo.scheduler.admission import Admission, needed_blocks
from octavo.scheduler.batching import BatchBuilder, Branches, Chunk, Scheduled
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.drafting import Proposer, fit_branches, fit_drafts
from octavo.scheduler.policies.base import BY_ARRIVAL
from octavo.scheduler.prompt_rates import PromptRates
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.request import FinishReason, RequestRecord
from octavo.scheduler.sequence import Sequence, Status
from octavo.scheduler.shedding import Shedding
from octavo.scheduler.token_budget import TokenBudget

_LOOKED_AT = 32  # waiting sequences, to find one with a shorter prompt than one under way


class Scheduler:
    """Owns the queue, the running sequences and their cache. Not thread-safe, but for
    ``admission``.
    """

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
            state_snapshots=config.state_snapshots,
            state_log_rows=config.state_log_rows,
            hasher=hasher,
        )
        self.policy = config.new_policy()
        self.shedding = Shedding(self)
        self.set_rates(PromptRates())
        self.waiting = WaitingQueue(self.policy, self.kv)
        self.prefilling: list[Sequence] = []  # in the policy's order
        self.decoding: list[Sequence] = []  # in order of arrival
        self.paused: list[Sequence] = []  # those of paused requests that have given up their slots
        self._pausing: dict[RequestRecord, None] = {}
        self.num_left_waiting = 0  # when the last step had admitted all that it could
        self.admission = Admission(self)
        self.num_preemptions = 0
        self.prompt_tokens = 0  # of requests that have begun
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.external_hits: Counter[str] = Counter()  # of these, loaded, by connector
        self.swapped_tokens = 0  # of preempted sequences, taken back from there
        self._arrivals = 0
        self._reserved_slots = 0  # for sequences that will fork
        # The order of a sequence that could not be admitted, or not by preemption, and the blocks
        # that it could have had then: no need to look again until there are more.
        self._refused: tuple[tuple[int, int], int] | None = None
        self._refused_preemption: tuple[tuple[int, int], int] | None = None
        self._scheduled: Scheduled | None = None
        self._served: set[Sequence] = set()  # those that have had their turn in this step
        self._suspects: deque[RequestRecord] = deque()  # each has to run in isolation
        self._builder = BatchBuilder(config, self.kv)
        self._decode_slots_cache: Int32 | None = None
        self._to_join = 0  # of the batch that static batching is admitting

    def set_rates(self, rates: PromptRates) -> None:
        """Let policy, shedding and budget predict by ``rates``, which learn from this scheduler's
        steps. Single steps must be known if they have a target.
        """
        self.rates = self.policy.rates = rates

    # Queue

    def add(
        self,
        record: RequestRecord,
        prompt_token_ids: Items[int],
        max_tokens: int,
        now: float,
        outputs: Items[Any],
    ) -> None:
        """Queue a request. ``max_tokens``: what `Admission.check` returned. ``outputs``: the
        engine's, for each of its sequences. If this fails, nothing of it is left.
        """
        self._arrivals += 1
        record.max_tokens = max_tokens
        prompt = array("i", prompt_token_ids)
        try:
            for choice in range(record.n):
                order = self._arrivals, choice
                seq = Sequence(record, choice, order, prompt[:], len(prompt) + max_tokens)
                seq.status = Status.FORKING if choice else Status.WAITING
                seq.output = outputs[choice]
                record.sequences.append(seq)
            record.num_unfinished = record.n
            record.finish_reasons = [None] * record.n
            self.shedding.add(record)
            self.waiting.add(record.sequences[0], now)
        except BaseException:
            record.sequences.clear()
            raise

    def pause(self, record: RequestRecord) -> None:
        """Stop the sequences that have begun to answer until `resume`: from the next step on they
        hold no blocks, and are computed again later as if they had been preempted.
        """
        self._pausing[record] = None

    def resume(self, record: RequestRecord, now: float) -> None:
        self._pausing.pop(record, None)
        for seq in [seq for seq in self.paused if seq.owner is record]:
            self.paused.remove(seq)
            self.waiting.push(seq, now)

    def _pause_sequences(self) -> None:
        """Take slots and blocks from paused requests, unless a request runs in isolation: this
        comes first.
        """
        if not self._pausing or self.isolated is not None:
            return
        for record in self._pausing:
            for seq in record.sequences:
                begun = len(seq.token_ids) > record.prompt_tokens
                if begun and (seq.slot >= 0 or seq.status is Status.WAITING):
                    self._withdraw(seq)
                    seq.status = Status.PAUSED
                    self.paused.append(seq)

    def has_work(self) -> bool:
        """Return whether there is anything to compute. Paused requests are not."""
        return bool(self.waiting or self.prefilling or self.decoding)

    # Schedule

    def schedule(self, now: float, proposer: Proposer | None = None) -> Scheduled | None:
        """Return the next step; None if there is nothing to compute.

        Drafts take what is left of budget, rows and blocks: no sequence waits or is preempted for
        them.
        """
        self.policy.now = now
        self._served.clear()
        self.waiting.poll(may_read=self.isolated is None)
        self._pause_sequences()
        self._admit_by_preemption()
        preemptions = self.num_preemptions
        self._reserve_for_decodes()
        budget = TokenBudget(self.config, self.decode_positions(), self.rates)
        chunks = self._schedule_prompts(budget, preemptions)
        if not self.decoding and not chunks:
            return None
        drafts, branches = self._schedule_drafts(budget, proposer)
        self._scheduled = self._builder.build(
            self.decoding, self._decode_slots, chunks, drafts, branches
        )
        return self._scheduled

    def _reserve_for_decodes(self) -> None:
        """Reserve a cache position for the next token of every decoding sequence."""
        kv, slots = self.kv, self._decode_slots
        if not len(slots):
            return
        full = kv.num_tokens[slots] % kv.block_size == 0
        needing = [self.decoding[index] for index in np.flatnonzero(full)]
        if kv.shared_tails:
            needing += [seq for seq in self.decoding if seq.slot in kv.shared_tails]
            needing.sort(key=BY_ARRIVAL)
        for seq in needing:
            while seq.status is Status.DECODING and not kv.reserve(seq.slot, 1):
                self._preempt(self._victim())

    def _schedule_prompts(self, budget: TokenBudget, preemptions: int) -> list[Chunk]:
        """Serve the prompts, in their order, until the budget is spent."""
        chunks: list[Chunk] = []
        for seq in self._prompts(preemptions):
            if chunk := self._chunk(seq, budget):
                chunks.append(chunk)
            self._served.add(seq)
            if budget.spent or not (chunk or self.config.chunked_prefill):
                break
        self.num_left_waiting = len(self.waiting)
        if chunks and not budget.spent:
            chunks[0] = self._extend(chunks[0], budget)
        return chunks

    def _prompts(self, preemptions: int) -> Iterator[Sequence]:
        """Iterate over the prompts in the order of service: the one with the lowest rank, then the
        others from the shortest on, and newcomers as they are admitted. No newcomer is admitted if
        this step has preempted: the preempted sequence would be admitted again at once.
        """
        admit = self._admit if self.config.batching == "continuous" else self._admit_batch
        may_admit = True

        def newcomers(shorter_than: float) -> Iterator[Sequence]:
            nonlocal may_admit
            while may_admit and self.num_preemptions == preemptions:
                head = self._next_waiting()
                if head is not None and len(head.token_ids) >= shorter_than:
                    return
                admitted = admit()
                may_admit = admitted is not None
                if admitted is not None:
                    yield admitted

        self.prefilling.sort(key=self.policy.rank)  # ranks may have changed
        yield from self.prefilling[:1]
        others = [seq for seq in self.prefilling if seq not in self._served]
        for seq in sorted(others, key=self._missing):
            yield from newcomers(self._missing(seq))
            if seq.status is Status.PREFILLING:
                yield seq
        yield from newcomers(inf)

    def _chunk(self, seq: Sequence, budget: TokenBudget) -> Chunk | None:
        """Schedule as many of a prompt's missing tokens as budget and blocks allow; none before all
        of its cached prefix is in the pool.
        """
        if self.kv.num_to_load(seq.slot) and not self._load(seq, budget):
            return None
        missing = self._missing(seq)
        start = len(seq.token_ids) - missing
        scored = seq.owner.scores_prompt
        if budget.tokens < missing and not self.config.chunked_prefill:
            return None
        count = budget.fit(start, missing, scored=scored)
        if count < missing and self._shorter_behind(seq, missing):
            count = budget.fit(start, missing, scored=scored, half=True)
        if count < 1:
            return None
        while (room := self.kv.capacity(seq.slot)) < 1 and (victim := self._victim()) is not seq:
            self._preempt(victim)
        count = min(count, room)
        if count < 1:
            return None
        self.kv.reserve(seq.slot, count)
        chunk = Chunk(seq, start, count)
        budget.take(start, count, chunk.logits_rows)
        return chunk

    def _load(self, seq: Sequence, budget: TokenBudget) -> bool:
        """Load as many blocks of the sequence's cached prefix as budget and pool allow. Return
        whether that is all.
        """
        kv = self.kv
        each, to_load = kv.seconds_to_load(seq.slot), kv.num_to_load(seq.slot)
        count = budget.blocks(to_load, each)
        while count and not kv.pool.num_free and (victim := self._victim()) is not seq:
            self._preempt(victim)
        count = min(count, kv.pool.num_free)
        budget.copy(each * kv.load(seq.slot, count))
        return count == to_load

    def _extend(self, chunk: Chunk, budget: TokenBudget) -> Chunk:
        """Give the budget that no other prompt took to the first prompt with a chunk."""
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
        """Return how many tokens of a sequence with a slot are not in the cache yet."""
        return len(seq.token_ids) - int(self.kv.num_tokens[seq.slot])

    def missing_before_first(self, record: RequestRecord) -> int:
        """Return how many tokens are to be computed before a request's first."""
        seq = record.sequences[0]
        if seq.slot >= 0:
            return self._missing(seq)
        cached = self._lookup(seq).num_tokens
        if seq.status is Status.FETCHING and seq.prefetch is not None:
            cached = max(cached, seq.prefetch.num_tokens)  # it is being read
        return len(seq.token_ids) - cached

    def _shorter_behind(self, seq: Sequence, missing: int) -> bool:
        """Return whether a prompt with fewer than ``missing`` tokens is behind this one: another
        under way, or one of those that wait, as far as there are slots. Then this prompt takes no
        more than half of what is left of a step.
        """
        for other in self.prefilling:
            if other is not seq and other not in self._served and self._missing(other) < missing:
                return True
        slots = min(self._free_slots, _LOOKED_AT)
        return any(len(other.token_ids) < missing for other in islice(self.policy, max(0, slots)))

    def _schedule_drafts(
        self, budget: TokenBudget, proposer: Proposer | None
    ) -> tuple[list[list[int]] | None, Branches]:
        """Return the draft of each decoding sequence, None if there is none, and the branches
        beside them. They take what is left of the budget, and of the blocks.
        """
        if proposer is None or not self.decoding or self.isolated is not None:
            return None, {}
        if (room := budget.drafts()) < 1:
            return None, {}
        num_tokens = self.config.max_num_batched_tokens - budget.tokens
        guesses = proposer.propose(self.decoding, num_tokens, room)
        drafts = fit_drafts(self.kv, self.decoding, self._decode_slots, guesses, room)
        if not any(drafts):
            return None, {}
        alternatives = proposer.alternatives()
        return drafts, fit_branches(self.kv, self.decoding, alternatives, drafts, room)

    # Admit

    @property
    def _free_slots(self) -> int:
        """Slots that no sequence has or will fork into."""
        return self.kv.num_free_slots - self._reserved_slots

    def _next_waiting(self) -> Sequence | None:
        """Return the queue's head; while a request must run in isolation, only its own."""
        isolated = self.isolated
        if isolated is None:
            return self.policy.head()
        return next((seq for seq in isolated.sequences if seq.status is Status.WAITING), None)

    def _admit(self) -> Sequence | None:
        """Admit and return the queue's head if all its known tokens fit beside those that run."""
        seq = self._next_waiting()
        if seq is None or self._free_slots < 1 + len(seq.followers):
            return None
        running = self.decoding or self.prefilling
        if running and self._is_refused(seq):
            return None
        hit = self._lookup(seq)
        if running and not self._fits(seq, hit):
            self._refused = seq.order, self.kv.pool.num_free
            return None
        self._refused = None
        self._start(seq, hit)
        return seq

    def _is_refused(self, seq: Sequence) -> bool:
        """Return whether the sequence did not fit, and there are no more blocks since."""
        order, free = self._refused or (None, 0)
        return order == seq.order and self.kv.pool.num_free <= free

    def _admit_batch(self) -> Sequence | None:
        """Admit by static batching: when no sequence runs, those that wait then, as far as they
        fit; others wait until the last of these has ended.
        """
        if not self.decoding and not self.prefilling:
            self._to_join = len(self.waiting) - len(self.waiting.fetching)
        admitted = self._admit() if self._to_join else None
        self._to_join = self._to_join - 1 if admitted else 0
        return admitted

    def _lookup(self, seq: Sequence) -> Hit:
        if seq.owner.scores_prompt:
            return NO_HIT
        return self.kv.lookup(seq.token_ids, seq.owner.scheduling.cache_salt)

    def _fits(self, seq: Sequence, hit: Hit, leaving: Items[Sequence] = ()) -> bool:
        """Return whether there are blocks for a sequence beside those that run, without those
        ``leaving``. Beside its own blocks, those promised to prompts under way and the next block
        of each running sequence must be free: else it, or another, would soon be preempted. With
        memory reserved at admission, no sequence grows.
        """
        kv = self.kv
        free = kv.pool.num_free + sum(kv.held_blocks(other.slot) for other in leaving)
        if self.config.memory == "reserve":
            return needed_blocks(seq.max_length - 1, self.config, kv.layout) <= free
        need = kv.peak_blocks(len(seq.token_ids)) - kv.blocks_in_use(hit)
        promised = sum(
            max(0, kv.peak_blocks(len(other.token_ids)) - kv.held_blocks(other.slot))
            for other in self.prefilling
            if other not in leaving
        )
        staying = len(self.decoding) + len(self.prefilling) - len(leaving)
        if kv.state is not None:
            running = chain(self.decoding, self.prefilling)
            promised += sum(
                kv.state.owed_blocks(other.slot) for other in running if other not in leaving
            )
        return need + promised + staying * len(kv.layout.groups) <= free

    def _start(self, seq: Sequence, hit: Hit) -> None:
        """Move a sequence from the queue to a slot."""
        self.waiting.remove(seq)
        # If steps have a target, what is in another tier is loaded as they have time for it.
        at_once = self.config.itl_target is None
        seq.slot = self.kv.open(hit, seq.owner.scheduling.cache_salt, at_once=at_once)
        self.waiting.end_prefetch(seq)
        seq.sought = True  # from now on what it has is in the pool
        if self.config.memory == "reserve":
            self.kv.reserve(seq.slot, seq.max_length - 1)
        seq.status = Status.PREFILLING
        insort(self.prefilling, seq, key=self.policy.rank)
        self._reserved_slots += len(seq.followers)
        seq.hit = hit
        record, computed = seq.owner, len(seq.token_ids) - hit.num_tokens
        if record.scheduled is None:
            record.scheduled = self.policy.now
        if not record.counted and computed > record.charged:
            self.policy.on_admit(record, computed - record.charged)
            record.charged = computed

    # Preempt

    def _victim(self) -> Sequence:
        """Return the sequence to preempt when blocks run out: the highest rank among those that
        have not had their turn in this step.
        """
        running = chain(self.decoding, self.prefilling)
        return max((seq for seq in running if seq not in self._served), key=self.policy.rank)

    def _preempt(self, seq: Sequence) -> None:
        """Take slot and blocks from a running sequence; it will be computed again."""
        self._requeue(seq)
        seq.owner.preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, seq: Sequence) -> None:
        self._release(seq)
        self.waiting.push(seq, self.policy.now)

    def _requeue_all(self) -> None:
        for seq in self.decoding + self.prefilling:
            self._requeue(seq)

    def _release(self, seq: Sequence) -> None:
        """Stop a running sequence and free its slot and blocks."""
        if seq.status is Status.DECODING:
            self.decoding.remove(seq)
            self._decode_slots_cache = None
        else:
            self.prefilling.remove(seq)
            self._reserved_slots -= len(seq.followers)
        self.kv.close(seq.slot)
        seq.slot, seq.hit = -1, None
        self._refused = None

    def _admit_by_preemption(self) -> None:
        """Admit, before any is served, the waiting sequences that may preempt running ones; as many
        as there are tokens for in the step beside the sequences that they may not preempt.
        """
        policy = self.policy
        if not policy.preempts or self.config.batching == "static" or self.isolated is not None:
            return
        while (
            (self.decoding or self.prefilling)
            and (seq := policy.preemptor()) is not None
            and policy.may_preempt(seq, self._victim())
            and self._has_tokens_for(seq)
            and self._preempt_for(seq)
        ):
            pass

    def _has_tokens_for(self, seq: Sequence) -> bool:
        """Return whether the step has tokens for a waiting sequence beside those that it may not
        preempt. Of the prompts before it, a longer one takes no more than half of what is left
        (token_budget.py).
        """
        missing = len(seq.token_ids)
        left = self.config.max_num_batched_tokens - len(self.decoding)
        if not self._free_slots:
            left += self._victim().status is Status.DECODING  # it takes this one's slot
        for other in self.prefilling:
            if not self.policy.may_preempt(seq, other):
                ahead = self._missing(other)
                left -= ahead if ahead <= missing else left // 2
        return left > 0

    def _preempt_for(self, seq: Sequence) -> bool:
        """Admit a waiting sequence with the slots and blocks of running ones that it may preempt:
        those of the highest rank, and as few as will do. Return False, without any change, if all
        of them would not do.
        """
        policy, kv = self.policy, self.kv
        running = sorted(chain(self.decoding, self.prefilling), key=policy.rank, reverse=True)
        victims = list(takewhile(lambda other: policy.may_preempt(seq, other), running))
        blocks = kv.pool.num_free + sum(kv.held_blocks(other.slot) for other in victims)
        if not victims or self._refused_preemption == (seq.order, blocks):
            return False
        hit = self._lookup(seq)
        slots = 1 + len(seq.followers) - self._free_slots

        def will_do(count: int) -> bool:
            leaving = victims[:count]
            freed = sum(1 + len(other.followers) for other in leaving)
            return freed >= slots and self._fits(seq, hit, leaving)

        count = bisect_left(range(len(victims) + 1), True, key=will_do)
        if seq is not policy.head():  # it must not take what is free from under the head
            count = max(count, 1)
        if count > len(victims):
            self._refused_preemption = seq.order, blocks
            return False
        for other in victims[:count]:
            self._preempt(other)
        more = iter(victims[count:])
        while not self._fits(seq, hit):  # blocks that others share did not become free
            if (another := next(more, None)) is None:
                return False
            self._preempt(another)
        self._start(seq, hit)
        return True

    # Commit

    def on_step(self, scheduled: Scheduled, seconds: float) -> None:
        """Learn how long a step has taken."""
        if scheduled.chunks:
            self.rates.on_prompts(scheduled.batch.num_tokens, seconds)

    def commit(self, scheduled: Scheduled, runs: Items[Items[int]]) -> None:
        """Take over what a step has computed. ``runs``: the tokens that each of its ``samples``
        drew: one, and with drafts as many more as were right.

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
        self._commit_decodes(scheduled, runs)
        for chunk in scheduled.chunks:
            seq, start, size = chunk
            if seq.slot < 0:
                continue
            self._count(seq)
            kv.advance(seq.slot, size)
            kv.register(seq.slot, seq.token_ids)
            kv.commit_state(seq.slot)
            if seq.owner.scores_prompt:
                scored = min(start + size, seq.owner.prompt_tokens - 1)
                seq.num_scored = max(seq.num_scored, scored)
            if chunk.is_last:
                self._begin_decoding(seq)
        first = len(scheduled.decodes)
        for seq, run in zip(scheduled.samples[first:], runs[first:], strict=True):
            if seq.slot >= 0:
                seq.token_ids.extend(run)
                self._builder.last_token[seq.slot] = run[-1]
                self.policy.on_tokens((seq,), (len(run),))
        if self._suspects and scheduled.samples and self.isolated is scheduled.samples[0].owner:
            self._suspects.popleft()  # it has drawn a token in isolation: it is not at fault
            self._requeue_all()

    def _commit_decodes(self, scheduled: Scheduled, runs: Items[Items[int]]) -> None:
        kv, decodes, drafts = self.kv, scheduled.decodes, scheduled.drafts
        drawn = runs[: len(decodes)]
        if not scheduled.stale:
            slots = self._decode_slots
        else:
            alive = [index for index, seq in enumerate(decodes) if seq.slot >= 0]
            drawn = [drawn[index] for index in alive]
            drafts = drafts and [drafts[index] for index in alive]
            decodes = [decodes[index] for index in alive]
            slots = np.array([seq.slot for seq in decodes], dtype=np.int32)
        if not decodes:
            return
        for seq, run in zip(decodes, drawn, strict=True):
            seq.token_ids.extend(run)
        sizes = 1 if drafts is None else np.array([len(run) for run in drawn], dtype=np.int32)
        num_tokens = kv.num_tokens[slots] + sizes
        kv.num_tokens[slots] = num_tokens
        self._builder.last_token[slots] = [run[-1] for run in drawn]
        # Sequences whose new positions complete a block:
        for index in np.flatnonzero(num_tokens % kv.block_size < sizes).tolist():
            seq = decodes[index]
            kv.register(seq.slot, seq.token_ids)
        if kv.state is not None and kv.state.is_changing:
            for seq in decodes:
                kv.commit_state(seq.slot)
        self.policy.on_tokens(decodes, map(len, drawn))
        if self.config.memory == "paged":
            for seq, draft in zip(decodes, drafts or (), strict=False):
                if draft:
                    kv.trim(seq.slot)

    def _count(self, seq: Sequence) -> None:
        """Count the cached prefix of a sequence whose first chunk has been computed: only now has
        it had all of it.
        """
        hit, seq.hit = seq.hit, None
        record = seq.owner
        if hit is None:
            return
        if record.counted:
            self.swapped_tokens += sum(tokens for _, tokens in hit.external_tokens)
            return
        record.counted = True
        record.cached_tokens = hit.num_tokens
        self.prompt_tokens += record.prompt_tokens
        if self.config.enable_prefix_caching and not record.scores_prompt:
            self.prefix_queries += record.prompt_tokens
            self.prefix_hits += hit.num_tokens
            self.external_hits.update(dict(hit.external_tokens))

    def _begin_decoding(self, seq: Sequence) -> None:
        """Let a sequence whose prompt is computed decode, and its forks with it."""
        self.prefilling.remove(seq)
        followers = seq.followers
        self._reserved_slots -= len(followers)
        for follower in followers:
            follower.slot = self.kv.fork(seq.slot)
            follower.stood = seq.stood
        for begun in (seq, *followers):
            begun.status = Status.DECODING
            insort(self.decoding, begun, key=BY_ARRIVAL)
        self._decode_slots_cache = None

    # Finish

    def finish(self, seq: Sequence, reason: FinishReason) -> bool:
        """End a sequence in whatever state; return True if it was its request's last."""
        if seq.status is Status.FINISHED:
            return False
        if seq.slot >= 0 and self._scheduled is not None:
            self._scheduled.stale = True
        self._withdraw(seq)
        self._served.discard(seq)
        seq.status = Status.FINISHED
        record = seq.owner
        record.finish_reasons[seq.choice] = reason
        record.num_unfinished -= 1
        if record.num_unfinished == 0:
            self._pausing.pop(record, None)
        if not self.has_work():
            self.shedding.clear()
        return record.num_unfinished == 0

    def _withdraw(self, seq: Sequence) -> None:
        """Take a sequence from where it is: a slot, the queue, or those that are paused."""
        if seq.slot >= 0:
            self._release(seq)
        elif seq.status in (Status.WAITING, Status.FETCHING):
            self.waiting.remove(seq)
        elif seq.status is Status.PAUSED:
            self.paused.remove(seq)
        self.waiting.end_prefetch(seq)

    def end(self, record: RequestRecord, reason: FinishReason) -> None:
        """End what is left of a request, whatever it is doing."""
        for seq in record.sequences:
            self.finish(seq, reason)

    # Fault isolation: when a step has failed and nothing shows whose fault it was, each of its
    # requests runs in isolation, without drafts, until it draws a token. One that fails so is at
    # fault, the others are not.

    @property
    def isolated(self) -> RequestRecord | None:
        """The request that is to run in isolation in the next step; None: there is none."""
        suspects = self._suspects
        while suspects and suspects[0].num_unfinished == 0:
            suspects.popleft()
        return suspects[0] if suspects else None

    def _isolate(self, records: Iterable[RequestRecord]) -> None:
        """Let these requests, and no others, run in isolation, in order of arrival."""
        self._suspects = deque(sorted(records, key=lambda record: record.sequences[0].order))

    def isolate(self, scheduled: Scheduled) -> bool:
        """Take back a step that failed, of which nothing counts, and isolate its requests. Return
        False if a request was in isolation already: then it is at fault.
        """
        self._scheduled = None
        owners = {id(seq.owner): seq.owner for seq in scheduled.sequences}
        if len(owners) < 2 and scheduled.drafts is None:
            return False
        self._requeue_all()
        self._isolate(owners.values())
        return True

    def start_over(self, records: Iterable[RequestRecord]) -> None:
        """Reset queue and cache after a failure that may have left them half done. Every unfinished
        sequence of ``records``, which are all requests, waits with its present tokens, and the
        requests that ran are isolated.
        """
        if self._scheduled is not None:
            self._scheduled.stale = True
        self._scheduled = self._refused = self._refused_preemption = None
        self.kv.clear()
        self.decoding.clear()
        self.prefilling.clear()
        self.paused.clear()
        self._decode_slots_cache = None
        self._reserved_slots = self._to_join = 0
        self.waiting.clear()
        suspects = []
        for record in records:
            unfinished = [seq for seq in record.sequences if seq.status is not Status.FINISHED]
            record.num_unfinished = len(unfinished)
            if any(seq.slot >= 0 for seq in record.sequences):
                suspects.append(record)
            for seq in record.sequences:
                seq.prefetch = None  # the cache has dropped what was read
            for seq in unfinished:
                if seq.status is not Status.FORKING:
                    self.waiting.push(seq, seq.queued if seq.slot < 0 else self.policy.now)
                seq.slot, seq.hit = -1, None
        if not suspects and (first := self.policy.head()) is not None:
            suspects = [first.owner]
        self._isolate(suspects)

    # Many steps at once

    def steady_steps(self) -> int:
        """Return for how many steps from now only the same decodes will run, unless the sampler
        ends one: no prompt is under way, no waiting sequence can be admitted, none reaches its
        limit, and blocks suffice. 0 if that is not certain.
        """
        quiet = self.decoding and not (
            self.prefilling or self.kv.shared_tails or self.isolated is not None
        )
        if not quiet or self.kv.connectors is not None or self._may_admit():
            return 0
        limit = min(seq.num_to_come for seq in self.decoding) - 1
        return self.kv.max_steps(self._decode_slots, limit)

    def _may_admit(self) -> bool:
        """Return whether a sequence may be admitted or dropped although none has left since the
        last step.
        """
        if self.waiting and self.shedding.is_asked:
            return True
        if self.config.batching == "static":
            return self._to_join > 0
        head = self.policy.head()
        if head is None:
            return False
        if self.policy.preempts:
            return True
        if self._free_slots < 1 + len(head.followers):
            return False
        windows = any(group.window for group in self.kv.layout.groups)  # they give blocks back
        return windows or self.kv.state is not None or not self._is_refused(head)

    @property
    def _decode_slots(self) -> Int32:
        """The slot of each decoding sequence. The array is made anew when these are others."""
        slots = self._decode_slots_cache
        if slots is None:
            slots = np.array([seq.slot for seq in self.decoding], dtype=np.int32)
            self._decode_slots_cache = slots
        return slots

    def decode_positions(self) -> Int32:
        """Return the position of each decoding sequence."""
        return self.kv.num_tokens[self._decode_slots]

    def leap(self, tokens: Int32) -> None:
        """Schedule and commit as many steady steps as ``tokens`` [decoding, steps] has columns."""
        slots = self._decode_slots
        self.policy.on_tokens(self.decoding, repeat(tokens.shape[1]))
        for seq, run in zip(self.decoding, tokens, strict=True):
            seq.token_ids.frombytes(run.tobytes())
        self.kv.advance_steps(slots, [seq.token_ids for seq in self.decoding], tokens.shape[1])
        self._builder.last_token[slots] = tokens[:, -1]

    # Checks

    def check_idle(self) -> None:
        """Raise `RuntimeError` if anything is held although no request is left. Costs nothing."""
        kv = self.kv
        if kv.num_branches:
            raise RuntimeError("a branch has outlived its step")
        if kv.connectors is not None and kv.connectors.staging.num_pinned:
            raise RuntimeError("no request is left, but blocks in host memory are pinned")
        if (
            self.has_work()
            or self.paused
            or kv.pool.num_used
            or kv.num_free_slots != self.config.max_num_seqs
        ):
            raise RuntimeError(
                f"no request is left, but {kv.pool.num_used} of {kv.pool.num_blocks} blocks and "
                f"{self.config.max_num_seqs - kv.num_free_slots} slots are held"
            )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if cache, queue and running sequences do not agree."""
        self.kv.check(seq.prefetch for seq in self.waiting if seq.prefetch is not None)
        if self.kv.num_branches:
            raise RuntimeError("a branch has outlived its step")
        running = self.decoding + self.prefilling
        slots = {seq.slot for seq in running}
        if len(slots) != len(running) or -1 in slots:
            raise RuntimeError("two running sequences share a slot, or one has none")
        if len(slots) + self.kv.num_free_slots != self.config.max_num_seqs:
            raise RuntimeError("a slot is neither free nor running")
        if any(seq.slot >= 0 or seq.status is not Status.PAUSED for seq in self.paused):
            raise RuntimeError("a paused sequence runs or waits")
        if self._reserved_slots != sum(len(seq.followers) for seq in self.prefilling):
            raise RuntimeError("slots are reserved for nobody")
        if self.waiting.tokens != sum(len(seq.token_ids) for seq in self.waiting):
            raise RuntimeError("the queue's tokens are miscounted")
