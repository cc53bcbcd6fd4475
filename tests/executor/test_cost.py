"""The simulated executor: bytes and operations counted singly, and the engine on virtual time."""

from dataclasses import replace
from itertools import combinations, islice, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import tiny
from octavo.engine.clock import VirtualClock
from octavo.engine.engine import Engine
from octavo.executor.base import Batch
from octavo.executor.cost import PANEL_ROWS, Arithmetic, CostModel, Rates
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.models.config import Activation, Experts, ModelConfig
from octavo.models.families import program
from octavo.models.program import (
    Activate,
    ExpertLinear,
    Input,
    Linear,
    Logits,
    Op,
    PagedAttention,
    Program,
    RmsNorm,
)
from octavo.models.recurrence import Recurrence
from octavo.sampling.params import SamplingParams
from octavo.sampling.scripted import ScriptedSampler
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import Outcome, Request
from octavo.scheduler.scheduler import Scheduler

PLAIN = Rates(1e9, 1e9)


def executor(family: str = "llama", rates: Rates = PLAIN) -> SimulatedExecutor:
    config = tiny.config(family)
    return SimulatedExecutor(program(config), KvLayout.of(config), num_blocks=100, rates=rates)


def batch(spans: list[tuple[int, int]], rows: int = 1) -> Batch:
    """(first position, tokens) of each sequence."""
    sizes = [size for _, size in spans]
    positions = np.concatenate([np.arange(start, start + size) for start, size in spans])
    return Batch(
        np.zeros(len(positions), np.int32),
        positions.astype(np.int32),
        np.cumsum([0, *sizes]).astype(np.int32),
        np.arange(len(spans), dtype=np.int32),
        np.zeros((1, len(spans), 40), np.int32),
        np.arange(rows, dtype=np.int32),
        np.empty((0, 2), np.int32),
    )


class Total(NamedTuple):
    """What all ops of a step move and compute."""

    weight_bytes: int
    kv_bytes: int
    ops: int


def total(costs: CostModel, step: Batch) -> Total:
    return Total(*map(sum, zip(*(cost[:3] for cost in costs.by_op(step)), strict=True)))


spans = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2", "qwen35"])
@given(decodes=st.lists(st.integers(0, 90), max_size=4), chunks=spans)
def test_a_step_grown_span_by_span_is_the_step(
    family: str, decodes: list[int], chunks: list[tuple[int, int]]
) -> None:
    rates = Rates(
        1e9, 3e9, 1e-4, knee=2.0, threads=2, unpacking=1.5, row_overhead=1e-6, chunk_overhead=1e-5
    )
    costs = executor(family).costs
    size = costs.decode_size(np.array(decodes, np.int32))
    for start, tokens in chunks:
        size = costs.with_span(size, start, tokens, 1)
    whole = batch([*((at, 1) for at in decodes), *chunks], rows=len(decodes) + len(chunks))
    assert size == costs.size(whole)
    parts = costs.dense_seconds(size, rates), costs.attention_seconds(size.attention, rates)
    overhead = rates.overhead(size.tokens, size.rows, size.chunks)
    assert sum(parts) + overhead == pytest.approx(costs.seconds(whole, rates))


@pytest.mark.parametrize("family", ["lfm2", "qwen35"])
@given(decodes=st.lists(st.integers(0, 90), min_size=1, max_size=4))
def test_steps_foreseen_read_and_write_states(family: str, decodes: list[int]) -> None:
    rates = Rates(1e9, 3e10, 1e-4, knee=2.0, row_overhead=1e-6)
    costs = executor(family).costs
    foreseen = islice(costs.decode_seconds(np.array(decodes, np.int32), rates), 3)
    steps = [batch([(at + step, 1) for at in decodes], rows=len(decodes)) for step in range(3)]
    assert list(foreseen) == [costs.seconds(each, rates) for each in steps]


