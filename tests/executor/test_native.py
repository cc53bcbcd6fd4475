"""The native executor against the float64 reference, and its refusals."""

import dataclasses
import time
from functools import partial

import numpy as np
import pytest

from executor import reference, tiny
from executor.driving import Driver
from octavo.executor.cost import CHUNK_ROWS, Arithmetic
from octavo.executor.native.executor import NativeExecutor
from octavo.executor.native.packing import arithmetic_of
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader.base import CheckpointError, WeightFormat
from octavo.models import families
from octavo.models.config import Activation, Layer, ModelConfig, Rope

ISAS = ["generic", "avx2", "avx512", "avx512_bf16"]

SHAPES = {
    "gqa": tiny.config(),
    "mha": tiny.config(num_heads=2, num_kv_heads=2),
    "mqa": tiny.config(num_heads=5, num_kv_heads=1),
    "many heads a KV head": tiny.config(num_heads=70, num_kv_heads=1, head_dim=4),
    "untied, biased": tiny.config(
        tied_embeddings=False, biases=frozenset({"attn_q", "attn_k", "attn_v", "ffn_down"})
    ),
    "softcaps": tiny.config(attention_softcap=5.0, logits_softcap=3.0),
    "sinks": tiny.config("gemma3", sinks=True, num_heads=6),
    "clamped": tiny.config(activation=Activation.SWIGLU_CLAMPED, swiglu_limit=0.75),
    "gemma3": tiny.config("gemma3"),
    "gemma3, window of one": tiny.config(
        "gemma3", layers=(Layer(Rope(10000.0, 16, False), 1), Layer(Rope(10000.0, 16, False)))
    ),
    "wide head": tiny.config("gemma3", head_dim=256, num_heads=2, num_kv_heads=1),
    "head of 80": tiny.config(head_dim=80),
    "head of 2": tiny.config(head_dim=2),
    "part of the head rotated": tiny.config(
        head_dim=26, layers=(Layer(Rope(500.0, 6, False, factors=(1.0, 2.0, 4.0))),) * 2
    ),
    "heads of two widths, shared caches": tiny.mixed(),
    "the same, norms of heads": tiny.mixed("gemma3"),
    "the same, norms of all heads": tiny.mixed("olmo2"),
    "heads of 32 to 512": tiny.widths(),
    **{f"gemma4, {kind}": tiny.gemma4(kind) for kind in ("e", "experts", "keys")},
    "odd widths": tiny.config(hidden_size=50, intermediate_size=33, vocab_size=101),
}


def supported(isa: str) -> str:
    try:
        Driver(tiny.checkpoint(tiny.config()), isa=isa)
    except ValueError as error:
        pytest.skip(str(error))
    return isa


def tokens_of(config: ModelConfig, count: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, config.vocab_size, count)]


