"""Branches in the engine: what they may take, how they are counted, and that none is left over.

That outputs do not change is drawn in test_same_bits.py and, token by token, in test_draw.py.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import engine.test_same_bits as bits
from engine.checking import VOCAB, FakeState, build
from engine.drafting import Branching, Oracle
from engine.world import Setting, World, random_action
from faults import patch
from octavo.engine.engine import Engine
from octavo.executor.base import Batch, StepResult
from octavo.kv_cache.cache import KvCache
from octavo.kv_cache.layout import KvDtype
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Outcome, Request, RequestRecord
from octavo.scheduler.sequence import Sequence as Seq


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often branches were made, were not, were adopted, and were closed with their slot."""
    counts: Counter[str] = Counter()
    branch, adopt, close = KvCache.branch, KvCache.adopt, KvCache.close

    def counting_branch(kv: KvCache, slot: int, count: int) -> int | None:
        row = branch(kv, slot, count)
        counts["refused" if row is None else "made"] += 1
        return row

    def counting_adopt(kv: KvCache, row: int) -> None:
        counts["adopted"] += 1
        adopt(kv, row)

    def counting_close(kv: KvCache, slot: int) -> None:
        before = kv.num_branches
        close(kv, slot)
        counts["closed"] += before - kv.num_branches

    with monkeypatch.context() as patch:
        patch.setattr(KvCache, "branch", counting_branch)
        patch.setattr(KvCache, "adopt", counting_adopt)
        patch.setattr(KvCache, "close", counting_close)
        yield counts