@pytest.mark.parametrize("family", ["lfm2", "qwen35"])
@pytest.mark.parametrize("count", [1, 5])
def test_a_step_reads_and_writes_the_state_of_each_sequence(family: str, count: int) -> None:
    config = tiny.config(family)
    layout, costs = KvLayout.of(config), executor(family).costs
    assert layout.state is not None
    step = batch([(30, 1)] * count, rows=count)
    counted = total(costs, step)
    embedded = 2 * count * config.hidden_size
    assert counted.weight_bytes == costs.weight_bytes + embedded
    attended = count * (31 + 1) * layout.bytes_per_token
    assert counted.kv_bytes == attended + 2 * count * layout.state.payload_bytes
    one_byte_a_second = costs.seconds(step, Rates(1.0))
    assert one_byte_a_second == counted.weight_bytes + counted.kv_bytes


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3moe", "lfm2", "qwen35"])
def test_only_states_tell_many_sequences_from_one_of_as_many_tokens(family: str) -> None:
    """Attention aside: each has a state if any layer is recurrent, however many its tokens."""
    costs, state = executor(family).costs, KvLayout.of(tiny.config(family)).state
    one, many = (
        costs.dense_seconds(costs.size(batch(spans)), Rates(1.0))
        for spans in ([(0, 8)], [(0, 1)] * 8)
    )
    assert many - one == (0 if state is None else 2 * 7 * state.payload_bytes)


@pytest.mark.parametrize("config", [tiny.config(), tiny.config("gemma3"), tiny.mixed()])
@given(spans=spans)
def test_attention_is_counted_as_if_query_by_query(
    config: ModelConfig, spans: list[tuple[int, int]]
) -> None:
    ops = moved = of_first = 0
    tokens = sum(size for _, size in spans)
    for op in program(config).ops:
        if isinstance(op, PagedAttention):
            token_bytes = 2 * op.kv_heads * op.head_dim * 2
            of_first += tokens * 4 * config.num_heads * op.head_dim
            for start, size in spans:
                seen = set()
                for position in range(start, start + size):
                    first = max(0, position - op.window + 1) if op.window else 0
                    ops += 4 * config.num_heads * op.head_dim * (position - first + 1)
                    seen |= set(range(first, position + 1))
                moved += (len(seen) + size) * token_bytes  # read once, and the new ones written
    costs = CostModel(program(config), KvLayout.of(config))
    counted = total(costs, batch(spans))
    without = total(costs, batch([(0, 1)] * tokens))
    assert counted.kv_bytes == moved
    assert counted.ops - without.ops == ops - of_first


def test_weights_are_read_once_a_step_and_the_last_where_logits_are_wanted() -> None:
    config = tiny.config()
    compute = program(config)
    last = max(i for i, op in enumerate(compute.ops) if isinstance(op, PagedAttention))

    def size(role: str) -> int:
        return 2 * int(np.prod(compute.weights[role]))

    def matrices(ops: tuple[Op, ...]) -> int:
        return sum(size(op.weight) for op in ops if isinstance(op, Linear | Logits))

    def norms(ops: tuple[Op, ...]) -> int:
        return sum(size(op.weight) for op in ops if isinstance(op, RmsNorm))

    costs = executor().costs
    one, many = total(costs, batch([(0, 1)])), total(costs, batch([(0, 30)]))
    none = total(costs, batch([(0, 1)], rows=0))
    row = 2 * config.hidden_size  # of the embedding
    assert one.weight_bytes == matrices(compute.ops) + norms(compute.ops) + row
    assert many.weight_bytes - one.weight_bytes == 29 * row
    tail = compute.ops[last + 1 :]
    assert one.weight_bytes - none.weight_bytes == matrices(tail) + norms(tail)
    assert many.ops >= 30 * matrices(compute.ops[:last]) + matrices(tail)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3moe", "lfm2", "qwen35"])
@given(spans=spans, rows=st.integers(0, 3))
def test_the_ops_add_up_to_the_step(family: str, spans: list[tuple[int, int]], rows: int) -> None:
    costs = executor(family, Rates(1e9, 2e9, int8_ops_per_second=7e9))
    step = batch(spans, min(rows, sum(size for _, size in spans)))
    ops = costs.costs.by_op(step)
    assert len(ops) == len(costs.costs.program.ops)
    seconds = costs.costs.seconds(step, costs.rates)
    assert sum(op.seconds(costs.rates) for op in ops) == pytest.approx(seconds)
    for op, cost in zip(costs.costs.program.ops, ops, strict=True):
        assert (cost.kv_bytes > 0) == isinstance(op, PagedAttention | Recurrence)


def test_a_program_of_rows_reads_its_weights_and_no_cache() -> None:
    config = tiny.config()
    head = Program(
        config,
        (Input("x"), Linear("x", "w", "h"), Activate("h", "h", Activation.SILU), Logits("h", "v")),
        {"x": 64, "h": 48},
        {"w": (48, 64), "v": (10, 48)},
    )
    costs = CostModel(head, KvLayout.of(config), weight_bytes={"w": 1000, "v": 500})
    counted = total(costs, batch([(7, 1)] * 3, rows=3))
    assert counted.kv_bytes == 0
    assert counted.weight_bytes == 1500
    assert counted.ops == 3 * (2 * 48 * 64 + 9 * 48 + 2 * 10 * 48)


