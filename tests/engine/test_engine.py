"""The engine on the checking executor: whole lives of requests."""

from typing import Any

import pytest

from engine.checking import VOCAB, FakeSampler, FakeState, build
from faults import patch
from octavo.engine.engine import Engine, Step
from octavo.engine.outputs import Delta
from octavo.sampling.params import InvalidParameter, SamplingParams
from octavo.sampling.sampler import Sampled
from octavo.scheduler.request import (
    AdmissionError,
    FinishReason,
    Outcome,
    Request,
    RequestRecord,
)


def request(name: str, prompt: list[int], **params: object) -> Request:
    params.setdefault("ignore_eos", True)
    params.setdefault("seed", 1)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )


def run(engine: Engine, limit: int = 10_000) -> list[Delta]:
    deltas = []
    while engine.has_work():
        deltas += engine.step()
        engine.check_integrity()
        limit -= 1
        assert limit, "the engine does not come to an end"
    return deltas


def test_two_requests_finish_with_the_tokens_asked_for() -> None:
    engine = build()
    records = [
        engine.add_request(request("a", list(range(20)), max_tokens=5)),
        engine.add_request(request("b", list(range(40)), max_tokens=30, n=3)),
    ]
    deltas = run(engine)
    assert [record.outcome for record in records] == [Outcome.FINISHED] * 2
    assert records[0].completion_tokens == 5
    assert records[1].completion_tokens == 90
    for choice in range(3):
        mine = [d for d in deltas if d.request_id == "b" and d.choice == choice]
        assert sum(len(d.token_ids) for d in mine) == 30
        assert [d.finish_reason for d in mine][:-1] == [None] * (len(mine) - 1)
    assert sum(d.record is not None for d in deltas) == 2


def test_block_16_two_requests_of_34_and_35_in_7_blocks_preempt_once() -> None:
    for num_blocks, preemptions in ((7, 1), (10, 0), (11, 0), (20, 0)):
        engine = build(num_blocks=num_blocks, vocab=64, enable_prefix_caching=False)
        for name, first in (("a", 0), ("b", 20)):
            prompt = [first + index % 20 for index in range(34)]
            engine.add_request(request(name, prompt, max_tokens=35, seed=first))
        run(engine)
        assert engine.stats().preemptions == preemptions, num_blocks


def test_a_poisonous_request_fails_alone_and_its_neighbours_finish() -> None:
    engine = build()
    engine.executor.poison = 63
    records = [
        engine.add_request(request("a", [1] * 20, max_tokens=9, n=2)),
        engine.add_request(request("bad", [2, 63], max_tokens=9)),
        engine.add_request(request("b", [3] * 40, max_tokens=9)),
    ]
    deltas = run(engine)
    outcomes = [record.outcome for record in records]
    assert outcomes == [Outcome.FINISHED, Outcome.FAILED, Outcome.FINISHED]
    assert records[1].error == "the step failed: injected"
    assert [d.finish_reason for d in deltas if d.request_id == "bad"] == [FinishReason.ERROR]
    assert [record.completion_tokens for record in records] == [18, 0, 9]


def test_a_row_that_is_not_a_number_fails_its_own_request_only() -> None:
    engine = build()
    engine.sampler.broken[5] = 0
    good = engine.add_request(request("good", [1], max_tokens=4))
    bad = engine.add_request(request("bad", [2], max_tokens=4, seed=5, n=3))
    deltas = run(engine)
    assert (good.outcome, bad.outcome) == (Outcome.FINISHED, Outcome.FAILED)
    assert bad.error == "the logits are not numbers"
    ends = [d for d in deltas if d.request_id == "bad"]
    assert [d.choice for d in ends] == [0, 1, 2]
    assert [d.record is bad for d in ends] == [False, False, True]


