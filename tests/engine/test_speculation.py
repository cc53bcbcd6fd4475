"""Speculation in the engine: the same outputs, exact ends and counts, and time never lost.

That nothing else changes under any load is what test_lives.py and test_same_bits.py draw.
"""

import logging
from collections.abc import Collection
from collections.abc import Sequence as Items
from functools import cache
from typing import Any

import pytest

from engine.checking import FakeSampler, build
from engine.drafting import Coin, Finding, Heads, Oracle, Passes, Turning
from faults import patch
from octavo.engine.clock import VirtualClock
from octavo.engine.engine import Engine
from octavo.engine.outputs import Delta
from octavo.engine.stats import EngineStats
from octavo.executor.base import Batch, StepResult
from octavo.executor.cost import Rates
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.kv_cache.layout import KvLayout
from octavo.models.config import Activation, Layer, ModelConfig, Rope
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.sampling.scripted import ScriptedSampler
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import FinishReason, Outcome, Request
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence
from octavo.spec_decode.drafter import Draft
from octavo.spec_decode.speculator import Speculator

MODEL = ModelConfig(
    family="llama",
    vocab_size=4096,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    context_length=8192,
    norm_eps=1e-5,
    activation=Activation.SILU,
    attention_scale=0.125,
    tied_embeddings=True,
    layers=(Layer(Rope(10000.0, 64, interleaved=True)),) * 6,
)


class Letters:
    """A tokenizer of letters; each fourth token is half a character."""

    vocab_size = MODEL.vocab_size
    bos_token_id = None
    eos_token_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return b"\xc3" if token_id % 4 == 0 else bytes([97 + token_id % 7])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return False


def simulator(
    batch: int,
    *,
    rate: float | None,
    cost: float | None = None,
    turns: float | None = None,
    reading: float = 0.0,
    pinned: int | None = None,
    stop_rate: float = 0.0,
    tokenizer: Any = None,
    eos: Collection[int] = (),
) -> Engine:
    """The engine on a cost model; ``rate``: of right guesses, None: no speculation; ``cost``:
    seconds of each pass of a drafter that computes, None: one that does not; ``turns``: rate of
    right alternatives to wrong guesses, None: there are none; ``reading``: seconds of each token
    that a drafter that computes has not seen.
    """
    layout = KvLayout.of(MODEL)
    limits = SchedulerConfig(
        max_model_len=1024, max_num_seqs=batch, max_logits_rows=512, max_branches=16
    )
    rates = Rates(30e9, 200e9, 50e-6, int8_ops_per_second=500e9)
    clock, sampler = VirtualClock(), ScriptedSampler(MODEL.vocab_size, stop_rate)
    speculator = None
    if rate is not None:
        drafter: Coin | Passes = Coin(rate, sampler)
        if turns is not None:
            drafter = Turning(rate, turns, sampler)
        if cost is not None:
            drafter = Passes(rate, cost, sampler, clock, reading)
        speculator = Speculator(drafter, MODEL.vocab_size, pinned, now=clock.now)
        if isinstance(drafter, Coin):
            drafter.speculator = speculator
    return Engine(
        SimulatedExecutor(program(MODEL), layout, num_blocks=64 * batch, rates=rates),
        Scheduler(limits, layout, 64 * batch),
        sampler,
        clock,
        vocab_size=MODEL.vocab_size,
        eos_token_ids=eos,
        tokenizer=tokenizer,
        speculator=speculator,
    )


class Answer:
    """A choice's deltas, joined."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.end: tuple[Any, ...] = ()

    def add(self, delta: Delta) -> None:
        assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        if delta.finish_reason is not None:
            self.end = delta.finish_reason, delta.stop_reason

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and vars(self) == vars(other)


def answers(engine: Engine, requests: int, **params: Any) -> tuple[dict[Any, Answer], EngineStats]:
    """Every choice's answer; usage is checked against what was delivered."""
    for index in range(requests):
        prompt = [(index * 31 + at * 7) % MODEL.vocab_size for at in range(40)]
        settings = SamplingParams(seed=index, **params)
        engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, params=settings))
    got: dict[Any, Answer] = {}
    records = []
    while engine.has_work():
        for delta in engine.step():
            got.setdefault((delta.request_id, delta.choice), Answer()).add(delta)
            if delta.record is not None:
                records.append(delta.record)
        engine.check_integrity()
    for record in records:
        delivered = [len(got[key].token_ids) for key in got if key[0] == record.request_id]
        assert record.outcome is Outcome.FINISHED
        assert record.completion_tokens == sum(delivered)
        assert record.accepted_tokens <= sum(delivered) - len(delivered)  # the first is no draft
    stats = engine.stats()
    assert stats.generation_tokens == sum(record.completion_tokens for record in records)
    assert stats.accepted_tokens == sum(record.accepted_tokens for record in records)
    return got, stats