def error(logits: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in standard deviations of the logits."""
    return float(np.abs(logits - expected).max() / expected.std())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape: str, isa: str) -> None:
    config = SHAPES[shape]
    checkpoint = tiny.checkpoint(config)
    driver = Driver(checkpoint, isa=supported(isa), threads=2, kv_dtype="fp16")
    tokens = tokens_of(config, 150)
    weights = {role: tiny.dequantize(weight) for role, weight in checkpoint.weights.items()}
    expected = reference.run(families.program(config), weights, tokens)
    assert error(driver.run(tokens), expected) < 4e-3
    assert error(driver.run(tokens, [40, 33, 1]), expected) < 4e-3


def test_a_long_context_equals_the_reference() -> None:
    """Many chunks of keys, in a prompt and spread over threads in decoding."""
    config = SHAPES["gqa"]
    checkpoint = tiny.checkpoint(config)
    driver = Driver(checkpoint, threads=2, kv_dtype="fp16")
    tokens = tokens_of(config, 610)
    weights = {role: tiny.dequantize(weight) for role, weight in checkpoint.weights.items()}
    expected = reference.run(families.program(config), weights, tokens)
    assert error(driver.run(tokens, [600, 1]), expected) < 4e-3


@pytest.mark.parametrize(
    ("format", "bound"),
    [
        (WeightFormat.F16, 1e-3),
        (WeightFormat.BF16, 2e-2),
        (WeightFormat.Q8_0, 6e-2),
        (WeightFormat.Q4_0, 6e-2),
        (WeightFormat.I2, 6e-2),
        (WeightFormat.I3, 6e-2),
        (WeightFormat.I4, 6e-2),
        (WeightFormat.I8, 6e-2),
        (WeightFormat.IQ1_M, 6e-2),
        (WeightFormat.IQ2_S, 6e-2),
        (WeightFormat.IQ3_XXS, 6e-2),
        (WeightFormat.TQ1_0, 6e-2),
        (WeightFormat.NVFP4, 6e-2),
        (WeightFormat.E4M3, 1e-3),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_stored_formats(family: str, format: WeightFormat, bound: float) -> None:
    """The bound is what rounding the activations (bf16, 8 bits a group) may cost."""
    config = tiny.broad(family) if format in tiny.BLOCKS_OF_256 else tiny.config(family)
    checkpoint = tiny.checkpoint(config, format)
    tokens = tokens_of(config, 60)
    weights = {role: tiny.dequantize(weight) for role, weight in checkpoint.weights.items()}
    expected = reference.run(families.program(config), weights, tokens)
    differences = Driver(checkpoint, kv_dtype="fp16").run(tokens, [50, 1]) - expected
    spread = float(np.sqrt((differences**2).mean()) / expected.std())
    assert spread < bound


@pytest.mark.parametrize("config", [tiny.config(), tiny.widths()])
@pytest.mark.parametrize("isa", ISAS)
def test_cache_dtypes(isa: str, config: ModelConfig) -> None:
    """Numbers of 8 bits' and 11 bits' precision; codes of 8 and 4 bits; bf16 where nothing is
    said.
    """
    checkpoint = tiny.checkpoint(config)
    tokens = tokens_of(config, 60)
    weights = {role: tiny.dequantize(weight) for role, weight in checkpoint.weights.items()}
    expected = reference.run(families.program(config), weights, tokens, kv=np.float64)
    fp16, bf16, auto, int8, int4 = (
        Driver(checkpoint, isa=supported(isa), kv_dtype=kv_dtype).run(tokens)
        for kv_dtype in ("fp16", "bf16", "auto", "int8", "int4")
    )
    assert 5e-3 < error(int8, expected) < 2e-1 < error(int4, expected) < 2
    assert error(fp16, expected) < 5e-3 < error(bf16, expected) < 1e-1
    assert np.array_equal(bf16, auto)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("kv_dtype", "bound"), [("fp16", 5e-3), ("bf16", 1e-1), ("int8", 2e-1), ("int4", 2.0)]
)
def test_heads_of_two_widths_in_every_cache(kv_dtype: str, bound: float, isa: str) -> None:
    config = tiny.mixed("gemma3")
    checkpoint = tiny.checkpoint(config)
    tokens = tokens_of(config, 100)
    weights = {role: tiny.dequantize(weight) for role, weight in checkpoint.weights.items()}
    expected = reference.run(families.program(config), weights, tokens, kv=np.float64)
    driver = Driver(checkpoint, isa=supported(isa), threads=2, kv_dtype=kv_dtype)
    assert len({driver.layout.group_bytes(group) for group in driver.layout.groups}) == 2
    assert error(driver.run(tokens), expected) < bound
    assert error(driver.run(tokens, [40, 33, 1]), expected) < bound


def test_large_blocks() -> None:
    config = tiny.config()
    checkpoint = tiny.checkpoint(config)
    tokens = tokens_of(config, 200)
    expected = Driver(checkpoint).run(tokens)
    assert np.array_equal(Driver(checkpoint, block_size=48).run(tokens, [70, 3]), expected)


def test_only_wanted_rows_have_logits() -> None:
    config = tiny.config()
    driver = Driver(tiny.checkpoint(config), threads=2)
    everything = driver.run(tokens_of(config, 50))
    sequence = driver.start(tokens_of(config, 50))
    batch = driver.batch([(sequence, 50)])
    batch.logits_rows = np.array([3, 17, 49], np.int32)
    logits = driver.executor.execute(batch).logits
    assert logits is not None
    assert np.array_equal(logits, everything[[3, 17, 49]])
    batch.logits_rows = np.zeros(0, np.int32)
    logits = driver.executor.execute(batch).logits
    assert logits.shape == (0, config.vocab_size)


@pytest.mark.parametrize("format", [WeightFormat.F32, WeightFormat.Q4_0])
def test_slices_of_logits_are_those_of_all_at_once(format: WeightFormat) -> None:
    checkpoint = tiny.checkpoint(tiny.config(), format)
    tokens = tokens_of(checkpoint.config, 45)
    everything = Driver(checkpoint).run(tokens)
    driver = Driver(checkpoint, logits_slice=16)
    result = driver.executor.execute(driver.batch([(driver.start(tokens), 45)]))
    assert result.logits is not None
    assert result.logits_from is not None
    assert np.array_equal(result.logits, everything[:16])
    for first in 32, 16:  # in any order
        assert np.array_equal(result.logits_from(first), everything[first : first + 16])
    for first, message in (20, "not the first of a panel"), (48, "outside 0 to 44"):
        with pytest.raises(ValueError, match=message):
            result.logits_from(first)


@pytest.mark.parametrize("kv_dtype", KvDtype.served())
def test_copied_blocks_continue_a_fork(kv_dtype: KvDtype) -> None:
    """A fork that copies its half-filled block goes on with the same bits; chains copy in order."""
    config = tiny.config()
    driver = Driver(tiny.checkpoint(config), threads=2, kv_dtype=kv_dtype)
    tokens = tokens_of(config, 24)
    expected = driver.run(tokens)
    parent, fork = driver.start(tokens), driver.start(tokens)
    driver.step([(parent, 20)])
    shared, partial = (int(block) for block in driver.tables[0, parent.slot, :2])
    between, copied = driver.free.pop(), driver.free.pop()
    driver.tables[0, fork.slot, :2] = shared, copied
    fork.done = 20
    batch = driver.batch([(fork, 4)])
    batch.copies = np.array([[partial, between], [between, copied]], np.int32)
    logits = driver.executor.execute(batch).logits
    assert logits is not None
    assert np.array_equal(logits, expected[20:])
    driver.step([(parent, 4)])
    assert np.array_equal(np.array(parent.logits), expected)


@pytest.mark.parametrize("kv_dtype", KvDtype.served())
def test_blocks_leave_and_come_back(kv_dtype: KvDtype) -> None:
    config = tiny.config("gemma3")
    driver = Driver(tiny.checkpoint(config), kv_dtype=kv_dtype)
    tokens = tokens_of(config, 40)
    expected = driver.run(tokens)
    sequence = driver.start(tokens)
    driver.step([(sequence, 39)])
    tables = driver.tables[:, sequence.slot]
    used = tables[tables >= 0]
    data = driver.executor.export_blocks(used)
    assert data.shape == (len(used), driver.layout.block_bytes)
    driver.run(tokens_of(config, 300, seed=5))  # over other blocks
    driver.executor.import_blocks(used, np.zeros_like(data))
    driver.executor.import_blocks(used[::-1].copy(), data[::-1])
    driver.step([(sequence, 1)])
    assert np.array_equal(sequence.logits[-1], expected[-1])
    with pytest.raises(ValueError, match="block 400 is outside"):
        driver.executor.export_blocks(np.array([400], np.int32))
    with pytest.raises(ValueError, match="data has 1 entries, not 2"):
        driver.executor.import_blocks(used[:2].copy(), data[:1])


@pytest.mark.parametrize("kv_dtype", KvDtype.served())
@pytest.mark.parametrize("isa", ISAS)
def test_what_recycled_blocks_hold_changes_nothing(isa: str, kv_dtype: str) -> None:
    """NaN that recycled blocks hold is never read, at either end of a window."""
    rope = Rope(10000.0, 16, False)
    config = tiny.config("gemma3", layers=(Layer(rope, 7), Layer(rope, 33), Layer(rope)))
    driver = Driver(tiny.checkpoint(config), isa=supported(isa), kv_dtype=kv_dtype)
    tokens = tokens_of(config, 70)
    expected = driver.run(tokens)
    assert np.isfinite(expected).all()
    every = np.arange(400, dtype=np.int32)
    rubbish = np.full((400, driver.layout.block_bytes), 0xFF, np.uint8)  # NaN, or scales of NaN
    driver.executor.import_blocks(every, rubbish)
    assert np.array_equal(driver.run(tokens), expected)
    driver.executor.import_blocks(every, rubbish)
    assert np.array_equal(driver.run(tokens, [25, 1]), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [1, 2, 70]}, "token 2 has id 70, outside a vocabulary of 70"),
        ({"token_ids": [1, -1, 3]}, "token 1 has id -1"),
        ({"positions": [0, 1, 3]}, "positions of sequence 0 are not consecutive"),
        ({"positions": [-1, 0, 1]}, "has positions -1 to 1"),
        ({"positions": [639, 640, 641]}, "outside 0 to 639"),
        ({"positions": [0, 1]}, "positions has 2 entries, not 3"),
        ({"seq_offsets": [0, 2]}, "seq_offsets run from 0 to 2, not over 3 tokens"),
        ({"seq_offsets": [1, 3]}, "seq_offsets run from 1"),
        ({"seq_offsets": [0, 3, 3], "seq_slots": [7, 0]}, "sequence 1 has tokens 3 to 3"),
        ({"seq_offsets": [0, 9, 3], "seq_slots": [7, 0]}, "sequence 0 has tokens 0 to 9"),
        ({"seq_slots": [8]}, "sequence slot is 8, outside 0 to 7"),
        ({"logits_rows": [0, 3]}, "logits_rows\\[1\\] is 3"),
        ({"logits_rows": [1, 1]}, "logits_rows\\[1\\] is 1"),
        ({"copies": [[0, 400]]}, "copied block is 400"),
        ({"copies": [[-1, 0]]}, "copied block is -1"),
    ],
)
def test_a_bad_batch_is_refused(change: dict[str, list[int]], message: str) -> None:
    driver = Driver(tiny.checkpoint(tiny.config()))
    good = driver.batch([(driver.start([1, 2, 3]), 3)])
    arrays = {name: np.array(values, np.int32) for name, values in change.items()}
    with pytest.raises(ValueError, match=message):
        driver.executor.execute(dataclasses.replace(good, **arrays))
    driver.executor.execute(good)


def test_bad_block_tables_are_refused() -> None:
    driver = Driver(tiny.checkpoint(tiny.config()))
    batch = driver.batch([(driver.start([1, 2, 3]), 3)])
    batch.block_tables = batch.block_tables.copy()
    for block in (-1, 400):
        batch.block_tables[0, batch.seq_slots[0], 0] = block
        with pytest.raises(ValueError, match=f"block 0 of sequence 0 in group 0 is {block}"):
            driver.executor.execute(batch)
    batch.block_tables = driver.tables[:, :4].copy()
    with pytest.raises(ValueError, match="block_tables"):
        driver.executor.execute(batch)


def test_two_sequences_in_one_slot_are_refused() -> None:
    driver = Driver(tiny.checkpoint(tiny.config()))
    first, second = driver.start([1, 2]), driver.start([3])
    batch = driver.batch([(first, 2), (second, 1)])
    batch.seq_slots[1] = batch.seq_slots[0]
    batch.positions[2] = 5
    with pytest.raises(ValueError, match="is in the batch twice"):
        driver.executor.execute(batch)


def test_settings_are_refused_by_name() -> None:
    checkpoint = tiny.checkpoint(tiny.config())
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'; this build has"):
        Driver(checkpoint, isa="sse9")
    with pytest.raises(ValueError, match="kv_cache_dtype 'int3'"):
        Driver(checkpoint, kv_dtype="int3")
    with pytest.raises(ValueError, match="block_size is 24, not a multiple of 16"):
        Driver(checkpoint, block_size=24)
    with pytest.raises(ValueError, match="logits_slice is 10, not a multiple of 8"):
        Driver(checkpoint, logits_slice=10)
    with pytest.raises(ValueError, match="num_blocks is 2000000000, outside 1 to"):
        Driver(checkpoint, block_size=4096, num_blocks=2_000_000_000)
    for threads in (0, 5000):
        with pytest.raises(ValueError, match=f"threads is {threads}, outside"):
            Driver(checkpoint, threads=threads)


def test_the_isa_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny.checkpoint(tiny.config())
    monkeypatch.setenv("OCTAVO_ISA", "generic")
    assert Driver(checkpoint).executor.capabilities.tier == "generic"
    monkeypatch.setenv("OCTAVO_ISA", "mmx")
    with pytest.raises(ValueError, match="unknown instruction set 'mmx'"):
        Driver(checkpoint)


def test_weights_that_do_not_fit_are_refused() -> None:
    config = tiny.config()
    layout = KvLayout.of(config)

    def load(checkpoint: object) -> None:
        NativeExecutor(
            checkpoint,  # type: ignore[arg-type]
            families.program(config),
            layout,
            num_blocks=4,
            max_tokens=4,
            max_logits_rows=4,
            max_seqs=1,
            max_blocks_per_seq=4,
            threads=1,
        )

    good = tiny.checkpoint(config)
    missing = {r: w for r, w in good.weights.items() if r != "layers.1.ffn_up"}
    with pytest.raises(CheckpointError, match=r"no weight layers\.1\.ffn_up"):
        load(dataclasses.replace(good, weights=missing))
    wrong = good.weights["layers.1.ffn_up"]
    short = wrong._replace(shape=(95, 64), source=wrong.data[: 95 * 64 * 4])
    with pytest.raises(CheckpointError, match=r"has shape \(95, 64\), not \(96, 64\)"):
        load(dataclasses.replace(good, weights=good.weights | {"layers.1.ffn_up": short}))
    cut = wrong._replace(source=wrong.data[:-4])
    with pytest.raises(ValueError, match=r"rows 0 to 96 of 64 .* 24480 bytes .*, not 24576"):
        load(dataclasses.replace(good, weights=good.weights | {"layers.1.ffn_up": cut}))


def test_orders_are_permutations_and_not_the_embedding_s() -> None:
    good = tiny.checkpoint(tiny.config(), WeightFormat.I4)

    def refusal(role: str, order: list[int]) -> str:
        weight = good.weights[role]._replace(order=np.array(order, np.int32))
        with pytest.raises(CheckpointError) as refused:
            Driver(dataclasses.replace(good, weights=good.weights | {role: weight}))
        return str(refused.value)

    assert "token_embd is an embedding" in refusal("token_embd", list(range(64)))
    not_one = "the order of layers.0.attn_q's inputs is not one of 64"
    assert not_one in refusal("layers.0.attn_q", [0] * 64)
    assert not_one in refusal("layers.0.attn_q", list(range(63)))
    assert not_one in refusal("layers.0.attn_q", [-1, *range(1, 64)])


def test_zeros_and_groups_that_the_kernels_cannot_have() -> None:
    good = tiny.checkpoint(tiny.config(), WeightFormat.I4)
    weight = good.weights["layers.1.ffn_up"]
    data = weight.data.copy()
    data[3 * 37 + 4] = 17  # a scale, a zero and 64 numbers a row
    for changed, message in [
        (
            weight._replace(source=data),
            f"tensor '{weight.name}', from row 0 on: zero of a group is 17, outside 0 to 16",
        ),
        (weight._replace(group=48), "groups of 48 inputs are not whole blocks of 32"),
        (weight._replace(group=32), "bytes of data"),
    ]:
        with pytest.raises(ValueError, match=message):
            Driver(dataclasses.replace(good, weights=good.weights | {weight.name: changed}))


def test_what_has_been_read_is_given_back_as_loading_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fewest rows that may be packed at once, to the same bits."""
    tokens = tokens_of(tiny.config(), 40)
    for format in (WeightFormat.Q4_0, WeightFormat.I4, WeightFormat.BF16):
        checkpoint = tiny.checkpoint(tiny.config(), format)
        expected = Driver(checkpoint).run(tokens)
        released: list[None] = []
        with monkeypatch.context() as patched:
            patched.setattr("octavo.executor.native.executor._READ_BYTES", 1)
            piecewise = dataclasses.replace(checkpoint, release=partial(released.append, None))
            assert np.array_equal(Driver(piecewise).run(tokens), expected)
        matrices = [w.shape for w in checkpoint.weights.values() if len(w.shape) == 2]
        assert len(released) == sum(-(-rows // 16) for rows, _ in matrices)


def test_rows_that_cannot_be_packed_are_refused() -> None:
    """The model's first matrix is the embeddings: 97 rows of 64 numbers."""
    config = tiny.config(vocab_size=97)
    runtime = Driver(tiny.checkpoint(config, WeightFormat.F32)).executor._open
    with pytest.raises(ValueError, match="exceed their arena"):
        runtime.add_matrix(WeightFormat.F32, 97, 64, 0)
    row = np.zeros(64 * 4, np.uint8)
    for first, last, rows, message in (
        (0, 97, 96, r"rows 0 to 97 of 64 numbers have 24576 bytes of data, not 24832"),
        (0, 17, 17, r"rows 0 to 17 are not whole blocks of 16"),
        (8, 97, 89, r"rows 8 to 97 are not whole blocks of 16"),
        (112, 128, 16, r"first row is 112"),
        (96, 112, 16, r"last row is 112"),
        (16, 16, 0, r"last row is 16"),
    ):
        with pytest.raises(ValueError, match=message):
            runtime.pack_rows(0, first, last, np.tile(row, rows))
    with pytest.raises(ValueError, match="matrix is 1000"):
        runtime.pack_rows(1000, 0, 97, np.tile(row, 97))


def test_a_closed_executor_says_so() -> None:
    driver = Driver(tiny.checkpoint(tiny.config()))
    batch = driver.batch([(driver.start([1, 2, 3]), 3)])
    logits = driver.executor.execute(batch).logits
    before = logits.copy()
    driver.executor.close()
    assert np.array_equal(logits, before)
    with pytest.raises(RuntimeError, match="closed"):
        driver.executor.execute(batch)


@pytest.mark.parametrize("kv_dtype", KvDtype.served())
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 16), (18, 32), (20, 48), (66, 16)])
def test_bytes_are_as_planned(head_dim: int, block_size: int, kv_dtype: KvDtype) -> None:
    for config in tiny.config("gemma3", head_dim=head_dim), tiny.mixed():
        driver = Driver(tiny.checkpoint(config), kv_dtype=kv_dtype, block_size=block_size)
        assert driver.executor._open.arena_bytes == 400 * driver.layout.block_bytes


