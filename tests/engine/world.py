"""Random loads on an engine whose cache content, progress and outcomes are checked at each step.

Driven by hypothesis (short, shrinks) and by a seeded generator (a million steps).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.checking import VOCAB, CheckingExecutor, FakeSampler, FakeState, build, layout
from engine.drafting import Branching, Oracle
from engine.tiering import slow_tiers
from octavo.engine.clock import VirtualClock
from octavo.engine.engine import Step
from octavo.engine.outputs import Delta
from octavo.kv.prefix import chain_hash
from octavo.sample.params import InvalidParameter, SamplingParams
from octavo.schedule.request import (
    AdmissionError,
    FinishReason,
    Outcome,
    Request,
    RequestRecord,
)
from octavo.schedule.sequence import Status
from octavo.speculate.speculator import Speculator

BROKEN_SEED = 13  # such a request's logits are not numbers
LATE_SEED = 14  # nor are this one's, from its fourth token on
POISON = 63  # the executor crashes on a batch with this token


class WrongStep(BaseException):
    """No `Exception`: those of observers are the log's."""


@dataclass
class Life:
    """What the test knows of a request."""

    record: RequestRecord
    params: SamplingParams
    prompt: list[int]
    texts: dict[int, list[int]] = field(default_factory=dict)  # choice -> tokens delivered
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    deltas: int = 0
    ended: bool = False