def live(seed: int, worlds: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Random loads with random trees; cache content and accounts are checked at each step."""
    rng = random.Random(seed)
    with counted(monkeypatch) as counts:
        for number in range(worlds):
            setting = Setting.drawn(rng)
            budget = setting.max_num_seqs + rng.choice((3, 16, 64))
            setting = replace(
                setting,
                memory="paged",  # what is reserved is not shared
                chunked_prefill=True,
                max_num_batched_tokens=budget,
                max_logits_rows=rng.choice((setting.max_num_seqs + 3, budget, budget)),
                max_branches=rng.choice((1, 3, 20)),
                drafter="tree",
            )
            world = World(setting)
            try:
                for _ in range(120):
                    random_action(world, rng)
                world.finish()
            except BaseException:
                print(f"world {number} of seed {seed}: {setting}")
                raise
            counts["preempted"] += world.engine.stats().preemptions
            counts["crashed"] += world.crashes
    return counts


def test_random_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = live(3, 100, monkeypatch)
    kinds = ("made", "refused", "adopted", "closed", "preempted")
    assert min(counts[kind] for kind in kinds) > 1, counts


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_random_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    assert live(99, 2000, monkeypatch)["crashed"] > 0


class Told(Branching):
    """Proposes a tree that is given, for all sequences: from what the target will draw."""

    def tell(self, *paths: list[int]) -> None:
        """Each token is how far it is from the one that will be drawn there: 0 is right."""
        self._paths = paths

    def propose(self, decoding: list[Seq], num_tokens: int, room: int) -> list[list[int]]:
        trees = [[self._named(seq, path) for path in self._paths] for seq in decoding]
        self.trees = {index: tree[1:] for index, tree in enumerate(trees)}
        return [tree[0] for tree in trees]

    def _named(self, seq: Seq, path: list[int]) -> list[int]:
        generated = len(seq.token_ids) - seq.owner.prompt_tokens
        seed = seq.owner.params.seed or 0
        states = [FakeState(seed, seq.choice, [0] * (generated + at)) for at in range(len(path))]
        return [
            (self.sampler.draw(state) + off) % VOCAB
            for state, off in zip(states, path, strict=True)
        ]


def told(engine: Engine, *paths: list[int]) -> Told:
    oracle = Oracle("tree", engine.sampler)
    speculator = Told(oracle, VOCAB, 8)
    speculator.tell(*paths)
    engine.speculator = oracle.speculator = speculator
    return speculator


def add(engine: Engine, name: str, prompt: int, max_tokens: int, n: int = 1) -> RequestRecord:
    params = SamplingParams(max_tokens=max_tokens, seed=ord(name), ignore_eos=True, n=n)
    request = Request(request_id=name, prompt_token_ids=[1] * prompt, params=params)
    return engine.add_request(request)


def test_branches_are_counted_as_drafts() -> None:
    engine = build(max_branches=2, max_logits_rows=64)
    told(engine, [0, 1, 0], [1, 0], [0, 0, 0, 1, 1])
    record = add(engine, "a", 5, 9)
    runs = []
    while engine.has_work():
        runs += [len(delta.token_ids) for delta in engine.step() if delta.token_ids]
        engine.check_integrity()
    # A first token; four by the second branch, twice; cut to what is to come, nothing is left.
    assert runs == [1, 4, 4]
    stats = engine.stats()
    assert (stats.drafts, stats.decode_passes) == (2, 2)
    assert stats.draft_tokens == record.draft_tokens == (3 + 2 + 5) + (3 + 2 + 3)
    assert stats.accepted_tokens == record.accepted_tokens == 6
    assert stats.accepted_per_position == [2, 2, 2, 0, 0]
    assert stats.computed_tokens == 5 + (1 + 3) + (1 + 2) + (1 + 5) + (1 + 3) + (1 + 2) + (1 + 3)


@pytest.mark.parametrize(("rows", "blocks"), [(0, 64), (20, 64), (2, 64), (20, 5)])
def test_branches_take_only_what_is_left(rows: int, blocks: int) -> None:
    """Rows of the tables, logits, tokens and blocks are limited; nobody is preempted."""
    engine = build(
        max_num_seqs=2, max_branches=rows, num_blocks=blocks, max_logits_rows=12, block_size=8,
        max_num_batched_tokens=12, enable_prefix_caching=False,
    )  # fmt: skip
    told(engine, [0, 1, 1], [1, 1, 1], [0, 0, 0, 0])
    for name in "ab":
        add(engine, name, 7, 12)
    sizes = []
    while engine.has_work():
        engine.step()
        sizes.append(engine.stats().last_step_tokens)
        engine.check_integrity()
    assert engine.stats().preemptions == 0
    assert max(sizes) <= 12
    if rows == 0:
        assert max(sizes[2:]) == 8  # behind the prompts


def test_a_sequence_without_a_draft_has_no_branches() -> None:
    engine = build(max_branches=4, max_logits_rows=64)
    told(engine, [], [0, 0])
    record = add(engine, "a", 3, 6)
    while engine.has_work():
        engine.step()
    assert record.draft_tokens == 0


def test_forks_of_a_request_branch_each_for_itself() -> None:
    """n > 1: the forks share the block that they go on in, and each branch copies it."""
    engine = build(max_branches=9, max_logits_rows=64, block_size=4)
    told(engine, [1, 1], [0, 0, 0], [0, 1])
    add(engine, "a", 6, 13, n=3)
    texts: dict[int, list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            texts.setdefault(delta.choice, []).extend(delta.token_ids)
        engine.check_integrity()
    for choice, tokens in texts.items():
        states = [FakeState(ord("a"), choice, [0] * at) for at in range(13)]
        assert tokens == [engine.sampler.draw(state) for state in states]  # type: ignore
    assert engine.stats().decode_passes == 3 * 3


@pytest.mark.parametrize("crash", [False, True])
def test_whoever_leaves_in_the_middle_of_a_step_takes_its_branches_along(crash: bool) -> None:
    engine = build(max_branches=9, max_logits_rows=64, block_size=4)
    kv, executor = engine.scheduler.kv, engine.executor
    told(engine, [1, 1], [0, 0, 0], [0, 1])
    records = {name: add(engine, name, 6, 20) for name in "ab"}
    engine.step()
    assert kv.num_branches == 0
    seen = []

    def during() -> None:
        executor.during = lambda: None
        seen.append(kv.num_branches)
        engine.abort("a")
        seen.append(kv.num_branches)
        kv.check()
        if crash:
            raise RuntimeError("injected")

    executor.during = during
    engine.step()
    assert seen == [4, 2]
    engine.check_integrity()
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    assert records["a"].outcome is Outcome.ABORTED
    assert records["b"].outcome is Outcome.FINISHED
    assert records["b"].completion_tokens == 20


@pytest.mark.parametrize("kv_dtype", [KvDtype.FP16, KvDtype.INT8, KvDtype.INT4])
@pytest.mark.parametrize("name", ["llama Q4_0", "gemma3 F32, window of 8, soft-caps"])
def test_behind_the_same_token_every_branch_has_the_same_bits(name: str, kv_dtype: KvDtype) -> None:
    """The last token is put through again in each branch: its logits are never looked at, and are
    those in the sequence's own slot.
    """
    setting = bits.Setting(
        drafter="forked", num_drafts=7, spare_rows=80, max_branches=16, kv_dtype=kv_dtype
    )
    compared = 0
    with bits.running(bits.tiny_model(name), setting) as (engine, _):
        execute = engine.executor.execute

        def all_rows(batch: Batch) -> StepResult:
            nonlocal compared
            step = engine.scheduler._scheduled
            if not step.branches:
                return execute(batch)
            wanted = batch.logits_rows
            batch.logits_rows = np.arange(batch.num_tokens, dtype=np.int32)
            result = execute(batch)
            logits = result.logits
            assert len(logits) == batch.num_tokens
            firsts = dict(zip(batch.seq_slots.tolist(), batch.seq_offsets.tolist(), strict=False))
            for index, branches in step.branches.items():
                own = logits[firsts[step.decodes[index].slot]]
                for branch in branches:
                    assert logits[firsts[branch.slot]].tobytes() == own.tobytes()
                    compared += 1
            batch.logits_rows = wanted
            return StepResult(logits[wanted].copy(), result.duration)

        patch(engine.executor, execute=all_rows)
        for index in range(3):
            params = SamplingParams(max_tokens=40, seed=index, temperature=0.8, ignore_eos=True)
            prompt = [3 + (index + at * at) % 40 for at in range(21)]
            engine.add_request(
                Request(request_id=str(index), prompt_token_ids=prompt, params=params)
            )
        while engine.has_work():
            engine.step()
            engine.check_integrity()
    assert compared > 50
