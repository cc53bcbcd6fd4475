"""Several programs on one runtime: what they share, what they leave alone, rows in and out."""

import dataclasses
import gc
import threading
import time
from functools import partial

import numpy as np
import pytest

from executor import tiny
from executor.driving import Driver, Float32
from octavo import _native
from octavo.executor.native.executor import NativeExecutor
from octavo.executor.reference import evaluate
from octavo.loader.base import CheckpointError, Weight, WeightFormat
from octavo.models import families
from octavo.models.config import Activation, ModelConfig
from octavo.models.program import (
    Activate,
    Add,
    Embed,
    Input,
    Linear,
    Logits,
    Op,
    Program,
    RmsNorm,
    RotateQueries,
)

ISAS = ["generic", "avx2", "avx512", "avx512_bf16"]
TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 70, 100)]


def driver(config: ModelConfig, format: WeightFormat, isa: str, **options: object) -> Driver:
    try:
        return Driver(tiny.checkpoint(config, format), isa=isa, **options)  # type: ignore[arg-type]
    except ValueError as error:
        pytest.skip(str(error))


def matrix(role: str, shape: tuple[int, int], seed: int = 9) -> Weight:
    values = np.random.default_rng(seed).normal(0.0, shape[1] ** -0.5, shape).astype(np.float32)
    return Weight(role, WeightFormat.F32, shape, tiny.quantize(values, WeightFormat.F32))


def drafted(
    executor: NativeExecutor,
    programs: list[int],
    rows: Float32,
    token_ids: list[int],
    most: list[int],
    least: float,
) -> list[tuple[list[int], float]]:
    """Each row's tokens and how probable the first is."""
    executor.start_draft(programs, rows, list(range(len(rows))), token_ids, most, least)
    found = executor.finish_draft()
    assert found is not None
    return found


def residual_head(config: ModelConfig, activation: Activation, outputs: int) -> Program:
    """x + activation(W x + b), and logits of some tokens."""
    width = config.hidden_size
    ops: tuple[Op, ...] = (
        Input("x"),
        Linear("x", "head.w", "h", "head.b"),
        Activate("h", "h", activation),
        Add("x", "h", "x"),
        Logits("x", "head.out"),
    )
    shapes: dict[str, tuple[int, ...]] = {
        "head.w": (width, width),
        "head.b": (width,),
        "head.out": (outputs, width),
    }
    return Program(config, ops, {"x": width, "h": width}, shapes)


def head_weights(config: ModelConfig, outputs: int) -> dict[str, Weight]:
    width = config.hidden_size
    bias = np.random.default_rng(5).normal(size=width).astype(np.float32)
    return {
        "head.w": matrix("head.w", (width, width)),
        "head.b": Weight("head.b", WeightFormat.F32, (width,), bias.view(np.uint8)),
        "head.out": matrix("head.out", (outputs, width), 10),
    }