@pytest.mark.parametrize(("count", "chosen"), [(4, 1), (4, 2), (5, 3), (3, 3)])
def test_experts_hit_are_the_mean_over_all_ways_to_choose(count: int, chosen: int) -> None:
    ways = list(combinations(range(count), chosen))
    for tokens in (1, 2, 3):
        hit = [len(set().union(*each)) for each in product(ways, repeat=tokens)]
        expected = Experts(count, chosen, 8, True).expected(tokens)
        assert expected == pytest.approx(sum(hit) / len(hit))


def test_experts_are_counted_as_they_are_hit() -> None:
    config = tiny.config("mixtral")
    compute = program(config)
    costs = CostModel(compute, KvLayout.of(config))
    experts = config.experts
    every = sum(2 * int(np.prod(shape)) for shape in compute.weights.values())
    assert costs.weight_bytes == every
    matrix = 2 * config.hidden_size * experts.intermediate_size
    for tokens in (1, 3, 40):
        cost = costs.by_op(batch([(0, tokens)], tokens))
        linears = [
            each for op, each in zip(compute.ops, cost, strict=True) if isinstance(op, ExpertLinear)
        ]
        assert len(linears) == 3 * len(config.layers)
        for each in linears:
            assert each.weight_bytes == round(experts.expected(tokens) * matrix)
            assert each.ops == tokens * experts.chosen * matrix
            assert each.arithmetic is Arithmetic.FP32
    one, all_but_one = (costs.by_op(batch([(0, n)], n)) for n in (1, 400))
    first = next(i for i, op in enumerate(compute.ops) if isinstance(op, ExpertLinear))
    assert one[first].weight_bytes == experts.chosen * matrix
    assert all_but_one[first].weight_bytes == experts.count * matrix


def test_every_kind_of_arithmetic_has_its_peak() -> None:
    config = tiny.config()
    compute = program(config)
    layout = KvLayout.of(config)
    rates = Rates(1e18, 1e9, int8_ops_per_second=4e9, bf16_ops_per_second=2e9)
    linear = dict.fromkeys(compute.weights, Arithmetic.INT8)
    model = CostModel(compute, layout, arithmetic=linear, attention=Arithmetic.BF16)
    step = batch([(40, 8)], 8)
    for op, cost in zip(compute.ops, model.by_op(step), strict=True):
        peak = 1e9
        if isinstance(op, Linear | Logits):
            peak = 4e9
        elif isinstance(op, PagedAttention):
            peak = 2e9
        assert cost.seconds(rates) == pytest.approx(cost.ops / peak)
    # Of 8 bits: two products of bytes a number, and half the bytes to read.
    codes = CostModel(compute, KvLayout.of(config, dtype=KvDtype.INT8), attention=Arithmetic.INT8)
    for op, cost, other in zip(compute.ops, codes.by_op(step), model.by_op(step), strict=True):
        if isinstance(op, PagedAttention):
            assert cost.ops == 2 * other.ops
            assert cost.kv_bytes < other.kv_bytes / 1.5
    assert {Rates(1, 3).peak(kind) for kind in Arithmetic} == {3}
    assert Rates(1, 3, bf16_ops_per_second=5).peak(Arithmetic.FP8) == 5
    assert Rates(1, 3, bf16_ops_per_second=5, fp8_ops_per_second=7).peak(Arithmetic.FP8) == 7
    with pytest.raises(ValueError, match="positive"):
        Rates(int8_ops_per_second=0)


def test_stored_sizes_replace_the_two_bytes_an_element() -> None:
    config = tiny.config()
    compute = program(config)
    half = {role: int(np.prod(shape)) for role, shape in compute.weights.items()}
    stored, step = CostModel(compute, KvLayout.of(config), weight_bytes=half), batch([(0, 1)])
    assert 2 * total(stored, step).weight_bytes == total(executor().costs, step).weight_bytes


