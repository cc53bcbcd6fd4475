"""Who runs next: budgets, fairness, preemption, forks, admission."""

from typing import Any, Literal

import pytest

from engine.checking import build
from engine.test_engine import fail_once, request, run
from octavo.engine.engine import Engine, Step
from octavo.sampling.params import InvalidParameter
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import AdmissionError, FinishReason, Outcome, SchedulingParams
from octavo.scheduler.sequence import Status


class Steps:
    """Keeps what every step did: {request id or (id, choice): tokens}."""

    def __init__(self, engine: Engine) -> None:
        self.tokens: list[dict[str, int]] = []
        self.copies: list[int] = []
        engine.observers.append(self)

    def on_step(self, step: Step) -> None:
        scheduled = step.scheduled
        done = {seq.owner.request_id: 1 for seq in scheduled.decodes}
        done |= {chunk.seq.owner.request_id: chunk.size for chunk in scheduled.chunks}
        self.tokens.append(done)
        self.copies.append(len(scheduled.batch.copies))

    def on_end(self, record: Any) -> None:
        pass


def test_decode_rows_and_chunks_of_several_prompts_share_the_budget() -> None:
    engine = build(max_num_batched_tokens=32, max_num_seqs=4)
    steps = Steps(engine)
    engine.add_request(request("a", [1] * 10, max_tokens=8))
    engine.step()
    engine.add_request(request("b", [2] * 20, max_tokens=4))
    engine.add_request(request("c", [3] * 30, max_tokens=4))
    run(engine)
    assert steps.tokens[:3] == [
        {"a": 10},
        {"a": 1, "b": 20, "c": 11},
        {"a": 1, "b": 1, "c": 19},
    ]


def test_finished_sequences_leave_and_waiting_ones_join_in_the_next_step() -> None:
    engine = build(max_num_seqs=1, max_num_batched_tokens=16)
    steps = Steps(engine)
    engine.add_request(request("a", [1], max_tokens=2))
    engine.add_request(request("b", [2], max_tokens=2))
    run(engine)
    assert steps.tokens == [{"a": 1}, {"a": 1}, {"b": 1}, {"b": 1}]


def test_a_long_prompt_neither_stalls_a_decode_nor_a_short_newcomer() -> None:
    engine = build(max_num_batched_tokens=32, max_model_len=2100, num_blocks=210)
    steps = Steps(engine)
    engine.add_request(request("victim", [1] * 20, max_tokens=100))
    engine.step()
    engine.add_request(request("long", [2] * 2000, max_tokens=2))
    for _ in range(3):
        engine.step()
    short = engine.add_request(request("short", [3] * 3, max_tokens=3))
    for _ in range(4):
        engine.step()
    assert all(step["victim"] == 1 for step in steps.tokens[1:])
    assert all(sum(step.values()) <= 32 for step in steps.tokens)
    assert steps.tokens[1]["long"] == 31
    assert steps.tokens[4] == {"victim": 1, "long": 28, "short": 3}, "the long one has the rest"
    assert short.outcome is Outcome.FINISHED, "answered while the long prompt is under way"
    assert "long" in steps.tokens[-1]
    run(engine)


def test_four_streams_that_exceed_the_pool_all_finish() -> None:
    engine = build(num_blocks=12)
    records = [
        engine.add_request(request(str(i), [i] * 40, max_tokens=60, seed=i)) for i in range(4)
    ]
    run(engine)
    assert all(record.outcome is Outcome.FINISHED for record in records)
    assert all(record.completion_tokens == 60 for record in records)
    assert engine.stats().preemptions > 0
    assert records[0].preemptions == 0, "the oldest is never the victim"


def test_who_would_be_preempted_at_once_is_not_let_in() -> None:
    """The newcomer's prompt fits, but not beside the next block of the one who runs."""
    engine = build(num_blocks=6, enable_prefix_caching=False)
    old = engine.add_request(request("old", [1] * 31, max_tokens=20))
    engine.step()
    young = engine.add_request(request("young", [2] * 64, max_tokens=4))
    run(engine)
    assert (old.outcome, young.outcome) == (Outcome.FINISHED, Outcome.FINISHED)
    assert young.preemptions == 0