def logits(executor: NativeExecutor, program: int, rows: Float32) -> Float32:
    result = executor.execute_rows(program, rows).logits
    return result.copy()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "activation", [each for each in Activation if each is not Activation.SWIGLU_CLAMPED]
)
def test_a_program_of_rows_equals_the_reference(
    activation: Activation, isa: str, threads: int
) -> None:
    """Alone, in company and beyond the rows that threads share: the same bits."""
    config = tiny.config()
    tested = driver(config, WeightFormat.F32, isa, threads=threads)
    program, weights = residual_head(config, activation, 23), head_weights(config, 23)
    number = tested.executor.add_program(program, weights)
    rows = np.random.default_rng(1).normal(size=(301, config.hidden_size)).astype(np.float32)
    plain = {
        role: weight.data.view(np.float32).reshape(weight.shape) for role, weight in weights.items()
    }
    values = {"x": rows[None]}
    evaluate.run(program.ops, config, plain, values)
    everything = logits(tested.executor, number, rows)
    assert everything.shape == (301, 23)
    assert np.abs(everything - values["logits"][0]).max() < 1e-4
    for first, last in (0, 1), (17, 22), (100, 301):
        assert np.array_equal(
            logits(tested.executor, number, rows[first:last]), everything[first:last]
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_the_model_is_the_same_to_the_bit_beside_others(family: str, isa: str) -> None:
    """Before and after other programs came, and with their steps between its own."""
    config = tiny.config(family)
    tested = driver(config, WeightFormat.Q8_0, isa, threads=2)
    expected = tested.run(TOKENS)
    wide = residual_head(config, Activation.SILU, 70)
    head = tested.executor.add_program(wide, head_weights(config, 70))
    again = tested.executor.add_program(families.program(config))
    assert (head, again) == (1, 2)
    assert np.array_equal(tested.run(TOKENS), expected)
    sequence = tested.start(TOKENS)
    rows = np.ones((200, config.hidden_size), np.float32)
    while sequence.left:
        batch = tested.batch([(sequence, min(30, sequence.left))])
        repeated = tested.executor.execute(batch, again).logits
        repeated = repeated.copy()
        tested.executor.execute_rows(head, rows)
        tested.step([(sequence, min(30, sequence.left))])
        assert np.array_equal(repeated, sequence.logits[-len(repeated) :])
    assert np.array_equal(np.array(sequence.logits), expected)


def test_weights_are_shared() -> None:
    config = tiny.config()
    tested = Driver(tiny.checkpoint(config, WeightFormat.Q4_0))
    before = tested.executor.weight_bytes
    number = tested.executor.add_program(families.program(config))
    assert tested.executor.weight_bytes == before
    assert tested.executor.costs_of(number).weight_bytes == before
    head = tested.executor.add_program(
        residual_head(config, Activation.SILU, 23), head_weights(config, 23)
    )
    assert tested.executor.costs_of(head).weight_bytes == tested.executor.weight_bytes - before
    assert tested.executor.costs.weight_bytes == before


def test_some_layers_share_cache_and_weights() -> None:
    """A program of the first layer alone reads what the whole model wrote, and writes likewise."""
    config = tiny.config()
    checkpoint = tiny.checkpoint(config)
    tested = Driver(checkpoint)
    one = dataclasses.replace(config, layers=config.layers[:1])
    number = tested.executor.add_program(families.program(one))
    alone = Driver(dataclasses.replace(checkpoint, config=one))
    expected = alone.run(TOKENS[:40])
    sequence = tested.start(TOKENS[:40])
    tested.step([(sequence, 30)])
    result = tested.executor.execute(tested.batch([(sequence, 10)]), number)
    assert result.logits is not None
    assert np.array_equal(result.logits, expected[30:])


def test_attention_that_does_not_fit_the_cache_is_refused() -> None:
    config = tiny.mixed()
    checkpoint = tiny.checkpoint(config)
    tested = Driver(checkpoint)
    tested.executor.add_program(families.program(config))
    narrow, wide = config.layers[:2]
    for change in (
        {"layers": (wide, narrow)},
        {"layers": (narrow, wide, narrow, narrow)},  # layer 3 has no place
        {"layers": (narrow, dataclasses.replace(wide, num_kv_heads=2))},
        {"num_heads": 8},
    ):
        other = dataclasses.replace(config, **change)
        with pytest.raises(ValueError, match="attention has another shape than the cache"):
            tested.executor.add_program(families.program(other))
    compute = families.program(config)
    rotated = tuple(
        dataclasses.replace(op, head_dim=8) if isinstance(op, RotateQueries) else op
        for op in compute.ops
    )
    with pytest.raises(ValueError, match="attention has another shape than the cache"):
        tested.executor.add_program(dataclasses.replace(compute, ops=rotated))


@pytest.mark.parametrize("slice", [8, 640])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_hidden_rows_are_what_logits_are_made_of(family: str, isa: str, slice: int) -> None:
    """The head alone, given them, draws the same logits; and asking for them changes none."""
    config = tiny.config(family)
    tested = driver(config, WeightFormat.Q8_0, isa, threads=2, logits_slice=slice, keep_hidden=True)
    head = Program(
        config,
        (Input("x"), Logits("x", "token_embd")),
        {"x": config.hidden_size},
        {"token_embd": (config.vocab_size, config.hidden_size)},
    )
    number = tested.executor.add_program(head)
    expected = driver(config, WeightFormat.Q8_0, isa).run(TOKENS)
    for wanted in np.arange(100, dtype=np.int32), np.array([3, 98], np.int32):
        sequence = tested.start(TOKENS)
        batch = tested.batch([(sequence, 100)])
        batch.logits_rows = wanted
        result = tested.executor.execute(batch)
        assert result.logits is not None
        assert np.array_equal(result.logits, expected[wanted][:slice])
        assert result.hidden.shape == (len(wanted), config.hidden_size)
        hidden = result.hidden.copy()
        for first in range(0, len(wanted), 8):
            rows = logits(tested.executor, number, hidden[first : first + 8])
            assert np.array_equal(rows, expected[wanted][first : first + 8])
        assert np.array_equal(result.hidden, hidden)  # other programs leave them alone
        tested.finish(sequence)


@pytest.mark.parametrize("isa", ISAS)
def test_hidden_rows_of_all_tokens(isa: str) -> None:
    """Whichever of them want logits, which are as they were: none, in the midst of a prompt."""
    config = tiny.config("gemma3")
    some = driver(config, WeightFormat.Q8_0, isa, keep_hidden=True)
    tested = driver(config, WeightFormat.Q8_0, isa, threads=2, all_hidden=True)
    batch = some.batch([(some.start(TOKENS), 100)])
    expected = some.executor.execute(batch)
    assert expected.logits is not None
    for wanted in np.array([], np.int32), np.array([3, 98], np.int32):
        batch = tested.batch([(tested.start(TOKENS), 100)])
        batch.logits_rows = wanted
        result = tested.executor.execute(batch)
        assert np.array_equal(result.hidden, expected.hidden)
        assert np.array_equal(result.logits, expected.logits[wanted])


def test_nobody_keeps_what_was_not_asked_for() -> None:
    tested = Driver(tiny.checkpoint(tiny.config()))
    assert tested.executor.execute(tested.batch([(tested.start([1, 2]), 2)])).hidden is None


def test_rows_may_go_through_attention() -> None:
    """Embeddings brought as rows are as good as tokens."""
    config = tiny.config()
    checkpoint = tiny.checkpoint(config)
    tested = Driver(checkpoint, threads=2)
    expected = tested.run(TOKENS)
    program = families.program(config)
    assert isinstance(program.ops[0], Embed)
    rows_in = dataclasses.replace(program, ops=(Input("x"), *program.ops[1:]))
    number = tested.executor.add_program(rows_in)
    table = tiny.dequantize(checkpoint.weights["token_embd"]).astype(np.float32)
    batch = tested.batch([(tested.start(TOKENS), 100)])
    result = tested.executor.execute(batch, number, table[TOKENS])
    assert result.logits is not None
    assert np.array_equal(result.logits, expected)


@pytest.mark.parametrize("slice", [8, 640])
@pytest.mark.parametrize("isa", ISAS)
def test_a_draft_is_what_its_steps_say_one_by_one(isa: str, slice: int) -> None:
    """Many sequences are drafted for at once, each as if it were alone: by the first program once,
    then by the other, which goes on from its own rows and the token before.
    """
    config = tiny.config()
    tested = driver(config, WeightFormat.Q8_0, isa, threads=2, logits_slice=slice)
    executor = tested.executor
    head = residual_head(config, Activation.SILU, 23)
    weights = head_weights(config, 23)
    rng = np.random.default_rng(2)
    ids = np.sort(rng.permutation(config.vocab_size)[:23]).tolist()
    first = executor.add_program(head, weights, ids=ids)
    ops = (head.ops[0], Embed("token_embd", "e", 1.0), Add("x", "e", "x"), *head.ops[1:])
    shapes = head.weights | {"token_embd": (config.vocab_size, config.hidden_size)}
    goes_on = Program(config, ops, head.widths | {"e": config.hidden_size}, shapes)
    again = executor.add_program(goes_on, keep_hidden=True, ids=ids)
    rows = rng.normal(size=(21, config.hidden_size)).astype(np.float32)
    tokens = rng.integers(0, config.vocab_size, 21).astype(np.int32)
    most = rng.integers(0, 6, 21).astype(np.int32)
    least = 0.02
    found = drafted(executor, [first, again], rows, tokens.tolist(), most.tolist(), least)
    ended = 0
    for index in range(21):
        row, token, product = rows[index : index + 1], tokens[index], 1.0
        expected: list[int] = []
        while len(expected) < most[index] and product > least:
            result = executor.execute_rows(
                again if expected else first, row, np.array([token], np.int32)
            )
            values = result.logits[0].astype(np.float64)
            chance = 1 / np.exp(values - values.max()).sum()
            if not expected:
                assert found[index][1] == pytest.approx(chance, rel=1e-4)
            product *= chance
            token = ids[values.argmax()]
            expected.append(token)
            row = row if result.hidden is None else result.hidden.copy()
        assert found[index][0] == expected
        ended += len(expected) < most[index]
    assert 0 < ended < 21


@pytest.mark.parametrize("threads", [1, 2])
def test_a_draft_is_fetched_at_once_or_later(threads: int) -> None:
    """… with the same result, and lost where something else is computed."""
    config = tiny.config()
    executor = Driver(tiny.checkpoint(config), threads=threads).executor
    head = residual_head(config, Activation.SILU, 23)
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(9, config.hidden_size)).astype(np.float32)
    ids = np.sort(rng.permutation(config.vocab_size)[:23]).tolist()
    number = executor.add_program(head, head_weights(config, 23), keep_hidden=True, ids=ids)
    assert executor.finish_draft() is None
    for round in range(60):
        numbers = rng.permutation(9)[: 1 + round % 9]
        tokens = rng.integers(0, config.vocab_size, len(numbers)).tolist()
        most = rng.integers(0, 4, len(numbers)).tolist()
        expected = drafted(executor, [number], rows[numbers], tokens, most, 0.02)
        executor.start_draft([number], rows, numbers.tolist(), tokens, most, 0.02)
        if round % 3 == 0:
            time.sleep(0.0003)
        if round % 5 == 0:
            if round % 2:
                executor.cancel_draft()
            else:
                executor.execute_rows(number, rows)
            assert executor.finish_draft() is None
            continue
        assert executor.finish_draft() == expected
        assert executor.finish_draft() is None
    for bad, message in (
        (([9], [1], [1]), "there is no row 9"),
        (([0], [1, 1], [1]), "token_ids has 2 entries, not 1"),
        (([0], [1], []), "most has 0 entries, not 1"),
        (([0], [-1], [1]), "token is -1"),
        (([0], [1], [1 << 30]), "tokens to draft is 1073741824"),
        (([0] * 641, [1] * 641, [1] * 641), "sequences to draft for is 641"),
    ):
        with pytest.raises(ValueError, match=message):
            executor.start_draft([number], rows, *bad, 0.02)