def test_a_sampler_that_raises_half_way_leaves_no_trace() -> None:
    engine = build()
    draws = engine.sampler.sample
    failures = iter([False, False, True])

    def sample(logits: Any, rows: Any, states: Any) -> Sampled:
        sampled = draws(logits, rows, states)
        if next(failures, False):
            raise RuntimeError("after recording")
        return sampled

    patch(engine.sampler, sample=sample)
    for name in "ab":
        engine.add_request(request(name, [1, 2], max_tokens=6, prompt_logprobs=0))
    deltas = run(engine)
    expected = build()
    expected.add_request(request("a", [1, 2], max_tokens=6))
    tokens = [token for delta in run(expected) for token in delta.token_ids]
    for name in "ab":
        mine = [delta for delta in deltas if delta.request_id == name]
        assert [token for delta in mine for token in delta.token_ids] == tokens
        assert len(mine[0].prompt_logprobs or []) == 2


def test_prompt_logprobs_that_fail_half_way_are_not_delivered_twice() -> None:
    engine = build()
    scores = engine.sampler.prompt_logprobs
    failures = iter([False, True])

    def prompt_logprobs(*arguments: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("of the second prompt")
        return scores(*arguments)

    patch(engine.sampler, prompt_logprobs=prompt_logprobs)
    for name in "ab":
        engine.add_request(request(name, [1, 2, 3], max_tokens=2, prompt_logprobs=0))
    deltas = run(engine)
    for name in "ab":
        first = next(delta for delta in deltas if delta.request_id == name)
        assert [entry and entry.token_id for entry in first.prompt_logprobs or []] == [None, 2, 3]


def test_stop_tokens_end_a_sequence_and_are_told_apart_from_the_end_of_text() -> None:
    token = FakeSampler().draw(FakeState(1, 0, [0, 0]))  # the third token
    for eos, params, reason in (
        ([token], {"ignore_eos": False}, None),
        ([], {"stop_token_ids": (token,)}, token),
        ([token], {"ignore_eos": True}, "length"),
    ):
        engine = build(eos=eos)
        record = engine.add_request(request("a", [1], max_tokens=5, **params))
        last = run(engine)[-1]
        if reason == "length":
            assert last.finish_reason is FinishReason.LENGTH
            assert record.completion_tokens == 5
        else:
            assert last.finish_reason is FinishReason.STOP
            assert last.stop_reason == reason
            assert record.completion_tokens == 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": None, "min_tokens": 10**6}, "room for"),
        ({"allowed_token_ids": (0,)}, "ends the output"),
        ({"allowed_token_ids": (0, 1), "stop_token_ids": (1,)}, "ends the output"),
        ({"allowed_token_ids": (0, 2), "banned_token_ids": (2,)}, "ends the output"),
        ({"banned_token_ids": tuple(range(1, VOCAB))}, "ends the output"),
        ({"stop_token_ids": tuple(range(VOCAB))}, "ends the output"),
    ],
)
def test_a_minimum_that_no_output_reaches_is_refused(params: dict[str, Any], message: str) -> None:
    params = {"max_tokens": 3, "min_tokens": 1, "ignore_eos": False} | params
    engine = build(eos=[0])
    with pytest.raises(InvalidParameter, match=message) as refused:
        engine.add_request(request("a", [1], **params))
    assert refused.value.param == "min_tokens"
    if params["max_tokens"]:  # without the minimum it runs
        record = engine.add_request(request("b", [1], **params | {"min_tokens": 0}))
        run(engine)
        assert record.outcome is Outcome.FINISHED


def test_the_record_is_filled_as_the_request_runs() -> None:
    engine = build(max_num_batched_tokens=8, duration=1.0)
    engine.clock.advance(10.0)
    record = engine.add_request(request("a", list(range(20)), max_tokens=3))
    assert (record.arrival, record.scheduled) == (10.0, None)
    run(engine)
    assert record.scheduled == 10.0
    assert record.first_token == 13.0
    assert record.last_token == record.finished == 15.0
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (20, 3, 5)
    assert stats.computed_tokens == 22