def test_a_preempted_request_resumes_before_newcomers_and_from_the_cache() -> None:
    engine = build(num_blocks=9, max_num_batched_tokens=64)
    steps = Steps(engine)
    engine.add_request(request("old", [1] * 60, max_tokens=50))
    young = engine.add_request(request("young", [2] * 50, max_tokens=40, seed=2))
    while not young.preemptions:
        engine.step()
    engine.add_request(request("new", [3] * 8, max_tokens=4, seed=3))
    assert [seq.owner.request_id for seq in engine.scheduler.waiting] == ["young", "new"]
    at_preemption = len(steps.tokens)
    run(engine)
    later = steps.tokens[at_preemption:]
    first = {name: next(i for i, s in enumerate(later) if name in s) for name in ("young", "new")}
    assert first["young"] <= first["new"]
    assert young.preemptions == 1


def test_cached_prefix_is_not_computed_again() -> None:
    engine = build()
    steps = Steps(engine)
    prompt = [i % 50 for i in range(40)]
    engine.add_request(request("a", prompt, max_tokens=1))
    run(engine)
    again = engine.add_request(request("b", prompt, max_tokens=1))
    longer = engine.add_request(request("c", prompt + [60] * 9, max_tokens=1))
    other = engine.add_request(request("d", [60, *prompt], max_tokens=1))
    run(engine)
    assert steps.tokens[1] == {"b": 8, "c": 17, "d": 39}
    assert steps.tokens[2] == {"d": 2}
    assert (again.cached_tokens, longer.cached_tokens, other.cached_tokens) == (32, 32, 0)
    stats = engine.stats()
    assert stats.prefix_hits == 64
    assert stats.prefix_queries == 40 + 40 + 49 + 41


def test_a_fully_cached_prompt_computes_its_last_token_only() -> None:
    engine = build()
    steps = Steps(engine)
    for name in "ab":
        engine.add_request(request(name, list(range(48)), max_tokens=1))
        run(engine)
    assert steps.tokens == [{"a": 48}, {"b": 1}]


def test_n_sequences_share_the_prompts_blocks() -> None:
    engine = build()
    steps = Steps(engine)
    record = engine.add_request(request("a", list(range(40)), max_tokens=6, n=3))
    engine.step()
    assert engine.stats().kv_blocks_used == 3
    assert len(engine.scheduler.decoding) == 3
    engine.step()
    assert engine.stats().kv_blocks_used == 5, "two of three copied the partly filled block"
    assert steps.copies == [0, 2]
    run(engine)
    assert record.completion_tokens == 18
    assert record.finish_reasons == [FinishReason.LENGTH] * 3


def test_n_sequences_that_do_not_fit_together_still_finish() -> None:
    engine = build(num_blocks=8)
    record = engine.add_request(request("a", list(range(40)), max_tokens=60, n=4))
    run(engine)
    assert record.completion_tokens == 240
    assert record.preemptions > 0


@pytest.mark.parametrize("moment", range(8))
def test_an_abort_frees_everything_in_any_state(moment: int) -> None:
    """Waiting, prefilling in chunks, forked, decoding, preempted."""
    engine = build(num_blocks=12, max_num_batched_tokens=16, enable_prefix_caching=False)
    engine.add_request(request("old", [1] * 33, max_tokens=90))
    record = engine.add_request(request("a", [2] * 40, max_tokens=40, n=3))
    for _ in range((0, 1, 3, 4, 6, 7, 30, 60)[moment]):
        engine.step()
    state = engine.requests["a"]
    engine.abort("a")
    assert {seq.status for seq in state.sequences} == {Status.FINISHED}
    held = engine.scheduler.kv.pool.num_used
    assert held == sum(
        engine.scheduler.kv.held_blocks(seq.slot)
        for seq in engine.scheduler.decoding + engine.scheduler.prefilling
    )
    assert record.outcome is Outcome.ABORTED
    deltas = [delta for delta in engine.step() if delta.request_id == "a"]
    assert [delta.finish_reason for delta in deltas] == [FinishReason.ABORT] * len(deltas)
    assert deltas[-1].record is record
    engine.check_integrity()
    run(engine)