def test_duration_follows_the_slower_of_memory_and_arithmetic() -> None:
    for rates in (Rates(1e6, 1e15), Rates(1e15, 1e6)):
        costs, step = executor(rates=rates).costs, batch([(5, 1)])
        cost = total(costs, step)
        memory = (cost.weight_bytes + cost.kv_bytes) / rates.bytes_per_second
        slower = max(memory, cost.ops / rates.ops_per_second)
        assert costs.seconds(step, rates) == pytest.approx(slower, rel=1e-6)
    assert executor(rates=Rates(step_overhead=0.5)).execute(batch([(0, 1)])).duration == 0.5
    assert executor(rates=Rates()).execute(batch([(0, 1)])).duration == 0.0
    with pytest.raises(ValueError, match="positive"):
        Rates(bytes_per_second=0)


def test_threads_wait_for_the_one_with_a_panel_more() -> None:
    """Two threads, a second an operation and row: from 65 rows on they take panels of 8."""
    even, uneven = Rates(1e18, 1.0), Rates(1e18, 1.0, threads=2)
    assert [even.seconds(0, rows, Arithmetic.FP32, rows) for rows in (1, 65, 500)] == [1, 65, 500]
    counts = (1, 7, 64, 65, 80, 81, 96, 97, 112, 500)
    taken = [uneven.seconds(0, rows, Arithmetic.FP32, rows) for rows in counts]
    assert taken == pytest.approx([1, 7, 64, 80, 80, 96, 96, 112, 112, 512])
    unpacking = Rates(1e18, 1.0, threads=2, unpacking=3.0)
    taken = [unpacking.seconds(0, rows, Arithmetic.FP32, rows) for rows in (1, 8, 9, 64, 65)]
    assert taken == pytest.approx([4, 11, 15, 64 + 3 * 8, 80 + 3 * 10])
    # As columns of numbers, which is how a fit takes them.
    rows: Any = np.array(counts)
    soft = replace(unpacking, knee=2.0)
    assert soft.seconds(0, rows, Arithmetic.FP32, rows) == pytest.approx(
        [unpacking.seconds(0, count, Arithmetic.FP32, count) for count in counts]
    )


@given(threads=st.integers(1, 9), rows=st.integers(1, 3000))
def test_sharing_out_rows_costs_no_more_than_a_panel_a_thread(threads: int, rows: int) -> None:
    rates = Rates(1e18, 1.0, threads=threads)
    now, more = (rates.seconds(0, n, Arithmetic.FP32, n) for n in (rows, rows + 1))
    assert rows * (1 - 1e-12) <= now < rows + PANEL_ROWS * threads
    assert now <= more * (1 + 1e-12)


@pytest.mark.parametrize(
    "rates",
    [
        Rates(1e9, 1e9),  # attention's own rates are None
        Rates(
            1e9, 2e10, 1e-4, knee=2.5, kv_bytes_per_second=3e8, attention_ops_per_second=5e9,
            attention_knee=1.7, threads=2, unpacking=1.5, batch_overhead=2e-4, row_overhead=1e-6,
            chunk_overhead=1e-5,
        ),
    ],
)  # fmt: skip
def test_a_slower_machine_takes_longer_for_every_step(rates: Rates) -> None:
    assert rates.slowed(1.0) == rates
    for step in (batch([(0, 1)]), batch([(0, 40), (3, 9), (100, 101)])):
        costs = executor().costs
        slow, usual = costs.seconds(step, rates.slowed(1.25)), costs.seconds(step, rates)
        assert slow == pytest.approx(1.25 * usual)


def test_the_engine_simulates_on_virtual_time() -> None:
    """A step's predicted duration is all that moves the clock."""
    config = tiny.config()
    layout = KvLayout.of(config)
    costs = SimulatedExecutor(
        program(config), layout, num_blocks=200, rates=Rates(1e9, 1e9, step_overhead=1e-3)
    )
    clock = VirtualClock()
    limits = SchedulerConfig(max_model_len=512, max_num_seqs=16, max_num_batched_tokens=256)
    engine = Engine(
        costs,
        Scheduler(limits, layout, 200),
        ScriptedSampler(config.vocab_size),
        clock,
        vocab_size=config.vocab_size,
    )
    records = [
        engine.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=[index] * 30,
                params=SamplingParams(max_tokens=20, seed=index),
            )
        )
        for index in range(8)
    ]
    steps = 0
    while engine.has_work():
        engine.step()
        steps += 1
    assert steps == 20
    assert 0.02 < clock.now() < 1.0
    assert all(record.outcome is Outcome.FINISHED for record in records)
    assert max(record.finished or 0.0 for record in records) == clock.now()
    assert all(record.first_token == records[0].first_token for record in records)