@cache
def simulated(
    batch: int, requests: int, rate: float | None = None, *, max_tokens: int = 150, **drafting: Any
) -> tuple[float, EngineStats]:
    """Seconds and counters of so many requests; without a ``rate`` nothing is drafted."""
    engine = simulator(batch, rate=rate, **drafting)
    _, stats = answers(engine, requests, max_tokens=max_tokens)
    return engine.clock.now(), stats


ENDS: list[dict[str, Any]] = [
    {"max_tokens": 50},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 80, "stop": ("ab", "cde", "é"), "n": 2},
    {"max_tokens": 80, "stop": ("ab", "c"), "logprobs": 2},
    {"max_tokens": 80, "stop": ("ab",), "include_stop_str_in_output": True, "min_tokens": 30},
    {"max_tokens": 200, "logprobs": 2, "n": 3},
    {"max_tokens": 200, "logprobs": 0, "min_tokens": 9, "stop_token_ids": (5,)},
    {"max_tokens": 60, "prompt_logprobs": 1},
]


@cache
def ended(
    case: int, rate: float | None = None, pinned: int | None = None
) -> tuple[dict[Any, Answer], EngineStats]:
    engine = simulator(8, rate=rate, pinned=pinned, stop_rate=0.03, tokenizer=Letters(), eos=(7,))
    return answers(engine, 5, **ENDS[case])


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("pinned", [None, 3, 64])
@pytest.mark.parametrize("case", range(len(ENDS)))
def test_answers_end_where_they_would_have_ended(
    rate: float, pinned: int | None, case: int
) -> None:
    expected, _ = ended(case)
    got, stats = ended(case, rate, pinned)
    assert got == expected
    if rate > 0 and pinned and ENDS[case]["max_tokens"] > 2:
        assert stats.accepted_tokens > 0


@pytest.mark.parametrize("batch", [1, 4, 8, 32])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 1.0])
def test_time_is_never_lost(batch: int, rate: float) -> None:
    """In the simulation, where it is exact; and where much is to be had, much is got."""
    without, _ = simulated(batch, batch)
    took, stats = simulated(batch, batch, rate)
    assert took <= without / 0.97
    if batch == 1 and rate >= 0.8:
        assert took <= without / 2
    if batch >= 32 and rate <= 0.6:
        assert stats.draft_tokens <= 0.1 * stats.generation_tokens  # it has turned itself off


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_what_copying_gained_is_not_lost_in_chat(batch: int, rate: float) -> None:
    """Drafts that were all right, and then hardly ever: no more than some steps go by."""

    def seconds(speculation: bool) -> float:
        engine = simulator(batch, rate=1.0 if speculation else None)
        answers(engine, 3 * batch, max_tokens=400)
        if engine.speculator is not None:
            assert engine.stats().accepted_tokens > 600 * batch
            drafter = engine.speculator._lookup._drafter
            drafter._rate = rate
        before = engine.clock.now()
        for index in range(batch):
            params = SamplingParams(seed=index, max_tokens=300)
            request = Request(request_id=f"b{index}", prompt_token_ids=[1] * 40, params=params)
            engine.add_request(request)
        while engine.has_work():
            engine.step()
        return engine.clock.now() - before

    assert seconds(True) <= seconds(False) / 0.985


@cache
def plain_answers() -> dict[Any, Answer]:
    return answers(simulator(8, rate=None, stop_rate=0.02, eos=(7,)), 5, max_tokens=60, n=2)[0]


@pytest.mark.parametrize("cost", [0.0, 1e-4, 1e-3])
@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("pinned", [None, 3])
def test_answers_are_the_same_with_a_drafter_that_computes(
    cost: float, rate: float, pinned: int | None
) -> None:
    engine = simulator(8, rate=rate, cost=cost, pinned=pinned, stop_rate=0.02, eos=(7,))
    got, stats = answers(engine, 5, max_tokens=60, n=2)
    drafter = engine.speculator._model
    assert drafter.seen >= sum(len(answer.token_ids) for answer in got.values())
    assert not engine.speculator.num_known
    engine.close()
    assert drafter.closed
    assert got == plain_answers()
    if rate > 0 and pinned:
        assert stats.accepted_tokens > 0


