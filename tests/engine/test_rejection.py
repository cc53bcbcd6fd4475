"""Drafts checked by rejection in the engine: outputs have the target's distribution in any load.

Thousands of short requests decode under a drafter, in chunks, from shared and forked blocks, with
preemptions and branches, beside requests with stop strings, logprobs and penalties. How often each
beginning of three tokens came is compared to the exact probabilities by Pearson's test.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from engine.test_speculation import Letters
from executor import tiny
from octavo.engine.clock import Clock
from octavo.engine.engine import Engine, Step
from octavo.executor.base import Float32
from octavo.executor.native.executor import NativeExecutor
from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvLayout
from octavo.models.families import program
from octavo.sampling.native import NativeSampler
from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import Sampled, SamplerState
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import Outcome, Request, RequestRecord
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.drafter import Draft, Drafter, ModelDrafter
from octavo.spec_decode.ngram import NgramDrafter
from octavo.spec_decode.speculator import Speculator
from octavo.spec_decode.suffix import SuffixDrafter
from octavo.tools.verify.chi_square import chi_square

VOCAB = 70
SOME = (3, 11, 19, 42, 60)
PROMPT = [SOME[at] for at in np.random.default_rng(4).integers(len(SOME), size=37)]
PARAMS: dict[str, Any] = {
    "temperature": 2.5,
    "allowed_token_ids": SOME,
    "presence_penalty": 0.4,
    "top_k": 4,
    "max_tokens": 5,
}
LIMIT = 1e-6
REQUESTS = 400

# What the drafters below think of the token after each token: not what the target does.
TABLE = np.full((VOCAB, VOCAB), -np.inf, np.float32)
TABLE[:, [*SOME, 7]] = np.random.default_rng(9).normal(0, 1, (VOCAB, len(SOME) + 1))
Q = np.exp(TABLE)
Q /= Q.sum(axis=1, keepdims=True)


class Own:
    """A user's drafter: ``draft`` says what it guesses behind a token."""

    def __init__(self, draft: Callable[[random.Random, int, int], Draft]) -> None:
        self._draft = draft
        self._last: dict[int, int] = {}
        self._random = random.Random(2)

    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        self._last[sequence] = token_ids[-1]

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        self._last[sequence] = token_ids[-1]

    def end(self, sequence: int) -> None:
        del self._last[sequence]

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        return [
            self._draft(self._random, self._last[sequence], count)
            for sequence, count in zip(sequences, counts, strict=True)
        ]


def certain(rng: random.Random, last: int, count: int) -> Draft:
    return Draft(rng.choices(SOME, k=rng.randint(0, count)), rng.randrange(3))


def drawn(rng: random.Random, last: int, count: int) -> Draft:
    before = [last]
    for _ in range(rng.randint(0, count)):
        before += rng.choices(range(VOCAB), Q[before[-1]].tolist())
    return Draft(before[1:], 0, (), Q[before[:-1]])


def branching(rng: random.Random, last: int, count: int) -> Draft:
    first, *others = (rng.choices(SOME, k=rng.randint(0, count)) for _ in range(4))
    return Draft(first, 0, others)


class Forking(ModelDrafter):
    """Draws with forks of the target's states, and so with their noise."""

    def __init__(self, sampler: NativeSampler) -> None:
        self._sampler = sampler

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        return [self._draft(*each) for each in zip(decoding, counts, strict=True)]

    def _draft(self, seq: Seq, count: int) -> Draft:
        state = seq.output.sampler.fork(seq.choice)
        before = [seq.token_ids[-1]]
        q = np.empty((count, VOCAB), np.float32)
        for at in range(count):
            row = before[-1]
            self._sampler.probabilities(TABLE, [row], [state], q[at : at + 1])
            before += self._sampler.sample(TABLE, [row], [state]).token_ids
        return Draft(before[1:], 0, (), q)


DRAFTERS: dict[str, Callable[[NativeSampler], Drafter | ModelDrafter]] = {
    "ngram": lambda _: NgramDrafter(1, 3),
    "suffix": lambda _: SuffixDrafter(20),
    "certain": lambda _: Own(certain),
    "drawn": lambda _: Own(drawn),
    "branching": lambda _: Own(branching),
    "forking": Forking,
}