def test_executors_that_share_threads_leave_each_others_drafts_alone() -> None:
    config = tiny.config()
    one = Driver(tiny.checkpoint(config), threads=2).executor
    other = Driver(tiny.checkpoint(config), threads=None, pool=one.pool).executor
    head = residual_head(config, Activation.SILU, 23)
    rows = np.random.default_rng(4).normal(size=(3, config.hidden_size)).astype(np.float32)
    for executor in (one, other):
        executor.add_program(head, head_weights(config, 23), ids=range(23))
    given = [1], rows, [0, 1, 2], [5, 6, 7], [2, 2, 2], 0.0
    one.start_draft(*given)
    expected = one.finish_draft()
    for round in range(40):
        one.start_draft(*given)
        if round % 2:
            time.sleep(0.0003)
        other.start_draft(*given)
        one.cancel_draft()
        assert one.finish_draft() is None
        assert other.finish_draft() == expected
        one.start_draft(*given)
        other.execute_rows(1, rows)
        assert one.finish_draft() == expected


def test_no_token_is_drafted_from_what_is_no_number() -> None:
    config = tiny.config()
    executor = Driver(tiny.checkpoint(config)).executor
    head = residual_head(config, Activation.SILU, 23)
    number = executor.add_program(head, head_weights(config, 23), ids=range(23))
    rows = np.ones((2, 64), np.float32)
    rows[0, 5] = np.nan
    (nothing, _), (tokens, _) = drafted(executor, [number], rows, [2, 2], [2, 2], 0.0)
    assert (len(nothing), len(tokens)) == (0, 2)