@pytest.mark.parametrize(
    ("batch", "cost"), [(1, 0.0), (1, 5e-5), (1, 3e-4), (1, 2e-3), (8, 5e-5), (8, 2e-3), (32, 3e-4)]
)
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
def test_time_is_never_lost_where_drafting_takes_time(batch: int, rate: float, cost: float) -> None:
    max_tokens = 400 if batch < 32 else 150
    without, _ = simulated(batch, batch, max_tokens=max_tokens)
    took, _ = simulated(batch, batch, rate, max_tokens=max_tokens, cost=cost)
    assert took <= without / 0.97
    if batch == 1 and rate >= 0.9 and cost <= 5e-5:
        assert took <= without / 1.5


@pytest.mark.parametrize(
    ("batch", "rate", "found", "answers_each"),
    # In open text, where little is found; and where much is, which a full batch has no use for. The
    # sequences that gained by it end early, and leave the last steps to fewer than they would have
    # been, which is no loss of speculation's: hence many answers.
    [(batch, rate, 0.05, 2) for batch in (1, 8, 32) for rate in (0.0, 0.4, 0.8)]
    + [(8, 0.0, 0.9, 10)],
)
def test_time_is_never_lost_with_heads_and_a_lookup(
    batch: int, rate: float, found: float, answers_each: int
) -> None:
    """Costs are as measured: a pass of the heads 70 µs and 30 for each sequence, looking 10 for
    each, and to tell the heads of a step, which no account of drafting has, 10 µs.
    """

    engine = simulator(batch, rate=None)
    clock = engine.clock
    heads = Heads(rate, 7e-5, engine.sampler, clock, 3e-5, 1e-5)
    lookup = Finding(0.9, found, engine.sampler, clock, 1e-5)
    engine.speculator = lookup.speculator = Speculator(
        heads, MODEL.vocab_size, longest=4, lookup=lookup, now=clock.now
    )
    answers(engine, answers_each * batch, max_tokens=200)
    took = clock.now()
    without, _ = simulated(batch, answers_each * batch, max_tokens=200)
    assert took <= without / 0.97
    if batch == 1 and rate >= 0.8:
        assert took <= without / 1.7
    if batch > 1 and rate < 0.8:
        assert heads.asked <= 0.06 * 200 * answers_each  # steps


def one_after_another(engine: Engine, count: int, max_tokens: int) -> None:
    """Requests with prompts of 300 tokens."""
    for index in range(count):
        prompt = [(index * 31 + at * 7) % MODEL.vocab_size for at in range(300)]
        params = SamplingParams(seed=index, max_tokens=max_tokens)
        request = Request(request_id=str(index), prompt_token_ids=prompt, params=params)
        engine.add_request(request)
        while engine.has_work():
            engine.step()


@pytest.mark.parametrize(
    ("rate", "cost", "max_tokens", "gain"),
    [(0.9, 5e-5, 400, 1.25), (0.9, 2e-3, 400, 0.0), (0.2, 2e-4, 400, 0.0), (0.9, 5e-5, 12, 0.0)],
)
def test_texts_are_read_where_that_pays(
    rate: float, cost: float, max_tokens: int, gain: float
) -> None:
    """Prompts of 300 tokens, one after another: reading one takes the drafter some eight steps."""
    count = 20 if max_tokens > 100 else 300

    def seconds(rate: float | None) -> tuple[float, int]:
        engine = simulator(1, rate=rate, cost=cost, reading=5e-5)
        one_after_another(engine, count, max_tokens)
        if engine.speculator is None:
            return engine.clock.now(), 0
        drafter = engine.speculator._model
        return engine.clock.now(), drafter.num_read

    without, _ = seconds(None)
    took, num_read = seconds(rate)
    assert took <= without / 0.97
    if gain:
        assert took <= without / gain
        assert num_read >= 300 * count
    else:
        assert num_read <= 0.3 * (300 + max_tokens) * count


