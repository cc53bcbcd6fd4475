"""How layers share the pool: groups of equal length, one block size."""

from dataclasses import replace
from itertools import product
from math import gcd
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvDtype, KvGroup, KvLayout, group_lengths
from octavo.models.config import Activation, Layer, ModelConfig, Rope
from octavo.tools.plan.presets import PRESETS
from octavo.tools.plan.subject import Subject


def model(windows: list[int | None], kv_heads: int = 3, head_dim: int = 64) -> ModelConfig:
    rope = Rope(theta=10000.0, dim=head_dim, interleaved=True)
    return ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=kv_heads * head_dim,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=128,
        context_length=2048,
        norm_eps=1e-5,
        activation=Activation.SILU,
        attention_scale=head_dim**-0.5,
        tied_embeddings=True,
        layers=tuple(Layer(rope, window) for window in windows),
    )


def test_one_group_when_all_layers_are_alike() -> None:
    layout = KvLayout.of(model([None] * 30))
    assert len(layout.groups) == 1
    assert layout.bytes_per_token == 23_040  # SmolLM2-135M in 16 bits
    assert layout.block_bytes == 16 * 23_040


def test_gemma_layers_make_six_groups_of_three() -> None:
    layout = KvLayout.of(model([512, 512, 512, 512, 512, None] * 3, kv_heads=1, head_dim=256))
    assert [group.window for group in layout.groups] == [None, 512, 512, 512, 512, 512]
    assert {len(group.layers) for group in layout.groups} == {3}
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(18))
    assert layout.place(5) == (0, 0)
    with pytest.raises(KeyError):
        layout.place(18)