def test_logits_rows_cap_the_chunks_of_a_prompt_with_logprobs() -> None:
    engine = build(max_num_seqs=4, max_logits_rows=8, max_num_batched_tokens=64)
    steps = Steps(engine)
    engine.add_request(request("plain", [1] * 16, max_tokens=3))
    run(engine)
    scored = engine.add_request(request("a", [1] * 20, max_tokens=2, prompt_logprobs=0))
    deltas = run(engine)
    assert [step["a"] for step in steps.tokens if "a" in step] == [8, 8, 4, 1]
    assert scored.cached_tokens == 0, "logprobs need every position computed"
    assert engine.stats().prefix_queries == 16, "nothing was looked up for them"
    assert deltas[0].prompt_logprobs is not None
    assert len(deltas[0].prompt_logprobs) == 20


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "no tokens"),
        ([1] * 256, {}, r"256 tokens; the context of 256"),
        ([1] * 200, {"max_tokens": 57}, r"200 prompt tokens \+ 57 max_tokens = 257.* 256"),
        ([1] * 100, {"max_tokens": 100}, r"need 13 KV blocks of 16 tokens; there are 10"),
        ([1], {"n": 9}, "n is 9, more than max_num_seqs 8"),
        ([1, -1], {}, "token id -1"),
        ([1, 64], {}, "token id 64 .* outside 0 to 63"),
    ],
)
def test_what_can_never_run_is_refused_with_the_arithmetic(
    prompt: list[int], params: dict[str, Any], message: str
) -> None:
    engine = build(num_blocks=10)
    with pytest.raises(AdmissionError, match=message) as refused:
        engine.add_request(request("a", prompt, **params))
    assert not refused.value.retryable
    assert not engine.has_work()


def test_the_largest_request_that_is_admitted_runs() -> None:
    engine = build(num_blocks=10, max_num_batched_tokens=8)
    record = engine.add_request(request("a", [1] * 80, max_tokens=81))
    with pytest.raises(AdmissionError):
        engine.add_request(request("b", [1] * 80, max_tokens=82))
    run(engine)
    assert record.completion_tokens == 81
    assert record.preemptions == 0


def test_without_max_tokens_a_request_may_fill_the_context() -> None:
    engine = build()
    record = engine.add_request(request("a", [1] * 250, max_tokens=None))
    run(engine)
    assert (record.max_tokens, record.completion_tokens) == (6, 6)


def test_priorities_are_refused_and_not_ignored() -> None:
    engine = build()
    urgent = request("a", [1])
    urgent.scheduling = SchedulingParams(priority=1)
    with pytest.raises(InvalidParameter, match="priority"):
        engine.add_request(urgent)


def test_a_full_queue_refuses_for_now() -> None:
    engine = build(max_num_queued_reqs=2, max_num_queued_tokens=30)
    engine.add_request(request("a", [1] * 20))
    with pytest.raises(AdmissionError, match="20 prompt tokens wait") as refused:
        engine.add_request(request("b", [1] * 20))
    assert refused.value.retryable
    engine.add_request(request("b", [1] * 5))
    with pytest.raises(AdmissionError, match="2 requests wait, of at most 2") as refused:
        engine.add_request(request("c", [1]))
    assert refused.value.retryable
    engine.step()
    engine.add_request(request("c", [1]))
    run(engine)
    engine.add_request(request("an empty queue takes any", [1] * 40))
    run(engine)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_model_len": -5}, "max_model_len is -5"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "7 is below max_num_seqs 8"),
        ({"max_num_seqs": 8, "max_logits_rows": 7}, "max_logits_rows 7 is below"),
        ({"max_num_queued_reqs": 0}, "nothing would ever be admitted"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**({"max_model_len": 16} | values))


def test_waste_stays_low_at_a_usual_load() -> None:
    """Reserving each request's maximum would waste most of the slots."""
    engine = build(num_blocks=2000, max_num_seqs=32, max_model_len=2048)
    for index in range(32):
        engine.add_request(
            request(str(index), [index] * (300 + 10 * index), max_tokens=200, seed=index)
        )
    wasted, used = 0.0, 0
    while engine.has_work():
        engine.step()
        stats = engine.stats()
        wasted += stats.kv_waste * stats.kv_blocks_used
        used += stats.kv_blocks_used
    assert 0.0 < wasted / used < 0.04


# How serving was done before