def test_every_ended_request_is_told_once_rejected_ones_too() -> None:
    engine = build()
    told: list[RequestRecord] = []

    class Observer:
        def on_step(self, step: Step) -> None: ...

        def on_end(self, record: RequestRecord) -> None:
            told.append(record)

    engine.observers.append(Observer())
    engine.add_request(request("a", [1]))
    engine.add_request(request("b", [1]))
    with pytest.raises(AdmissionError):
        engine.add_request(request("c", []))
    with pytest.raises(AdmissionError, match="in use"):
        engine.add_request(request("a", [1]))
    engine.abort("b")
    run(engine)
    assert [(record.request_id, record.outcome) for record in told] == [
        ("c", Outcome.REJECTED),
        ("a", Outcome.REJECTED),
        ("b", Outcome.ABORTED),
        ("a", Outcome.FINISHED),
    ]


def test_three_hundred_aborted_requests_leave_the_engine_as_it_was() -> None:
    engine = build()
    for index in range(300):
        engine.add_request(request(str(index), [index % 64] * (1 + index % 60), max_tokens=40))
    for index in range(300):
        if index % 3 == 0:
            engine.step()
        engine.abort(str(index))
    run(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    record = engine.add_request(request("after", [1] * 30, max_tokens=5))
    run(engine)
    assert record.outcome is Outcome.FINISHED


def test_a_request_without_a_seed_gets_one_from_the_engines() -> None:
    def tokens(seed: int | None) -> list[int]:
        engine = build(seed=seed)
        engine.add_request(request("a", [1], seed=None, max_tokens=8))
        return [token for delta in run(engine) for token in delta.token_ids]

    assert tokens(7) == tokens(7) != tokens(8)


def fail_once(monkeypatch: pytest.MonkeyPatch, of: object, name: str) -> None:
    """The method's next call fails before it has done anything."""

    def failing(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise MemoryError("injected")

    monkeypatch.setattr(of, name, failing)


def three_suspects(engine: Engine) -> list[RequestRecord]:
    records = [engine.add_request(request(name, [index] * 5)) for index, name in enumerate("abc")]
    engine.step()
    engine.executor.crashes.append("half")
    engine.step()
    assert engine.scheduler.isolated is not None
    return records


def test_a_failure_in_an_abort_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    a, b, c = three_suspects(engine)
    fail_once(monkeypatch, engine.scheduler, "end")
    engine.abort("c")
    run(engine)
    assert [each.outcome for each in (a, b, c)] == [Outcome.FINISHED] * 2 + [Outcome.ABORTED]


def test_who_had_not_run_is_not_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspect's step is computed, so that another is the next to be tried, and then fails."""
    engine = build()
    a, b, c = three_suspects(engine)
    fail_once(monkeypatch, engine, "_deliver")
    run(engine)
    assert [each.outcome for each in (a, b, c)] == [Outcome.FAILED] + [Outcome.FINISHED] * 2


def test_who_is_left_of_a_step_that_failed_was_not_alone_in_it() -> None:
    engine = build()
    record = engine.add_request(request("a", [1] * 5, max_tokens=4))
    engine.add_request(request("b", [2] * 5, max_tokens=4))
    engine.executor.during = lambda: engine.abort("b") and None
    engine.executor.crashes.append("after")
    run(engine)
    assert record.outcome is Outcome.FINISHED


def test_nobody_runs_whom_the_engine_does_not_know() -> None:
    class Full(dict[str, Any]):
        def __setitem__(self, key: str, value: object) -> None:
            raise MemoryError("injected")

    engine = build()
    engine.requests = Full()
    with pytest.raises(MemoryError):
        engine.add_request(request("a", [1] * 5))
    assert not engine.scheduler.has_work()
    engine.requests = {}
    assert engine.add_request(request("a", [1] * 5, max_tokens=3)).outcome is None
    run(engine)


def test_a_request_that_cannot_be_watched_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    fail_once(monkeypatch, engine.scheduler.shedding, "add")
    with pytest.raises(MemoryError):
        engine.add_request(request("a", [1] * 5))
    assert not engine.has_work()
    engine.check_integrity()