def test_drafts_that_do_not_fit_are_refused() -> None:
    config = tiny.config()
    executor = Driver(tiny.checkpoint(config)).executor
    head, rows = residual_head(config, Activation.SILU, 23), np.ones((2, 64), np.float32)
    number = executor.add_program(head, head_weights(config, 23), ids=range(23))
    without = executor.add_program(head)
    two = [1, 2]
    draft, add = partial(drafted, executor, least=0.0), partial(executor.add_program, head)
    for bad, message in (
        (partial(draft, [number], rows[:, :63].copy(), two, two), r"rows\[0\] has 63 entries"),
        (partial(draft, [number], rows, [1], two), "token_ids has 1 entries, not 2"),
        (partial(draft, [number], rows, two, [1]), "most has 1 entries, not 2"),
        (partial(draft, [number], rows, [-1, 0], two), "token is -1"),
        (partial(draft, [number], rows, two, [-1, 0]), "tokens to draft is -1"),
        (partial(draft, [number], rows, two, [1 << 29, 1]), "tokens to draft is 536870912"),
        (partial(add, ids=range(22)), "stand for is 22, outside 23 to 23"),
        (partial(add, ids=range(60, 83)), "token is 70"),
        (partial(draft, [without], rows, two, two), "logits stand for no tokens"),
        (partial(draft, [], rows, two, two), "no program to draft with"),
        (partial(draft, [0], rows, two, two), r"rows\[0\] has 64 entries, not 0"),
        (partial(draft, [7], rows, two, two), "program is 7"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
    assert [len(tokens) for tokens, _ in draft([number], rows, two, two)] == two


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    config = tiny.config()
    tested = Driver(tiny.checkpoint(config))
    executor = tested.executor
    expected = tested.run(TOKENS[:20])
    head, weights = residual_head(config, Activation.SILU, 23), head_weights(config, 23)
    number = executor.add_program(head, weights)
    more = matrix("extra", (4, 4))
    with pytest.raises(ValueError, match="the program has no weight extra"):
        executor.add_program(families.program(config), {"extra": more})
    with pytest.raises(ValueError, match=r"the weight head\.w is loaded already"):
        executor.add_program(head, weights)
    with pytest.raises(CheckpointError, match="the model has no weight missing"):
        executor.add_program(
            Program(config, (Input("x"), Logits("x", "missing")), {"x": 64}, {"missing": (9, 64)})
        )
    with pytest.raises(CheckpointError, match=r"head\.out has shape \(23, 64\), not \(9, 64\)"):
        executor.add_program(
            Program(config, (Input("x"), Logits("x", "head.out")), {"x": 64}, {"head.out": (9, 64)})
        )
    with pytest.raises(ValueError, match="logits matrix rows is 71, outside 1 to 70"):
        executor.add_program(
            Program(config, (Input("x"), Logits("x", "big")), {"x": 64}, {"big": (71, 64)}),
            {"big": matrix("big", (71, 64))},
        )
    with pytest.raises(ValueError, match="without logits"):
        executor.add_program(
            Program(
                config,
                (Input("x"), RmsNorm("x", "output_norm", "x", 1e-5)),
                {"x": 64},
                {"output_norm": (64,)},
            )
        )
    with pytest.raises(ValueError, match="attention has another shape"):
        executor.add_program(families.program(tiny.config(num_heads=2)))
    good = tested.batch([(tested.start([1, 2, 3]), 3)])
    rows = np.ones((3, 64), np.float32)
    for bad, message in (
        (partial(executor.execute, good, number), r"rows\[0\] has 0 entries, not 64"),
        (partial(executor.execute, good, 0, rows), r"rows\[0\] has 64 entries, not 0"),
        (partial(executor.execute_rows, number, rows[:, :63]), r"rows\[0\] has 63 entries"),
        (partial(executor.execute_rows, number, np.ones((641, 64))), "number of tokens is 641"),
        (partial(executor.execute_rows, 0, rows), r"rows\[0\] has 64 entries, not 0"),
        (partial(executor.execute, good, 7), "program is 7"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
    assert np.array_equal(tested.run(TOKENS[:20]), expected)


def test_programs_are_dropped_last_first() -> None:
    config = tiny.config()
    executor = Driver(tiny.checkpoint(config)).executor
    with pytest.raises(ValueError, match="no program to drop"):
        executor.drop_program()
    assert executor.add_program(families.program(config)) == 1
    head = residual_head(config, Activation.SILU, 23)
    assert executor.add_program(head, head_weights(config, 23)) == 2
    rows = np.ones((3, 64), np.float32)
    before = logits(executor, 2, rows)
    executor.drop_program()
    with pytest.raises(ValueError, match="program is 2, outside 0 to 1"):
        executor.execute_rows(2, rows)
    assert executor.add_program(head) == 2  # its weights are there
    assert np.array_equal(logits(executor, 2, rows), before)
    executor.drop_program()
    assert executor.add_program(head, keep_hidden=True) == 2  # which the one before it was not
    assert executor.execute_rows(2, rows).hidden is not None


def test_two_executors_on_one_pool() -> None:
    """Whichever goes first, the threads live as long as either."""
    config = tiny.config()
    before = threading.enumerate()
    first = Driver(tiny.checkpoint(config), threads=3)
    expected = first.run(TOKENS)

    def second() -> NativeExecutor:
        return NativeExecutor(
            tiny.checkpoint(config),
            families.program(config),
            first.layout,
            num_blocks=400,
            max_tokens=640,
            max_logits_rows=640,
            max_seqs=8,
            max_blocks_per_seq=40,
            pool=first.executor.pool,
        )

    other = second()
    assert other.threads == 3
    assert other.pool is first.executor.pool
    batch = first.batch([(first.start(TOKENS), 100)])
    for executor in (other, first.executor, other):
        got = executor.execute(batch).logits
        assert got is not None
        assert np.array_equal(got, expected)
    first.executor.close()
    gc.collect()
    got = other.execute(batch).logits
    assert got is not None
    assert np.array_equal(got, expected)
    assert {*threading.enumerate()} <= {*before}  # the pool's are none of Python's
    with pytest.raises(ValueError, match="threads are asked for"):
        NativeExecutor(
            tiny.checkpoint(config),
            families.program(config),
            first.layout,
            num_blocks=1,
            max_tokens=1,
            max_logits_rows=1,
            max_seqs=1,
            max_blocks_per_seq=1,
            threads=2,
            pool=_native.ThreadPool(2),
        )