def test_static_batching_lets_the_next_batch_in_when_the_last_has_ended() -> None:
    engine = build(max_num_seqs=2, batching="static")
    steps = Steps(engine)
    for name, count in (("a", 4), ("b", 2), ("c", 1), ("d", 1)):
        engine.add_request(request(name, [1], max_tokens=count))
    engine.step()
    engine.add_request(request("e", [1], max_tokens=1))
    run(engine)
    assert [sorted(step) for step in steps.tokens] == [
        ["a", "b"], ["a", "b"], ["a"], ["a"], ["c", "d"], ["e"],
    ]  # fmt: skip


def test_a_static_batch_is_who_waits_when_it_begins_however_many_steps_its_prompts_take() -> None:
    engine = build(max_num_seqs=8, max_num_batched_tokens=8, batching="static")
    steps = Steps(engine)
    for name in "abc":
        engine.add_request(request(name, [1] * 6, max_tokens=3))
    engine.step()
    engine.add_request(request("late", [1], max_tokens=1))
    run(engine)
    together = [sorted(step) for step in steps.tokens]
    assert ["a", "b", "c"] in together
    assert together[-1] == ["late"]
    assert not any("late" in step for step in together[:-1])


@pytest.mark.parametrize(("memory", "running"), [("reserve", 4), ("paged", 8)])
def test_of_96_blocks_reserving_lets_four_of_eight_run_and_paging_all(
    memory: Literal["reserve", "paged"], running: int
) -> None:
    """Eight requests that may grow to 384 tokens, 24 blocks of 16, and grow to 12."""
    engine = build(
        num_blocks=96, max_model_len=384, max_num_batched_tokens=512, max_num_seqs=8,
        memory=memory, enable_prefix_caching=False, eos=[7],
    )  # fmt: skip
    for index in range(8):
        engine.add_request(request(f"{index}", [1] * 32, max_tokens=352))
    engine.step()
    assert engine.stats().running == running
    while engine.stats().generation_tokens < running * (12 * 16 - 32):
        engine.step()
        engine.check_integrity()
    assert engine.stats().running == running
    assert engine.stats().preemptions == 0
    waste = engine.stats().kv_waste
    assert waste > 0.49 if memory == "reserve" else waste < 0.01


def test_reserved_memory_is_refused_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="no prefix caching"):
        SchedulerConfig(max_model_len=64, memory="reserve")
    with pytest.raises(ValueError, match="no branches"):
        SchedulerConfig(
            max_model_len=64, memory="reserve", enable_prefix_caching=False, max_branches=2
        )
    # In windows of 16 tokens a sequence of 64 needs two blocks at a time, but four reserved.
    windows = {"windows": (16,), "num_blocks": 3, "enable_prefix_caching": False}
    build(**windows).add_request(request("a", [1] * 32, max_tokens=33))
    engine = build(**windows, memory="reserve")
    with pytest.raises(AdmissionError, match="need 4 KV blocks of 16 tokens; there are 3"):
        engine.add_request(request("a", [1] * 32, max_tokens=33))
    with pytest.raises(AdmissionError, match="n is 2"):
        engine.add_request(request("a", [1], max_tokens=2, n=2))


def test_without_chunked_prefill_a_prompt_goes_through_in_one_step() -> None:
    engine = build(
        max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4, chunked_prefill=False
    )
    steps = Steps(engine)
    prompts = {"a": 30, "b": 40, "c": 50, "d": 60}
    for name, size in prompts.items():
        engine.add_request(request(name, [size] * size, max_tokens=3))
    run(engine)
    sizes = {name: [step[name] for step in steps.tokens if name in step] for name in prompts}
    assert sizes == {
        name: [size, 1, 1] for name, size in zip("abcd", (30, 40, 50, 60), strict=True)
    }
    with pytest.raises(ValueError, match="below max_model_len 128"):
        build(max_model_len=128, max_num_batched_tokens=64, chunked_prefill=False)


def test_an_arrival_that_fails_takes_nobody_out_of_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build(max_num_seqs=1)
    records = [engine.add_request(request(name, [1] * 5, max_tokens=2)) for name in "abc"]
    fail_once(monkeypatch, engine.scheduler.policy, "push")
    with pytest.raises(MemoryError):
        engine.add_request(request("d", [1] * 5))
    run(engine)
    assert [record.outcome for record in records] == [Outcome.FINISHED] * 3
