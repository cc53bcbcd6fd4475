"""The exchange form of blocks: every number keeps its place, for every number format."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import tiny
from executor.driving import Driver
from octavo.executor.reference import evaluate
from octavo.executor.reference.reference import ReferenceExecutor
from octavo.kv_cache.exchange_form import Bytes, exchange_bytes, from_exchange, to_exchange
from octavo.kv_cache.layout import KvDtype, KvGroup, KvLayout
from octavo.models import families
from octavo.models.program import RopeAndStoreKv

SERVED = KvDtype.served()
TILE = 16


def layouts() -> st.SearchStrategy[KvLayout]:
    return st.builds(
        KvLayout,
        st.lists(
            st.builds(
                lambda layers, heads, dim: KvGroup(tuple(range(layers)), None, heads, 2 * dim),
                st.integers(1, 3), st.integers(1, 3), st.integers(1, 20),
            ),
            min_size=1, max_size=2,
        ).map(tuple),
        st.integers(1, 3).map(lambda tiles: TILE * tiles),
        st.sampled_from(SERVED),
    )  # fmt: skip


def packed_slowly(layout: KvLayout, group: KvGroup, data: Bytes) -> Bytes:
    """One block, number by number, as kernels/kernels.h describes it."""
    dim, heads, size = group.head_dim, group.kv_heads, layout.block_size
    halves = layout.dtype in (KvDtype.BF16, KvDtype.FP16)
    scales = {KvDtype.INT8: 1, KvDtype.INT4: 2}.get(layout.dtype, 0)
    code_bytes = {KvDtype.INT8: dim, KvDtype.INT4: dim // 2}.get(layout.dtype, 2 * dim)
    shape = len(group.layers), 2, size, heads
    split = int(np.prod(shape)) * code_bytes
    codes = data[:split].reshape(*shape, code_bytes)
    factors = data[split:].view("<u2").reshape(*shape, scales)
    packed: list[Bytes] = []
    for layer in range(len(group.layers)):
        for head in range(heads):
            for kind in range(2):
                for tile in range(size // TILE):
                    rows = codes[layer, kind, tile * TILE : (tile + 1) * TILE, head]
                    if layout.dtype is KvDtype.INT4:
                        numbers = np.stack([rows & 15, rows >> 4], -1).reshape(TILE, dim)
                        half = -(-dim // 8) * 4 if kind == 0 else dim // 2
                        wide = np.zeros((TILE, 2 * half), np.uint8)
                        wide[:, :dim] = numbers
                        rows = (wide[:, :half] | wide[:, half:] << 4).astype(np.uint8)
                    elif kind == 0:
                        rows = np.pad(rows, ((0, 0), (0, -code_bytes % 4)))
                    if kind == 0:  # words of one token's bytes, a token after another
                        words = [rows[:, at : at + 4].ravel() for at in range(0, rows.shape[1], 4)]
                    else:  # words of several tokens' numbers
                        unit, tokens = (2, 2) if halves else (1, 4)
                        words = [
                            rows[first : first + tokens, at : at + unit].ravel()
                            for first in range(0, TILE, tokens)
                            for at in range(0, rows.shape[1], unit)
                        ]
                    packed += words
            for tile in range(size // TILE):
                for kind in range(2):
                    for which in range(scales):
                        column = factors[layer, kind, tile * TILE : (tile + 1) * TILE, head, which]
                        packed.append(np.ascontiguousarray(column).view(np.uint8))
    padding = np.zeros(layout.block_bytes - layout.group_bytes(group), np.uint8)
    return np.concatenate([*packed, padding])


@given(layouts(), st.integers(0, 2**32 - 1))
def test_numbers_keep_their_places(layout: KvLayout, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for index, group in enumerate(layout.groups):
        data = rng.integers(0, 256, (2, exchange_bytes(layout, index)), np.uint8)
        packed = from_exchange(layout, index, data)
        assert packed.shape == (2, layout.block_bytes)
        assert (packed[1] == packed_slowly(layout, group, data[1])).all()
        assert (to_exchange(layout, index, packed) == data).all()


@pytest.mark.parametrize("dtype", SERVED)
def test_the_form_has_no_padding(dtype: KvDtype) -> None:
    layout = KvLayout((KvGroup((0, 1), None, 3, 18), KvGroup((2,), None, 8, 32)), 32, dtype)
    wanted = {KvDtype.INT8: 18 + 2, KvDtype.INT4: 9 + 4}.get(dtype, 36)
    assert exchange_bytes(layout, 0) == 2 * 2 * 32 * 3 * wanted


def dequantized(layout: KvLayout, data: Bytes) -> npt.NDArray[np.float32]:
    """Keys and values [layers, 2, tokens, heads, head_dim] of one block of the exchange form."""
    (group,) = layout.groups
    dim = group.head_dim
    shape = len(group.layers), 2, layout.block_size, group.kv_heads
    scales = {KvDtype.INT8: 1, KvDtype.INT4: 2}.get(layout.dtype, 0)
    split = len(data) - 2 * scales * int(np.prod(shape))
    codes = data[:split].reshape(*shape, -1)
    factors = bf16(data[split:].view("<u2")).reshape(*shape, scales)
    match layout.dtype:
        case KvDtype.BF16:
            return bf16(codes.view("<u2"))
        case KvDtype.FP16:
            return codes.view("<f2").astype(np.float32)
        case KvDtype.INT8:
            rows = (codes.astype(np.float32) - 128) * factors
        case _:
            pairs = np.stack([codes & 15, codes >> 4], -1).reshape(*shape, dim)
            rows = pairs * factors[..., :1] + factors[..., 1:]
    size = dim & -dim
    signs = np.array(
        [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    )
    groups = rows.reshape(*shape, -1, size) @ signs / np.sqrt(size)
    return groups.reshape(*shape, dim).astype(np.float32)


def bf16(codes: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    wide = codes.astype(np.uint32) << 16
    return wide.view(np.float32)


@pytest.mark.parametrize("dtype", SERVED)
def test_native_blocks_have_the_keys_and_values_of_the_reference_executor(dtype: KvDtype) -> None:
    config = tiny.config()
    checkpoint = tiny.checkpoint(config)
    driver = Driver(checkpoint, kv_dtype=dtype)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 32).tolist()
    sequence = driver.start(tokens)
    driver.step([(sequence, 32)])
    layout = driver.layout
    packed = driver.executor.export_blocks(driver.tables[0, sequence.slot, :2].copy())
    exchanged = to_exchange(layout, 0, packed)
    assert (from_exchange(layout, 0, exchanged) == packed).all()
    found = np.concatenate([dequantized(layout, block) for block in exchanged], 2)
    weights = {role: tiny.dequantize(weight) for role, weight in checkpoint.weights.items()}
    values: evaluate.Values = {}
    allowed = {KvDtype.BF16: 0.02, KvDtype.FP16: 0.01, KvDtype.INT8: 0.03, KvDtype.INT4: 0.3}
    ops = families.program(config).ops
    store = next(op for op in ops if isinstance(op, RopeAndStoreKv))
    first = ops[: ops.index(store) + 1]
    evaluate.run(first, config, weights, values, np.array([tokens]))
    for kind, name in enumerate((store.k, store.v)):
        wanted = values[name][0].reshape(32, store.kv_heads, store.head_dim)
        assert np.abs(found[store.layer, kind] - wanted).max() < allowed[dtype] * wanted.std()


@pytest.mark.parametrize("dtype", [KvDtype.BF16, KvDtype.FP16])
def test_the_reference_executor_holds_the_exchange_form(dtype: KvDtype) -> None:
    """So its blocks and the native executor's are exchanged without loss."""
    config = tiny.config()
    checkpoint = tiny.checkpoint(config)
    driver = Driver(checkpoint, kv_dtype=dtype)
    layout = driver.layout
    sizes = {"num_blocks": 400, "max_tokens": 640, "max_logits_rows": 640}
    reference = ReferenceExecutor(checkpoint, families.program(config), layout, **sizes)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 40).tolist()
    sequence = driver.start(tokens)
    driver.step([(sequence, 32)])
    blocks = driver.tables[0, sequence.slot, :2].copy()
    exchanged = to_exchange(layout, 0, driver.executor.export_blocks(blocks))
    reference.import_blocks(blocks, exchanged)
    result = reference.execute(driver.batch([(sequence, 8)]))
    driver.step([(sequence, 8)])
    assert result.logits is not None
    expected = np.array(sequence.logits[-8:])
    assert np.abs(result.logits - expected).max() < 0.05 * expected.std()
    assert (reference.export_blocks(blocks) == exchanged).all()