OTHERS = {"lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}  # recurrent
OTHERS |= {"granitemoehybrid", "gemma4_text"}  # and with heads of two widths
LIKE_HEADS = [name for name, file in PRESETS.items() if file["model_type"] not in OTHERS]


@pytest.mark.parametrize("name", LIKE_HEADS)
def test_heads_of_one_width_make_the_fewest_equal_groups(name: str) -> None:
    config = Subject.find(name).program.config
    latent = config.layers[0].latent
    windows: dict[int | None, list[int]] = {}
    for index, layer in enumerate(config.layers):
        windows.setdefault(layer.window, []).append(index)
    size = gcd(*map(len, windows.values()))
    heads = config.num_kv_heads, config.head_dim
    groups = tuple(
        KvGroup(tuple(layers[start : start + size]), window, *heads, latent)
        for window, layers in sorted(windows.items(), key=lambda item: item[0] or 0)
        for start in range(0, len(layers), size)
    )
    for dtype in KvDtype:
        layout = KvLayout.of(config, dtype=dtype)
        assert layout.groups == groups
        token = config.num_kv_heads * dtype.token_bytes(config.head_dim, latent)
        assert layout.block_bytes == size * 16 * token
        assert layout.bytes_per_token == len(config.layers) * token


def test_layers_of_other_heads_share_the_pool() -> None:
    """Four layers as wide as two: half as many of them to a group, and nothing is left over."""
    narrow = model([512] * 20 + [None] * 4, kv_heads=1, head_dim=256)
    wide = [replace(layer, head_dim=512) for layer in narrow.layers[20:]]
    layout = KvLayout.of(replace(narrow, layers=(*narrow.layers[:20], *wide)))
    assert [(len(group.layers), group.head_dim) for group in layout.groups] == [
        *((2, 512), (2, 512)),
        *((4, 256),) * 5,
    ]
    assert {layout.group_bytes(group) for group in layout.groups} == {layout.block_bytes}


def test_what_is_left_over_is_left_where_few_blocks_are_kept() -> None:
    """Windows keep 65 blocks at most and the global layers all 8,192: these fill theirs."""
    narrow = model([1024] * 25 + [None] * 5, kv_heads=8, head_dim=256)
    wide = [replace(layer, num_kv_heads=2, head_dim=512) for layer in narrow.layers[25:]]
    config = replace(narrow, layers=(*narrow.layers[:25], *wide), context_length=1 << 17)
    layout = KvLayout.of(config)
    assert [len(group.layers) for group in layout.groups] == [5, *[1] * 25]
    assert layout.block_bytes == 16 * 5 * 2 * 4 * 512
    kept = 16 * (8192 * 5 * 2 * 4 * 512 + 65 * 25 * 8 * 4 * 256)
    assert peak_blocks(layout, 1 << 17) * layout.block_bytes < 1.12 * kept


def test_layers_without_a_cache_are_in_no_group() -> None:
    own = model([512, None] * 3)
    layers = (*own.layers, replace(own.layers[0], shares=4), replace(own.layers[1], shares=5))
    layout = KvLayout.of(replace(own, layers=layers))
    assert layout == KvLayout.of(own)
    assert (layout.place(4), layout.place(5)) == ((1, 2), (0, 2))
    for layer in (6, 7):
        with pytest.raises(KeyError):
            layout.place(layer)


@given(
    kinds=st.lists(
        st.tuples(
            st.none() | st.integers(1, 600), st.sampled_from([1, 2, 4]), st.integers(1, 40),
            st.integers(1, 30),
        ),
        min_size=1, max_size=4,
    ),
    shared=st.integers(0, 5),
    block_size=st.sampled_from([16, 48]),
    dtype=st.sampled_from(KvDtype),
    order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_every_layer_has_a_place_in_a_block(
    kinds: list[tuple[int | None, int, int, int]],
    shared: int,
    block_size: int,
    dtype: KvDtype,
    order: Random,
) -> None:
    rope = Rope(10000.0, 2, False)
    layers = [
        Layer(rope, window, num_kv_heads=heads, head_dim=2 * half)
        for window, heads, half, count in kinds
        for _ in range(count)
    ]
    order.shuffle(layers)
    layers += [replace(layers[of], shares=of) for of in range(min(shared, len(layers)))]
    config = replace(model([None], kv_heads=4), layers=tuple(layers))
    layout = KvLayout.of(config, block_size, dtype)
    placed = [layer for group in layout.groups for layer in group.layers]
    assert sorted(placed) == [i for i, layer in enumerate(layers) if layer.shares is None]
    for group in layout.groups:
        assert list(group.layers) == sorted(group.layers)
        for index, layer in enumerate(group.layers):
            assert layout.groups[layout.place(layer)[0]] is group
            assert layout.place(layer)[1] == index
            kind = layers[layer].window, *config.heads_of(layers[layer])
            assert kind == (group.window, group.kv_heads, group.head_dim)
        of_layer = block_size * group.kv_heads * dtype.token_bytes(group.head_dim)
        assert layout.group_bytes(group) == len(group.layers) * of_layer <= layout.block_bytes
    assert max(map(layout.group_bytes, layout.groups)) == layout.block_bytes
    used = sum(map(layout.group_bytes, layout.groups))
    assert used == layout.bytes_per_token * block_size
    # A layer to each group takes no less than what was chosen.
    one_each = replace(
        layout,
        groups=tuple(
            replace(group, layers=(layer,)) for group in layout.groups for layer in group.layers
        ),
    )
    assert held_bytes(layout, config) <= held_bytes(one_each, config)


def held_bytes(layout: KvLayout, config: ModelConfig) -> int:
    return peak_blocks(layout, config.context_length) * layout.block_bytes


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(1, 100)),
        min_size=1,
        max_size=3,
    ),
)
def test_no_other_lengths_take_fewer_bytes(kinds: list[tuple[int, int, int]]) -> None:
    def rank(lengths: tuple[int, ...]) -> tuple[int, int]:
        block = max(length * size for length, (_, size, _) in zip(lengths, kinds, strict=True))
        groups = [count // length for length, (count, *_) in zip(lengths, kinds, strict=True)]
        held = sum(each * blocks for each, (*_, blocks) in zip(groups, kinds, strict=True))
        return block * held, sum(groups)

    choices = [[each for each in range(1, count + 1) if count % each == 0] for count, *_ in kinds]
    assert rank(tuple(group_lengths(kinds))) == min(map(rank, product(*choices)))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_codes_hold_more_tokens_in_the_same_memory(head_dim: int) -> None:
    def block(dtype: KvDtype) -> int:
        return KvLayout.of(model([None] * 4, head_dim=head_dim), dtype=dtype).block_bytes

    assert block(KvDtype.BF16) == block(KvDtype.FP16) >= 1.9 * block(KvDtype.INT8)
    assert block(KvDtype.BF16) >= 3.5 * block(KvDtype.INT4)


def test_names_of_dtypes() -> None:
    assert KvDtype.of("auto") is KvDtype.of("bfloat16") is KvDtype.of("bf16") is KvDtype.BF16
    assert KvDtype.of("float16") is KvDtype.FP16
    assert KvDtype.of("fp8") is KvDtype.of("fp8_e4m3") is KvDtype.of("fp8_e5m2") is KvDtype.FP8
    with pytest.raises(ValueError, match="CPUs have no fp8 units"):
        KvDtype.FP8.check_served()
    for dtype in KvDtype.served():
        dtype.check_served()
    for name in ("fp9", "int", ""):
        with pytest.raises(ValueError, match=r"not supported; auto, bf16, fp16, int8, int4 are"):
            KvDtype.of(name)