class AcceptsAll(NativeSampler):
    """The rule without its test."""

    def verify(
        self,
        logits: Float32 | None,
        rows: Sequence[int],
        states: Sequence[SamplerState],
        guesses: Sequence[int],
        drawn_from: Sequence[Float32 | None],
    ) -> Sampled:
        never = np.zeros(self.vocab_size, np.float32)  # a quotient without bound
        return super().verify(logits, rows, states, guesses, [never] * len(states))


@contextmanager
def running(
    drafter: str | None,
    kind: type[NativeSampler] = NativeSampler,
    *,
    max_num_seqs: int = 16,
    pools: float = 20,
    chunk: int = 64,
    logits_slice: int | None = None,
) -> Iterator[Engine]:
    """An engine of a tiny model, with blocks for ``pools`` sequences of the longest."""
    checkpoint = tiny.checkpoint(tiny.config())
    compute = program(checkpoint.config)
    layout = KvLayout.of(checkpoint.config, 16)
    limits = SchedulerConfig(
        max_model_len=80,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(chunk, max_num_seqs),
        max_logits_rows=max(chunk, max_num_seqs),
        max_branches=6,
    )
    scheduler = Scheduler(limits, layout, int(pools * peak_blocks(layout, limits.max_model_len)))
    executor = NativeExecutor(
        checkpoint,
        compute,
        layout,
        num_blocks=scheduler.kv.pool.num_blocks,
        max_tokens=limits.max_num_batched_tokens,
        max_logits_rows=limits.logits_rows,
        max_seqs=scheduler.kv.tables.shape[1],
        max_blocks_per_seq=scheduler.kv.tables.shape[2],
        logits_slice=logits_slice,
        threads=1,
    )
    sampler = kind(VOCAB, executor.capabilities.tier, executor.pool)
    speculator = None
    if drafter is not None:
        guesser = DRAFTERS[drafter](sampler)
        speculator = Speculator(guesser, VOCAB, 3, rejection=True)
    engine = Engine(
        executor,
        scheduler,
        sampler,
        Clock(),
        vocab_size=VOCAB,
        tokenizer=Letters(),  # type: ignore[arg-type]
        speculator=speculator,
    )
    try:
        yield engine
    finally:
        engine.close()


def request(name: str, prompt: list[int], params: SamplingParams) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=params)


class Rows:
    """Observes: the logits of each step's first row."""

    def __init__(self) -> None:
        self.last: Float32 = np.empty(0, np.float32)

    def on_step(self, step: Step) -> None:
        self.last = step.result.logits[:1].copy()

    def on_end(self, record: RequestRecord) -> None: ...


@cache
def exact() -> dict[tuple[int, ...], float]:
    """The probability of each beginning of three tokens."""
    params = SamplingParams(seed=0, **PARAMS).validated(VOCAB)
    known: dict[tuple[int, ...], float] = {(): 1.0}
    with running(None) as engine:
        engine.observers.append(rows := Rows())
        for _ in range(3):
            longer = {}
            for before, probability in known.items():
                prompt = [*PROMPT, *before]
                one = SamplingParams(max_tokens=1, seed=0)
                engine.add_request(request(str(before), prompt, one))
                while engine.has_work():
                    engine.step()
                state = engine.sampler.new_state(params, PROMPT, ())
                for token in before:
                    state.record(token)
                p = engine.sampler.probabilities(rows.last, [0], [state])[0]
                for token in SOME:
                    longer[(*before, token)] = probability * float(p[token])
            known = longer
    return known