@pytest.mark.parametrize(
    ("stop_rate", "reading", "gain"),
    [(0.1, 2e-4, 0.0), (0.3, 2e-4, 0.0), (0.03, 2e-4, 0.0), (0.005, 2e-5, 1.2)],
)
def test_answers_shorter_than_allowed_do_not_pay_for_long_texts(
    stop_rate: float, reading: float, gain: float
) -> None:
    """Up to 700 tokens may come, but most answers end long before; what reading a text of 300
    tokens takes is then not worth its drafts, and where it still is, it is read.
    """

    def seconds(rate: float | None) -> float:
        engine = simulator(1, rate=rate, cost=5e-5, reading=reading, stop_rate=stop_rate, eos=(7,))
        one_after_another(engine, int(1500 * max(stop_rate, 0.02)), 700)
        return engine.clock.now()

    without = seconds(None)
    took = seconds(0.9)
    assert took <= without / 0.97
    if gain:
        assert took <= without / gain


def test_tokens_behind_a_stop_save_nothing() -> None:
    """Sixteen tokens drafted, all right, answers of some ten: a token drawn behind the end of one
    is time saved for nobody.
    """

    def run(rate: float | None) -> tuple[float, EngineStats]:
        engine = simulator(1, rate=rate, pinned=16, stop_rate=0.1, eos=(7,))
        _, stats = answers(engine, 40, max_tokens=200)
        return engine.clock.now(), stats

    without, _ = run(None)
    took, stats = run(1.0)
    assert stats.time_saved_seconds == pytest.approx(without - took, rel=0.2)


def test_what_a_stop_cuts_off_is_no_gain_for_the_budget() -> None:
    """A step drew 16 tokens and an answer ended with the first: it lost time."""
    engine = simulator(1, rate=1.0)
    answers(engine, 1, max_tokens=150)
    speculator = engine.speculator
    told: list[tuple[float, float]] = []
    patch(speculator._account, add=lambda seconds, worth, steps=1: told.append((seconds, worth)))
    params = SamplingParams(seed=3, max_tokens=150)
    engine.add_request(Request(request_id="a", prompt_token_ids=[1, 2, 3], params=params))
    while not engine.stats().running or not engine.scheduler.decoding:
        engine.step()
    (seq,) = engine.scheduler.decoding
    drawn = 0
    while drawn < 4:  # a draft has been checked
        before = len(seq.token_ids)
        engine.step()
        drawn = len(seq.token_ids) - before
    plain = speculator.times.predict(1)
    speculator.end(seq, drawn - 1)
    speculator._settle()
    assert told[-1][1] == pytest.approx(plain, rel=0.05)
    assert told[-1][0] > plain


def test_who_gave_up_waiting_says_nothing_of_how_long_answers_are() -> None:
    engine = simulator(1, rate=0.9, cost=5e-5)
    for name in "abc":
        params = SamplingParams(seed=1, max_tokens=30)
        request = Request(request_id=name, prompt_token_ids=[1] * 9, params=params)
        engine.add_request(request)
    engine.step()
    engine.abort("b")
    engine.abort("c")
    while engine.has_work():
        engine.step()
    planner = engine.speculator and engine.speculator._planner
    assert planner
    assert planner._mean_answer == 30


def test_what_is_to_be_read_is_asked_once_a_step() -> None:
    """It may look for prefixes in a cache; where all has been read it is asked no more often."""
    engine = simulator(4, rate=0.9, cost=2e-3)
    drafter = engine.speculator and engine.speculator._model
    asked: list[Sequence] = []
    unread = drafter.unread
    drafter.unread = lambda seq: asked.append(seq) or unread(seq)  # type: ignore
    drafter.propose = lambda decoding, counts: [Draft(())] * len(decoding)  # type: ignore
    for index in range(4):
        params = SamplingParams(seed=index, max_tokens=50)
        request = Request(request_id=str(index), prompt_token_ids=[1] * 9, params=params)
        engine.add_request(request)
    while engine.has_work():
        engine.step()
        assert len(asked) == len(set(asked)) <= 4
        asked.clear()