@dataclass(frozen=True)
class Setting:
    """One engine under test."""

    windows: Sequence[int | None] = (None,)
    block_size: int = 4
    num_blocks: int = 24
    max_model_len: int = 48
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_logits_rows: int | None = None
    max_branches: int = 0
    enable_prefix_caching: bool = True
    vocab: int = 3
    hashes: int = 0  # how many different hashes there are, to force collisions; 0: all
    max_num_queued_reqs: int | None = None
    host_blocks: int = 0  # of a tier in host memory; 0: none
    disk: bool = False  # a tier on disk behind it, which now and then loses a block
    drafter: str | None = None  # a kind of `Oracle`
    num_drafts: int | None = None
    rejection: bool = False
    batching: Literal["continuous", "static"] = "continuous"
    memory: Literal["paged", "reserve"] = "paged"
    chunked_prefill: bool = True

    @staticmethod
    def drawn(rng: random.Random) -> Setting:
        block_size = rng.choice((1, 2, 4, 5, 16))
        max_model_len = rng.choice((8, 24, 48, 100))
        windows = rng.choice(
            ((None,), (None, None), (6,), (None, 5), (9, None, 1), (3, 17), (4, 8))
        )
        whole = len(windows) * (-(-max_model_len // block_size))
        max_num_seqs = rng.choice((1, 2, 4, 7))
        setting = Setting(
            windows=windows,
            block_size=block_size,
            num_blocks=max(1, int(whole * rng.choice((0.5, 0.8, 1.0, 1.3, 2.0, 5.0)))),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice((0, 1, 3, 16, 64)),
            max_logits_rows=rng.choice((None, max_num_seqs + 5, max_num_seqs + 100)),
            enable_prefix_caching=rng.random() < 0.8,
            vocab=rng.choice((1, 2, 3, 60)),
            hashes=rng.choice((0, 0, 0, 5, 30, 200)),
            max_num_queued_reqs=rng.choice((None, None, 3)),
            max_branches=rng.choice((0, 1, 3, 20)),
            drafter=rng.choice((None, "tree", "tree", *Oracle.KINDS)),
            num_drafts=rng.choice((None, 1, 2, 5, 20)),
            rejection=rng.random() < 0.4,
        )
        if setting.enable_prefix_caching and rng.random() < 0.5:
            host_blocks = max(1, int(setting.num_blocks * rng.choice((0.3, 1.0, 4.0))))
            setting = replace(setting, host_blocks=host_blocks, disk=rng.random() < 0.5)
        if rng.random() < 0.15:
            setting = replace(setting, batching="static")
        if rng.random() < 0.15:
            setting = replace(
                setting,
                memory="reserve",
                enable_prefix_caching=False,
                max_branches=0,
                host_blocks=0,
            )
        if rng.random() < 0.15:
            most = max(max_model_len, setting.max_num_batched_tokens)
            setting = replace(setting, chunked_prefill=False, max_num_batched_tokens=most)
        return setting


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting

        def hasher(parent: int, content: bytes) -> int:
            value = chain_hash(parent, content)
            return value % setting.hashes if setting.hashes else value

        self.tiers = None
        clock = VirtualClock()
        if setting.host_blocks:
            self.tiers = slow_tiers(
                layout(setting.windows, setting.block_size),
                setting.host_blocks,
                disk=setting.disk,
                clock=clock,
            )
        self.engine = build(
            tiers=self.tiers,
            clock=clock,
            windows=setting.windows,
            block_size=setting.block_size,
            num_blocks=setting.num_blocks,
            max_model_len=setting.max_model_len,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_logits_rows=setting.max_logits_rows,
            max_branches=setting.max_branches,
            enable_prefix_caching=setting.enable_prefix_caching,
            max_num_queued_reqs=setting.max_num_queued_reqs,
            vocab=setting.vocab,
            hasher=hasher,
            batching=setting.batching,
            memory=setting.memory,
            chunked_prefill=setting.chunked_prefill,
        )
        assert isinstance(self.engine.executor, CheckingExecutor)
        assert isinstance(self.engine.sampler, FakeSampler)
        self.executor = self.engine.executor
        self.sampler = self.engine.sampler
        self.sampler.broken.update({BROKEN_SEED: 0, LATE_SEED: 3})
        self.executor.poison = POISON
        if setting.drafter is not None:
            oracle = Oracle(setting.drafter, self.sampler)
            kind = Branching if setting.drafter == "tree" else Speculator
            self.engine.speculator = oracle.speculator = kind(
                oracle,
                VOCAB,
                setting.num_drafts,
                rejection=setting.rejection,
                now=self.engine.clock.now,
            )
        self.engine.observers.append(self)
        self.lives: dict[str, Life] = {}
        self.outcomes: list[RequestRecord] = []
        self.count = 0
        self.steps = 0
        self.crashes = 0
        self.sizes: list[int] = []  # the longest run of tokens of each step

    # The engine's observer

    def on_step(self, step: Step) -> None:
        try:
            self.look(step)
        except AssertionError as error:
            raise WrongStep("a step is not as it should be") from error

    def look(self, step: Step) -> None:
        self.steps += 1
        scheduler = self.engine.scheduler
        unfinished = [
            seq
            for life in self.lives.values()
            if (state := self.engine._requests.get(life.record.request_id))
            for seq in state.sequences
            if seq.status not in (Status.FORKING, Status.FETCHING, Status.FINISHED)
        ]
        whole = not self.setting.chunked_prefill  # then a prompt may wait for others to end
        if unfinished and not step.scheduled.stale and not scheduler._suspects and not whole:
            oldest = min(unfinished, key=lambda seq: seq.order)
            assert oldest in step.scheduled.sequences, "the oldest does not progress"
        assert 0.0 <= scheduler.kv.waste() <= 1.0
        self.sizes.append(max(map(len, step.drawn.runs), default=0))

    def on_end(self, record: RequestRecord) -> None:
        assert record.outcome is not None
        self.outcomes.append(record)

    # What can happen

    def submit(self, prompt: list[int], salt: str | None = None, **params: object) -> None:
        self.count += 1
        request = Request(
            request_id=f"r{self.count}",
            prompt_token_ids=prompt,
            params=SamplingParams(ignore_eos=True, **params),  # type: ignore[arg-type]
            cache_salt=salt,
        )
        before = len(self.outcomes)
        try:
            record = self.engine.add_request(request)
        except (AdmissionError, InvalidParameter):
            assert [record.outcome for record in self.outcomes[before:]] == [Outcome.REJECTED]
            return
        self.lives[record.request_id] = Life(record, request.params, prompt)

    def abort(self, request_id: str) -> None:
        free = self.engine.scheduler.kv.pool.num_free
        assert self.engine.abort(request_id)
        assert self.engine.scheduler.kv.pool.num_free >= free
        assert self.lives[request_id].record.outcome is Outcome.ABORTED
        assert not self.engine.abort(request_id)

    def abort_during_next_step(self, request_id: str) -> None:
        def during() -> None:
            self.executor.during = lambda: None
            if self.lives.get(request_id) and not self.lives[request_id].record.outcome:
                self.abort(request_id)

        self.executor.during = during

    def crash_next_step(self) -> None:
        self.crashes += 1
        self.executor.crash_next = True

    def step(self) -> None:
        for delta in self.engine.step():
            self.deliver(delta)
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        for seq in scheduler.decoding:
            written = int(scheduler.kv.num_tokens[seq.slot])
            assert written == len(seq.token_ids) - 1
            held = written  # rejected drafts keep no blocks
            if self.setting.memory == "reserve":
                held = seq.owner.num_prompt_tokens + seq.owner.max_tokens - 1
            assert scheduler.kv.num_blocks[seq.slot] == -(-held // self.setting.block_size)
        if not self.engine.has_work():
            self.engine.check_integrity()

    def deliver(self, delta: Delta) -> None:
        life = self.lives[delta.request_id]
        assert not life.ended, "a delta after the last"
        assert delta.choice not in life.reasons, "a delta after a choice's last"
        life.deltas += 1
        tokens = life.texts.setdefault(delta.choice, [])
        state = FakeState(life.params.seed or 0, delta.choice, tokens)
        for token in delta.token_ids:
            assert token == self.sampler.draw(state), "another sequence's token"
            tokens.append(token)
        if life.params.prompt_logprobs is not None and life.deltas == 1 and delta.token_ids:
            scored = delta.prompt_logprobs
            assert scored is not None
            assert scored[0] is None
            assert [entry.token_id for entry in scored[1:] if entry] == life.prompt[1:]
        else:
            assert delta.prompt_logprobs is None
        if delta.finish_reason is not None:
            life.reasons[delta.choice] = delta.finish_reason
            if delta.finish_reason is FinishReason.LENGTH:
                assert len(tokens) == life.record.max_tokens
        if delta.record is not None:
            self.end(life, delta)

    def end(self, life: Life, delta: Delta) -> None:
        life.ended = True
        record = life.record
        assert delta.record is record
        assert len(life.reasons) == life.params.n
        assert record.finish_reasons == [life.reasons[choice] for choice in range(life.params.n)]
        assert record.completion_tokens == sum(map(len, life.texts.values()))
        assert record.accepted_tokens <= min(record.completion_tokens, record.draft_tokens)
        assert self.outcomes.count(record) == 1
        if record.outcome is Outcome.FINISHED:
            assert set(life.reasons.values()) == {FinishReason.LENGTH}
        elif record.outcome is Outcome.FAILED:
            assert record.error
            broken = life.params.seed in (BROKEN_SEED, LATE_SEED)
            poisoned = POISON in life.prompt
            if life.params.seed == LATE_SEED and not poisoned and not self.crashes:
                assert max(map(len, life.texts.values())) == 3
            assert broken or poisoned or self.crashes, "a request failed for another's fault"
        del self.lives[record.request_id]

    def finish(self) -> None:
        """Let everything end; nothing may be left over."""
        limit = 100 + sum(
            20 * (len(life.prompt) + (life.record.max_tokens or 0) * life.params.n)
            for life in self.lives.values()
        )
        while self.engine.has_work():
            self.step()
            limit -= 1
            assert limit > 0, "a request is stuck"
        assert not self.lives
        pool = self.engine.scheduler.kv.pool
        assert pool.num_free == pool.num_blocks
        if self.tiers is not None:
            self.tiers.settle()
            assert not self.tiers.memory.num_pins
        assert len({id(record) for record in self.outcomes}) == self.count == len(self.outcomes)
        stats = self.engine.stats()
        assert stats.draft_tokens == sum(record.draft_tokens for record in self.outcomes)
        assert stats.accepted_tokens == sum(record.accepted_tokens for record in self.outcomes)
        assert stats.accepted_tokens == sum(stats.accepted_per_position)
        speculator = self.engine.speculator
        assert speculator is None or not speculator.num_known


def random_prompt(rng: random.Random, limit: int) -> list[int]:
    """Prompts share prefixes of all lengths: each is the start of one of few texts, and a tail."""
    base = random.Random(rng.randrange(3))
    length = rng.randint(0, limit)
    text = [base.randrange(3) for _ in range(length)]
    tail = [rng.randrange(POISON) for _ in range(rng.choice((0, 0, 1, 5)))]
    return text + tail + [POISON] * (rng.random() < 0.01)


def random_action(world: World, rng: random.Random) -> None:
    setting = world.setting
    roll = rng.random()
    if roll < 0.25 and len(world.lives) < 40:
        world.submit(
            random_prompt(rng, setting.max_model_len),
            rng.choice((None, None, "a", "b")),
            n=rng.choice((1, 1, 1, 2, 3)),
            max_tokens=rng.choice((None, 1, 2, 5, 20)),
            seed=rng.choice((1, 2, 3, 4, BROKEN_SEED, LATE_SEED) if roll < 0.02 else (1, 2, 3, 4)),
            prompt_logprobs=rng.choice((None, None, None, 0)),
        )
    elif roll < 0.28 and world.lives:
        alive = [name for name, life in world.lives.items() if not life.record.outcome]
        if alive:
            name = rng.choice(alive)
            rng.choice((world.abort, world.abort_during_next_step))(name)
    elif roll < 0.282:
        world.crash_next_step()
    else:
        world.step()