class Life:
    """What came of a request's choice."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.ends = 0


def live(engine: Engine, count: int) -> tuple[Counter[tuple[int, ...]], list[RequestRecord]]:
    """``count`` requests with `PARAMS`, some for several answers, and others between them: how
    often each beginning came.
    """
    rng = random.Random(8)
    lives: dict[tuple[str, int], Life] = {}
    records: list[RequestRecord] = []
    waiting = []
    for index in range(count):
        params = SamplingParams(seed=index, n=rng.choice((1, 1, 1, 4)), **PARAMS)
        waiting.append(request(f"counted {index}", PROMPT, params))
        if index % 6 == 0:
            prompt = rng.choices(range(VOCAB), k=rng.randint(1, 50))
            other = SamplingParams(
                seed=index,
                max_tokens=rng.randint(1, 25),
                min_tokens=rng.randint(0, 1),
                temperature=rng.choice((0.0, 0.8)),
                repetition_penalty=1.2,
                stop=("ab", "c") if rng.random() < 0.5 else (),
                stop_token_ids=(5, 19),
                logprobs=2,
                prompt_logprobs=1 if rng.random() < 0.3 else None,
            )
            waiting.append(request(f"other {index}", prompt, other))
    while waiting or engine.has_work():
        while waiting and len(engine.requests) < 40:
            engine.add_request(waiting.pop())
        for delta in engine.step():
            life = lives.setdefault((delta.request_id, delta.choice), Life())
            life.tokens += delta.token_ids
            life.logprobs += delta.logprobs or []
            life.ends += delta.finish_reason is not None
            if delta.record is not None:
                records.append(delta.record)
        if rng.random() < 0.1:
            engine.check_integrity()
    engine.check_integrity()
    came: Counter[tuple[int, ...]] = Counter()
    for (name, _), life in lives.items():
        assert life.ends == 1
        if name.startswith("counted"):
            assert len(life.tokens) == 5
            came[tuple(life.tokens[:3])] += 1
        else:
            assert [entry.token_id for entry in life.logprobs] == life.tokens
            assert all(entry.logprob <= 0 for entry in life.logprobs)
    assert all(record.outcome is Outcome.FINISHED for record in records)
    delivered = sum(len(life.tokens) for life in lives.values())
    assert delivered == sum(record.completion_tokens for record in records)
    return came, records


def compare(came: Counter[tuple[int, ...]]) -> float:
    cells = list(product(SOME, repeat=3))
    assert set(came) <= set(cells)
    return chi_square([came[cell] for cell in cells], [exact()[cell] for cell in cells])


LOADS: dict[str, dict[str, Any]] = {
    "roomy": {},
    # Prompts and logits in pieces, and never blocks for all: preemptions.
    "tight": {"pools": 1.5, "chunk": 19, "max_num_seqs": 8, "logits_slice": 8},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("load", LOADS)
def test_outputs_have_the_targets_distribution(drafter: str, load: str) -> None:
    check(drafter, load, REQUESTS)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("load", LOADS)
def test_so_do_many_more(drafter: str, load: str) -> None:
    check(drafter, load, 20_000)


def check(drafter: str, load: str, requests: int) -> None:
    with running(drafter, **LOADS[load]) as engine:
        came, records = live(engine, requests)
        stats = engine.stats()
    assert compare(came) > LIMIT
    assert came.total() > 1.5 * requests
    assert stats.drafter_failures == 0
    assert requests / 4 < stats.accepted_tokens < 0.9 * stats.draft_tokens
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    assert stats.draft_tokens == sum(record.draft_tokens for record in records)
    assert stats.accepted_tokens == sum(record.accepted_tokens for record in records)
    assert (stats.preemptions > 0) == (load == "tight")


@pytest.mark.parametrize("drafter", ["ngram", "drawn"])
def test_a_rule_that_accepts_all_would_be_noticed(drafter: str) -> None:
    with running(drafter, AcceptsAll) as engine:
        came, _ = live(engine, REQUESTS)
    assert compare(came) < 1e-12


def test_greedy_output_is_that_without_drafts() -> None:
    texts: dict[str | None, list[list[int]]] = {}
    for drafter in (None, *DRAFTERS):
        with running(drafter) as engine:
            for index in range(20):
                prompt = random.Random(index).choices(SOME, k=20)
                params = SamplingParams(temperature=0, max_tokens=12, frequency_penalty=0.1)
                engine.add_request(request(str(index), prompt, params))
            tokens: dict[str, list[int]] = {}
            while engine.has_work():
                for delta in engine.step():
                    tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            texts[drafter] = [tokens[str(index)] for index in range(20)]
            assert drafter is None or engine.stats().draft_tokens > 0
    assert all(each == texts[None] for each in texts.values())