@pytest.mark.parametrize("method", ["propose", "observe", "end", "close"])
def test_a_drafter_that_computes_and_fails_is_given_up(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = simulator(4, rate=0.5, cost=0.0, pinned=3)
    assert engine.speculator
    drafter = engine.speculator._model
    drafter.raises = method
    with caplog.at_level(logging.WARNING):
        got, stats = answers(engine, 4, max_tokens=30)
        engine.close()
    assert {len(answer.token_ids) for answer in got.values()} == {30}
    assert stats.drafter_failures == (method != "close")
    assert drafter.closed
    assert len(caplog.records) == 1
    assert "drafter" in caplog.text


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("turns", [0.1, 0.9])
def test_alternatives_never_lose_time_either(batch: int, rate: float, turns: float) -> None:
    without, _ = simulated(batch, batch)
    alone, _ = simulated(batch, batch, rate)
    took, stats = simulated(batch, batch, rate, turns=turns)
    assert took <= without / 0.97
    assert took <= alone / 0.93
    if batch == 1 and rate == 0.5 and turns == 0.9:
        assert took <= alone / 1.15
    if batch >= 32 and rate <= 0.1:
        assert stats.draft_tokens <= 0.1 * stats.generation_tokens


@pytest.mark.parametrize("pinned", [1, 4, 20])
@pytest.mark.parametrize("n", [1, 3])
def test_answers_by_branches_are_those_without(pinned: int, n: int) -> None:
    params: dict[str, Any] = {"max_tokens": 90, "logprobs": 1, "stop_token_ids": (5,), "n": n}
    expected, _ = answers(simulator(8, rate=None, stop_rate=0.02), 5, **params)
    engine = simulator(8, rate=0.4, turns=0.8, pinned=pinned, stop_rate=0.02)
    got, stats = answers(engine, 5, **params)
    assert got == expected
    assert stats.accepted_tokens > 0.4 * stats.generation_tokens  # 0.29 alone


def test_drafts_preempt_nobody() -> None:
    """Two requests of 34 + 35 tokens in blocks of 16: with 7 blocks one is preempted once."""
    for num_blocks, preemptions in ((7, 1), (11, 0)):
        engine = build(num_blocks=num_blocks, max_logits_rows=64, enable_prefix_caching=False)
        assert engine.sampler
        oracle = Oracle("wrong", engine.sampler)  # type: ignore[arg-type]
        engine.speculator = oracle.speculator = Speculator(oracle, 64, 8)
        for name in "ab":
            params = SamplingParams(max_tokens=35, seed=ord(name), ignore_eos=True)
            engine.add_request(Request(request_id=name, prompt_token_ids=[1] * 34, params=params))
        while engine.has_work():
            engine.step()
        assert engine.stats().preemptions == preemptions
        assert engine.stats().draft_tokens > 100


def test_drafts_go_without_blocks_rather_than_take_anothers() -> None:
    """Through a window of 8 a sequence holds 3 blocks of 4 written one by one; a draft wants more
    than the 8 blocks have for two.
    """
    engine = build(windows=(8,), block_size=4, num_blocks=8, max_logits_rows=64)
    oracle = Oracle("wrong", engine.sampler)  # type: ignore[arg-type]
    engine.speculator = oracle.speculator = Speculator(oracle, 64, 20)
    for name in "ab":
        params = SamplingParams(max_tokens=60, seed=ord(name), ignore_eos=True)
        engine.add_request(Request(request_id=name, prompt_token_ids=[1] * 6, params=params))
    together = 0
    while engine.has_work():
        together += len(engine.scheduler.decoding) == 2
        engine.step()
    assert together > 40
    assert engine.stats().preemptions == 0
    assert engine.stats().draft_tokens > 100


@pytest.mark.parametrize(
    "kind",
    [
        *("raises", "exits", "cancelled", "unsayable"),
        *("outside", "missing", "fraction", "evidence"),
    ],
)
def test_a_drafter_that_fails_is_given_up_and_nobody_notices(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(max_logits_rows=64)
    oracle = Oracle(kind, engine.sampler)  # type: ignore[arg-type]
    engine.speculator = oracle.speculator = Speculator(oracle, 64, 3)
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
    record = engine.add_request(Request(request_id="a", prompt_token_ids=[1], params=params))
    with caplog.at_level(logging.WARNING):
        while engine.has_work():
            engine.step()
    assert record.outcome is Outcome.FINISHED
    assert record.completion_tokens == 200
    assert engine.stats().drafter_failures == 1
    assert len(caplog.records) == 1
    assert "drafter" in caplog.text


def test_a_drafter_may_have_other_methods_too() -> None:
    """Names of a `ModelDrafter` among them, which it is not for that."""

    class Versatile(Oracle):
        def observe(self) -> None: ...

        def close(self) -> None: ...

    engine = build(max_logits_rows=64)
    oracle = Versatile("right", engine.sampler)  # type: ignore[arg-type]
    engine.speculator = oracle.speculator = Speculator(oracle, 64, 3)
    params = SamplingParams(max_tokens=50, seed=1, ignore_eos=True)
    engine.add_request(Request(request_id="a", prompt_token_ids=[1], params=params))
    while engine.has_work():
        engine.step()
    assert engine.stats().drafter_failures == 0
    assert engine.stats().accepted_tokens > 20


def test_long_texts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.spec_decode.tuning.LOOKUP_TOKENS_PER_STEP", 7)
    engine = build(max_logits_rows=64)
    oracle = Oracle("long", engine.sampler)
    oracle.speculator = engine.speculator = Speculator(oracle, 64, 3)
    read: list[int] = []
    records = []
    for name in "ab":
        params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
        request = Request(request_id=name, prompt_token_ids=[5] * 20, params=params)
        records.append(engine.add_request(request))
    while engine.has_work():
        engine.step()
        read.append(sum(map(len, oracle._texts.values())))
    assert max(after - before for before, after in zip([0, *read], read, strict=False)) <= 7
    assert all(record.outcome is Outcome.FINISHED for record in records)
    assert all(record.accepted_tokens > 0 for record in records)
    assert engine.speculator.failures == 0


def test_a_step_that_fails_with_drafts_is_tried_without() -> None:
    engine = build(max_logits_rows=64)
    executor = engine.executor
    oracle = Oracle("right", engine.sampler)  # type: ignore[arg-type]
    engine.speculator = oracle.speculator = Speculator(oracle, 64, 3)
    execute, crashes = executor.execute, []

    def fragile(batch: Batch) -> StepResult:
        if len(batch.logits_rows) > 1 and len(crashes) < 3:
            crashes.append(batch.num_tokens)
            raise RuntimeError("injected")
        return execute(batch)

    patch(executor, execute=fragile)
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    record = engine.add_request(Request(request_id="a", prompt_token_ids=[1], params=params))
    while engine.has_work():
        engine.step()
    assert len(crashes) == 3
    assert record.outcome is Outcome.FINISHED
    assert record.finish_reasons == [FinishReason.LENGTH]
    assert record.completion_tokens == 20


def test_a_start_over_ends_no_answer_and_teaches_nothing_undelivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step's tokens are drawn and not delivered: they were never there."""
    texts: dict[int, list[int]] = {}
    told: list[int] = []  # lengths at the ends

    class Telling:
        def start(self, sequence: int, token_ids: Items[int], cache_salt: str | None) -> None:
            texts[sequence] = list(token_ids)

        def extend(self, sequence: int, token_ids: Items[int]) -> None:
            texts[sequence] += token_ids

        def propose(self, sequences: Items[int], counts: Items[int]) -> list[Draft]:
            return [Draft(texts[sequence][-1:]) for sequence in sequences]

        def end(self, sequence: int) -> None:
            told.append(len(texts.pop(sequence)))

    engine = build()
    engine.speculator = Speculator(Telling(), 64, 2)
    record = engine.add_request(
        Request(
            request_id="a",
            prompt_token_ids=[1] * 5,
            params=SamplingParams(max_tokens=20, ignore_eos=True, seed=1),
        )
    )
    for _ in range(4):
        engine.step()
    assert texts

    def failing(*_: object) -> None:
        monkeypatch.undo()
        raise MemoryError("injected")

    monkeypatch.setattr(engine, "_deliver", failing)
    delivered = 5 + record.completion_tokens
    engine.step()
    assert told == [delivered]
    while engine.has_work():
        engine.step()
    assert record.outcome is Outcome.FINISHED


class Excessive(Speculator):
    """Proposes far more than there is room for, whatever it is told."""

    def propose(self, decoding: list[Sequence], num_tokens: int, room: int) -> list[list[int]]:
        return [[1] * 100 for _ in decoding]


def test_the_scheduler_cuts_drafts_to_what_is_left() -> None:
    """Request, budget, rows and blocks limit them; the executor checks every batch."""
    engine = build(
        num_blocks=9, max_num_seqs=3, max_num_batched_tokens=24, max_logits_rows=20, vocab=2
    )
    engine.speculator = Excessive(Oracle("right", FakeSampler()), 64)
    for name in "abc":
        params = SamplingParams(max_tokens=25, seed=ord(name), ignore_eos=True)
        engine.add_request(Request(request_id=name, prompt_token_ids=[1] * 20, params=params))
    lengths = dict.fromkeys("abc", 0)
    while engine.has_work():
        for delta in engine.step():
            lengths[delta.request_id] += len(delta.token_ids)
        engine.check_integrity()
    assert set(lengths.values()) == {25}
    assert engine.stats().accepted_tokens > 0
