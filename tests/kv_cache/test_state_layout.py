"""How the state of recurrent layers lies in blocks of the pool."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kv_cache.exchange_form import state_arrays, state_pages
from octavo.kv_cache.layout import KvLayout
from octavo.kv_cache.state_batch import whole
from octavo.kv_cache.state_layout import StateLayout
from octavo.models.config import UNROTATED, Activation, Layer, ModelConfig, Rope
from octavo.models.recurrence_shape import DeltaShape, MambaShape, RecurrenceShape, ShortConvShape


def model(recurrences: list[RecurrenceShape | None], head_dim: int = 64) -> ModelConfig:
    """Return a model with attention of 8 KV heads in the layers that have no recurrence."""
    rope = Rope(theta=10000.0, dim=head_dim, interleaved=False)
    return ModelConfig(
        family="lfm2",
        vocab_size=64,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        intermediate_size=128,
        context_length=2048,
        norm_eps=1e-5,
        activation=Activation.SILU,
        attention_scale=head_dim**-0.5,
        tied_embeddings=True,
        layers=tuple(
            Layer(rope) if each is None else Layer(UNROTATED, recurrence=each)
            for each in recurrences
        ),
    )


def test_a_recurrent_layer_has_no_keys_and_values() -> None:
    conv = ShortConvShape(2048, 3)
    layout = KvLayout.of(model([conv, conv, None, conv, None]))
    assert [group.layers for group in layout.groups] == [(2, 4)]
    assert layout.state is not None
    assert [part.layer for part in layout.state.parts] == [0, 1, 3]
    with pytest.raises(KeyError):
        layout.place(0)
    assert KvLayout.of(model([None, None])).state is None
    assert KvLayout.of(model([None, None])).state_blocks == 0


def test_states_of_published_models() -> None:
    # LFM2-1.2B: ten convolutions, six layers of attention. The state is a part of one block.
    layout = KvLayout.of(model([ShortConvShape(2048, 3)] * 10 + [None] * 6))
    assert layout.state is not None
    assert layout.state_blocks == 1
    assert layout.state.payload_bytes == 10 * 2 * 2048 * 4
    assert layout.block_bytes == 6 * 16 * 8 * 64 * 4
    # Qwen 3.5 9B: 24 delta nets beside eight layers of attention.
    delta = DeltaShape(16, 32, 128, 128, 4, tiled=True)
    config = replace(model([delta] * 24 + [None] * 8, head_dim=256), num_heads=16, num_kv_heads=4)
    layout = KvLayout.of(config)
    assert layout.state is not None
    assert layout.block_bytes == 512 << 10
    assert layout.state.unit_bytes == 8 << 10
    assert layout.state_blocks == 101


def test_a_block_holds_at_least_one_unit() -> None:
    config = model([MambaShape(2, 16, 512, 1, 4), None], head_dim=2)
    layout = KvLayout.of(config)
    assert layout.state is not None
    assert layout.state.unit_bytes == 512 * 16 * 4 == layout.block_bytes
    assert layout.group_bytes(layout.groups[0]) < layout.block_bytes
    assert layout.bytes_per_token == 8 * 2 * 4


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        (ShortConvShape(0, 3), "channels 0, outside 1 to"),
        (ShortConvShape(64, 1), "taps 1, outside 2 to 16"),
        (ShortConvShape(64, 17), "taps 17, outside 2 to 16"),
        (DeltaShape(2, 3, 8, 8, 4, tiled=False), "3 value heads are not a multiple of 2"),
        (MambaShape(3, 8, 8, 2, 4), "3 heads are not a multiple of 2 groups"),
        (MambaShape(1 << 16, 64, 8, 1, 4), "channels, more than"),
        (MambaShape(1 << 8, 1 << 10, 1 << 12, 1, 4), "is larger than"),
    ],
)
def test_odd_shapes_are_refused(shape: RecurrenceShape, fault: str) -> None:
    with pytest.raises(ValueError, match=f"layer 1: .*{fault}"):
        model([None, shape])


def test_recurrent_layers_share_nothing_and_need_attention_beside_them() -> None:
    conv = ShortConvShape(2048, 3)
    with pytest.raises(ValueError, match="no layer has attention"):
        model([conv, conv])
    config = model([conv, None])
    for layers in (
        (replace(config.layers[0], window=8), config.layers[1]),
        (config.layers[1], replace(config.layers[0], shares=0)),
    ):
        with pytest.raises(ValueError, match="recurrent, and has a window or shares a cache"):
            replace(config, layers=layers)
    with pytest.raises(ValueError, match="layer 1: it shares the cache of layer 0, which has none"):
        replace(config, layers=(config.layers[0], replace(config.layers[1], shares=0)))


SHAPES = st.one_of(
    st.builds(ShortConvShape, st.integers(1, 90), st.integers(2, 7)),
    st.builds(
        lambda heads, ratio, key, value, taps, tiled: DeltaShape(
            heads, heads * ratio, key, value, taps, tiled
        ),
        *(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)),
        *(st.integers(2, 7), st.booleans()),
    ),
    st.builds(
        lambda groups, ratio, dim, state, taps: MambaShape(
            groups * ratio, dim, state, groups, taps
        ),
        *(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
        st.integers(2, 7),
    ),
)


@given(
    shapes=st.dictionaries(st.integers(0, 9), SHAPES, min_size=1, max_size=4),
    kv_bytes=st.integers(1, 100_000),
    seed=st.integers(0, 2**32 - 1),
)
def test_pages_hold_every_number_once(
    shapes: dict[int, RecurrenceShape], kv_bytes: int, seed: int
) -> None:
    layout = StateLayout.of(shapes, kv_bytes)
    block_bytes = layout.page_bytes(kv_bytes)
    assert layout.unit_bytes % 64 == block_bytes % 64 == 0
    assert layout.units_per_page * layout.unit_bytes <= block_bytes
    rng = np.random.default_rng(seed)
    arrays = [
        rng.standard_normal((part.heads, part.depth, part.width), np.float32)
        for part in layout.parts
    ]
    assert sum(array.nbytes for array in arrays) == layout.payload_bytes
    pages = state_pages(layout, arrays, block_bytes)
    assert pages.shape == (layout.pages, block_bytes)
    for before, after in zip(arrays, state_arrays(layout, pages), strict=True):
        assert np.array_equal(before, after)
    numbers = pages.view("<f4")
    assert np.count_nonzero(numbers) == sum(map(np.count_nonzero, arrays))  # all else is zero
    for layer, shape in shapes.items():
        inputs, *matrices = layout.parts_of(layer)
        assert (inputs.heads, inputs.depth, inputs.width) == (1, shape.taps - 1, shape.channels)
        assert [(part.heads, part.depth, part.width) for part in matrices] == (
            [] if shape.matrix is None else [shape.matrix]
        )


def test_a_step_over_whole_states() -> None:
    layout = KvLayout.of(model([DeltaShape(1, 2, 64, 64, 4, tiled=False), None], head_dim=2))
    assert layout.state_blocks > 1
    batch = whole(
        layout,
        starts=np.array([0, 7], np.int32),
        seq_offsets=np.array([0, 5, 6], np.int32),
        slots=np.array([3, 1], np.int32),
        first_page=10,
    )
    assert batch is not None
    pages = layout.state_blocks
    assert batch.tables.tolist() == [
        list(range(10 + 3 * pages, 10 + 4 * pages)),
        list(range(10 + pages, 10 + 2 * pages)),
    ]
    assert batch.reads.tolist() == [-1, 1]
    assert batch.stores.tolist() == [[0, 5, 0], [1, 1, 1]]
    assert batch.log.tolist() == [-1] * 6
    none = np.zeros(1, np.int32)
    assert whole(KvLayout.of(model([None])), none, np.arange(2), none, 0) is None
