"""The executor in numpy computes from its paged cache what the native one does."""

from typing import Any

import numpy as np
import pytest

from executor import tiny
from executor.driving import Driver
from octavo.executor.base import Unsupported
from octavo.executor.reference.reference import ReferenceExecutor
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.kv_cache.layout import KvLayout
from octavo.models.config import Layer, Rope
from octavo.models.families import program
from octavo.models.subset import keep_layers

UNROTATED = (Layer(Rope(1e4, 16, interleaved=False, scale=0.0)),) * 3
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {"attention_softcap": 5.0},
    "qwen3moe": {},
    "qwen3": {"layers": UNROTATED},
    "olmo2": {"layers": tiny.mixed("olmo2").layers},
}


class ReferenceDriver(Driver):
    """The sequences and block tables of a `Driver`, through the reference executor."""

    def __init__(self, checkpoint: Any, **settings: Any) -> None:
        super().__init__(checkpoint, **settings)
        self.executor = ReferenceExecutor(
            checkpoint,
            program(checkpoint.config),
            self.layout,
            num_blocks=self.executor.num_blocks,
            max_tokens=self.MAX_TOKENS,
            max_logits_rows=self.MAX_TOKENS,
            max_seqs=self.MAX_SEQS,
            max_blocks_per_seq=self.MAX_BLOCKS,
        )


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", SHAPES)
def test_chunks_of_two_sequences_have_the_native_logits(family: str, kv_dtype: str) -> None:
    checkpoint = tiny.checkpoint(tiny.config(family, **SHAPES[family]))
    texts = [np.random.default_rng(seed).integers(0, 70, 50 + seed).tolist() for seed in (1, 2)]
    found = []
    for kind in (Driver, ReferenceDriver):
        driver = kind(checkpoint, kv_dtype=kv_dtype)
        sequences = [driver.start(text) for text in texts]
        for counts in ((20, 7), (1, 30), (29, 15)):
            driver.step(list(zip(sequences, counts, strict=True)))
        found.append([np.array(sequence.logits) for sequence in sequences])
    for native, reference in zip(*found, strict=True):
        # Kernels of bf16 round queries, too; and a token near a choice may go to another expert.
        assert np.median(np.abs(reference - native)) < (0.02 if kv_dtype == "bf16" else 0.002)
        assert np.abs(reference - native).mean() < 0.05


def test_blocks_leave_and_come_back() -> None:
    driver = ReferenceDriver(tiny.checkpoint(tiny.config("gemma3")))
    text = list(range(1, 40))
    sequence = driver.start(text)
    driver.step([(sequence, 30)])
    blocks = np.unique(driver.tables[driver.tables >= 0]).astype(np.int32)
    kept = driver.executor.export_blocks(blocks)
    assert kept.shape == (len(blocks), driver.layout.block_bytes)
    batch = driver.batch([(sequence, 9)])
    before = driver.executor.execute(batch).logits
    driver.executor.import_blocks(blocks, np.zeros_like(kept))
    assert not np.array_equal(driver.executor.execute(batch).logits, before)
    driver.executor.import_blocks(blocks, kept)
    np.testing.assert_array_equal(driver.executor.execute(batch).logits, before)


@pytest.mark.parametrize("kind", [Driver, ReferenceDriver])
def test_nothing_of_others_is_left_at_the_end_of_a_block(kind: type[Driver]) -> None:
    """Blocks full of something else come to groups that take less of them."""
    driver = kind(tiny.checkpoint(tiny.mixed()))
    blocks = np.arange(driver.executor.num_blocks, dtype=np.int32)
    other = np.full((len(blocks), driver.layout.block_bytes), 60, np.uint8)
    driver.executor.import_blocks(blocks, other)
    sequence = driver.start(list(range(1, 60)))
    for count in (5, 30, 24):
        driver.step([(sequence, count)])
    left = 0
    for group, table in zip(driver.layout.groups, driver.tables[:, sequence.slot], strict=True):
        found = driver.executor.export_blocks(table[table >= 0])
        rest = found[:, driver.layout.group_bytes(group) :]
        assert not rest.any()
        left += rest.size
    assert left


def test_an_added_program_computes_on_the_same_cache() -> None:
    checkpoint = tiny.checkpoint(tiny.config())
    compute = program(checkpoint.config)
    found = []
    for driver in (Driver(checkpoint), ReferenceDriver(checkpoint)):
        number = driver.executor.add_program(keep_layers(compute, [0, 2]))
        batch = driver.batch([(driver.start([5, 6, 7, 8]), 4)])
        logits = driver.executor.execute(batch, number).logits
        found.append(logits.copy())
        driver.executor.drop_program()
    np.testing.assert_allclose(found[1], found[0], atol=0.2)


def test_what_an_executor_cannot_do_is_named() -> None:
    config = tiny.config()
    executor = SimulatedExecutor(program(config), KvLayout.of(config), num_blocks=4)
    with pytest.raises(Unsupported, match="the simulated executor cannot add programs"):
        executor.add_program(program(config))
    with pytest.raises(Unsupported, match="the simulated executor cannot measure the machine"):
        executor.measure_limits()
    with pytest.raises(Unsupported, match="cannot run a second model"):
        executor.companion(
            tiny.checkpoint(config), program(config), executor.layout,
            num_blocks=1, max_tokens=1, max_logits_rows=1, max_seqs=1, max_blocks_per_seq=1,
        )  # fmt: skip


def test_chained_copies_are_made_in_order() -> None:
    driver = ReferenceDriver(tiny.checkpoint(tiny.config()))
    executor, batch = driver.executor, driver.batch([(driver.start([1]), 1)])
    free = [block for block in range(executor.num_blocks) if block not in batch.block_tables]
    blocks = np.array(free[:3], np.int32)
    data = executor.export_blocks(blocks)
    data[:] = np.arange(1, 4, dtype=np.uint8)[:, None]
    executor.import_blocks(blocks, data)
    batch.copies = np.array([blocks[:2], blocks[1:]], np.int32)
    executor.execute(batch)
    assert [int(each[0]) for each in executor.export_blocks(blocks)] == [1] * 3