def test_profile_times_every_region() -> None:
    driver = Driver(tiny.checkpoint(tiny.config()), threads=2)
    driver.executor.start_profile()
    driver.run(tokens_of(tiny.config(), 20))
    profile, meetings, last = driver.executor.profile()
    names = {region.name for region in profile}
    assert {"attn_q+attn_k+attn_v", "attention", "ffn_gate+ffn_up", "logits"} <= names
    assert all(region.seconds > 0 for region in profile)
    # Every op of the program in one region, once, and in order.
    ops = families.program(tiny.config()).ops
    assert [op for region in profile for op in region.ops] == list(range(len(ops)))
    assert 0 < meetings <= len(profile)
    assert 0 < last <= time.perf_counter()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_out_rows_from_where_the_cost_model_says(threads: int) -> None:
    """They then meet much less often."""
    driver = Driver(tiny.checkpoint(tiny.config()), threads=threads)
    meetings = []
    for more in (0, 1):
        driver.run(tokens_of(tiny.config(), CHUNK_ROWS * threads + more))
        meetings.append(driver.executor.profile().num_meetings)
    assert meetings[1] < 0.6 * meetings[0]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_its_cost_model_has_the_weights_it_holds(family: str) -> None:
    for format in (WeightFormat.Q4_0, WeightFormat.Q8_0, WeightFormat.BF16, WeightFormat.I3):
        driver = Driver(tiny.checkpoint(tiny.config(family), format))
        assert driver.executor.costs.weight_bytes == driver.executor.weight_bytes


def test_what_multiplies_a_format() -> None:
    assert arithmetic_of(WeightFormat.Q4_K, "generic") is Arithmetic.INT8
    assert arithmetic_of(WeightFormat.BF16, "avx512_bf16") is Arithmetic.BF16
    assert arithmetic_of(WeightFormat.BF16, "avx512") is Arithmetic.FP32
    assert arithmetic_of(WeightFormat.F16, "avx512_bf16") is Arithmetic.FP32


def test_more_threads_than_cpus_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tiny.checkpoint(tiny.config())
    monkeypatch.setattr(
        "octavo.executor.native.executor.usable_cpus", lambda: (1, "CPU quota of 0.5")
    )
    Driver(checkpoint, threads=1)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    Driver(checkpoint, threads=3)
    assert "3 threads, but 1 can run at once (CPU quota of 0.5)" in caplog.text
